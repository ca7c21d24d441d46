"""Headers of GGUF files (versions 2 and 3, little endian), read and checked without gguf, numpy or torch.

Layout: magic, version, number of tensors, number of metadata entries; the entries (key, type, value); the
tensor infos (name, dims innermost first, type, offset); padding to `general.alignment`; the data. Source:
the GGUF specification. Every count and length is compared with the bytes that are left before it is used.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packhorse.core.errors import CorruptFileError, UnsupportedModelError
from packhorse.core.formats import GGUF_TYPES, GGUF_UNSUPPORTED
from packhorse.core.units import MIB, round_up
from packhorse.facts.fields import reading
from packhorse.facts.model import TensorFacts

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 512 * MIB
"""Metadata and tensor infos end before this, or the file is refused."""
MAX_ARRAY_LEN = 1 << 24
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 1024
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says before its data. Metadata keys are as written; arrays are lists.

    Strings that are not UTF-8 keep their bytes as lone surrogates (`surrogateescape`): tokens are bytes.
    """

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorFacts]


def read_header(file: Path) -> GgufHeader:
    """The header of one file, checked against itself and the size of the file.

    Raises CorruptFileError, UnsupportedModelError (version, byte order, tensor type), RefusedError where the
    file cannot be read. Takes no more memory than a small multiple of the header.
    """
    with reading(file), file.open("rb") as stream:
        size = stream.seek(0, 2)
        if size < 24:
            raise CorruptFileError(f"{file} has {size} bytes, too few for a GGUF file.")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(file, data).header()


class _Reader:
    """A position in the mapped file that never passes `limit`."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file = file
        self.data = data
        self.size = len(data)
        self.limit = min(self.size, MAX_HEADER_BYTES)
        self.at = 0

    def corrupt(self, what: str) -> CorruptFileError:
        return CorruptFileError(f"{self.file}: {what}.", byte=self.at)

    def header(self) -> GgufHeader:
        num_tensors, num_entries = self.preamble()
        metadata = self.metadata(num_entries)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment % 8:
            raise self.corrupt(
                f"general.alignment is {alignment!r}, not a multiple of 8 up to {MAX_ALIGNMENT}"
            )
        # The shortest info: a name of one byte and one dimension.
        self.check_count(num_tensors, 8 + 1 + 4 + 8 + 4 + 8, "tensors")
        infos = [self.tensor_info(alignment) for _ in range(num_tensors)]
        start = round_up(self.at, alignment)
        tensors: dict[str, TensorFacts] = {}
        for info in infos:
            if info.name in tensors:
                raise self.corrupt(f"the tensor {info.name!r} occurs twice")
            tensors[info.name] = TensorFacts(
                info.name, info.shape, info.format, self.file, start + info.offset
            )
        self.check_ranges(tensors, start)
        return GgufHeader(self.file, metadata, tensors)

    def preamble(self) -> tuple[int, int]:
        """Magic, version and counts."""
        magic = self.data[:4]
        if magic != MAGIC:
            raise UnsupportedModelError(
                f"{self.file} starts with {magic!r}, not with {MAGIC!r}: it is no GGUF file.",
                hint="Give a folder with config.json, or a GGUF file.",
            )
        self.at = 4
        version = self.scalar("I", "the version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = f"big endian (version {swapped})" if swapped in (2, 3) else f"version {version}"
            raise UnsupportedModelError(
                f"{self.file} is a GGUF file of {what}; versions 2 and 3 in little endian are read.",
                hint="Convert it with llama.cpp, or fetch a newer file.",
            )
        return self.scalar("Q", "the number of tensors"), self.scalar("Q", "the number of metadata entries")

    def metadata(self, num_entries: int) -> dict[str, Any]:
        self.check_count(num_entries, 8 + 1 + 4 + 1, "metadata entries")
        found: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self.name(MAX_KEY_BYTES, "a metadata key")
            if key in found:
                raise self.corrupt(f"the metadata key {key!r} occurs twice")
            kind = self.scalar("I", f"the type of {key!r}")
            found[key] = self.array(key) if kind == _ARRAY else self.value(key, kind)
        return found

    def value(self, key: str, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], key)
        if kind == _STRING:
            return self.string(key)
        raise self.corrupt(f"{key!r} is of the type number {kind}, which does not exist")

    def array(self, key: str) -> list[Any]:
        kind = self.scalar("I", f"the type of {key!r}")
        count = self.scalar("Q", f"the length of {key!r}")
        if count > MAX_ARRAY_LEN:
            raise self.corrupt(f"{key!r} has {count:,} values, and at most {MAX_ARRAY_LEN:,} are read")
        if kind == _STRING:
            self.check_count(count, 8, f"strings of {key!r}")
            return self.strings(key, count)
        if kind not in _SCALARS:
            raise self.corrupt(f"{key!r} is an array of the type number {kind}, which cannot be in one")
        form = f"<{count}{_SCALARS[kind]}"
        at = self.take(struct.calcsize(form), f"the values of {key!r}")
        return list(struct.unpack_from(form, self.data, at))

    def strings(self, key: str, count: int) -> list[str]:
        """Many strings, in one tight loop: vocabularies hold hundreds of thousands."""
        data, at, limit = self.data, self.at, self.limit
        length_at = struct.Struct("<Q").unpack_from
        found: list[str] = []
        append = found.append
        for _ in range(count):
            if at + 8 > limit:
                raise self.corrupt(f"{key!r} ends after {len(found):,} of {count:,} strings")
            (length,) = length_at(data, at)
            at += 8
            if length > limit - at:
                raise self.corrupt(f"string {len(found):,} of {key!r} takes {length:,} bytes, and "
                                   f"{limit - at:,} are left")  # fmt: skip
            append(data[at : at + length].decode("utf-8", "surrogateescape"))
            at += length
        self.at = at
        return found

    def tensor_info(self, alignment: int) -> TensorFacts:
        """One tensor info; its offset counts from the start of the data."""
        name = self.name(MAX_NAME_BYTES, "a tensor name")
        num_dims = self.scalar("I", f"the dimensions of {name!r}")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.corrupt(
                f"the tensor {name!r} has {num_dims} dimensions, and 1 to {MAX_DIMS} are allowed"
            )
        shape = tuple(self.scalar("Q", f"the shape of {name!r}") for _ in range(num_dims))[::-1]
        kind = self.scalar("I", f"the type of {name!r}")
        offset = self.scalar("Q", f"the offset of {name!r}")
        if not all(1 <= dim < 2**62 for dim in shape):
            raise self.corrupt(f"the tensor {name!r} has the shape {list(shape)}")
        form = GGUF_TYPES.get(kind)
        if form is None:
            known = GGUF_UNSUPPORTED.get(kind, f"number {kind}")
            raise UnsupportedModelError(
                f"{self.file}: the tensor {name!r} is of type {known}, which is not supported.",
                hint="Use a file of type Q8_0, Q4_0 to Q5_1, Q2_K to Q6_K, F16, BF16 or F32.",
                tensor=name,
                type=known,
            )
        if shape[-1] % form.block_len:
            raise self.corrupt(f"rows of the tensor {name!r} have {shape[-1]} values, and {form.name} stores"
                               f" {form.block_len} at a time")  # fmt: skip
        if offset % alignment:
            raise self.corrupt(f"the tensor {name!r} starts at {offset}, not a multiple of {alignment}")
        return TensorFacts(name, shape, form, self.file, offset)

    def check_ranges(self, tensors: Mapping[str, TensorFacts], start: int) -> None:
        """Every tensor lies in the file, and no two share a byte."""
        end, before = start, "the header"
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise self.corrupt(f"the tensor {tensor.name!r} starts at byte {tensor.offset:,}, inside"
                                   f" {before}, which ends at {end:,}")  # fmt: skip
            end, before = tensor.offset + tensor.num_bytes, repr(tensor.name)
            if end > self.size:
                raise self.corrupt(f"the tensor {tensor.name!r} ends at byte {end:,}, and the file has"
                                   f" {self.size:,}")  # fmt: skip

    def check_count(self, count: int, least_bytes: int, what: str) -> None:
        """Refuses a count of things that cannot fit in what is left, before anything is made of it."""
        left = self.limit - self.at
        if count * least_bytes > left:
            raise self.corrupt(f"the header announces {count:,} {what}, and {left:,} bytes are left")

    def take(self, count: int, what: str) -> int:
        """Moves past `count` bytes and returns where they start."""
        start = self.at
        if count > self.limit - start:
            raise self.corrupt(f"{what} takes {count:,} bytes, and {self.limit - start:,} are left")
        self.at = start + count
        return start

    def scalar(self, code: str, what: str) -> Any:
        form = "<" + code
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form), what))[0]

    def string(self, what: str) -> str:
        length = self.scalar("Q", f"the length of {what}")
        start = self.take(length, what)
        return self.data[start : start + length].decode("utf-8", "surrogateescape")

    def name(self, most_bytes: int, what: str) -> str:
        """A key or tensor name: valid UTF-8, not empty, not long."""
        length = self.scalar("Q", f"the length of {what}")
        if not 1 <= length <= most_bytes:
            raise self.corrupt(f"{what} takes {length:,} bytes, and 1 to {most_bytes:,} are allowed")
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt(f"{what} is not UTF-8 ({error.reason})") from error
