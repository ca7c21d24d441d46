"""Gated delta-net layer: projections, causal convolution, gated delta rule, gated norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.core.protocols import DeltaState, KVView, LayerWeights
from packhorse.core.types import Span
from packhorse.facts.model import ModelFacts
from packhorse.kernels import dispatch
from packhorse.kernels.delta import chunk
from packhorse.kernels.delta.ref import delta_chunk
from packhorse.kernels.norm.ref import l2_norm


class DeltaNet:
    """weights: `in_proj_qkvz` (rows q, k, v, z), `in_proj_ba` (rows b, a), `conv1d` [C, K] fp32, `A_log`,
    `dt_bias` [Hv] fp32, `norm` [Dv] fp32, `out_proj`."""

    def __init__(self, facts: ModelFacts, exact: bool) -> None:
        assert facts.delta is not None
        self.delta = facts.delta
        self.eps = facts.rms_eps
        self.exact = exact

    def __call__(self, x: Tensor, positions: Tensor, kv_view: KVView, weights: LayerWeights) -> Tensor:
        """x [T, H] -> [T, H], compute dtype. Positions are not used: order is in the state."""
        d = self.delta
        qkv, z = weights.in_proj_qkvz(x).split([d.conv_dim, d.value_dim], dim=-1)
        b, a = weights.in_proj_ba(x).float().chunk(2, dim=-1)
        beta = b.sigmoid()
        g = -weights.A_log.exp() * F.softplus(a + weights.dt_bias)
        states = [(slice(s.row, s.row + s.length), s, kv_view.state(s)) for s in kv_view.spans]
        # Exact mode has rows of nobody, before and behind the span: they stay finite.
        new = x.new_zeros if self.exact else x.new_empty
        conv = new(x.shape[0], d.conv_dim, dtype=torch.float32)
        mixed = new(x.shape[0], d.num_v_heads, d.v_head_dim, dtype=torch.float32)
        for rows, _, state in states:
            dispatch.conv_silu(qkv[rows], weights.conv1d, state.conv, conv[rows])
        if self.exact:
            for rows, span, state in states:
                mixed[rows] = self._by_pages(conv[rows], g[rows], beta[rows], state, span)
        else:
            self._by_spans(conv, g, beta, states, mixed)
        z = z.view(x.shape[0], d.num_v_heads, d.v_head_dim)
        out = dispatch.gated_rms_norm(mixed, z, weights.norm, self.eps, x.dtype)
        return weights.out_proj(out.view(x.shape[0], d.value_dim))

    def _by_spans(
        self,
        conv: Tensor,
        g: Tensor,
        beta: Tensor,
        states: list[tuple[slice, Span, DeltaState]],
        mixed: Tensor,
    ) -> None:
        """The rule over each span at once, into mixed [T, Hv, Dv]."""
        heads: tuple[Tensor, Tensor, Tensor] | None = None
        for rows, span, state in states:
            if dispatch.has_delta_kernel(conv, span.length, state.recurrent):
                num_k = self.delta.num_k_heads
                chunk.delta_rule(conv[rows], g[rows], beta[rows], state.recurrent, num_k, mixed[rows])
                continue
            q, k, v = heads = self._heads(conv) if heads is None else heads
            mixed[rows] = dispatch.delta_rule(q[rows], k[rows], v[rows], g[rows], beta[rows], state.recurrent)

    def _heads(self, conv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """conv [T, C] fp32 -> q, k [T, Hv, Dk] normalised, key heads repeated to value heads, and v."""
        d = self.delta
        q, k, v = conv.split([d.key_dim, d.key_dim, d.value_dim], dim=-1)
        q = l2_norm(q.reshape(-1, d.num_k_heads, d.k_head_dim)) * d.k_head_dim**-0.5
        k = l2_norm(k.reshape(-1, d.num_k_heads, d.k_head_dim))
        repeat = d.num_v_heads // d.num_k_heads
        q, k = q.repeat_interleave(repeat, dim=1), k.repeat_interleave(repeat, dim=1)
        return q, k, v.reshape(-1, d.num_v_heads, d.v_head_dim)

    def _by_pages(self, conv: Tensor, g: Tensor, beta: Tensor, state: DeltaState, span: Span) -> Tensor:
        """Exact mode: the rule over whole pages, the last one filled up with zeros and not yet folded into
        the state, so that one token after another gives the bits of all at once. [T, Hv, Dv]."""
        d = self.delta
        pending = state.pending
        assert pending is not None
        page_len = pending.shape[0]
        before = span.position % page_len
        rows = torch.cat((pending[:before], torch.cat((conv, g, beta), dim=-1)))
        outs = []
        for start in range(0, rows.shape[0], page_len):
            real = rows[start : start + page_len]
            page = rows.new_zeros(page_len, rows.shape[1])
            page[: real.shape[0]] = real
            heads = self._heads(page[:, : d.conv_dim])
            gates = page[:, d.conv_dim :].split(d.num_v_heads, dim=-1)
            q, k, v, page_g, page_beta = (c.transpose(0, 1).contiguous() for c in (*heads, *gates))
            out, new = delta_chunk(q, k, v, page_g, page_beta, state.recurrent)
            if real.shape[0] == page_len:
                state.recurrent.copy_(new)
            else:
                pending[: real.shape[0]] = real
            outs.append(out.transpose(0, 1))
        return torch.cat(outs)[before : before + span.length]
