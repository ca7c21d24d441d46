"""How K and V are stored in pages. Outside this module and the kernels a page is `page_bytes` opaque bytes.

Shape letters: T tokens, S stored tokens, N pages, Hkv key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from packhorse.core.formats import COMPUTE_DTYPES, kv_token_bytes
from packhorse.core.units import ceil_div

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
assert set(_NAMES.values()) == set(COMPUTE_DTYPES)


@dataclass(frozen=True)
class PlainCodec:
    """K and V in the compute type. A page is [page_len, 2, Hkv, D]: token after token, K before V.

    Pages with consecutive ids therefore hold their tokens at one constant stride, and are read as one view
    without a copy. `version` changes whenever the bytes of a page come to mean something else.
    """

    dtype: torch.dtype
    num_kv_heads: int
    head_dim: int
    page_len: int
    version: int = 1

    def __post_init__(self) -> None:
        assert self.dtype in _NAMES, f"{self.dtype} is no compute type"

    @property
    def name(self) -> str:
        """The compute type's name: fp32, bf16 or fp16."""
        return _NAMES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return self.page_len * kv_token_bytes(self.name, self.num_kv_heads, self.head_dim)

    def bind(self, pages: Tensor) -> PlainPages:
        """Access to the pages of one layer. pages: uint8 [N, page_bytes], contiguous; never copied."""
        assert pages.shape[1] == self.page_bytes and pages.is_contiguous()
        return PlainPages(self, pages)


class PlainPages:
    """The pages of one layer, read and written in `PlainCodec`'s layout.

    `page_ids` are pages in the order of their tokens, and a token's place is counted from the first token of
    `page_ids[0]`. Give a `range` where ids are consecutive: then nothing is gathered.
    """

    __slots__ = ("_k", "_page_len", "_pages", "_v")

    def __init__(self, codec: PlainCodec, pages: Tensor) -> None:
        self._page_len = codec.page_len
        self._pages = pages.view(codec.dtype).view(-1, codec.page_len, 2, codec.num_kv_heads, codec.head_dim)
        rows = self._pages.flatten(0, 1)
        self._k, self._v = rows[:, 0], rows[:, 1]

    def write(self, page_ids: Sequence[int], start: int, k: Tensor, v: Tensor) -> None:
        """Store k and v, [T, Hkv, D] of any float type, as tokens start .. start + T."""
        length = k.shape[0]
        if isinstance(page_ids, range):
            row = page_ids.start * self._page_len + start
            self._k[row : row + length].copy_(k)
            self._v[row : row + length].copy_(v)
            return
        within = torch.arange(self._page_len, device=k.device)
        ids = torch.tensor(page_ids, device=k.device)
        rows = (ids[:, None] * self._page_len + within).flatten()[start : start + length]
        self._k.index_copy_(0, rows, k.to(self._k.dtype))
        self._v.index_copy_(0, rows, v.to(self._v.dtype))

    def read(self, page_ids: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of tokens start .. stop, each [stop - start, Hkv, D] in the codec's type.

        Views into the pages for a `range`, valid as long as nobody writes there; else a gathered copy of the
        same values with the same strides.
        """
        if isinstance(page_ids, range):
            row = page_ids.start * self._page_len
            return self._k[row + start : row + stop], self._v[row + start : row + stop]
        first = start // self._page_len
        ids = torch.tensor(page_ids[first : ceil_div(stop, self._page_len)], device=self._pages.device)
        rows = self._pages[ids].flatten(0, 1)[start - first * self._page_len : stop - first * self._page_len]
        return rows[:, 0], rows[:, 1]
