"""Dense product, plain and in exact mode's fixed shape."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.core.types import EXACT_ROWS


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, exact: bool = False) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N] in x's dtype.

    exact: T is a multiple of EXACT_ROWS and every bucket is a product of its own, so that a row's bits do not
    depend on T (torch takes another kernel for one row than for sixteen).
    """
    if not exact or x.shape[0] == EXACT_ROWS:
        return F.linear(x, weight, bias)
    return torch.cat([F.linear(bucket, weight, bias) for bucket in x.split(EXACT_ROWS)])
