"""qwen3_next (80B-A3B): as qwen3_5_moe, with the delta net's inputs fused and interleaved by key head."""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.core.types import LayerKind
from packhorse.facts.model import DeltaFacts, ModelFacts
from packhorse.models.params import Param, Part, attention_params, delta_common_params, layer_norm_params
from packhorse.models.qwen3_moe import feed_forward_params


def layer_params(facts: ModelFacts, index: int) -> list[Param]:
    """Weights of layer `index`."""
    prefix = f"model.layers.{index}."
    full = facts.layer_kinds[index] is LayerKind.FULL
    return [
        *layer_norm_params(facts, prefix),
        *(attention_params(facts, prefix) if full else _delta_params(facts, prefix)),
        *feed_forward_params(facts, prefix, index),
    ]


def _delta_params(facts: ModelFacts, prefix: str) -> list[Param]:
    d = facts.delta
    assert d is not None
    name = f"{prefix}linear_attn."
    ratio = d.num_v_heads // d.num_k_heads
    values = ratio * d.v_head_dim
    qkvz = _by_head(d, [d.k_head_dim, d.k_head_dim, values, values])
    ba = _by_head(d, [ratio, ratio])

    def fused(part: str, order: Tensor) -> Param:
        shape = (len(order), facts.hidden_size)
        source = Part(f"{name}{part}.weight", shape, order=order)
        return Param(f"linear_attn.{part}.weight", shape, ((source,),))

    return [fused("in_proj_qkvz", qkvz), fused("in_proj_ba", ba), *delta_common_params(facts, name)]


def _by_head(d: DeltaFacts, sizes: list[int]) -> Tensor:
    """Row order that takes rows grouped by key head, each with parts of `sizes`, to whole parts in turn."""
    rows = torch.arange(d.num_k_heads * sum(sizes)).view(d.num_k_heads, sum(sizes))
    return torch.cat([part.reshape(-1) for part in rows.split(sizes, dim=1)])
