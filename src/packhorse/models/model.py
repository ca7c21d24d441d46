"""The model seam: `embed(ids)`, `layers[i](x, positions, kv_view, weights)`, `head(x)`.

Whoever runs a model owns the loop over layers; the model owns no schedule and no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.core.protocols import LayerWeights
from packhorse.facts.model import ModelFacts
from packhorse.kernels.norm.ref import rms_norm
from packhorse.layers.decoder import DecoderLayer
from packhorse.layers.linear import Linear
from packhorse.layers.rope import Rope


class ResidentWeights:
    """WeightSource of a model that is wholly in memory."""

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self._layers = layers

    def layer(self, index: int) -> LayerWeights:
        """Weights of layer `index`; valid for ever."""
        return self._layers[index]


class Model:
    """A loaded model. `tensors` are its parameters by name, as `load_model` filled them."""

    def __init__(
        self, facts: ModelFacts, tensors: dict[str, Tensor], *, dtype: torch.dtype, device: str, exact: bool
    ) -> None:
        self.facts = facts
        self.dtype = dtype
        self.device = device
        self.exact = exact
        rope = Rope(facts.rope, device)
        self.layers = [DecoderLayer(facts, i, rope, dtype, exact) for i in range(facts.num_layers)]
        self.weights = ResidentWeights([_tree(tensors, f"layers.{i}.") for i in range(facts.num_layers)])
        self._embedding = tensors["embed"]
        self._norm = tensors["norm"]
        self._head = Linear(tensors.get("head", self._embedding))
        self.storage_bytes = sum(t.numel() * t.element_size() for t in tensors.values())

    def embed(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> x [T, H] fp32."""
        return F.embedding(ids, self._embedding).float()

    def head(self, x: Tensor) -> Tensor:
        """x [T, H] fp32 -> logits [T, V] fp32."""
        hidden = rms_norm(x, self._norm, self.facts.rms_eps, self.dtype)
        return self._head(hidden).float()


def _tree(tensors: dict[str, Tensor], prefix: str) -> Any:
    """Tensors under `prefix` as nested attributes; `.weight` with `.bias` as a Linear."""
    root = SimpleNamespace()
    for name, tensor in tensors.items():
        if not name.startswith(prefix) or name.endswith(".bias"):
            continue
        *path, leaf = name.removeprefix(prefix).removesuffix(".weight").split(".")
        node = root
        for part in path:
            if not hasattr(node, part):
                setattr(node, part, SimpleNamespace())
            node = getattr(node, part)
        if name.endswith(".weight"):
            bias = tensors.get(name.removesuffix("weight") + "bias")
            setattr(node, leaf, Linear(tensor, bias))
        else:
            setattr(node, leaf, tensor)
    return root
