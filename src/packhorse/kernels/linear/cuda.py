"""Packed matrices times 1 to 16 tokens on a card: `cuda.cu` beside this.

Letters: M tokens, N outputs, K inputs. A row of the result has the same bits for every M: docs/kernels.md.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.core.formats import TILE_COLS, TILE_ROWS, PackedFormat
from packhorse.core.units import ceil_div, round_up
from packhorse.kernels.cuda.launch import launch, min_arch, saturated, target_of
from packhorse.kernels.cuda.nvrtc import Variant
from packhorse.quant.packed import PackedTensor

MAX_TOKENS = 16
UNIT_TILES = 8
"""Tiles that a warp takes at a time (packed.cuh)."""
MAX_WARPS = 8
MAX_RING_BYTES = 96 << 10
"""Shared memory that rings of two row blocks may take: what a block has on the smallest card from 8.0 on."""
TOKEN_FLOATS = 20
"""Floats of shared memory for a token's sums of a row block (packed.cuh)."""
KINDS = {"symmetric": 0, "zero": 1, "min": 2, "fp8": 3, "k": 4, "q6_k": 5}
DTYPES = (torch.float16, torch.bfloat16)


def format_defines(form: PackedFormat, dtype: torch.dtype, num_tokens: int) -> tuple[tuple[str, int], ...]:
    """Macros of packed.cuh: the format, the activations' type and the groups of 8 tokens."""
    return (
        ("BITS", form.bits),
        ("KIND", KINDS[form.kind]),
        ("GROUP", form.group_len),
        ("BF16", int(dtype == torch.bfloat16)),
        ("NT", ceil_div(num_tokens, 8)),
    )


def unit_bytes(form: PackedFormat) -> int:
    """Bytes of a unit of one row block: what the ring of a warp holds."""
    return form.row_bytes(UNIT_TILES * TILE_COLS)


def num_warps(form: PackedFormat, num_cols: int) -> int:
    """Warps that share the units of a row; by format and K alone, so that sums have one order."""
    units = ceil_div(num_cols, TILE_COLS * UNIT_TILES)
    return ceil_div(units, ceil_div(units, min(MAX_WARPS, MAX_RING_BYTES // (2 * unit_bytes(form)))))


def sums_bytes(row_blocks: int, num_tokens: int, warps: int) -> int:
    """Shared memory for the warps' sums of `row_blocks` row blocks."""
    return warps * row_blocks * round_up(num_tokens, 8) * TOKEN_FLOATS * 4


def ring_bytes(form: PackedFormat, row_blocks: int, warps: int) -> int:
    """Shared memory for the weights on their way to `warps` warps."""
    return warps * row_blocks * unit_bytes(form)


def variant(form: PackedFormat, dtype: torch.dtype, num_tokens: int, row_blocks: int) -> Variant:
    """The product with matrices of `form`, 1 or 2 row blocks a block of threads."""
    warps = num_warps(form, 1 << 20)
    return Variant(
        "linear/cuda.cu",
        "packed_gemv",
        (*format_defines(form, dtype, num_tokens), ("ROWS", row_blocks), ("MAX_WARPS", warps)),
        shared_bytes=sums_bytes(row_blocks, num_tokens, warps),
        async_bytes=ring_bytes(form, row_blocks, warps),
        min_arch=min_arch(dtype),
        tensor_cores=True,
    )


def variants(form: PackedFormat, dtype: torch.dtype) -> list[Variant]:
    """All that products with a matrix of `form` may need: for `launch.prepare`."""
    return [variant(form, dtype, tokens, rows) for tokens, rows in ((8, 1), (8, 2), (16, 2))]


def fits(x: Tensor, weight: PackedTensor) -> bool:
    """Whether `packed_linear` is for this product: few 16-bit tokens, on a card."""
    return (
        weight.data.device.type == "cuda"
        and weight.data.ndim == 2
        and x.dtype in DTYPES
        and 1 <= x.shape[0] <= MAX_TOKENS
    )


def packed_linear(
    x: Tensor,
    weight: PackedTensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [M, K] fp16 or bf16, M 1 to 16, times weight [N, K] transposed, plus bias [N]: [M, N], summed in fp32.

    out_dtype: x's dtype or fp32; fp32 where there is a residual. residual: fp32 [M, N], added in fp32.
    out: where to write, rows of it may lie apart; may be `residual` itself. What x's dtype cannot hold becomes its
    largest value and is counted in `launch.saturated`. Raises UnsupportedCardError for bf16 before 8.0.
    """
    if out is None:
        dtype = torch.float32 if residual is not None else out_dtype or x.dtype
        out = x.new_empty(x.shape[0], weight.num_rows, dtype=dtype)
    assert out.dtype in (torch.float32, x.dtype) and out.shape == (x.shape[0], weight.num_rows)
    assert residual is None or (out.dtype == residual.dtype and out.stride() == residual.stride())
    _launch(x, weight, bias, residual, out, 1 if x.shape[0] <= 8 else 2, 0.0)
    return out


def packed_swiglu(
    x: Tensor, weight: PackedTensor, bias: Tensor | None = None, *, factor: float = 1.0
) -> Tensor:
    """silu(gate) * up * factor of x [M, K], [M, N / 2] in x's dtype with one rounding. weight [N, K]: gate rows,
    then up rows, a multiple of 16 of each. What x's dtype cannot hold is counted as in `packed_linear`."""
    assert weight.num_rows % (2 * TILE_ROWS) == 0
    out = x.new_empty(x.shape[0], weight.num_rows // 2)
    _launch(x, weight, bias, None, out, 2, factor)
    return out


def _launch(
    x: Tensor,
    weight: PackedTensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    row_blocks: int,
    swiglu: float,
) -> None:
    num_tokens, num_cols = x.shape
    assert fits(x, weight) and num_cols == weight.num_cols and out.stride(1) == 1
    assert bias is None or bias.dtype == torch.float32
    warps = num_warps(weight.format, num_cols)
    shared = sums_bytes(row_blocks, num_tokens, warps)
    if target_of(x.device).has_async_copies:
        shared = max(shared, ring_bytes(weight.format, row_blocks, warps))
    grid = (ceil_div(weight.format.num_row_blocks(weight.num_rows), row_blocks),)
    sizes = (weight.num_rows, ceil_div(num_cols, TILE_COLS), num_tokens, out.stride(0))
    args = (weight.data, whole_tiles(x), out, bias, residual, saturated(x.device), *sizes)
    kernel, is_fp32 = variant(weight.format, x.dtype, num_tokens, row_blocks), int(out.dtype == torch.float32)
    flags = (is_fp32, swiglu)
    launch(kernel, grid, 32 * warps, *args, *flags, device=x.device, shared_bytes=shared, overlap=True)


def whole_tiles(x: Tensor) -> Tensor:
    """x [M, K], contiguous and aligned, with K padded by zeros to whole tiles."""
    padding = -x.shape[1] % TILE_COLS
    if padding:
        return F.pad(x, (0, padding))
    return (
        x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
    )
