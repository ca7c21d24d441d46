"""Router and routed SwiGLU experts.

Letters: T tokens, H hidden, E experts, K experts a token, I inner size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.core.types import EXACT_ROWS
from packhorse.kernels.linear.ref import linear


def route(logits: Tensor, top_k: int, norm_topk: bool) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] -> weights [T, K] fp32 and expert ids [T, K]: softmax over all, then the best K,
    divided by their sum if norm_topk."""
    weights, experts = logits.float().softmax(-1).topk(top_k, dim=-1)
    if norm_topk:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def swiglu(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, 2 I] (gate first) -> silu(gate) * up, [T, I]. One rounding, after the product."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.dtype == torch.float32:
        return (F.silu(gate) * up).to(dtype)
    return (F.silu(gate.float()) * up.float()).to(dtype)


def expert_mix(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, exact: bool = False
) -> Tensor:
    """Sum over each token's experts of weight * down(swiglu(gate_up(x))): x [T, H] -> [T, H] fp32.

    weights, experts: [T, K] of `route`. gate_up: [E, 2 I, H], down: [E, H, I], indexable by expert.
    Each hit expert is one product over its tokens; a token's K results are added in the order of its experts'
    rank. exact: products have EXACT_ROWS rows, as many as a bucket, whoever else is routed.
    """
    num_tokens, top_k = experts.shape
    parts = x.new_zeros(num_tokens, top_k, x.shape[1], dtype=torch.float32)
    if exact:
        _exact_parts(x, experts, gate_up, down, parts)
    else:
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=len(gate_up)).tolist()
        flat = parts.view(num_tokens * top_k, -1)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                rows = order[start : start + count]
                hidden = swiglu(F.linear(x[rows // top_k], gate_up[expert]), x.dtype)
                flat[rows] = F.linear(hidden, down[expert]).float()
                start += count
    out = parts[:, 0] * weights[:, :1]
    for rank in range(1, top_k):
        out += parts[:, rank] * weights[:, rank : rank + 1]
    return out


def _exact_parts(x: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, parts: Tensor) -> None:
    """Every bucket through every expert that one of its rows wants; each row keeps its own."""
    for start in range(0, x.shape[0], EXACT_ROWS):
        rows = slice(start, start + EXACT_ROWS)
        ids = experts[rows]
        for expert in ids.unique().tolist():
            hidden = swiglu(linear(x[rows], gate_up[expert]), x.dtype)
            result = linear(hidden, down[expert]).float()
            row, rank = (ids == expert).nonzero(as_tuple=True)
            parts[start + row, rank] = result[row]
