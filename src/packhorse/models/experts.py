"""Routed experts as one block of bytes each, where the kernels find them by address.

block of an expert   | gate_up, packed | down, packed |      a whole number of 128-byte lines
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from packhorse.kernels.experts.cuda import ExpertTable
from packhorse.models.model import Model
from packhorse.quant.packed import PackedTensor, aligned_bytes


def join_experts(model: Model, place: Callable[[int, int], Tensor] | None = None) -> ExpertTable | None:
    """Lay each layer's experts out as blocks, and say where they are. None where experts are dense or there are none.

    place(moe layer, bytes): memory for a layer's blocks, uint8, on a 128-byte line; by default the model's device.
    The model's own stacks become views of the blocks, layer after layer, so that the peak is one layer more.

    Raises nothing: layers of one model share their formats, or the experts stay as they are (None).
    """
    mlps = [model.weights.layer(index).mlp for index in range(model.facts.num_layers)]
    layers = [mlp.experts for mlp in mlps if hasattr(mlp, "experts")]
    stacks = [(experts.gate_up_proj, experts.down_proj) for experts in layers]
    if not stacks or not all(isinstance(stack, PackedTensor) for pair in stacks for stack in pair):
        return None
    forms = {(gate_up.format, down.format) for gate_up, down in stacks}
    if len(forms) > 1:
        return None
    first, (gate_up_form, down_form) = stacks[0], next(iter(forms))
    num_experts, _, hidden = first[0].shape
    inner = first[1].num_cols
    up_bytes = gate_up_form.num_bytes(2 * inner, hidden)
    block_bytes = up_bytes + down_form.num_bytes(hidden, inner)
    address = torch.empty(len(stacks), num_experts, dtype=torch.int64)
    for index, experts in enumerate(layers):
        size = num_experts * block_bytes
        memory = aligned_bytes(size, model.device) if place is None else place(index, size)
        blocks = memory.view(num_experts, block_bytes)
        parts = (blocks[:, :up_bytes], blocks[:, up_bytes:])
        for name, part in zip(("gate_up_proj", "down_proj"), parts, strict=True):
            stack: PackedTensor = getattr(experts, name)
            data = part.unflatten(1, stack.data.shape[1:])
            data.copy_(stack.data)
            setattr(experts, name, PackedTensor(stack.format, data, stack.num_rows, stack.num_cols))
        address[index] = blocks.data_ptr() + block_bytes * torch.arange(num_experts)
    return ExpertTable(address.to(model.device), gate_up_form, down_form, hidden, inner)
