"""Weights by the names transformers gives them, one tensor at a time, from whatever files hold them."""

from __future__ import annotations

import re
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

_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


def open_checkpoint(facts: ModelFacts) -> CheckpointSource:
    """The weights of `facts`. Raises RefusedError where the folder holds none, WeightsError where experts
    are incomplete."""
    if facts.container == "safetensors":
        return SafetensorsSource(facts)
    raise RefusedError(
        f"{facts.path} holds no weights, only config.json.", hint="Fetch the model's safetensors files too."
    )


def read_raw(tensor: TensorFacts, out: Tensor | None = None) -> Tensor:
    """The stored bytes of a tensor, uint8 [num_bytes], in memory of their own (64-byte aligned) or in `out`.

    Raises CorruptFileError where the bytes are not there, RefusedError where the file cannot be read.
    """
    buffer = torch.empty(tensor.num_bytes, dtype=torch.uint8) if out is None else out
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
    """Weights of a checkpoint folder. Experts stored one by one are given in the fused form:
    `experts.gate_up_proj` [E, 2I, H] (gate rows first) and `experts.down_proj` [E, H, I].

    Vision and multi-token-prediction tensors are left out.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self._plain: dict[str, TensorFacts] = {}
        self._experts: dict[str, dict[tuple[int, str], TensorFacts]] = {}
        for stored, tensor in facts.tensors.items():
            name = text_name(stored)
            if name is None:
                continue
            match = _EXPERT.match(name)
            if match is None:
                if name in self._plain:
                    raise WeightsError(
                        f"{self._plain[name].name!r} and {stored!r} are the same tensor {name!r}.",
                        hint="Remove one of them.",
                    )
                self._plain[name] = tensor
            else:
                target = "down_proj" if match[3] == "down_proj" else "gate_up_proj"
                self._experts.setdefault(f"{match[1]}.{target}", {})[int(match[2]), match[3]] = tensor
        self._shapes = {name: tensor.shape for name, tensor in self._plain.items()}
        for name, parts in self._experts.items():
            self._shapes[name] = self._fused_shape(name, parts)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        """The tensor in its stored type, in memory of its own. Raises CorruptFileError where bytes are
        missing, UnsupportedModelError where torch has no such type."""
        if name in self._plain:
            tensor = self._plain[name]
            return read_raw(tensor).view(_dtype(tensor)).reshape(tensor.shape)
        parts = self._experts[name]
        first = next(iter(parts.values()))
        fused = torch.empty(self._shapes[name], dtype=_dtype(first))
        rows = first.shape[0]
        for (expert, part), tensor in parts.items():
            start = rows if part == "up_proj" else 0
            place = fused[expert, start : start + rows]
            read_raw(tensor, place.view(-1).view(torch.uint8))
        return fused

    @staticmethod
    def _fused_shape(name: str, parts: Mapping[tuple[int, str], TensorFacts]) -> tuple[int, ...]:
        """[E, rows, columns] of fused experts. Raises WeightsError where one is missing or differs."""
        num_experts = 1 + max(expert for expert, _ in parts)
        kinds = ("down_proj",) if name.endswith("down_proj") else ("gate_proj", "up_proj")
        first = next(iter(parts.values()))
        if len(parts) != num_experts * len(kinds):
            missing = next((e, k) for e in range(num_experts) for k in kinds if (e, k) not in parts)
            raise WeightsError(
                f"{name.rpartition('.')[0]}.{missing[0]}.{missing[1]}.weight is missing"
                f" ({len(parts)} of {num_experts * len(kinds)} expert tensors are there).",
                hint="Fetch the checkpoint again.",
            )
        for tensor in parts.values():
            if tensor.shape != first.shape or tensor.format != first.format or len(tensor.shape) != 2:
                raise WeightsError(
                    f"{tensor.name!r} is {tensor.format.name} {list(tensor.shape)}, and {first.name!r}"
                    f" is {first.format.name} {list(first.shape)}.",
                    hint="The experts of one layer must have one shape and type: fetch the checkpoint again.",
                )
        return (num_experts, first.shape[0] * len(kinds), first.shape[1])


def _dtype(tensor: TensorFacts) -> torch.dtype:
    dtype = _DTYPES.get(tensor.format.name)
    if dtype is None:
        raise UnsupportedModelError(
            f"{tensor.file}: the tensor {tensor.name!r} has the type {tensor.format.name}, which is not"
            " supported.",
            hint="Use the model's BF16 checkpoint.",
        )
    return dtype
