"""Packed experts of many tokens on any card: `mma.cu`, which decodes them as it multiplies. Twin: `ref.expert_mix`.

Letters as in `ref`; R = T K rows, one for each token and expert of its choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.core.formats import TILE_COLS, TILE_ROWS, PackedFormat
from packhorse.core.units import ceil_div
from packhorse.kernels.cuda.launch import has_type, launch, min_arch, saturated
from packhorse.kernels.cuda.nvrtc import Variant
from packhorse.kernels.experts.combine import combine
from packhorse.kernels.experts.cuda import ExpertTable
from packhorse.kernels.experts.grouped import by_expert
from packhorse.kernels.linear.cuda import format_defines, whole_tiles
from packhorse.quant.packed import PackedTensor

TILE_TOKENS = (16, 64)
"""Tokens of an expert that are multiplied at once: where an expert has few, and where it has many."""
_MANY = 48
"""Tokens of an expert on average from which on tiles are of the second kind: each tile decodes its weights anew."""
_WARPS = 4
_STAGE_PITCH = 2 * 128 + 16


def variant(form: PackedFormat, dtype: torch.dtype, tile_tokens: int, down: bool) -> Variant:
    """The product with gate_up or down matrices of `form` for tiles of `tile_tokens` tokens."""
    return Variant(
        "experts/mma.cu",
        "expert_tiles",
        (*format_defines(form, dtype, tile_tokens), ("DOWN", int(down))),
        shared_bytes=tile_tokens * max(2 * _STAGE_PITCH, 2 * (_outputs(down) + 8)),
        min_arch=min_arch(dtype),
        tensor_cores=True,
    )


def variants(table: ExpertTable, dtype: torch.dtype) -> list[Variant]:
    """All that `mix` may need: for `launch.prepare`."""
    forms = ((table.gate_up, False), (table.down, True))
    return [variant(form, dtype, tile, down) for tile in TILE_TOKENS for form, down in forms]


def _outputs(down: bool) -> int:
    """Outputs of a block."""
    return _WARPS * TILE_ROWS * (2 if down else 1)


def fits(x: Tensor, gate_up: PackedTensor, down: PackedTensor) -> bool:
    """Whether `mix` is for this: 16-bit tokens and packed stacks on a card, whole tiles."""
    whole = not (gate_up.num_cols % TILE_COLS or down.num_cols % TILE_COLS)
    return has_type(gate_up.data.device, x.dtype) and whole


def mix(x: Tensor, weights: Tensor, experts: Tensor, table: ExpertTable) -> Tensor:
    """`ref.expert_mix` with its shapes: x [T, H] of 16 bits -> [T, H] fp32. table: of one layer, whose stacks lie on
    the card; in pinned host memory, where they may lie too, each tile of tokens would read them anew.

    What 16 bits cannot hold between the products becomes their largest value and is counted in `launch.saturated`.
    A row's bits depend on the token and its experts alone. Raises UnsupportedCardError for bf16 before 8.0.
    """
    num_experts, (num_tokens, top_k) = table.address.shape[1], experts.shape
    order, ends, places = by_expert(experts, num_experts)
    tile = TILE_TOKENS[num_tokens * top_k > _MANY * num_experts]
    counts = ends.diff(prepend=ends.new_zeros(1))
    tile_ends = ((counts + (tile - 1)) // tile).cumsum(0).to(torch.int32)
    most = len(order) // tile + min(num_experts, len(order))

    def product(rows: Tensor, index: Tensor | None, width: int, down: bool) -> Tensor:
        out = rows.new_empty(len(order), width)
        place = (table.down_offset, table.down_stride) if down else (0, 0)
        sizes = (num_experts, rows.shape[1] // TILE_COLS, width // TILE_ROWS)
        args = (table.address, rows, index, ends, tile_ends, out, saturated(x.device), *place, *sizes)
        kernel = variant(table.down if down else table.gate_up, x.dtype, tile, down)
        grid = (ceil_div(width, _outputs(down)), most)
        launch(kernel, grid, 32 * _WARPS, *args, device=x.device)
        return out

    inner = product(whole_tiles(x), order // top_k, table.inner, False)
    return combine(product(inner, None, table.hidden, True), places, weights)
