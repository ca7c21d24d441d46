"""What surrounds the grouped products of many tokens' experts on a card: `combine.cu`.

Letters as in `ref`; twins: `ref.swiglu`, and the sum over ranks in `grouped.ranked_sum`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.core.units import ceil_div
from packhorse.kernels.cuda.launch import has_type, launch, min_arch, saturated
from packhorse.kernels.cuda.nvrtc import Variant

_THREADS = 256
_EIGHT = 8
"""Values that a thread takes: a row has a multiple of it."""


def variants(dtype: torch.dtype) -> tuple[Variant, Variant]:
    """The kernels of `swiglu` and of `combine` for rows of `dtype`, fp16 or bf16."""
    defines, arch = (("BF16", int(dtype == torch.bfloat16)),), min_arch(dtype)
    return (
        Variant("experts/combine.cu", "swiglu", defines, min_arch=arch),
        Variant("experts/combine.cu", "combine", defines, min_arch=arch),
    )


def fits(rows: Tensor, width: int) -> bool:
    """Whether the kernels are for these rows, of 16 bits on a card, and results of `width` values."""
    return has_type(rows.device, rows.dtype) and width % _EIGHT == 0


def swiglu(gate_up: Tensor) -> Tensor:
    """[R, 2 I] (gate first), I a multiple of 8 -> silu(gate) * up, [R, I], one rounding. What 16 bits cannot hold
    becomes their largest value and is counted in `launch.saturated`."""
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    count, device = out.numel() // _EIGHT, out.device
    if count:
        args = (gate_up, out, saturated(device), out.shape[1] // _EIGHT, count)
        launch(variants(out.dtype)[0], (ceil_div(count, _THREADS),), _THREADS, *args, device=device)
    return out


def combine(results: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Sum over ranks k of weights[t, k] * results[places[t, k]], by rank: [T, H] fp32.

    results [R, H] 16-bit, contiguous, H a multiple of 8; places int64 and weights fp32 [T, K].
    """
    (num_tokens, top_k), hidden = places.shape, results.shape[1]
    assert results.is_contiguous() and places.dtype == torch.int64 and weights.dtype == torch.float32
    out = torch.empty(num_tokens, hidden, device=results.device)
    grid = (num_tokens, ceil_div(hidden // _EIGHT, _THREADS))
    args = (results, places.contiguous(), weights.contiguous(), out, top_k, hidden // _EIGHT)
    launch(variants(results.dtype)[1], grid, _THREADS, *args, device=out.device)
    return out
