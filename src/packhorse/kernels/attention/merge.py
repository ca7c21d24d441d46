"""Merging of segments on a card: `merge.cu`. Twin: `ref.Merger`."""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.core.units import ceil_div
from packhorse.kernels.attention.ref import Merger
from packhorse.kernels.cuda.launch import has_type, launch, min_arch
from packhorse.kernels.cuda.nvrtc import Variant

_THREADS = 256


def variant(dtype: torch.dtype) -> Variant:
    """The kernel for segments' outputs of `dtype`, fp16 or bf16."""
    bf16 = dtype == torch.bfloat16
    return Variant("attention/merge.cu", "merge_segment", (("BF16", int(bf16)),), min_arch=min_arch(dtype))


def merger_for(q: Tensor) -> Merger | CardMerger:
    """What merges the segments of queries q [..., D]: on a card one kernel a segment."""
    return CardMerger() if has_type(q.device, q.dtype) and q.shape[-1] % 8 == 0 else Merger()


class CardMerger:
    """`ref.Merger` for 16-bit outputs on a card, merged in place; D is a multiple of 8."""

    def __init__(self) -> None:
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """out [Hq, T, D], or [Hkv, G, T, D] of grouped heads, 16 bits, as the library's kernel left it: only D must lie
        together, on 16 bytes. lse: the same without D, fp32."""
        if out.ndim == 3:
            out, lse = out[:, None], lse[:, None]
        num_kv, groups, num_tokens, dim = out.shape
        heads = num_kv * groups
        assert out.stride(-1) == 1 and out.data_ptr() % 16 == 0 and lse.dtype == torch.float32
        assert (
            dim % 8 == 0 and not any(step % 8 for step in out.stride()[:-1]) and lse.shape == out.shape[:-1]
        )
        if self._out is None:
            self._out = torch.empty(num_tokens, heads, dim, device=out.device)
        new_lse = torch.empty(num_tokens, heads, device=out.device)
        count = num_tokens * heads * dim // 8
        steps = (*out.stride()[:-1], *lse.stride())
        sizes = (groups, heads, dim // 8, count)
        args = (out, lse, self._out, self._lse, new_lse, *steps, *sizes)
        launch(variant(out.dtype), (ceil_div(count, _THREADS),), _THREADS, *args, device=out.device)
        self._lse = new_lse

    @property
    def result(self) -> Tensor:
        """The merged output [Hq, T, D] fp32, a view of [T, Hq, D]. At least one segment must have been added."""
        assert self._out is not None
        return self._out.transpose(0, 1)
