"""Router's choice and routed experts of 1 to 16 tokens on a card: `plan.cu` and `cuda.cu` beside this.

Letters: T tokens, H hidden, E experts, K experts a token, I inner size. The experts are read where a table of
addresses says: in the card's memory or in pinned host memory. Each byte of a hit expert is read once a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from packhorse.core.formats import TILE_COLS, TILE_ROWS, PackedFormat
from packhorse.core.units import ceil_div
from packhorse.kernels.cuda.launch import launch
from packhorse.kernels.cuda.nvrtc import Variant
from packhorse.kernels.linear.cuda import (
    MAX_TOKENS,
    MAX_WARPS,
    TOKEN_FLOATS,
    format_defines,
    min_arch,
    num_warps,
    sums_bytes,
)

MAX_EXPERTS = 512
MAX_TOP_K = 10
_PLAN_INTS = 32 + 160 + 192 + 160 + 160
_PLAN = Variant("experts/plan.cu", "expert_plan")


class Routes(NamedTuple):
    """weights [T, K] fp32 and experts [T, K] int32 of each token, and their order by expert (plan.cuh)."""

    weights: Tensor
    experts: Tensor
    plan: Tensor


@dataclass(frozen=True)
class ExpertTable:
    """Where the experts of a model are and what they are made of.

    address: int64 [layers, E] on the card: the first byte of each expert, on a 128-byte line, gate_up then down.
    hidden, inner: H and I, multiples of 64.
    """

    address: Tensor
    gate_up: PackedFormat
    down: PackedFormat
    hidden: int
    inner: int

    @property
    def down_offset(self) -> int:
        """Where down begins in an expert."""
        return self.gate_up.num_bytes(2 * self.inner, self.hidden)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return self.down_offset + self.down.num_bytes(self.hidden, self.inner)


def new_counters(device: torch.device | str) -> Tensor:
    """int64 [3]: distinct experts, bytes of experts read, values that did not fit 16 bits. The calls add to them."""
    return torch.zeros(3, dtype=torch.int64, device=device)


def variants(table: ExpertTable, dtype: torch.dtype, max_tokens: int = MAX_TOKENS) -> list[Variant]:
    """All that calls with up to `max_tokens` tokens need: for `launch.prepare`."""
    sizes = [8, 16] if max_tokens > 8 else [8]
    return [_PLAN, *(_variant(table, dtype, tokens, down) for tokens in sizes for down in (False, True))]


def _variant(table: ExpertTable, dtype: torch.dtype, num_tokens: int, down: bool) -> Variant:
    form = table.down if down else table.gate_up
    # Shared memory: of down a row block's sums of all routes, of gate_up the warps' sums.
    shared = MAX_TOKENS * MAX_TOP_K * TOKEN_FLOATS * 4 if down else sums_bytes(2, num_tokens, MAX_WARPS)
    return Variant(
        "experts/cuda.cu",
        "expert_down" if down else "expert_gate_up",
        (*format_defines(form, dtype, num_tokens), ("DOWN", int(down)), ("MIN_BLOCKS", 1)),
        shared_bytes=shared,
        min_arch=min_arch(dtype),
        tensor_cores=True,
    )


def route(logits: Tensor, top_k: int, norm_topk: bool, counters: Tensor) -> Routes:
    """Router logits fp32 [T, E], E at most 512: softmax over all, then the best K (of equal ones the lower
    number first), divided by their sum if norm_topk. Adds to counters[0]."""
    shape = (logits.shape[0], top_k)
    weights = torch.empty(shape, device=logits.device)
    experts = torch.empty(shape, dtype=torch.int32, device=logits.device)
    return _planned(logits.float().contiguous(), weights, experts, logits.shape[1], norm_topk, counters)


def plan_routes(weights: Tensor, experts: Tensor, counters: Tensor) -> Routes:
    """Routes chosen elsewhere: weights and expert ids [T, K]. Adds to counters[0]."""
    ids = experts.to(torch.int32).contiguous()
    return _planned(None, weights.float().contiguous(), ids, MAX_EXPERTS, False, counters)


def _planned(
    logits: Tensor | None, weights: Tensor, experts: Tensor, num_experts: int, norm: bool, counters: Tensor
) -> Routes:
    num_tokens, top_k = experts.shape
    assert 1 <= num_tokens <= MAX_TOKENS and top_k <= MAX_TOP_K and num_experts <= MAX_EXPERTS
    plan = torch.empty(_PLAN_INTS, dtype=torch.int32, device=experts.device)
    launch(
        _PLAN,
        (1,),
        MAX_EXPERTS,
        logits,
        weights,
        experts,
        plan,
        counters,
        num_tokens,
        top_k,
        num_experts,
        int(norm),
        device=experts.device,
        overlap=True,
    )
    return Routes(weights, experts, plan)


def expert_mix(
    x: Tensor,
    routes: Routes,
    table: ExpertTable,
    layer: int,
    counters: Tensor,
    *,
    residual: Tensor | None = None,
    factor: float = 1.0,
    inner: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Sum over each token's experts of weight * down(swiglu(gate_up(x))): x [T, H] 16-bit -> [T, H] fp32.

    residual: fp32 [T, H], added. factor: what silu(gate) * up is multiplied by before it becomes 16-bit, and
    divided by at the end. inner: scratch [T K, I] in x's dtype. A row's bits do not depend on the other tokens.
    Adds to all of counters. Raises UnsupportedCardError for bf16 before 8.0.
    """
    num_tokens, top_k = routes.experts.shape
    num_experts = table.address.shape[1]
    assert x.shape == (num_tokens, table.hidden) and x.is_contiguous() and x.data_ptr() % 16 == 0
    assert table.hidden % TILE_COLS == 0 and table.inner % TILE_COLS == 0
    if inner is None:
        inner = x.new_empty(num_tokens * top_k, table.inner)
    if out is None:
        out = torch.empty(num_tokens, table.hidden, device=x.device)
    address = table.address[layer]
    slots = min(num_tokens * top_k, num_experts)
    warps = num_warps(table.hidden)
    launch(
        _variant(table, x.dtype, num_tokens, down=False),
        (table.inner // TILE_ROWS, slots),
        32 * warps,
        address,
        routes.plan,
        x,
        inner,
        counters,
        table.hidden // TILE_COLS,
        factor,
        device=x.device,
        shared_bytes=sums_bytes(2, num_tokens, warps),
        overlap=True,
    )
    launch(
        _variant(table, x.dtype, num_tokens, down=True),
        (ceil_div(table.hidden, TILE_ROWS),),
        32 * min(MAX_WARPS, slots),
        address,
        routes.plan,
        routes.weights,
        inner,
        residual,
        out,
        counters,
        table.down_offset,
        table.inner // TILE_COLS,
        num_tokens,
        top_k,
        factor,
        device=x.device,
        shared_bytes=num_tokens * top_k * TOKEN_FLOATS * 4,
        overlap=True,
    )
    return out
