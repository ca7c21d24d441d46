"""Routed experts of many tokens: tokens sorted by expert, one grouped product a matrix.

Letters as in `ref`; R = T K rows, one for each token and expert of its choice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

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
    order = experts.flatten().argsort(stable=True)
    ends = torch.bincount(experts.flatten(), minlength=num_experts).cumsum(0).to(torch.int32)
    rows = x[order // top_k]
    parts = torch.empty(len(order), x.shape[1], dtype=torch.float32, device=x.device)
    bounds = [0] * num_experts if group >= num_experts else ends.tolist()
    for first in range(0, num_experts, group):
        last = min(first + group, num_experts)
        begin = bounds[first - 1] if first else 0
        end = len(order) if last == num_experts else bounds[last - 1]
        if begin < end:
            offsets = ends[first:last] - begin
            hidden = F.grouped_mm(rows[begin:end], gate_up(first, last).transpose(1, 2), offs=offsets)
            result = F.grouped_mm(swiglu(hidden, x.dtype), down(first, last).transpose(1, 2), offs=offsets)
            parts[order[begin:end]] = result.float()
    ranked = parts.view(-1, top_k, x.shape[1])
    out = ranked[:, 0] * weights[:, :1]
    for rank in range(1, top_k):
        out += ranked[:, rank] * weights[:, rank : rank + 1]
    return out
