"""Heads of many tokens turned on a card: `rotate.cu`. Twin: `quant.codec.hadamard`."""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.core.units import ceil_div
from packhorse.kernels.attention.cuda import CODECS, HEAD_DIMS
from packhorse.kernels.cuda.launch import has_type, launch, min_arch
from packhorse.kernels.cuda.nvrtc import Variant

_WARPS = 8


def variant(head_dim: int, dtype: torch.dtype) -> Variant:
    """The kernel for heads in `dtype`, fp32, fp16 or bf16."""
    types = (("BF16", int(dtype == torch.bfloat16)), ("X32", int(dtype == torch.float32)))
    defines = (("CODEC", CODECS["k5v4"]), ("HEAD_DIM", head_dim), *types)
    return Variant("attention/rotate.cu", "rotate_heads", defines, min_arch=min_arch(dtype))


def fits(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether `hadamard` is for x [T, heads, D], fp32 or `dtype`, the 16-bit type that a card computes in."""
    known = x.ndim == 3 and x.shape[2] in HEAD_DIMS and x.dtype in (torch.float32, dtype)
    return known and x.stride()[1:] == (x.shape[2], 1) and has_type(x.device, dtype)


def hadamard(x: Tensor) -> Tensor:
    """`quant.codec.hadamard` of x [T, heads, D] of at least one token, contiguous."""
    num_tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = num_tokens * heads
    args = (x, out, x.stride(0), rows, heads)
    launch(variant(dim, x.dtype), (ceil_div(rows, _WARPS),), 32 * _WARPS, *args, device=x.device)
    return out
