"""One decoder layer: norm, token mixer, residual; norm, feed-forward, residual. The residual is fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.core.protocols import KVView, LayerWeights
from packhorse.core.types import LayerKind
from packhorse.facts.model import ModelFacts
from packhorse.kernels import dispatch
from packhorse.layers.attention import Attention
from packhorse.layers.delta_net import DeltaNet
from packhorse.layers.mlp import Mlp, Moe
from packhorse.layers.rope import Rope
from packhorse.layers.step import LayerStep, attention_step, delta_net_step, mlp_step, moe_step, norm_step


class DecoderLayer:
    """Layer `index` of the model seam: x, positions, kv_view, weights -> x."""

    def __init__(self, facts: ModelFacts, index: int, rope: Rope, dtype: torch.dtype, exact: bool) -> None:
        self.eps = facts.rms_eps
        self.dtype = dtype
        self.is_full = facts.layer_kinds[index] is LayerKind.FULL
        self.mixer = Attention(facts, rope, exact) if self.is_full else DeltaNet(facts, exact)
        self.facts = facts
        self.moe = facts.moe if facts.moe_layers[index] else None
        self.mlp = Mlp() if self.moe is None else Moe(self.moe, exact)

    def __call__(self, x: Tensor, positions: Tensor, kv_view: KVView, weights: LayerWeights) -> Tensor:
        """x [T, H] fp32 -> [T, H] fp32, a new tensor."""
        mixer_weights = weights.self_attn if self.is_full else weights.linear_attn
        hidden = dispatch.rms_norm(x, weights.input_layernorm, self.eps, self.dtype)
        x = x + self.mixer(hidden, positions, kv_view, mixer_weights)
        hidden = dispatch.rms_norm(x, weights.post_attention_layernorm, self.eps, self.dtype)
        return x + self.mlp(hidden, weights.mlp)

    def step(self, x: Tensor, step: LayerStep, weights: LayerWeights) -> Tensor:
        """The same for rows of a decode step on a card, without waiting for the host: x [R, H] fp32 -> same."""
        hidden = norm_step(x, weights.input_layernorm, self.eps, self.dtype)
        if self.is_full:
            x = attention_step(self.facts, hidden, x, step, weights.self_attn)
        else:
            x = delta_net_step(self.facts, hidden, x, step, weights.linear_attn)
        hidden = norm_step(x, weights.post_attention_layernorm, self.eps, self.dtype)
        if self.moe is None:
            return mlp_step(hidden, x, weights.mlp)
        return moe_step(self.moe, hidden, x, step, weights.mlp)
