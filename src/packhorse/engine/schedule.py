"""Which tokens the next step computes: decode tokens, prompt chunks, sweeps, and who is let in. Pure Python.

    add -> [waiting, first in first out] -> admit -> [running, oldest first] -> remove
                                                      reading -> decoding

Rules, in the order that settles arguments:

1. Every decoding sequence has one token in every step.
2. The oldest reading sequence has a chunk in every step. Younger ones share what is left of `chunk_len`
   prompt tokens a step, where their whole next chunk fits into it: a chunk is never cut for the budget.
   With sweeps, prompts with more than `tail_len` tokens to read, or more than one chunk, have no chunks: the oldest
   fill a sweep, slices of which alternate with the steps of the others (docs/sweep.md).
3. Where a chunk ends depends on the prompt alone: at the next absolute multiple of `chunk_len`, at the
   handle's next boundary (a snapshot is wanted there), or at the prompt's end, whichever is first.
4. The head of the queue is admitted when it fits; nobody overtakes it.
5. After a failed step its sequences are computed alone first: they go on from where their state is known, and
   may read again a part of their prompt and answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from packhorse.core.errors import InvalidRequestError, PackhorseError, PromptTooLongError
from packhorse.core.types import EXACT_ROWS, TAIL_LEN, Request, Span, TokenLogprob, Usage
from packhorse.core.units import round_up


class Handle(Protocol):
    """What the scheduler reads of the store's handle of an admitted sequence; it changes nothing.

    slot: the sequence's place in the store. cached_len: prompt tokens that were reused, below the prompt's
    length. position: tokens stored so far; completing a step advances it. boundary_after: the next position
    after one at which a chunk must end for a snapshot, None where there is none.
    """

    @property
    def slot(self) -> int: ...
    @property
    def cached_len(self) -> int: ...
    @property
    def position(self) -> int: ...
    def boundary_after(self, position: int) -> int | None: ...


class SequenceState(StrEnum):
    """Where a live sequence stands."""

    WAITING = "waiting"
    READING = "reading"
    DECODING = "decoding"


@dataclass(eq=False)
class Sequence:
    """A live request: what was asked, what the store holds for it, what was generated.

    Whoever samples appends to `generated`, one token for each of the sequence's rows in
    `Step.sample_rows`, before the next `schedule`. prompt_logprobs: where they were asked for, those made so
    far, until the prompt has been read and they are reported.
    """

    request: Request
    handle: Handle | None = None
    generated: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def prompt_len(self) -> int:
        return len(self.request.token_ids)

    @property
    def known_len(self) -> int:
        """Tokens known so far, of prompt and answer; the last one of an answer is not stored yet."""
        return self.prompt_len + len(self.generated)

    @property
    def max_len(self) -> int:
        """Tokens the sequence may come to hold: prompt and answer."""
        return self.prompt_len + self.request.sampling.max_tokens

    @property
    def position(self) -> int:
        """Tokens stored so far, read or reused."""
        return 0 if self.handle is None else self.handle.position

    @property
    def read_len(self) -> int:
        """Prompt tokens stored so far, read or reused."""
        return min(self.position, self.prompt_len)

    @property
    def state(self) -> SequenceState:
        if self.handle is None:
            return SequenceState.WAITING
        decoding = self.generated and self.position == self.known_len - 1
        return SequenceState.DECODING if decoding else SequenceState.READING

    @property
    def usage(self) -> Usage:
        cached_len = 0 if self.handle is None else self.handle.cached_len
        return Usage(self.prompt_len, cached_len, len(self.generated))

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens at positions start .. stop of prompt and answer."""
        answer = slice(max(start - self.prompt_len, 0), max(stop - self.prompt_len, 0))
        return self.request.token_ids[start:stop] + tuple(self.generated[answer])


@dataclass(frozen=True)
class Work(Span):
    """A span of a step and the sequence it belongs to.

    samples: the logits of the last row give the sequence's next token.
    """

    sequence: Sequence
    samples: bool

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The span's tokens, `length` of them."""
        return self.sequence.token_ids(self.position, self.end)

    @property
    def last_row(self) -> int:
        return self.row + self.length - 1


@dataclass(eq=False)
class Sweep:
    """Prompt tokens that pass the layers together: each unit is one sub-chunk under one layer.

    works: the sub-chunks, those of one sequence side by side, their rows those of the sweep. layer, index: the
    next unit is works[index] under that layer; only in the last layer `index` may be behind the last work.
    """

    works: list[Work]
    num_layers: int
    layer: int = 0
    index: int = 0

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """Whose tokens it reads, in the order of their works."""
        return tuple(dict.fromkeys(work.sequence for work in self.works))

    @property
    def next_sequence(self) -> Sequence:
        """Whose unit is next, or whose works have just passed the last layer."""
        return self.passed or self.works[self.index].sequence

    @property
    def passed(self) -> Sequence | None:
        """The sequence all of whose works have passed the last layer; it is to be removed."""
        if self.layer < self.num_layers - 1 or not self.index:
            return None
        first = self.works[0].sequence
        more = self.index < len(self.works) and self.works[self.index].sequence is first
        return None if more else first

    def works_of(self, sequence: Sequence) -> list[Work]:
        """The sequence's sub-chunks, in order."""
        return [work for work in self.works if work.sequence is sequence]

    def num_passed(self, sequence: Sequence) -> int:
        """How many of the sequence's works have passed the layer that the sweep is at."""
        return sum(work.sequence is sequence for work in self.works[: self.index])

    def read_len(self, sequence: Sequence) -> int:
        """What has been done of the sequence's tokens: tokens times layers, in tokens that pass all layers."""
        works = self.works_of(sequence)
        here = sum(work.length for work in works[: self.num_passed(sequence)])
        return (self.layer * sum(work.length for work in works) + here) // self.num_layers

    def advance(self) -> None:
        """The next unit has been computed."""
        self.index += 1
        self._carry()

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence's works out."""
        self.index -= self.num_passed(sequence)
        self.works = [work for work in self.works if work.sequence is not sequence]
        self._carry()

    def resume(self, count: int, layer: int, index: int) -> None:
        """Go on at that unit with the first `count` works, which are of one sequence."""
        self.works = self.works[:count]
        self.layer, self.index = layer, index

    def _carry(self) -> None:
        if self.works and self.index == len(self.works) and self.layer < self.num_layers - 1:
            self.layer, self.index = self.layer + 1, 0


@dataclass(frozen=True)
class Step:
    """What one call of the engine computes.

    spans: decode tokens, then prompt chunks, in row order; at most one for a sequence. num_rows: rows of the
    step's activations; rows outside every span are padding, and there are some in exact mode only.
    refused: sequences that turned out never to fit, with the reason; they have left the scheduler. sweep: there
    are no spans, and a slice of this is computed.
    """

    spans: tuple[Work, ...]
    num_rows: int
    refused: tuple[tuple[Sequence, PackhorseError], ...] = ()
    sweep: Sweep | None = None

    @property
    def prompt_len(self) -> int:
        """Prompt tokens that the step reads."""
        return sum(w.length for w in self.spans if w.position < w.sequence.prompt_len)

    @property
    def sampled(self) -> tuple[Sequence, ...]:
        """The sequences that get a token from this step, in the order of `sample_rows`."""
        return tuple(span.sequence for span in self.spans if span.samples)

    @property
    def sample_rows(self) -> tuple[int, ...]:
        """The rows whose logits are needed: decode rows, and the last row of each prompt that ends here."""
        return tuple(span.last_row for span in self.spans if span.samples)


class Scheduler:
    """Decides what each step computes. Not thread-safe: calls come between steps, from one thread.

    sequences: running at once, at most. chunk_len: prompt tokens a step reads at most, and the absolute grid
    on which chunks end. window: tokens one request may hold, prompt and answer: the least of the model's
    window, the context asked for and what the store can hold of one sequence. admit: opens a request in the
    store; returns its handle, or None where it has to wait for others to end, or raises a PackhorseError
    (DoesNotFitError) where waiting would not help. exact: rows are padded to buckets of EXACT_ROWS.
    model_window: the model's own window, which refusals name where it is larger. sweep_len: tokens of a sweep, 0
    for none, else at least chunk_len; under num_layers layers. tail_len: prompts with more tokens to read are
    swept, and those that would take more than one chunk.

    Attributes `waiting`, `running` and `sweep`, the one in progress, are for reading.
    """

    def __init__(
        self, sequences: int, chunk_len: int, window: int, admit: Callable[[Request], Handle | None], *,
        exact: bool = False, model_window: int = 0, sweep_len: int = 0, num_layers: int = 1,
        tail_len: int = TAIL_LEN,
    ) -> None:  # fmt: skip
        assert not sweep_len or sweep_len >= chunk_len
        self.sequences = sequences
        self.chunk_len = chunk_len
        self.window = window
        self.exact = exact
        larger = f", or raise the context to at most {model_window:,}, as far as memory allows."
        self._or_raise = larger if model_window > window else "."
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.sweep: Sweep | None = None
        self.sweep_len = sweep_len
        # Of each sub-chunk exact mode pads the first and the last bucket.
        self.sweep_rows = sweep_len + 2 * EXACT_ROWS if sweep_len and exact else sweep_len
        self.num_layers = num_layers
        self._tail_len = tail_len
        self._sweep_turn = False
        self._admit = admit
        self._live: dict[str, Sequence] = {}
        self._alone: list[tuple[Sequence, int]] = []
        # Asking again before somebody has left would hash a long prompt in every step, for the same answer.
        self._head_waits = False

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self._live)

    def add(self, request: Request) -> Sequence:
        """Queue a request. Nothing is clamped: what cannot be done as asked is refused.

        Raises InvalidRequestError for an id in use, an empty prompt or a mark outside the prompt, and
        PromptTooLongError where the prompt, or the prompt and max_tokens, exceed the window.
        """
        if request.id in self._live:
            raise InvalidRequestError(
                f"A request with the id {request.id!r} is running or waiting.",
                hint="Give each live request an id of its own.",
                request_id=request.id,
            )
        sequence = Sequence(request)
        self.check(request)
        self._live[request.id] = sequence
        self.waiting.append(sequence)
        return sequence

    def find(self, request_id: str) -> Sequence | None:
        """The live request of that id, waiting or running."""
        return self._live.get(request_id)

    def remove(self, request_id: str) -> Sequence | None:
        """Take a request out, finished, failed or cancelled, and return it; None where none is live.

        Its place is free for the next `schedule`. The caller closes the handle, if it has one, before that.
        """
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return None
        self._head_waits = False
        self._alone = [entry for entry in self._alone if entry[0] is not sequence]
        self.leave_sweep(sequence)
        if sequence.handle is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        return sequence

    def isolate(self, works: Iterable[Work]) -> None:
        """Compute these sequences alone, one after the other, each until it is past the end of its work, and then those
        that were to be alone already."""
        self._alone = [*((work.sequence, work.end) for work in works), *self._alone]

    def leave_sweep(self, sequence: Sequence) -> None:
        """Take a sequence out of the sweep, if it is in one: it has passed all layers, or has ended."""
        if self.sweep is not None:
            self.sweep.remove(sequence)
            if not self.sweep.works:
                self.sweep = None

    def schedule(self) -> Step:
        """Let in whoever fits, and choose the tokens of the next step."""
        self._alone = [entry for entry in self._alone if entry[0].position < entry[1]]
        if self._alone:
            return self.place(self._alone[0][0])
        refused = self._let_in()
        if self.sweep is None:
            self.sweep = self._next_sweep()
        others = [*self._decodes(), *self._chunks()]
        if self.sweep is not None and (self._sweep_turn or not others):
            self._sweep_turn = False
            return Step((), 0, tuple(refused), self.sweep)
        self._sweep_turn = True
        return self.place(*others, refused=refused)

    def place(self, *sequences: Sequence, refused: Iterable[tuple[Sequence, PackhorseError]] = ()) -> Step:
        """A step of the next token or chunk of each of these."""
        spans: list[Work] = []
        num_rows = 0
        for sequence in sequences:
            spans.append(self._place(sequence, sequence.position, num_rows))
            num_rows = self._bucket_end(spans[-1].last_row + 1)
        return Step(tuple(spans), num_rows, tuple(refused))

    def check(self, request: Request) -> None:
        """Raise what `add` raises over the request by itself. From any thread: nothing is changed."""
        sequence = Sequence(request)
        prompt_len = sequence.prompt_len
        if not prompt_len:
            raise InvalidRequestError("The prompt is empty.", hint="Give at least one token.")
        for mark in request.marks:
            if not 0 < mark <= prompt_len:
                raise InvalidRequestError(
                    f"The mark {mark} lies outside the prompt of {prompt_len:,} tokens.",
                    hint=f"Marks are positions from 1 to {prompt_len}.",
                    field="marks",
                    value=mark,
                )
        if prompt_len >= self.window:
            raise PromptTooLongError(
                f"The prompt has {prompt_len:,} tokens; the window holds {self.window:,}, answer included.",
                hint=f"Shorten the prompt{self._or_raise}",
                asked=prompt_len,
                available=self.window,
                unit="tokens",
            )
        if sequence.max_len > self.window:
            raise PromptTooLongError(
                f"The prompt of {prompt_len:,} tokens and max_tokens {request.sampling.max_tokens:,} make "
                f"{sequence.max_len:,} tokens; the window holds {self.window:,}.",
                hint=f"Give max_tokens of at most {self.window - prompt_len:,}, or shorten the prompt"
                f"{self._or_raise}",
                asked=sequence.max_len,
                available=self.window,
                unit="tokens",
            )

    def _let_in(self) -> list[tuple[Sequence, PackhorseError]]:
        """Admit from the head of the queue until one must wait. Returns those that can never be admitted."""
        refused: list[tuple[Sequence, PackhorseError]] = []
        while self.waiting and len(self.running) < self.sequences and not self._head_waits:
            head = self.waiting[0]
            try:
                head.handle = self._admit(head.request)
                if head.handle is None and not self.running:
                    # Nothing will ever be freed: waiting on would hang this request and all behind it.
                    raise PackhorseError(
                        f"There is no room for the {head.max_len:,} tokens of request {head.id!r}, and no "
                        "other request holds any.",
                        hint="This is a fault in Packhorse: please report it.",
                        request_id=head.id,
                    )
            except PackhorseError as error:
                refused.append((head, error))
                self.remove(head.id)
                continue
            if head.handle is None:
                self._head_waits = True
                break
            self.running.append(self.waiting.popleft())
        return refused

    def _decodes(self) -> list[Sequence]:
        return [s for s in self.running if s.state is SequenceState.DECODING]

    def _chunks(self) -> list[Sequence]:
        """Whose prompt chunks are in this step, oldest sequence first, at most chunk_len tokens in all."""
        chunks: list[Sequence] = []
        budget = self.chunk_len
        for sequence in self.running:
            if sequence.state is SequenceState.READING and not self._is_swept(sequence):
                length = self._chunk_end(sequence, sequence.position) - sequence.position
                if length <= budget:
                    chunks.append(sequence)
                    budget -= length
        return chunks

    def _is_swept(self, sequence: Sequence) -> bool:
        """Whether what the sequence reads is in a sweep, or waits for the next one: what is more than a tail, or
        more than one chunk, each of which would ask for all weights."""
        if not self.sweep_len or sequence.generated:
            return False
        left = sequence.prompt_len - sequence.position
        return left > self._tail_len or self._chunk_end(sequence, sequence.position) < sequence.prompt_len

    def _next_sweep(self) -> Sweep | None:
        """As many sub-chunks of the oldest long prompts as have room."""
        works: list[Work] = []
        num_rows = 0
        for sequence in filter(self._is_swept, self.running):
            position = sequence.position
            while position < sequence.prompt_len:
                work = self._place(sequence, position, num_rows)
                end = self._bucket_end(work.last_row + 1)
                if end > self.sweep_rows:
                    return Sweep(works, self.num_layers)
                works.append(work)
                position, num_rows = work.end, end
        return Sweep(works, self.num_layers) if works else None

    def _chunk_end(self, sequence: Sequence, position: int) -> int:
        assert position < sequence.known_len, f"{sequence.id} lacks the token it sampled"
        end = min(round_up(position + 1, self.chunk_len), sequence.known_len)
        boundary = sequence.handle.boundary_after(position) if sequence.handle else None
        return end if boundary is None else min(end, boundary)

    def _place(self, sequence: Sequence, position: int, free_row: int) -> Work:
        """The span of the sequence's token or chunk at `position`, in rows from `free_row` on."""
        assert sequence.handle is not None
        end = self._chunk_end(sequence, position)
        row = free_row + position % EXACT_ROWS if self.exact else free_row
        samples = end == sequence.known_len
        return Work(sequence.handle.slot, row, position, end - position, sequence, samples)

    def _bucket_end(self, row: int) -> int:
        return round_up(row, EXACT_ROWS) if self.exact else row
