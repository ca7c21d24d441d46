"""Decode steps on a card: the same layers as everywhere, over kernels that read their place from device tensors.

Nothing here waits for the host or allocates by what a step holds, so a step can be captured in a graph. Letters:
R rows (tokens), S sequences, H hidden, Hq, Hkv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.core.protocols import LayerWeights
from packhorse.facts.model import ModelFacts, MoeFacts
from packhorse.facts.steps import step_misfit
from packhorse.kernels.attention.cuda import DecodeBatch, PagedAttention
from packhorse.kernels.delta.cuda import delta_step
from packhorse.kernels.experts.cuda import ExpertTable, expert_mix, route
from packhorse.kernels.experts.ref import swiglu
from packhorse.kernels.linear.cuda import packed_linear, packed_swiglu
from packhorse.kernels.linear.dense import dense_linear
from packhorse.kernels.norm.cuda import residual_norm
from packhorse.layers.linear import Linear, PackedLinear, Piece
from packhorse.quant.packed import PackedTensor


@dataclass
class StepContext:
    """What all layers of one step share.

    batch: whose rows, see DecodeBatch. slots [S] int32: state slot of each sequence. attention, workspace: the
    attention kernels and their scratch. attended [R, Hq, D], mixed [R, Hv, D]: outputs in the compute type, zeros
    at first, so that rows of nobody stay finite. turns: int32 [S, Hk], zeros, of the delta rule's kernel. counters:
    int64 [5], see kernels.experts.cuda. experts: where the routed experts are, by MoE layer. cos_sin: of the rows'
    positions, set when a step begins.
    """

    batch: DecodeBatch
    slots: Tensor
    attention: PagedAttention
    workspace: Tensor
    attended: Tensor
    mixed: Tensor | None
    turns: Tensor | None
    counters: Tensor
    experts: ExpertTable | None
    cos_sin: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class LayerStep:
    """One layer's part of the store in a step: `pages` of a full-attention layer and its codec's misfits, int64 [2],
    or `conv` [slots, C, K - 1] and `recurrent` [slots, Hv, Dk, Dv] of a linear one. moe_index: its row in the table
    of experts."""

    context: StepContext
    pages: Tensor | None
    misfits: Tensor | None
    conv: Tensor | None
    recurrent: Tensor | None
    moe_index: int


def norm_step(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """rms_norm of x [R, H] fp32 in `dtype`."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    residual_norm(x, weight, eps, out)
    return out


def project(linear: Linear | PackedLinear, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """x [R, K] 16-bit times the weight, plus bias and residual: fp32 [R, N]."""
    pieces = (Piece(linear.weight),) if isinstance(linear, Linear) else linear.pieces
    num_rows = sum(piece.weight.shape[0] for piece in pieces)
    out = torch.empty(x.shape[0], num_rows, dtype=torch.float32, device=x.device)
    start = 0
    for weight, inputs in pieces:
        rows = slice(start, start + weight.shape[0])
        start = rows.stop
        columns = x if inputs is None else x[:, inputs]
        bias = None if linear.bias is None else linear.bias[rows].float()
        before = None if residual is None else residual[:, rows]
        if isinstance(weight, PackedTensor):
            packed_linear(columns, weight, bias, residual=before, out=out[:, rows])
        else:
            dense_linear(columns, weight, bias, residual=before, out=out[:, rows])
    return out


def attention_step(
    facts: ModelFacts, x: Tensor, residual: Tensor, step: LayerStep, weights: LayerWeights
) -> Tensor:
    """x [R, H] 16-bit, normed -> residual plus attention, fp32 [R, H]."""
    context, num_q, dim = step.context, facts.num_heads, facts.head_dim
    assert step.pages is not None and step.misfits is not None
    rows = project(weights.qkv_proj, x)
    queries = torch.empty(x.shape[0], num_q, dim, dtype=context.attention.math_dtype, device=x.device)
    context.attention.write(
        step.pages,
        rows,
        context.batch,
        queries,
        norms=(weights.q_norm, weights.k_norm) if facts.qk_norm else None,
        eps=facts.rms_eps,
        cos_sin=context.cos_sin,
        gated=facts.attn_gate,
        misfits=step.misfits,
    )
    gate = rows.view(x.shape[0], -1, dim)[:, num_q : 2 * num_q] if facts.attn_gate else None
    context.attention.attend(
        step.pages, queries, context.batch, context.attended, context.workspace, gate=gate
    )
    return project(weights.o_proj, context.attended.flatten(1), residual)


def delta_net_step(
    facts: ModelFacts, x: Tensor, residual: Tensor, step: LayerStep, weights: LayerWeights
) -> Tensor:
    """x [R, H] 16-bit, normed -> residual plus the delta net, fp32 [R, H]."""
    context = step.context
    assert context.mixed is not None and context.turns is not None
    assert step.conv is not None and step.recurrent is not None
    delta_step(
        project(weights.in_proj_qkvz, x),
        project(weights.in_proj_ba, x),
        (weights.conv1d, weights.A_log, weights.dt_bias, weights.norm),
        facts.rms_eps,
        (step.conv, step.recurrent),
        (context.batch.first_row, context.batch.num_tokens, context.slots),
        context.turns,
        context.mixed,
    )
    return project(weights.out_proj, context.mixed.flatten(1), residual)


def mlp_step(x: Tensor, residual: Tensor | None, weights: LayerWeights) -> Tensor:
    """x [R, H] 16-bit, normed -> residual, if any, plus the dense block, fp32 [R, H]."""
    return project(weights.down_proj, _inner(weights.gate_up_proj, x), residual)


def _inner(gate_up: Linear | PackedLinear, x: Tensor) -> Tensor:
    if isinstance(gate_up, PackedLinear) and len(gate_up.pieces) == 1:
        weight, inputs = gate_up.pieces[0]
        if isinstance(weight, PackedTensor) and inputs is None and weight.num_rows % 32 == 0:
            bias = None if gate_up.bias is None else gate_up.bias.float()
            return packed_swiglu(x, weight, bias)
    return swiglu(project(gate_up, x), x.dtype)


def moe_step(facts: MoeFacts, x: Tensor, residual: Tensor, step: LayerStep, weights: LayerWeights) -> Tensor:
    """x [R, H] 16-bit, normed -> residual plus routed and shared experts, fp32 [R, H]."""
    context = step.context
    assert context.experts is not None
    table, live = context.experts, context.batch.row_sequence
    # With a shared expert in the table its gate is the router's last row.
    logits = dense_linear(x, weights.step_router if table.shared else weights.gate.weight)
    routes = route(logits, facts.top_k, facts.norm_topk, table, step.moe_index, context.counters, live)
    out = expert_mix(x, routes, table, context.counters, residual=residual)
    if not facts.shared_dim or table.shared:
        return out
    gate = F.sigmoid(project(weights.shared_expert_gate, x))
    return torch.addcmul(out, gate, mlp_step(x, None, weights.shared_expert))


def misfit(facts: ModelFacts, dtype: torch.dtype) -> str | None:
    """Why a model's layers have no step kernels, in words; None where they have."""
    return step_misfit(facts, {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, "fp32"))
