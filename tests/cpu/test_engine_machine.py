"""Random requests through the engine: no leak, no over-admission, no request without a reply.

In exact mode every answer must have the bits of the same request alone in a fresh engine, whatever else was
batched with it, cancelled beside it, reused by it or evicted under it.
"""

from functools import cache
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import oracle
from engines import ask, make_engine, run_all, tiny_model
from packhorse.core.errors import CancelledRequestError, ComputeError, PromptTooLongError
from packhorse.core.types import Event, FinishReason, Request, SamplingParams
from packhorse.engine.engine import GIVEN_MORE, GIVEN_TIMES, Engine
from packhorse.engine.experts import StreamedExperts
from packhorse.engine.load import warm_up
from packhorse.engine.schedule import Step, Sweep

PAGE, NUM_PAGES, WINDOW = 64, 9, 400
# Prompts are beginnings of three streams, two of which share their first 100 tokens.
_FIRST = oracle.random_ids(400)
STREAMS = [_FIRST, _FIRST[:100] + oracle.random_ids(300, seed=1), oracle.random_ids(400, seed=2)]
LENGTHS = [1, 2, 63, 64, 65, 100, 128, 129, 200, 300, 399, 400]


@cache
def alone(family: str, stream: int, length: int) -> list[int]:
    engine = make_engine(tiny_model(family, True), num_pages=12)
    return ask(engine, STREAMS[stream][:length], max_tokens=8)[0]


class EngineMachine(RuleBasedStateMachine):
    """Adds, steps and cancels; `family` is set by the test, `settings` are more of make_engine's."""

    family = ""
    settings: ClassVar[dict[str, object]] = {}

    @initialize(sequences=st.integers(1, 3), chunk=st.sampled_from([64, 128]))
    def start(self, sequences: int, chunk: int) -> None:
        self.engine = make_engine(
            tiny_model(self.family, True),
            page_len=PAGE,
            num_pages=NUM_PAGES,
            chunk_len=chunk,
            snapshot_len=128,
            snapshots=3,
            sequences=sequences,
            window=WINDOW,
            **self.settings,
        )
        self.asked: dict[str, tuple[int, int, int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.ended: dict[str, Event] = {}
        self.count = 0

    @rule(stream=st.integers(0, 2), length=st.sampled_from(LENGTHS), max_tokens=st.sampled_from([1, 2, 8]))
    def add(self, stream: int, length: int, max_tokens: int) -> None:
        name = f"r{self.count}"
        self.count += 1
        request = Request(name, tuple(STREAMS[stream][:length]), SamplingParams(max_tokens=max_tokens))
        if length + max_tokens > WINDOW:
            with pytest.raises(PromptTooLongError) as caught:
                self.engine.add(request)
            assert caught.value.available == WINDOW
            assert caught.value.asked in (length, length + max_tokens)
            return
        self.engine.add(request)
        self.asked[name] = (stream, length, max_tokens)
        self.answers[name] = []

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.engine.has_work:
                for event in self.engine.step():
                    self.note(event)

    @rule(which=st.integers(0, 5))
    def cancel(self, which: int) -> None:
        live = sorted(self.asked.keys() - self.ended.keys())
        if not live:
            assert self.engine.cancel("nobody") is None
            return
        event = self.engine.cancel(live[which % len(live)])
        assert event.finish is FinishReason.CANCELLED and isinstance(event.error, CancelledRequestError)
        self.note(event)

    @rule(which=st.integers(0, 5), lasting=st.booleans())
    def fault(self, which: int, lasting: bool) -> None:
        """Steps with one request fail after the layers have written what they write: once, or each time.

        It alone ends, unless the step that failed once had others: then nobody does."""
        live = sorted(self.asked.keys() - self.ended.keys())
        if not live:
            return
        victim = live[which % len(live)]
        run, failed = self.engine.runner.run, []
        sweeper = self.engine.sweeper
        unit = sweeper and sweeper._run_unit

        def failing_unit(sweep: Sweep) -> torch.Tensor | None:
            logits = unit(sweep)
            name = sweep.works[sweep.index].sequence.id
            if name == victim and (lasting or not failed):
                failed.append([name])
                raise MemoryError
            return logits

        def failing(step: Step, views: list) -> torch.Tensor:
            logits = run(step, views)
            names = [work.sequence.id for work in step.spans]
            if victim in names and (lasting or not failed):
                failed.append(names)
                raise MemoryError
            return logits

        self.engine.runner.run = failing
        if sweeper is not None:
            sweeper._run_unit = failing_unit
        while victim not in self.ended and (lasting or not failed):
            try:
                events = self.engine.step()
            except MemoryError:
                events = self.engine.recover(ComputeError("It failed."))
                assert [e.request_id for e in events] == ([victim] if failed[-1] == [victim] else [])
            for event in events:
                self.note(event)
        self.engine.runner.run = run
        if sweeper is not None:
            sweeper._run_unit = unit

    def note(self, event: Event) -> None:
        name = event.request_id
        assert name not in self.ended, "a reply after the last"
        self.answers[name] += event.token_ids
        assert event.usage.generated_len == len(self.answers[name])
        if event.finish is not None:
            self.ended[name] = event

    @invariant()
    def pages_add_up(self) -> None:
        if not hasattr(self, "engine"):
            return
        stats = self.engine.store.stats
        assert stats.pages_free + stats.pages_used + stats.pages_cached == NUM_PAGES
        assert min(stats.pages_free, stats.pages_used) >= 0
        assert stats.open_sequences == len(self.engine.scheduler.running)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.has_work:
            for event in self.engine.step():
                self.note(event)
        assert self.asked.keys() == self.ended.keys(), "a request without a reply"
        for name, (stream, length, max_tokens) in self.asked.items():
            want = alone(self.family, stream, length)[:max_tokens]
            if self.ended[name].finish in (FinishReason.CANCELLED, FinishReason.ERROR):
                want = want[: len(self.answers[name])]
            else:
                assert self.ended[name].finish is FinishReason.LENGTH
            assert self.answers[name] == want
        self.engine.store.clear()
        stats = self.engine.store.stats
        assert (stats.pages_free, stats.snapshots, stats.open_sequences) == (NUM_PAGES, 0, 0)


def drive(kind: type, family: str, examples: int, *, steps: int, derandomize: bool) -> None:
    """Run a machine of `kind` over `family`."""
    machine = type("Machine", (kind,), {"family": family})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=derandomize,
        ),
    )


@pytest.mark.parametrize(("family", "examples"), [("qwen3_5_moe", 18), ("llama", 30)])
def test_random_requests(family, examples):
    drive(EngineMachine, family, examples, steps=25, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_many_random_requests(family):
    drive(EngineMachine, family, 200, steps=50, derandomize=False)


@pytest.mark.parametrize("sequences", [1, 2])
def test_warming_up_runs_each_kind_of_shape(sequences, monkeypatch):
    """Also with one sequence at once: kernels for few rows are not left to the first short prompt."""
    engine = make_engine(tiny_model("qwen3_5_moe", True), chunk_len=64, sequences=sequences)
    steps = []
    true_run = Engine._run_step
    monkeypatch.setattr(Engine, "_run_step", lambda self, step: (steps.append(step), true_run(self, step))[1])
    warm_up(engine, SimpleNamespace(context=400, chunk_len=64))
    lengths = [tuple(span.length for span in step.spans) for step in steps]
    assert lengths[0] == (8,) and {8, 16, 64, 1} <= {length for each in lengths for length in each}
    assert ((1, 64) in lengths) == (sequences == 2)
    assert max(span.end for step in steps for span in step.spans) == 391 + 7 and not engine.has_work
    assert not engine.store.stats.entries


def test_room_is_made_before_the_store_takes_pages(monkeypatch):
    """What was lent, pages among it, is free again before any of it is used, by what the store brings back too."""
    engine = make_engine(tiny_model("qwen3", True))
    assert engine.store.before_taking == engine.runner.make_room
    calls = []
    true_allocate = engine.store._pages.allocate
    monkeypatch.setattr(engine.store, "before_taking", lambda: calls.append("room"))
    monkeypatch.setattr(
        engine.store._pages, "allocate", lambda *args: (calls.append("take"), true_allocate(*args))[1]
    )
    ask(engine, STREAMS[0][:100], max_tokens=2)
    assert calls == ["room", "take"]


class GivingExperts(StreamedExperts):
    """Experts that have some of a card's memory to give up."""

    def __init__(self, left: int) -> None:
        self.left, self.asked = left, []

    @property
    def held(self) -> dict[str, int]:
        return {"slots": self.left}

    def give_back(self, size: int) -> int:
        self.asked.append(size)
        freed = min(self.left, size)
        self.left -= freed
        return freed


@pytest.mark.parametrize("sweep", [{}, {"sweep_len": 128, "tail_len": 64}])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
def test_a_step_without_memory_is_computed_again(family, sweep, monkeypatch, capsys):
    """Wherever it fails, after it has changed states too: experts give memory up, and answers are the same. Whoever
    fails time and again ends, and so does everyone when there is nothing left to give."""
    experts = GivingExperts(10**12)
    engine = make_engine(tiny_model(family, True), chunk_len=64, sequences=3, experts=experts, **sweep)
    engine.runner.make_room = lambda: None
    fails: set[int] = set()
    calls = [0]

    def failing(true):
        def run(*args):
            found = true(*args)
            calls[0] += 1
            if calls[0] in fails:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 MiB. GPU 0 ...")
            return found

        return run

    monkeypatch.setattr(engine.runner, "run", failing(engine.runner.run))
    if engine.sweeper is not None:
        monkeypatch.setattr(engine.sweeper, "_run_unit", failing(engine.sweeper._run_unit))
    for at in (1, 2, 5, 9, 14):
        calls[0], fails = 0, {at}
        for stream in range(3):
            ids, sampling = tuple(STREAMS[stream][:200]), SamplingParams(max_tokens=8)
            engine.add(Request(f"{stream}", ids, sampling, store=False))
        events = run_all(engine)
        for stream in range(3):
            tokens = [token for event in events[f"{stream}"] for token in event.token_ids]
            assert tokens == alone(family, stream, 200), f"call {at}"
    assert len(experts.asked) == 5 and set(experts.asked) == {GIVEN_MORE + 3 * 2**19}
    assert capsys.readouterr().err.count("ran out of memory over 1.50 MiB") == 5
    for left, found in ((10**12, 5 + GIVEN_TIMES), (0, 6 + GIVEN_TIMES)):
        experts.left = left
        calls[0], fails = 0, {3, 4, 5, 6, 7, 8, 9}
        engine.add(Request("r", tuple(STREAMS[0][:100]), SamplingParams(max_tokens=8), store=False))
        with pytest.raises(torch.OutOfMemoryError):
            run_all(engine)
        assert [event.request_id for event in engine.recover(ComputeError("no memory"))] == ["r"]
        assert len(experts.asked) == found and not engine.has_work
