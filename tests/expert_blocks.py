"""Puts the experts of a loaded model into blocks, as the loader does where it is given memory for them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from packhorse.models.experts import ExpertBlocks, ExpertLayout
from packhorse.models.model import Model
from packhorse.quant.packed import PackedTensor, aligned_bytes


def join(model: Model, memory: Callable[[ExpertLayout], Tensor] | None = None) -> ExpertBlocks | None:
    """model.experts of a model whose experts are packed stacks; None where they are not. memory: by default on the
    model's device."""
    layers = [i for i in range(model.facts.num_layers) if hasattr(model.weights.layer(i).mlp, "experts")]
    stacks = [model.weights.layer(i).mlp.experts for i in layers]
    if not stacks or not isinstance(stacks[0].gate_up_proj, PackedTensor):
        return None
    gate_up, down = stacks[0].gate_up_proj, stacks[0].down_proj
    layout = ExpertLayout(
        tuple(layers), len(gate_up), gate_up.format, down.format, gate_up.num_cols, down.num_cols
    )
    make = memory or (lambda layout: aligned_bytes(layout.total_bytes, model.device))
    model.experts = ExpertBlocks(layout, make(layout))
    for index, stack in zip(layers, stacks, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            view = model.experts.stack(f"layers.{index}.mlp.experts.{name}")
            view.data.copy_(getattr(stack, name).data)
            setattr(stack, name, view)
    return model.experts
