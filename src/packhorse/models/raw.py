"""Bytes of one tensor, read from its file and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from packhorse.core.errors import CorruptFileError, UnsupportedModelError
from packhorse.core.units import MIB
from packhorse.facts.fields import reading
from packhorse.facts.model import TensorFacts

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
LARGE_BYTES = 32 * MIB
"""From this size on a tensor is read by several threads: one core does not keep up with the page cache."""
PART_BYTES = 2 * MIB
"""What a thread reads at a time then."""
READERS = 8
STAGE_BYTES = 16 * MIB
"""Pinned memory, where it is to be had, through which a large tensor goes to a card: twice this much, one half read
while the other is sent."""


def read_raw(tensor: TensorFacts, device: str = "cpu") -> Tensor:
    """The stored bytes of a tensor, uint8 [num_bytes], in memory of their own (64-byte aligned) on `device`; on a card
    they are valid for the current stream, and the host holds no more than 2 x STAGE_BYTES of a large tensor.

    Raises CorruptFileError where the bytes are not there, RefusedError where the file cannot be read.
    """
    with reading(tensor.file), tensor.file.open("rb", buffering=0) as stream:
        if tensor.num_bytes < LARGE_BYTES:
            buffer = torch.empty(tensor.num_bytes, dtype=torch.uint8)
            _read(tensor, stream.fileno(), buffer, 0)
            return buffer.to(device)
        with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as pool:

            def read(buffer: Tensor, start: int) -> None:
                def part(at: int) -> None:
                    _read(tensor, stream.fileno(), buffer[at : at + PART_BYTES], start + at)

                for _ in pool.map(part, range(0, len(buffer), PART_BYTES)):
                    pass

            if device == "cpu":
                buffer = torch.empty(tensor.num_bytes, dtype=torch.uint8)
                read(buffer, 0)
                return buffer
            return _staged(tensor.num_bytes, device, read)


def _read(tensor: TensorFacts, file: int, buffer: Tensor, start: int) -> None:
    """Fill buffer, uint8 [n], with the bytes from `start` of the tensor on."""
    view, done = buffer.numpy().data, 0
    # One read of the system moves at most 2 GiB.
    while done < len(view):
        count = os.preadv(file, [view[done:]], tensor.offset + start + done)
        if not count:
            raise CorruptFileError(
                f"{tensor.file} ends {tensor.num_bytes - start - done:,} bytes before the end of the tensor"
                f" {tensor.name!r}.",
                hint="The file changed after it was opened: fetch it again.",
                tensor=tensor.name,
            )
        done += count


def _staged(size: int, device: str, read: Callable[[Tensor, int], None]) -> Tensor:
    """uint8 [size] on a card, of what read(buffer, start) puts into a buffer."""
    out = torch.empty(size, dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream(out.device)
    halves = _halves()
    sent = [torch.cuda.Event() for _ in halves]
    for turn, start in enumerate(range(0, size, STAGE_BYTES)):
        half = halves[turn % 2][: size - start]
        sent[turn % 2].synchronize()  # nothing where it was never recorded
        read(half, start)
        out[start : start + len(half)].copy_(half, non_blocking=True)
        sent[turn % 2].record(stream)
    return out


def _halves() -> Tensor:
    """uint8 [2, STAGE_BYTES] to send from: pinned, which torch keeps for the next tensor, where the system pins it."""
    try:
        return torch.empty(2, STAGE_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        # Experts that are being pinned may have taken all that may be (WSL2). Copies from here take their time, and
        # are through with it when they return.
        return torch.empty(2, STAGE_BYTES, dtype=torch.uint8)


def read_plain(tensor: TensorFacts, device: str = "cpu") -> Tensor:
    """A tensor that is stored value by value, in its stored type and shape, on `device` as `read_raw` has it.

    Raises what `read_raw` raises; UnsupportedModelError where torch has no such type.
    """
    dtype = DTYPES.get(tensor.format.name)
    if dtype is None:
        raise UnsupportedModelError(
            f"{tensor.file}: the tensor {tensor.name!r} has the type {tensor.format.name}, which is not"
            " supported.",
            hint="Use the model's BF16 checkpoint.",
        )
    return read_raw(tensor, device).view(dtype).view(tensor.shape)
