"""qwen3_moe: full attention with q/k norms and routed experts without a shared one."""

from __future__ import annotations

from packhorse.facts.model import ModelFacts
from packhorse.models.params import Param, attention_params, layer_norm_params, mlp_params, moe_params


def layer_params(facts: ModelFacts, index: int) -> list[Param]:
    """Weights of layer `index`; some layers may be dense."""
    prefix = f"model.layers.{index}."
    return [
        *layer_norm_params(facts, prefix),
        *attention_params(facts, prefix),
        *feed_forward_params(facts, prefix, index),
    ]


def feed_forward_params(facts: ModelFacts, prefix: str, index: int) -> list[Param]:
    """Experts where the layer has them, else a dense block."""
    if facts.moe_layers[index]:
        return moe_params(facts, prefix)
    return mlp_params(facts, f"{prefix}mlp.", "mlp", facts.intermediate_size)
