"""Launch of `cuda.cu`: a delta-net step from its projections to what the output product reads.

Its twins: `conv.ref.causal_conv`, `ref.delta_steps` and `norm.ref`, as layers.delta_net puts them together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.core.errors import UsageError
from packhorse.kernels.cuda.launch import launch, min_arch
from packhorse.kernels.cuda.nvrtc import Variant

HEAD_DIMS = (32, 64, 128)


def variant(head_dim: int, taps: int, dtype: torch.dtype) -> Variant:
    """The kernel for key and value heads of `head_dim`, a convolution of `taps` and activations of `dtype`.

    Raises UsageError where there is none.
    """
    if head_dim not in HEAD_DIMS or dtype not in (torch.float16, torch.bfloat16):
        raise UsageError(
            f"The delta-rule kernel has no form for heads of {head_dim} dims in {dtype}.",
            hint=f"It takes heads of {', '.join(map(str, HEAD_DIMS))} dims, and fp16 or bf16.",
        )
    bf16 = dtype == torch.bfloat16
    defines = (("HEAD_DIM", head_dim), ("TAPS", taps), ("BF16", int(bf16)))
    return Variant("delta/cuda.cu", "delta_step", defines, min_arch=min_arch(dtype))


def delta_step(
    rows: Tensor,
    ba: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    eps: float,
    states: tuple[Tensor, Tensor],
    where: tuple[Tensor, Tensor, Tensor],
    turns: Tensor,
    out: Tensor,
    *,
    at_rest: bool = False,
) -> None:
    """New tokens of each sequence, 1 to 16 of them, through a delta-net layer; its states are read and written once.

    rows [R, C + Hv D]: q, k, v, z as `in_proj_qkvz` gives them, and ba [R, 2 Hv]: both fp32 or both of out's dtype,
    rows at any stride. weights, fp32: conv1d [C, K], A_log and dt_bias [Hv], norm [D]. states: conv [slots, C, K - 1]
    in out's dtype and recurrent [slots, Hv, D, D] fp32, slots at any stride, in place. where: int32 [B] each: first
    row, tokens (0: none), slot. turns: int32 [B, Hk], zeros, and zeros again after. out [R, Hv, D], fp16 or bf16:
    rms_norm(o) * norm * silu(z); rows of nobody stay as they are.

    at_rest: states and `where` are read before the launch before this one is over. Right where nothing that may still
    run then writes them: in a graph in which each layer comes once.
    """
    conv, recurrent = states
    num_v, head_dim = recurrent.shape[1:3]
    channels, taps = weights[0].shape
    num_k = (channels // head_dim - num_v) // 2
    assert channels == (2 * num_k + num_v) * head_dim == recurrent.shape[3] * (2 * num_k + num_v)
    assert rows.dtype == ba.dtype and rows.shape[1] == channels + num_v * head_dim and turns.shape[1] == num_k
    assert conv.dtype == out.dtype and conv.stride()[1:] == (taps - 1, 1)
    assert recurrent.stride()[1:] == (head_dim**2, head_dim, 1)
    launch(
        variant(head_dim, taps, out.dtype),
        (num_v, where[0].shape[0]),
        head_dim * head_dim // 16,
        *(rows, ba, *weights, *states, turns, *where, out, 2 * conv.stride(0), 4 * recurrent.stride(0), eps),
        *(rows.stride(0), ba.stride(0), int(rows.dtype == torch.float32), num_k, int(at_rest)),
        device=out.device,
        overlap=True,
    )
