"""Bytes of one tensor, read from its file and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.core.errors import CorruptFileError, RefusedError, UnsupportedModelError
from packhorse.facts.model import TensorFacts

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


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


def read_plain(tensor: TensorFacts) -> Tensor:
    """A tensor that is stored value by value, in its stored type and shape.

    Raises what `read_raw` raises; UnsupportedModelError where torch has no such type.
    """
    dtype = DTYPES.get(tensor.format.name)
    if dtype is None:
        raise UnsupportedModelError(
            f"{tensor.file}: the tensor {tensor.name!r} has the type {tensor.format.name}, which is not"
            " supported.",
            hint="Use the model's BF16 checkpoint.",
        )
    return read_raw(tensor).view(dtype).view(tensor.shape)
