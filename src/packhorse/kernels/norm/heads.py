"""Rows of heads of a chunk on a card, normed or gated: `heads.cu`. Twins: `ref.rms_norm`, `ref.gated_rms_norm`,
`ref.sigmoid_gate`."""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.core.units import ceil_div
from packhorse.kernels.cuda.launch import has_type, launch, min_arch
from packhorse.kernels.cuda.nvrtc import Variant

MAX_DIM = 512
"""Values of a head at most."""
_WARPS = 8
_GATES = {None: 0, "silu": 1, "sigmoid": 2}


def variant(dtype: torch.dtype, *, fp32: bool, norm: bool, gate: str | None) -> Variant:
    """The kernel into `dtype`, fp16 or bf16, from that or fp32; gate: what is done to it, "silu" or "sigmoid"."""
    bf16 = dtype == torch.bfloat16
    defines = (("BF16", int(bf16)), ("X32", int(fp32)), ("NORM", int(norm)), ("GATE", _GATES[gate]))
    return Variant("norm/heads.cu", "head_rows", defines, min_arch=min_arch(dtype))


def fits(x: Tensor, gate: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether `head_rows` is for x [T, heads, D] and a gate of that shape: on a card, heads side by side, groups of
    four values on the bytes that they are read by."""
    if not has_type(x.device, dtype) or x.ndim != 3 or x.dtype not in (torch.float32, dtype):
        return False
    return all(
        part.shape == x.shape
        and part.shape[2] % 4 == 0
        and part.shape[2] <= MAX_DIM
        and part.stride()[1:] == (part.shape[2], 1)
        and not (part.stride(0) % 4 or part.data_ptr() % (4 * part.element_size()))
        for part in (x, gate)
        if part is not None
    ) and (gate is None or gate.dtype == dtype)


def head_rows(
    x: Tensor,
    dtype: torch.dtype,
    *,
    weight: Tensor | None = None,
    eps: float = 0.0,
    gate: Tensor | None = None,
    act: str = "silu",
) -> Tensor:
    """x [T, heads, D], normed if there is a weight [D] fp32, times act(gate) if there is a gate: contiguous, in
    `dtype`, with one rounding."""
    assert fits(x, gate, dtype) and (weight is None or weight.dtype == torch.float32)
    num_tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    kernel = variant(
        dtype, fp32=x.dtype == torch.float32, norm=weight is not None, gate=None if gate is None else act
    )
    steps = (x.stride(0), 0 if gate is None else gate.stride(0))
    args = (x, gate, weight, out, *steps, num_tokens * heads, heads, dim, eps)
    launch(kernel, (ceil_div(num_tokens * heads, _WARPS),), 32 * _WARPS, *args, device=x.device)
    return out
