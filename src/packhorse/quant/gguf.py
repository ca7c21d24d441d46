"""Codes and values of GGUF blocks, in torch. Bit for bit what the reference (gguf's dequantization) gives.

A block holds `block_len` values. `d` and `m` are its fp16 scale and minimum; K-quants have 256 values, and
sub-blocks with scales of their own in 4 or 6 bits. Block layouts: ggml's block structures.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from packhorse.core.errors import UnsupportedModelError, WeightsError
from packhorse.core.formats import PACKED, Format
from packhorse.quant.packed import Codes, values

SLICE_LEN = 1 << 18
"""Values unpacked at a time."""


def dequantize(data: Tensor, form: Format) -> Tensor:
    """fp32 [num_blocks * block_len] of `data`, uint8 [num_blocks * block_bytes].

    Raises UnsupportedModelError for a format that is none of GGUF's.
    """
    if form.name not in _UNPACK and form.name not in _CODES:
        known = ", ".join((*_UNPACK, *_CODES))
        hint = f"{known} are."
        raise UnsupportedModelError(f"{form.name} blocks are not supported.", hint=hint, format=form.name)
    blocks = data.view(-1, form.block_bytes)
    out = torch.empty(blocks.shape[0], form.block_len)
    # In slices, so that intermediate values stay in cache and never double a large tensor.
    step = max(1, SLICE_LEN // form.block_len)
    for part, place in zip(blocks.split(step), out.split(step), strict=True):
        if form.packed is not None:
            place.copy_(values(PACKED[form.packed], codes(part, form)))
        else:
            place.copy_(_UNPACK[form.name](part).view_as(place))
    return out.view(-1)


def _float16(blocks: Tensor, at: int) -> Tensor:
    """fp32 [B, 1] of the fp16 value at byte `at` of each block."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(data: Tensor, bits: int, group: int) -> Tensor:
    """uint8 values of `bits` bits: of each `group` bytes all lowest fields first, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device).view(1, 1, -1, 1)
    grouped = data.reshape(data.shape[0], -1, 1, group)
    return ((grouped >> shifts) & ((1 << bits) - 1)).reshape(data.shape[0], -1)


def _bits(data: Tensor) -> Tensor:
    """uint8 [B, 8n] of the bits of [B, n] bytes, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data.unsqueeze(-1) >> shifts) & 1).reshape(data.shape[0], -1)


def codes(rows: Tensor, form: Format) -> Codes:
    """The codes of rows of blocks, uint8 [N, bytes of a row], in the packed format that `form` names."""
    return _CODES[form.name](rows.reshape(-1, form.block_bytes)).each(
        lambda part: part.reshape(len(rows), -1)
    )


def check_scales(name: str, rows: Tensor, form: Format) -> None:
    """Raises WeightsError where a scale of the blocks of `rows`, as of `codes`, is not finite."""
    blocks = rows.view(-1, form.block_bytes)
    for place in _HALVES[form.name]:
        bad = int((~_half(blocks, place).isfinite()).sum())
        if bad:
            raise WeightsError(
                f"{name} holds {bad} blocks whose scales are not finite, of {len(blocks)}.",
                hint="The file is damaged or was exported from a broken run: fetch or export it again.",
                tensor=name,
            )


def _half(blocks: Tensor, at: int) -> Tensor:
    """fp16 [B, 1] at byte `at` of each block."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _q4_0(blocks: Tensor) -> Codes:
    return Codes(_fields(blocks[:, 2:], 4, 16), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Codes:
    return Codes(_fields(blocks[:, 4:], 4, 16), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Codes:
    return Codes(_fields(blocks[:, 6:], 4, 16) | (_bits(blocks[:, 2:6]) << 4), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Codes:
    q = _fields(blocks[:, 8:], 4, 16) | (_bits(blocks[:, 4:8]) << 4)
    return Codes(q, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Codes:
    return Codes(blocks[:, 2:] ^ 128, _half(blocks, 0))  # two's complement to 128 more


def _q2_k(blocks: Tensor) -> Tensor:
    """scales and minima 16 x (4 + 4 bits), values 256 x 2 bits, d, m."""
    scales = (_float16(blocks, 80) * (blocks[:, :16] & 15).float()).unsqueeze(-1)
    minima = (_float16(blocks, 82) * (blocks[:, :16] >> 4).float()).unsqueeze(-1)
    return scales * _fields(blocks[:, 16:80], 2, 32).view(-1, 16, 16).float() - minima


def _q3_k(blocks: Tensor) -> Tensor:
    """high bits 256 x 1 (set: nothing to take off), low 256 x 2, scales 16 x 6 bits, d."""
    packed = blocks[:, 96:108]
    scales = _fields(packed[:, :8], 4, 8) | (_fields(packed[:, 8:], 2, 4) << 4)
    scaled = (_float16(blocks, 108) * (scales.float() - 32)).unsqueeze(-1)
    high = _fields(blocks[:, :32], 1, 32)
    values = _fields(blocks[:, 32:96], 2, 32).float() - (4 - 4 * high.float())
    return scaled * values.view(-1, 16, 16)


def _scales_6bit(packed: Tensor) -> tuple[Tensor, Tensor]:
    """8 scales and 8 minima of 6 bits from 12 bytes [B, 12]: bytes 0-3 and 4-7 hold the first four of each
    and, on top, the two high bits of the last four, whose low nibbles are in bytes 8-11."""
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([low & 63, (rest & 15) | ((low >> 2) & 48)], dim=1)
    minima = torch.cat([high & 63, (rest >> 4) | ((high >> 2) & 48)], dim=1)
    return scales, minima


def _q4_k(blocks: Tensor) -> Codes:
    """d, dmin, scales and minima 8 x 6 bits, values 256 x 4 bits."""
    q = _fields(blocks[:, 16:], 4, 32)
    return Codes(q, *_scales_6bit(blocks[:, 4:16]), _half(blocks, 0), _half(blocks, 2))


def _q5_k(blocks: Tensor) -> Codes:
    """As Q4_K, with the fifth bits of the values before their low four."""
    q = _fields(blocks[:, 48:], 4, 32) | (_fields(blocks[:, 16:48], 1, 32) << 4)
    return Codes(q, *_scales_6bit(blocks[:, 4:16]), _half(blocks, 0), _half(blocks, 2))


def _q6_k(blocks: Tensor) -> Codes:
    """low 256 x 4 bits, high 256 x 2, scales 16 x int8, d."""
    q = _fields(blocks[:, :128], 4, 64) | (_fields(blocks[:, 128:192], 2, 32) << 4)
    return Codes(q, blocks[:, 192:208].contiguous().view(torch.int8), None, _half(blocks, 208))


def _q8_k(blocks: Tensor) -> Tensor:
    """fp32 d, values 256 x int8, and sums that only dot products use."""
    d = blocks[:, :4].contiguous().view(torch.float32)
    return d * blocks[:, 4:260].contiguous().view(torch.int8).float()


# Where a block has its fp16 scales.
_HALVES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,),
}  # fmt: skip
_CODES: dict[str, Callable[[Tensor], Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
_UNPACK: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda blocks: blocks.contiguous().view(torch.float32),
    "F16": lambda blocks: blocks.contiguous().view(torch.float16).float(),
    "BF16": lambda blocks: blocks.contiguous().view(torch.bfloat16).float(),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q8_K": _q8_k,
}
