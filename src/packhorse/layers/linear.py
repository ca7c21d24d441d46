"""Products with their weights, dense or packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
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


class Piece(NamedTuple):
    """Some rows of a matrix, all stored in one way: Tensor, PackedTensor, or Int4Weight. inputs: the order [K] in
    which x's columns meet those of the weight, where the checkpoint's are in another."""

    weight: Any
    inputs: Tensor | None = None


@dataclass
class PackedLinear:
    """A matrix [N, K] as pieces one under the other (parts of a projection may be packed in different ways),
    bias [N] or None."""

    pieces: tuple[Piece, ...]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        parts = [
            dispatch.linear(x if inputs is None else x[:, inputs], weight) for weight, inputs in self.pieces
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return out if self.bias is None else out + self.bias
