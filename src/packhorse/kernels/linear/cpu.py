"""One row times a large fp32 matrix on the CPU, on all threads.

torch gives a product of one row to a single thread of the BLAS library, which reads memory at a third of what
the machine can; a batch of row blocks is spread over the threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCKS = 4
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
