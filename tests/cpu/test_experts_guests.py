"""The host's half of streamed experts, slots and layer buffers together, against the kernels in plain words."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from packhorse.core.formats import PACKED
from packhorse.engine import experts
from packhorse.kernels.experts.cuda import ExpertTable
from packhorse.models.experts import ExpertBlocks, ExpertLayout
from packhorse.plan.size import SPARES
from packhorse.quant.packed import aligned_bytes

LAYERS, EXPERTS = 3, 24


class HostArena:
    """Experts whose bytes are their own number."""

    def __init__(self, layout: ExpertLayout) -> None:
        self.bytes = aligned_bytes(layout.total_bytes)
        self.bytes.view(LAYERS * EXPERTS, -1)[:] = torch.arange(LAYERS * EXPERTS)[:, None]

    def copy_to(self, target: Tensor, start: int) -> None:
        target.copy_(self.bytes[start : start + target.numel()])


class PlainKernels:
    """What the kernels do with the table. A slot that may be filled is poisoned."""

    def __init__(self, streamed: experts.StreamedExperts) -> None:
        self.layout, self.table = streamed.blocks.layout, streamed.table
        places = [*streamed.slots, *streamed._buffers.blocks()]
        self.places = {place.data_ptr(): place for place in places}
        assert self.table.fills is not None
        self.fills = self.table.fills

    def enter(self, layer: int) -> None:
        for place, expert in enumerate(self.fills.filled[layer].tolist()):
            if expert >= 0:
                self.table.address[layer, expert] = self.fills.spares[layer, place]

    def apply_changes(self, table: ExpertTable) -> None:
        for layer in range(LAYERS):
            self.enter(layer)
        address, home = table.address.view(-1), self.fills.home.view(-1)
        changes = self.fills.changes.tolist()
        for expert, _, _ in changes:
            if expert >= 0:
                address[expert] = home[expert]
        for _, place, slot in changes:
            if place >= 0:
                self.fills.spares.view(-1)[place], self.fills.filled.view(-1)[place] = slot, -1
                self.places[slot].fill_(255)
        self.fills.changes.fill_(-1)

    def route(self, layer: int, wanted: list[int]) -> None:
        self.enter(layer)
        free = [place for place, expert in enumerate(self.fills.filled[layer].tolist()) if expert == -1]
        self.fills.used[layer] = -1
        for at, expert in enumerate(sorted(wanted)):
            self.fills.used[layer, at] = expert
            address, number = int(self.table.address[layer, expert]), layer * EXPERTS + expert
            if address & experts.HOST:
                assert address == int(self.fills.home[layer, expert])
                if free:
                    place = free.pop(0)
                    self.fills.filled[layer, place] = expert
                    self.places[int(self.fills.spares[layer, place])].fill_(number)
            else:
                assert bool((self.places[address] == number).all()), (
                    f"{layer}, {expert}: another expert's bytes"
                )


@pytest.fixture
def no_card(monkeypatch):
    """Streams that are the host's own order; copies that are over after a few looks."""
    looks = random.Random(0)
    nothing: Any = lambda *args: None  # noqa: E731
    event = SimpleNamespace(
        record=nothing, synchronize=nothing, wait=nothing, query=lambda: looks.random() < 0.3
    )
    stream = SimpleNamespace(wait_stream=nothing, synchronize=nothing)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(experts, "QUIET_STEPS", 2)


@pytest.mark.parametrize(("held", "top_k"), [(0, 4), (2, 4), (8, 6), (20, 4)])
def test_experts_that_come_to_the_buffers_while_others_come_and_go(no_card, monkeypatch, held, top_k):
    """Few slots, which change hands in every step: no expert is read from another's place, none is filled twice, and
    the table agrees with what the host believes."""
    form = PACKED["int4-g32"]
    layout = ExpertLayout(tuple(range(LAYERS)), EXPERTS, form, form, 64, 64)
    arena: Any = HostArena(layout)
    layers = [SimpleNamespace(mlp=SimpleNamespace()) for _ in range(LAYERS)]
    blocks = ExpertBlocks(layout, arena.bytes)
    weights = SimpleNamespace(layer=layers.__getitem__)
    model: Any = SimpleNamespace(experts=blocks, device="cpu", weights=weights)
    streamed = experts.StreamedExperts(model, arena, held + LAYERS * SPARES)
    kernels = PlainKernels(streamed)
    monkeypatch.setattr(experts, "apply_changes", kernels.apply_changes)
    chance, rng = random.Random(2), np.random.default_rng(2)
    share = 1 / np.arange(1, EXPERTS + 1)
    shown = 0
    for _ in range(500):
        if chance.random() < 0.08:
            for layer in range(chance.choice([1, LAYERS])):
                streamed.stage(layer)
        streamed.begin_step()
        streamed.in_step()
        shown += streamed._guests.count > 0
        for layer in range(LAYERS):
            kernels.route(layer, rng.choice(EXPERTS, top_k, replace=False, p=share / share.sum()).tolist())
        streamed.end_step()
        streamed.after_step()
    assert shown > 100 and streamed.cache.evictions > 300
