"""What the store keeps outside the device: runs of pages, and states, as images. No torch.

    byte 0                    4,096 x n
    | length | JSON, spaces | layers.0 | layers.1 | ... | token_ids |      pages of a token range
    | length | JSON, spaces | state |                                      all recurrent state at a position
    | length | JSON, spaces | progress | hidden | layers.3 | ... | state | ...   a cancelled sweep, in RAM alone

An image is a safetensors file, and the same bytes in RAM. Chain values (`store/prefix.py`) say which tokens
stand before it, the token ids which it holds; a reader compares both.
"""

from __future__ import annotations

import json
import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import Any, Protocol

from packhorse.core.units import round_up
from packhorse.store.slabs import Place, SlabPool

BLOCK = 4096
"""Bytes to which payloads and buffers are aligned: what direct I/O and the page cache work in."""
MAX_HEADER_BYTES = 1 << 20
TOKEN_IDS = "token_ids"
WALK_PAGES = 256
"""Boundaries looked up at once."""
_TOKEN_BYTES = 4
_METADATA = "__metadata__"
_FORMAT = "packhorse 1"
Buffer = mmap.mmap | memoryview
Spans = Mapping[str, tuple[int, int]]


class Kind(StrEnum):
    """What a record holds."""

    PAGES = "pages"
    STATE = "state"
    SWEEP = "sweep"


class UnreadableError(Exception):
    """A record that cannot be used; `reason` is a name to count by. Never leaves the store."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Record:
    """Pages of the tokens [start, stop) of one chain, or the state at `stop` (start == stop), or what a cancelled
    sweep had done of them (store/resume.py).

    parent, key: chain values at start and stop. tokens: encoded ids of the range. num_bytes: of the image.
    """

    kind: Kind
    parent: bytes
    key: bytes
    start: int
    stop: int
    tokens: bytes
    num_bytes: int = 0

    @property
    def identity(self) -> tuple[Kind, bytes, bytes]:
        """What no two records of a tier share."""
        return self.kind, self.parent, self.key


class Image:
    """A record's bytes in memory of their own, which goes back to the system with the last reference, or in that of
    whoever made it.

    parts: writable views by name, each uint8, valid as long as they are held. place: pinned memory that it lies in,
    which only copies of the card's may read or write. own_bytes: those in no slab.
    """

    __slots__ = ("buffer", "own_bytes", "parts", "place", "record")

    def __init__(self, record: Record, buffer: Buffer, spans: Spans, place: Place | None = None) -> None:
        self.record = record
        self.buffer = buffer
        self.place = place
        view = memoryview(buffer)
        self.parts = {name: view[at : at + size] for name, (at, size) in spans.items()}
        self.own_bytes = 0 if place is not None else record.num_bytes

    @property
    def view(self) -> memoryview:
        """The image from its first byte to its last."""
        return memoryview(self.buffer)[: self.record.num_bytes]

    @classmethod
    def make(
        cls, record: Record, shapes: Mapping[str, tuple[int, ...]], into: memoryview | Place | None = None
    ) -> Image:
        """An image to be filled: header and token ids are written, the parts of `shapes` (uint8) are zero, or what
        `into` holds there. In a place nothing is written: it has room for all, and only the card fills any of it."""
        header, places, num_bytes = _layout(record, shapes)
        record = replace(record, num_bytes=num_bytes)
        if isinstance(into, Place):
            return cls(record, into.view, places, into)
        buffer = anonymous(num_bytes) if into is None else into
        buffer[: len(header)] = header
        image = cls(record, buffer, places)
        if record.tokens:
            image.parts[TOKEN_IDS][:] = record.tokens
        return image

    @staticmethod
    def size(record: Record, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Bytes of the image that `make` would make."""
        return _layout(record, shapes)[2]

    @classmethod
    def parse(cls, buffer: Buffer, num_bytes: int) -> Image:
        """The image that a buffer holds. Raises UnreadableError("header") where it is none."""
        try:
            start = 8 + int.from_bytes(buffer[:8], "little")
            if not 8 < start <= min(num_bytes, MAX_HEADER_BYTES):
                raise ValueError("the header's length")
            document = json.loads(bytes(buffer[8:start]))
            about = document.pop(_METADATA)
            if about["format"] != _FORMAT:
                raise ValueError("another format")
            places = {name: _place(entry, start, num_bytes) for name, entry in document.items()}
            at, size = places.get(TOKEN_IDS, (0, 0))
            tokens = bytes(buffer[at : at + size])
            parent, key = (bytes.fromhex(about[name]) for name in ("parent", "key"))
            first, stop = (int(about[name]) for name in ("start", "stop"))
            record = Record(Kind(about["kind"]), parent, key, first, stop, tokens, num_bytes)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnreadableError("header") from error
        return cls(record, buffer, places)


def anonymous(num_bytes: int) -> mmap.mmap:
    """Zeroed memory of its own, in whole blocks and aligned to them."""
    return mmap.mmap(-1, round_up(max(num_bytes, 1), BLOCK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _layout(
    record: Record, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """The header with its padding, where each part lies and how long it is, and bytes in all."""
    wanted = [(name, "U8", shape, 1) for name, shape in shapes.items()]
    if record.tokens:
        wanted.append((TOKEN_IDS, "U32", (len(record.tokens) // _TOKEN_BYTES,), _TOKEN_BYTES))
    tensors: dict[str, Any] = {}
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name, dtype, shape, width in wanted:
        size = prod(shape) * width
        tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + size)}
        places[name] = (end, size)
        end += size
    text = json.dumps({_METADATA: _describe(record), **tensors}, separators=(",", ":")).encode()
    start = round_up(8 + len(text), BLOCK)
    header = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
    return header, {name: (start + at, size) for name, (at, size) in places.items()}, start + end


def _describe(record: Record) -> dict[str, str]:
    return {
        "format": _FORMAT,
        "kind": record.kind,
        "parent": record.parent.hex(),
        "key": record.key.hex(),
        "start": str(record.start),
        "stop": str(record.stop),
    }


def _place(entry: Any, start: int, num_bytes: int) -> tuple[int, int]:
    first, end = entry["data_offsets"]
    if not 0 <= first <= end <= num_bytes - start:
        raise ValueError("a tensor outside the file")
    return start + first, end - first


class Records(Protocol):
    """A tier of records."""

    def candidates(self, parents: Sequence[bytes]) -> Sequence[Record]:
        """Records of pages that begin at one of these chain values."""

    def states(self, keys: Sequence[bytes]) -> Mapping[bytes, Record]:
        """Of the chain values those at which there is a state."""

    def read(self, record: Record) -> Image:
        """The image, checked. From any thread. Raises UnreadableError."""


class RamRecords:
    """Images in RAM, the least recently used of which goes first. From one thread.

    capacity: bytes that images and their books may take. pool: pinned memory for them (None: none), which counts whole.
    """

    BOOKS = 4096
    """Bytes counted for an image beside its buffer: Python's objects, and the system's map."""

    def __init__(self, capacity: int, pool: SlabPool | None = None) -> None:
        self.capacity = capacity
        self.pool = pool
        self.evicted = 0
        self._used = 0
        self._images: OrderedDict[tuple[Kind, bytes, bytes], Image] = OrderedDict()
        self._by_parent: dict[bytes, dict[bytes, Record]] = {}
        self._states: dict[bytes, Record] = {}

    def __len__(self) -> int:
        return len(self._images)

    @property
    def used(self) -> int:
        """Bytes taken: of images in memory of their own, of all slabs, and of all books."""
        return self._used + (self.pool.num_bytes if self.pool is not None else 0)

    def has(self, record: Record) -> bool:
        """Whether it is held; it counts as used then."""
        if record.identity not in self._images:
            return False
        self._images.move_to_end(record.identity)
        return True

    def make_room(self, num_bytes: int) -> bool:
        """Evict until an image of `num_bytes` has room. False, and nothing evicted, where it never will."""
        need = self._cost(num_bytes)
        if need > self.capacity:
            return False
        while self.used + need > self.capacity:
            if self.pool is None or not self.pool.give_back():
                self._evict()
        return True

    def take_place(self, num_bytes: int) -> Place | None:
        """Pinned memory for an image, evicting others; it is the image's that is to be put next. None: it is to lie in
        memory of its own, as far as `make_room` has any."""
        if self.pool is None or num_bytes > self.pool.slab_bytes:
            return None
        while (place := self.pool.take(num_bytes, self.capacity - self._used - self.BOOKS)) is None:
            own = not self.pool.pinning and self.used + self._cost(num_bytes) <= self.capacity
            if own or not self._images:
                break
            self._evict()
        return place

    def put(self, image: Image) -> bool:
        """Keep an image, evicting others. False where it is larger than the whole tier, or held already."""
        record = image.record
        if self.has(record) or not self.make_room(image.own_bytes):
            return False
        self._images[record.identity] = image
        self._used += self._cost(image.own_bytes)
        if record.kind is Kind.PAGES:
            self._by_parent.setdefault(record.parent, {})[record.key] = record
        elif record.kind is Kind.STATE:
            self._states[record.key] = record
        return True

    def sweeps(self, parent: bytes) -> list[Image]:
        """What cancelled sweeps had done that began at this chain value."""
        images = self._images.values()
        return [i for i in images if i.record.kind is Kind.SWEEP and i.record.parent == parent]

    def states_behind(self, key: bytes) -> list[Record]:
        """States along the one chain that goes on from a chain value, up to where it forks or ends."""
        found = []
        while len(following := self._by_parent.get(key, {})) == 1:
            [key] = following
            found += [self._states[key]] if key in self._states else []
        return found

    def drop(self, record: Record) -> None:
        """Forget the image that is held of a record."""
        image = self._images.pop(record.identity)
        record = image.record
        self._used -= self._cost(image.own_bytes)
        if image.place is not None:
            image.place.free()
        if record.kind is Kind.STATE:
            del self._states[record.key]
        if record.kind is not Kind.PAGES:
            return
        siblings = self._by_parent[record.parent]
        del siblings[record.key]
        if not siblings:
            del self._by_parent[record.parent]

    def clear(self) -> None:
        """Forget everything."""
        for image in list(self._images.values()):
            self.drop(image.record)
        while self.pool is not None and self.pool.give_back():
            pass

    def candidates(self, parents: Sequence[bytes]) -> Sequence[Record]:
        """See Records."""
        return [record for parent in parents for record in self._by_parent.get(parent, {}).values()]

    def states(self, keys: Sequence[bytes]) -> Mapping[bytes, Record]:
        """See Records."""
        return {key: self._states[key] for key in keys if key in self._states}

    def read(self, record: Record) -> Image:
        """See Records."""
        image = self._images.get(record.identity)
        if image is None:
            raise UnreadableError("gone")
        return image

    def _evict(self) -> None:
        self.drop(next(iter(self._images.values())).record)
        self.evicted += 1

    def _cost(self, num_bytes: int) -> int:
        return round_up(num_bytes, BLOCK) + self.BOOKS


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` pages from page `first` of a prompt on: those of a record after its first `skip`."""

    source: Records
    record: Record
    first: int
    count: int
    skip: int = 0

    @property
    def stop(self) -> int:
        return self.first + self.count

    def after(self, page: int) -> Piece:
        """What of it lies behind a page of the prompt before its stop."""
        cut = max(0, page - self.first)
        return replace(self, first=self.first + cut, count=self.count - cut, skip=self.skip + cut)


@dataclass(frozen=True)
class Walk:
    """How far a prompt agrees with what is stored, in pages.

    pieces: what covers it, in order, without gaps. keys: the chain value at each page boundary reached, the
    root's included. forks: boundaries at which something stored parts from the prompt.
    """

    pieces: list[Piece]
    keys: list[bytes]
    forks: frozenset[int] = frozenset()

    @property
    def num_pages(self) -> int:
        return len(self.keys) - 1


@dataclass(frozen=True)
class Found:
    """What of a prompt lies below the device, in pages.

    num_pages: usable, with `state` valid there for hybrid models. pieces: what covers the part that the device
    lacks. agreed: pages up to which there is anything, usable or not.
    """

    num_pages: int
    pieces: list[Piece]
    state: tuple[Records, Record] | None
    agreed: int

    @property
    def records(self) -> list[tuple[Records, Record]]:
        """Everything that has to be read, with where it lies."""
        pages = [(piece.source, piece.record) for piece in self.pieces]
        return pages if self.state is None else [*pages, self.state]

    def wanted(self, piece: Piece, held: int) -> tuple[int, int, int]:
        """What of a piece the device, which has `held` pages, lacks: its first page, the pages of the record before it,
        and how many."""
        first = max(piece.first, held)
        return first, piece.skip + first - piece.first, min(piece.stop, self.num_pages) - first


def walk(
    sources: Sequence[Records],
    root: bytes,
    tokens: bytes | bytearray,
    num_pages: int,
    page_bytes: int,
    chain: Callable[[bytes, bytes], bytes],
) -> Walk:
    """Follow a prompt's first `num_pages` pages through the records as far as any of them go.

    tokens: encoded ids. page_bytes: of a page's ids. chain(key, page): the chain value after a page. Records may
    overlap: each boundary reached may begin one. Earlier sources win where two cover as much.
    """
    keys, reach = [root], 0
    further: list[Piece] = []  # each begins within what those before it cover, and ends behind them
    forks = set()
    for first in range(0, num_pages, WALK_PAGES):
        if first > reach:
            break
        keys += chain_values(
            keys[first], tokens, first, min(WALK_PAGES, num_pages - first), page_bytes, chain
        )
        at = {key: page for page, key in enumerate(keys[first : first + WALK_PAGES], first)}
        starting: dict[int, list[tuple[Records, Record]]] = {}
        for source in sources:
            for record in source.candidates(list(at)):
                starting.setdefault(at[record.parent], []).append((source, record))
        for page in sorted(starting):
            if page > reach:
                break
            for source, record in starting[page]:
                count = agreed_pages(record.tokens, tokens, page, num_pages, page_bytes)
                if page + count < num_pages and count < len(record.tokens) // page_bytes:
                    forks.add(page + count)
                if page + count > reach:
                    further.append(Piece(source, record, page, count))
                    reach = page + count
    return Walk(_cover(further), keys[: reach + 1], frozenset(forks))


def _cover(further: Sequence[Piece]) -> list[Piece]:
    """The fewest pieces, cut so that they do not overlap. further: first and stop both ascend."""
    chosen: list[Piece] = []
    stop = 0
    for at, piece in enumerate(further):
        if at + 1 < len(further) and further[at + 1].first <= stop:
            continue
        chosen.append(piece.after(stop))
        stop = piece.stop
    return chosen


def agreed_pages(
    stored: bytes, tokens: bytes | bytearray, first: int, num_pages: int, page_bytes: int
) -> int:
    """Pages in which `stored` agrees with the prompt's pages first .. num_pages."""
    base = first * page_bytes
    most = min(len(stored) // page_bytes, num_pages - first)
    if stored[: most * page_bytes] == tokens[base : base + most * page_bytes]:
        return most
    for page in range(most):
        at = page * page_bytes
        if stored[at : at + page_bytes] != tokens[base + at : base + at + page_bytes]:
            return page
    raise AssertionError("unequal tokens are equal page by page")


def chain_values(
    key: bytes,
    tokens: bytes | bytearray,
    first: int,
    count: int,
    page_bytes: int,
    chain: Callable[[bytes, bytes], bytes],
) -> Iterable[bytes]:
    """Chain values after each of the pages first .. first + count, where `key` is that before them."""
    for page in range(first, first + count):
        key = chain(key, bytes(tokens[page * page_bytes : (page + 1) * page_bytes]))
        yield key
