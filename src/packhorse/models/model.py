"""The model seam: `embed(ids)`, `layers[i](x, positions, kv_view, weights)`, `head(x)`.

Whoever runs a model owns the loop over layers; the model owns no schedule and no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.core.protocols import LayerWeights
from packhorse.facts.model import ModelFacts
from packhorse.kernels.linear import gather, packed
from packhorse.kernels.linear.int4 import Int4Weight
from packhorse.kernels.norm.ref import rms_norm
from packhorse.layers.decoder import DecoderLayer
from packhorse.layers.linear import Linear, PackedLinear, Piece
from packhorse.layers.rope import Rope
from packhorse.layers.step import norm_step, project
from packhorse.models.experts import ExpertBlocks
from packhorse.quant.packed import PackedTensor

Weight = Tensor | tuple[Piece, ...]
"""A parameter: dense, or with packed pieces."""


class ResidentWeights:
    """WeightSource of a model that is wholly in memory. Where its experts are streamed, a layer's stacks of them are
    fetched as they are asked for (engine.experts), and what is said here is of the rest."""

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self._layers = layers

    def layer(self, index: int) -> LayerWeights:
        """Weights of layer `index`; valid for ever."""
        return self._layers[index]


class Model:
    """A loaded model. `tensors` are its parameters by name, as `load_model` filled them. experts: where routed
    experts lie in blocks, which the parameters are views of."""

    def __init__(
        self,
        facts: ModelFacts,
        tensors: dict[str, Weight],
        *,
        dtype: torch.dtype,
        device: str,
        exact: bool,
        experts: ExpertBlocks | None = None,
    ) -> None:
        self.facts = facts
        self.dtype = dtype
        self.device = device
        self.exact = exact
        self.experts = experts
        self.rope = Rope(facts.rope, device)
        self.layers = [DecoderLayer(facts, i, self.rope, dtype, exact) for i in range(facts.num_layers)]
        self.weights = ResidentWeights([_tree(tensors, f"layers.{i}.") for i in range(facts.num_layers)])
        self._embedding = _whole(tensors["embed"])
        self._pinned: object = None
        self._norm: Tensor = tensors["norm"]  # type: ignore[assignment]  # norms are never packed
        self._head = _linear(tensors.get("head", tensors["embed"]))
        self.storage_bytes = sum(weight_bytes(weight) for weight in tensors.values())

    def embed_from_host(self, pin: Callable[[Tensor], object]) -> None:
        """Have the card read the embedding in host memory by itself, where it can: pin(bytes) makes that memory
        readable for it, and what it returns is kept."""
        table = self._embedding
        if self.embed_device.type == "cpu" and gather.fits(table):
            self._pinned = pin(table.data if isinstance(table, PackedTensor) else table)

    @property
    def embed_device(self) -> torch.device:
        """Where `embed` wants its ids: where the embedding lies, or the card that reads it in host memory."""
        if self._pinned is not None:
            return torch.device(self.device)
        kept = self._embedding
        return kept.data.device if isinstance(kept, PackedTensor) else kept.device

    def embed(self, ids: Tensor) -> Tensor:
        """ids [T] int64, on `embed_device` -> x [T, H] fp32 on the model's device."""
        if self._pinned is not None:
            return gather.embed(ids, self._embedding)
        if isinstance(self._embedding, PackedTensor):
            return packed.embed(ids, self._embedding).to(self.device)
        return F.embedding(ids, self._embedding).float().to(self.device)

    def head_step(self, x: Tensor) -> Tensor:
        """`head` for the rows of a decode step on a card, at most 16."""
        return project(self._head, norm_step(x, self._norm, self.facts.rms_eps, self.dtype))

    def head(self, x: Tensor) -> Tensor:
        """x [T, H] fp32 -> logits [T, V] fp32."""
        hidden = rms_norm(x, self._norm, self.facts.rms_eps, self.dtype)
        return self._head(hidden).float()


def weight_bytes(weight: Weight | PackedTensor | Int4Weight) -> int:
    """Bytes that a parameter takes."""
    if isinstance(weight, PackedTensor | Int4Weight):
        return weight.num_bytes
    if isinstance(weight, Tensor):
        return weight.numel() * weight.element_size()
    parts = [part for piece in weight for part in piece if part is not None]
    return sum(weight_bytes(part) for part in parts)


def _whole(weight: Weight) -> Any:
    """A parameter that is never in pieces: the embedding, experts."""
    return weight if isinstance(weight, Tensor) else weight[0].weight


def _linear(weight: Weight, bias: Any = None) -> Linear | PackedLinear:
    return Linear(weight, bias) if isinstance(weight, Tensor) else PackedLinear(weight, bias)


def _tree(tensors: dict[str, Weight], prefix: str) -> Any:
    """Parameters under `prefix` as nested attributes; `.weight` with `.bias` as one product."""
    root = SimpleNamespace()
    for name, weight in tensors.items():
        if not name.startswith(prefix) or name.endswith(".bias"):
            continue
        *path, leaf = name.removeprefix(prefix).removesuffix(".weight").split(".")
        node = root
        for part in path:
            if not hasattr(node, part):
                setattr(node, part, SimpleNamespace())
            node = getattr(node, part)
        if name.endswith(".weight"):
            setattr(node, leaf, _linear(weight, tensors.get(name.removesuffix("weight") + "bias")))
        else:
            setattr(node, leaf, _whole(weight))
    return root
