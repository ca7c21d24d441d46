"""Random packed matrices of every format, for the tests of the CPU and of a card."""

from __future__ import annotations

import torch

from packhorse.core.formats import PackedFormat
from packhorse.core.units import ceil_div
from packhorse.quant.packed import Codes


def random_codes(form: PackedFormat, rows: int, cols: int, seed: int, lead: tuple[int, ...] = ()) -> Codes:
    """Any codes with any scales the format can hold."""
    gen = torch.Generator().manual_seed(seed)

    def integers(width: int, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, (*lead, rows, width), generator=gen).to(dtype)

    def floats(width: int) -> torch.Tensor:
        return torch.randn(*lead, rows, width, generator=gen).half()

    groups = ceil_div(cols, form.group_len)
    q = integers(cols, 0, 2**form.bits, torch.uint8)
    if form.kind == "fp8":
        q[(q & 127) == 127] = 0  # the two codes that are NaN
        return Codes(q, floats(groups).float())
    if form.kind == "k":
        sub = [integers(groups, 0, 64, torch.uint8) for _ in range(2)]
        return Codes(q, *sub, floats(cols // 256), floats(cols // 256))
    if form.kind == "q6_k":
        return Codes(q, integers(groups, -128, 128, torch.int8), None, floats(cols // 256))
    if form.kind == "zero":
        return Codes(q, floats(groups), integers(groups, 0, 2**form.bits + 1, torch.int64).half())
    return Codes(q, floats(groups), floats(groups) if form.kind == "min" else None)


def columns_for(form: PackedFormat, wanted: int) -> int:
    """The next number of columns from `wanted` on that the format can hold."""
    return next(cols for cols in range(wanted, wanted + 257) if form.fits(cols))
