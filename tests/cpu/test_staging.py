"""What passes through pinned slots, on a card whose copies are late: they are done when somebody waits for them."""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from threading import RLock

import pytest
import test_durable_store as plain
import torch
from test_durable_store import KINDS, make, run, tokens

from packhorse.core.errors import DoesNotFitError
from packhorse.core.units import MIB
from packhorse.store import lower, staging, transfer
from packhorse.store.kv import KVStore
from packhorse.store.staging import SLOTS_DOWN, SLOTS_UP, Staging


class Stream:
    """Work that was given and not done yet."""

    def __init__(self, device: object = None) -> None:
        self.work: list[Callable[[], None]] = []
        self.late = 0
        self._lock = RLock()

    def wait_stream(self, other: "Stream") -> None:
        other.drain()

    def drain(self) -> None:
        with self._lock:
            while self.work:
                self.late += 1
                self.work.pop(0)()


class Event:
    def __init__(self, *, blocking: bool) -> None:
        assert blocking
        self.stream: Stream | None = None

    def record(self) -> None:
        self.stream = Card.current

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.drain()


class Card:
    compute = Stream()
    current = compute

    @staticmethod
    @contextmanager
    def stream(stream: Stream):
        before, Card.current = Card.current, stream
        try:
            yield
        finally:
            Card.current = before


@pytest.fixture
def late(monkeypatch) -> None:
    """Tiers on the CPU pass for ones on a card, and their copies that nobody waits for are put off."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", Card.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Card.current)
    monkeypatch.setattr(staging, "PinnedTensor", lambda tensor: tensor)
    for name in ("load_pages", "save_pages", "load_state", "save_state"):

        def put_off(*args, copy=getattr(transfer, name), wait: bool = True) -> None:
            if wait:
                assert Card.current is Card.compute
                copy(*args)
            else:
                assert Card.current is not Card.compute
                Card.current.work.append(partial(copy, *args))

        monkeypatch.setattr(transfer, name, put_off)
    add_tiers = KVStore.add_tiers

    def on_a_card(store: KVStore, **settings) -> None:
        store._tier.device = torch.device("cuda")
        add_tiers(store, **settings)

    monkeypatch.setattr(KVStore, "add_tiers", on_a_card)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extent", [1, 3, 1000])
def test_nothing_is_read_before_it_has_arrived(tmp_path, late, monkeypatch, kind, extent):
    """Pages and states are checked by their content, in every step and after it; free memory is poisoned at once, so a
    copy from it that is late would carry that."""
    monkeypatch.setattr(lower, "EXTENT_BYTES", extent * 4 * 2 * 64)
    documents = [tokens(37, seed) for seed in range(3)]
    store = make(tmp_path / "s", kind, ram=MIB)
    for prompt in documents:
        assert run(store, prompt, [7, 8], marks=[20]) == 0
        while store._evict_leaf():
            pass
        assert run(store, prompt) == 36
    assert store.lower.counters["hits_ram"] == 3
    assert store.lower._staging._stream.late > 0
    store.close_tiers()
    store = make(tmp_path / "s", kind)
    for prompt in documents:
        assert run(store, prompt) == 36
        assert run(store, [*prompt[:22], 5, 5, 5]) == 20
    assert store.lower.counters["hits_disk"] == (3 if kind == "dense" else 6)
    store.close_tiers()


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("where", ["ram", "disk"])
def test_forks_edits_and_residues(tmp_path, late, kind, where):
    plain.test_forks_and_edits(tmp_path / "forks", kind, where)
    plain.test_every_residue_comes_back_in_a_new_process(tmp_path / "residues", kind)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_slots_come_back(tmp_path, late, monkeypatch, kind):
    """After many records up and down, after damage, where the disk is full, and of records that have no room."""
    monkeypatch.setattr(lower, "EXTENT_BYTES", 4 * 2 * 64)

    def check(store: KVStore) -> None:
        found = store.lower._staging
        assert found.down._free.qsize() == SLOTS_DOWN and found.up._free.qsize() == SLOTS_UP
        assert (found._stream.late > 0) is staged
        store.close_tiers()

    staged = True
    store = make(tmp_path / "s", kind, num_pages=80)
    for seed in range(3):
        run(store, tokens(100, seed), marks=[20, 40])
    check(store)
    store = make(tmp_path / "s", kind, num_pages=80)
    for seed in range(3):
        assert run(store, tokens(100, seed)) == 96, "25 records, in 12 slots"
    check(store)
    for path in sorted((tmp_path / "s" / "models").glob("*/*"))[::5]:
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    store = make(tmp_path / "s", kind, num_pages=80)
    for seed in range(3):
        run(store, tokens(100, seed))
    assert store.lower.counters["miss_checksum"] > 0
    store.lower.disk.reserve = 1 << 60
    for seed in range(8, 12):
        run(store, tokens(60, seed))
    check(store)
    staged = False
    monkeypatch.setattr(lower, "SLOT_HEADER_BYTES", 0)
    for reused in (0, 56):
        store = make(tmp_path / "t", kind)
        assert run(store, tokens(60, 2)) == reused
        check(store)


def test_slots_are_aligned_and_do_not_meet(late):
    made = Staging(torch.device("cuda"), 5000)
    assert made.size == 8192 and made.pinned
    slots = [made.up.take() for _ in range(SLOTS_UP)] + [made.down.take() for _ in range(SLOTS_DOWN)]
    assert not made.up.available and made.up.take(wait=False) is None
    starts = sorted(torch.frombuffer(slot.view, dtype=torch.uint8).data_ptr() for slot in slots)
    assert all(start % 4096 == 0 for start in starts)
    assert all(b - a == 8192 for a, b in pairwise(starts))


def test_where_the_system_pins_too_little(late, monkeypatch):
    def refuse(tensor):
        raise DoesNotFitError("No.", asked=2, available=1, unit="bytes")

    monkeypatch.setattr(staging, "PinnedTensor", refuse)
    store = make(None, "hybrid", ram=MIB)
    assert store.lower.counters["unpinned_staging"] == 1
    assert run(store, tokens(30)) == 0
    while store._evict_leaf():
        pass
    assert run(store, tokens(30)) == 28
    store.close_tiers()
