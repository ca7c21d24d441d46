"""The tiers below the device: host memory and disk, as one place that pages and states come back from.

    device --- evicted ---> host memory (--ram)          records of the leaf that goes
           --- closed ----> writing thread ---> disk     what a sequence has read, a slice a step
           <-- opened ----- whichever has the longest chain, RAM first

Everything but the writing of files, and their reading, happens in the engine's thread. A record is copied from
the device in whole before anybody waits for a disk, so pages are held no longer than it takes to copy them. What a
card has passes through pinned slots (store/staging.py) to and from a disk, and only the writing thread waits for a
copy; what is larger than a slot, as states are, is there when the call that copies it returns. Images in host memory
lie in pinned slabs (store/slabs.py), which copies leave and enter behind one another; where the system pins less, in
ordinary memory, and are there when that call returns. What comes back from host memory alone does so layer by layer
(store/restore.py), and may be on its way when `load` returns.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from packhorse.core.units import KIB, MIB, ceil_div
from packhorse.store import transfer
from packhorse.store.arena import PinnedArena
from packhorse.store.durable import MIN_TOKENS, DurableStore
from packhorse.store.prefix import Entry
from packhorse.store.records import (
    Buffer,
    Found,
    Image,
    Kind,
    RamRecords,
    Record,
    Records,
    UnreadableError,
    Walk,
    chain_values,
    walk,
)
from packhorse.store.restore import LayerRestore
from packhorse.store.slabs import Place, SlabPool
from packhorse.store.snapshots import thinned
from packhorse.store.staging import Slot, Staging
from packhorse.store.tier import ComputeTier

_T = TypeVar("_T")
Shapes = dict[str, tuple[int, ...]]

EXTENT_BYTES = 4 * MIB
"""Of a record of pages at most, where a page is not larger."""
IMAGE_BYTES = 32 * MIB
"""Of one in a slab at most: so few copies that sending them takes less time than they do."""
BACKLOG_BYTES = 64 * MIB
"""Copied and not yet written at most; one larger record has room when nothing else waits."""
BATCH_BYTES = 32 * MIB
"""Written in one transaction."""
SLOT_HEADER_BYTES = 64 * KIB
"""Room for a record's header in a slot."""
READERS = 8
READ_AHEAD = 8
FAILURES = 3
"""Prompts in a row whose records cannot be read, after which the tier is in trouble."""
LONG_TIMES = 4
"""Chains of less than so many times that, without a label, are written as far as an earlier one began with the same."""
SEEN_PAGES = 1 << 14
"""Of which it is known that a chain came by, before all is forgotten."""


@dataclass(eq=False)
class KeepJob:
    """A closed sequence's chain on its way to disk.

    root: chain value it begins at. tokens: encoded, whole pages. page_ids: held by the job until they are
    copied. entries: those whose snapshots are wanted. label: a name for people; what has one is written whole.
    then: called by the writing thread when it is written, or has failed to be.
    """

    root: bytes
    tokens: bytes
    page_ids: list[int]
    entries: list[Entry]
    label: str = ""
    then: list[Callable[[], Any]] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    next_page: int = 0
    begun: bool = False


class WritingThread:
    """Calls what it is given, one after the other, in a thread of its own. Used from one thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._pending: deque[tuple[Future[Any], int]] = deque()

    @property
    def backlog(self) -> int:
        """Bytes that wait, or are being written. From any thread."""
        return sum(num_bytes for future, num_bytes in list(self._pending) if not future.done())

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return all(future.done() for future, _ in self._pending)

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes may wait now."""
        return not self.backlog or self.backlog + num_bytes <= BACKLOG_BYTES

    def submit(self, num_bytes: int, function: Callable[..., Any], *args: Any) -> None:
        """To be called after everything given before."""
        self._pending.append((self._pool.submit(function, *args), num_bytes))
        while self._pending and self._pending[0][0].done():
            self._settle()

    def wait(self, done: Callable[[], bool]) -> None:
        """Until `done()`, which a call that ends may make true."""
        while not done():
            self._settle()

    def close(self) -> None:
        """End after what waits."""
        self.wait(lambda: not self._pending)
        self._pool.shutdown()

    def _settle(self) -> None:
        """Wait for the first call's end."""
        future, _ = self._pending[0]
        error = future.exception()
        if error is not None:  # a fault of ours, which must not end the engine
            traceback.print_exception(error)
        self._pending.popleft()


class LowerTiers:
    """Host memory of `ram_bytes` (0: none) and a disk store (None: none) below one device tier.

    chain_value: as in PrefixTree. page_bytes: of a page's encoded tokens. model: the store's number of the model.
    release: takes pages that a job held. min_tokens: shorter chains are not written. `counters` only grow:
    events by name, and `..._seconds`.
    """

    def __init__(
        self, tier: ComputeTier, chain_value: Callable[[bytes, bytes], bytes], page_bytes: int,
        release: Callable[[Sequence[int]], None], *, ram_bytes: int = 0, disk: DurableStore | None = None,
        model: int = 0, min_tokens: int = MIN_TOKENS,
    ) -> None:  # fmt: skip
        geometry = tier.geometry
        self.counters: Counter[str] = Counter()
        self.compute_rate = 0.0
        self.disk = disk
        self._tier = tier
        self._chain = chain_value
        self._page_bytes = page_bytes
        self._release = release
        self.model = model
        self.min_pages = ceil_div(min_tokens, geometry.page_len)
        self.long_pages = ceil_div(LONG_TIMES * min_tokens, geometry.page_len)
        self._page_size = geometry.codec.page_bytes * len(geometry.full_layers)
        self._extent_pages = max(1, EXTENT_BYTES // self._page_size)
        self._staging: Staging | None = None
        if tier.device.type == "cuda" and (ram_bytes or disk is not None):
            most = self._extent_pages * (self._page_size + page_bytes) + SLOT_HEADER_BYTES
            self._staging = Staging(tier.device, most)
            self.counters["unpinned_staging"] = int(not self._staging.pinned)
        pool, self._image_pages = None, self._extent_pages
        if ram_bytes and self._staging is not None and self._staging.pinned:
            largest = geometry.state_bytes + SLOT_HEADER_BYTES
            pool = SlabPool(ram_bytes, largest, PinnedArena, self._staging.synchronize)
            if pool.pinning:
                most = pool.slab_bytes // ceil_div(pool.slab_bytes, IMAGE_BYTES) - SLOT_HEADER_BYTES
                self._image_pages = max(1, most // (self._page_size + page_bytes))
        self.ram = RamRecords(ram_bytes, pool)
        self._counting = Lock()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="read")
        self._restore: LayerRestore | None = None
        if self._staging is not None:
            self._restore = LayerRestore(tier, self._staging, self._readers)
        self._sources: list[Records] = [self.ram] if disk is None else [self.ram, disk]
        self._read_rates: dict[int, float] = {}
        self._failures = 0
        self._jobs: deque[KeepJob] = deque()
        self._seen: set[bytes] = set()
        self._batch: list[tuple[Image, Slot | None]] = []
        self._writer = WritingThread() if disk is not None else None
        # Why the last chain that was to be written had no room; at first, why the shortest that is written has none.
        self._shortage = (
            disk.shortage(self.min_pages * self._page_size + geometry.state_bytes) if disk else ""
        )

    @property
    def trouble(self) -> str:
        """What is wrong, in a few words; empty while nothing is."""
        if self._failures >= FAILURES:
            return f"the last {self._failures} prompts found in the store could not be read from it"
        return self.disk.trouble or self._shortage if self.disk is not None else ""

    @property
    def backlog_bytes(self) -> int:
        """Bytes copied and not yet on disk."""
        return self._batched_bytes + (self._writer.backlog if self._writer is not None else 0)

    @property
    def is_behind(self) -> bool:
        """Whether `advance` has something to do."""
        return bool(self._jobs)

    # Coming back.

    def find(self, root: bytes, tokens: bytes | bytearray, num_pages: int, held: int) -> Found:
        """The longest chain that the first `num_pages` pages of a prompt begin with. held: pages that the device
        has."""
        walked = self._walk(root, tokens, num_pages)
        usable, state = walked.num_pages, None
        if self._tier.geometry.is_hybrid:
            usable, state = self._last_state(walked.keys)
        pieces = [p for p in walked.pieces if p.first < usable and p.stop > held]
        return Found(usable, pieces, state, walked.num_pages)

    def worth_loading(self, found: Found, held: int) -> bool:
        """Whether to load takes less time than to read again, as far as both have been measured."""
        tokens = (found.num_pages - held) * self._tier.geometry.page_len
        seconds = 0.0
        for source, record in found.records:
            rate = self._read_rates.get(id(source))
            if rate is None:
                return True
            seconds += record.num_bytes / rate
        return not self.compute_rate or seconds < tokens / self.compute_rate

    def load(self, found: Found, held: int, page_ids: Sequence[int], slot: int) -> int:
        """Copy what was found to the device: pages from page `held` on into `page_ids`, one id for each page of
        the prompt, and the state into `slot`. Returns the pages that are usable now, of a card when `arrive` says
        so; fewer than `found.num_pages` where a record was not what it should be, which is not offered again.
        """
        self.arrive()
        if self._restore is not None and all(source is self.ram for source, _ in found.records):
            return self._load_layers(self._restore, found, held, page_ids, slot)
        began = time.monotonic()
        ahead: deque[Future[tuple[Image, Slot | None]]] = deque()
        waiting = deque(found.records)
        spare: deque[Buffer] = deque()
        usable = held
        for at in range(len(found.records)):
            while waiting and len(ahead) < READ_AHEAD:
                into = spare.popleft() if spare else None
                ahead.append(self._readers.submit(self._fetch, *waiting.popleft(), into))
            source, record = found.records[at]
            try:
                image, staged = ahead.popleft().result()
                with self._sending(staged):
                    self._place(found, at, image, held, page_ids, slot, wait=self._staging is None)
            except UnreadableError as error:
                for future in ahead:
                    if not future.cancel() and future.exception() is None:
                        self._give_back(future.result()[1])
                self._lose(source, record, error.reason)
                self._join()
                return usable if not self._tier.geometry.is_hybrid else held
            if self._staging is None and source is self.disk:
                spare.append(image.buffer)  # the system clears new memory first, page by page
            if at < len(found.pieces):
                piece = found.pieces[at]
                usable = min(piece.stop, found.num_pages)
        self._join()
        self._count_load(found, held, time.monotonic() - began)
        return found.num_pages

    def _load_layers(
        self, restore: LayerRestore, found: Found, held: int, page_ids: Sequence[int], slot: int
    ) -> int:
        """`load`, from images in host memory. All are checked before anything of any is sent."""
        images = []
        for at, (source, record) in enumerate(found.records):
            try:
                images.append(source.read(record))
                self._check(found, at, images[-1])
            except UnreadableError as error:
                self._lose(source, record, error.reason)
                return held
        parts = []
        for piece, image in zip(found.pieces, images, strict=False):
            _, skip, count = found.wanted(piece, held)
            parts.append((image, range(skip, skip + count)))
        state = found.state and partial(transfer.load_state, images[-1], self._tier, slot, wait=False)
        then = partial(self._count_load, found, held)
        took = partial(self._count_seconds, self.ram, sum(image.record.num_bytes for image in images))
        restore.begin(state, parts, page_ids[held : found.num_pages], then, took)
        self.counters["restored_pinned_bytes"] += sum(i.record.num_bytes - i.own_bytes for i in images)
        return found.num_pages

    def arrive(self, layer: int | None = None) -> None:
        """See LayerRestore: before pages of a card are read."""
        if self._restore is not None:
            self._restore.arrive(layer)

    def settle(self) -> None:
        """See LayerRestore: before pages of a card are anybody else's."""
        if self._restore is not None:
            self._restore.settle()

    def _fetch(
        self, source: Records, record: Record, into: Buffer | None = None
    ) -> tuple[Image, Slot | None]:
        """An image, and the slot that it is in, which is to be given back. In a reading thread. into: memory for it
        where it is in no slot."""
        staging = self._staging
        if self.disk is None or source is not self.disk:
            return source.read(record), None
        if staging is None or record.num_bytes > staging.size:
            return self.disk.read(record, into), None
        slot = staging.up.take()
        assert slot is not None
        try:
            return self.disk.read(record, slot.view), slot
        except BaseException:
            staging.up.give(slot)
            raise

    @contextmanager
    def _sending(self, slot: Slot | None) -> Iterator[None]:
        """Copies are sent to the device, of an image in a slot, which is free after them, or elsewhere."""
        try:
            with nullcontext() if self._staging is None else self._staging.carrying(slot):
                yield
        finally:
            self._give_back(slot)

    def _give_back(self, slot: Slot | None) -> None:
        if slot is not None and self._staging is not None:
            self._staging.up.give(slot)

    def _join(self) -> None:
        """What the device is given from now on comes after all copies."""
        if self._staging is not None:
            self._staging.join()

    def _place(
        self, found: Found, at: int, image: Image, held: int, ids: Sequence[int], slot: int, *, wait: bool
    ) -> None:
        self._check(found, at, image)
        if at == len(found.pieces):
            transfer.load_state(image, self._tier, slot, wait=wait)
            return
        first, skip, count = found.wanted(found.pieces[at], held)
        transfer.load_pages(image, skip, self._tier, ids[first : first + count], wait=wait)

    def _check(self, found: Found, at: int, image: Image) -> None:
        """Raise UnreadableError where an image lacks what its record says."""
        geometry = self._tier.geometry
        shapes = transfer.state_shapes(geometry)
        if at < len(found.pieces):
            tokens = found.pieces[at].record.tokens
            shapes = transfer.pages_shapes(geometry, len(tokens) // self._page_bytes)
        if not transfer.fits(image, shapes):
            raise UnreadableError("shape")

    def _walk(self, root: bytes, tokens: bytes | bytearray, num_pages: int) -> Walk:
        """Through host memory as far as that goes, and from there on the disk."""
        near = walk([self.ram], root, tokens, num_pages, self._page_bytes, self._chain)
        if self.disk is None or near.num_pages == num_pages:
            return near
        far = walk(self._sources, root, tokens, num_pages, self._page_bytes, self._chain)
        rest = [p.after(near.num_pages) for p in far.pieces if p.stop > near.num_pages]
        return Walk(near.pieces + rest, far.keys)

    def _last_state(self, keys: Sequence[bytes]) -> tuple[int, tuple[Records, Record] | None]:
        """The last boundary at which there is a state, in pages, and that state."""
        for stop in range(len(keys), 1, -256):
            some = keys[max(1, stop - 256) : stop]
            held = [(source, source.states(some)) for source in self._sources]
            for page in range(stop - 1, stop - 1 - len(some), -1):
                for source, states in held:
                    if keys[page] in states:
                        return page, (source, states[keys[page]])
        return 0, None

    def _lose(self, source: Records, record: Record, reason: str) -> None:
        self.counters[f"miss_{reason}"] += 1
        self._failures += 1
        if source is self.disk and self._writer is not None:
            self.disk.mark_gone(record)
            if reason != "io_error":  # which may pass: want of memory, or of file descriptors
                self._writer.submit(0, self.disk.drop, record)
        elif self.ram.has(record):
            self.ram.drop(record)

    def _count_load(self, found: Found, held: int, seconds: float = 0.0) -> None:
        disk = [record for source, record in found.records if source is self.disk]
        ram = [record for source, record in found.records if source is self.ram]
        self._failures = 0
        self.counters["hits"] += 1
        self.counters["hits_disk" if disk else "hits_ram"] += 1
        self.counters["restored_tokens"] += (found.num_pages - held) * self._tier.geometry.page_len
        disk_bytes, ram_bytes = (sum(record.num_bytes for record in records) for records in (disk, ram))
        self.counters["restored_disk_bytes"] += disk_bytes
        self.counters["restored_ram_bytes"] += ram_bytes
        source = None if disk and ram else self.disk if disk else self.ram
        self._count_seconds(source, disk_bytes + ram_bytes, seconds)
        for record in ram:
            self.ram.has(record)
        if disk and self._writer is not None and self.disk is not None:
            self._writer.submit(0, self.disk.touch, disk)

    def _count_seconds(self, source: Records | None, num_bytes: int, seconds: float) -> None:
        """So many bytes took so long to come back; None: from several tiers. From any thread."""
        with self._counting:
            self.counters["restore_microseconds"] += round(seconds * 1e6)
            if source is not None and seconds > 0:
                before = self._read_rates.get(id(source), num_bytes / seconds)
                self._read_rates[id(source)] = 0.5 * before + 0.5 * num_bytes / seconds

    def note_compute(self, tokens: int, seconds: float) -> None:
        """So many prompt tokens took so long to read."""
        if seconds > 0:
            rate = tokens / seconds
            self.compute_rate = rate if not self.compute_rate else 0.8 * self.compute_rate + 0.2 * rate

    # Going down.

    def demote(self, entry: Entry) -> None:
        """An entry is about to leave the device: keep its pages and snapshot in host memory, if there is any."""
        size = len(entry.page_ids) * self._page_size
        size += self._tier.geometry.state_bytes if entry.snapshot is not None else 0
        if size > self.ram.capacity:
            self.counters["skipped_demotions"] += self.ram.capacity > 0
            return
        self.arrive()
        assert entry.parent is not None
        try:
            self._demote_pages(entry, entry.parent.key)
            if entry.snapshot is not None and not self._thin_ram(entry):
                self._demote(*self._state_record(entry), entry.snapshot)
        except OSError:  # the system has no memory for it, and nobody waits for it
            self.counters["failed_demotions"] += 1
        self._join()

    def _thin_ram(self, entry: Entry) -> bool:
        """Forget what host memory can do without of the states behind an entry: see `thinned`. Whether it can do
        without the entry's too."""
        behind = self.ram.states_behind(entry.key)
        gone = thinned([entry.stop, *(record.stop for record in behind)], before=entry.start)
        for record in behind:
            if record.stop in gone:
                self.ram.drop(record)
        self.counters["thinned_ram_states"] += len(gone)
        return entry.stop in gone

    def _demote_pages(self, entry: Entry, key: bytes) -> None:
        first, start = 0, entry.start // self._tier.geometry.page_len
        while first < len(entry.page_ids):
            count = self._extent(start + first, len(entry.page_ids) - first, self._image_pages)
            tokens = entry.tokens[first * self._page_bytes : (first + count) * self._page_bytes]
            stop_key = list(chain_values(key, tokens, 0, count, self._page_bytes, self._chain))[-1]
            page_ids = entry.page_ids[first : first + count]
            self._demote(*self._pages_record(key, stop_key, start + first, tokens), page_ids)
            key, first = stop_key, first + count

    def _demote(self, record: Record, shapes: Shapes, source: Sequence[int] | int) -> None:
        """source: the pages, or the state slot; they are held until `_join`."""
        size = Image.size(record, shapes)
        if self.ram.has(record) or not ((place := self.ram.take_place(size)) or self.ram.make_room(size)):
            return
        self.ram.put(self._save(record, shapes, source, place))
        self.counters["unpinned_images"] += self._staging is not None and place is None
        self.counters["demoted_bytes"] += size

    def _save(
        self, record: Record, shapes: Shapes, source: Sequence[int] | int, into: Slot | Place | None = None
    ) -> Image:
        """into: the image is there when its copies are over; else when this returns."""
        image = Image.make(record, shapes, into.view if isinstance(into, Slot) else into)
        with nullcontext() if into is None or self._staging is None else self._staging.carrying(into):
            if isinstance(source, int):
                transfer.save_state(self._tier, source, image, wait=into is None)
            else:
                transfer.save_pages(self._tier, source, image, wait=into is None)
        return image

    def _save_behind(
        self, record: Record, shapes: Shapes, source: Sequence[int] | int
    ) -> tuple[Image, Slot | None]:
        """As `_save`, in a slot where it has room in one. Pages are held until `_join`."""
        staging = self._staging
        if staging is None or Image.size(record, shapes) > staging.size:
            return self._save(record, shapes, source), None
        slot = staging.down.take(wait=False)
        assert slot is not None, "`advance` saw one"
        image = self._save(record, shapes, source, slot)
        if isinstance(source, int):
            self._join()  # nobody holds a state
        return image, slot

    def _pages_record(self, key: bytes, stop_key: bytes, first: int, tokens: bytes) -> tuple[Record, Shapes]:
        """The record of pages from page `first` of a chain on, and its parts."""
        page_len, count = self._tier.geometry.page_len, len(tokens) // self._page_bytes
        record = Record(Kind.PAGES, key, stop_key, first * page_len, (first + count) * page_len, tokens)
        return record, transfer.pages_shapes(self._tier.geometry, count)

    def _state_record(self, entry: Entry) -> tuple[Record, Shapes]:
        record = Record(Kind.STATE, entry.key, entry.key, entry.stop, entry.stop, b"")
        return record, transfer.state_shapes(self._tier.geometry)

    def keep(self, job: KeepJob) -> bool:
        """Take a chain to be written, or its beginning, to which the job is cut then; its pages are given back through
        `release`. False: it is not worth it."""
        if self.disk is None:
            return False
        num_pages, seen = len(job.page_ids), self._see(job)
        if num_pages < self.min_pages:
            self.counters["skipped_short"] += 1
            return False
        if not job.label and num_pages < self.long_pages and seen < num_pages:
            if seen < self.min_pages:
                self.counters["skipped_once"] += 1
                return False
            self.counters["cut_once"] += 1
            job.tokens = job.tokens[: seen * self._page_bytes]
            job.entries = [e for e in job.entries if e.stop <= seen * self._tier.geometry.page_len]
            del job.page_ids[seen:]
        self._jobs.append(job)
        return True

    def _see(self, job: KeepJob) -> int:
        """With how many pages of a chain an earlier one began, as far as is known, up to where a state is."""
        most = min(len(job.page_ids), self.long_pages)
        keys = list(chain_values(job.root, job.tokens, 0, most, self._page_bytes, self._chain))
        seen = next((page for page, key in enumerate(keys) if key not in self._seen), most)
        if len(self._seen) + most > SEEN_PAGES:
            self._seen.clear()
        self._seen.update(keys)
        if not self._tier.geometry.is_hybrid:
            return seen
        stops = [entry.stop // self._tier.geometry.page_len for entry in job.entries]
        return max((stop for stop in stops if stop <= seen), default=0)

    def advance(self, num_bytes: int, *, wait: bool = False) -> None:
        """Copy about so many bytes from the device for the writing thread. wait: for it, where it is behind."""
        while self._jobs and num_bytes > 0:
            job, writer = self._jobs[0], self._writer
            assert writer is not None
            try:
                if not job.begun:
                    # What an earlier job writes is found only when it is there.
                    self._flush_batch()
                    if not writer.idle and not wait:
                        return
                    writer.wait(lambda writer=writer: writer.idle)  # type: ignore[misc]
                    if not self._begin(job):
                        self._finish(job, written=False)
                        continue
                size = self._next_size(job)
                if not self._has_room(writer, self._batched_bytes + size):
                    self._flush_batch()
                    if not wait:
                        return
                    writer.wait(partial(self._has_room, writer, size))
                num_bytes -= self._copy_next(job)
            except Exception as error:
                self.counters["failed_copies"] += 1
                if self._jobs and self._jobs[0] is job:
                    self._finish(job, written=False)
                if not isinstance(error, OSError):  # memory for a copy, or the store's folder, was missing
                    raise
                self._shortage = str(error)

    def after_writing(self, function: Callable[[], _T]) -> Future[_T]:
        """Have the writing thread call it when all that has been closed until now is on disk, or has failed to be."""
        assert self._writer is not None
        future: Future[_T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        if self._jobs:
            self._jobs[-1].then.append(call)
        else:
            self._flush_batch()
            self._writer.submit(0, call)
        return future

    def bytes_of(self, root: bytes, tokens: bytes) -> dict[str, int]:
        """What host memory and disk hold of a chain, in whole records."""
        num_pages = len(tokens) // self._page_bytes
        held = {}
        for name, source in (("host", self.ram), ("disk", self.disk)):
            if source is None:
                continue
            walked = walk([source], root, tokens, num_pages, self._page_bytes, self._chain)
            records = [piece.record for piece in walked.pieces] + list(source.states(walked.keys).values())
            held[name] = sum(record.num_bytes for record in records)
        return held

    def flush(self) -> None:
        """Write everything that waits; when this returns it is durable, or has failed and was counted."""
        self.advance(1 << 62, wait=True)
        self._flush_batch()
        if self._writer is not None:
            writer = self._writer
            writer.wait(lambda: writer.idle)

    def close(self) -> None:
        """Write what waits, and let go of everything."""
        try:
            self.settle()
            self.flush()
        finally:  # a card that failed keeps nobody from closing the rest
            self._flush_batch()
            if self._writer is not None:
                for call in (call for job in self._jobs for call in job.then):  # somebody may wait for it
                    self._writer.submit(0, call)
                self._writer.close()
            self._readers.shutdown()
            if self.disk is not None:
                self.disk.close()
            self.ram.clear()

    @property
    def _batched_bytes(self) -> int:
        return sum(image.record.num_bytes for image, _ in list(self._batch))

    def _begin(self, job: KeepJob) -> bool:
        """Find what of the chain is there already. False: the rest is more than the store may hold."""
        assert self.disk is not None and self._writer is not None
        job.begun = True
        num_pages = len(job.page_ids)
        walked = walk([self.disk], job.root, job.tokens, num_pages, self._page_bytes, self._chain)
        self._writer.submit(0, self.disk.touch, [piece.record for piece in walked.pieces])
        job.next_page = walked.num_pages
        left = num_pages - job.next_page
        rest = chain_values(walked.keys[-1], job.tokens, job.next_page, left, self._page_bytes, self._chain)
        job.keys = [*walked.keys, *rest]
        page_len, there = self._tier.geometry.page_len, self.disk.states(walked.keys if job.entries else [])
        stops = {entry.stop // page_len for entry in job.entries}
        held_stops = {page for page, key in enumerate(walked.keys) if key in there}
        gone = thinned(sorted(stops | held_stops), walked.forks | held_stops)  # not written to be deleted
        job.entries = [e for e in job.entries if e.stop // page_len not in held_stops | gone]
        held = job.next_page * self._page_size + len(there) * self._tier.geometry.state_bytes
        whole = held + left * self._page_size + len(job.entries) * self._tier.geometry.state_bytes
        self._shortage = self.disk.shortage(whole - held, whole)
        self.counters["skipped_large"] += bool(self._shortage)
        return not self._shortage

    def _next_size(self, job: KeepJob) -> int:
        """Bytes of the job's next record, about."""
        if job.next_page < len(job.page_ids):
            return self._extent(job.next_page, len(job.page_ids) - job.next_page) * self._page_size
        return self._tier.geometry.state_bytes if job.entries else 0

    def _copy_next(self, job: KeepJob) -> int:
        """Copy the job's next record, or end the job; bytes copied."""
        self.arrive()
        made: tuple[Image, Slot | None] | None = None
        if job.next_page < len(job.page_ids):
            first, count = job.next_page, self._extent(job.next_page, len(job.page_ids) - job.next_page)
            stop = first + count
            tokens = job.tokens[first * self._page_bytes : stop * self._page_bytes]
            record = self._pages_record(job.keys[first], job.keys[stop], first, tokens)
            made = self._save_behind(*record, job.page_ids[first:stop])
            job.next_page = stop
        elif job.entries:
            entry = job.entries.pop(0)
            if entry.alive and entry.snapshot is not None:  # it may have been given up meanwhile
                made = self._save_behind(*self._state_record(entry), entry.snapshot)
        else:
            self._finish(job, written=True)
        if made is None:
            return 0
        self._batch.append(made)
        if self._batched_bytes >= BATCH_BYTES:
            self._flush_batch()
        return made[0].record.num_bytes

    def _has_room(self, writer: WritingThread, num_bytes: int) -> bool:
        return writer.has_room(num_bytes) and (self._staging is None or self._staging.down.available)

    def _flush_batch(self) -> None:
        if self._batch and self._writer is not None:
            self._writer.submit(self._batched_bytes, self._write, self._batch)
            self._batch = []

    def _write(self, batch: Sequence[tuple[Image, Slot | None]]) -> None:
        """In the writing thread."""
        assert self.disk is not None
        slots = [slot for _, slot in batch if slot is not None]
        try:
            for slot in slots:
                slot.copied.synchronize()
            self.disk.write(self.model, [image for image, _ in batch])
        finally:
            for slot in slots:
                self._staging.down.give(slot)  # type: ignore[union-attr]

    def _finish(self, job: KeepJob, *, written: bool) -> None:
        assert self.disk is not None and self._writer is not None
        self._flush_batch()
        if written:
            self._writer.submit(0, self._note_written, job, len(job.page_ids))
            if self._tier.geometry.is_hybrid:
                self._writer.submit(0, self.disk.thin, self.model, job.root, job.tokens)
        for call in job.then:
            self._writer.submit(0, call)
        self._jobs.popleft()
        self._join()
        self._release(job.page_ids)

    def _note_written(self, job: KeepJob, num_pages: int) -> None:
        """Remember a chain, unless writing has failed and nothing of it is there. What was just written is found again,
        or something is wrong that nobody would notice. From now on all of it was used at once: of batches the first,
        where the chain begins, would be evicted first."""
        assert self.disk is not None
        found = walk([self.disk], job.root, job.tokens, num_pages, self._page_bytes, self._chain)
        if found.num_pages:
            self.disk.note_prefix(self.model, job.root, job.keys[-1], job.tokens, job.label)
        if self.disk.trouble:
            return
        pages = [piece.record for piece in found.pieces]
        self.disk.touch([*pages, *self.disk.states(found.keys).values()])
        if found.num_pages < num_pages:
            self.counters["not_found_again"] += 1
            self.disk.trouble = f"of {num_pages} pages just written {found.num_pages} are found"

    def _extent(self, first: int, left: int, most: int = 0) -> int:
        """Pages of a record that begins with page `first` of its chain: up to the next absolute boundary, of `most`
        pages or those of a file."""
        most = most or self._extent_pages
        return min(left, most - first % most)

    @property
    def events(self) -> Mapping[str, int]:
        """Counts since construction, by name."""
        disk = {} if self.disk is None else self.disk.counters
        return {
            "ram_evicted_records": self.ram.evicted,
            **self.counters,
            **{f"disk_{name}": count for name, count in disk.items()},
        }

    @property
    def held(self) -> Mapping[str, int]:
        """What the tiers hold now, by name."""
        held = {"ram_bytes": self.ram.used, "ram_capacity_bytes": self.ram.capacity}
        if (pool := self.ram.pool) is not None:
            held |= {"ram_pinned_bytes": pool.num_bytes, "ram_pinned_free_bytes": pool.free_bytes}
        if self.disk is not None:
            held |= {f"disk_{name}": count for name, count in self.disk.usage().items()}
            held |= {"disk_quota_bytes": self.disk.quota, "backlog_bytes": self.backlog_bytes}
            held["disk_direct_reads"] = int(bool(self.disk.direct))
        return held
