"""Rows of an embedding that lies in pinned host memory, fetched and unpacked by the card."""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.core.cost import UNPACK_BYTES
from packhorse.core.formats import TILE_ROWS
from packhorse.core.units import ceil_div
from packhorse.kernels.cuda.launch import launch
from packhorse.kernels.cuda.nvrtc import Variant
from packhorse.kernels.linear.unpack import unpack_into
from packhorse.quant.packed import PackedTensor

VARIANT = Variant("linear/gather.cu", "gather_blocks", ())
_VECTOR = 16
_THREADS = 256


def fits(table: Tensor | PackedTensor) -> bool:
    """Whether rows are whole vectors, as `embed` reads them."""
    if isinstance(table, PackedTensor):
        return True
    return table.is_contiguous() and table.shape[1] * table.element_size() % _VECTOR == 0


def embed(ids: Tensor, table: Tensor | PackedTensor) -> Tensor:
    """Rows ids [T] int64, on a card, of a table [V, H] in pinned host memory: [T, H] fp32 on the card. Of a packed
    table each token's row block crosses the link. The values are those of kernels.linear.packed.embed, bit for bit;
    ids outside of the table give row 0. May be captured."""
    num_cols = table.shape[1]
    if not isinstance(table, PackedTensor):
        return _blocks(ids, table, 1).float()
    out = torch.empty(len(ids), num_cols, device=ids.device)
    step = max(1, UNPACK_BYTES // 4 // (TILE_ROWS * num_cols * out.element_size()))
    for start in range(0, len(ids), step):
        part = ids[start : start + step]
        blocks = PackedTensor(table.format, _blocks(part, table.data, TILE_ROWS), TILE_ROWS, num_cols)
        values = unpack_into(blocks, torch.empty(blocks.shape, device=ids.device)).flatten(0, 1)
        rows = torch.arange(len(part), device=ids.device) * TILE_ROWS + part % TILE_ROWS
        torch.index_select(values, 0, rows, out=out[start : start + step])
    return out


def _blocks(ids: Tensor, table: Tensor, rows: int) -> Tensor:
    """Blocks ids // rows of table [B, n]: [T, n], or [T, 1, n] where a block has several rows."""
    shape = (len(ids), table.shape[-1]) if rows == 1 else (len(ids), 1, table.shape[-1])
    out = torch.empty(shape, dtype=table.dtype, device=ids.device)
    vectors = table.shape[-1] * table.element_size() // _VECTOR
    grid = (len(ids), min(8, ceil_div(vectors, _THREADS)))
    launch(
        VARIANT, grid, _THREADS, table, ids, out, rows, vectors, table.shape[0] * rows - 1, device=ids.device
    )
    return out
