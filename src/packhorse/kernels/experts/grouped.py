"""Routed experts of many tokens: tokens sorted by expert, one grouped product a matrix.

Letters as in `ref`; R = T K rows, one for each token and expert of its choice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.kernels.experts import combine as card
from packhorse.kernels.experts.ref import swiglu

Matrices = Callable[[int, int], Tensor]
"""Experts start .. stop of a matrix, [stop - start, N, K] in the compute type; valid until the next call."""


def grouped_mix(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Matrices,
    down: Matrices,
    num_experts: int,
    group: int,
) -> Tensor:
    """`ref.expert_mix` with its shapes, `group` experts at a time: x [T, H] of 16 bits -> [T, H] fp32.

    The matrices of a group exist at once, so the caller bounds memory by `group`. Row counts of the groups are
    read by the host, once, where there is more than one group. A token's results are added in the order of its
    experts' rank.
    """
    top_k = experts.shape[1]
    order, ends, places = by_expert(experts, num_experts)
    rows = x[order // top_k]
    on_card = card.fits(x, x.shape[1])
    bounds = [0] * num_experts if group >= num_experts else ends.tolist()
    for first in range(0, num_experts, group):
        last = min(first + group, num_experts)
        begin = bounds[first - 1] if first else 0
        end = len(order) if last == num_experts else bounds[last - 1]
        if begin < end:
            offsets = ends[first:last] - begin
            hidden = F.grouped_mm(rows[begin:end], gate_up(first, last).transpose(1, 2), offs=offsets)
            half = hidden.shape[1] // 2
            inner = card.swiglu(hidden) if card.fits(hidden, half) else swiglu(hidden, x.dtype)
            # A group's rows are done with: its results take their place.
            result = F.grouped_mm(inner, down(first, last).transpose(1, 2), offs=offsets)
            if group >= num_experts:
                rows = result
            else:
                rows[begin:end] = result
    return card.combine(rows, places, weights) if on_card else ranked_sum(rows, places, weights)


def by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """experts [T, K] -> the order [R] of their choices by expert, int32 [E] how many there are up to the end of each
    expert's, and the place [T, K] of each choice in that order. The host waits for nothing."""
    ranked, order = experts.flatten().sort(stable=True)
    bounds = torch.arange(1, num_experts + 1, device=experts.device, dtype=ranked.dtype)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return order, torch.searchsorted(ranked, bounds).to(torch.int32), places.view(experts.shape)


def ranked_sum(results: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Sum over ranks k of weights[t, k] * results[places[t, k]], by rank: results [R, H] -> [T, H] fp32."""
    out = results[places[:, 0]].float() * weights[:, :1]
    for rank in range(1, places.shape[1]):
        out += results[places[:, rank]].float() * weights[:, rank : rank + 1]
    return out
