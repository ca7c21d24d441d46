"""Weights by the names transformers gives them, one tensor at a time, from whatever files hold them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from packhorse.core.errors import RefusedError, WeightsError
from packhorse.core.protocols import CheckpointSource, StoredRows
from packhorse.facts.model import ModelFacts, TensorFacts
from packhorse.facts.names import text_name
from packhorse.models.gguf_source import GgufSource
from packhorse.models.raw import read_plain


def open_checkpoint(facts: ModelFacts) -> CheckpointSource:
    """The weights of `facts`. Raises RefusedError where the folder holds none, WeightsError where names
    or shapes contradict each other."""
    if facts.container == "safetensors":
        return SafetensorsSource(facts)
    if facts.container == "gguf":
        return GgufSource(facts)
    raise RefusedError(
        f"{facts.path} holds no weights, only config.json.", hint="Fetch the model's safetensors files too."
    )


class SafetensorsSource:
    """Weights of a checkpoint folder, with experts as stored: fused, or one tensor an expert.

    Vision and multi-token-prediction tensors are left out.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self._tensors: dict[str, TensorFacts] = {}
        for stored, tensor in facts.tensors.items():
            name = text_name(stored)
            if name is None:
                continue
            if name in self._tensors:
                raise WeightsError(
                    f"{self._tensors[name].name!r} and {stored!r} are both the tensor {name!r}.",
                    hint="Remove one of them.",
                )
            self._tensors[name] = tensor

        self._shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        """The tensor in its stored type, in memory of its own. Raises CorruptFileError where bytes are
        missing, UnsupportedModelError where torch has no such type."""
        return read_plain(self._tensors[name])

    def packed(self, name: str) -> StoredRows | None:
        """None: these are plain values."""
        return None
