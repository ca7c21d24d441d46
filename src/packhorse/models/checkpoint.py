"""Weights by the names transformers gives them, one tensor at a time, from whatever files hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from packhorse.core.errors import RefusedError, WeightsError
from packhorse.core.protocols import CheckpointSource, StoredRows
from packhorse.facts.model import ModelFacts, StoredMatrix, TensorFacts
from packhorse.facts.names import text_name
from packhorse.models.gguf_source import GgufSource
from packhorse.models.raw import read_plain
from packhorse.quant.packed import SLICE_LEN, PackedRows, RowCodes, values
from packhorse.quant.stored import row_codes


def open_checkpoint(facts: ModelFacts) -> CheckpointSource:
    """The weights of `facts`. Raises RefusedError where the folder holds none, WeightsError where names
    or shapes contradict each other."""
    if facts.container == "safetensors":
        return SafetensorsSource(facts)
    if facts.container == "gguf":
        return GgufSource(facts)
    hint = "Fetch the model's safetensors files too."
    raise RefusedError(f"{facts.path} holds no weights, only config.json.", hint=hint)


class SafetensorsSource:
    """Weights of a checkpoint folder, with experts as stored: fused, or one tensor an expert.

    Vision and multi-token-prediction tensors are left out.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self._tensors: dict[str, TensorFacts] = {}
        self._stored = facts.stored
        inside = {tensor.name for matrix in facts.stored.values() for tensor in matrix.tensors.values()}
        for stored, tensor in facts.tensors.items():
            name = text_name(stored)
            if name is None or stored in inside or _is_left_over(name, facts):
                continue
            if name in self._tensors or name in self._stored:
                first = self._tensors[name].name if name in self._tensors else self._stored[name].name
                hint = "Remove one of them."
                raise WeightsError(f"{first!r} and {stored!r} are both the tensor {name!r}.", hint=hint)
            self._tensors[name] = tensor
        self._shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._shapes |= {name: matrix.shape for name, matrix in self._stored.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        """The tensor in its stored type, in memory of its own; a packed matrix in fp32. Raises CorruptFileError
        where bytes are missing, UnsupportedModelError where torch has no such type, WeightsError for scales and
        codes that cannot be."""
        if name not in self._stored:
            return read_plain(self._tensors[name])
        matrix = self._stored[name]
        codes, order = self._load(matrix)
        num_rows, num_cols = math.prod(matrix.shape[:-1]), matrix.shape[-1]
        out = torch.empty(num_rows, num_cols)
        columns = torch.arange(num_cols) if order is None else order
        for rows in torch.arange(num_rows).split(max(1, SLICE_LEN // num_cols)):
            out[int(rows[0]) : int(rows[-1]) + 1, columns] = values(matrix.form, codes(rows))
        return out.view(matrix.shape)

    def packed(self, name: str) -> StoredRows | None:
        matrix = self._stored.get(name)
        if matrix is None:
            return None
        num_rows = matrix.shape[-2]
        rows = PackedRows(matrix.form, num_rows, partial(self._load, matrix), matrix.permuted)
        return StoredRows((rows,), torch.zeros(num_rows, dtype=torch.int64), torch.arange(num_rows))

    def _load(self, matrix: StoredMatrix, device: str = "cpu") -> tuple[RowCodes, Tensor | None]:
        return row_codes(
            matrix, {role: read_plain(tensor, device) for role, tensor in matrix.tensors.items()}
        )


_SPARE = (".input_scale", ".output_scale")
_KV_SCALES = (".k_scale", ".v_scale")
"""Scales of activations and of KV, which are not kept as the checkpoint's maker did."""


def _is_left_over(name: str, facts: ModelFacts) -> bool:
    """Whether a tensor beside packed matrices is none of the weights."""
    of_packed = f"{name.rpartition('.')[0]}.weight" in facts.stored
    return (of_packed and name.endswith(_SPARE)) or (bool(facts.stored) and name.endswith(_KV_SCALES))
