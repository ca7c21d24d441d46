"""The next token of each row, drawn on the device of the logits without waiting for it.

The meaning of temperature, top_k, top_p, min_p and of the uniform number is that of engine.sample, which the tests
hold this against; penalties, biases and steering are applied by whoever makes the logits. No shape depends on the
values, so it can be captured in a graph. Weights are added up as integers, in any order the same: a token depends on
its own row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

WEIGHT_BITS = 44
"""Bits of the largest weight, so that 2^18 of them fit an int64."""


def draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """Token ids, int64 [R]; -1 for a row that holds a NaN or an infinity.

    logits: [R, V] fp32. temperature (0: the likeliest token, the lowest id of equals), top_p, min_p, uniform (in
    [0, 1)): float64 [R]; top_k: int64 [R], 0: all.
    """
    num_tokens = logits.shape[1]
    assert num_tokens <= 1 << (63 - WEIGHT_BITS - 1)
    finite = logits.amax(1).isfinite() & logits.amin(1).isfinite()
    scores, order = logits.sort(dim=1, descending=True, stable=True)
    warm = temperature > 0
    heat = torch.where(warm, temperature, 1.0)[:, None]
    weights = ((scores - scores[:, :1]).double() / heat).exp()
    weights = weights.masked_fill(~finite[:, None], 1.0)
    rank = torch.arange(num_tokens, device=logits.device)
    kept = rank < torch.where(top_k > 0, top_k, num_tokens)[:, None]
    parts = (weights * (1 << WEIGHT_BITS)).round().long()
    parts = parts * kept
    total = parts.cumsum(1)
    nucleus = (total - parts).double() < top_p[:, None] * total[:, -1:].double()
    parts = parts * (nucleus & (weights >= min_p[:, None]))
    cdf = torch.zeros_like(parts).scatter_(1, order, parts).cumsum(1).double()
    drawn = (cdf <= uniform[:, None] * cdf[:, -1:]).sum(1)
    return torch.where(finite, torch.where(warm, drawn, order[:, 0]), -1)
