"""qwen3_5 (dense, 0.8B-27B) and qwen3_5_moe (35B-A3B): three delta-net layers to one of gated attention."""

from __future__ import annotations

from packhorse.core.types import LayerKind
from packhorse.facts.model import ModelFacts
from packhorse.models.params import Param, attention_params, delta_common_params, layer_norm_params, stacked
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
    """in_proj_qkv and z, b and a are tensors of their own."""
    d = facts.delta
    assert d is not None
    name, tail = f"{prefix}linear_attn.", (facts.hidden_size,)
    qkvz = [(f"{name}in_proj_qkv.weight", d.conv_dim), (f"{name}in_proj_z.weight", d.value_dim)]
    gates = [(f"{name}in_proj_{n}.weight", d.num_v_heads) for n in ("b", "a")]
    return [
        stacked("linear_attn.in_proj_qkvz.weight", qkvz, tail),
        stacked("linear_attn.in_proj_ba.weight", gates, tail),
        *delta_common_params(facts, name),
    ]
