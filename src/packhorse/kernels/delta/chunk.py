"""The gated delta rule of many tokens on a card: our kernels of chunk.cu, fp32 throughout."""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.core.cost import DELTA_SPAN_LEN, delta_scratch_floats
from packhorse.core.units import ceil_div
from packhorse.kernels.cuda.launch import launch, target_of
from packhorse.kernels.cuda.nvrtc import Variant
from packhorse.kernels.delta.ref import CHUNK_LEN

_SLICE = 32


def fits(k_dim: int, v_dim: int) -> bool:
    """Whether the kernels are made for heads of these dims."""
    return all(dim % _SLICE == 0 and 0 < dim <= 128 for dim in (k_dim, v_dim))


def variants(k_dim: int, v_dim: int, arch: int) -> tuple[Variant, Variant]:
    """The kernels over all chunks at once, and along them, for cards of compute capability `arch`."""
    # From 8.0 on one matrix is fetched while another is worked on.
    buffers = 2 if arch >= 80 else 1
    defines = (("DK", k_dim), ("DV", v_dim), ("BUFFERS", buffers))
    intra = 4 * (CHUNK_LEN * (k_dim + 4 + _SLICE + 1 + CHUNK_LEN + 1) + 3 * CHUNK_LEN)
    walk = 4 * (_SLICE * (k_dim + CHUNK_LEN) + buffers * CHUNK_LEN * max(k_dim, CHUNK_LEN))
    return (
        Variant("delta/chunk.cu", "delta_intra", defines, intra),
        Variant("delta/chunk.cu", "delta_walk", defines, walk),
    )


def delta_rule(
    mixed: Tensor, g: Tensor, beta: Tensor, state: Tensor, num_k_heads: int, out: Tensor | None = None
) -> Tensor:
    """mixed [T, 2 Hk Dk + Hv Dv]: q, k and v of all heads side by side, after the convolution, not normalised;
    g, beta [T, Hv]; state [Hv, Dk, Dv] in place; all fp32 on one card. Returns o [T, Hv, Dv], which is `out`
    if given, contiguous.

    q and k are normalised as in `layers.delta_net`. Scratch: cost.delta_scratch_floats for each
    chunk of DELTA_SPAN_LEN tokens and each value head.
    """
    heads, k_dim, v_dim = state.shape
    length, stride = mixed.shape[0], mixed.stride(0)
    assert mixed.stride(1) == 1 and g.is_contiguous() and beta.is_contiguous() and state.is_contiguous()
    if out is None:
        out = torch.empty(length, heads, v_dim, dtype=torch.float32, device=mixed.device)
    assert out.is_contiguous() and out.shape == (length, heads, v_dim)
    chunks = ceil_div(min(DELTA_SPAN_LEN, length), CHUNK_LEN)
    size = chunks * heads * delta_scratch_floats(k_dim, v_dim)
    scratch = torch.empty(size, device=mixed.device)
    intra, walk = variants(k_dim, v_dim, target_of(mixed.device).arch)
    for start in range(0, length, DELTA_SPAN_LEN):
        rows = slice(start, start + DELTA_SPAN_LEN)
        tokens = min(DELTA_SPAN_LEN, length - start)
        args = (mixed[rows], g[rows], beta[rows], scratch, tokens, stride, num_k_heads, heads)
        launch(intra, (ceil_div(tokens, CHUNK_LEN), heads), 256, *args, device=mixed.device)
        grid = (v_dim // _SLICE, heads)
        launch(walk, grid, 128, scratch, state, out[rows], tokens, heads, device=mixed.device)
    return out
