"""One decoder layer: norm, token mixer, residual; norm, feed-forward, residual. The residual is fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.core.protocols import KVView, LayerWeights
from packhorse.core.types import LayerKind
from packhorse.facts.model import ModelFacts
from packhorse.kernels.norm.ref import rms_norm
from packhorse.layers.attention import Attention
from packhorse.layers.delta_net import DeltaNet
from packhorse.layers.mlp import Mlp, Moe
from packhorse.layers.rope import Rope


class DecoderLayer:
    """Layer `index` of the model seam: x, positions, kv_view, weights -> x."""

    def __init__(self, facts: ModelFacts, index: int, rope: Rope, dtype: torch.dtype, exact: bool) -> None:
        self.eps = facts.rms_eps
        self.dtype = dtype
        self.is_full = facts.layer_kinds[index] is LayerKind.FULL
        self.mixer = Attention(facts, rope, exact) if self.is_full else DeltaNet(facts, exact)
        moe = facts.moe if facts.moe_layers[index] else None
        self.mlp = Mlp() if moe is None else Moe(moe, exact)

    def __call__(self, x: Tensor, positions: Tensor, kv_view: KVView, weights: LayerWeights) -> Tensor:
        """x [T, H] fp32 -> [T, H] fp32, a new tensor."""
        mixer_weights = weights.self_attn if self.is_full else weights.linear_attn
        hidden = rms_norm(x, weights.input_layernorm, self.eps, self.dtype)
        x = x + self.mixer(hidden, positions, kv_view, mixer_weights)
        hidden = rms_norm(x, weights.post_attention_layernorm, self.eps, self.dtype)
        return x + self.mlp(hidden, weights.mlp)
