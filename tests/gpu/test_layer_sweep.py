"""Sweeps on a card give the bits of chunks, whatever happens in between; experts in host memory cross the link once a
sweep."""

import random

import pytest
import torch
from test_graphs import tiny
from test_streamed_experts import expert_blocks, streamed

import oracle
from engines import ask, make_engine, run_all
from packhorse.core.types import Request, SamplingParams
from packhorse.engine.engine import Engine
from packhorse.engine.experts import _LayerBuffers, join_shared_experts, resident_table
from packhorse.engine.graphs import StepGraphs
from packhorse.facts.read import read_model
from packhorse.kernels.cuda.launch import card_arch
from packhorse.models.checkpoint import open_checkpoint
from packhorse.models.loader import load_model

pytestmark = pytest.mark.gpu

IDS = oracle.random_ids(1500)
SWEEP = {"sweep_len": 768, "tail_len": 32}


class Ticking:
    """Each look at it is a second later: a slice is one unit."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def engine_of(model, **settings) -> Engine:
    return make_engine(model, device="cuda", snapshot_len=512, snapshots=40, **settings)


def model_on_card(family: str, dtype: torch.dtype):
    if dtype is torch.bfloat16 and card_arch(0) < 80:
        pytest.skip("no bf16 there")
    facts = read_model(oracle.shared_checkpoint(family)[1])
    return load_model(facts, open_checkpoint(facts), dtype=dtype, device="cuda")


def check_kept(engine: Engine, other: Engine) -> None:
    """Both stores keep the same pages and snapshots, to the byte."""
    theirs = {entry.key: entry for entry in other.store._tree.entries}
    mine = {entry.key: entry for entry in engine.store._tree.entries}
    assert mine.keys() == theirs.keys() and mine
    for key, entry in mine.items():
        for layer in engine.store.geometry.full_layers:
            pages = [
                e.store._tier.pages(layer)[list(at[key].page_ids)]
                for e, at in ((engine, mine), (other, theirs))
            ]
            assert torch.equal(*pages)
        if entry.snapshot is not None:
            snapshot = other.store._tier.state_record(theirs[key].snapshot)
            assert torch.equal(engine.store._tier.state_record(entry.snapshot), snapshot)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_equals_chunks(family, dtype):
    """Logits, answers, pages and snapshots, alone and beside another prompt and an answer."""
    model = model_on_card(family, dtype)
    ids, marks = IDS[:1100], (700,)
    chunked = engine_of(model)
    want, _ = ask(chunked, ids, max_tokens=4, marks=marks)
    logits = chunked.runner.logits["r", 1099]
    swept = engine_of(model, **SWEEP)
    got, _ = ask(swept, ids, max_tokens=4, marks=marks)
    assert got == want and torch.equal(swept.runner.logits["r", 1099], logits)
    assert swept.sweeper.token_layers >= 1068 * model.facts.num_layers
    check_kept(swept, chunked)
    beside = engine_of(model, **SWEEP | {"sweep_len": 1536}, max_decode_gap=1e-4)
    beside.add(Request("answer", tuple(IDS[1100:1120]), SamplingParams(max_tokens=60)))
    beside.add(Request("r", tuple(ids), SamplingParams(max_tokens=4), marks))
    beside.add(Request("other", tuple(IDS[400:]), SamplingParams(max_tokens=1)))
    events = run_all(beside)
    assert all(e[-1].error is None for e in events.values())
    assert torch.equal(beside.runner.logits["r", 1099], logits)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "llama"])
def test_cancelled_and_resumed(family):
    """At 50 random points, 25 of each family: the bits of an uninterrupted reading."""
    draw = random.Random(family)
    model = model_on_card(family, torch.float16)
    want = engine_of(model, **SWEEP)
    ask(want, IDS[:700])
    total = want.sweeper.num_units
    engine = engine_of(model, **SWEEP, ram=1 << 28, clock=Ticking())
    for number in range(25):
        engine.add(Request("gone", tuple(IDS[:700]), SamplingParams(max_tokens=1)))
        for _ in range(draw.randrange(1, total)):
            engine.step()
        engine.cancel("gone")
        before = engine.sweeper.num_units
        ask(engine, IDS[:700], name=f"r{number}")
        assert torch.equal(engine.runner.logits[f"r{number}", 699], want.runner.logits["r", 699])
        assert engine.sweeper.num_units - before < total
        engine.store.clear()
    assert engine.store.lower.counters["resumed_sweeps"] == 25


def test_streamed_experts_are_fetched_once_a_sweep(monkeypatch):
    """Captured decode steps between slices, experts in slots, prompts through the layer buffers: the bits of the
    resident model in chunks, and a layer's experts cross the link once a sweep, not once a chunk."""
    fetched = []
    fetch = _LayerBuffers._fetch
    monkeypatch.setattr(
        _LayerBuffers, "_fetch", lambda self, number: (fetched.append(number), fetch(self, number))[1]
    )
    logits = []
    for share in (None, 0.3):
        model = tiny("qwen3_5_moe", torch.float16, True)
        if share is None:
            expert_blocks.join(model)
            join_shared_experts(model)  # as `streamed` does: sums of a step have one order
            experts, arena = resident_table(model.experts), None
        else:
            experts, arena = streamed(model, share)
        settings = {} if share is None else SWEEP | {"max_decode_gap": 1e-4}
        engine = engine_of(model, kv="fp8", sequences=2, **settings)
        engine.runner.graphs = StepGraphs(model, engine.store, experts, sequences=2, max_len=4096)
        engine.add(Request("answer", tuple(IDS[:16]), SamplingParams(max_tokens=300)))
        while not engine.scheduler.running or not engine.scheduler.running[0].generated:
            engine.step()
        engine.add(Request("long", tuple(IDS), SamplingParams(max_tokens=1)))
        fetched.clear()
        events = run_all(engine)
        assert all(e[-1].error is None for e in events.values())
        logits.append({key: rows.clone() for key, rows in engine.runner.logits.items()})
    assert logits[0].keys() == logits[1].keys()
    assert all(torch.equal(rows, logits[1][key]) for key, rows in logits[0].items())
    layers = len(model.experts.layout.layers)
    assert len(fetched) <= 2 * layers + 1, f"{len(fetched)} layers were fetched for two sweeps of {layers}"
    arena.close()
