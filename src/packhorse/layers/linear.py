"""Dense product with its weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from packhorse.kernels import dispatch


@dataclass
class Linear:
    """weight [N, K], bias [N] or None."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        return dispatch.linear(x, self.weight, self.bias)
