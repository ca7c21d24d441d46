"""Runs a model over the tokens of one step. The loop over the layers lives here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from packhorse.core.protocols import DeltaState, KVView, Segment, WeightSource
from packhorse.core.types import EXACT_ROWS, Span
from packhorse.engine.graphs import StepGraphs
from packhorse.engine.sample import token_logprob
from packhorse.engine.schedule import Step, Work
from packhorse.models.model import Model

SCORED_ROWS = 64
"""Prompt rows whose logits exist at once where a request wants log-probabilities of its prompt."""


class Runner:
    """Token-major schedule: all layers over a step's rows, then the next step.

    graphs: runs the sequences that have one token, where a card has step kernels for the model; prompt chunks of
    the same step go through the layers by themselves.
    """

    def __init__(
        self, model: Model, weights: WeightSource | None = None, graphs: StepGraphs | None = None
    ) -> None:
        self.model = model
        self.weights = model.weights if weights is None else weights
        self.graphs = graphs

    def spans(self, step: Step) -> Sequence[Span]:
        """The spans whose views `run` needs: the step's, in exact mode cut into buckets."""
        if not self.model.exact:
            return step.spans
        return [part for span in step.spans for part in buckets(span)]

    @torch.inference_mode()
    def run(self, step: Step, views: Sequence[KVView]) -> Tensor:
        """Logits [len(step.sample_rows), V] fp32. views: by layer, of `spans(step)`.

        Reads and writes KV and states through the views; the store completes them afterwards. Where a request
        wants log-probabilities of its prompt, they are appended to its sequence's `prompt_logprobs`.
        """
        if self.graphs is not None:
            return self._run_split(step, views, self.graphs)
        ids, positions = self.inputs(step.spans, step.num_rows)
        if self.model.exact:
            return self._run_buckets(step, views, ids, positions)
        x = self._layers(self.model.embed(ids), positions, views)
        for work in step.spans:
            self._score(work, 0, x[work.row : work.row + scored_len(work)])
        return self.model.head(x[list(step.sample_rows)])

    def _run_split(self, step: Step, views: Sequence[KVView], graphs: StepGraphs) -> Tensor:
        """Sequences with one token as a replayed graph, then the chunks of the others."""
        single = [w for w in step.spans if w.length == 1 and not scored_len(w)]
        chunks = [w for w in step.spans if w.length > 1 or scored_len(w)]
        if not chunks and 0 < len(single) == len(step.sample_rows) <= graphs.max_sequences:
            return graphs.run(single)
        logits: dict[int, Tensor] = {}
        for start in range(0, len(single), graphs.max_sequences):
            part = single[start : start + graphs.max_sequences]
            # The next replay writes over what this one gave.
            rows = graphs.run(part)
            logits |= zip(
                (w.row for w in part), rows.clone() if len(single) > len(part) else rows, strict=True
            )
        if chunks:
            self.make_room()
            moved: list[Work] = []
            num_rows = 0
            for work in chunks:
                # Those that went their own way lie before or between them.
                moved.append(replace(work, row=num_rows))
                num_rows += work.length
            ids, positions = self.inputs(moved, num_rows)
            kept = [PartView(view, {m.row: w for m, w in zip(moved, chunks, strict=True)}) for view in views]
            x = self._layers(self.model.embed(ids), positions, kept)
            for work in moved:
                self._score(work, 0, x[work.row : work.row + scored_len(work)])
            ends = [work.last_row for work in moved if work.samples]
            if ends:
                logits |= zip((w.row for w in chunks if w.samples), self.model.head(x[ends]), strict=True)
        found = [logits[work.row] for work in step.spans if work.samples]
        return torch.stack(found) if found else torch.empty(0, self.model.facts.vocab_size)

    def make_room(self) -> None:
        """Prompt rows are about to be computed: memory that was lent meanwhile is theirs again."""
        if self.graphs is not None and self.graphs.streamed is not None:
            self.graphs.streamed.make_room()

    def read_out(self, work: Work, part: Span, x: Tensor, row: int) -> Tensor | None:
        """What is wanted of `part` of a work, whose rows of the last layer's x are those from `row` on: prompt
        tokens are scored, and where it is the end of a work that samples its logits [V] are returned."""
        start = part.position - work.position
        scored = max(0, min(part.length, scored_len(work) - start))
        last = row + part.length - 1 if work.samples and part.end == work.end else None
        if not self.model.exact:
            self._score(work, start, x[row : row + scored])
            return None if last is None else self.model.head(x[last : last + 1])[0]
        if not scored and last is None:
            return None
        logits = self.model.head(x)  # of the whole bucket: its shape is always the same
        if scored:
            score_prompt(work, start, logits[row : row + scored])
        return None if last is None else logits[last]

    def _score(self, work: Work, start: int, x: Tensor) -> None:
        """x: the last layer's rows start, start + 1, ... of the work."""
        for at in range(0, len(x), SCORED_ROWS):
            score_prompt(work, start + at, self.model.head(x[at : at + SCORED_ROWS]))

    def inputs(self, spans: Sequence[Work], num_rows: int) -> tuple[Tensor, Tensor]:
        """Token ids and positions [num_rows] of spans; padding rows hold token 0 at position 0."""
        ids = torch.zeros(num_rows, dtype=torch.int64)
        positions = torch.zeros(num_rows, dtype=torch.int64)
        for span in spans:
            rows = slice(span.row, span.row + span.length)
            ids[rows] = torch.tensor(span.token_ids)
            positions[rows] = torch.arange(span.position, span.end)
        return ids.to(self.model.embed_device), positions.to(self.model.device)

    def _layers(self, x: Tensor, positions: Tensor, views: Sequence[KVView]) -> Tensor:
        for index, layer in enumerate(self.model.layers):
            x = layer(x, positions, views[index], self.weights.layer(index))
        return x

    def _run_buckets(self, step: Step, views: Sequence[KVView], ids: Tensor, positions: Tensor) -> Tensor:
        """Exact mode: each bucket of rows is a pass of its own, in row order."""
        logits = []
        for work, part in [(w, part) for w in step.spans for part in buckets(w)]:
            first = part.row - part.row % EXACT_ROWS
            rows = slice(first, first + EXACT_ROWS)
            local = Span(part.slot, part.row - first, part.position, part.length)
            bucket_views = [PartView(view, {local.row: part}, (local,)) for view in views]
            x = self._layers(self.model.embed(ids[rows]), positions[rows], bucket_views)
            found = self.read_out(work, part, x, local.row)
            if found is not None:
                logits.append(found)
        return torch.stack(logits) if logits else torch.empty(0, self.model.facts.vocab_size)


def scored_len(work: Work) -> int:
    """Rows of the span, from its first on, whose logits the request wants: those that predict its prompt."""
    if work.sequence.request.prompt_logprobs is None or work.sequence.generated:
        return 0
    return max(0, min(work.end, work.sequence.prompt_len - 1) - work.position)


def score_prompt(work: Work, start: int, logits: Tensor) -> None:
    """Append log-probabilities of the prompt tokens after rows start, start + 1, ... of the span.

    logits: [R, V] of those rows.
    """
    sequence = work.sequence
    num_top = sequence.request.prompt_logprobs or 0
    for position, row in enumerate(logits, start=work.position + start + 1):
        token_id = sequence.request.token_ids[position]
        sequence.prompt_logprobs.append(token_logprob(row, token_id, num_top))


def buckets(span: Span) -> Iterator[Span]:
    """A span cut at absolute multiples of EXACT_ROWS."""
    position = span.position
    while position < span.end:
        end = min(span.end, position - position % EXACT_ROWS + EXACT_ROWS)
        yield Span(span.slot, span.row + position - span.position, position, end - position)
        position = end


class PartView:
    """Some spans of a step as a step of its own. places: by a span's row here, where it is in the step. spans: here;
    by default those of `places` in the order of their rows."""

    def __init__(
        self, view: KVView, places: Mapping[int, Span], spans: tuple[Span, ...] | None = None
    ) -> None:
        self.view = view
        self.places = places
        self.spans: Sequence[Span] = spans or [
            Span(place.slot, row, place.position, place.length) for row, place in sorted(places.items())
        ]

    @property
    def rotated(self) -> bool:
        """See KVView."""
        return self.view.rotated

    def write(self, span: Span, k: Tensor, v: Tensor) -> None:
        """See KVView."""
        self.view.write(self.places[span.row], k, v)

    def segments(self, span: Span, stop: int) -> Iterator[Segment]:
        """See KVView."""
        return self.view.segments(self.places[span.row], stop)

    def state(self, span: Span) -> DeltaState:
        """See KVView."""
        return self.view.state(self.places[span.row])
