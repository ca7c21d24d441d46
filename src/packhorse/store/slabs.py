"""Pinned memory in which images of host memory lie, so that a card reads and writes them by itself. No torch.

    slab | image | image | hole | image |      slab | image | hole |      each pinned in whole, cut by first fit

A slab is pinned when an image comes for which there is no hole, and whoever brings it waits: to have it cleared and
pinned in whole takes less time than to touch it page by page. It stays when its images leave, for the next ones, and
goes back to the system when all images do, or for one that needs memory of its own.

NOTE: nothing but copies of one stream (store/staging.py) reads or writes a slab, so that what is sent into a hole comes
after all that was sent out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from packhorse.core.errors import DoesNotFitError
from packhorse.core.units import MIB, round_up

SLAB_BYTES = 64 * MIB
"""Of a slab, about, where no image needs a larger one."""
_MOST = 256 * MIB
"""Of a slab: a copy must not cross from one registered segment (store/arena.py) into the next."""
_GRAIN = 2 * MIB


class Place(NamedTuple):
    """Bytes of a slab that an image has."""

    slab: Slab
    start: int
    view: memoryview

    def free(self) -> None:
        """The image is gone."""
        self.slab.places.remove(self)


class Slab(NamedTuple):
    """A PinnedArena (store/arena.py), its bytes, and the places that are taken, in order."""

    memory: Any
    view: memoryview
    places: list[Place]

    def take(self, size: int) -> Place | None:
        """The first place where `size` bytes are free."""
        start = 0
        for at, stop in enumerate([*(place.start for place in self.places), len(self.view)]):
            if stop - start >= size:
                self.places.insert(at, Place(self, start, self.view[start : start + size]))
                return self.places[at]
            start = stop + len(self.places[at].view) if at < len(self.places) else stop
        return None


class SlabPool:
    """Slabs of one size that take `capacity` bytes at most, each large enough for `largest` bytes where so many are
    allowed and lie in one segment. pin: a PinnedArena of so many bytes, or DoesNotFitError. quiesce: returns when no
    copy is on its way; called before a slab goes back. pinning: False once the system has pinned less. From one
    thread."""

    def __init__(
        self, capacity: int, largest: int, pin: Callable[[int], Any], quiesce: Callable[[], None]
    ) -> None:
        most = max(1, capacity // max(SLAB_BYTES, largest + largest // 32 + _GRAIN))
        self._limit = capacity - capacity // 64  # for what images take beside their bytes: RamRecords.BOOKS
        self.slab_bytes = min(self._limit // most, _MOST) // _GRAIN * _GRAIN
        self.pinning = self.slab_bytes > 0
        self._pin, self._quiesce = pin, quiesce
        self._slabs: list[Slab] = []

    @property
    def num_bytes(self) -> int:
        """What slabs take."""
        return len(self._slabs) * self.slab_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of slabs that no image has."""
        return self.num_bytes - sum(len(place.view) for slab in self._slabs for place in slab.places)

    def take(self, size: int, limit: int) -> Place | None:
        """Pinned memory for `size` bytes, at most a slab's; None: there is none. limit: bytes that slabs may take
        now."""
        size = round_up(size, 4096)
        place = next(filter(None, (slab.take(size) for slab in self._slabs)), None)
        if place is None and self.pinning and self.num_bytes + self.slab_bytes <= min(limit, self._limit):
            try:
                memory = self._pin(self.slab_bytes)
                self._slabs.append(Slab(memory, memory.bytes.numpy().data[: self.slab_bytes], []))
                place = self._slabs[-1].take(size)
            except DoesNotFitError:
                self.pinning = False
        return place

    def give_back(self) -> bool:
        """Return a slab without images to the system; False: there is none."""
        empty = next((slab for slab in self._slabs if not slab.places), None)
        if empty is None:
            return False
        self._quiesce()
        self._slabs.remove(empty)
        empty.memory.close()
        return True
