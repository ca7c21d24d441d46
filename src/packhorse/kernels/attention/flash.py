"""Attention through the library kernels of torch that return the log-sum-exp which merging needs.

The CPU has one for each type. A card has flash attention from sm_80 and a memory-efficient kernel before that,
both for 16 bits only; Hopper also cuDNN's, twice as fast for many queries. None is public API: where this torch lacks
one, `fits` says no and `ref` stands in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from packhorse.core.protocols import Segment
from packhorse.kernels.attention.merge import merger_for
from packhorse.kernels.attention.ref import Merger, group_rows, ungroup_rows
from packhorse.kernels.cuda.launch import card_arch

PACK_QUERIES = 64
"""From so many queries on, K and V are worth a copy that puts each head's keys side by side."""

PARTS, PART_LEN = 4, 256
"""One query over at least PARTS * PART_LEN keys is cut into so many parts: the kernel spreads heads over the
threads, and with few key/value heads some would stand idle."""

_on_cpu: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_on_ampere: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention", None)
_on_turing: Any = getattr(torch.ops.aten, "_scaled_dot_product_efficient_attention", None)
_on_hopper: Any = getattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", None)

CUDNN_GRID = 1024
"""cuDNN makes a plan for each new shape, which takes long: only shapes of whole multiples, which come again."""
CUDNN_ROWS = 1 << 14
"""Rows of queries, over all heads, from which on it keeps a card busy: it cuts no keys into parts."""
CUDNN_VERSION = 91_900
"""The one that was tried: nothing stands in where an older one refuses a shape."""


def fits(q: Tensor) -> bool:
    """Whether there is a library kernel for q's device and type."""
    if q.device.type == "cpu":
        return _on_cpu is not None
    if q.dtype == torch.float32:
        return False
    return (_on_ampere if _has_flash(q) else _on_turing) is not None


def _has_flash(q: Tensor) -> bool:
    return card_arch(q.device) >= 80


def _has_cudnn(q: Tensor, k: Tensor) -> bool:
    """Whether cuDNN's kernel is there for these shapes, [B, H, T, D] and [B, H, S, D]."""
    if _on_hopper is None or q.shape[-1] % 8 or q.shape[-2] % CUDNN_GRID or k.shape[-2] % CUDNN_GRID:
        return False
    if q.shape[:-1].numel() < CUDNN_ROWS:
        return False
    return card_arch(q.device) == 90 and (torch.backends.cudnn.version() or 0) >= CUDNN_VERSION


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q [B, H, T, D], k and v [B, H, S, D]: out [B, H, T, D] and log-sum-exp [B, H, T] fp32."""
    if q.device.type == "cpu":
        out, lse = _on_cpu(q, k, v, 0.0, causal, scale=scale)
    elif _has_cudnn(q, k):
        out, lse = _on_hopper(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
        lse = lse.view(q.shape[:-1])
    elif _has_flash(q):
        out, lse = _on_ampere(q, k, v, 0.0, causal, scale=scale)[:2]
    else:
        out, lse = _on_turing(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
    # The memory-efficient kernel fills rows up.
    return out, lse[..., : q.shape[2]]


def attention(q: Tensor, segments: Iterable[Segment], position: int, scale: float) -> Tensor:
    """As `ref.attention`, in q's dtype, which must be the dtype of the stored K and V.

    Keys before the span go in one unmasked call a segment with the query heads of a group as rows, so K and V
    are read once; the span's own keys go in one causal call.
    """
    num_tokens, num_heads, _ = q.shape
    if num_tokens == 1:
        return _one_query(q, segments, scale)
    merger = merger_for(q)
    grouped: Tensor | None = None
    own: list[tuple[Tensor, Tensor]] = []
    for start, k, v in segments:
        past = min(max(position - start, 0), k.shape[0])
        if past:
            grouped = group_rows(q, k.shape[1])[None] if grouped is None else grouped
            past_k, past_v = _heads(k[:past]), _heads(v[:past])
            if num_tokens >= PACK_QUERIES and q.device.type == "cpu":
                past_k, past_v = past_k.contiguous(), past_v.contiguous()
            out, lse = (
                x[0].unflatten(1, (-1, num_tokens)) for x in _flash(grouped, past_k, past_v, False, scale)
            )
            if isinstance(merger, Merger):
                out, lse = out.flatten(0, 1), lse.flatten(0, 1)
            merger.add(out, lse)
        if past < k.shape[0]:
            own.append((k[past:], v[past:]))
    if own:
        k, v = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*own, strict=True))
        groups = num_heads // k.shape[1]
        k, v = (_heads(x).repeat_interleave(groups, dim=1) for x in (k, v))
        out, lse = _flash(q.transpose(0, 1)[None], k, v, True, scale)
        merger.add(out[0], lse[0])
    return ungroup_rows(merger.result, num_tokens)


def _one_query(q: Tensor, segments: Iterable[Segment], scale: float) -> Tensor:
    """q [1, Hq, D], which sees every key: nothing to mask. [1, Hq, D] fp32."""
    outs, lses = [], []
    for _, k, v in segments:
        rows = group_rows(q, k.shape[1])[None]
        part_len = k.shape[0] // PARTS // PART_LEN * PART_LEN
        split = PARTS * part_len
        if split:
            keys, values = (x[:split].unflatten(0, (PARTS, part_len)).transpose(1, 2) for x in (k, v))
            out, lse = _flash(rows.expand(PARTS, -1, -1, -1), keys, values, False, scale)
            outs.append(out)
            lses.append(lse)
        if split < k.shape[0]:
            out, lse = _flash(rows, _heads(k[split:]), _heads(v[split:]), False, scale)
            outs.append(out)
            lses.append(lse)
    out, lse = torch.cat(outs).float(), torch.cat(lses)
    if out.shape[0] > 1:
        out = (out * lse.softmax(0)[..., None]).sum(0, keepdim=True)
    return ungroup_rows(out[0], 1)


def _heads(x: Tensor) -> Tensor:
    """[S, Hkv, D] -> [1, Hkv, S, D], a view."""
    return x.transpose(0, 1)[None]
