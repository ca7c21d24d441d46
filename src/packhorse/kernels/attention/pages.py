"""K and V of many tokens out of pages of codes and into them, on a card: `pages.cu`. Twin: `quant.codec.GroupPages`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from packhorse.core.types import PAGE_LEN
from packhorse.core.units import ceil_div
from packhorse.kernels.attention.cuda import CODECS, HEAD_DIMS
from packhorse.kernels.cuda.launch import has_type, launch, min_arch
from packhorse.kernels.cuda.nvrtc import Variant
from packhorse.quant.codec import GroupCodec

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_THREADS = 256
_WARPS = _THREADS // 32


def variants(codec: str, head_dim: int, dtype: torch.dtype) -> dict[str, Variant]:
    """The kernels by name, for k5v4 or k4v4 and what is read in `dtype`, fp16 or bf16."""
    defines = (("CODEC", CODECS[codec]), ("HEAD_DIM", head_dim), ("BF16", int(dtype == torch.bfloat16)))
    names = ("read_pages", "write_pages")
    return {name: Variant("attention/pages.cu", name, defines, min_arch=min_arch(dtype)) for name in names}


def fits(codec: GroupCodec, device: torch.device) -> bool:
    """Whether there are kernels for pages of `codec` there: on a card, read in 16 bits."""
    known = codec.page_len == PAGE_LEN and codec.head_dim in HEAD_DIMS
    return known and has_type(device, codec.read_dtype)


class CardPages:
    """`quant.codec.CodecPages` of a codec that `fits`. pages: uint8 [N, page_bytes], of one layer.

    Bytes and values are those of `quant.codec.GroupPages`, but for the bits of a NaN and the sign of the scale of 32
    zeros of either sign.
    """

    __slots__ = ("_dtype", "_heads", "_pages", "_variants")

    def __init__(self, codec: GroupCodec, pages: Tensor) -> None:
        assert fits(codec, pages.device) and pages.shape[1] == codec.page_bytes and pages.is_contiguous()
        self._dtype, self._pages = codec.read_dtype, pages
        self._heads = (codec.num_kv_heads, codec.head_dim)
        self._variants = variants(codec.name, codec.head_dim, codec.read_dtype)

    def write(self, page_ids: Sequence[int], start: int, k: Tensor, v: Tensor) -> None:
        """See CodecPages; at least one token."""
        num_tokens, num_heads, dim = k.shape
        assert v.shape == k.shape and (num_heads, dim) == self._heads
        k, v = (x if x.stride()[1:] == (dim, 1) else x.contiguous() for x in (k, v))
        ids, first = self._place(page_ids)
        launch(
            self._variants["write_pages"],
            (ceil_div(num_tokens, _WARPS), 2 * num_heads),
            _THREADS,
            *(self._pages, ids, k, v, k.stride(0), v.stride(0), _TYPES[k.dtype], _TYPES[v.dtype]),
            *(first, start, num_tokens, num_heads),
            device=self._pages.device,
        )

    def read(self, page_ids: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """See CodecPages; at least one token. New tensors, contiguous."""
        skipped = start // PAGE_LEN
        ids, first = self._place(page_ids[skipped : ceil_div(stop, PAGE_LEN)])
        device = self._pages.device
        k, v = torch.empty(2, stop - start, *self._heads, dtype=self._dtype, device=device).unbind()
        launch(
            self._variants["read_pages"],
            (ceil_div(stop, PAGE_LEN) - skipped, self._heads[0]),
            _THREADS,
            *(self._pages, ids, k, v, first, start - skipped * PAGE_LEN, stop - start, self._heads[0]),
            device=device,
        )
        return k, v

    def _place(self, page_ids: Sequence[int]) -> tuple[Tensor | None, int]:
        """Pages as the kernels take them: ids int32, or the first where they are consecutive."""
        if isinstance(page_ids, range):
            return None, page_ids.start
        return torch.tensor(page_ids, dtype=torch.int32, device=self._pages.device), 0

    @property
    def counts(self) -> dict[str, int]:
        """Nothing is counted: scales follow the values."""
        return {}
