"""Dense decoders with full attention: llama (SmolLM2, Llama, Yi), qwen2 (biases) and qwen3 (q/k norms)."""

from __future__ import annotations

from packhorse.facts.model import ModelFacts
from packhorse.models.params import Param, attention_params, layer_norm_params, mlp_params


def layer_params(facts: ModelFacts, index: int) -> list[Param]:
    """Weights of layer `index`."""
    prefix = f"model.layers.{index}."
    return [
        *layer_norm_params(facts, prefix),
        *attention_params(facts, prefix),
        *mlp_params(facts, f"{prefix}mlp.", "mlp", facts.intermediate_size),
    ]
