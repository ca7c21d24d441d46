"""Host memory for a card, against a driver that pins as much as it is told to."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from packhorse.core.errors import DoesNotFitError
from packhorse.core.units import MIB
from packhorse.engine.load import host_arena, pin_embedding
from packhorse.store import arena


class Driver:
    """cudaHostRegister that refuses what goes beyond `limit` bytes, and waits before whatever it does for `gate`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.pinned: dict[int, int] = {}
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert self.gate.wait(60)
        with self._lock:
            if sum(self.pinned.values()) + size > self.limit:
                return 2
            self.pinned[address] = size
            return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


@pytest.fixture
def driver(monkeypatch):
    driver = Driver(1 << 40)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(arena, "SEGMENT_BYTES", 4 * MIB)
    monkeypatch.setattr(arena, "RING_BYTES", 1000)
    return driver


def test_segments_are_registered_and_given_back(driver):
    told: list[tuple[int, int]] = []
    pinned = arena.PinnedArena(9 * MIB + 5, lambda done, total: told.append((done, total)))
    assert sorted(driver.pinned.values()) == [2 * MIB, 4 * MIB, 4 * MIB] and pinned.num_bytes == 10 * MIB
    assert told[-1] == (10 * MIB, 10 * MIB)
    pinned.bytes[:] = torch.arange(10 * MIB) % 251
    target = torch.zeros(5 * MIB, dtype=torch.uint8)
    pinned.copy_to(target, 3 * MIB + 7)
    assert torch.equal(target, pinned.bytes[3 * MIB + 7 : 8 * MIB + 7])
    del pinned
    gc.collect()
    until(lambda: not driver.pinned)


def until(fact) -> None:
    """Threads that have just done their work let go of what they hold a moment later."""
    end = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_was_made_is_copied_once_its_place_is_registered(driver):
    driver.gate.clear()
    pinned = arena.PinnedArena(10 * MIB, wait=False)
    pinned.bytes[:100] = 7  # nobody waits to write
    source = (torch.arange(6 * MIB) % 251).byte().view(3, -1)
    place = pinned.bytes[3 * MIB : 9 * MIB].view(3, -1)  # of all three segments
    copier = threading.Thread(target=pinned.copy_from, args=(place, source))
    copier.start()
    copier.join(0.2)
    assert copier.is_alive() and not place.any()
    driver.gate.set()
    copier.join(60)
    assert torch.equal(place, source) and sum(driver.pinned.values()) == 10 * MIB
    assert host_arena(pinned) == (pinned, ())
    pinned.close()
    assert not driver.pinned


def test_resident_memory_is_what_was_asked_for(driver):
    """Within 2 %, whatever is written to it: no power of two above the size."""

    def resident() -> int:
        return psutil.Process().memory_info().rss

    asked = 257 * MIB + 5
    before = resident()
    pinned = arena.PinnedArena(asked)
    pinned.bytes.fill_(1)
    assert 0.98 * asked < resident() - before < 1.02 * asked and sum(driver.pinned.values()) < 1.02 * asked
    pinned.close()


def test_a_load_that_ends_early_ends_the_registering(driver, monkeypatch):
    monkeypatch.setattr(arena, "THREADS", 1)
    driver.gate.clear()
    pinned = arena.PinnedArena(40 * MIB, wait=False)
    threading.Timer(0.1, driver.gate.set).start()
    pinned.close()
    time.sleep(0.1)
    assert not driver.pinned


def test_a_system_that_pins_little(driver):
    """What was pinned is given back, both numbers are told, and experts pass through the ring instead."""
    driver.limit = 5 * MIB
    with pytest.raises(DoesNotFitError) as caught:
        arena.PinnedArena(10 * MIB)
    assert (caught.value.asked, caught.value.available) == (10 * MIB, 4 * MIB) and not driver.pinned
    half = arena.PinnedArena(10 * MIB, wait=False)
    source = (torch.arange(10 * MIB) % 251).byte()
    half.copy_from(half.bytes, source)  # into what is pinned and what is not
    paged, notes = host_arena(half)
    assert (
        isinstance(paged, arena.PagedArena) and "slower" in notes[0] and sum(driver.pinned.values()) == 1000
    )
    assert paged.bytes.data_ptr() == half.bytes.data_ptr() and torch.equal(paged.bytes, source)
    for size in (1, 500, 501, 1700):
        target = torch.zeros(size, dtype=torch.uint8)
        paged.copy_to(target, 123)
        assert torch.equal(target, paged.bytes[123 : 123 + size])
    paged.close()
    assert not driver.pinned


def test_an_embedding_that_is_not_pinned_is_looked_up_by_the_host(driver):
    table = torch.zeros(100, dtype=torch.uint8)
    model = SimpleNamespace(embed_from_host=lambda pin: setattr(model, "pinned", pin(table)))
    assert pin_embedding(model) == () and driver.pinned == {table.data_ptr(): 100}
    model.pinned = None
    driver.limit = 99
    (note,) = pin_embedding(model)
    assert "100 B" in note and "slower" in note and model.pinned is None and not driver.pinned
