"""Packed matrices of random codes, and what the kernels over them have to give, against float64."""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.core.formats import PACKED, PackedFormat
from packhorse.core.units import ceil_div
from packhorse.quant.packed import Codes, PackedTensor, pack


def random_packed(
    name: str, num_rows: int, num_cols: int, seed: int = 0, lead: tuple[int, ...] = ()
) -> PackedTensor:
    """Random codes and scales, values about N(0, 0.03) in size; zeros, minima and sub-scales over all their range."""
    form = PACKED[name]
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, (*lead, num_rows, *shape), generator=generator)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand((*lead, num_rows, *shape), generator=generator) * (high - low) + low

    groups, supers = ceil_div(num_cols, form.group_len), ceil_div(num_cols, 256)
    size = 0.1 / 2**form.bits
    q = integers(0, 2**form.bits, num_cols).to(torch.uint8)
    if form.kind == "fp8":
        q = (
            torch.randn((*lead, num_rows, num_cols), generator=generator)
            .mul(30)
            .to(torch.float8_e4m3fn)
            .view(torch.uint8)
        )
        return pack(form, Codes(q, uniform(5e-4, 2e-3, groups)))
    if form.kind == "k":
        scales, minima = (integers(0, 64, groups).to(torch.uint8) for _ in range(2))
        d, dmin = uniform(0.01, 1, supers) * size / 20, uniform(0.01, 1, supers) * size / 4
        return pack(form, Codes(q, scales, minima, d.half(), dmin.half()))
    if form.kind == "q6_k":
        scales = integers(-128, 128, groups).to(torch.int8)
        return pack(form, Codes(q, scales, None, (uniform(0.01, 1, supers) * size / 40).half()))
    scales = (uniform(0.2, 1, groups) * size).half()
    if form.kind == "symmetric":
        return pack(form, Codes(q, scales))
    if form.kind == "zero":
        return pack(form, Codes(q, scales, integers(0, 2**form.bits, groups).half()))
    return pack(form, Codes(q, scales, uniform(-0.1, 0, groups).half()))


def to_device(packed: PackedTensor, device: str = "cuda") -> PackedTensor:
    return PackedTensor(packed.format, packed.data.to(device), packed.num_rows, packed.num_cols)


def values_are_rounded(form: PackedFormat) -> bool:
    """Whether the kernels put scales on values (one rounding to 16 bits) rather than on exact sums."""
    return form.kind in ("min", "k", "q6_k") or form.group_len < 64


def bound(form: PackedFormat, dtype: torch.dtype) -> float:
    """Error of a product in fp32, of its largest value: fp32 sums, and where values are rounded some roundings of
    16 bits, which partly cancel over a row."""
    if not values_are_rounded(form):
        return 1e-5
    return 2 * torch.finfo(dtype).eps


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())
