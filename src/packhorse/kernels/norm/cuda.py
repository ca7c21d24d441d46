"""Launch of `cuda.cu`: the norm of the fp32 residual stream. Twin: `ref.rms_norm`."""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.kernels.cuda.launch import has_type, launch, min_arch
from packhorse.kernels.cuda.nvrtc import Variant

MAX_HIDDEN = 8192
"""Values of a row at most."""


def variant(dtype: torch.dtype) -> Variant:
    """The kernel for activations of `dtype`, fp16 or bf16."""
    bf16 = dtype == torch.bfloat16
    return Variant("norm/cuda.cu", "residual_norm", (("BF16", int(bf16)),), min_arch=min_arch(dtype))


def fits(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether `residual_norm` is for x, rows [R, H] on a card, into `dtype`."""
    return (
        has_type(x.device, dtype)
        and x.ndim == 2
        and x.dtype == torch.float32
        and x.is_contiguous()
        and x.shape[1] % 4 == 0
        and x.shape[1] <= MAX_HIDDEN
    )


def residual_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, add: Tensor | None = None) -> None:
    """out [R, H] = rms_norm(x) * weight in out's dtype. x [R, H] fp32, to which `add`, if any, is added in place.

    weight [H] fp32; H a multiple of 4, at most MAX_HIDDEN. All contiguous.
    """
    hidden = x.shape[1]
    assert hidden % 4 == 0 and hidden <= MAX_HIDDEN and x.is_contiguous() and out.is_contiguous()
    assert add is None or (add.dtype == torch.float32 and add.is_contiguous())
    args = (x, add, weight, out, eps, hidden // 4)
    launch(variant(out.dtype), (x.shape[0],), 256, *args, device=x.device, overlap=True)
