"""Causal attention of a span's queries over stored K and V, segment by segment.

Partial results of segments are merged by log-sum-exp, so memory depends on the segment length and not on
the context. Letters: T queries, S keys of a segment, Hq, Hkv heads, G = Hq / Hkv, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from packhorse.core.protocols import Segment

EXACT_SEGMENT_LEN = 256
"""Keys exact mode multiplies at once: no segment is longer, and shorter ones are filled up with zeros."""


class Merger:
    """Running softmax over segments: add partial outputs with their log-sum-exp, read `result`."""

    def __init__(self) -> None:
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """out [..., D] normalised within its segment, lse [...] fp32 (-inf: saw no key)."""
        if self._out is None or self._lse is None:
            self._out, self._lse = out.float(), lse
            return
        total = torch.logaddexp(self._lse, lse)
        floor = _finite(total)
        old, new = (self._lse - floor).exp(), (lse - floor).exp()
        self._out = self._out * old[..., None] + out.float() * new[..., None]
        self._lse = total

    @property
    def result(self) -> Tensor:
        """The merged output, fp32. At least one segment must have been added."""
        assert self._out is not None
        return self._out


def _finite(lse: Tensor) -> Tensor:
    """lse with -inf replaced: a row that saw no key has weights 0, not NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def group_rows(q: Tensor, num_kv: int) -> Tensor:
    """[T, Hq, D] -> [Hkv, G * T, D], rows ordered (group, token): query heads that share K and V together."""
    num_tokens, num_heads, head_dim = q.shape
    return q.transpose(0, 1).reshape(num_kv, num_heads // num_kv * num_tokens, head_dim)


def ungroup_rows(out: Tensor, num_tokens: int) -> Tensor:
    """The inverse of group_rows."""
    return out.reshape(-1, num_tokens, out.shape[-1]).transpose(0, 1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, keys: range, positions: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """q [Hkv, R, D] at positions [R] over k, v [S, Hkv, D], of which the first are those at positions `keys`
    and the rest padding: out and lse, fp32."""
    scores = (q @ k.float().permute(1, 2, 0)) * scale
    at = torch.arange(keys.start, keys.start + k.shape[0], device=q.device)
    hidden = (at[None, :] > positions[:, None]) | (at >= keys.stop)
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    return (scores - _finite(lse)[..., None]).exp() @ v.float().transpose(0, 1), lse


def attention(q: Tensor, segments: Iterable[Segment], position: int, scale: float) -> Tensor:
    """q [T, Hq, D] at positions position .. position + T, over segments in order: [T, Hq, D] fp32.

    A query sees the keys at or before its own position.
    """
    num_tokens, num_heads, _ = q.shape
    merger = Merger()
    positions = torch.arange(position, position + num_tokens, device=q.device)
    for start, k, v in segments:
        num_kv = k.shape[1]
        rows = positions.repeat(num_heads // num_kv)
        keys = range(start, start + k.shape[0])
        merger.add(*_attend(group_rows(q.float(), num_kv), k, v, keys, rows, scale))
    return ungroup_rows(merger.result, num_tokens)


def exact_attention(q: Tensor, segments: Iterable[Segment], position: int, scale: float) -> Tensor:
    """As `attention`, over keys filled up to EXACT_SEGMENT_LEN with zeros: with T always the same, every
    product has one shape, and a query's bits do not depend on how many keys have been written after it."""
    num_tokens, num_heads, head_dim = q.shape
    merger = Merger()
    positions = torch.arange(position, position + num_tokens, device=q.device)
    for start, k, v in segments:
        num_kv = k.shape[1]
        full = k.new_zeros(2, EXACT_SEGMENT_LEN, num_kv, head_dim, dtype=torch.float32)
        full[0, : k.shape[0]], full[1, : k.shape[0]] = k, v
        rows = positions.repeat(num_heads // num_kv)
        keys = range(start, start + k.shape[0])
        merger.add(*_attend(group_rows(q.float(), num_kv), full[0], full[1], keys, rows, scale))
    return ungroup_rows(merger.result, num_tokens)
