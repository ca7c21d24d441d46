"""Dense product."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N] in x's dtype."""
    return F.linear(x, weight, bias)
