"""Products over packed weights: the reference, which never holds more than a slice of values.

A slice of rows is dequantized in fp32, rounded to x's type and multiplied as a dense matrix would be.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.core.formats import TILE_ROWS
from packhorse.quant.packed import SLICE_LEN, PackedTensor, unpack_blocks, values


def linear(x: Tensor, weight: PackedTensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times a packed weight [N, K] transposed, plus bias [N]: [T, N] in x's dtype."""
    out = x.new_empty(x.shape[0], weight.num_rows)
    step = max(1, SLICE_LEN // (TILE_ROWS * weight.num_cols)) * TILE_ROWS
    for start in range(0, weight.num_rows, step):
        part = weight.rows(start, start + step).dequantize(x.dtype)
        out[:, start : start + step] = F.linear(x, part)
    return out if bias is None else out + bias


def embed(ids: Tensor, weight: PackedTensor) -> Tensor:
    """Rows ids [T] int64 of a packed matrix [V, H]: [T, H] fp32. Whole row blocks are unpacked, each once."""
    rows, place = torch.unique(ids, return_inverse=True)
    out = torch.empty(len(rows), weight.num_cols, device=ids.device)
    step = max(1, SLICE_LEN // (TILE_ROWS * weight.num_cols))
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        block_values = values(
            weight.format, unpack_blocks(weight.format, weight.data[part // TILE_ROWS], weight.num_cols)
        ).view(len(part), TILE_ROWS, -1)
        out[start : start + step] = block_values[torch.arange(len(part), device=ids.device), part % TILE_ROWS]
    return out[place]
