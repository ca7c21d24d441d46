"""Computes sweeps: prompt tokens layer by layer, so that each layer's weights are asked for once for all of them.

    residuals [rows, H] fp32 on the device, taken once | works of prompt A | works of prompt B | unused |
    unit: one work under one layer    rows in -> layer, over the store's views -> rows out

docs/sweep.md says what sweeps promise, engine/schedule.py which works are in one and which unit is next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from packhorse.core.protocols import KVView, LayerWeights
from packhorse.core.types import EXACT_ROWS, Span
from packhorse.core.units import round_up
from packhorse.engine.runner import PartView, Runner, buckets
from packhorse.engine.schedule import Sequence as LiveSequence
from packhorse.engine.schedule import Sweep, Work
from packhorse.store.kv import KVStore, StoredSequence

AHEAD = 1
"""Units that a card has been given beyond the one whose end is waited for: so it never waits for the host."""


@dataclass(frozen=True)
class _Sent:
    """A unit that was given to the device. over: when it is done; None where it is."""

    key: tuple[bool, bool]
    length: int
    expected: float
    over: torch.cuda.Event | None


class SweepRunner:
    """Runs the units of one sweep after another. num_rows: of the longest. clock: seconds. Counters that only grow:
    num_units, and token_layers, their tokens."""

    def __init__(
        self, runner: Runner, store: KVStore, num_rows: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        model = runner.model
        self.runner = runner
        self.store = store
        self.residuals = torch.empty(num_rows, model.facts.hidden_size, device=model.device)
        self.num_units = self.token_layers = 0
        self._clock = clock
        self._times: dict[tuple[bool, bool], tuple[float, int]] = {}
        self._sweep: Sweep | None = None
        # Whose unit is being computed, or failed: it may have changed the state of its layer.
        self._computing: LiveSequence | None = None
        self._views: Sequence[KVView] = ()
        self._ids = self._positions = torch.empty(0)
        self._weights: tuple[int, LayerWeights] | None = None

    def has_begun(self, sweep: Sweep) -> bool:
        """Whether units of this sweep can be computed: all that it needs was prepared."""
        return sweep is self._sweep

    @property
    def storage_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.residuals.nbytes

    @torch.inference_mode()
    def run(self, sweep: Sweep, budget_s: float) -> Tensor | None:
        """Compute units for about so many seconds, one at least, or until a sequence has passed all layers
        (`sweep.passed`): then its logits [V], where its prompt ends there."""
        began = self._clock()
        self.runner.make_room()
        if sweep is not self._sweep:
            self._begin(sweep)
        self._last = self._clock()
        sent: deque[_Sent] = deque()
        logits, begun = None, False
        while sweep.passed is None:
            key = (self.runner.model.layers[sweep.layer].is_full, sweep.index == 0)
            length = sweep.works[sweep.index].length
            expected = self._expected(key, length)
            if begun:
                ahead = sum(unit.expected for unit in sent)
                if expected is None or self._last - began + ahead + expected > budget_s:
                    break
            self._computing = sweep.works[sweep.index].sequence
            logits, begun = self._run_unit(sweep), True
            self._computing = None
            sweep.advance()
            sent.append(_Sent(key, length, expected or 0.0, self._mark()))
            if len(sent) > AHEAD or sent[0].over is None:
                self._settle(sent.popleft())
        while sent:
            self._settle(sent.popleft())
        return logits

    @torch.inference_mode()
    def keep(self, sweep: Sweep, sequence: LiveSequence) -> None:
        """The sequence is about to leave the sweep: keep what has been done of it, where there is room for that, and
        no unit of it failed."""
        index = sweep.num_passed(sequence)
        if sweep is not self._sweep or sequence is self._computing or not (sweep.layer or index):
            return
        request = sequence.request
        if request.prompt_logprobs is not None:
            return  # those of what has been read are not kept
        works = sweep.works_of(sequence)
        ends = [work.end for work in works]
        assert isinstance(sequence.handle, StoredSequence)
        self.store.keep_sweep(sequence.handle, ends, (sweep.layer, index), self._rows_of(works))

    def _begin(self, sweep: Sweep) -> None:
        first = sweep.works[0].sequence
        handle, works = first.handle, sweep.works_of(first)
        assert isinstance(handle, StoredSequence)
        found = None
        if first.request.prompt_logprobs is None:
            found = self.store.find_sweep(handle, [work.end for work in works])
        if found is not None:
            sweep.resume(found.count, found.layer, found.index)
        num_rows = self._stop_row(sweep.works[-1])
        self._ids, self._positions = self.runner.inputs(sweep.works, num_rows)
        self._views = self.store.begin_sweep([part for work in sweep.works for part in self._parts(work)])
        if found is not None:
            self.store.resume_sweep(handle, found, self._rows_of(sweep.works))
        self._sweep, self._weights = sweep, None

    def _run_unit(self, sweep: Sweep) -> Tensor | None:
        """The logits that the work ends with, if it does in this layer."""
        index, work = sweep.layer, sweep.works[sweep.index]
        model, view, weights = self.runner.model, self._views[index], self._layer_weights(index)
        logits = None
        for part in self._parts(work):
            rows = slice(self._first_row(part), self._stop_row(part))
            local = Span(part.slot, part.row - rows.start, part.position, part.length)
            x = self.residuals[rows] if index else model.embed(self._ids[rows])
            x = model.layers[index](
                x, self._positions[rows], PartView(view, {local.row: part}, (local,)), weights
            )
            if index + 1 < sweep.num_layers:
                self.residuals[rows] = x
            else:
                logits = self.runner.read_out(work, part, x, local.row)
        self.store.collect(index, work)
        self.num_units += 1
        self.token_layers += work.length
        return logits

    def _layer_weights(self, index: int) -> LayerWeights:
        if self._weights is None or self._weights[0] != index:
            self._weights = index, self.runner.weights.layer(index)
        return self._weights[1]

    def _parts(self, work: Work) -> Iterator[Span]:
        """A work as the pieces that are computed at once: in exact mode its buckets."""
        return buckets(work) if self.runner.model.exact else iter((work,))

    def _first_row(self, span: Span) -> int:
        return span.row - span.row % EXACT_ROWS if self.runner.model.exact else span.row

    def _stop_row(self, span: Span) -> int:
        stop = span.row + span.length
        return round_up(stop, EXACT_ROWS) if self.runner.model.exact else stop

    def _rows_of(self, works: Sequence[Work]) -> Tensor:
        """The residuals of works that lie side by side, padding included."""
        return self.residuals[self._first_row(works[0]) : self._stop_row(works[-1])]

    def _expected(self, key: tuple[bool, bool], length: int) -> float | None:
        """Seconds that a unit will take, from the last one under a layer of its kind, at the beginning of a layer
        or not; None where there was none yet."""
        if key not in self._times:
            return None
        seconds, tokens = self._times[key]
        return seconds * max(1.0, length / tokens)

    def _mark(self) -> torch.cuda.Event | None:
        if self.residuals.device.type == "cpu":
            return None
        over = torch.cuda.Event()
        over.record()
        return over

    def _settle(self, unit: _Sent) -> None:
        """Wait for a unit, and note how long it took after the one before."""
        if unit.over is not None:
            unit.over.synchronize()
        now = self._clock()
        self._times[unit.key] = now - self._last, unit.length
        self._last = now
