"""Weights by the names transformers gives them, one tensor at a time, from whatever files hold them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from packhorse.core.errors import CorruptFileError, RefusedError, UnsupportedModelError, WeightsError
from packhorse.core.protocols import CheckpointSource
from packhorse.facts.model import ModelFacts, TensorFacts
from packhorse.facts.names import text_name

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def open_checkpoint(facts: ModelFacts) -> CheckpointSource:
    """The weights of `facts`. Raises RefusedError where the folder holds none, WeightsError where two
    tensors have one name."""
    if facts.container == "safetensors":
        return SafetensorsSource(facts)
    raise RefusedError(
        f"{facts.path} holds no weights, only config.json.", hint="Fetch the model's safetensors files too."
    )


def read_raw(tensor: TensorFacts) -> Tensor:
    """The stored bytes of a tensor, uint8 [num_bytes], in memory of their own (64-byte aligned).

    Raises CorruptFileError where the bytes are not there, RefusedError where the file cannot be read.
    """
    buffer = torch.empty(tensor.num_bytes, dtype=torch.uint8)
    view = buffer.numpy().data
    try:
        with tensor.file.open("rb", buffering=0) as stream:
            stream.seek(tensor.offset)
            done = 0
            # One read of the system moves at most 2 GiB.
            while done < tensor.num_bytes:
                count = stream.readinto(view[done:])
                if not count:
                    raise CorruptFileError(
                        f"{tensor.file} ends {tensor.num_bytes - done:,} bytes before the end of the tensor"
                        f" {tensor.name!r}.",
                        hint="The file changed after it was opened: fetch it again.",
                        tensor=tensor.name,
                    )
                done += count
    except OSError as error:
        raise RefusedError(
            f"{tensor.file} cannot be read: {error.strerror or error}.",
            hint="Check the file and its permissions.",
        ) from error
    return buffer


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

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """The tensor in its stored type, in memory of its own. Raises CorruptFileError where bytes are
        missing, UnsupportedModelError where torch has no such type."""
        tensor = self._tensors[name]
        return read_raw(tensor).view(_dtype(tensor)).reshape(tensor.shape)


def _dtype(tensor: TensorFacts) -> torch.dtype:
    dtype = _DTYPES.get(tensor.format.name)
    if dtype is None:
        raise UnsupportedModelError(
            f"{tensor.file}: the tensor {tensor.name!r} has the type {tensor.format.name}, which is not"
            " supported.",
            hint="Use the model's BF16 checkpoint.",
        )
    return dtype
