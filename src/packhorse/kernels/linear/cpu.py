"""Dense products on the CPU where torch's own way has a fault.

- One row of fp32 goes to a single thread of the BLAS library, which reads memory at a third of what the
  machine can: a batch of row blocks is spread over the threads.
- 16-bit products are compiled by oneDNN for each number of rows it meets, and kept: 0.3 ms and 0.4 MB for
  each number and matrix shape. Numbers above ROW_GRID are raised to its multiples.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.core.units import round_up

BLOCKS = 4
ROW_GRID = 16
MIN_ROWS = 256
"""Rows of the matrix below which splitting costs more than it gains."""


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether `row_product` is for this product: one row of fp32, and threads to spread it over."""
    rows = weight.shape[0]
    return (
        x.shape[0] == 1
        and x.dtype == torch.float32
        and rows >= MIN_ROWS
        and rows % BLOCKS == 0
        and torch.get_num_threads() > 1
    )


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [1, K] times weight [N, K] transposed, plus bias [N]: [1, N]."""
    blocks = weight.view(BLOCKS, -1, weight.shape[1]).transpose(1, 2)
    out = torch.bmm(x.expand(BLOCKS, 1, -1), blocks).view(1, -1)
    return out if bias is None else out + bias


def off_grid(x: Tensor) -> bool:
    """Whether `grid_product` is for this product: 16-bit values in a number of rows off the grid."""
    return x.dtype != torch.float32 and x.shape[0] > ROW_GRID and x.shape[0] % ROW_GRID != 0


def grid_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N], computed in rows up to the grid."""
    rows = x.shape[0]
    padded = x.new_zeros(round_up(rows, ROW_GRID), x.shape[1])
    padded[:rows] = x
    return F.linear(padded, weight, bias)[:rows]
