"""Text to token ids and back, from tokenizer.json or from the vocabulary inside a GGUF file.

Neither torch nor transformers is imported, except for a folder whose tokenizer has only the older file
formats: transformers converts those.
"""

from __future__ import annotations

import codecs
import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import tokenizers

from packhorse.core.errors import TokenizerError
from packhorse.facts.model import ModelFacts
from packhorse.text.gguf_vocab import gguf_special_tokens, tokenizer_from_gguf

OLDER_FILES = ("tokenizer.model", "vocab.json", "tiktoken.model")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Encodes text and decodes ids of one model. Thread-safe: nothing changes after it is made, save a cache.

    special_tokens: the tokens that chat templates know by name (`bos_token`, `eos_token`, ...), as text.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        """Takes a `tokenizers.Tokenizer` over. Raises TokenizerError for a decoder of no known kind."""
        # A tokenizer.json may ask for truncation or padding: that would cut prompts without a word.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._added = backend.get_added_tokens_decoder()
        self._decoder = _TokenBytes(backend)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, facts: ModelFacts) -> Tokenizer:
        """The tokenizer that belongs to a model.

        Raises TokenizerError where there is none, where it cannot be read, or where it was made for another
        vocabulary than the model's.
        """
        if facts.container == "gguf":
            tokenizer = cls(tokenizer_from_gguf(facts.metadata), gguf_special_tokens(facts.metadata))
        else:
            tokenizer = _from_folder(facts.path)
        if tokenizer.vocab_size > facts.vocab_size:
            raise TokenizerError(
                f"The tokenizer's largest id is {tokenizer.vocab_size - 1}, and the model's vocabulary holds "
                f"{facts.vocab_size} tokens.",
                hint="This is the wrong tokenizer for the vocabulary: take the files of the same model.",
                largest_id=tokenizer.vocab_size - 1,
                vocab_size=facts.vocab_size,
            )
        for token_id in facts.eos_ids:
            if tokenizer.vocab_size <= token_id < facts.vocab_size:
                raise TokenizerError(
                    f"The model ends its answers with token {token_id}, and the tokenizer's largest id is "
                    f"{tokenizer.vocab_size - 1}.",
                    hint="This is the wrong tokenizer for the vocabulary: take the files of the same model.",
                    eos_id=token_id,
                    largest_id=tokenizer.vocab_size - 1,
                )
        return tokenizer

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`.

        Special tokens written in the text are recognised either way. `special` adds what the model's own
        tokenizer puts around a text (for some a bos token): leave it on for plain text, and turn it off for
        a rendered chat template, which holds those tokens already.
        """
        # A batch, because `encode` of one text lets no other thread of Python run for seconds.
        ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def encode_with_ends(self, text: str, special: bool = True) -> tuple[list[int], list[int]]:
        """Token ids, and for each the number of characters of `text` it and those before it reach into.

        The second list never falls; the tokens of one character that is split over several all reach
        behind it.
        """
        encoding = self.backend.encode_batch([text], add_special_tokens=special)[0]
        # Added bos and eos tokens have the offsets (0, 0): the running maximum puts eos at the end.
        return encoding.ids, list(accumulate((end for _, end in encoding.offsets), max))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids without a token nothing."""
        text = b"".join(self.token_bytes(i) for i in ids if not (skip_special and self.is_special(i)))
        return self._decoder.without_prefix(text.decode("utf-8", "replace"))

    def is_special(self, token_id: int) -> bool:
        """Whether the token steers the model (turn marks, bos, eos) and is no part of a text."""
        added = self._added.get(token_id)
        return added is not None and added.special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, maybe a part of a character; empty for an id without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            piece = self.backend.id_to_token(token_id)
            found = b"" if piece is None else self._decoder.of(piece)
            self._bytes[token_id] = found
        return found

    def id_to_piece(self, token_id: int) -> str:
        """A token as text for print, `token_bytes` with U+FFFD for what is no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_to_id(self, token: str) -> int | None:
        """Id of a token by its exact name in the vocabulary, None without one."""
        found: int | None = self.backend.token_to_id(token)
        return found


class Detokenizer:
    """Text of generated ids as they come, in constant time a token.

    What `add` returns is final: bytes of a character that is not complete yet are held back. The text
    continues a prompt, so a leading space is part of it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """The characters that became complete with this token, maybe none."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What was held back, as U+FFFD: the text ended inside a character."""
        return self._utf8.decode(b"", final=True)


def text_marks(
    tokenizer: Tokenizer, text: str, ends: Iterable[int], special: bool = True
) -> tuple[list[int], tuple[int, ...]]:
    """Token ids of `text`, and the token positions of the character positions `ends`.

    Where a token straddles such an end, the position before it counts. Positions are in
    (0, len(ids)], ascending, each once.
    """
    ids, reached = tokenizer.encode_with_ends(text, special)
    marks = {bisect_right(reached, end) for end in ends}
    return ids, tuple(sorted(marks - {0}))


class _TokenBytes:
    """Bytes of vocabulary pieces: byte-level BPE spells bytes as letters, SentencePiece writes spaces as ▁
    and bytes as <0xNN>."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        steps = {step["type"]: step for step in [state, *state.get("decoders", [])] if "type" in step}
        self.is_byte_level = "ByteLevel" in steps
        if not self.is_byte_level and not {"Metaspace", "ByteFallback", "Replace"} & set(steps):
            hint = "Byte-level BPE (ByteLevel) and SentencePiece (Metaspace, ByteFallback) are read."
            raise TokenizerError(f"The tokenizer's decoder is {', '.join(steps) or 'missing'}.", hint=hint)
        # A text's first token carries a space that the encoder put there.
        metaspace = steps.get("Metaspace", {})
        self.drops_space = "Strip" in steps or metaspace.get("prepend_scheme", "never") != "never"

    def of(self, piece: str) -> bytes:
        """The bytes of one piece."""
        if self.is_byte_level:
            # Added tokens hold plain text; one with a letter outside the alphabet is not spelled in it.
            if all(letter in LETTER_BYTES for letter in piece):
                return bytes(LETTER_BYTES[letter] for letter in piece)
            return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()

    def without_prefix(self, text: str) -> str:
        """`text` without the space that the encoder puts before a text."""
        return text[1:] if self.drops_space and text.startswith(" ") else text


def _letter_bytes() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 letters stand for their own byte, the other 68
    bytes for the letters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


LETTER_BYTES = _letter_bytes()


def needs_transformers(folder: Path) -> bool:
    """Whether a folder's tokenizer is in older files only, which transformers has to convert."""
    return not (folder / "tokenizer.json").is_file() and any((folder / n).is_file() for n in OLDER_FILES)


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise TokenizerError(
                f"{path} cannot be read as a tokenizer: {error}",
                hint="Fetch the file again: it is incomplete or was changed.",
                path=str(path),
            ) from error
        return Tokenizer(backend, _named_tokens(folder))
    if not needs_transformers(folder):
        hint = f"Copy the model's tokenizer.json into it (or {', '.join(OLDER_FILES)})."
        raise TokenizerError(f"{folder} holds no tokenizer.", hint=hint, path=str(folder))
    return _through_transformers(folder)


def _named_tokens(folder: Path) -> dict[str, str]:
    """Tokens by name from tokenizer_config.json and the older special_tokens_map.json, if they are there."""
    named: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            entries: Any = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(entries, dict):
                raise ValueError("it is no JSON object")
        except ValueError as error:
            raise TokenizerError(f"{path} cannot be read: {error}", hint="Fetch the file again.") from error
        for key in SPECIAL_NAMES:
            value = entries.get(key)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                named[key] = text
    return named


def _through_transformers(folder: Path) -> Tokenizer:
    """Converts older tokenizer files; imports transformers and torch."""
    from transformers import AutoTokenizer

    fix = (
        "Save a tokenizer.json beside it, from any environment that loads it: "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
    )
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what a broken or foreign tokenizer raises is not one family of errors
        raise TokenizerError(f"The tokenizer in {folder} cannot be converted: {error}", hint=fix) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerError(f"The tokenizer in {folder} exists only as Python code.", hint=fix)
    named = {k: str(v) for k, v in loaded.special_tokens_map.items() if k in SPECIAL_NAMES}
    return Tokenizer(backend, named)
