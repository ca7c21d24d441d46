"""What the layers of a model see of the store during one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from packhorse.core.protocols import DeltaState, Segment
from packhorse.core.types import Span
from packhorse.quant.codec import CodecPages
from packhorse.store.pages import consecutive_runs


@dataclass(frozen=True, slots=True)
class Fragment:
    """Tokens start .. start + length of a sequence, read at once. page_ids: a range where consecutive."""

    start: int
    length: int
    page_ids: Sequence[int]


def join(fragments: Sequence[Fragment], count: int) -> list[Fragment]:
    """Fragments that follow on one another, `count` of them as one."""
    joined = []
    for first in range(0, len(fragments), count):
        parts = fragments[first : first + count]
        page_ids = [page for part in parts for page in part.page_ids]
        runs = consecutive_runs(page_ids)
        length = sum(part.length for part in parts)
        joined.append(Fragment(parts[0].start, length, runs[0] if len(runs) == 1 else page_ids))
    return joined


class Step:
    """What all layer views of one step share.

    By row of a span: targets, the pages it writes and its place in them; fragments, what it reads.
    """

    __slots__ = ("fragments", "spans", "targets")

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.targets: dict[int, tuple[Sequence[int], int]] = {}
        self.fragments: dict[int, list[Fragment]] = {}


class _LayerView:
    """A `KVView` of one layer; what the layer's kind does not have is an AssertionError."""

    __slots__ = ("_step",)

    def __init__(self, step: Step) -> None:
        self._step = step

    @property
    def spans(self) -> Sequence[Span]:
        return self._step.spans

    @property
    def rotated(self) -> bool:
        raise AssertionError("a linear layer has no pages")

    def write(self, span: Span, k: Tensor, v: Tensor) -> None:
        raise AssertionError("a linear layer has no pages")

    def segments(self, span: Span, stop: int) -> Iterator[Segment]:
        raise AssertionError("a linear layer has no pages")

    def state(self, span: Span) -> DeltaState:
        raise AssertionError("a full-attention layer has no recurrent state")


class PagesView(_LayerView):
    """Of a full-attention layer. arrive: called before its pages are read."""

    __slots__ = ("_arrive", "_pages", "_rotated")

    def __init__(self, step: Step, pages: CodecPages, rotated: bool, arrive: Callable[[], None]) -> None:
        super().__init__(step)
        self._arrive = arrive
        self._pages = pages
        self._rotated = rotated

    @property
    def rotated(self) -> bool:
        return self._rotated

    def write(self, span: Span, k: Tensor, v: Tensor) -> None:
        page_ids, start = self._step.targets[span.row]
        self._pages.write(page_ids, start, k, v)

    def segments(self, span: Span, stop: int) -> Iterator[Segment]:
        self._arrive()
        for fragment in self._step.fragments[span.row]:
            length = stop - fragment.start
            if length <= 0:
                return
            k, v = self._pages.read(fragment.page_ids, 0, min(length, fragment.length))
            yield Segment(fragment.start, k, v)


class StateView(_LayerView):
    """Of a linear layer. states: by slot."""

    __slots__ = ("_states",)

    def __init__(self, step: Step, states: list[DeltaState]) -> None:
        super().__init__(step)
        self._states = states

    def state(self, span: Span) -> DeltaState:
        return self._states[span.slot]
