"""Requests in, events out: the engine joins scheduler, store, model and sampler, and owns none of their work.

add -> schedule -> views -> run -> sample -> complete -> events
                   a slice of a sweep, and the same when a sequence has passed all layers
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from packhorse.core.errors import CancelledRequestError, ComputeError, InvalidRequestError, PackhorseError
from packhorse.core.types import TAIL_LEN, Event, FinishReason, Request, SamplingParams, TokenLogprob
from packhorse.core.units import MIB, format_bytes
from packhorse.engine.card import asked_bytes, check_answers
from packhorse.engine.experts import FetchedExperts, StreamedExperts
from packhorse.engine.heap import give_back_freed
from packhorse.engine.output import Detokenizer, Output, Piece
from packhorse.engine.runner import Runner
from packhorse.engine.sample import Sampled, Sampler, sample
from packhorse.engine.schedule import Scheduler, Step, Sweep, Work
from packhorse.engine.schedule import Sequence as LiveSequence
from packhorse.engine.sweep import SweepRunner
from packhorse.store.kv import KVStore, StoredSequence

WRITE_BEHIND_BYTES = 4 * MIB
"""Copied for the disk at the end of a step: a millisecond or less."""
MEASURED_TOKENS = 64
"""Prompt tokens of a step that says how fast prompts are read."""
SLICE_SHARE = 0.85
"""Of the gap between two tokens of an answer, what a slice of a sweep and a step may take together: the rest is for
units that take longer than the last one of their kind, and for what ends a sweep."""
HEAP_TOKENS = 512
"""Prompt tokens whose working memory is worth giving back where nothing else is to be computed."""
GIVEN_MORE = 256 * MIB
"""What experts give up of the card's memory beside what a step asked for and did not get; twice as much the next time
that it happens to a request."""
GIVEN_TIMES = 3
"""How often they do for one request."""
NOTHING_LOST = ("absent", "no_state", "slower", "gone")
"""Misses of the tiers below that are no damage: nothing was there, or it was not wanted, or made way meanwhile."""


class Engine:
    """Serves requests over one model. Not thread-safe: one thread calls it.

    window: tokens one request may hold. detokenizer: makes a fresh one for each request. eos_ids: end every
    answer, unless the request says otherwise. sweep_len: tokens of a sweep, 0 for none; prompts with more than
    tail_len tokens to read are swept. max_decode_gap: seconds between two tokens of an answer meanwhile. experts:
    where routed experts are that lie in host memory. clock: seconds.
    """

    def __init__(
        self, runner: Runner, store: KVStore, *, sequences: int, chunk_len: int, window: int,
        eos_ids: tuple[int, ...], detokenizer: Callable[[], Detokenizer], sweep_len: int = 0,
        tail_len: int = TAIL_LEN, max_decode_gap: float = 0.25,
        experts: StreamedExperts | FetchedExperts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.runner = runner
        self.store = store
        self.experts = experts
        # Idle pages, and working memory, which what the store brings back passes through, as the rows that follow do.
        store.before_taking = runner.make_room
        self.window = min(window, store.capacity)
        facts = runner.model.facts
        self.scheduler = Scheduler(
            sequences, chunk_len, self.window, self._open, exact=runner.model.exact, model_window=facts.context,
            sweep_len=sweep_len, num_layers=facts.num_layers, tail_len=tail_len,
        )  # fmt: skip
        self.sweeper: SweepRunner | None = None
        if sweep_len:
            self.sweeper = SweepRunner(runner, store, self.scheduler.sweep_rows, clock=clock)
        self.max_decode_gap = max_decode_gap
        self._clock = clock
        # Of the last step, 0 where that was a slice of a sweep; of the slices whose speed has not been noted.
        self._step_s = self._sweep_s = 0.0
        self._read_len = 0
        self._noted_layers = 0
        self._eos_ids = eos_ids
        self._detokenizer = detokenizer
        self._step: Step | None = None
        self._drawn = False
        self._samplers: dict[str, Sampler] = {}
        self._outputs: dict[str, Output] = {}
        # How often the card had no memory for a request.
        self._short: dict[str, int] = {}

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return self.scheduler.has_work

    def check(self, request: Request) -> None:
        """Raise what `add` raises over the request by itself. From any thread: nothing is changed."""
        vocab = self.runner.model.facts.vocab_size
        ends = (min(request.token_ids, default=0), max(request.token_ids, default=0))
        bad = next((t for t in ends if not 0 <= t < vocab), None)
        if bad is not None:
            raise InvalidRequestError(
                f"Token id {bad} is not in the model's vocabulary of {vocab:,}.",
                hint="Tokenize with the model's own tokenizer.",
            )
        bad = next((t for t, _ in request.sampling.logit_bias if not 0 <= t < vocab), None)
        if bad is not None:
            raise InvalidRequestError(
                f"logit_bias names token {bad}, and the model's vocabulary holds {vocab:,}.",
                hint="Tokenize with the model's own tokenizer.",
                field="logit_bias",
                value=bad,
            )
        self.scheduler.check(request)

    def add(self, request: Request) -> None:
        """Queue a request; `step` answers it.

        Raises InvalidRequestError for ids outside the vocabulary, and what Scheduler.add raises: then nothing
        was queued.
        """
        self.check(request)
        self.scheduler.add(request)
        self._samplers[request.id] = Sampler(request)
        self._outputs[request.id] = Output(request.sampling, self._eos_ids, self._detokenizer())

    def step(self) -> list[Event]:
        """Compute the next tokens of whoever is running, and say what came of it.

        Every live request gets exactly one event with a `finish` in its life. An error of one request ends
        that request; an error of the step itself is raised, and then `recover` must be called before anything
        else. Where a card has no memory left for a step and experts can give some up, they do, and it is computed
        again. Raises CardLostError where the card has gone: then there is nothing to recover.
        """
        began = self._clock()
        self.write_behind()  # not at the end: the tokens that were drawn there would wait for it
        self._step, self._drawn = None, False
        try:
            self._step = step = self.scheduler.schedule()
            events = self._compute_step(step)
        except Exception as error:
            check_answers(self.runner.model.device, error)
            raise
        self._step_s = self._clock() - began if step.sweep is None else 0.0
        if not self.has_work and self._read_len >= HEAP_TOKENS:
            self._read_len = 0
            give_back_freed()
        return events

    @property
    def is_behind(self) -> bool:
        """Whether `write_behind` has something to do."""
        return self.store.lower is not None and self.store.lower.is_behind

    def write_behind(self, *, wait: bool = False) -> None:
        """Take a slice of what is to be kept on disk off the device: a step begins so, and whoever is idle does.
        wait: for the disk, where it is behind. Raises what `step` does, and then `recover` ends nobody."""
        self._step, self._drawn = Step((), 0), False
        try:
            if self.store.lower is not None:
                self.store.lower.advance(WRITE_BEHIND_BYTES, wait=wait)
        except Exception as error:
            check_answers(self.runner.model.device, error)
            raise

    @property
    def lost_records(self) -> dict[str, int]:
        """By reason: stored records that were found, could not be used, and whose text was read again."""
        counts = {} if self.store.lower is None else self.store.lower.counters
        misses = {name.removeprefix("miss_"): n for name, n in counts.items() if name.startswith("miss_")}
        return {name: count for name, count in misses.items() if name not in NOTHING_LOST}

    def flush(self) -> None:
        """Wait until what is to be kept is durable, or has failed to be."""
        if self.store.lower is not None:
            self.store.lower.flush()

    def idle_residuals(self) -> Tensor | None:
        """The buffer of sweeps, [rows, H] fp32, while nothing is in it: others may have it until a sweep begins."""
        return None if self.sweeper is None or self.scheduler.sweep is not None else self.sweeper.residuals

    def close(self) -> str:
        """`flush`, and let go of the tiers below the device. What is wrong with them, if anything is."""
        try:
            self.flush()
            return "" if self.store.lower is None else self.store.lower.trouble
        finally:
            self.store.close_tiers()

    def recover(self, error: PackhorseError) -> list[Event]:
        """After `step` raised: undo that step, and end with `error` whoever is at fault.

        That is the request which the step computed alone, or whose unit of a sweep it was. Of several nobody knows:
        each goes back to where its state is known and is computed alone by the steps that follow, so that only those
        end that fail alone. A step that failed after its tokens were drawn ends all its requests.

        What ended requests held is free when this returns; the others go on. Raises `error` where the step
        did not come to be, for then nothing can go on.
        """
        step = self._step
        if step is None:
            raise error
        events = [self._fail(sequence, why) for sequence, why in step.refused if sequence.id in self._outputs]
        if step.sweep is not None:
            return events + self._recover_sweep(step.sweep, error)
        live = self._live_works(step)
        if self._drawn or len(live) == 1:
            return events + [self._fail(work.sequence, error) for work in live]
        self._rewind(work.sequence for work in live)
        self.scheduler.isolate(live)
        return events

    def _recover_sweep(self, sweep: Sweep, error: PackhorseError) -> list[Event]:
        """End whose unit failed. Where the sweep had not come to be yet, the others go back and begin another."""
        if not sweep.works:
            return []
        failed = sweep.next_sequence
        if self.sweeper is not None and not self.sweeper.has_begun(sweep):
            others = [sequence for sequence in sweep.sequences if sequence is not failed]
            self._rewind(others)
            for sequence in others:
                self.scheduler.leave_sweep(sequence)
        return [self._fail(failed, error)]

    def probe(self) -> None:
        """Compute a prompt of one token, while nobody runs: raises what its step raises."""
        request = Request("probe", (0,), SamplingParams(max_tokens=1))
        handle = self.store.open(request.token_ids, 2, reuse=False)
        assert handle is not None
        try:
            sample(self._compute(self.scheduler.place(LiveSequence(request, handle))), [Sampler(request)])
        finally:
            self.store.close(handle, keep=False)

    def cancel(self, request_id: str) -> Event | None:
        """End a request now: its pages are free when this returns. None where it is not live."""
        sequence = self.scheduler.find(request_id)
        if sequence is None:
            return None
        sweep = self.scheduler.sweep
        if sweep is not None and self.sweeper is not None and sequence in sweep.sequences:
            self.sweeper.keep(sweep, sequence)
        error = CancelledRequestError(f"Request {request_id!r} was cancelled.", request_id=request_id)
        return self._end(sequence, self._outputs[request_id].end(FinishReason.CANCELLED), error)

    def _open(self, request: Request) -> StoredSequence | None:
        max_len = len(request.token_ids) + request.sampling.max_tokens
        return self.store.open(
            request.token_ids,
            max_len,
            request.marks,
            reuse=request.prompt_logprobs is None,
            keep=request.store,
            tenant=request.tenant.encode(),
            label=request.label,
        )

    def _compute(self, step: Step) -> Tensor:
        return self.runner.run(step, self.store.views(self.runner.spans(step)))

    def _compute_step(self, step: Step) -> list[Event]:
        try:
            return self._run_step(step) if step.sweep is None else self._run_slice(step, step.sweep)
        except torch.OutOfMemoryError as error:
            return self._make_memory(step, error)

    def _run_step(self, step: Step) -> list[Event]:
        began = self._clock()
        logits = self._compute(step)
        tokens = sample(logits, [self._samplers[s.id] for s in step.sampled])
        self._drawn = True
        if self.store.lower is not None and step.prompt_len >= MEASURED_TOKENS:
            self.store.lower.note_compute(step.prompt_len, self._clock() - began)
        self.store.complete(step.spans, {span.slot: span.token_ids for span in step.spans})
        self._read_len += step.prompt_len
        return self._report(step, tokens)

    def _run_slice(self, step: Step, sweep: Sweep) -> list[Event]:
        """Units of a sweep, until others have to go on; a sequence that has passed all layers is completed."""
        assert self.sweeper is not None
        began = self._clock()
        logits = self.sweeper.run(sweep, SLICE_SHARE * self.max_decode_gap - self._step_s)
        self._sweep_s += self._clock() - began
        events = []
        passed = sweep.passed
        if passed is not None:
            events.append(self._complete_swept(sweep, passed, logits))
        if self.scheduler.sweep is None:
            self._note_sweeps(self.sweeper)
        events += [self._fail(sequence, error) for sequence, error in step.refused]
        return events + [self._event(sequence) for sequence in sweep.sequences]

    def _make_memory(self, step: Step, error: torch.OutOfMemoryError) -> list[Event]:
        """The card has no memory left for a step: experts give some up, and its sequences go back to where they can be
        computed again. Raises `error` where that is of no use."""
        works = self._live_works(step) if step.sweep is None else step.sweep.works
        sequences = list(dict.fromkeys(work.sequence for work in works))
        times = max((self._short.get(sequence.id, 0) for sequence in sequences), default=0)
        if self._drawn or times == GIVEN_TIMES or not isinstance(self.experts, StreamedExperts):
            raise error
        size = asked_bytes(error)
        # What the step had computed is held by the frames in which it failed.
        traceback.clear_frames(error.__traceback__)
        freed = self.experts.give_back(size + (GIVEN_MORE << times))
        if not freed:
            raise error
        held = self.experts.held["slots"]
        note = f"the card ran out of memory over {format_bytes(size)}: experts gave {format_bytes(freed)} up"
        print(f"{note}, {held:,} are left there", file=sys.stderr, flush=True)
        self._short |= {sequence.id: times + 1 for sequence in sequences}
        self._rewind(sequences)
        if step.sweep is None:
            self.scheduler.isolate(works)
        for sequence in sequences:
            self.scheduler.leave_sweep(sequence)
        return [self._fail(sequence, why) for sequence, why in step.refused if sequence.id in self._outputs]

    def _live_works(self, step: Step) -> list[Work]:
        return [work for work in step.spans if self.scheduler.find(work.sequence.id) is work.sequence]

    def _rewind(self, sequences: Iterable[LiveSequence]) -> None:
        """Have sequences go back to where their state is known."""
        for sequence in sequences:
            assert isinstance(sequence.handle, StoredSequence)
            self.store.rewind(sequence.handle)
            del sequence.prompt_logprobs[sequence.position :]

    def _complete_swept(self, sweep: Sweep, sequence: LiveSequence, logits: Tensor | None) -> Event:
        works = sweep.works_of(sequence)
        tokens = [] if logits is None else sample(logits[None], [self._samplers[sequence.id]])
        for work in works:
            self.store.complete([work], {work.slot: work.token_ids})
            self._read_len += work.length
        self.scheduler.leave_sweep(sequence)
        return self._report_token(works[-1], tokens[0]) if tokens else self._event(sequence)

    def _note_sweeps(self, sweeper: SweepRunner) -> None:
        tokens = (sweeper.token_layers - self._noted_layers) // self.scheduler.num_layers
        if self.store.lower is not None and tokens >= MEASURED_TOKENS:
            self.store.lower.note_compute(tokens, self._sweep_s)
        self._sweep_s, self._noted_layers = 0.0, sweeper.token_layers

    def _report(self, step: Step, tokens: Sequence[Sampled | PackhorseError]) -> list[Event]:
        events = [self._fail(sequence, error) for sequence, error in step.refused]
        drawn = iter(tokens)
        for work in step.spans:
            events.append(
                self._report_token(work, next(drawn)) if work.samples else self._event(work.sequence)
            )
        return events

    def _report_token(self, work: Work, token: Sampled | PackhorseError) -> Event:
        sequence = work.sequence
        if isinstance(token, PackhorseError):
            return self._fail(sequence, token)
        sequence.generated.append(token.token_id)
        try:
            piece = self._outputs[sequence.id].feed(token.token_id, token.logprob)
        except Exception as error:  # a foreign detokenizer's: its request ends, and no other
            return self._fail(sequence, ComputeError(f"The text of {sequence.id!r} broke: {error!r}."))
        return self._event(sequence, piece) if piece.finish is None else self._end(sequence, piece)

    def _fail(self, sequence: LiveSequence, error: PackhorseError) -> Event:
        return self._end(sequence, Piece(finish=FinishReason.ERROR), error)

    def _end(self, sequence: LiveSequence, piece: Piece, error: PackhorseError | None = None) -> Event:
        """Free all that the request holds, and make its last event."""
        event = self._event(sequence, piece, error)
        handle = sequence.handle
        self.scheduler.remove(sequence.id)
        if isinstance(handle, StoredSequence):
            # A request that failed may have written NaN long before its logits showed it.
            self.store.close(handle, keep=piece.finish is not FinishReason.ERROR)
        del self._samplers[sequence.id], self._outputs[sequence.id]
        self._short.pop(sequence.id, None)
        return event

    def _event(
        self, sequence: LiveSequence, piece: Piece | None = None, error: PackhorseError | None = None
    ) -> Event:
        piece = piece or Piece()
        scored: tuple[TokenLogprob, ...] = ()
        if sequence.generated:
            scored, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), []
        return Event(
            request_id=sequence.id,
            usage=sequence.usage,
            token_ids=piece.token_ids,
            text=piece.text,
            logprobs=piece.logprobs,
            read_len=sequence.read_len + self._swept_len(sequence),
            prompt_logprobs=scored,
            finish=piece.finish,
            error=error,
        )

    def _swept_len(self, sequence: LiveSequence) -> int:
        sweep = self.scheduler.sweep
        return sweep.read_len(sequence) if sweep is not None and sequence in sweep.sequences else 0
