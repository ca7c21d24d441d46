"""Family name -> the parameters of its layers."""

from __future__ import annotations

from collections.abc import Callable

from packhorse.facts.model import ModelFacts
from packhorse.models import llama, qwen3_5, qwen3_moe, qwen3_next
from packhorse.models.params import Param

LAYER_PARAMS: dict[str, Callable[[ModelFacts, int], list[Param]]] = {
    "llama": llama.layer_params,
    "qwen2": llama.layer_params,
    "qwen3": llama.layer_params,
    "qwen3_moe": qwen3_moe.layer_params,
    "qwen3_next": qwen3_next.layer_params,
    "qwen3_5": qwen3_5.layer_params,
    "qwen3_5_moe": qwen3_5.layer_params,
}
