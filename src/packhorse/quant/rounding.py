"""From values to few-bit codes with the least squared error that a scale a group allows."""

from __future__ import annotations

import torch
from torch import Tensor

_STEPS = 16
_LOWEST = 0.6
"""Least scale tried, over the one that reaches the largest value: below, what is cut off outweighs the rest."""


def round_groups(weight: Tensor, bits: int, group_len: int) -> tuple[Tensor, Tensor]:
    """Symmetric codes of weight [N, K], K a multiple of group_len: uint8 [N, K] and fp16 scales [N, G].

    Of _STEPS scales the best is taken by its squared error, and refitted to its codes by least squares. A group of
    zeros gets the least scale that fp16 holds as a normal number. The same values give the same bits whatever the
    number of threads.
    """
    top = 2 ** (bits - 1) - 1
    groups = weight.float().unflatten(-1, (-1, group_len))
    reach = groups.abs().amax(-1, keepdim=True).clamp_min(top * torch.finfo(torch.float16).tiny) / top
    best, best_error = reach, torch.full_like(reach, torch.inf)
    for step in range(_STEPS):
        scale = reach * (1 - (1 - _LOWEST) * step / (_STEPS - 1))
        q = (groups / scale).round_().clamp_(-top - 1, top)
        fitted = _refit(groups, q, scale)
        error = (groups - _codes(groups, fitted, top) * fitted).square_().sum(-1, keepdim=True)
        better = error < best_error
        best, best_error = torch.where(better, fitted, best), torch.where(better, error, best_error)
    codes = _codes(groups, best, top) + (top + 1)
    return codes.to(torch.uint8).flatten(-2), best.squeeze(-1).half()


def _codes(groups: Tensor, scale: Tensor, top: int) -> Tensor:
    return (groups / scale).round_().clamp_(-top - 1, top)


def _refit(groups: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """The scale of least squared error for codes q, as fp16 will hold it; `scale` where all codes are 0."""
    squares = q.square().sum(-1, keepdim=True)
    fitted = (groups * q).sum(-1, keepdim=True) / squares.clamp_min(1)
    fitted = torch.where(squares > 0, fitted, scale)
    return fitted.clamp_min(torch.finfo(torch.float16).tiny).half().float()


def nibbles(codes: Tensor) -> Tensor:
    """Codes of 4 bits [.., K] two a byte, the first in the low bits: uint8 [.., K / 2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)
