"""Experts in host memory on a card that is played in Python: every address that is followed holds the right bytes."""

from __future__ import annotations

import contextlib
import ctypes
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import store_model
from packhorse.core.formats import PACKED
from packhorse.engine import experts as module
from packhorse.engine.experts import HOST, FetchedExperts, StreamedExperts
from packhorse.kernels.experts.cuda import ExpertTable
from packhorse.models.experts import ExpertBlocks, ExpertLayout
from packhorse.quant.packed import aligned_bytes
from packhorse.server import metrics

FORM = PACKED["int4-g32"]
LAYERS, EXPERTS, TOP_K = 6, 12, 4
LAYOUT = ExpertLayout(tuple(range(LAYERS)), EXPERTS, FORM, FORM, 64, 64)
SIZE = LAYOUT.block_bytes


class Arena:
    """Host memory; a copy is a copy at once."""

    def __init__(self) -> None:
        self.bytes = aligned_bytes(LAYOUT.total_bytes)
        self.bytes.random_(0, 256, generator=torch.Generator().manual_seed(1))

    def copy_to(self, target: torch.Tensor, start: int) -> None:
        target.copy_(self.bytes[start : start + target.numel()])


@pytest.fixture
def card(monkeypatch) -> SimpleNamespace:
    """Streams that are always done, an allocator that holds some memory free, and the kernel of changes."""
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    done = SimpleNamespace(
        record=lambda *_: None, wait=lambda *_: None, synchronize=lambda: None, query=lambda: True
    )
    kept = module.KEPT_FREE + 3 * SIZE
    free = [{"size": kept, "state": "inactive"}, {"size": 7 * SIZE, "state": "inactive"}]
    used = [{"size": 1 << 30, "state": "active_allocated"}]
    own = {"device": 0, "segment_pool_id": (0, 0), "blocks": [*used, *free]}
    graphs = {"device": 0, "segment_pool_id": (0, 1), "blocks": [{"size": 1 << 30, "state": "inactive"}]}
    held = SimpleNamespace(segments=[own, graphs, own | {"device": 1}])
    monkeypatch.setattr(torch.cuda, "Event", lambda: done)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 1 << 40)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(module, "apply_changes", apply_changes)
    monkeypatch.setattr(module, "_PIECE", 3 * SIZE)

    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: held.segments)
    return held


def apply_changes(table: ExpertTable) -> None:
    fills, flat = table.fills, table.address.view(-1)
    for layer in range(LAYERS):
        flip(table, layer)
    for row in fills.changes.tolist():
        if row[0] >= 0:
            flat[row[0]] = fills.home.view(-1)[row[0]]
    for row in fills.changes.tolist():
        if row[1] >= 0:
            fills.spares.view(-1)[row[1]] = row[2]
            fills.filled.view(-1)[row[1]] = -1
    fills.changes.fill_(-1)


def flip(table: ExpertTable, layer: int) -> None:
    """Experts that were kept are found where they are from now on."""
    for place, expert in enumerate(table.fills.filled[layer].tolist()):
        if expert >= 0:
            table.address[layer, expert] = table.fills.spares[layer, place]


def step_layer(table: ExpertTable, layer: int, chosen: list[int], arena: Arena) -> int:
    """Reads the chosen experts and keeps misses while there are places; bytes read from host memory."""
    fills, missed = table.fills, 0
    flip(table, layer)
    fills.used[layer] = -1
    fills.used[layer, : len(chosen)] = torch.tensor(chosen)
    for expert in chosen:
        address = int(table.address[layer, expert])
        assert ctypes.string_at(address & ~HOST, SIZE) == expert_bytes(arena, layer, expert)
        if address & HOST:
            missed += 1
            free = (fills.filled[layer] == -1).nonzero().flatten().tolist()
            if free:
                ctypes.memmove(int(fills.spares[layer, free[0]]), address & ~HOST, SIZE)
                fills.filled[layer, free[0]] = expert
    return missed


def expert_bytes(arena: Arena, layer: int, expert: int) -> bytes:
    start = (layer * EXPERTS + expert) * SIZE
    return arena.bytes[start : start + SIZE].numpy().tobytes()


def model_of(arena: Arena) -> SimpleNamespace:
    layers = [SimpleNamespace(mlp=SimpleNamespace(experts=None)) for _ in range(LAYERS)]
    weights = SimpleNamespace(layer=lambda index: layers[index])
    return SimpleNamespace(experts=ExpertBlocks(LAYOUT, arena.bytes), device="cpu", weights=weights)


def decode_step(experts: StreamedExperts, rng: np.random.Generator, arena: Arena) -> int:
    """A step in which slots are NaN as soon as their expert has left; how many experts it missed."""
    experts.begin_step()
    rows = experts._updates._rows
    for address in rows[rows[:, 1] >= 0, 2].tolist():
        ctypes.memset(address, 0xFF, SIZE)
    experts.in_step()
    missed = sum(step_layer(experts.table, layer, chosen_experts(rng), arena) for layer in range(LAYERS))
    experts.end_step()
    experts.after_step()
    return missed


def chosen_experts(rng: np.random.Generator) -> list[int]:
    wanted = 1 / np.arange(1, EXPERTS + 1)
    return sorted(rng.choice(EXPERTS, size=TOP_K, replace=False, p=wanted / wanted.sum()).tolist())


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_every_address_holds_its_expert(share, card):
    """Random steps with prompts between: slots are overwritten as soon as their expert has left, buffers and lent
    memory as soon as a prompt needs them."""
    rng, arena = np.random.default_rng(2), Arena()
    model = model_of(arena)
    experts = StreamedExperts(model, arena, int(share * LAYERS * EXPERTS) + LAYERS * module.SPARES)
    lent = torch.zeros(2 * SIZE + 200, dtype=torch.uint8).float()
    in_use = [False]
    experts.lend(lambda: None if in_use[0] else lent)
    missed = {True: 0, False: 0}
    most = 0
    for step in range(400):
        if step % 90 == 89:
            in_use[0] = step % 180 == 89
            experts.make_room()
            lent.fill_(float("nan"))
            for number in range(LAYERS):
                stacks = experts.stage(number)
                start = number * LAYOUT.layer_bytes
                for got, want in zip(
                    stacks, LAYOUT.stacks(arena.bytes[start:][: LAYOUT.layer_bytes]), strict=True
                ):
                    assert torch.equal(got.data, want.data)
        number = decode_step(experts, rng, arena)
        missed[bool(experts._guests.count)] += number
        most = max(most, int(experts.cache.lent.sum()))
        few = experts.few(step % LAYERS, torch.tensor([0]))
        for expert in range(EXPERTS):
            address = int(few.address[0, expert])
            assert ctypes.string_at(address, SIZE) == expert_bytes(arena, step % LAYERS, expert)
    if share < 1:
        assert experts.cache.evictions > 30 and missed[False] > 0
        # Two buffers, what was lent and what the allocator held free all had guests.
        assert most > 2 * EXPERTS
    else:
        assert missed == {True: 0, False: 0}


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_warming_up_has_guests_come_and_leave(share, card, monkeypatch):
    """At rest, before the first step or between two: steps afterwards find everything as it was."""
    rng, arena = np.random.default_rng(6), Arena()
    experts = StreamedExperts(model_of(arena), arena, int(share * LAYERS * EXPERTS) + LAYERS * module.SPARES)
    shown = []
    monkeypatch.setattr(
        experts._guests, "_show", lambda but, show=experts._guests._show: shown.append(show(but))
    )
    for rounds in (1, 2):
        before, copied = experts.table.address.clone(), experts.link_bytes["copies"]
        experts.warm_up()
        assert len(shown) == (rounds if share == 0 else 0)
        assert (experts.link_bytes["copies"] > copied) == (share == 0)
        assert torch.equal(experts.table.address, before) and not experts.cache.lent.any()
        for _ in range(5):
            decode_step(experts, rng, arena)


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_slots_are_given_back_at_any_time(share, card):
    """Whoever had a slot that goes is read from host memory, and never again from the slot; as many are left as one
    step may fill."""
    rng, arena = np.random.default_rng(4), Arena()
    least = LAYERS * module.SPARES
    experts = StreamedExperts(model_of(arena), arena, int(share * LAYERS * EXPERTS) + least)
    most, num_slots = len(experts.slots), []
    for step in range(300):
        if step % 60 in (37, 38):
            gone = [*experts.slots._pieces]
            before, evicted = len(experts.slots), experts.cache.evictions
            freed = experts.give_back(int(rng.integers(1, 9)) * SIZE)
            for piece in gone[len(experts.slots._pieces) :]:
                piece.fill_(0xFF)
            assert freed >= (before - len(experts.slots)) * SIZE and not experts.held["guests"]
            assert experts.held["slots"] == len(experts.slots) - least
            assert experts.cache.evictions - evicted <= before - len(experts.slots) + least
            num_slots.append(len(experts.slots))
        decode_step(experts, rng, arena)
    assert num_slots == sorted(num_slots, reverse=True) and most > num_slots[-1] >= least
    assert most - num_slots[-1] == experts.counts["given_back"]
    experts.give_back(1 << 60)
    assert least <= len(experts.slots) < least + 3, "whole pieces of 3 slots"
    assert experts.give_back(1 << 60) == 0
    for _ in range(40):
        decode_step(experts, rng, arena)


def test_idle_pages_hold_experts_until_pages_are_taken(card, monkeypatch):
    """Sequences open, grow, end and leave prefixes behind while experts come and go: no page is handed out while it
    is lent, none that anybody holds is written to, and no expert is read from a page that is poisoned."""
    monkeypatch.setattr(module, "QUIET_STEPS", 2)
    rng, arena = np.random.default_rng(5), Arena()
    experts = StreamedExperts(model_of(arena), arena, LAYERS * (module.SPARES + 1))
    store = store_model.make_store(page_len=64, num_pages=40, sequences=3)
    pages = [store.layer_memory(layer).pages for layer in store.geometry.full_layers]
    for layer in store.geometry.full_layers:
        experts.lend(partial(store.idle_pages, layer))
    true_allocate = store._pages.allocate

    def leave() -> None:
        experts.make_room()
        for memory in pages:
            memory[store._pages.tail.start :] = 0xFF

    def allocate(count: int, after: int | None = None) -> list[int]:
        assert not experts.cache.lent.any() and experts._guests._places is None
        return true_allocate(count, after)

    store.before_taking = leave
    monkeypatch.setattr(store._pages, "allocate", allocate)
    live: list = []
    in_pages, opened = [], 0
    for _ in range(450):
        if rng.random() < 0.07:
            prompt = [int(rng.integers(6))] * 64 * int(rng.integers(1, 8)) + rng.integers(9, size=3).tolist()
            sequence = store.open(prompt, len(prompt) + int(rng.integers(1, 400)))
            if sequence is not None:
                opened += 1
                store_model.prefill(store, sequence)
                live.append(sequence)
        for sequence in [s for s in live if s.position == len(s.page_ids) * 64 or rng.random() < 0.01]:
            live.remove(sequence)
            store.close(sequence)
        if live:
            store_model.run_step(store, [(sequence, [int(rng.integers(9))]) for sequence in live])
        decode_step(experts, rng, arena)
        address = experts.table.address
        in_pages.append(
            sum(int(((address >= m.data_ptr()) & (address < m.data_ptr() + m.numel())).sum()) for m in pages)
        )
    assert opened > 12 and store.stats.evicted_entries > 0
    assert max(in_pages) > 12 and 0 in in_pages[100:]


@pytest.mark.parametrize("num_slots", [2, 5, 60])
def test_fetched_experts_are_those_that_were_asked_for(num_slots, card):
    """Where the card reads no host memory: more wanted than slots come as a whole layer, others one by one."""
    rng, arena = np.random.default_rng(3), Arena()
    model = model_of(arena)
    experts = FetchedExperts(model, arena, num_slots)
    for step in range(200):
        layer, ids = step % LAYERS, chosen_experts(rng)
        table = model.weights.layer(layer).mlp.experts.few(torch.tensor([ids]))
        for expert in ids:
            assert ctypes.string_at(int(table.address[0, expert]), SIZE) == expert_bytes(arena, layer, expert)
    counts = experts.counts
    assert (counts["missed"] < counts["used"]) == (num_slots == 60)
    assert counts["used"] == (0 if num_slots == 2 else 200 * TOP_K)
    assert experts.held["slots"] == counts["kept"] - counts["left"] <= num_slots
    assert experts.link_bytes["decode"] == counts["missed"] * SIZE
    samples = [sample for metric in metrics._experts(experts) for sample in metric.samples]
    values = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    assert values["packhorse_experts_total", "missed"] == counts["missed"]
    assert values["packhorse_experts_on_card", "slots"] == experts.held["slots"]
