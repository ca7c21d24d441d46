"""A `tokenizers.Tokenizer` from the vocabulary in a GGUF file's metadata.

Keys and meanings: the GGUF specification (`tokenizer.ggml.*`). The names in `tokenizer.ggml.pre` each stand
for the way the original tokenizer splits text before BPE; llama.cpp's converter writes them, and what each
stands for is taken from the model's own tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from packhorse.core.errors import TokenizerError

# Token types of the GGUF specification.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

# Splits of the models' own tokenizers: single digits or groups of three, letters with or without marks.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = _WORDS + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
QWEN2_SPLIT = _WORDS + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
QWEN35_SPLIT = _WORDS + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Each split works on the pieces of the one before it.
SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (GPT2_SPLIT,),
    "smollm": (r"\p{N}", GPT2_SPLIT),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "qwen2": (QWEN2_SPLIT,),
    "qwen35": (QWEN35_SPLIT,),
    "llama-bpe": (LLAMA3_SPLIT,),
}
ALIASES = {"deepseek-r1-qwen": "qwen2", "llama3": "llama-bpe", "llama-v3": "llama-bpe"}
NFC = ("qwen2", "qwen35")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer a GGUF file describes: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`).

    Raises TokenizerError where the file holds none, one of another kind, or one that contradicts itself.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    types = _list(metadata, "tokenizer.ggml.token_type", int) or [1] * len(tokens)
    vocab = {token: index for index, token in enumerate(tokens)}
    if not tokens or len(types) != len(tokens) or len(vocab) != len(tokens):
        raise TokenizerError(
            f"The GGUF file's vocabulary holds {len(tokens)} tokens, {len(vocab)} of them different, with "
            f"{len(types)} token types.",
            hint="The file was cut short or badly converted: fetch or convert it again.",
        )
    try:
        if model == "gpt2":
            tokenizer = _byte_level(metadata, vocab)
        elif model == "llama":
            tokenizer = _sentencepiece(metadata, vocab, tokens, types)
        else:
            raise TokenizerError(
                f"The GGUF file's tokenizer is of kind {model!r}.",
                hint="Kinds gpt2 (byte-level BPE) and llama (SentencePiece) are read: use the model's "
                "safetensors folder with its tokenizer.json.",
            )
        _add_tokens(tokenizer, tokens, types)
        _add_surroundings(tokenizer, metadata, tokens)
    except TokenizerError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        hint = "Fetch or convert the file again."
        raise TokenizerError(f"The GGUF file's vocabulary makes no tokenizer: {error}", hint=hint) from error
    return tokenizer


def gguf_special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that templates know by name, as text."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}


def _list(metadata: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    values = list(metadata.get(key, ()))
    if not all(isinstance(value, kind) for value in values):
        hint = "Fetch or convert the file again."
        raise TokenizerError(f"{key} in the GGUF file holds other values than {kind.__name__}.", hint=hint)
    return values


def _byte_level(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> Tokenizer:
    written = metadata.get("tokenizer.ggml.pre")
    pre = ALIASES.get(str(written), str(written))
    if pre not in SPLITS:
        raise TokenizerError(
            "The GGUF file does not say how its tokenizer splits text (tokenizer.ggml.pre)."
            if written is None
            else f"The GGUF file's pre-tokenizer is {written!r}.",
            hint=f"{', '.join([*SPLITS, *ALIASES])} are read: use the model's safetensors folder with its "
            "tokenizer.json.",
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "tokenizer.ggml.merges", str)]
    # Llama 3 takes a whole word of the vocabulary before it tries merges.
    tokenizer = Tokenizer(models.BPE(vocab=dict(vocab), merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre in NFC:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], tokens: Sequence[str], types: Sequence[int]
) -> Tokenizer:
    scores = _list(metadata, "tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise TokenizerError(
            f"The GGUF file holds {len(scores)} token scores for {len(tokens)} tokens.",
            hint="Fetch or convert the file again.",
        )
    # SentencePiece joins the neighbours whose joined piece scores best: as merges, every way to cut a
    # piece in two known pieces, best score first.
    merges = [
        (-scores[index], vocab[token[:cut]], vocab[token[cut:]], token[:cut], token[cut:])
        for index, token in enumerate(tokens)
        if types[index] == 1
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    unknown = gguf_special_tokens(metadata).get("unk_token")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=dict(vocab),
            merges=[merge[3:] for merge in sorted(merges)],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control tokens steer the model; user-defined ones (<think>, tool marks) are text, but never cut."""
    kinds = [(token, kind) for token, kind in zip(tokens, types, strict=True) if token]
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in kinds if kind in (UNKNOWN, CONTROL)]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, kind in kinds if kind == USER_DEFINED])


def _add_surroundings(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """What goes around a plain text. Files that do not say: Llama's own tokenizers put bos before it."""
    by_default = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in (
        "llama-bpe",
        "llama3",
        "llama-v3",
    )
    around: list[list[tuple[str, int]]] = []
    for name, default in (("bos", by_default), ("eos", False)):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            around.append([])
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise TokenizerError(
                f"The GGUF file adds a {name} token to every text, and its id is {token_id} of "
                f"{len(tokens)} tokens.",
                hint="Fetch or convert the file again.",
            )
        around.append([(tokens[token_id], token_id)])
    bos, eos = around
    if bos or eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*(t for t, _ in bos), "$A", *(t for t, _ in eos)], special_tokens=[*bos, *eos]
        )
    elif metadata.get("tokenizer.ggml.model") == "gpt2":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
