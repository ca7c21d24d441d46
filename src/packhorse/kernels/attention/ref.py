"""Causal attention of a span's queries over stored K and V, segment by segment.

Partial results of segments are merged by log-sum-exp, so memory depends on the segment length and not on
the context. Letters: T queries, S keys of a segment, Hq, Hkv heads, G = Hq / Hkv, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from packhorse.core.protocols import Segment
from packhorse.core.types import EXACT_ROWS

EXACT_SEGMENT_LEN = 256
"""Keys exact mode multiplies at once; shorter segments are filled up with zeros."""


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
    q: Tensor, k: Tensor, v: Tensor, start: int, positions: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """q [Hkv, R, D] with positions [R] over k, v [S, Hkv, D] of positions from start: out and lse, fp32."""
    scores = (q @ k.float().permute(1, 2, 0)) * scale
    keys = torch.arange(start, start + k.shape[0], device=q.device)
    scores = scores.masked_fill(keys[None, :] > positions[:, None], float("-inf"))
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
        merger.add(*_attend(group_rows(q.float(), num_kv), k, v, start, rows, scale))
    return ungroup_rows(merger.result, num_tokens)


def exact_attention(q: Tensor, segments: Iterable[Segment], position: int, scale: float) -> Tensor:
    """As `attention`, in products of fixed shape: EXACT_ROWS queries at absolute multiples of EXACT_ROWS over
    EXACT_SEGMENT_LEN keys, so that a query's bits do not depend on which others came with it."""
    num_tokens, num_heads, head_dim = q.shape
    first = position // EXACT_ROWS * EXACT_ROWS
    num_buckets = -(-(position + num_tokens - first) // EXACT_ROWS)
    padded = q.new_zeros(num_buckets * EXACT_ROWS, num_heads, head_dim, dtype=torch.float32)
    inside = slice(position - first, position - first + num_tokens)
    padded[inside] = q
    mergers = [Merger() for _ in range(num_buckets)]
    for start, k, v in segments:
        num_kv = k.shape[1]
        full_k = k.new_zeros(EXACT_SEGMENT_LEN, num_kv, head_dim, dtype=torch.float32)
        full_v = torch.zeros_like(full_k)
        full_k[: k.shape[0]], full_v[: v.shape[0]] = k, v
        for index, merger in enumerate(mergers):
            low = first + index * EXACT_ROWS
            if start < low + EXACT_ROWS:
                rows = padded[index * EXACT_ROWS : (index + 1) * EXACT_ROWS]
                positions = torch.arange(low, low + EXACT_ROWS, device=q.device)
                positions = positions.repeat(num_heads // num_kv)
                grouped = group_rows(rows, num_kv).contiguous()
                merger.add(*_attend(grouped, full_k, full_v, start, positions, scale))
    return torch.cat([ungroup_rows(m.result, EXACT_ROWS) for m in mergers])[inside]
