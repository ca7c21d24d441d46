"""Router and routed SwiGLU experts.

Letters: T tokens, H hidden, E experts, K experts a token, I inner size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.kernels.linear.ref import linear
from packhorse.quant.packed import PackedTensor


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
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor | PackedTensor,
    down: Tensor | PackedTensor,
    *,
    exact: bool = False,
    product: Callable[[Tensor, Any], Tensor] = linear,
) -> Tensor:
    """Sum over each token's experts of weight * down(swiglu(gate_up(x))): x [T, H] -> [T, H] fp32.

    weights, experts: [T, K] of `route`. gate_up: [E, 2 I, H], down: [E, H, I], indexable by expert.
    Each hit expert is one product over its tokens; a token's K results are added in the order of its experts'
    rank. exact: an expert multiplies all T rows, so that a row's bits do not depend on who else is routed.
    product: what multiplies, as kernels.linear.ref.linear does; for packed experts one that takes them.
    """
    num_tokens, top_k = experts.shape
    parts = x.new_zeros(num_tokens * top_k, x.shape[1], dtype=torch.float32)
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=len(gate_up)).tolist()
    start = 0
    for expert, count in enumerate(counts):
        if count:
            slots = order[start : start + count]
            tokens = slots // top_k
            hidden = product(x if exact else x[tokens], gate_up[expert])
            result = product(swiglu(hidden, x.dtype), down[expert]).float()
            parts[slots] = result[tokens] if exact else result
            start += count
    ranked = parts.view(num_tokens, top_k, -1)
    out = ranked[:, 0] * weights[:, :1]
    for rank in range(1, top_k):
        out += ranked[:, rank] * weights[:, rank : rank + 1]
    return out
