"""Tokenizers from tokenizer.json and from GGUF metadata, against slow twins written from the definitions."""

import json
import random
import subprocess
import sys
import threading
import time
import unicodedata
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import regex
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from packhorse.core.errors import TokenizerError
from packhorse.core.types import LayerKind
from packhorse.facts.model import ModelFacts, RopeFacts
from packhorse.text.tokenizer import LETTER_BYTES, Detokenizer, Tokenizer, text_marks
from smollm2 import smollm2

CORPUS = [
    "The mule carries the flour up to the hut, and the hut's keeper counts the sacks: 12, 24, 1,250.\n",
    "Schnee fällt über Nacht; l'été est fini. It's cold, isn't it? They'll go, we've stayed, I'm here.\n\n",
    "漢字と仮名 नमस्ते दुनिया สวัสดีครับ 😀😀 tabs\tand  double  spaces   \r\n  indented\n\n\n\nend.",
    "def f(x):\n    return x ** 2 + 3.14159  # comment\n",
] * 4
HARD = [
    "",
    " ",
    "  12  345 6789",
    "a1b22c333",
    "It's WE'LL they'VE 'tis",
    "\n\n \n\t x\r\n\r\n",
    "e\u0301 नमस्ते สวัสดี \u0302x",
    "漢字😀👩‍👩‍👧 ½ Ⅷ ٣٤",
    "a<|mark|>b<think>c</think> <|mark|>",
    "$x^2+|y|~<=>`z`",
    "trailing   ",
    "\u00a0\u2003\u200b.",
]
TEXTS = st.text(alphabet=st.sampled_from(list("ab'st ll1234\n\r\t.!éé漢😀Ⅷ\u0301-+$")), max_size=40)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# Splits as the GGUF tools spell them, where they differ from the spelling of our table.
CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TAIL = r"+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TWIN_SPLITS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "qwen2": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]" + TAIL],
    "qwen35": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]" + TAIL],
    "llama-bpe": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]" + TAIL],
}
BYTE_LETTERS = {byte: letter for letter, byte in LETTER_BYTES.items()}


def make_facts(path: Path = Path("model"), **fields) -> ModelFacts:
    values = {
        "family": "llama", "name": "tiny", "path": path, "container": "safetensors", "vocab_size": 4096,
        "hidden_size": 64, "layer_kinds": (LayerKind.FULL,), "moe_layers": (False,), "num_heads": 1,
        "num_kv_heads": 1, "head_dim": 64, "intermediate_size": 64, "rms_eps": 1e-6,
        "rope": RopeFacts(10000.0, 64), "context": 2048, "tied": True,
    }  # fmt: skip
    return ModelFacts(**{**values, **fields})


@pytest.fixture(scope="module")
def trained() -> tokenizers.Tokenizer:
    """A small byte-level BPE tokenizer with a special token and a user's own one."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    # Merges cross digits, marks and punctuation, so that it shows where a text is split first.
    words = pre_tokenizers.Split(tokenizers.Regex(r" ?\S+|\s+"), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|mark|>", "<|bos|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return tokenizer


def metadata_of(tokenizer: tokenizers.Tokenizer, pre: str, **more) -> dict:
    """What a converter would write into a GGUF file for a trained tokenizer."""
    state = json.loads(tokenizer.to_str())
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    special = {added["content"]: added["special"] for added in state["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [{True: 3, False: 4, None: 1}[special.get(t)] for t in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<|bos|>"],
        "tokenizer.ggml.add_bos_token": False,
        **more,
    }


def from_gguf(metadata: dict, **fields) -> Tokenizer:
    return Tokenizer.load(make_facts(container="gguf", metadata=metadata, **fields))


def twin_bpe(metadata: dict, text: str) -> list[int]:
    """Byte-level BPE by its definition: split, spell bytes as letters, merge the best pairs."""
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    added = [t for t, k in zip(ids, metadata["tokenizer.ggml.token_type"], strict=True) if k in (3, 4)]
    pre = metadata["tokenizer.ggml.pre"]
    found: list[int] = []
    for part in regex.split("(" + "|".join(map(regex.escape, added)) + ")", text):
        if part in added:
            found.append(ids[part])
            continue
        if pre.startswith("qwen"):
            part = unicodedata.normalize("NFC", part)
        pieces = [part]
        for split in TWIN_SPLITS[pre]:
            pieces = [p for piece in pieces for p in cut(split, piece)]
        for piece in pieces:
            word = [BYTE_LETTERS[byte] for byte in piece.encode()]
            if pre == "llama-bpe" and "".join(word) in ids:
                word = ["".join(word)]
            while pairs := [pair for pair in pairwise(word) if pair in ranks]:
                best = min(pairs, key=lambda pair: ranks[pair])
                at = next(i for i in range(len(word)) if tuple(word[i : i + 2]) == best)
                word[at : at + 2] = ["".join(best)]
            found += [ids[token] for token in word]
    return found


def cut(pattern: str, text: str) -> list[str]:
    """Matches and what lies between them, each a piece."""
    pieces, end = [], 0
    for match in regex.finditer(pattern, text):
        pieces += [text[end : match.start()], match[0]]
        end = match.end()
    return [piece for piece in [*pieces, text[end:]] if piece]


@pytest.mark.parametrize("pre", sorted(TWIN_SPLITS))
def test_gguf_vocabulary_encodes_as_its_definition_says(trained, pre):
    metadata = metadata_of(trained, pre)
    tokenizer = from_gguf(metadata)
    for text in [*HARD, *CORPUS[:4]]:
        assert tokenizer.encode(text) == twin_bpe(metadata, text), text

    @QUICK
    @given(TEXTS)
    def same(text):
        assert tokenizer.encode(text) == twin_bpe(metadata, text)

    same()


def test_pre_tokenizers_differ_where_they_should(trained):
    """The twin test would prove little if every split gave the same ids."""
    results = {pre: tuple(twin_bpe(metadata_of(trained, pre), "".join(HARD))) for pre in TWIN_SPLITS}
    assert len(set(results.values())) == len(TWIN_SPLITS)


def test_bos_goes_before_plain_text_only_where_the_file_says_so(trained):
    bos = trained.token_to_id("<|bos|>")
    silent = metadata_of(trained, "llama-bpe")
    del silent["tokenizer.ggml.add_bos_token"]
    for metadata, adds in [
        (metadata_of(trained, "qwen2"), False),
        (metadata_of(trained, "qwen2", **{"tokenizer.ggml.add_bos_token": True}), True),
        (silent, True),
        (metadata_of(trained, "llama-bpe"), False),
    ]:
        tokenizer = from_gguf(metadata)
        assert (tokenizer.encode("hut")[0] == bos) is adds
        assert tokenizer.encode("hut", special=False)[0] != bos
    assert tokenizer.special_tokens == {"bos_token": "<|bos|>"}


def test_special_tokens_are_no_text_and_own_tokens_are(trained):
    tokenizer = from_gguf(metadata_of(trained, "qwen2"))
    ids = tokenizer.encode("a<|mark|><think>b")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.decode(ids, skip_special=False) == "a<|mark|><think>b"
    assert [tokenizer.is_special(i) for i in ids] == [False, True, False, False]
    assert tokenizer.token_to_id("<|mark|>") == ids[1]
    assert tokenizer.id_to_piece(ids[2]) == "<think>"
    assert tokenizer.decode([4000]) == ""


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(i) for i in ids), detokenizer.finish()]


@QUICK
@given(st.lists(st.integers(0, 510), max_size=40))
def test_streamed_text_is_the_decoded_text(trained, ids):
    tokenizer = Tokenizer(trained)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == trained.decode(ids)


def test_half_characters_are_held_back(trained):
    tokenizer = Tokenizer(trained)
    smile = [trained.token_to_id(BYTE_LETTERS[byte]) for byte in "😀".encode()]
    assert stream(tokenizer, smile) == ["", "", "", "😀", ""]
    assert stream(tokenizer, smile[:2]) == ["", "", "\ufffd"]
    assert stream(tokenizer, [*smile[:2], trained.token_to_id("a")])[2] == "\ufffda"


def test_streaming_takes_constant_time_a_token(trained):
    """Bytes that never become a character must not be decoded again and again."""
    tokenizer = Tokenizer(trained)
    ids = [trained.token_to_id(BYTE_LETTERS[0x80])] * 200_000
    start = time.perf_counter()
    assert "".join(stream(tokenizer, ids)) == "\ufffd" * len(ids)
    assert time.perf_counter() - start < 3


SP_WORDS = [
    "▁the",
    "▁hut",
    "▁mule",
    "the",
    "hut",
    "th",
    "he",
    "▁t",
    "▁m",
    "▁h",
    "mu",
    "le",
    "ut",
    "ule",
    "▁▁",
]


def sp_metadata(**more) -> dict:
    letters = [*"▁themuldkirtCapofrsanc", "é"]
    letters = list(dict.fromkeys(letters))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *SP_WORDS]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(letters) + len(SP_WORDS))]
    rng = random.Random(4)
    words = rng.sample(range(len(SP_WORDS)), len(SP_WORDS))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * 259
        + [-1e3 - i for i in range(len(letters))]
        + [-float(w) for w in words],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


def twin_sentencepiece(metadata: dict, text: str) -> list[int]:
    """SentencePiece BPE by its definition: join the neighbours whose joined piece scores best."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens)}
    word = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(word)) if a + b in ids]
        if not pairs:
            break
        at = min(pairs)[1]
        word[at : at + 2] = [word[at] + word[at + 1]]
    return [i for piece in word for i in ([ids[piece]] if piece in ids else [3 + b for b in piece.encode()])]


@QUICK
@given(st.text(alphabet=st.sampled_from("the mule hut é漢😀"), max_size=30))
def test_sentencepiece_vocabulary_encodes_as_its_definition_says(text):
    metadata = sp_metadata()
    tokenizer = from_gguf(metadata)
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    assert ids[1:] == twin_sentencepiece(metadata, text)
    assert tokenizer.decode(ids) == text


def test_sentencepiece_spaces():
    tokenizer = from_gguf(sp_metadata())
    ids = tokenizer.encode("the hut", special=False)
    assert tokenizer.decode(ids) == "the hut"
    # Generated text goes on after a prompt: its first space is its own.
    assert "".join(stream(tokenizer, ids)) == " the hut"
    plain = from_gguf(sp_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
    assert plain.decode(plain.encode(" the hut")) == " the hut"
    smile = tokenizer.encode("😀", special=False)[1:]
    assert stream(tokenizer, smile) == ["", "", "", "😀", ""]


def test_folder(trained, tmp_path):
    trained.enable_truncation(max_length=3)
    trained.enable_padding(length=200)
    trained.save(str(tmp_path / "tokenizer.json"))
    trained.no_truncation()
    trained.no_padding()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "old", "pad_token": "<pad>"}')
    config = {"bos_token": None, "eos_token": {"content": "<|mark|>"}, "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(make_facts(tmp_path))
    text = CORPUS[0]
    assert tokenizer.encode(text) == trained.encode(text).ids
    assert tokenizer.vocab_size == trained.get_vocab_size()
    assert tokenizer.special_tokens == {"eos_token": "<|mark|>", "pad_token": "<pad>"}


def test_wrong_tokenizer_for_the_vocabulary(trained, tmp_path):
    trained.save(str(tmp_path / "tokenizer.json"))
    size = trained.get_vocab_size()
    Tokenizer.load(make_facts(tmp_path, vocab_size=size))
    with pytest.raises(
        TokenizerError, match=rf"largest id is {size - 1}.* {size - 1} tokens.*wrong tokenizer"
    ):
        Tokenizer.load(make_facts(tmp_path, vocab_size=size - 1))
    with pytest.raises(TokenizerError, match=rf"token 600, and .* {size - 1}.*wrong tokenizer"):
        Tokenizer.load(make_facts(tmp_path, vocab_size=1000, eos_ids=(2, 600)))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": "1.0", "model": {"type": "Nonsense"}}'])
def test_broken_tokenizer_json(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match="cannot be read as a tokenizer"):
        Tokenizer.load(make_facts(tmp_path))


def test_cut_tokenizer_json(trained, tmp_path):
    text = trained.to_str()
    (tmp_path / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(TokenizerError, match="cannot be read as a tokenizer"):
        Tokenizer.load(make_facts(tmp_path))


def test_other_broken_folders(trained, tmp_path):
    with pytest.raises(TokenizerError, match=r"holds no tokenizer.*tokenizer\.json"):
        Tokenizer.load(make_facts(tmp_path))
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.load(make_facts(tmp_path))
    (tmp_path / "tokenizer_config.json").unlink()
    other = tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a"))
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="decoder is missing"):
        Tokenizer.load(make_facts(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.pre": "mystery"}, "pre-tokenizer is 'mystery'.*smollm"),
        ({"tokenizer.ggml.pre": None}, "does not say how"),
        ({"tokenizer.ggml.model": "t5"}, "kind 't5'"),
        ({"tokenizer.ggml.model": None}, "kind None"),
        ({"tokenizer.ggml.tokens": []}, "holds 0 tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "other values than str"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "1 of them different"),
        ({"tokenizer.ggml.token_type": [1]}, "1 token types"),
        ({"tokenizer.ggml.merges": ["qqqq zzzz"]}, "makes no tokenizer"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "makes no tokenizer"),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 99999},
            r"99999 of \d+ tokens",
        ),
    ],
)
def test_broken_gguf_vocabularies(trained, changes, words):
    metadata = {k: v for k, v in metadata_of(trained, "qwen2", **changes).items() if v is not None}
    with pytest.raises(TokenizerError, match=words):
        from_gguf(metadata)


def test_sentencepiece_without_scores():
    with pytest.raises(TokenizerError, match="0 token scores"):
        from_gguf(sp_metadata(**{"tokenizer.ggml.scores": []}))


@QUICK
@given(st.lists(st.sampled_from([*HARD, *CORPUS[:4]]), min_size=1, max_size=4), st.data())
def test_marks_lie_on_the_last_whole_token_before_an_end(trained, texts, data):
    text = "".join(texts)
    tokenizer = from_gguf(metadata_of(trained, "gpt-2"))
    ends = data.draw(st.lists(st.integers(0, len(text)), max_size=5))
    ids, marks = text_marks(tokenizer, text, ends)
    assert ids == tokenizer.encode(text)
    lengths = [len(b"".join(map(tokenizer.token_bytes, ids[:n]))) for n in range(len(ids) + 1)]
    expected = {
        max(n for n, length in enumerate(lengths) if length <= len(text[:end].encode())) for end in ends
    }
    assert set(marks) == expected - {0}
    assert list(marks) == sorted(marks)


PIECES = [
    "\n", "\n\n", "\r\n", "\n  ", " ", "   ", "\t", "mule", "The hut", "'s", "'LL", "12", "4567", "...", ".\n", ".\n/",
    "/", "é", "e\u0301", "\u0301", "漢字", "한", "\u1161", "<|mark|>", "<think>", "<|mark|>\n", "======", "\u00a0",
    "\u2028", "😀",
]  # fmt: skip


@pytest.mark.parametrize("pre", sorted(TWIN_SPLITS))
def test_a_text_that_begins_as_an_earlier_one_gets_the_same_ids(trained, pre):
    """Bounds far below the true ones, so that what is joined is short and the place where texts part is near."""
    metadata = metadata_of(trained, pre)
    plain, whole = from_gguf(metadata), []
    plain._splits_by_rule = False
    drawn = st.lists(st.sampled_from(PIECES), min_size=15, max_size=40)

    @QUICK
    @given(drawn, st.lists(st.tuples(st.floats(0.5, 1), drawn), min_size=3, max_size=3))
    def check(base, changes):
        tokenizer = from_gguf(metadata)
        encode, base = tokenizer._encode, "".join(base)
        for part, more in changes:
            text = base[: round(part * len(base))] + "".join(more[:12])
            encoded: list[str] = []
            tokenizer._encode = lambda text, special, encoded=encoded: (
                encoded.append(text) or encode(text, special)
            )
            assert tokenizer.encode_with_ends(text, False) == plain.encode_with_ends(text, False)
            whole.append(encoded == [text])

    with mock.patch.multiple("packhorse.text.tokenizer", LONG_CHARS=24, KNOWN_CHARS=8):
        check()
    assert whole.count(False) > len(whole) // 8


def test_only_an_owners_own_texts_are_gone_on_from(trained):
    tokenizer = from_gguf(metadata_of(trained, "qwen2"))
    one, two, encoded = tokenizer.of("one"), tokenizer.of("two"), []
    for some in (one, two):
        some._encode = lambda text, special: encoded.append(len(text)) or tokenizer._encode(text, special)
    text = CORPUS[0] * 300
    for some, end in ((one, "What?"), (two, "What?"), (one, "Who?"), (two, "Who?"), (one, "Who?")):
        ids, ends = some.encode_with_ends(text + end, False)
        assert (ids, ends) == tokenizer._encode(text + end, False)
    assert encoded[:2] == [len(text) + 5] * 2 and max(encoded[2:]) < 1500
    nobody = tokenizer.of(None)
    nobody.encode_with_ends(f"? {text}", False)
    assert {t.owner for t in tokenizer._texts} == {"one", "two"} and len(tokenizer._texts) == 2
    two.forget()
    assert [t.owner for t in tokenizer._texts] == ["one"]
    [kept] = tokenizer._texts
    bound = 7 * (sys.getsizeof(kept.text) + 8 * len(kept.ids)) // 2
    with mock.patch("packhorse.text.tokenizer.REMEMBERED_BYTES", bound):
        for number in range(9):  # long texts of others push out the oldest
            two.encode_with_ends(f"{number} {text}", False)
    assert [t.text[0] for t in tokenizer._texts] == ["8", "7", "6"]
    one.encode_with_ends(text, False)
    assert encoded[-1] == len(text)


def test_without_rules_every_text_is_encoded_whole(trained):
    """SentencePiece merges across words, an added bos is no part of what follows, and a rule may look back."""
    found = Tokenizer(tokenizers.Tokenizer.from_str(trained.to_str()))
    assert found._splits_by_rule
    for part in (pre_tokenizers.Metaspace(), pre_tokenizers.ByteLevel(use_regex=False), None):
        changed = tokenizers.Tokenizer.from_str(trained.to_str())
        changed.pre_tokenizer = part
        assert not Tokenizer(changed)._splits_by_rule
    for rule in (r"(?<=\n)x| ?\S+|\s+", r"(?<!a) ?\S+|\s+", r"[^.]+|\.", "§"):
        changed = tokenizers.Tokenizer.from_str(trained.to_str())
        changed.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(rule), "isolated")
        assert not Tokenizer(changed)._splits_by_rule
    changed = tokenizers.Tokenizer.from_str(trained.to_str())
    changed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert not Tokenizer(changed)._splits_by_rule
    changed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert Tokenizer(changed)._splits_by_rule
    changed.normalizer = normalizers.Replace("x", "xx")
    assert not Tokenizer(changed)._splits_by_rule
    bos = from_gguf(metadata_of(trained, "qwen2", **{"tokenizer.ggml.add_bos_token": True}))
    bos.encode_with_ends(CORPUS[0] * 300)
    assert bos._texts == []


def test_older_tokenizer_files_go_through_transformers(trained, tmp_path):
    state = json.loads(trained.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in state["merges"]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = Tokenizer.load(make_facts(tmp_path))
    assert tokenizer.encode(CORPUS[0]) == twin_bpe(metadata_of(trained, "gpt-2"), CORPUS[0])
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"cannot be converted.*tokenizer\.json"):
        Tokenizer.load(make_facts(tmp_path))


def test_no_torch_and_no_transformers(trained, tmp_path):
    trained.save(str(tmp_path / "tokenizer.json"))
    code = (
        "import sys; from pathlib import Path; from packhorse.text.tokenizer import _from_folder;"
        f"assert _from_folder(Path({str(tmp_path)!r})).encode('hut');"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("method", ["encode", "encode_with_ends"])
def test_others_go_on_while_a_long_text_is_encoded(trained, method):
    """Whoever serves others meanwhile must not stand still: a second here, many with a long document."""
    tokenizer = Tokenizer(trained)
    text = "".join(CORPUS) * 600
    beats, ended = 0, threading.Event()

    def beat() -> None:
        nonlocal beats
        while not ended.wait(0.002):
            beats += 1

    thread = threading.Thread(target=beat)
    thread.start()
    getattr(tokenizer, method)(text)
    ended.set()
    thread.join()
    assert beats >= 20


@pytest.mark.network
def test_smollm2_tokens():
    """Ids that transformers gives for the published model."""
    from packhorse.facts.read import read_model

    tokenizer = Tokenizer.load(read_model(smollm2()))
    ids = [19556, 216, 1, 4093, 216, 33, 34, 35, 357, 506, 1116, 1792]
    assert tokenizer.encode("Hello <|im_start|>user 123 it's\n\n x") == ids
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
