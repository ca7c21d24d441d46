"""torch's int4 product of the CPU: 4-bit groups in bf16, in torch's own layout, which replaces the packed one.

Its scales are bf16 pairs (scale, value of code 8) a group, so a weight may be off by 2^-9 of itself, about what bf16
activations lose as well. The reference is kernels.linear.packed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from packhorse.core.formats import TILE_ROWS
from packhorse.quant.packed import SLICE_LEN, PackedTensor, unpack_blocks

_BLOCK = 64
"""Rows that torch's layout keeps together."""


@dataclass(frozen=True)
class Int4Weight:
    """codes: uint8 [L, N, K / 2]. scales: bf16 [L, G, N, 2]. L: experts, or none."""

    codes: Tensor
    scales: Tensor
    group_len: int

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + 2 * self.scales.numel()

    def __len__(self) -> int:
        return self.codes.shape[0]

    def __getitem__(self, index: int) -> Int4Weight:
        """One expert's, a view."""
        return Int4Weight(self.codes[index], self.scales[index], self.group_len)


def from_packed(packed: PackedTensor) -> Int4Weight:
    """A packed matrix that `PackedFormat.has_int4_product` names, or one for each expert, in slices."""
    form, N, K = packed.format, packed.num_rows, packed.num_cols
    lead = packed.data.shape[:-2]
    codes = torch.empty(*lead, N, K // 2, dtype=torch.uint8)
    scales = torch.empty(*lead, K // form.group_len, N, 2, dtype=torch.bfloat16)
    step = max(1, SLICE_LEN // (K * _BLOCK)) * _BLOCK
    experts = [(packed.data, codes, scales)] if not lead else zip(packed.data, codes, scales, strict=True)
    for data, to_codes, to_scales in experts:
        for start in range(0, N, step):
            stop = min(start + step, N)
            part = unpack_blocks(form, data[start // TILE_ROWS : stop // TILE_ROWS], K)
            to_codes[start:stop] = torch._convert_weight_to_int4pack_for_cpu(part.codes.int(), 1)
            scale = part.scales.float()
            if part.supers is not None:
                scale = scale * part.supers.float().repeat_interleave(
                    form.block_cols // form.group_len, dim=-1
                )
            if part.offsets is None:
                middle = torch.zeros_like(scale)
            elif form.kind == "zero":
                middle = (8 - part.offsets.float()) * scale
            elif part.super_offsets is not None:
                lows = part.super_offsets.float().repeat_interleave(form.block_cols // form.group_len, dim=-1)
                middle = 8 * scale - lows * part.offsets.float()
            else:
                middle = 8 * scale + part.offsets.float()
            to_scales[:, start:stop] = torch.stack((scale.t(), middle.t()), dim=-1)
    return Int4Weight(codes, scales, form.group_len)


def linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """x [T, K] bf16 times the weight [N, K] transposed, plus bias [N]: [T, N] bf16."""
    out = torch._weight_int4pack_mm_for_cpu(x.contiguous(), weight.codes, weight.group_len, weight.scales)
    return out if bias is None else out + bias
