"""Attention on the CPU through torch's flash kernel, which returns the log-sum-exp that merging needs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from packhorse.core.protocols import Segment
from packhorse.kernels.attention.ref import Merger, group_rows, ungroup_rows

PACK_QUERIES = 64
"""From so many queries on, K and V are worth a copy that puts each head's keys side by side."""

PARTS, PART_LEN = 4, 256
"""One query over at least PARTS * PART_LEN keys is cut into so many parts: the kernel spreads heads over the
threads, and with few key/value heads some would stand idle."""

_flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
available = _flash is not None
"""Whether this torch has the kernel: it is not public API, and `ref` stands in where it is gone."""


def attention(q: Tensor, segments: Iterable[Segment], position: int, scale: float) -> Tensor:
    """As `ref.attention`, in q's dtype, which must be the dtype of the stored K and V.

    Keys before the span go in one unmasked call a segment with the query heads of a group as rows, so K and V
    are read once; the span's own keys go in one causal call.
    """
    assert _flash is not None
    num_tokens, num_heads, _ = q.shape
    if num_tokens == 1:
        return _one_query(q, segments, scale)
    merger = Merger()
    own: list[tuple[Tensor, Tensor]] = []
    for start, k, v in segments:
        past = min(max(position - start, 0), k.shape[0])
        if past:
            rows = group_rows(q, k.shape[1])[None]
            past_k, past_v = _heads(k[:past]), _heads(v[:past])
            if num_tokens >= PACK_QUERIES:
                past_k, past_v = past_k.contiguous(), past_v.contiguous()
            out, lse = _flash(rows, past_k, past_v, 0.0, False, scale=scale)
            merger.add(out[0].reshape(num_heads, num_tokens, -1), lse[0].reshape(num_heads, num_tokens))
        if past < k.shape[0]:
            own.append((k[past:], v[past:]))
    if own:
        k, v = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*own, strict=True))
        groups = num_heads // k.shape[1]
        k, v = (_heads(x).repeat_interleave(groups, dim=1) for x in (k, v))
        out, lse = _flash(q.transpose(0, 1)[None], k, v, 0.0, True, scale=scale)
        merger.add(out[0], lse[0])
    return ungroup_rows(merger.result, num_tokens)


def _one_query(q: Tensor, segments: Iterable[Segment], scale: float) -> Tensor:
    """q [1, Hq, D], which sees every key: nothing to mask. [1, Hq, D] fp32."""
    assert _flash is not None
    outs, lses = [], []
    for _, k, v in segments:
        rows = group_rows(q, k.shape[1])[None]
        part_len = k.shape[0] // PARTS // PART_LEN * PART_LEN
        split = PARTS * part_len
        if split:
            parts = (x[:split].unflatten(0, (PARTS, part_len)).transpose(1, 2) for x in (k, v))
            out, lse = _flash(rows.expand(PARTS, -1, -1, -1), *parts, 0.0, False, scale=scale)
            outs.append(out)
            lses.append(lse)
        if split < k.shape[0]:
            out, lse = _flash(rows, _heads(k[split:]), _heads(v[split:]), 0.0, False, scale=scale)
            outs.append(out)
            lses.append(lse)
    out, lse = torch.cat(outs).float(), torch.cat(lses)
    if out.shape[0] > 1:
        out = (out * lse.softmax(0)[..., None]).sum(0, keepdim=True)
    return ungroup_rows(out[0], 1)


def _heads(x: Tensor) -> Tensor:
    """[S, Hkv, D] -> [1, Hkv, S, D], a view."""
    return x.transpose(0, 1)[None]
