"""Feed-forward parts: the dense SwiGLU block, and routed experts with an optional shared one."""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.core.protocols import LayerWeights
from packhorse.facts.model import MoeFacts
from packhorse.kernels import dispatch
from packhorse.kernels.experts.ref import route

SLICE_ROWS = 128
"""Rows of gate and up that a CPU multiplies at a time: their fp32 values, three of the widest activations there are,
stay in cache and need no memory for a whole chunk."""


class Mlp:
    """weights: `gate_up_proj` (gate rows first), `down_proj`."""

    def __call__(self, x: Tensor, weights: LayerWeights) -> Tensor:
        """x [T, H] -> [T, H]."""
        gate_up = weights.gate_up_proj(x)
        if x.device.type != "cpu" or len(x) <= SLICE_ROWS:
            out = dispatch.swiglu(gate_up, x.dtype)
        else:
            out = x.new_empty(len(x), gate_up.shape[1] // 2)
            for rows, part in zip(out.split(SLICE_ROWS), gate_up.split(SLICE_ROWS), strict=True):
                rows.copy_(dispatch.swiglu(part, x.dtype))
            del part
        del gate_up  # twice as wide as `out`: it makes room for the product, and for unpacked weights
        return weights.down_proj(out)


class Moe:
    """weights: `gate` (router, fp32), `experts.gate_up_proj` [E, 2 I, H], `experts.down_proj` [E, H, I], and
    with a shared expert `shared_expert` (an Mlp's) and `shared_expert_gate`. Where the experts are fetched when they
    are asked for, `experts.few(ids)` finds those that few tokens need, and `experts.sent()` lets go of all."""

    def __init__(self, facts: MoeFacts, exact: bool) -> None:
        self.facts = facts
        self.exact = exact
        self.shared = Mlp()

    def __call__(self, x: Tensor, weights: LayerWeights) -> Tensor:
        """x [T, H] -> [T, H] fp32."""
        share, experts = route(weights.gate(x.float()), self.facts.top_k, self.facts.norm_topk)
        if x.shape[0] <= dispatch.FEW_TOKENS and hasattr(weights.experts, "few"):
            out = dispatch.table_mix(x, share, experts, weights.experts.few(experts))
        else:
            matrices = weights.experts.gate_up_proj, weights.experts.down_proj
            out = dispatch.expert_mix(x, share, experts, *matrices, exact=self.exact)
            if hasattr(weights.experts, "sent"):
                weights.experts.sent()
        if self.facts.shared_dim:
            gate = weights.shared_expert_gate(x).float().sigmoid()
            out = torch.addcmul(out, gate, self.shared(x, weights.shared_expert))
        return out
