"""Router's choice and routed experts of 1 to 16 tokens on a card: `plan.cu` and `cuda.cu` beside this.

Letters: T tokens, H hidden, E experts, K experts a token, I inner size. The experts are read where a table of
addresses says: in the card's memory or in pinned host memory. Each byte of a hit expert is read once a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from packhorse.core.formats import LINE_BYTES, TILE_COLS, TILE_ROWS, PackedFormat
from packhorse.core.units import ceil_div, round_up
from packhorse.kernels.cuda.launch import launch, min_arch, target_of
from packhorse.kernels.cuda.nvrtc import Variant
from packhorse.kernels.linear.cuda import (
    DTYPES,
    MAX_TOKENS,
    MAX_WARPS,
    TOKEN_FLOATS,
    format_defines,
    num_warps,
    ring_bytes,
    sums_bytes,
)
from packhorse.quant.packed import PackedTensor

MAX_EXPERTS = 512
MAX_TOP_K = 10
MAX_ROUTES = MAX_TOKENS * MAX_TOP_K
MAX_SPARES = 512
"""Places a layer may have for experts that are kept as they are read."""
_PLAN_INTS = 4 * MAX_ROUTES + 32 + 2 * MAX_ROUTES + 2 * MAX_ROUTES
_CHANGES = Variant("experts/changes.cu", "expert_changes")


class Routes(NamedTuple):
    """weights [T, K] fp32 and experts [T, K] int32 of each token, and their order by expert (plan.cuh)."""

    weights: Tensor
    experts: Tensor
    plan: Tensor


@dataclass(frozen=True)
class ExpertFills:
    """How experts read from host memory are kept in the card's as they are read. L layers, S places a layer; all on
    the card.

    home: int64 [L, E], the host copy of each expert, address | 1; of one that never leaves the card (the shared one)
    its address there. It never changes.
    spares: int64 [L, S], addresses of slots, on 128-byte lines, that the next misses may be written to.
    filled: int32 [L, S]: -1, the place is free; e: expert e is being or has been written to spares[l, s], and the
    table points there from the layer's next `route` on. A place stays taken until `apply_changes` renews it.
    used: int32 [L, MAX_ROUTES]: distinct experts of the last step in ascending order, then -1.
    changes: int64 [N, 3], what `apply_changes` does.
    """

    home: Tensor
    spares: Tensor
    filled: Tensor
    used: Tensor
    changes: Tensor

    @classmethod
    def empty(cls, home: Tensor, spares: int, changes: int | None = None) -> ExpertFills:
        """Of `spares` places a layer, none of which has a slot yet: all are taken (by no expert) until
        `apply_changes` gives them one. changes: rows of it, one for each place unless given."""
        layers, device = home.shape[0], home.device
        return cls(
            home,
            torch.zeros(layers, spares, dtype=torch.int64, device=device),
            torch.full((layers, spares), NO_SLOT, dtype=torch.int32, device=device),
            torch.full((layers, MAX_ROUTES), -1, dtype=torch.int32, device=device),
            torch.full((changes or layers * spares, 3), -1, dtype=torch.int64, device=device),
        )


NO_SLOT = -2
"""In `filled`: a place that has no slot."""


@dataclass(frozen=True)
class ExpertTable:
    """Where the experts of a model are and what they are made of.

    address: int64 [layers, E] on the card: the first byte of each expert's gate_up, on a 128-byte line. Its down
    lies right behind it, or down_gap + its number * down_stride bytes from there. hidden, inner: H and I, multiples
    of 64. fills: where misses may be kept; then bit 0 of an address says that it is of host memory. shared: the last
    of E is an expert that every token goes to.
    """

    address: Tensor
    gate_up: PackedFormat
    down: PackedFormat
    hidden: int
    inner: int
    down_gap: int | None = None
    down_stride: int = 0
    fills: ExpertFills | None = None
    shared: bool = False

    @classmethod
    def of_stacks(cls, gate_up: PackedTensor, down: PackedTensor) -> ExpertTable:
        """One layer whose matrices lie on the card, all gate_up [E, 2 I, H] and all down [E, H, I] together."""
        num, hidden, inner = down.shape
        first, step = gate_up.data.data_ptr(), gate_up.data.stride(0)
        address = _addresses(first, step, num, gate_up.data.device)
        gap, stride = down.data.data_ptr() - first, down.data.stride(0) - step
        return cls(address, gate_up.format, down.format, hidden, inner, gap, stride)

    @property
    def down_offset(self) -> int:
        """From an expert's first byte to that of its down, down_stride aside."""
        return self.gate_up.num_bytes(2 * self.inner, self.hidden) if self.down_gap is None else self.down_gap

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return self.gate_up.num_bytes(2 * self.inner, self.hidden) + self.down.num_bytes(
            self.hidden, self.inner
        )


@cache
def _addresses(first: int, step: int, num: int, device: torch.device) -> Tensor:
    """int64 [1, num]: addresses of blocks one behind the other. Kept: a captured graph reads it again."""
    return (first + step * torch.arange(num)).view(1, -1).to(device)


@cache
def device_counters(device: torch.device) -> Tensor:
    """The counters of a card, for callers that keep none."""
    return new_counters(device)


def fits(x: Tensor, experts: Tensor, gate_up: PackedTensor, down: PackedTensor) -> bool:
    """Whether `expert_mix` is for this: few 16-bit tokens, stacks on a card, sizes within limits."""
    return (
        gate_up.data.device.type == "cuda"
        and x.dtype in DTYPES
        and x.shape[0] <= MAX_TOKENS
        and experts.shape[1] <= MAX_TOP_K
        and len(gate_up) <= MAX_EXPERTS
        and not (gate_up.num_cols % TILE_COLS or down.num_cols % TILE_COLS)
    )


def new_counters(device: torch.device | str) -> Tensor:
    """int64 [5], which the calls add to: distinct experts; bytes of experts read; values that did not fit 16 bits;
    with `ExpertFills` also bytes read from host memory, and those of them that were kept."""
    return torch.zeros(5, dtype=torch.int64, device=device)


def variants(table: ExpertTable, dtype: torch.dtype, max_tokens: int = MAX_TOKENS) -> list[Variant]:
    """All that calls with up to `max_tokens` tokens need: for `launch.prepare`."""
    sizes = [8, 16] if max_tokens > 8 else [8]
    plans = [_plan_variant(table)] if table.fills is None else [_plan_variant(table), _CHANGES]
    return [*plans, *(_variant(table, dtype, tokens, down) for tokens in sizes for down in (False, True))]


def _plan_variant(table: ExpertTable) -> Variant:
    return Variant("experts/plan.cu", "expert_plan", (("FILL", int(table.fills is not None)),))


def _variant(table: ExpertTable, dtype: torch.dtype, num_tokens: int, down: bool) -> Variant:
    form = table.down if down else table.gate_up
    warps, fill = MAX_WARPS if down else num_warps(form, table.hidden), int(table.fills is not None)
    if down:
        sums = _route_bytes(num_tokens * MAX_TOP_K)
        ring = sums + ring_bytes(form, 1, warps)
    else:
        sums, ring = sums_bytes(2, num_tokens, warps), ring_bytes(form, 2, warps)
    return Variant(
        "experts/cuda.cu",
        "expert_down" if down else "expert_gate_up",
        (*format_defines(form, dtype, num_tokens), ("DOWN", int(down)), ("MAX_WARPS", warps), ("FILL", fill)),
        shared_bytes=sums,
        async_bytes=ring,
        min_arch=min_arch(dtype),
        tensor_cores=True,
    )


def _route_bytes(num_routes: int) -> int:
    """Shared memory for a row block's sums of all routes, in whole lines."""
    return round_up(num_routes * TOKEN_FLOATS * 4, LINE_BYTES)


def route(
    logits: Tensor,
    top_k: int,
    norm_topk: bool,
    table: ExpertTable,
    layer: int,
    counters: Tensor,
    live: Tensor | None = None,
) -> Routes:
    """Router logits fp32 [T, E], E at most 512: softmax over all, then the best K (of equal ones the lower
    number first), divided by their sum if norm_topk. layer: whose row of the table. Where the table has a shared
    expert, logits are [T, E + 1], and each token goes to it too, with the sigmoid of its logit for a weight.

    live: int32 [T], negative for rows of nobody, whose experts are not read and whose mix is 0. With fills the
    layer's filled places enter the table first, and places are assigned to this step's misses: so a step routes a
    layer once. Adds to counters[0].
    """
    assert logits.shape[1] == table.address.shape[1]
    shape = (logits.shape[0], top_k + table.shared)
    weights = torch.empty(shape, device=logits.device)
    experts = torch.empty(shape, dtype=torch.int32, device=logits.device)
    return _planned(logits.float().contiguous(), weights, experts, table, layer, norm_topk, counters, live)


def plan_routes(
    weights: Tensor,
    experts: Tensor,
    table: ExpertTable,
    layer: int,
    counters: Tensor,
    live: Tensor | None = None,
) -> Routes:
    """Routes chosen elsewhere: weights and expert ids [T, K]; the rest as in `route`."""
    ids = experts.to(torch.int32).contiguous()
    return _planned(None, weights.float().contiguous(), ids, table, layer, False, counters, live)


def _planned(
    logits: Tensor | None,
    weights: Tensor,
    experts: Tensor,
    table: ExpertTable,
    layer: int,
    norm: bool,
    counters: Tensor,
    live: Tensor | None,
) -> Routes:
    num_tokens, num_ranks = experts.shape
    num_experts, fills = table.address.shape[1], table.fills
    assert 1 <= num_tokens <= MAX_TOKENS and num_ranks <= MAX_TOP_K and num_experts <= MAX_EXPERTS
    shared = int(table.shared and logits is not None)
    assert live is None or (live.dtype == torch.int32 and len(live) == num_tokens)
    plan = torch.empty(_PLAN_INTS, dtype=torch.int32, device=experts.device)
    places: tuple[Tensor | None, ...] = (None, None, None)
    if fills is not None:
        places = (fills.spares[layer], fills.filled[layer], fills.used[layer])
    num_spares = 0 if fills is None else fills.spares.shape[1]
    assert num_spares <= MAX_SPARES and (fills is None or table.down_gap is None)
    sizes = (num_tokens, num_ranks - shared, num_experts - shared, int(norm), num_spares, shared)
    args = (logits, live, weights, experts, table.address[layer], *places, plan, counters, *sizes)
    launch(_plan_variant(table), (1,), MAX_EXPERTS, *args, device=plan.device, overlap=True)
    return Routes(weights, experts, plan)


def apply_changes(table: ExpertTable) -> None:
    """What the host wants changed, before a step: each row of `changes` is (expert, place, slot), and is -1 after.

    expert: l * E + e, whose entry becomes its host copy again, or -1. place: l * S + s, which becomes free with the
    slot at address `slot`, or -1. First all places filled so far enter the table, then experts leave, then places
    are renewed. An expert may leave once the place that it was written to is renewed, in the same call at the
    earliest: else the next step would enter it again. An expert and a place appear once.
    """
    fills = table.fills
    assert fills is not None
    (layers, num_spares), num_experts = fills.spares.shape, table.address.shape[1]
    sizes = (layers * num_spares, num_spares, num_experts, len(fills.changes))
    args = (table.address, fills.home, fills.spares, fills.filled, fills.changes, *sizes)
    launch(_CHANGES, (1,), 512, *args, device=table.address.device, overlap=True)


def expert_mix(
    x: Tensor,
    routes: Routes,
    table: ExpertTable,
    counters: Tensor,
    *,
    residual: Tensor | None = None,
    factor: float = 1.0,
    inner: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Sum over each token's experts of weight * down(swiglu(gate_up(x))): x [T, H] 16-bit -> [T, H] fp32.

    routes: made with the addresses of the layer. residual: fp32 [T, H], added. factor: what silu(gate) * up is
    multiplied by before it becomes 16-bit, and divided by at the end. inner: scratch [T K, I] in x's dtype.
    A row's bits do not depend on the other tokens. Adds to all of counters. Raises UnsupportedCardError for bf16
    before 8.0.
    """
    num_tokens, top_k = routes.experts.shape
    assert x.shape == (num_tokens, table.hidden) and x.is_contiguous() and x.data_ptr() % 16 == 0
    assert table.hidden % TILE_COLS == 0 and table.inner % TILE_COLS == 0
    if inner is None:
        inner = x.new_empty(num_tokens * top_k, table.inner)
    if out is None:
        out = torch.empty(num_tokens, table.hidden, device=x.device)
    slots = min(num_tokens * top_k, table.address.shape[1])
    gate_up, down = (_variant(table, x.dtype, num_tokens, down) for down in (False, True))
    grid, threads = (table.inner // TILE_ROWS, slots), 32 * num_warps(table.gate_up, table.hidden)
    args = (routes.plan, x, inner, counters, table.hidden // TILE_COLS, factor)
    launch(gate_up, grid, threads, *args, device=x.device, overlap=True)
    warps = min(MAX_WARPS, slots)
    shared = _route_bytes(num_tokens * top_k)
    if target_of(x.device).has_async_copies:
        shared += ring_bytes(table.down, 1, warps)
    sizes = (table.down_offset, table.down_stride, table.inner // TILE_COLS, num_tokens, top_k, factor)
    given = (routes.plan, routes.weights, inner, residual, out, counters, *sizes)
    blocks = (ceil_div(table.hidden, TILE_ROWS),)
    launch(down, blocks, 32 * warps, *given, device=x.device, shared_bytes=shared, overlap=True)
    return out
