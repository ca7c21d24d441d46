"""Sweeps: prompts read layer by layer equal prompts read chunk by chunk, whatever happens in between.

A clock that no test waits for says how long units and steps take; where it ticks at every look, a slice is one unit.
"""

import dataclasses
import random
import weakref
from collections.abc import Callable
from itertools import pairwise

import gguf
import pytest
import torch
from gguf_files import write_model
from test_engine_machine import EngineMachine, drive
from test_packed_models import wide_model
from torch.utils._python_dispatch import TorchDispatchMode

import oracle
from engines import IdsAsText, ask, make_engine, one_pass, run_all, tiny_model
from packhorse.core.config import EngineConfig
from packhorse.core.errors import ComputeError, UsageError
from packhorse.core.types import FinishReason, Request, SamplingParams
from packhorse.core.units import GIB, MIB
from packhorse.engine.engine import SLICE_SHARE, Engine
from packhorse.engine.load import load_engine
from packhorse.engine.sweep import SweepRunner
from packhorse.facts.read import read_model
from packhorse.plan.size import card_flops, size_engine

PAGE, CHUNK, SWEEP, TAIL = 64, 128, 384, 32
# Plain mode promises a bound against one pass: sums are taken in another order.
PLAIN_BOUND = 2e-5
IDS = oracle.random_ids(1200)
BOTH = [(family, exact) for family in ("qwen3_5_moe", "qwen3") for exact in (True, False)]


class Ticking:
    """Each look at it is a second later: no second unit ever fits into a slice."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def engine_of(model, *, sweep: bool = True, **settings) -> Engine:
    settings = {"page_len": PAGE, "chunk_len": CHUNK, "snapshot_len": 256, "snapshots": 40} | settings
    if sweep:
        settings = {"sweep_len": SWEEP, "tail_len": TAIL, "max_decode_gap": 0.25} | settings
    return make_engine(model, **settings)


def check(got: torch.Tensor, want: torch.Tensor, exact: bool, note: str) -> None:
    if exact:
        assert torch.equal(got, want), f"{note}: bits differ"
    else:
        assert oracle.relative_error(got, want) < PLAIN_BOUND, note


def kept(engine: Engine) -> dict[bytes, tuple[bool, list[torch.Tensor], torch.Tensor | None]]:
    """All entries of an engine's store by chain value: marked, the bytes of their pages, that of their snapshot."""
    store = engine.store
    return {
        entry.key: (
            entry.marked,
            [store._tier.pages(layer)[list(entry.page_ids)] for layer in store.geometry.full_layers],
            None if entry.snapshot is None else store._tier.state_record(entry.snapshot),
        )
        for entry in store._tree.entries
    }


def check_kept(engine: Engine, other: Engine) -> None:
    """Both stores keep the same, to the byte."""
    mine, theirs = kept(engine), kept(other)
    assert mine.keys() == theirs.keys() and mine
    for key, (marked, pages, snapshot) in mine.items():
        assert marked == theirs[key][0]
        assert all(map(torch.equal, pages, theirs[key][1]))
        assert snapshot is None or torch.equal(snapshot, theirs[key][2])


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_equals_chunks_and_one_pass(family, exact):
    """The same bits as in chunks, in both modes: logits, answers, and all that is kept for later prompts."""
    model, ids, marks = tiny_model(family, exact), IDS[:700], (130, 300, 640)
    chunked, swept = engine_of(model, sweep=False), engine_of(model)
    want, _ = ask(chunked, ids, max_tokens=6, marks=marks)
    got, event = ask(swept, ids, max_tokens=6, marks=marks)
    assert got == want and event.usage.cached_len == 0
    logits = swept.runner.logits["r", 699]
    assert torch.equal(logits, chunked.runner.logits["r", 699])
    check(logits, one_pass(model, ids)[-1], exact, family)
    check_kept(swept, chunked)
    assert swept.store.stats == chunked.store.stats
    # The whole prompt, under every layer, and nothing of it twice.
    tail = len(ids) - swept.sweeper.token_layers // model.facts.num_layers
    assert 0 <= tail <= TAIL and swept.sweeper.token_layers % model.facts.num_layers == 0


def boundary_lengths() -> list[int]:
    near = lambda size, reach, stop: {  # noqa: E731
        n for at in range(size, stop, size) for n in range(at - reach, at + reach + 1)
    }
    return sorted(near(PAGE, 1, 400) | near(CHUNK, 2, 900) | near(SWEEP, 2, 900) | {TAIL, TAIL + 1})


@pytest.mark.parametrize(("family", "exact"), BOTH)
def test_every_boundary_length(family, exact):
    model = tiny_model(family, exact)
    want = one_pass(model, IDS[:900])
    num_units = 0
    for n in boundary_lengths():
        engine = engine_of(model, num_pages=n // PAGE + 4, snapshots=8)
        _, event = ask(engine, IDS[:n])
        check(engine.runner.logits["r", n - 1], want[n - 1], exact, f"length {n}")
        num_units += engine.sweeper.num_units
        assert event.usage.cached_len == 0 and event.read_len == n
        assert (engine.sweeper.num_units > 0) is (n > TAIL)
    assert num_units > 300


@pytest.mark.parametrize(("family", "exact"), BOTH)
def test_going_on_from_what_is_stored(family, exact):
    """Sweeps that begin at a prefix: where a document, its beginning and another one fork."""
    model = tiny_model(family, exact)
    prompts = [IDS[:300], IDS[:700], IDS[:450] + oracle.random_ids(300, seed=3), IDS[:1000]]
    engine = engine_of(model)
    for ids in prompts:
        _, event = ask(engine, ids)
        check(engine.runner.logits["r", len(ids) - 1], one_pass(model, ids)[-1], exact, f"{len(ids)}")
    assert event.usage.cached_len == 640 and engine.store.stats.reused_tokens >= 256 + 256 + 640


@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_several_prompts_beside_answers(family):
    """Long prompts share sweeps, short ones and answers go on between slices: each has the bits it has alone."""
    model = tiny_model(family, True)
    prompts = {
        "a": IDS[:500],
        "b": IDS[:200] + oracle.random_ids(250, seed=1),
        "c": oracle.random_ids(333, seed=2),
    }
    prompts |= {"tail": IDS[:20], "answer": oracle.random_ids(30, seed=4)}
    alone = {name: ask(engine_of(model, sweep=False), ids, max_tokens=12)[0] for name, ids in prompts.items()}
    engine = engine_of(model, clock=Ticking(), sequences=5, sweep_len=640)
    mixed = 0
    for name in ("answer", "a", "b", "tail", "c"):
        engine.add(Request(name, tuple(prompts[name]), SamplingParams(max_tokens=12)))
    got: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_work:
        events = engine.step()
        mixed = max(mixed, len(engine.scheduler.sweep.sequences) if engine.scheduler.sweep else 0)
        for event in events:
            assert event.error is None
            got[event.request_id] += event.token_ids
    assert got == alone
    assert mixed == 2, "no sweep had tokens of two prompts"


class Counting:
    """A weight source that notes what it is asked for, by steps and by units of sweeps."""

    def __init__(self, model) -> None:
        self.weights = model.weights
        self.swept: list[int] = []
        self.stepped: list[int] = []
        self.in_unit = False

    def layer(self, index: int):
        (self.swept if self.in_unit else self.stepped).append(index)
        return self.weights.layer(index)

    def watch(self, run_unit: Callable) -> Callable:
        """`run_unit`, whose calls of `layer` are those of a unit."""

        def watched(sweep):
            self.in_unit = True
            try:
                return run_unit(sweep)
            finally:
                self.in_unit = False

        return watched


def test_weights_are_asked_for_once_a_layer_and_sweep():
    model = tiny_model("qwen3_5_moe", False)
    engine = engine_of(model, clock=Ticking())
    weights = engine.runner.weights = Counting(model)
    engine.sweeper._run_unit = weights.watch(engine.sweeper._run_unit)
    engine.add(Request("answer", tuple(IDS[:20]), SamplingParams(max_tokens=60)))
    engine.add(Request("long", tuple(IDS[:1000]), SamplingParams(max_tokens=1)))
    run_all(engine)
    assert weights.swept == [0, 1, 2, 3] * 3
    assert weights.stepped == [0, 1, 2, 3] * 60


def timed(engine: Engine, clock, unit_s: Callable[[int, int], float], step_s: float, monkeypatch) -> None:
    """Units and steps take as long as that."""
    run_unit, run = SweepRunner._run_unit, engine.runner.run

    def slow_unit(self, sweep):
        clock.now += unit_s(sweep.layer, sweep.index)
        return run_unit(self, sweep)

    def slow_run(step, views):
        clock.now += step_s
        return run(step, views)

    monkeypatch.setattr(SweepRunner, "_run_unit", slow_unit)
    monkeypatch.setattr(engine.runner, "run", slow_run)


class Clock:
    """Stands still unless somebody moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("first_s", [0.03, 0.07, 0.12, 0.18])
def test_an_answer_beside_a_sweep_waits_no_longer_than_it_may(first_s, monkeypatch):
    """Layers differ, and the first unit of each waits for its weights; nothing is ever longer than the gap."""
    clock = Clock()
    engine = engine_of(tiny_model("qwen3_5_moe", False), clock=clock, chunk_len=64, sweep_len=640)
    timed(
        engine,
        clock,
        lambda layer, index: (0.02, 0.05)[layer == 3] + first_s * (index == 0),
        0.015,
        monkeypatch,
    )
    engine.add(Request("answer", tuple(IDS[:20]), SamplingParams(max_tokens=400)))
    engine.add(Request("long", tuple(IDS), SamplingParams(max_tokens=1)))
    times, slices, read = [], [], []
    while engine.scheduler.find("long") is not None:
        before = engine.sweeper.num_units
        for event in engine.step():
            if event.request_id == "answer":
                times.append(clock.now)
            elif event.usage.generated_len == 0:
                read.append(event.read_len)
        if engine.sweeper.num_units > before:
            slices.append(engine.sweeper.num_units - before)
    gaps = [b - a for a, b in pairwise(times)]
    assert sum(slices) == 2 * 4 * 10 - 4 * 1, "1,200 tokens in sub-chunks of 64 under 4 layers"
    # A unit alone may take longer than a slice is planned to.
    may = SLICE_SHARE * 0.25
    assert max(gaps) <= max(may, first_s + 0.05 + 0.015) + 1e-9 <= 0.25
    # Slices are as long as they may be.
    assert len(gaps) > 8 and sorted(gaps)[len(gaps) // 2] > may - 0.07
    assert read == sorted(read) and len(set(read)) > 5 and read[-1] < 1200


def test_a_unit_longer_than_the_gap_is_alone_in_its_slice(monkeypatch):
    clock = Clock()
    engine = engine_of(tiny_model("qwen3", False), clock=clock)
    timed(engine, clock, lambda layer, index: 1.0, 0.01, monkeypatch)
    engine.add(Request("answer", tuple(IDS[:20]), SamplingParams(max_tokens=400)))
    engine.add(Request("long", tuple(IDS[:384]), SamplingParams(max_tokens=1)))
    num_answered = 0
    while engine.scheduler.find("long") is not None:
        num_answered += sum(e.request_id == "answer" for e in engine.step())
    assert num_answered == engine.sweeper.num_units == 2 * 3


@pytest.mark.parametrize(("family", "exact"), BOTH)
def test_cancelled_and_resumed(family, exact):
    """At 50 random points in all modes together; with the same prompt, one that goes on otherwise, and one cut short.

    The bits are those of an uninterrupted reading, and what had been done is not done again."""
    draw = random.Random(f"{family} {exact}")
    model = tiny_model(family, exact)
    hybrid = model.facts.delta is not None
    length, marks = 440, (330,)
    spared = 0
    for point in range(13):
        engine = engine_of(model, clock=Ticking(), ram=1 << 26, sweep_len=640)
        beside = point % 3 == 0
        engine.add(Request("first", tuple(IDS[:length]), SamplingParams(max_tokens=1), marks))
        if beside:
            engine.add(Request("beside", tuple(IDS[500:860]), SamplingParams(max_tokens=1)))
        layers, works = model.facts.num_layers, 3 + 2 * hybrid
        for _ in range(draw.randrange(1, layers * works)):
            engine.step()
        done = engine.scheduler.sweep.read_len(engine.scheduler.find("first"))
        assert engine.cancel("first").finish is FinishReason.CANCELLED
        events = run_all(engine)
        assert ("beside" in events) is beside
        assert engine.store.stats.open_sequences == 0
        ids = [IDS[:length], IDS[:330] + oracle.random_ids(90, seed=7), IDS[:200]][draw.randrange(3)]
        before = engine.sweeper.token_layers
        ask(engine, ids, marks=tuple(m for m in marks if m <= len(ids)), name="again")
        fresh = engine_of(model, sweep_len=640)
        ask(fresh, ids, marks=tuple(m for m in marks if m <= len(ids)), name="again")
        position = len(ids) - 1
        assert torch.equal(engine.runner.logits["again", position], fresh.runner.logits["again", position])
        computed = engine.sweeper.token_layers - before
        saved = fresh.sweeper.token_layers - computed
        if len(ids) == length:
            # All but the sub-chunks behind the last state that was known.
            assert saved >= (done - PAGE) * layers - CHUNK
        assert saved >= 0
        spared += saved > 0
        assert engine.store.lower.counters["resumed_sweeps"] == (saved > 0)
        if not beside:
            check_kept(engine, fresh)
    assert spared > 6


def test_what_a_failed_unit_left_is_not_kept(monkeypatch):
    """It may have changed its layer's state: whoever cancels then has the prompt read from the beginning."""
    model, request = tiny_model("qwen3_5", True), Request("r", tuple(IDS[:400]), SamplingParams(max_tokens=1))
    engine = engine_of(model, clock=Ticking(), ram=1 << 26)
    unit, left = engine.sweeper._run_unit, [3]

    def failing(sweep):
        logits = unit(sweep)
        left[0] -= 1
        if not left[0]:
            raise MemoryError
        return logits

    monkeypatch.setattr(engine.sweeper, "_run_unit", failing)
    engine.add(request)
    with pytest.raises(MemoryError):
        run_all(engine)
    engine.cancel("r")
    ask(engine, IDS[:400])
    fresh = engine_of(model)
    ask(fresh, IDS[:400])
    assert torch.equal(engine.runner.logits["r", 399], fresh.runner.logits["r", 399])


def test_what_a_cancelled_sweep_had_done_counts_and_gives_way():
    """It takes no more host memory than was given, the oldest makes room for others, and without room there is none."""
    model = tiny_model("qwen3_5", False)
    engine = engine_of(model, clock=Ticking(), ram=1 << 26)
    ram = engine.store.lower.ram

    def cancel(seed: int) -> None:
        engine.add(Request("r", tuple(oracle.random_ids(400, seed=seed)), SamplingParams(max_tokens=1)))
        for _ in range(4):
            engine.step()
        engine.cancel("r")

    cancel(0)
    size = ram.used
    assert size > 400 * 4 * 96
    cancel(0)
    assert len(ram) == 1, "the same prompt goes on, and has one record"
    ram.capacity = ram.used + size
    cancel(1)
    assert len(ram) == 2 and engine.store.lower.counters["resumed_sweeps"] == 1
    cancel(0)
    assert engine.store.lower.counters["resumed_sweeps"] == 2, "another prompt's is not lost for it"
    cancel(2)
    assert 1 <= len(ram) <= 2 and ram.used <= ram.capacity
    small = engine_of(model, clock=Ticking(), ram=size - 1)
    small.add(Request("r", tuple(IDS[:400]), SamplingParams(max_tokens=1)))
    for _ in range(5):
        small.step()
    small.cancel("r")
    assert small.store.lower.ram.used == 0 and small.store.lower.counters["skipped_sweeps"] == 1


def test_nothing_is_kept_of_who_wants_nothing_kept():
    engine = engine_of(tiny_model("qwen3_5", False), clock=Ticking(), ram=1 << 26)
    engine.add(Request("r", tuple(IDS[:400]), SamplingParams(max_tokens=1), store=False))
    for _ in range(5):
        engine.step()
    engine.cancel("r")
    assert len(engine.store.lower.ram) == 0


@pytest.mark.parametrize("exact", [True, False])
def test_prompt_logprobs(exact):
    model, params = tiny_model("qwen3_5_moe", exact), SamplingParams(max_tokens=1)
    scored = []
    for sweep in (False, True):
        engine = engine_of(model, sweep=sweep)
        engine.add(Request("r", tuple(IDS[:500]), params, prompt_logprobs=2))
        scored.append(run_all(engine)["r"][-1].prompt_logprobs)
    assert len(scored[1]) == 499 and scored[0] == scored[1]


def test_a_failing_unit_ends_its_request_alone(monkeypatch):
    model = tiny_model("qwen3_5", True)
    ids = {"good": IDS[:150], "bad": IDS[300:470]}
    want = ask(engine_of(model, sweep=False), ids["good"], max_tokens=3)[0]
    engine = engine_of(model)
    for name in ("bad", "good"):
        engine.add(Request(name, tuple(ids[name]), SamplingParams(max_tokens=3)))
    run_unit = SweepRunner._run_unit

    def failing(self, sweep):
        if sweep.layer == 2 and sweep.works[sweep.index].sequence.id == "bad":
            raise MemoryError
        return run_unit(self, sweep)

    monkeypatch.setattr(SweepRunner, "_run_unit", failing)
    with pytest.raises(MemoryError):
        run_all(engine)
    [event] = engine.recover(ComputeError("It failed."))
    assert event.request_id == "bad" and event.finish is FinishReason.ERROR
    assert [t for e in run_all(engine)["good"] for t in e.token_ids] == want
    engine.store.clear()
    assert engine.store.stats.pages_free == 160 and engine.store.stats.snapshots == 0


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
def test_a_sweep_that_fails_to_begin_ends_its_first_request_alone(family, monkeypatch):
    """After the store had prepared it for all of them."""
    model = tiny_model(family, True)
    want = ask(engine_of(model, sweep=False), IDS[:150], max_tokens=3)[0]
    engine = engine_of(model)
    for name, ids in ("bad", IDS[300:470]), ("good", IDS[:150]):
        engine.add(Request(name, tuple(ids), SamplingParams(max_tokens=3)))
    begin, calls = engine.store.begin_sweep, []

    def failing(spans):
        views = begin(spans)
        calls.append(len({span.slot for span in spans}))
        if len(calls) == 1:
            raise MemoryError
        return views

    monkeypatch.setattr(engine.store, "begin_sweep", failing)
    with pytest.raises(MemoryError):
        run_all(engine)
    [event] = engine.recover(ComputeError("It failed."))
    assert event.request_id == "bad" and event.finish is FinishReason.ERROR
    assert [t for e in run_all(engine)["good"] for t in e.token_ids] == want
    assert calls == [2, 1]
    engine.store.clear()
    assert engine.store.stats.pages_free == 160 and engine.store.stats.snapshots == 0


def test_short_of_snapshots_marks_come_first():
    """With one slot the prompt's end has it; others' documents lose none for the grid's sake."""
    model = tiny_model("qwen3_5", False)
    engine = engine_of(model, snapshots=1, sweep_len=768)
    ask(engine, IDS[:700])
    assert [(e.stop, e.marked) for e in engine.store._tree.entries] == [(640, True)]
    assert ask(engine, IDS[:700])[1].usage.cached_len == 640
    engine = engine_of(model, snapshots=3, sweep_len=768)
    ask(engine, oracle.random_ids(100, seed=9))
    ask(engine, IDS[:700])
    assert sorted(e.stop for e in engine.store._tree.entries) == [64, 512, 640]


class Peak(TorchDispatchMode):
    """The most bytes that tensors made in the block held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage.data_ptr() and storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, storage.data_ptr(), storage.nbytes())

    def _forget(self, pointer: int, num_bytes: int) -> None:
        self._seen.discard(pointer)
        self.now -= num_bytes


def test_memory_is_flat_in_context():
    """Beyond KV a prompt four times as long takes no more, and no more than a few sub-chunks do."""
    model = tiny_model("qwen3_5_moe", False)
    most = {}
    for length in (1024, 4096):
        engine = engine_of(model, sweep_len=512, num_pages=80, snapshot_len=PAGE * 100)
        engine.store.segment_len = 256
        engine.add(Request("r", tuple(oracle.random_ids(length)), SamplingParams(max_tokens=1)))
        held = {t.data_ptr() for t in engine.store._tier._pages.values()}
        with Peak() as peak:
            peak._seen |= held | {engine.sweeper.residuals.data_ptr()}
            run_all(engine)
        most[length] = peak.most
    assert most[4096] <= 1.02 * most[1024]
    assert most[1024] > 4 * 96 * CHUNK


def test_planned_bytes_and_settings():
    """The residuals are counted as they are taken; settings that contradict are refused."""
    facts = read_model(oracle.shared_checkpoint("qwen3_5_moe")[1])
    for exact in (True, False):
        none = size_engine(facts, EngineConfig(exact=exact), "fp32", 8 * GIB)
        sizes = size_engine(facts, EngineConfig(exact=exact, sweep_len=4096), "fp32", 8 * GIB)
        assert (none.sweep_len, sizes.sweep_len) == (0, 4096), "nothing is streamed"
        engine = make_engine(tiny_model("qwen3_5_moe", exact), chunk_len=1024, sweep_len=4096)
        assert sizes.workspace_bytes - none.workspace_bytes == engine.sweeper.storage_bytes > 0
    short = size_engine(facts, EngineConfig(context=3000, sweep_len=8192), "fp32", 8 * GIB)
    assert short.sweep_len == 3072
    assert size_engine(facts, EngineConfig(context=2048, sweep_len=8192), "fp32", 8 * GIB).sweep_len == 0
    with pytest.raises(UsageError, match="sweep_len is 1000"):
        EngineConfig(sweep_len=1000, chunk_len=1024)
    with pytest.raises(UsageError, match="max_decode_gap is 0"):
        EngineConfig(max_decode_gap=0.0)


def test_chunks_follow_the_card():
    """As long as its speed under the gap and its memory allow; what was asked for is obeyed."""
    facts = read_model(oracle.shared_checkpoint("qwen3_5_moe")[1])

    def chunk_len(flops=None, memory=64 * GIB, device="cuda", **settings):
        config = EngineConfig(device=device, **settings)
        return size_engine(facts, config, "bf16", memory, flops=flops).chunk_len

    assert chunk_len(1e15, device="cpu") == chunk_len(None) == 1024
    assert chunk_len(1e15) == 8192 and chunk_len(1e15, page_len=48, snapshot_len=96) == 8160
    assert chunk_len(1e15, chunk_len=256) == 256
    assert chunk_len(1e15, sweep_len=4096) == 4096
    one = (
        4 * facts.num_heads * facts.head_dim * facts.context
    )  # operations of a token at the end of the window
    per_second = one * 8192 / (0.33 * 0.125)
    assert chunk_len(1.01 * per_second) == 8192 and chunk_len(0.99 * per_second) == 4096
    assert chunk_len(1.01 * per_second, max_decode_gap=0.12) == 2048
    assert chunk_len(0.001 * per_second) == chunk_len(0.001 * per_second, sweep_len=3008) == 1024, "not below"
    little = size_engine(facts, EngineConfig(device="cuda", chunk_len=8192, sweep_len=0), "bf16", 64 * GIB)
    room = 6 * little.workspace_bytes
    assert [chunk_len(1e15, memory=memory) for memory in (room, room - 6)] == [8192, 4096]
    kinds = {(device, dtype): size_engine(facts, EngineConfig(device=device), dtype, 64 * GIB).kv
             for device in ("cpu", "cuda") for dtype in ("fp32", "bf16")}  # fmt: skip
    assert kinds == {("cpu", "fp32"): "fp32", ("cpu", "bf16"): "bf16",
                     ("cuda", "fp32"): "fp32", ("cuda", "bf16"): "fp8"}  # fmt: skip
    assert card_flops(90, 132) == pytest.approx(990e12)
    assert card_flops(87, 1) == card_flops(86, 1) and card_flops(70, 1) == card_flops(75, 1)


def test_streamed_experts_are_swept_for(tmp_path):
    """As long as the window, or as half of the room for experts allows; 0 is obeyed, and the cap is kept."""
    model = wide_model("qwen3_moe", num_hidden_layers=6, num_experts=16)
    facts = read_model(write_model(model, tmp_path / "m.gguf", quant=gguf.GGMLQuantizationType.Q8_0))
    config = EngineConfig(context=8192, sequences=1, kv="fp8", dtype="fp16", device="cuda", chunk_len=256)
    whole = size_engine(facts, config, "fp16", 8 * GIB)
    assert whole.expert_slots is None and whole.sweep_len == 2 * 256, "two chunks: others go on between units"
    cap = whole.device_bytes - 2 * MIB
    asked = {
        n: size_engine(facts, dataclasses.replace(config, sweep_len=n), "fp16", cap) for n in (None, 0, 512)
    }
    assert all(sizes.expert_slots and sizes.device_bytes <= cap for sizes in asked.values())
    assert [sizes.sweep_len for sizes in asked.values()] == [4096, 0, 512]
    for sweep_len in (4096, 512):
        sizes = asked[sweep_len if sweep_len == 512 else None]
        assert sizes.workspace_bytes - asked[0].workspace_bytes == sweep_len * 4 * 256
    assert "sweeps of 4,096" in asked[None].notes[-1]
    room = asked[0].expert_slots * asked[0].expert_bytes // (asked[0].expert_slots + 2 * 16)
    assert 4096 * 4 * 256 <= room // 2 < 8192 * 4 * 256


def test_a_loaded_engine_sweeps_where_it_is_told_to():
    facts = read_model(oracle.shared_checkpoint("qwen3_5")[1])
    answers = []
    for sweep_len in (None, 2048):
        config = EngineConfig(context=4096, sequences=1, threads=1, sweep_len=sweep_len, chunk_len=512)
        engine = load_engine(facts, config, IdsAsText).engine
        answers.append(ask(engine, oracle.random_ids(2200), max_tokens=4)[0])
    # The rest is cut in two by the snapshot before the prompt's end.
    assert engine.sweeper.num_units == 4 * (4 + 2) and engine.sweeper.token_layers == 4 * 2200
    assert answers[0] == answers[1]


def test_a_question_asks_for_each_layer_once(monkeypatch):
    """Whatever snapshots cut it into, and at the end of the document whose snapshot all of them go on from."""
    model, document = tiny_model("qwen3_5_moe", False), IDS[: 12 * PAGE]
    engine = engine_of(model, sweep_len=2048, tail_len=2048, snapshots=4, sequences=1, num_pages=16)
    ask(engine, document, marks=(len(document),))
    asked, layer = [], model.weights.layer
    monkeypatch.setattr(model.weights, "layer", lambda index: (asked.append(index), layer(index))[1])
    for number, length in enumerate((PAGE, PAGE, 2 * PAGE, 3 * PAGE + 7, 2 * PAGE, 20)):
        asked.clear()
        _, event = ask(engine, document + oracle.random_ids(length, seed=number), name=str(number))
        assert event.usage.cached_len == len(document)
        assert asked == list(range(model.facts.num_layers))


class SweepMachine(EngineMachine):
    """Random requests, cancels and faults with sweeps and a place for what cancelled ones had done."""

    settings = {"sweep_len": 192, "tail_len": 50, "ram": 1 << 25, "clock": Ticking()}  # noqa: RUF012


@pytest.mark.parametrize(("family", "examples"), [("qwen3_5_moe", 8), ("llama", 12)])
def test_random_requests(family, examples):
    drive(SweepMachine, family, examples, steps=25, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_many_random_requests(family):
    drive(SweepMachine, family, 100, steps=50, derandomize=False)
