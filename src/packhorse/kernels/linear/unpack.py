"""Values of packed weights on a card, for products of many rows that a library does."""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.core.cost import UNPACK_BYTES
from packhorse.core.formats import TILE_ROWS, PackedFormat
from packhorse.core.units import ceil_div
from packhorse.kernels.cuda.launch import launch, min_arch
from packhorse.kernels.cuda.nvrtc import Variant
from packhorse.kernels.linear.cuda import KINDS
from packhorse.quant.packed import PackedTensor

_OUT = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_WARPS = 8
_GRID_Y = 32768


def variant(form: PackedFormat, dtype: torch.dtype) -> Variant:
    """The kernel that unpacks `form` into `dtype`."""
    defines = (
        ("BITS", form.bits),
        ("KIND", KINDS[form.kind]),
        ("GROUP", form.group_len),
        ("OUT", _OUT[dtype]),
    )
    return Variant("linear/unpack.cu", "unpack", defines, min_arch=min_arch(dtype))


def linear(x: Tensor, weight: PackedTensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times a packed weight [N, K] transposed, plus bias [N]: [T, N] in x's type; rows of the weight
    are unpacked UNPACK_BYTES at a time and multiplied by the library."""
    step = max(1, UNPACK_BYTES // (TILE_ROWS * weight.num_cols * x.element_size())) * TILE_ROWS
    out = x.new_empty(x.shape[0], weight.num_rows)
    scratch = x.new_empty(min(step, weight.num_rows) * weight.num_cols)
    for start in range(0, weight.num_rows, step):
        part = weight.rows(start, start + step)
        values = unpack_into(part, scratch[: part.num_rows * part.num_cols].view(part.shape))
        torch.mm(x, values.t(), out=out[:, start : start + step])
    return out if bias is None else out + bias


def group_len(weight: PackedTensor, itemsize: int) -> int:
    """Matrices [N, K] of `weight` [E, N, K] whose values fill UNPACK_BYTES."""
    return max(1, UNPACK_BYTES // (weight.num_rows * weight.num_cols * itemsize))


def unpacked(weight: PackedTensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Values of matrices start .. stop of `weight` [E, N, K], which lies on a card."""
    part = PackedTensor(weight.format, weight.data[start:stop], weight.num_rows, weight.num_cols)
    return unpack_into(part, torch.empty(part.shape, dtype=dtype, device=part.data.device))


def unpack_into(packed: PackedTensor, out: Tensor) -> Tensor:
    """Write the values [L, N, K] of `packed`, which lies on a card, into `out` of a compute type and of that shape,
    contiguous. Matrices of a stack may lie apart. The values are those of PackedTensor.dequantize, bit for bit.
    Returns `out`."""
    *lead, blocks, row_bytes = packed.data.shape
    assert out.is_contiguous() and out.shape == packed.shape
    assert len(lead) <= 1 and packed.data.stride()[-2:] == (row_bytes, 1)
    row_blocks = packed.data.numel() // row_bytes
    tiles = ceil_div(packed.num_cols, 64)
    height = min(row_blocks, _GRID_Y)
    grid = (ceil_div(tiles, _WARPS), height, ceil_div(row_blocks, height))
    sizes = (row_blocks, blocks, packed.num_rows, packed.num_cols, row_bytes)
    args = (packed.data, out, *sizes, packed.data.stride(0) if lead else 0)
    launch(variant(packed.format, out.dtype), grid, 32 * _WARPS, *args, device=packed.data.device)
    return out
