"""Pinned memory of images in host memory: places do not meet, what is counted is what is taken, and all goes back."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from durable_files import key
from packhorse.core.errors import DoesNotFitError
from packhorse.core.units import GIB, MIB
from packhorse.store import slabs
from packhorse.store.records import Image, Kind, RamRecords, Record
from packhorse.store.slabs import SlabPool

LINE = 4096


class System:
    """Pins `limit` bytes."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit, self.pinned, self.quiet = limit, 0, 0

    def pin(self, size: int) -> System.Memory:
        if self.pinned + size > self.limit:
            raise DoesNotFitError("No.", asked=2, available=1, unit="bytes")
        return System.Memory(self, size)

    def quiesce(self) -> None:
        self.quiet += 1

    class Memory:
        def __init__(self, system: System, size: int) -> None:
            self.system, self.bytes = system, torch.zeros(size, dtype=torch.uint8)
            system.pinned += size

        def close(self) -> None:
            self.system.pinned -= len(self.bytes)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Slabs of 16 lines or so, of whole lines."""
    monkeypatch.setattr(slabs, "SLAB_BYTES", 16 * LINE)
    monkeypatch.setattr(slabs, "_GRAIN", LINE)


def pool_of(capacity: int, system: System, largest: int = 1) -> SlabPool:
    return SlabPool(capacity, largest, system.pin, system.quiesce)


SIZES = st.integers(1, 18 * LINE)


@given(
    st.integers(1, 120),
    st.lists(st.one_of(SIZES, st.integers(-40, -1), st.just(0)), max_size=80),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_places_against_a_model(lines, actions, short):
    """A size takes a place, a negative number gives one of those taken, 0 gives an empty slab back."""
    system = System(40 * LINE if short else 1 << 40)
    pool, taken = pool_of(lines * LINE, system), []
    for action in actions:
        if action > 0:
            place = pool.take(action, 1 << 60) if action <= pool.slab_bytes else None
            if place is not None:
                assert action <= len(place.view) < action + LINE
                taken.append(place)
            else:
                room = max((room for slab in pool._slabs for _, room in holes(slab)), default=0)
                full = pool.num_bytes + pool.slab_bytes > pool._limit
                assert action > room and (full or not pool.pinning or action > pool.slab_bytes)
        elif action and taken:
            taken.pop(action % len(taken)).free()
        elif not action:
            empty = pool.num_bytes - len({id(place.slab) for place in taken}) * pool.slab_bytes
            before = system.quiet
            assert pool.give_back() is (empty > 0) and system.quiet == before + (empty > 0)
        check(pool, taken)
        assert system.pinned == pool.num_bytes <= min(lines * LINE, system.limit)
    for place in taken:
        place.free()
    while pool.give_back():
        pass
    assert system.pinned == pool.num_bytes == pool.free_bytes == 0


def holes(slab) -> list[tuple[int, int]]:
    """Where each place ends, and bytes from there to the next."""
    ends = [0, *(place.start + len(place.view) for place in slab.places)]
    return [
        (end, start - end)
        for end, start in zip(ends, [*(p.start for p in slab.places), len(slab.view)], strict=True)
    ]


def check(pool: SlabPool, taken: list) -> None:
    """Places are those that were taken, lie in their slab, and do not meet."""
    for slab in pool._slabs:
        held = sorted((place.start, len(place.view)) for place in taken if place.slab is slab)
        assert [(place.start, len(place.view)) for place in slab.places] == held
        assert all(room >= 0 for _, room in holes(slab)) and len(slab.view) == pool.slab_bytes
        assert all(one + size <= other for (one, size), (other, _) in pairwise(held))
    assert pool.free_bytes == len(pool._slabs) * pool.slab_bytes - sum(len(p.view) for p in taken)


@pytest.mark.parametrize("largest", [MIB, 61 * MIB, 64 * MIB, 100 * MIB, 140 * MIB])
@pytest.mark.parametrize("capacity", [3 * MIB, 63 * MIB, 256 * MIB, 2 * GIB, 2 * GIB + 12345, 64 * GIB])
def test_sizes(monkeypatch, largest, capacity):
    """Where host memory holds the largest image several times a slab has room for it, and little is left over."""
    monkeypatch.setattr(slabs, "SLAB_BYTES", 64 * MIB)
    monkeypatch.setattr(slabs, "_GRAIN", 2 * MIB)
    pool = pool_of(capacity, System(), largest)
    assert pool.slab_bytes % (2 * MIB) == 0 and pool.pinning
    assert pool.slab_bytes >= min(largest, capacity // 2)
    slabs_take = pool._limit // pool.slab_bytes * pool.slab_bytes
    assert 0.6 * capacity < slabs_take <= capacity * 63 / 64 + 1
    assert capacity < GIB or slabs_take > 0.93 * capacity


def image(ram: RamRecords, number: int, size: int) -> Image | None:
    """As a tier makes one."""
    record, shapes = Record(Kind.STATE, key(number), key(number), 4, 4, b""), {"state": (size,)}
    place = ram.take_place(Image.size(record, shapes))
    if place is None and not ram.make_room(Image.size(record, shapes)):
        return None
    made = Image.make(record, shapes, place)
    made.parts["state"][:] = number.to_bytes(2, "little") * (size // 2)
    return made


@pytest.mark.parametrize("limit", [1 << 40, 30 * LINE, 0])
def test_images_share_what_host_memory_is_given(limit):
    """In slabs and in memory of their own, larger than a slab and smaller, evicted, used and dropped: counted whole, as
    the system counts it, and each holds what it was filled with until it goes."""
    system = System(limit)
    ram = RamRecords(100 * LINE, pool_of(100 * LINE, system))
    ram.BOOKS = 64
    sizes = [100, 3 * LINE, 9 * LINE, 9 * LINE, 40 * LINE]
    held: dict[int, Image] = {}
    for number in range(300):
        made = image(ram, number, sizes[number * 7 % 5])
        assert made is not None and (
            made.place is not None or made.record.num_bytes > ram.pool.slab_bytes or limit < 1 << 40
        )
        assert ram.put(made) and not ram.put(made)
        held[number] = made
        held = {n: old for n, old in held.items() if old.record.identity in ram._images}
        own = sum(ram._cost(i.record.num_bytes) for i in held.values() if i.place is None)
        books = ram.BOOKS * sum(i.place is not None for i in held.values())
        assert ram.used == system.pinned + own + books <= ram.capacity
        for other, old in held.items():
            assert bytes(old.parts["state"]) == other.to_bytes(2, "little") * (len(old.parts["state"]) // 2)
        if number % 11 == 0:
            ram.drop(held.pop(min(held)).record)
    assert ram.evicted > 100 and len(held) > 1
    assert (system.pinned > 0) is (limit > 0) and ram.pool.pinning is (limit == 1 << 40)
    assert image(ram, 1000, 101 * LINE) is None and len(ram) == len(held)
    ram.clear()
    assert ram.used == system.pinned == 0
