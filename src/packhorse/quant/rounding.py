"""From values to few-bit codes with the least squared error that a scale a group allows."""

from __future__ import annotations

import torch
from torch import Tensor

_STEPS = 16
_LEAST = torch.finfo(torch.float16).tiny
_LOWEST = 0.6
"""Least scale tried, over the one that reaches the largest value: below, what is cut off outweighs the rest."""


def round_groups(weight: Tensor, bits: int, group_len: int) -> tuple[Tensor, Tensor]:
    """Symmetric codes of weight [N, K], K a multiple of group_len: uint8 [N, K] and fp16 scales [N, G].

    _STEPS scales are tried. For the codes q of each, the scale of least squared error is (w q) / (q q), and takes
    (w q)^2 / (q q) off the error; the scale that takes most is kept, and the codes are those nearest under it. The
    same values give the same bits whatever the number of threads.
    """
    top = 2 ** (bits - 1) - 1
    groups = weight.float().unflatten(-1, (-1, group_len))
    # A group of zeros gets the least scale that fp16 holds as a normal number.
    reach = groups.abs().amax(-1, keepdim=True).clamp_min(top * _LEAST) / top
    best, most = reach, torch.full_like(reach, -1.0)
    for step in range(_STEPS):
        inverse = 1 / (reach * (1 - (1 - _LOWEST) * step / (_STEPS - 1)))
        q = (groups * inverse).round_().clamp_(-top - 1, top)
        product, squares = (groups * q).sum(-1, keepdim=True), q.square_().sum(-1, keepdim=True).clamp_min_(1)
        gain = product.square() / squares
        best, most = torch.where(gain > most, product / squares, best), torch.maximum(gain, most)
    scales = best.clamp_min(_LEAST).half()
    codes = (groups / scales.float()).round_().clamp_(-top - 1, top).add_(top + 1)
    return codes.to(torch.uint8).flatten(-2), scales.squeeze(-1)


def nibbles(codes: Tensor) -> Tensor:
    """Codes of 4 bits [.., K] two a byte, the first in the low bits: uint8 [.., K / 2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)
