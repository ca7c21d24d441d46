"""Codes of matrices that GPTQ, AWQ, compressed-tensors, FP8 and our own declaration store, by rows.

Layouts as their libraries document them; little-endian words. Letters: N outputs, K inputs, G groups of K.

- gptq: qweight [K x bits / 32, N] and qzeros [G, N x bits / 32], values in order from the low bits; scales [G, N];
  g_idx [K], the group of each input. Version 1 stores zeros less 1, taken off the words: a zero of 0 borrows from the
  value after it.
- awq: qweight [K, N / 8], qzeros [G, N / 8], eight outputs a word in the order 0 2 4 6 1 3 5 7; scales [G, N].
- compressed: weight_packed [N, K x bits / 32], values more by 2^(bits-1), in order; weight_zero_point packed along N.
- fp8: weight [N, K] e4m3; scale of each row, block of rows and columns, or all.
- packhorse: q [.., N, K x bits / 8], values in order from the low bits; scale and zero [.., N, G].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from packhorse.core.errors import WeightsError
from packhorse.core.formats import TILE_COLS
from packhorse.core.units import ceil_div
from packhorse.facts.model import StoredMatrix
from packhorse.quant.packed import Codes, RowCodes

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of its eight outputs."""
_CHECKED = 1 << 24
"""Codes that are looked at together."""


def row_codes(matrix: StoredMatrix, tensors: Mapping[str, Tensor]) -> tuple[RowCodes, Tensor | None]:
    """Codes by rows (experts one under the other), and the order of the inputs, as `PackedRows.load` gives them.

    tensors: those of `matrix`, by role, in their stored types, on the device that rows and codes are then on. Raises
    WeightsError for scales that are zero or no numbers, zeros and groups out of range, and codes that are no numbers.
    """
    if matrix.layout == "gptq":
        return _gptq(matrix, tensors)
    if matrix.layout == "awq":
        return _awq(matrix, tensors), None
    if matrix.layout == "compressed":
        return _compressed(matrix, tensors)
    if matrix.layout == "fp8":
        return _fp8(matrix, tensors), None
    return _packhorse(matrix, tensors), None


def _wrong(matrix: StoredMatrix, what: str) -> WeightsError:
    return WeightsError(
        f"{matrix.name} {what}.",
        hint="The file is damaged or was exported from a broken run: fetch or export it again.",
        tensor=matrix.name,
    )


def _scales(matrix: StoredMatrix, scales: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """Scales [N, G as stored] checked, in the packed format's type, one for each of its groups."""
    bad = int((~scales.isfinite()).sum()) + int((scales == 0).sum())
    if bad:
        raise _wrong(matrix, f"has {bad} scales that are zero or not finite, of {scales.numel()}")
    if dtype == torch.float16 and scales.dtype != torch.float16:
        largest = float(scales.abs().max())
        if largest > torch.finfo(torch.float16).max:
            raise _wrong(matrix, f"has a scale of {largest:g}, and fp16 ends at 65504")
    return _groups(matrix, scales.to(dtype))


def _groups(matrix: StoredMatrix, values: Tensor) -> Tensor:
    """[N, G as stored] -> [N, G of the format]: a long group is several of the format's."""
    repeat = ceil_div(matrix.group_len, matrix.form.group_len)
    return values.repeat_interleave(repeat, dim=-1)[..., : ceil_div(matrix.shape[-1], matrix.form.group_len)]


def _rows(values: Tensor, rows: Tensor) -> Tensor:
    """values[rows], a view where rows follow on one another."""
    first, count = int(rows[0]) if len(rows) else 0, len(rows)
    if torch.equal(rows, torch.arange(first, first + count, device=rows.device)):
        return values[first : first + count]
    return values[rows]


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """uint8 [.., n x 32 / bits] of words [.., n], from the low bits on."""
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def _zeros(matrix: StoredMatrix, zeros: Tensor) -> Tensor | None:
    """Zeros [N, G as stored] as the format has them: fp16, or None where it is symmetric and they agree."""
    if matrix.form.kind == "zero":
        return _groups(matrix, zeros.half())
    middle = 2 ** (matrix.form.bits - 1)
    if not bool((zeros == middle).all()):
        raise _wrong(matrix, f"is declared symmetric, and has zeros other than {middle}")
    return None


def _order(matrix: StoredMatrix, groups: Tensor) -> Tensor | None:
    """The order of the inputs by group. None where they are in order."""
    K, size = matrix.shape[-1], matrix.group_len
    groups = groups.long()
    in_order = torch.arange(K, device=groups.device) // size
    if torch.equal(groups, in_order):
        return None
    last = ceil_div(K, size)
    if int(groups.min()) < 0 or int(groups.max()) >= last:
        raise _wrong(matrix, f"has inputs in group {int(groups.max())}, of {last} groups")
    if not torch.equal(groups.bincount(minlength=last), in_order.bincount(minlength=last)):
        raise _wrong(matrix, f"has groups of other sizes than {size} inputs")
    if not matrix.permuted:
        raise _wrong(matrix, "has inputs in an order of their own, and the declaration says that it has none")
    return groups.argsort(stable=True)


def _gptq(matrix: StoredMatrix, tensors: Mapping[str, Tensor]) -> tuple[RowCodes, Tensor | None]:
    bits = matrix.form.bits
    words = tensors["qweight"].t().contiguous()
    ones = 0x11111111 if bits == 4 else 0x01010101
    zeros = _unpacked(tensors["qzeros"] + matrix.zero_shift * ones, bits)[:, : matrix.shape[0]].t()
    scales, offsets = _scales(matrix, tensors["scales"].t()), _zeros(matrix, zeros)
    order = _order(matrix, tensors["g_idx"]) if "g_idx" in tensors else None
    if order is None and matrix.permuted:
        order = torch.arange(matrix.shape[-1], device=words.device)

    def codes(rows: Tensor) -> Codes:
        q = _unpacked(words[rows], bits)
        q = q if order is None else q[:, order]
        return Codes(q, scales[rows], None if offsets is None else offsets[rows])

    return codes, order


def _awq(matrix: StoredMatrix, tensors: Mapping[str, Tensor]) -> RowCodes:
    words = tensors["qweight"]
    # Row 4 i + j: byte j of the words of outputs 8 i .. 8 i + 7, two of them for each input.
    pairs = words.view(torch.uint8).unflatten(-1, (-1, 4)).permute(1, 2, 0).contiguous().flatten(0, 1)
    places = torch.tensor(_AWQ_ORDER, device=words.device)
    zeros = _unpacked(tensors["qzeros"], 4).unflatten(-1, (-1, 8))[..., places].flatten(-2).t().contiguous()
    scales, offsets = _scales(matrix, tensors["scales"].t()), _zeros(matrix, zeros)

    def codes(rows: Tensor) -> Codes:
        place = places[rows % 8]
        shift = (4 * (place % 2)).to(torch.uint8)[:, None]
        q = (pairs[rows // 8 * 4 + place // 2] >> shift) & 15
        return Codes(q, scales[rows], None if offsets is None else offsets[rows])

    return codes


def _compressed(matrix: StoredMatrix, tensors: Mapping[str, Tensor]) -> tuple[RowCodes, Tensor | None]:
    N, K = matrix.shape
    bits = matrix.form.bits
    if tensors["weight_shape"].tolist() != [N, K]:
        raise _wrong(matrix, f"says that its shape is {tensors['weight_shape'].tolist()}, and holds {[N, K]}")
    offsets = None
    if "weight_zero_point" in tensors:
        offsets = _zeros(matrix, _unpacked(tensors["weight_zero_point"].t(), bits)[:, :N].t())
    words, scales = tensors["weight_packed"], _scales(matrix, tensors["weight_scale"])
    order = _order(matrix, tensors["weight_g_idx"]) if "weight_g_idx" in tensors else None
    if order is None and matrix.permuted:
        order = torch.arange(K, device=words.device)

    def codes(rows: Tensor) -> Codes:
        rest = scales[rows], None if offsets is None else offsets[rows]
        if bits == 4 and order is None and K % TILE_COLS == 0:
            return Codes(_rows(words, rows).view(torch.uint8), *rest, pairs=True)
        q = _unpacked(words[rows], bits)[:, :K]
        return Codes(q if order is None else q[:, order], *rest)

    return codes, order


def _fp8(matrix: StoredMatrix, tensors: Mapping[str, Tensor]) -> RowCodes:
    N = matrix.shape[0]
    q = tensors["weight"].view(torch.uint8)
    # In parts, and not by `sum`, which on a CPU has eight bytes for each value first.
    bad = sum(int(((part & 127) == 127).count_nonzero()) for part in q.flatten().split(_CHECKED))
    if bad:
        raise _wrong(matrix, f"holds {bad} values that are not finite, of {q.numel()}")
    stored = tensors["scale"]
    stored = stored.reshape(-1, stored.shape[-1] if matrix.row_block else 1)
    scales = _scales(matrix, stored, torch.float32)
    block = matrix.row_block or (1 if len(scales) == N else N)
    return lambda rows: Codes(q[rows], scales[rows // block])


def _packhorse(matrix: StoredMatrix, tensors: Mapping[str, Tensor]) -> RowCodes:
    q, scales = tensors["q"].flatten(0, -2), _scales(matrix, tensors["scale"].flatten(0, -2))
    zeros = tensors["zero"].flatten(0, -2) if "zero" in tensors else None
    if zeros is not None and not bool(((zeros >= 0) & (zeros <= 2**matrix.form.bits)).all()):
        raise _wrong(matrix, "has zeros out of range")
    bits = matrix.form.bits

    def codes(rows: Tensor) -> Codes:
        rest = scales[rows], None if zeros is None else zeros[rows]
        if bits == 4 and matrix.shape[-1] % TILE_COLS == 0:
            return Codes(_rows(q, rows), *rest, pairs=True)
        return Codes(_unpacked(q[rows], bits), *rest)

    return codes
