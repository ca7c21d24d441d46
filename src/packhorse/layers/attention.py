"""Grouped-query attention over paged KV, with what the families add: biases, q/k norms, an output gate."""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.core.protocols import KVView, LayerWeights
from packhorse.facts.model import ModelFacts
from packhorse.kernels import dispatch
from packhorse.kernels.attention import ref
from packhorse.layers.rope import Rope


class Attention:
    """weights: `qkv_proj` (rows q, gate if any, k, v; head by head), `o_proj`, and `q_norm`, `k_norm`."""

    def __init__(self, facts: ModelFacts, rope: Rope, exact: bool) -> None:
        self.facts = facts
        self.rope = rope
        self.exact = exact
        self.scale = facts.head_dim**-0.5

    def __call__(self, x: Tensor, positions: Tensor, kv_view: KVView, weights: LayerWeights) -> Tensor:
        """x [T, H] -> [T, H], compute dtype."""
        f = self.facts
        num_q, num_kv, dim = f.num_heads, f.num_kv_heads, f.head_dim
        qkv = weights.qkv_proj(x).view(x.shape[0], -1, dim)
        gate = qkv[:, num_q : 2 * num_q] if f.attn_gate else None
        q = qkv[:, :num_q]
        k, v = qkv[:, -2 * num_kv : -num_kv], qkv[:, -num_kv:]
        if f.qk_norm:
            q = dispatch.rms_norm(q, weights.q_norm, f.rms_eps, x.dtype)
            k = dispatch.rms_norm(k, weights.k_norm, f.rms_eps, x.dtype)
        if gate is None and not f.qk_norm:
            # Still side by side: turn them together.
            q, k = self.rope(qkv[:, : num_q + num_kv], positions).split([num_q, num_kv], dim=1)
        else:
            q, k = self.rope(q, positions), self.rope(k, positions)
        rotated = kv_view.rotated
        out = self._attend(dispatch.turned(q, x.dtype) if rotated else q, k, v, kv_view)
        if rotated:
            out = dispatch.turned(out, x.dtype)
        out = out.to(x.dtype) if gate is None else dispatch.sigmoid_gate(out, gate, x.dtype)
        return weights.o_proj(out.reshape(x.shape[0], num_q * dim))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, kv_view: KVView) -> Tensor:
        """Write each span's K and V, then attend: [T, Hq, D]. Outside exact mode spans fill all rows, in order."""
        parts: list[Tensor] = []
        for span in kv_view.spans:
            rows = slice(span.row, span.row + span.length)
            kv_view.write(span, k[rows], v[rows])
            segments = kv_view.segments(span, span.end)
            if self.exact:
                # One span a pass, and every row of the bucket is computed, padding too.
                return ref.exact_attention(q, segments, span.position - span.row, self.scale)
            parts.append(dispatch.attention(q[rows], segments, span.position, self.scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
