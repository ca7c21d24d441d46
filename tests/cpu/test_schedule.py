"""The scheduler against a store that counts: rules of every step, and a machine of random requests."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from packhorse.core.errors import DoesNotFitError, InvalidRequestError, PackhorseError, PromptTooLongError
from packhorse.core.types import EXACT_ROWS, Request, SamplingParams
from packhorse.core.units import round_up
from packhorse.engine.schedule import Scheduler, Sequence, SequenceState, Step, Sweep

CHUNK, PAGE = 32, 8


class FakeHandle:
    """A place in the store; boundaries are absolute positions."""

    def __init__(self, slot: int, max_len: int, cached_len: int, boundaries: tuple[int, ...]) -> None:
        self.slot, self.max_len, self.cached_len = slot, max_len, cached_len
        self.position = cached_len
        self.boundaries = boundaries

    def boundary_after(self, position: int) -> int | None:
        return min((b for b in self.boundaries if b > position), default=None)


class FakeStore:
    """Holds `capacity` tokens in all, reserved to the last one when a sequence is opened."""

    def __init__(self, capacity: int, slots: int, cached: Callable[[Request], int] = lambda _: 0) -> None:
        self.capacity, self.slots, self.cached = capacity, slots, cached
        self.open: dict[str, FakeHandle] = {}
        self.refusals = 0

    def admit(self, request: Request) -> FakeHandle | None:
        max_len = len(request.token_ids) + request.sampling.max_tokens
        if max_len > self.capacity:
            raise DoesNotFitError("Too long.", asked=max_len, available=self.capacity, unit="tokens")
        used = sum(h.max_len for h in self.open.values())
        if used + max_len > self.capacity:
            self.refusals += 1
            return None
        slot = min(set(range(self.slots)) - {h.slot for h in self.open.values()})
        self.open[request.id] = FakeHandle(slot, max_len, self.cached(request), request.marks)
        return self.open[request.id]


def request(name: str, prompt_len: int, max_tokens: int = 4, marks: tuple[int, ...] = ()) -> Request:
    ids = tuple(range(1000, 1000 + prompt_len))
    return Request(name, ids, SamplingParams(max_tokens=max_tokens), marks)


def make(
    sequences: int = 4,
    capacity: int = 10_000,
    window: int = 1_000,
    exact: bool = False,
    cached: Callable[[Request], int] = lambda _: 0,
    chunk_len: int = CHUNK,
) -> tuple[Scheduler, FakeStore]:
    store = FakeStore(capacity, sequences, cached)
    return Scheduler(sequences, chunk_len, window, store.admit, exact=exact), store


def run(scheduler: Scheduler, store: FakeStore, token: Callable[[Sequence], int] = lambda _: 7) -> Step:
    """One step as an engine does it: schedule, complete, sample, finish at max_tokens."""
    step = scheduler.schedule()
    for span in step.spans:
        store.open[span.sequence.id].position = span.end
    for sequence in step.sampled:
        sequence.generated.append(token(sequence))
        if len(sequence.generated) == sequence.request.sampling.max_tokens:
            finish(scheduler, store, sequence.id)
    return step


def finish(scheduler: Scheduler, store: FakeStore, name: str) -> Sequence | None:
    sequence = scheduler.remove(name)
    if sequence is not None and sequence.handle is not None:
        del store.open[name]
    return sequence


def spans_of(step: Step) -> list[tuple[str, int, int]]:
    return [(s.sequence.id, s.position, s.end) for s in step.spans]


def test_one_request_from_queue_to_end():
    scheduler, store = make()
    sequence = scheduler.add(request("a", 70, max_tokens=3))
    assert sequence.state is SequenceState.WAITING and scheduler.has_work
    assert spans_of(run(scheduler, store)) == [("a", 0, 32)]
    assert sequence.state is SequenceState.READING and sequence.read_len == 32
    assert spans_of(run(scheduler, store)) == [("a", 32, 64)]
    last = run(scheduler, store)
    assert spans_of(last) == [("a", 64, 70)]
    assert last.sample_rows == (5,) and last.sampled == (sequence,)
    assert sequence.state is SequenceState.DECODING and sequence.generated == [7]
    step = scheduler.schedule()
    assert step.spans[0].token_ids == (7,) and step.spans[0].position == 70 and step.sample_rows == (0,)
    run(scheduler, store)
    run(scheduler, store)
    assert sequence.usage.generated_len == 3 and sequence.usage.prompt_len == 70
    assert not scheduler.has_work and not store.open and run(scheduler, store).spans == ()


def test_a_prompt_of_one_token_and_max_tokens_of_one():
    scheduler, store = make()
    scheduler.add(request("a", 1, max_tokens=1))
    step = run(scheduler, store)
    assert spans_of(step) == [("a", 0, 1)] and step.sample_rows == (0,) and not scheduler.has_work


def test_chunks_end_at_multiples_boundaries_and_the_end():
    scheduler, store = make(cached=lambda _: 8)
    scheduler.add(request("a", 100, marks=(40, 64, 99)))
    ends = [run(scheduler, store).spans[0].end for _ in range(5)]
    assert ends == [32, 40, 64, 96, 99]
    assert run(scheduler, store).spans[0].end == 100


def test_chunk_tokens_are_the_prompts_own():
    scheduler, store = make()
    scheduler.add(request("a", 50))
    assert run(scheduler, store).spans[0].token_ids == tuple(range(1000, 1032))
    assert run(scheduler, store).spans[0].token_ids == tuple(range(1032, 1050))


def test_tokens_across_prompt_and_answer():
    sequence = Sequence(request("a", 3), generated=[7, 8])
    assert sequence.token_ids(1, 4) == (1001, 1002, 7)
    assert sequence.token_ids(4, 5) == (8,)
    assert sequence.token_ids(0, 5) == (1000, 1001, 1002, 7, 8)


def test_decoding_goes_on_while_a_long_prompt_is_read():
    scheduler, store = make()
    scheduler.add(request("short", 5, max_tokens=50))
    run(scheduler, store)
    scheduler.add(request("long", 300))
    for chunk in range(9):
        assert spans_of(run(scheduler, store)) == [
            ("short", 5 + chunk, 6 + chunk),
            ("long", 32 * chunk, 32 * chunk + 32),
        ]


def test_short_prompts_share_a_step_and_no_chunk_is_cut_for_the_budget():
    scheduler, store = make()
    for name, length in (("a", 10), ("b", 40), ("c", 12)):
        scheduler.add(request(name, length))
    # b's chunk of 32 does not fit beside a's 10; c's 12 do.
    assert spans_of(run(scheduler, store)) == [("a", 0, 10), ("c", 0, 12)]
    assert spans_of(run(scheduler, store)) == [("a", 10, 11), ("c", 12, 13), ("b", 0, 32)]


def test_the_oldest_prompt_is_read_in_every_step_however_many_short_ones_come():
    scheduler, store = make(sequences=3)
    scheduler.add(request("old", 10 * CHUNK, max_tokens=1))
    for step in range(10):
        scheduler.add(request(f"new{step}", 4, max_tokens=1))
        assert ("old", step * CHUNK, (step + 1) * CHUNK) in spans_of(run(scheduler, store))


def test_the_head_waits_and_nobody_overtakes_it():
    scheduler, store = make(capacity=100)
    scheduler.add(request("a", 60, max_tokens=4))
    scheduler.add(request("big", 60, max_tokens=4))
    scheduler.add(request("small", 4, max_tokens=4))
    while "a" in store.open or not store.refusals:
        assert {name for name, _, _ in spans_of(run(scheduler, store))} == {"a"}
    assert spans_of(run(scheduler, store)) == [("big", 0, 32)]  # small's whole 4 exceed the budget left
    assert set(store.open) == {"big", "small"}


def test_no_more_run_than_sequences():
    scheduler, store = make(sequences=2)
    for name in "abc":
        scheduler.add(request(name, 4, max_tokens=2))
    run(scheduler, store)
    assert set(store.open) == {"a", "b"} and len(scheduler.waiting) == 1
    run(scheduler, store)
    assert spans_of(run(scheduler, store)) == [("c", 0, 4)]


@pytest.mark.parametrize("prompt_len, max_tokens", [(99, 1), (1, 99), (50, 50)])
def test_exactly_the_window_fits(prompt_len: int, max_tokens: int):
    scheduler, _ = make(window=100)
    assert scheduler.add(request("a", prompt_len, max_tokens)).max_len == 100


@pytest.mark.parametrize("prompt_len", [100, 101, 5000])
def test_a_prompt_that_fills_the_window_is_refused_with_both_numbers(prompt_len: int):
    scheduler, _ = make(window=100)
    with pytest.raises(PromptTooLongError) as caught:
        scheduler.add(request("a", prompt_len, 1))
    assert (caught.value.asked, caught.value.available) == (prompt_len, 100)
    assert f"{prompt_len:,}" in caught.value.reason and "100" in caught.value.reason
    assert not scheduler.has_work and "max_tokens" not in caught.value.hint


@pytest.mark.parametrize(
    ("model_window", "way"), [(100, "."), (4000, ", or raise the context to at most 4,000")]
)
def test_a_larger_context_is_advised_where_the_model_has_one(model_window, way):
    scheduler = Scheduler(2, CHUNK, 100, lambda _: None, model_window=model_window)
    for prompt_len in (100, 99):
        with pytest.raises(PromptTooLongError) as caught:
            scheduler.add(request("a", prompt_len))
        assert f"horten the prompt{way}" in caught.value.hint
        assert ("raise" in caught.value.hint) is (model_window > 100)


def test_prompt_and_answer_beyond_the_window_are_refused_with_the_largest_that_fits():
    scheduler, _ = make(window=100)
    with pytest.raises(PromptTooLongError) as caught:
        scheduler.add(request("a", 90, 11))
    assert (caught.value.asked, caught.value.available) == (101, 100)
    assert "max_tokens of at most 10" in caught.value.hint and not scheduler.has_work
    scheduler.add(request("a", 90, 10))


@pytest.mark.parametrize("bad", [request("a", 0), request("a", 5, marks=(0,)), request("a", 5, marks=(6,))])
def test_requests_that_mean_nothing_are_refused(bad: Request):
    scheduler, _ = make()
    with pytest.raises(InvalidRequestError):
        scheduler.add(bad)
    assert not scheduler.has_work


def test_a_live_id_cannot_be_used_twice_and_a_finished_one_can():
    scheduler, store = make(sequences=1)
    scheduler.add(request("running", 4))
    run(scheduler, store)
    scheduler.add(request("waiting", 4))
    for name in ("running", "waiting"):
        with pytest.raises(InvalidRequestError, match=name):
            scheduler.add(request(name, 4))
        finish(scheduler, store, name)
        scheduler.add(request(name, 4))
        assert name in [s.id for s in scheduler.waiting]


def test_what_the_store_can_never_hold_is_refused_and_the_next_goes_on():
    scheduler, store = make(capacity=50)
    never = scheduler.add(request("never", 60))
    scheduler.add(request("a", 10))
    step = run(scheduler, store)
    assert [(s, type(e)) for s, e in step.refused] == [(never, DoesNotFitError)]
    assert spans_of(step) == [("a", 0, 10)] and scheduler.remove("never") is None


def test_no_wait_for_room_that_nobody_will_free():
    scheduler = Scheduler(2, CHUNK, 100, lambda _: None)
    scheduler.add(request("a", 10))
    step = scheduler.schedule()
    [(sequence, error)] = step.refused
    assert sequence.id == "a" and type(error) is PackhorseError and "14" in error.reason
    assert not scheduler.has_work


def test_cancelled_in_each_state():
    scheduler, store = make(sequences=1)
    scheduler.add(request("a", 40))
    scheduler.add(request("b", 5))
    assert finish(scheduler, store, "b").state is SequenceState.WAITING
    run(scheduler, store)
    assert finish(scheduler, store, "a").state is SequenceState.READING
    scheduler.add(request("c", 5))
    run(scheduler, store)
    assert finish(scheduler, store, "c").state is SequenceState.DECODING
    assert not scheduler.has_work and not store.open and scheduler.remove("c") is None


def test_a_forgotten_token_is_noticed():
    scheduler, store = make()
    scheduler.add(request("a", 5))
    store_step = scheduler.schedule()
    store.open["a"].position = store_step.spans[0].end
    with pytest.raises(AssertionError, match="lacks the token"):
        scheduler.schedule()


def test_exact_rows_follow_positions():
    e = EXACT_ROWS
    scheduler, store = make(exact=True, chunk_len=4 * e, cached=lambda r: 8 if r.id == "b" else 0)
    scheduler.add(request("a", 5))
    scheduler.add(request("b", e + 13))
    step = run(scheduler, store)
    assert [(s.row, s.position, s.length) for s in step.spans] == [(0, 0, 5), (e + 8, 8, e + 5)]
    assert step.num_rows == 3 * e and step.sample_rows == (4, 2 * e + 12)
    step = run(scheduler, store)  # positions 5 and e + 13
    assert [s.row for s in step.spans] == [5, e + 13] and step.num_rows == 2 * e


class Machine(RuleBasedStateMachine):
    """Random requests, cancels and steps; every rule of the scheduler is checked at every step."""

    exact = False
    chunk_len = CHUNK
    window = 160
    capacity = 240

    def __init__(self) -> None:
        super().__init__()
        self.scheduler, self.store = make(
            3,
            self.capacity,
            self.window,
            self.exact,
            cached=lambda r: (len(r.token_ids) - 1) // 16 * PAGE,
            chunk_len=self.chunk_len,
        )
        self.count = 0
        self.replies: dict[str, int] = {}
        self.head_was_refused = False

    @rule(
        prompt_share=st.floats(0, 1.1),
        max_tokens=st.integers(1, 30),
        marks=st.sets(st.integers(1, 30).map(lambda n: n * PAGE), max_size=3),
    )
    def add(self, prompt_share: float, max_tokens: int, marks: set[int]) -> None:
        prompt_len = int(prompt_share * self.window)
        self.count += 1
        name = f"r{self.count}"
        asked = request(name, prompt_len, max_tokens, tuple(m for m in marks if m <= prompt_len))
        fits = prompt_len > 0 and prompt_len + max_tokens <= self.window
        try:
            self.scheduler.add(asked)
        except PackhorseError:
            assert not fits
        else:
            assert fits
            self.replies[name] = 0

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n in self.replies if not self.replies[n]]))
        self.end(name)
        assert name not in self.store.open

    @rule(eos=st.integers(0, 9))
    def step(self, eos: int) -> None:
        self.one_step(eos)

    @rule(eos=st.integers(0, 9))
    def several_steps(self, eos: int) -> None:
        for _ in range(8):
            self.one_step(eos)

    def end(self, name: str) -> None:
        assert finish(self.scheduler, self.store, name) is not None
        self.replies[name] += 1
        self.head_was_refused = False

    def one_step(self, eos: int) -> None:
        waiting_before = [s.id for s in self.scheduler.waiting]
        refusals = self.store.refusals
        step = self.scheduler.schedule()
        assert not step.refused  # the window is within the capacity
        admitted = waiting_before[: len(waiting_before) - len(self.scheduler.waiting)]
        assert [s.id for s in self.scheduler.waiting] == waiting_before[len(admitted) :]  # no overtaking
        if self.scheduler.waiting and len(self.scheduler.running) < 3:
            # The head was asked for and had to wait: once, until somebody leaves.
            assert self.store.refusals == refusals + (not self.head_was_refused)
            self.head_was_refused = True
        self.check(step)
        for span in step.spans:
            self.store.open[span.sequence.id].position = span.end
        for sequence in step.sampled:
            sequence.generated.append(sequence.position)
            done = len(sequence.generated) == sequence.request.sampling.max_tokens
            if done or (sequence.position + eos) % 10 == 0:
                self.end(sequence.id)

    def check(self, step: Step) -> None:
        running = self.scheduler.running
        spans = {s.sequence.id: s for s in step.spans}
        assert len(spans) == len(step.spans)  # one span a sequence at most
        decoding = [s for s in running if s.state is SequenceState.DECODING]
        reading = [s for s in running if s.state is SequenceState.READING]
        for sequence in decoding:  # decode is never delayed
            span = spans[sequence.id]
            assert span.length == 1 and span.samples and span.token_ids == (sequence.generated[-1],)
        assert [s.sequence for s in step.spans[: len(decoding)]] == decoding
        if reading:  # the oldest prompt is never delayed
            assert reading[0].id in spans
        chunks = [spans[s.id] for s in reading if s.id in spans]
        assert sum(c.length for c in chunks) <= self.chunk_len
        for chunk in chunks:
            boundaries = self.store.open[chunk.sequence.id].boundaries
            inside = range(chunk.position + 1, chunk.end)
            assert not [p for p in inside if p % self.chunk_len == 0 or p in boundaries]
            at_end = chunk.end == chunk.sequence.prompt_len
            assert at_end or chunk.end % self.chunk_len == 0 or chunk.end in boundaries
            assert chunk.samples == at_end
        left = self.chunk_len - sum(c.length for c in chunks)
        for sequence in reading:  # whoever was left out did not fit into the budget
            if sequence.id not in spans:
                assert min(round_up(sequence.position + 1, self.chunk_len), sequence.prompt_len) > left
        self.check_rows(step)

    def check_rows(self, step: Step) -> None:
        owners: dict[int, int] = {}  # row, or bucket of rows in exact mode, to span
        for index, span in enumerate(step.spans):
            for offset in range(span.length):
                row = span.row + offset
                assert row < step.num_rows
                if self.exact:
                    assert row % EXACT_ROWS == (span.position + offset) % EXACT_ROWS
                    assert owners.setdefault(row // EXACT_ROWS, index) == index
                else:
                    assert owners.setdefault(row, index) == index
        assert len(owners) * (EXACT_ROWS if self.exact else 1) == step.num_rows
        rows = [s.row + s.length - 1 for s in step.spans if s.sequence in step.sampled]
        assert list(step.sample_rows) == rows

    @invariant()
    def in_order_of_arrival(self) -> None:
        live = [*self.scheduler.running, *self.scheduler.waiting]
        assert [int(s.id[1:]) for s in live] == sorted(int(s.id[1:]) for s in live)

    @invariant()
    def never_over_admitted(self) -> None:
        assert sum(h.max_len for h in self.store.open.values()) <= self.capacity
        assert len(self.scheduler.running) <= 3
        assert set(self.store.open) == {s.id for s in self.scheduler.running}
        assert all(n <= 1 for n in self.replies.values())

    def teardown(self) -> None:
        """All that is live ends within the steps that its tokens need, and each has one reply."""
        live = [*self.scheduler.running, *self.scheduler.waiting]
        bound = sum(s.max_len for s in live)  # at least one token of the oldest a step
        for _ in range(bound):
            if not self.scheduler.has_work:
                break
            self.one_step(0)
        assert not self.scheduler.has_work and not self.store.open
        assert all(n == 1 for n in self.replies.values())


class ExactMachine(Machine):
    """The same with rows padded to buckets, and chunks of more than a bucket."""

    exact = True
    chunk_len = 5 * EXACT_ROWS // 2
    window = 8 * EXACT_ROWS
    capacity = 12 * EXACT_ROWS


TestDense = Machine.TestCase
TestDense.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestExact = ExactMachine.TestCase
TestExact.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def sweeping(sweep_len: int = 4 * CHUNK, **settings) -> tuple[Scheduler, FakeStore]:
    scheduler, store = make(**settings)
    scheduler.sweep_len = scheduler.sweep_rows = sweep_len
    scheduler.num_layers, scheduler._tail_len = 3, 40
    return scheduler, store


def pass_layers(scheduler: Scheduler, store: FakeStore, sweep: Sweep) -> list[tuple[str, int, int, int]]:
    """All units of a sweep, as an engine completes them: (id, layer, position, end)."""
    units = []
    while sweep.works:
        work = sweep.works[sweep.index]
        units.append((work.sequence.id, sweep.layer, work.position, work.end))
        sweep.advance()
        if sweep.passed is not None:
            sequence = sweep.passed
            store.open[sequence.id].position = sweep.works_of(sequence)[-1].end
            if sequence.position == sequence.prompt_len:
                sequence.generated.append(7)
            scheduler.leave_sweep(sequence)
    return units


def test_long_prompts_are_swept_and_short_ones_are_not():
    scheduler, store = sweeping()
    for name, length in (("tail", 32), ("long", 41), ("longer", 150)):
        scheduler.add(request(name, length))
    assert spans_of(run(scheduler, store)) == [("tail", 0, 32)]
    step = scheduler.schedule()
    assert step.spans == () and step.sweep is scheduler.sweep
    assert [(w.sequence.id, w.row, w.position, w.end) for w in step.sweep.works] == [
        ("long", 0, 0, 32),
        ("long", 32, 32, 41),
        ("longer", 41, 0, 32),
        ("longer", 73, 32, 64),
    ]
    assert spans_of(run(scheduler, store)) == [("tail", 32, 33)], "slices and steps alternate"
    units = pass_layers(scheduler, store, step.sweep)
    assert [unit[1] for unit in units] == [0] * 4 + [1] * 4 + [2] * 4
    assert scheduler.sweep is None
    assert scheduler.find("long").state is SequenceState.DECODING
    assert scheduler.find("longer").read_len == 64
    assert scheduler.schedule().sweep.works[0].position == 64
    assert spans_of(run(scheduler, store)) == [("tail", 33, 34), ("long", 41, 42)]


def test_what_is_left_of_a_prompt_may_be_a_tail():
    scheduler, store = sweeping()
    scheduler.add(request("a", 4 * CHUNK + 30))
    pass_layers(scheduler, store, scheduler.schedule().sweep)
    assert spans_of(run(scheduler, store)) == [("a", 128, 158)]


def test_whoever_is_to_be_computed_alone_is():
    """Also where one of them fails once more meanwhile."""
    scheduler, store = make(sequences=3)
    for name in "abc":
        scheduler.add(request(name, 8))
    failed = scheduler.schedule()
    scheduler.isolate(failed.spans)
    again = scheduler.schedule()
    assert spans_of(again) == [("a", 0, 8)]
    scheduler.isolate(again.spans)
    for name in "abc":
        assert spans_of(run(scheduler, store)) == [(name, 0, 8)]
    assert [span[0] for span in spans_of(run(scheduler, store))] == ["a", "b", "c"]


def test_a_tail_that_a_snapshot_cuts_in_two_is_swept():
    """Each of its chunks would ask for all weights."""
    scheduler, store = sweeping(cached=lambda _: 64)
    scheduler.add(request("whole", 64 + 16))
    assert spans_of(run(scheduler, store)) == [("whole", 64, 80)]
    finish(scheduler, store, "whole")
    scheduler.add(request("cut", 64 + 20, marks=(80,)))
    sweep = scheduler.schedule().sweep
    assert sweep is not None and [(w.position, w.end) for w in sweep.works] == [(64, 80), (80, 84)]
    assert [unit[1] for unit in pass_layers(scheduler, store, sweep)] == [0, 0, 1, 1, 2, 2]


def test_sub_chunks_end_where_chunks_do():
    """At multiples, boundaries and the prompt's end, from where the prompt is cached; rows as in exact steps."""
    scheduler, _ = sweeping(exact=True, cached=lambda _: 8, chunk_len=64, sweep_len=1000)
    scheduler.add(request("a", 200, marks=(40, 64, 136)))
    works = scheduler.schedule().sweep.works
    assert [(w.position, w.end) for w in works] == [
        (8, 40),
        (40, 64),
        (64, 128),
        (128, 136),
        (136, 192),
        (192, 200),
    ]
    for work, later in pairwise(works):
        assert work.row % EXACT_ROWS == work.position % EXACT_ROWS
        assert later.row // EXACT_ROWS > work.last_row // EXACT_ROWS, "two works share a bucket"
    assert [w.samples for w in works] == [False] * 5 + [True]


@given(st.data())
def test_a_sweep_computes_each_unit_once(data):
    """Whoever leaves when: the others' units come in the order of layers, each once, and all that were done count."""
    scheduler, _ = sweeping(sweep_len=12 * CHUNK)
    lengths = data.draw(st.lists(st.integers(41, 150), min_size=1, max_size=4))
    for number, length in enumerate(lengths):
        scheduler.add(request(f"r{number}", length))
    sweep = scheduler.schedule().sweep
    works = {s.id: [(w.position, w.end) for w in sweep.works_of(s)] for s in sweep.sequences}
    done: dict[str, list[tuple[int, int, int]]] = {name: [] for name in works}
    left = set()
    while sweep.works:
        if data.draw(st.integers(0, 9)) == 0:
            leaver = data.draw(st.sampled_from(sweep.sequences))
            left.add(leaver.id)
            scheduler.remove(leaver.id)
            continue
        work = sweep.works[sweep.index]
        assert sweep.next_sequence is work.sequence
        done[work.sequence.id].append((sweep.layer, work.position, work.end))
        sweep.advance()
        for sequence in sweep.sequences:
            units = done[sequence.id]
            assert sweep.read_len(sequence) == sum(end - start for _, start, end in units) // 3
        if sweep.passed is not None:
            assert sweep.next_sequence is sweep.passed
            scheduler.leave_sweep(sweep.passed)
    for name, spans in works.items():
        expected = [(layer, *span) for layer in range(3) for span in spans]
        assert done[name] == (expected[: len(done[name])] if name in left else expected)
    assert scheduler.sweep is None
