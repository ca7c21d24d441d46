"""Seams between packages that may not import each other. Contracts live in the docstrings.

Shape letters: T tokens, H hidden, Hq query heads, Hkv key/value heads, D head dim, C conv channels,
Hv value heads of the delta rule, Dk and Dv its key and value dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from packhorse.core.types import Span


class Segment(NamedTuple):
    """Decoded K and V of the consecutive positions `start .. start + k.shape[0]` of one layer.

    k, v: [S, Hkv, D], maybe strided views of the page pool: valid until the next `write` to that layer.
    """

    start: int
    k: Tensor
    v: Tensor


class DeltaState(NamedTuple):
    """Recurrent state of one layer of one sequence; tensors are views, changed in place by the layer.

    conv: [C, K - 1], the last inputs of the causal convolution, compute dtype.
    recurrent: [Hv, Dk, Dv], fp32.
    pending: [page_len, P] fp32 or None. Exact mode only: delta-rule inputs of the tokens since the last
    page boundary, so that a state is only ever advanced by whole pages; `recurrent` is then the state at
    that boundary. How many rows count follows from the position.
    """

    conv: Tensor
    recurrent: Tensor
    pending: Tensor | None


class KVView(Protocol):
    """What one layer sees of the store during one step.

    `spans` lists the sequences of the step, each with its rows and positions; rows outside every span are
    padding and belong to nobody. A full-attention layer calls `write` for a span before it asks for
    `segments`; a linear layer changes `state` in place.
    """

    @property
    def spans(self) -> Sequence[Span]: ...

    @property
    def rotated(self) -> bool:
        """Whether `segments` gives K and V in the basis of `quant.codec.hadamard`: a layer turns its queries
        into it and its output back. `write` takes them as they are."""

    def write(self, span: Span, k: Tensor, v: Tensor) -> None:
        """Store k and v, [T, Hkv, D], of the span's positions, in the page codec."""

    def segments(self, span: Span, stop: int) -> Iterator[Segment]:
        """K and V of positions 0 .. stop as stored, in order, cut at absolute multiples of the segment
        length. In exact mode where cuts lie depends on nothing but positions; else segments are also cut
        where pages do not follow on one another, which saves a copy."""

    def state(self, span: Span) -> DeltaState:
        """The recurrent state of the span's sequence in this layer, as of `span.position`."""


class LayerWeights(Protocol):
    """Weights of one layer by checkpoint name, nested by attribute: `w.self_attn.o_proj`.

    Valid as long as the model is.
    """

    def __getattr__(self, name: str) -> Any: ...


class WeightSource(Protocol):
    """Where the runner gets a layer's weights."""

    def layer(self, index: int) -> LayerWeights:
        """A step asks for each layer in turn, a sweep once for each layer it computes, in ascending order."""


class CheckpointSource(Protocol):
    """Tensors of a checkpoint under the names transformers gives them, whatever the file format.

    `read` returns a CPU tensor of the stored float type (packed formats: fp32), and raises CorruptFileError
    where the bytes are not there. It holds no more than that one tensor.
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> Tensor: ...

    def packed(self, name: str) -> StoredRows | None:
        """How a matrix's codes can be taken as they are; None where it is stored as plain values, or in a way
        that no packed format holds."""


class StoredRows(NamedTuple):
    """Where the rows of a matrix [N, K] (of each expert of [E, N, K]) lie: row n is row `row[n]` of `parts[part[n]]`,
    int64 [N] both. parts: quant.packed.PackedRows, experts of one one under the other."""

    parts: tuple[Any, ...]
    part: Tensor
    row: Tensor


class Steering(Protocol):
    """Restricts the tokens of one answer: a grammar, or a bound on a thought. Called from one thread.

    `steer` and `advance` alternate: one pair for each token of the answer.
    """

    def steer(self, scores: Tensor) -> Tensor:
        """Scores [V] in which what must not come next is -inf, at least one of them finite.

        `scores` itself where everything may come; it is never changed in place. Raises a PackhorseError where
        no token may come: it ends the request.
        """

    def advance(self, token_id: int) -> None:
        """The token that was drawn."""
