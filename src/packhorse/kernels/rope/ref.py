"""Rotary embedding over the first `rotary_dim` dims of each head, rotate-half form.

Kinds of frequencies as in the YaRN paper (arXiv 2309.00071) and the Llama 3.1 release.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from packhorse.facts.model import RopeFacts


def frequencies(rope: RopeFacts) -> tuple[Tensor, float]:
    """Inverse frequencies [rotary_dim / 2] in fp32, and the factor for cos and sin."""
    dims = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float()
    base = 1.0 / (rope.theta ** (dims / rope.rotary_dim))
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(base, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(base, rope), _yarn_attention_factor(rope)
    return base, 1.0


def _llama3(base: Tensor, rope: RopeFacts) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    assert rope.original_context is not None
    wavelen = 2 * math.pi / base
    low = rope.original_context / rope.low_freq_factor
    high = rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / wavelen - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * base / rope.factor + blend * base
    out = torch.where(wavelen > low, base / rope.factor, base)
    return torch.where((wavelen <= low) & (wavelen >= high), blended, out)


def _yarn(base: Tensor, rope: RopeFacts) -> Tensor:
    """Dims that turn often within the original window keep their frequency; slow ones are interpolated."""
    assert rope.original_context is not None
    window = rope.original_context

    def dim_of(turns: float) -> float:
        span = window / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(span) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(base.shape[0], dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return base / rope.factor * (1 - keep) + base * keep


def _yarn_attention_factor(rope: RopeFacts) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def cos_sin(positions: Tensor, inv_freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, rotary_dim / 2], fp32, of integer positions [T]."""
    angles = positions.float()[:, None] * inv_freq
    return (angles.cos() * factor)[:, None], (angles.sin() * factor)[:, None]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D] by cos, sin [T, 1, R / 2], in fp32, back in x's dtype; dims from R on pass."""
    half = cos.shape[-1]
    x1, x2, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)
