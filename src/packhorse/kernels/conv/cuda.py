"""Causal convolution and silu of a chunk on a card: `cuda.cu`. Twin: silu of `ref.causal_conv`."""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.core.units import ceil_div
from packhorse.kernels.cuda.launch import has_type, launch, min_arch
from packhorse.kernels.cuda.nvrtc import Variant

_RUN = 32
_THREADS = 256


def variant(taps: int, dtype: torch.dtype) -> Variant:
    """The kernel for `taps` taps and inputs of `dtype`, fp16 or bf16."""
    bf16 = dtype == torch.bfloat16
    defines = (("TAPS", taps), ("BF16", int(bf16)))
    return Variant("conv/cuda.cu", "conv_silu", defines, min_arch=min_arch(dtype))


def fits(x: Tensor, state: Tensor) -> bool:
    """Whether `conv_silu` is for inputs x [T, C] and state [C, K - 1]: 16 bits on a card, whole pairs of channels."""
    return (
        has_type(x.device, x.dtype)
        and state.dtype == x.dtype
        and state.is_contiguous()
        and x.stride(1) == 1
        and not (x.shape[1] % 2 or x.stride(0) % 2 or x.data_ptr() % 4)
    )


def conv_silu(x: Tensor, weight: Tensor, state: Tensor, out: Tensor) -> None:
    """out [T, C] fp32, contiguous, = silu(causal_conv(x, weight, state)); x [T, C], state [C, K - 1] in place,
    weight [C, K] fp32. A row's bits do not depend on where a call starts."""
    num_rows, channels = x.shape
    assert fits(x, state) and out.is_contiguous() and out.dtype == torch.float32
    assert weight.is_contiguous() and weight.dtype == torch.float32 and out.shape == x.shape
    grid = (ceil_div(num_rows, _RUN), ceil_div(channels // 2, _THREADS))
    args = (x, weight, state, out, num_rows, x.stride(0), channels // 2)
    launch(variant(weight.shape[1], x.dtype), grid, _THREADS, *args, device=x.device)
