"""Dense matrices times 1 to 16 tokens on a card: `dense.cu`, one order of a row's sum for every number of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.core.units import ceil_div
from packhorse.kernels.cuda.launch import launch
from packhorse.kernels.cuda.nvrtc import Variant
from packhorse.kernels.linear.cuda import MAX_TOKENS

_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_WARPS = 4


def variant(weight: torch.dtype, x: torch.dtype, num_tokens: int) -> Variant:
    """The kernel for weights and activations of these types."""
    tokens = 1 << (num_tokens - 1).bit_length()
    defines = (("WEIGHT", _TYPES[weight]), ("X", _TYPES[x]), ("TOKENS", tokens))
    return Variant("linear/dense.cu", "dense_gemv", defines)


def dense_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    sigmoid: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x [M, K], M 1 to 16, times weight [N, K] transposed, plus bias [N] and residual fp32 [M, N]: fp32 [M, N].

    K is a multiple of 8; x and weight are contiguous, on 16-byte lines. sigmoid: of the sum, before the residual.
    out: where to write; rows of it may lie apart, as residual's must then.
    """
    num_tokens, num_cols = x.shape
    num_rows = weight.shape[0]
    assert 1 <= num_tokens <= MAX_TOKENS and num_cols % 8 == 0 and weight.shape[1] == num_cols
    assert x.is_contiguous() and weight.is_contiguous()
    if out is None:
        out = torch.empty(num_tokens, num_rows, dtype=torch.float32, device=x.device)
    assert out.stride(1) == 1 and (residual is None or residual.stride() == out.stride())
    launch(
        variant(weight.dtype, x.dtype, num_tokens),
        (ceil_div(num_rows, _WARPS),),
        32 * _WARPS,
        *(weight, x, None if bias is None else bias.float(), residual, out),
        *(num_rows, num_cols, num_tokens, out.stride(0), int(sigmoid)),
        device=x.device,
        overlap=True,
    )
    return out
