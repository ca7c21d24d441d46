"""Which implementation of an operation runs: the reference, or a faster twin where one exists."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from packhorse.core.protocols import Segment
from packhorse.kernels.attention import flash, ref
from packhorse.kernels.linear import cpu as linear_cpu
from packhorse.kernels.linear import ref as linear_ref


def attention(q: Tensor, segments: Iterable[Segment], position: int, scale: float) -> Tensor:
    """Causal attention, shapes of kernels.attention.ref.attention."""
    if flash.fits(q):
        return flash.attention(q, segments, position, scale)
    return ref.attention(q, segments, position, scale)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Dense product, shapes of kernels.linear.ref.linear."""
    if x.device.type == "cpu":
        if linear_cpu.fits(x, weight):
            return linear_cpu.row_product(x, weight, bias)
        if linear_cpu.off_grid(x):
            return linear_cpu.grid_product(x, weight, bias)
    return linear_ref.linear(x, weight, bias)
