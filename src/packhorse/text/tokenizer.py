"""Text to token ids and back, from tokenizer.json or from the vocabulary inside a GGUF file.

Neither torch nor transformers is imported, except for a folder whose tokenizer has only the older file
formats: transformers converts those.
"""

from __future__ import annotations

import codecs
import json
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from sys import getsizeof
from typing import Any

import tokenizers

from packhorse.core.errors import TokenizerError
from packhorse.facts.model import ModelFacts
from packhorse.text.gguf_vocab import gguf_special_tokens, tokenizer_from_gguf

OLDER_FILES = ("tokenizer.model", "vocab.json", "tiktoken.model")
LONG_CHARS = 16_384
"""Texts of at least so many characters are remembered with their ids, for later ones that begin in the same way."""
REMEMBERED_BYTES = 64 << 20
"""Of all of them, ids and all."""
KNOWN_CHARS = 1024
"""A text goes on from an earlier one's ids so far before the place where the two part at least."""
LINES = 64
"""Beginnings of lines that are looked at for that."""
KINDS = ("Split", "ByteLevel", "Digits")
"""Pre-tokenizers that split a text without a look at what is far from the split."""
LINE_STARTS = "a\nb\n\nb. \n1\u6f22\n\u6f22"
"""A text whose lines begin with letters and a digit, at the places 2, 5, 9 and 12."""
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Encodes text and decodes ids of one model. Thread-safe: nothing changes after it is made, save caches.

    special_tokens: the tokens that chat templates know by name (`bos_token`, `eos_token`, ...), as text. owner: whose
    texts it encodes; see `of`. None: of one who wants nothing remembered.
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
        self.owner: str | None = ""
        self._texts: list[_Encoded] = []  # the latest first
        self._has_edges = backend.num_special_tokens_to_add(False) > 0
        self._splits_by_rule = _splits_by_rule(backend)

    def of(self, owner: str | None) -> Tokenizer:
        """The same tokenizer for what `owner` sends: it goes on from texts of that owner alone, or the time it takes
        would tell others what they say."""
        found = copy(self)
        found.owner = owner
        return found

    def forget(self) -> None:
        """The owner's texts."""
        self._texts[:] = [text for text in self._texts if text.owner != self.owner]

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
        behind it. A long text that begins as one of the owner's last ones did is encoded from there on.
        """
        owner = self.owner if self._splits_by_rule and len(text) >= LONG_CHARS else None
        if owner is None or (special and self._has_edges):
            return self._encode(text, special)
        alike = [(_common_len(text, old.text), old) for old in self._texts if old.owner == owner]
        common, old = max(alike, key=lambda pair: pair[0], default=(0, _NOTHING))
        new = self._join(owner, text, common, old)
        # It takes the place of the one that it mostly repeats: a question about a document that of the one before.
        texts = [new, *(t for t in self._texts if t is not old or 2 * common < len(old.text))]
        total = accumulate(getsizeof(t.text) + 8 * len(t.ids) for t in texts)
        self._texts[:] = [
            t for t, num_bytes in zip(texts, total, strict=True) if num_bytes <= REMEMBERED_BYTES
        ]
        return new.ids.tolist(), new.ends.tolist()

    def _encode(self, text: str, special: bool) -> tuple[list[int], list[int]]:
        encoding = self.backend.encode_batch([text], add_special_tokens=special)[0]
        # Added bos and eos tokens have the offsets (0, 0): the running maximum puts eos at the end.
        return encoding.ids, list(accumulate((end for _, end in encoding.offsets), max))

    def _join(self, owner: str, text: str, common: int, old: _Encoded) -> _Encoded:
        """`text`, whose first `common` characters are those of `old`: its ids up to where a line begins, and those of
        the rest. The rules that split a text decide on what is before a line without what follows its first letter, and
        put a split there; that `old`'s tokens come again behind it is looked at besides."""
        line, edge = common - KNOWN_CHARS, bisect_right(old.ends, common - KNOWN_CHARS // 2)
        for _ in range(LINES):
            line = text.rfind("\n", 0, max(line, 0)) + 1
            at = bisect_right(old.ends, line)
            if line and text[line].isalnum() and old.ends[at - 1] == line:
                ids, ends = self._encode(text[line:], special=False)
                if edge > at and array("I", ids[: edge - at]) == old.ids[at:edge]:
                    reached = array("I", [line + end for end in ends])
                    return _Encoded(owner, text, old.ids[:at] + array("I", ids), old.ends[:at] + reached)
                break
            line -= 1
        ids, ends = self._encode(text, special=False)
        return _Encoded(owner, text, array("I", ids), array("I", ends))

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


@dataclass(frozen=True, eq=False)
class _Encoded:
    """A text, its ids and where they end, and whose it is."""

    owner: str
    text: str
    ids: array[int]
    ends: array[int]


_NOTHING = _Encoded("", "", array("I"), array("I"))


def _common_len(one: str, other: str) -> int:
    """With how many characters both begin; 0 for less than LONG_CHARS."""
    known, bound = 0, min(len(one), len(other)) + 1
    if one[:LONG_CHARS] != other[:LONG_CHARS]:
        return 0
    while bound - known > 1:
        middle = (known + bound) // 2
        known, bound = (middle, bound) if one[known:middle] == other[known:middle] else (known, middle)
    return known


def _splits_by_rule(backend: tokenizers.Tokenizer) -> bool:
    """Whether rules that do not look back split a text before anything is merged, always where a line begins with a
    letter or a digit, and its characters stay as they are or are composed (NFC)."""
    parts = (backend.normalizer, backend.pre_tokenizer)
    normalizer, splitter = (json.loads(part.__getstate__()) if part is not None else {} for part in parts)
    rules = [
        rule for rule in [splitter, *splitter.get("pretokenizers", ())] if rule.get("type") != "Sequence"
    ]
    simple = (rule.get("type") in KINDS and not rule.get("add_prefix_space") for rule in rules)
    if not all(simple) or "(?<" in str(rules):
        return False
    splits = {start for _, (start, _) in backend.pre_tokenizer.pre_tokenize_str(LINE_STARTS)}
    return splits >= {2, 5, 9, 12} and normalizer.get("type", "NFC") == "NFC"


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
