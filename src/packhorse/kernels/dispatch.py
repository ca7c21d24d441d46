"""Which implementation of an operation runs: the reference, or a faster twin where one exists."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.core.protocols import Segment
from packhorse.kernels.attention import flash, ref, rotate
from packhorse.kernels.attention import pages as attention_pages
from packhorse.kernels.conv import cuda as conv_cuda
from packhorse.kernels.conv.ref import causal_conv
from packhorse.kernels.cuda.launch import card_arch
from packhorse.kernels.delta import chunk
from packhorse.kernels.delta import ref as delta_ref
from packhorse.kernels.delta.scan import delta_scan
from packhorse.kernels.experts import combine, mma
from packhorse.kernels.experts import cuda as experts_cuda
from packhorse.kernels.experts import ref as experts_ref
from packhorse.kernels.experts.grouped import grouped_mix
from packhorse.kernels.linear import cpu as linear_cpu
from packhorse.kernels.linear import cuda as linear_cuda
from packhorse.kernels.linear import int4, packed, unpack
from packhorse.kernels.linear import ref as linear_ref
from packhorse.kernels.linear.int4 import Int4Weight
from packhorse.kernels.norm import cuda as norm_cuda
from packhorse.kernels.norm import heads as norm_heads
from packhorse.kernels.norm import ref as norm_ref
from packhorse.quant.codec import Codec, CodecPages, GroupCodec, hadamard
from packhorse.quant.packed import PackedTensor

Matrices = Tensor | PackedTensor
"""A stack of matrices [E, N, K], one for each expert."""


def attention(q: Tensor, segments: Iterable[Segment], position: int, scale: float) -> Tensor:
    """Causal attention, shapes of kernels.attention.ref.attention."""
    if flash.fits(q):
        return flash.attention(q, segments, position, scale)
    return ref.attention(q, segments, position, scale)


def bind_pages(codec: Codec, pages: Tensor) -> CodecPages:
    """Access to the pages of one layer, shapes of quant.codec.Codec.bind."""
    if isinstance(codec, GroupCodec) and attention_pages.fits(codec, pages.device):
        return attention_pages.CardPages(codec, pages)
    return codec.bind(pages)


def turned(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [T, heads, D] in the basis of quant.codec.hadamard, in its own type. dtype: what is computed in."""
    return rotate.hadamard(x) if rotate.fits(x, dtype) else hadamard(x)


def linear(x: Tensor, weight: Tensor | PackedTensor | Int4Weight, bias: Tensor | None = None) -> Tensor:
    """Product with a dense or packed weight, shapes of kernels.linear.ref.linear."""
    if isinstance(weight, Int4Weight):
        return int4.linear(x, weight, bias)
    if isinstance(weight, PackedTensor):
        if linear_cuda.fits(x, weight):
            return linear_cuda.packed_linear(x, weight, None if bias is None else bias.float())
        return (packed if x.device.type == "cpu" else unpack).linear(x, weight, bias)
    if x.device.type == "cpu":
        if linear_cpu.fits(x, weight):
            return linear_cpu.row_product(x, weight, bias)
        if linear_cpu.off_grid(x):
            return linear_cpu.grid_product(x, weight, bias)
    return linear_ref.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Norm of rows [T, H] or of heads [T, heads, D], shapes of kernels.norm.ref.rms_norm."""
    if norm_cuda.fits(x, dtype):
        out = torch.empty_like(x, dtype=dtype)
        norm_cuda.residual_norm(x, weight, eps, out)
        return out
    if norm_heads.fits(x, None, dtype):
        return norm_heads.head_rows(x, dtype, weight=weight, eps=eps)
    return norm_ref.rms_norm(x, weight, eps, dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Norm of heads [T, heads, D] times silu(gate), shapes of kernels.norm.ref.gated_rms_norm."""
    if norm_heads.fits(x, gate, dtype):
        return norm_heads.head_rows(x, dtype, weight=weight, eps=eps, gate=gate)
    return norm_ref.gated_rms_norm(x, gate, weight, eps, dtype)


def sigmoid_gate(x: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
    """x times sigmoid(gate), shapes of kernels.norm.ref.sigmoid_gate."""
    if norm_heads.fits(x, gate, dtype):
        return norm_heads.head_rows(x, dtype, gate=gate, act="sigmoid")
    return norm_ref.sigmoid_gate(x, gate, dtype)


def conv_silu(x: Tensor, weight: Tensor, state: Tensor, out: Tensor) -> None:
    """out [T, C] fp32 = silu of kernels.conv.ref.causal_conv."""
    if conv_cuda.fits(x, state):
        conv_cuda.conv_silu(x, weight, state, out)
    else:
        out.copy_(F.silu(causal_conv(x, weight, state)))


def swiglu(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """Shapes of kernels.experts.ref.swiglu."""
    if gate_up.dtype == dtype and combine.fits(gate_up, gate_up.shape[-1] // 2):
        return combine.swiglu(gate_up)
    return experts_ref.swiglu(gate_up, dtype)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Gated delta rule, shapes of kernels.delta.ref.delta_rule."""
    if q.device.type != "cpu" and q.shape[0] > delta_ref.STEPWISE_MAX:
        return delta_scan(q, k, v, g, beta, state)
    return delta_ref.delta_rule(q, k, v, g, beta, state)


def has_grouped_products(x: Tensor) -> bool:
    """Whether the library takes matrices of x's type by groups: 16 bits on a card from 8.0. Before that it waits for
    the host each time."""
    return x.device.type != "cpu" and x.dtype != torch.float32 and card_arch(x.device) >= 80


UNPACK_FROM = 12_288
"""Tokens from which on packed experts are unpacked for the library's kernel, where it has one: with 256 experts on one
H200, 4,096 tokens take 1.5 ms without and 2.0 ms with it, 8,192 take 2.4 and 2.6 ms."""


def _unpacks_experts(x: Tensor) -> bool:
    """Whether unpacking and the library beat products that decode: its kernel is for bf16 on the data centers' cards;
    elsewhere it loops over the experts."""
    return x.shape[0] >= UNPACK_FROM and x.dtype == torch.bfloat16 and card_arch(x.device) in (90, 100, 103)


def has_delta_kernel(x: Tensor, num_tokens: int, state: Tensor) -> bool:
    """Whether kernels.delta.chunk is for `num_tokens` tokens on x's device, with state [Hv, Dk, Dv]."""
    return x.device.type != "cpu" and num_tokens > delta_ref.STEPWISE_MAX and chunk.fits(*state.shape[1:])


FEW_TOKENS = linear_cuda.MAX_TOKENS
"""Tokens of a decode step at most: they have kernels of their own."""


def table_mix(x: Tensor, weights: Tensor, experts: Tensor, table: experts_cuda.ExpertTable) -> Tensor:
    """Routed experts of at most FEW_TOKENS tokens on a card, read where they lie, shapes of
    kernels.experts.ref.expert_mix. table: of one layer.

    For more tokens a layer that is copied as a whole, while the one before computes, was there sooner than what is
    missing of it read by `mma.mix`."""
    counters = experts_cuda.device_counters(x.device)
    routes = experts_cuda.plan_routes(weights, experts, table, 0, counters)
    return experts_cuda.expert_mix(linear_cuda.whole_tiles(x), routes, table, counters)


def expert_mix(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Matrices, down: Matrices, *, exact: bool
) -> Tensor:
    """Routed experts, shapes of kernels.experts.ref.expert_mix."""
    if not exact and isinstance(gate_up, PackedTensor) and isinstance(down, PackedTensor):
        if experts_cuda.fits(x, experts, gate_up, down):
            return table_mix(x, weights, experts, experts_cuda.ExpertTable.of_stacks(gate_up, down))
        if mma.fits(x, gate_up, down) and not _unpacks_experts(x):
            return mma.mix(x, weights, experts, experts_cuda.ExpertTable.of_stacks(gate_up, down))
    if has_grouped_products(x) and not exact:
        num, group = gate_up.shape[0], gate_up.shape[0]
        if isinstance(gate_up, PackedTensor):
            group = unpack.group_len(gate_up, x.element_size())
        up, back = (partial(_matrices, stack, x.dtype) for stack in (gate_up, down))
        return grouped_mix(x, weights, experts, up, back, num, group)
    return experts_ref.expert_mix(x, weights, experts, gate_up, down, exact=exact, product=linear)


def _matrices(stack: Matrices, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    if isinstance(stack, PackedTensor):
        return unpack.unpacked(stack, start, stop, dtype)
    return stack[start:stop]
