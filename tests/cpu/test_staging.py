"""What passes through pinned slots, on a card whose copies are late: they are done when somebody waits for them."""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from random import Random
from threading import Event as Flag
from threading import RLock, local

import pytest
import test_durable_store as plain
import torch
from test_durable_store import KINDS, make, run, tokens

import store_model as model
from packhorse.core.errors import DoesNotFitError
from packhorse.core.types import Span
from packhorse.core.units import MIB
from packhorse.store import lower, restore, slabs, staging, transfer
from packhorse.store.kv import KVStore, StoredSequence
from packhorse.store.staging import SLOTS_DOWN, SLOTS_UP, Staging

TIME = restore.LayerRestore._time


class Stream:
    """Work that was given and not done yet."""

    def __init__(self, device: object = None) -> None:
        self.work: list[Callable[[], None]] = []
        self.late = 0
        self.lock = RLock()

    def wait_stream(self, other: "Stream") -> None:
        other.drain()

    def wait_event(self, event: "Event") -> None:
        assert self is Card.compute
        event.wait()

    def synchronize(self) -> None:
        self.drain()

    def give(self, work: Callable[[], None]) -> None:
        with self.lock:
            self.work.append(work)

    def drain(self, until: int | None = None) -> None:
        """Do what was given, up to `until` pieces of it since the beginning."""
        with self.lock:
            while self.work and (until is None or self.late < until):
                self.late += 1
                self.work.pop(0)()


class Event:
    """Behind what its stream had been given when it was recorded last."""

    def __init__(self, *, blocking: bool = False, enable_timing: bool = False) -> None:
        self.blocking = blocking
        self.stream: Stream | None = None
        self.given = 0

    def record(self) -> None:
        self.stream = Card.current()
        with self.stream.lock:
            self.given = self.stream.late + len(self.stream.work)

    def synchronize(self) -> None:
        assert self.blocking, "a thread that waits takes a core"
        self.wait()

    def wait(self) -> None:
        if self.stream is not None:
            self.stream.drain(self.given)


class Pinned:
    """As PinnedArena, of a system that pins `limit` bytes. Late copies into what was given back fail."""

    limit, pinned = 1 << 40, 0

    def __init__(self, size: int) -> None:
        if Pinned.pinned + size > Pinned.limit:
            raise DoesNotFitError("No.", asked=2, available=1, unit="bytes")
        self.bytes = torch.full((size,), 0xEE, dtype=torch.uint8)
        Pinned.pinned += size

    def close(self) -> None:
        assert not Card.copies.work
        Pinned.pinned -= len(self.bytes)


class Card:
    copies: Stream
    compute = Stream()
    of_thread = local()

    @classmethod
    def current(cls, device: object = None) -> Stream:
        return getattr(cls.of_thread, "stream", cls.compute)

    @classmethod
    @contextmanager
    def stream(cls, stream: Stream):
        before, cls.of_thread.stream = cls.current(), stream
        try:
            yield
        finally:
            cls.of_thread.stream = before


@pytest.fixture
def late(monkeypatch) -> None:
    """Tiers on the CPU pass for ones on a card, and their copies that nobody waits for are put off."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", Card.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Card.current)
    monkeypatch.setattr(staging, "PinnedTensor", lambda tensor: tensor)
    monkeypatch.setattr(lower, "PinnedArena", Pinned)
    monkeypatch.setattr(Pinned, "limit", 1 << 40)
    # It would wait for the copies.
    monkeypatch.setattr(restore.LayerRestore, "_time", lambda *args: None)
    for name in ("load_pages", "save_pages", "load_state", "save_state"):

        def put_off(*args, copy=getattr(transfer, name), wait: bool = True) -> None:
            if wait:
                assert Card.current() is Card.compute
                copy(*args)
            else:
                assert Card.current() is not Card.compute
                Card.current().give(partial(copy, *args))

        monkeypatch.setattr(transfer, name, put_off)
    add_tiers = KVStore.add_tiers

    def on_a_card(store: KVStore, **settings) -> None:
        store._tier.device = torch.device("cuda")
        add_tiers(store, **settings)
        if store.lower._staging is not None:
            Card.copies = store.lower._staging._stream

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
    monkeypatch.setattr(lower, "SLOT_HEADER_BYTES", 0)
    for reused in (0, 56):
        staged = reused > 0  # what comes back is sent behind the rest from memory of its own
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


def in_host_memory(kind: str, prompt: list[int], **settings) -> KVStore:
    """A store that has read a prompt and given all of it up for host memory. A slot holds two pages of a layer."""
    store = make(None, kind, ram=MIB, num_pages=80, **settings)
    store.lower._staging.size = 2 * store.geometry.codec.page_bytes
    assert run(store, prompt, marks=[40, 80]) == 0
    while store._evict_leaf():
        pass
    return store


def all_sent(store: KVStore) -> None:
    for layer in store.lower._restore._coming:
        assert all(sent.exception(10) is None for sent in layer.sent)


def arrived(store: KVStore, sequence: StoredSequence) -> list[int]:
    """Pages of each layer that are not as free ones are."""
    pages = [store._tier.pages(layer)[sequence.page_ids] for layer in store.geometry.full_layers]
    return [int((of_layer != 0xFF).any(1).sum()) for of_layer in pages]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extent", [1, 2])
def test_layers_arrive_one_after_the_other(late, monkeypatch, kind, extent):
    """The first layer computes while threads still copy the last into slots; what is read is checked by its content."""
    monkeypatch.setattr(lower, "EXTENT_BYTES", extent * 4 * 2 * 64)
    prompt = tokens(100)
    store = in_host_memory(kind, prompt)
    first, last = store.geometry.full_layers
    gathered, computed, seen = [], Flag(), []
    gather, check = transfer.gather_layer, model.check_segments

    def held_up(parts, layer, *others):
        assert layer == first or computed.wait(10), "the last layer is not computed before the first"
        gathered.append((layer, sum(len(pages) for _, pages in parts)))
        return gather(parts, layer, *others)

    def compute(store, segments, ids, stop, layer):
        check(store, segments, ids, stop, layer)
        if stop == 100 and layer == first:
            seen.append(arrived(store, sequence))
            computed.set()

    monkeypatch.setattr(transfer, "gather_layer", held_up)
    monkeypatch.setattr(model, "check_segments", compute)
    sequence = store.open(prompt, 100)
    assert sequence.cached_len == 96 and "hits" not in store.lower.counters
    model.prefill(store, sequence)
    assert seen == [[25, 0]]
    assert [layer for layer, _ in gathered] == [first] * 12 + [last] * 12
    assert {count for _, count in gathered} == {2}
    assert store.lower.counters["hits_ram"] == 1 and store.lower.counters["restored_tokens"] == 96
    store.close(sequence)
    model.check(store)
    store.close_tiers()


def test_a_layer_waits_for_its_own_copies_alone(late, monkeypatch):
    """All have been sent, in slots that nobody needs again."""
    monkeypatch.setattr(staging, "SLOTS_UP", 64)
    prompt = tokens(100)
    store = in_host_memory("dense", prompt)
    sequence = store.open(prompt, 100)
    all_sent(store)
    assert arrived(store, sequence) == [0, 0]
    span = Span(sequence.slot, 0, 96, 4)
    for view, want in zip(store.views([span]), ([24, 0], [24, 24]), strict=True):
        next(view.segments(span, 9))
        assert arrived(store, sequence) == want
    store.rewind(sequence)
    model.prefill(store, sequence)
    store.close(sequence)
    model.check(store)
    store.close_tiers()


def test_after_what_was_computed_before_and_before_a_captured_step(late, monkeypatch):
    """Before, the same pages were written to, late too; a captured step waits for all layers."""
    monkeypatch.setattr(staging, "SLOTS_UP", 64)
    prompt = tokens(100)
    store = in_host_memory("hybrid", prompt)
    Card.compute.give(lambda: store._tier.poison_pages(list(range(80))))
    sequence = store.open(prompt, 100)
    all_sent(store)
    store.arrive()
    Card.compute.drain()
    assert arrived(store, sequence) == [24, 24]
    model.prefill(store, sequence)
    store.close(sequence)
    store.close_tiers()


@pytest.mark.parametrize("kind", KINDS)
def test_who_else_uses_or_takes_the_pages_waits(late, monkeypatch, kind):
    """One that shares them and computes first, one that ends at once, and eviction; free pages stay poisoned."""
    monkeypatch.setattr(lower, "EXTENT_BYTES", 4 * 2 * 64)
    prompt = tokens(100)
    store = in_host_memory(kind, prompt)
    opened = [store.open(prompt, 100), store.open(prompt, 100)]
    assert [sequence.cached_len for sequence in opened] == [96, 96]
    for sequence in opened[::-1]:
        model.prefill(store, sequence)
        store.close(sequence)
    model.check(store)
    for keep in (True, False):
        while store._evict_leaf():
            pass
        model.check(store)
        sequence = store.open(prompt, 100, keep=keep)
        assert sequence.cached_len == 96
        store.close(sequence)
        model.check(store)
        assert bool(store.stats.entries) is keep
    assert run(store, prompt) == 96
    model.check_all_free(store)
    store.close_tiers()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [0, 48, 92])
def test_of_a_damaged_image_in_the_middle_nothing_is_sent(late, monkeypatch, kind, position):
    """A counted miss; what lies before it is gone on from, as if the rest had never been there."""
    monkeypatch.setattr(lower, "EXTENT_BYTES", 4 * 2 * 64)
    prompt = tokens(100)
    store = in_host_memory(kind, prompt)
    images = store.lower.ram._images.values()
    damaged = next(image for image in images if image.record.start <= position < image.record.stop)
    damaged.parts[f"layers.{store.geometry.full_layers[-1]}"] = memoryview(b"")
    gather, sent = transfer.gather_layer, []

    def note(parts, *others):
        sent.extend(image for image, _ in parts)
        return gather(parts, *others)

    monkeypatch.setattr(transfer, "gather_layer", note)
    start = damaged.record.start
    usable = start if kind == "dense" else max(p for p in (0, 40, 80) if p <= start)
    assert run(store, prompt) == usable
    assert store.lower.counters["miss_shape"] == 1 and not store.lower.trouble
    assert store.lower.counters["hits_ram"] == (usable > 0) and damaged not in sent
    assert all(image.record.stop <= usable for image in sent)
    assert run(store, prompt) == 96, "it was read again"
    store.close_tiers()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [False, True])
def test_a_copy_that_fails_is_never_computed_with(late, monkeypatch, kind, keep):
    """A fault of the machine, not of an image: whoever would read or keep the pages fails, then and later."""
    prompt = tokens(100)
    store = in_host_memory(kind, prompt)
    last = store.geometry.full_layers[-1]
    gather = transfer.gather_layer

    def fail(parts, layer, *others):
        if layer == last:
            raise MemoryError("no more")
        return gather(parts, layer, *others)

    monkeypatch.setattr(transfer, "gather_layer", fail)
    sequence = store.open(prompt, 100)
    for _ in range(2):
        with pytest.raises(MemoryError):
            model.prefill(store, sequence)
        store.rewind(sequence)
    store.close(sequence, keep=keep)
    assert store.lower.counters["hits"] == store.stats.pages_used == 0
    if keep:
        with pytest.raises(MemoryError):
            store._evict_leaf()
    else:
        model.check(store)
    with pytest.raises(MemoryError):
        model.prefill(store, store.open(prompt, 100))
    assert store.lower._staging.up._free.qsize() == SLOTS_UP


@pytest.fixture
def pinned(late, monkeypatch) -> None:
    """Slabs of 64 KiB, an image there of a page, and nothing of it passes through a slot."""
    monkeypatch.setattr(slabs, "_GRAIN", 1 << 16)
    monkeypatch.setattr(slabs, "SLAB_BYTES", 1 << 16)
    monkeypatch.setattr(lower, "IMAGE_BYTES", 1)
    monkeypatch.setattr(lower, "SLOT_HEADER_BYTES", 4096)
    monkeypatch.setattr(Pinned, "pinned", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_from_slabs_with_no_thread_between(pinned, monkeypatch, kind):
    """Read by a card that is late, in the order of the layers; a second time from the same places."""
    monkeypatch.setattr(transfer, "gather_layer", None)
    prompt, others = tokens(100), [tokens(100, seed) for seed in (1, 2)]
    store = in_host_memory(kind, prompt)
    ram = store.lower.ram
    assert len(ram) >= 24 and all(image.place is not None for image in ram._images.values())
    for _ in range(2):
        sequence = store.open(prompt, 100)
        assert sequence.cached_len == 96 and Card.copies.work
        assert arrived(store, sequence) == [0, 0]
        span = Span(sequence.slot, 0, 96, 4)
        views = [
            views
            for views, kind in zip(store.views([span]), store.geometry.layer_kinds, strict=True)
            if kind is model.FULL
        ]
        for view, want in zip(views, ([24, 0], [24, 24]), strict=True):
            next(view.segments(span, 9))
            assert arrived(store, sequence) == want
        store.rewind(sequence)
        model.prefill(store, sequence)
        store.close(sequence)
        model.check(store)
        for other in others:
            run(store, other)
        while store._evict_leaf():
            pass
    counters = store.lower.counters
    assert counters["restored_pinned_bytes"] == counters["restored_ram_bytes"] > 0
    assert counters["unpinned_images"] == 0 and counters["hits_ram"] == 4
    held = store.lower.held
    assert held["ram_pinned_bytes"] == Pinned.pinned > held["ram_pinned_free_bytes"]
    store.clear()
    assert Pinned.pinned == 0
    store.close_tiers()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [0, 1 << 16, 1 << 40])
def test_places_are_used_again_while_copies_are_late(pinned, monkeypatch, kind, limit):
    """Host memory holds a part of what leaves, all copies are late, and what comes back is checked by its content.
    Where the system pins less, images lie in ordinary memory, and that is counted."""
    monkeypatch.setattr(Pinned, "limit", limit)
    store = make(None, kind, ram=1 << 18, num_pages=60, sequences=2, snapshots=8)
    documents = [tokens(60, seed) for seed in range(4)]
    for turn, number in enumerate([0, 1, 0, 1, 2, 0, 1, 0, 3, 1, 3, 1]):
        document = documents[number]
        sequence = store.open(document, 62, [20, 40])
        other = store.open([*document[:30], turn], 40)
        while store._evict_leaf():  # while what comes back is on its way
            pass
        for one in (other, sequence):
            model.prefill(store, one)
            store.close(one)
        model.check(store)
        assert store.lower.ram.used <= 1 << 18 and Pinned.pinned <= limit
        if turn == 8:
            store.clear()
            assert store.lower.ram.used == Pinned.pinned == 0
    counters = store.lower.counters
    assert store.lower.ram.evicted > 0 and counters["hits_ram"] > 0
    assert (counters["unpinned_images"] > 0) is (limit < 1 << 40)
    assert (counters["restored_pinned_bytes"] > 0) is (limit > 0)
    store.close_tiers()
    assert Pinned.pinned == 0


def test_seconds_are_the_card_s(pinned, monkeypatch):
    """Those that its events say, also where slots were passed through; they are of the rate that is compared."""
    took = []
    monkeypatch.setattr(restore.LayerRestore, "_time", TIME)
    monkeypatch.setattr(
        Event, "elapsed_time", lambda began, end: took.append((began, end)) or 2000.0, raising=False
    )
    store = in_host_memory("hybrid", tokens(100))
    below = store.lower
    assert run(store, tokens(100)) == 96
    store.close_tiers()
    ((began, end),) = took
    assert end.given - began.given == 24 * 2 + 1, "pages of two layers, and the state"
    assert below.counters["restore_microseconds"] == 2_000_000
    assert below._read_rates == {id(below.ram): below.counters["restored_ram_bytes"] / 2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_random_walk_over_slabs(tmp_path, pinned, monkeypatch, kind, seed):
    test_random_walk(tmp_path, None, monkeypatch, kind, seed, ram=1 << 18)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_random_walk(tmp_path, late, monkeypatch, kind, seed, ram=MIB // 2):
    """Up to three sequences at once that share prefixes, from the card, host memory and disk; some end early."""
    monkeypatch.setattr(lower, "EXTENT_BYTES", 4 * 2 * 64)
    random, opened, prompts = Random(seed), [], [tokens(30, seed)]
    settings = {"ram": ram, "num_pages": 60, "sequences": 3, "snapshots": 12}
    store = make(tmp_path / "s", kind, **settings)
    store.lower._staging.size = 2 * store.geometry.codec.page_bytes
    for _ in range(250):
        action = random.randrange(8)
        if action < 3 and len(opened) < 3:
            base = random.choice(prompts)
            prompt = [
                *base[: random.randrange(len(base) + 1)],
                *tokens(random.randrange(1, 30), random.random()),
            ][:80]
            marks = [random.randrange(1, len(prompt) + 1)]
            sequence = store.open(prompt, len(prompt) + 2, marks, keep=random.random() < 0.8)
            opened += [] if sequence is None else [sequence]
            prompts = [*prompts[-6:], prompt]
        elif action < 6 and opened:
            sequence = random.choice(opened)
            if random.random() < 0.8:
                model.prefill(store, sequence, random.choice([5, 1000]))
            store.close(sequence, keep=random.random() < 0.8)
            opened.remove(sequence)
        elif action == 6:
            for _ in range(random.choice([1, 4, 40])):
                store._evict_leaf()
        else:
            store.lower.advance(random.choice([0, 1000, 1 << 62]), wait=True)
    for sequence in opened:
        model.prefill(store, sequence)
        store.close(sequence)
    store.lower.flush()
    model.check(store)
    assert store.lower.counters["hits_ram"] > 5
    assert store.lower._staging.up._free.qsize() == SLOTS_UP
    store.close_tiers()


def test_a_card_that_has_gone_keeps_no_slot(late, monkeypatch):
    """Who asks for one afterwards gets the error too, and waits for none that nobody has."""
    slots = Staging(torch.device("cuda"), 100).up

    def refuse(event):
        raise RuntimeError("the card has gone")

    monkeypatch.setattr(Event, "synchronize", refuse)
    for _ in range(SLOTS_UP + 1):
        assert slots.available
        with pytest.raises(RuntimeError, match="has gone"):
            slots.take()
