"""Routed experts as one block of bytes each, where the kernels find them by address.

memory            | layer 0: block of expert 0, 1, ... | layer 1 | ...
block of an expert| gate_up, packed | down, packed |      a whole number of 128-byte lines
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from packhorse.core.formats import PackedFormat
from packhorse.facts.model import ModelFacts
from packhorse.layers.linear import Linear, PackedLinear, Piece
from packhorse.models.packing import PiecePlan
from packhorse.quant.packed import PackedTensor, aligned_bytes

_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


@dataclass(frozen=True)
class ExpertLayout:
    """What the blocks of a model's experts are made of: L layers with `num_experts` each, gate_up [2 inner, hidden]
    and down [hidden, inner] of one expert, in one format each over all layers. layers: their numbers."""

    layers: tuple[int, ...]
    num_experts: int
    gate_up: PackedFormat
    down: PackedFormat
    hidden: int
    inner: int

    @property
    def up_bytes(self) -> int:
        """Of gate_up, which comes first."""
        return self.gate_up.num_bytes(2 * self.inner, self.hidden)

    @property
    def block_bytes(self) -> int:
        """Of one expert."""
        return self.up_bytes + self.down.num_bytes(self.hidden, self.inner)

    @property
    def layer_bytes(self) -> int:
        """Of one layer's experts."""
        return self.num_experts * self.block_bytes

    @property
    def total_bytes(self) -> int:
        """Of all."""
        return len(self.layers) * self.layer_bytes

    def stacks(self, memory: Tensor) -> tuple[PackedTensor, PackedTensor]:
        """gate_up [E, 2 inner, hidden] and down [E, hidden, inner] of one layer's blocks: views of memory, uint8
        [layer_bytes]."""
        blocks = memory.view(self.num_experts, self.block_bytes)

        def stack(form: PackedFormat, part: Tensor, rows: int, cols: int) -> PackedTensor:
            shape = (form.num_row_blocks(rows), form.row_bytes(cols))
            return PackedTensor(form, part.unflatten(1, shape), rows, cols)

        up, down = blocks[:, : self.up_bytes], blocks[:, self.up_bytes :]
        return (
            stack(self.gate_up, up, 2 * self.inner, self.hidden),
            stack(self.down, down, self.hidden, self.inner),
        )


@dataclass(frozen=True)
class ExpertBlocks:
    """The experts of a model and where they lie: memory, uint8 [total_bytes], in host memory or on a card, its first
    byte on a 128-byte line. shared: uint8 [L, block_bytes] on the card, each layer's shared expert, where it is made
    as the routed ones are."""

    layout: ExpertLayout
    memory: Tensor

    shared: Tensor | None = None

    def layer(self, index: int) -> Tensor:
        """Blocks of the `index`-th layer with experts."""
        size = self.layout.layer_bytes
        return self.memory[index * size : (index + 1) * size]

    def stack(self, path: str) -> PackedTensor:
        """The view that is the parameter `path`, `layers.I.mlp.experts.*_proj`."""
        number, _, name = path.removeprefix("layers.").partition(".")
        gate_up, down = self.layout.stacks(self.layer(self.layout.layers.index(int(number))))
        return gate_up if name == _GATE_UP else down


def expert_layout(facts: ModelFacts, plans: Mapping[str, Any]) -> ExpertLayout | None:
    """The layout where all experts stay packed, in one format a matrix over all layers; else None, and they stay
    stacks of each layer. plans: by path of a parameter, its list[PiecePlan] or None where it is dense."""
    layers = tuple(index for index, moe in enumerate(facts.moe_layers) if moe)
    if facts.moe is None or not layers:
        return None
    forms = []
    for name in (_GATE_UP, _DOWN):
        found = [plans[f"layers.{index}.{name}"] for index in layers]
        pieces: list[PiecePlan | None] = [None if plan is None else plan[0] for plan in found]
        kinds = {None if piece is None else piece.form for piece in pieces}
        form = kinds.pop()
        if kinds or form is None:
            return None
        forms.append(form)
    return ExpertLayout(
        layers, facts.moe.num_experts, forms[0], forms[1], facts.hidden_size, facts.moe.expert_dim
    )


def join_shared(layers: Sequence[Any], layout: ExpertLayout, max_top_k: int, top_k: int) -> Tensor | None:
    """Put each layer's shared expert into a block like those of the routed ones, and its gate under the router, as
    `step_router`; the parameters become views. layers: the MoE layers' weights. None, and nothing changed, where shared
    experts are made otherwise, or a token would go to more than max_top_k experts."""
    if top_k + 1 > max_top_k or not all(_is_alike(mlp, layout) for mlp in layers):
        return None
    device = layers[0].shared_expert.gate_up_proj.pieces[0].weight.data.device
    memory = aligned_bytes(len(layers) * layout.block_bytes, str(device)).view(len(layers), -1)
    for mlp, block in zip(layers, memory, strict=True):
        one = replace(layout, num_experts=1)
        for name, stack in zip(("gate_up_proj", "down_proj"), one.stacks(block), strict=True):
            (piece,) = getattr(mlp.shared_expert, name).pieces
            stack.data[0].copy_(piece.weight.data)
            setattr(mlp.shared_expert, name, PackedLinear((Piece(stack[0]),), None))
        mlp.step_router = torch.cat((mlp.gate.weight, mlp.shared_expert_gate.weight.float()))
        mlp.gate = Linear(mlp.step_router[:-1], None)
    return memory


def _is_alike(mlp: Any, layout: ExpertLayout) -> bool:
    shared, gate = getattr(mlp, "shared_expert", None), getattr(mlp, "shared_expert_gate", None)
    if shared is None or not isinstance(gate, Linear) or gate.bias is not None or gate.weight.shape[0] != 1:
        return False
    if mlp.gate.bias is not None or mlp.gate.weight.dtype != torch.float32:
        return False
    wanted = {
        "gate_up_proj": (layout.gate_up, (2 * layout.inner, layout.hidden)),
        "down_proj": (layout.down, (layout.hidden, layout.inner)),
    }
    for name, kind in wanted.items():
        linear = getattr(shared, name)
        if not isinstance(linear, PackedLinear) or len(linear.pieces) != 1 or linear.bias is not None:
            return False
        weight, inputs = linear.pieces[0]
        if (
            inputs is not None
            or not isinstance(weight, PackedTensor)
            or (weight.format, weight.shape) != kind
        ):
            return False
    return True
