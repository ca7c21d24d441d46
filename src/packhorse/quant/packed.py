"""Matrices of few-bit codes in the layout that the kernels read: packing, unpacking, values.

Letters: L leading dims (experts, or none), N rows (outputs), K columns (inputs), G groups of K, R row blocks,
B column blocks of a row block, T tiles of a column block. The layout is that of docs/formats.md. A byte of a
tile's 4-bit plane holds one column of two rows, g and g + 8, so the plane is, for g = 0 .. 7 in turn, the 64
columns in order but for the middle two of each four, which are swapped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.core.formats import LINE_BYTES, TILE_COLS, TILE_ROWS, PackedFormat
from packhorse.core.units import ceil_div, round_up

SLICE_LEN = 1 << 20
"""Codes worked on at a time, so that intermediate values stay in cache and never double a matrix."""
CARD_SLICE_LEN = 1 << 25
"""On a card, which wants much to do at once: intermediate values take at most 8 bytes for each."""
_PAIRS = TILE_ROWS // 2
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F
_SECONDS = 0x0000FF000000FF00
_OUTER = -0x00FFFF0000FFFF01
"""The first and last byte of each four, as a signed number."""


class Codes(NamedTuple):
    """A matrix as codes and what they mean; every part is [L, N, ..], L the same leading dims.

    codes: uint8 [N, K]; fp8: the bytes of e4m3.
    scales, offsets: [N, G]. One-level formats: fp16 scales, and fp16 zeros or minima; fp8: fp32 scales.
    K-quants: uint8 sub-scales and sub-minima of 6 bits; q6_k: int8 sub-scales.
    supers, super_offsets: K-quants only, fp16 [N, K / 256], d and (not q6_k) dmin.
    pairs: codes are [N, K / 2], of 4 bits, the even column's in the low half of a byte; K is a multiple of 64.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    supers: Tensor | None = None
    super_offsets: Tensor | None = None
    pairs: bool = False

    def each(self, change: Callable[[Tensor], Tensor]) -> Codes:
        """With `change` done to every part."""
        return Codes(*(change(part) if isinstance(part, Tensor) else part for part in self))  # type: ignore[arg-type]

    def spread(self) -> Codes:
        """The same with a byte for each code."""
        if not self.pairs:
            return self
        low_first = torch.stack((self.codes & 15, self.codes >> 4), dim=-1)
        return self._replace(codes=low_first.flatten(-2), pairs=False)


RowCodes = Callable[[Tensor], Codes]
"""Codes of the rows with these numbers, int64 [n], of a matrix or of several one under the other."""


class PackedRows(NamedTuple):
    """A matrix in a checkpoint that can be packed without going through 16 bits. num_rows: N, of one expert.

    load: reads it to a device, and gives its codes by rows there and, if `permuted`, the order [K] in which the
    input's columns meet them (else None). It raises CorruptFileError or WeightsError where the file holds what cannot
    be.
    """

    form: PackedFormat
    num_rows: int
    load: Callable[[str], tuple[RowCodes, Tensor | None]]
    permuted: bool = False


@dataclass(frozen=True)
class PackedTensor:
    """A packed matrix, or one for each expert. data: uint8 [L, R, row_bytes], contiguous, its first byte on a
    128-byte line. num_rows, num_cols: N and K without padding."""

    format: PackedFormat
    data: Tensor
    num_rows: int
    num_cols: int

    @classmethod
    def empty(
        cls, form: PackedFormat, num_rows: int, num_cols: int, lead: tuple[int, ...] = (), device: str = "cpu"
    ) -> PackedTensor:
        """A matrix whose bytes nobody has written yet."""
        shape = (*lead, form.num_row_blocks(num_rows), form.row_bytes(num_cols))
        return cls(form, aligned_bytes(math.prod(shape), device).view(shape), num_rows, num_cols)

    @property
    def shape(self) -> tuple[int, ...]:
        """[L, N, K]."""
        return (*self.data.shape[:-2], self.num_rows, self.num_cols)

    @property
    def num_bytes(self) -> int:
        """Bytes held, padding and headers included."""
        return self.data.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | slice) -> PackedTensor:
        """The matrix of one expert, or of some, a view."""
        return PackedTensor(self.format, self.data[index], self.num_rows, self.num_cols)

    def rows(self, start: int, stop: int) -> PackedTensor:
        """Rows start .. stop of a single matrix, a view. start must be a multiple of 16."""
        blocks = self.data[start // TILE_ROWS : ceil_div(stop, TILE_ROWS)]
        return PackedTensor(self.format, blocks, min(stop, self.num_rows) - start, self.num_cols)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values [L, N, K], computed in fp32."""
        lead = self.data.shape[:-2]
        out = torch.empty((*lead, self.num_rows, self.num_cols), dtype=dtype, device=self.data.device)
        step = max(1, SLICE_LEN // (TILE_ROWS * self.num_cols)) * TILE_ROWS
        matrices = self.data.view(-1, *self.data.shape[-2:])
        for matrix, place in zip(matrices, out.view(-1, *out.shape[-2:]), strict=True):
            for start in range(0, self.num_rows, step):
                blocks = matrix[start // TILE_ROWS : (start + step) // TILE_ROWS]
                part = place[start : start + step]
                codes = unpack_blocks(self.format, blocks, self.num_cols)
                part.copy_(values(self.format, codes)[: len(part)])
        return out


def aligned_bytes(size: int, device: str = "cpu") -> Tensor:
    """uint8 [size], not written, whose first byte lies on a 128-byte line."""
    buffer = torch.empty(size + LINE_BYTES - 1, dtype=torch.uint8, device=device)
    return buffer[-buffer.data_ptr() % LINE_BYTES :][:size]


def pack(form: PackedFormat, codes: Codes) -> PackedTensor:
    """Codes in the kernels' layout. Raises ValueError where K does not fit the format; importers check what
    users hand in before this."""
    *lead, num_rows, num_cols = codes.codes.shape
    if not form.fits(num_cols):
        raise ValueError(f"{num_cols} columns do not fit {form.name}")
    packed = PackedTensor.empty(form, num_rows, num_cols, tuple(lead))
    flat = codes.each(lambda part: part.flatten(0, -2))
    for index, out in enumerate(packed.data.view(-1, *packed.data.shape[-2:])):
        rows = torch.arange(index * num_rows, (index + 1) * num_rows)
        write_rows(form, lambda rows: flat.each(lambda part: part[rows]), rows, out)
    return packed


def write_rows(form: PackedFormat, codes: RowCodes, rows: Tensor, out: Tensor) -> None:
    """Pack the codes of `rows`, int64 [N], into out, uint8 [R, row_bytes], in slices."""
    step = max(1, SLICE_LEN // out.shape[1]) * TILE_ROWS
    for start in range(0, len(rows), step):
        part = codes(rows[start : start + step])
        padding = -len(part.codes) % TILE_ROWS
        if padding:
            part = part.each(lambda rows, padding=padding: F.pad(rows, (0, 0, 0, padding)))  # type: ignore[misc]
        pack_blocks(form, part, out[start // TILE_ROWS : ceil_div(start + step, TILE_ROWS)])


def pack_rows(form: PackedFormat, codes: RowCodes, rows: Tensor) -> Tensor:
    """Row blocks uint8 [E, R, row_bytes] of the codes of `rows`, int64 [E, N], all at once, on the codes' device."""
    padding = -rows.shape[1] % TILE_ROWS
    part = codes(rows.flatten())
    if padding:
        part = part.each(lambda v: F.pad(v.unflatten(0, rows.shape), (0, 0, 0, padding)).flatten(0, 1))
    num_cols = part.codes.shape[-1] * (2 if part.pairs else 1)
    shape = (len(rows), form.num_row_blocks(rows.shape[1]), form.row_bytes(num_cols))
    out = torch.empty(shape, dtype=torch.uint8, device=part.codes.device)
    pack_blocks(form, part, out.flatten(0, 1))
    return out


def unpack(packed: PackedTensor) -> Codes:
    """What `pack` was given."""
    lead, rows = packed.data.shape[:-2], packed.data.shape[-2] * TILE_ROWS
    codes = unpack_blocks(packed.format, packed.data.view(-1, packed.data.shape[-1]), packed.num_cols)
    return codes.each(lambda part: part.view(*lead, rows, -1)[..., : packed.num_rows, :].contiguous())


def values(form: PackedFormat, codes: Codes) -> Tensor:
    """fp32 [L, N, K] of codes and what they mean. The order of operations is that of gguf's dequantization."""
    codes = codes.spread()
    num_cols = codes.codes.shape[-1]
    q = codes.codes.view(torch.float8_e4m3fn).float() if form.kind == "fp8" else codes.codes.float()
    # [L, N, G, group_len], and [L, N, G, 1] for what a group has in common.
    q = F.pad(q, (0, -num_cols % form.group_len)).unflatten(-1, (-1, form.group_len))
    scales = codes.scales.float()
    offsets = None if codes.offsets is None else codes.offsets.float()
    if codes.supers is not None:
        groups = form.block_cols // form.group_len
        scales = scales * codes.supers.float().repeat_interleave(groups, dim=-1)
        if offsets is not None and codes.super_offsets is not None:
            offsets = offsets * codes.super_offsets.float().repeat_interleave(groups, dim=-1)
    scales = scales.unsqueeze(-1)
    if form.kind == "fp8":
        q.mul_(scales)
    elif offsets is None:
        q.sub_(2 ** (form.bits - 1)).mul_(scales)
    elif form.kind == "zero":
        q.sub_(offsets.unsqueeze(-1)).mul_(scales)
    else:
        q.mul_(scales).add_(offsets.unsqueeze(-1), alpha=-1 if form.kind == "k" else 1)
    return q.flatten(-2)[..., :num_cols]


def _regions(form: PackedFormat, out: Tensor, num_cols: int) -> Iterator[tuple[Tensor, Tensor, slice, slice]]:
    """The whole column blocks of row blocks `out` [R, row_bytes], then the shorter last one: views of their
    headers [R, B, header_bytes] and tiles [R, B, T, tile_bytes], and which blocks and columns they are."""
    tiles = ceil_div(num_cols, TILE_COLS)
    whole, rest = divmod(tiles, form.block_tiles)
    for first, count, num_tiles in ((0, whole, form.block_tiles), (whole, 1, rest)):
        if count and num_tiles:
            size = form.header_bytes + num_tiles * form.tile_bytes
            start, column = first * form.block_bytes, first * form.block_cols
            blocks = out[:, start : start + count * size].unflatten(1, (count, size))
            body = blocks[..., form.header_bytes :].unflatten(2, (num_tiles, form.tile_bytes))
            columns = slice(column, column + count * num_tiles * TILE_COLS)
            yield blocks[..., : form.header_bytes], body, slice(first, first + count), columns


def pack_blocks(form: PackedFormat, codes: Codes, out: Tensor) -> None:
    """Write whole row blocks: parts of `codes` [16 R, ..] into out, uint8 [R, row_bytes]."""
    num_cols = codes.codes.shape[-1] * (2 if codes.pairs else 1)
    width = round_up(num_cols, TILE_COLS)
    headers = _headers(form, codes, ceil_div(num_cols, form.block_cols))
    planes = [_of_pairs(codes.codes)] if codes.pairs else _planes(form, codes.codes, width)
    for header, tiles, blocks, columns in _regions(form, out, num_cols):
        header.copy_(headers[:, blocks])
        start = 0
        for plane in planes:
            # Columns of a plane's bytes: a byte of the 1- or 2-bit plane covers 4 or 2 of them.
            scale = width // plane.shape[-1]
            part = plane[..., columns.start // scale : columns.stop // scale]
            part = part.unflatten(-1, (tiles.shape[1], tiles.shape[2], -1))
            size = TILE_ROWS * TILE_COLS if form.bits == 8 else _PAIRS * part.shape[-1]
            _to_tiles(part, tiles[..., start : start + size])
            start += size


def _planes(form: PackedFormat, codes: Tensor, width: int) -> list[Tensor]:
    """The planes of codes, uint8 [16 R, K], padded to `width` columns: [R, 8, bytes], of 8 bits [R, 2, 8, width]."""
    padding = width - codes.shape[-1]
    fill = 2 ** (form.bits - 1) if form.kind == "symmetric" else 0
    q = F.pad(codes, (0, padding), value=fill) if padding else codes.contiguous()
    q = q.view(-1, 2, _PAIRS, width)
    if form.bits == 8:
        return [q]
    planes = [_swapped(_row_pairs(q if form.bits == 4 else q & 15))]
    if form.bits > 4:
        planes.append(_swapped(_high_plane(_row_pairs(q >> 4), form.bits - 4)))
    return planes


def _of_pairs(codes: Tensor) -> Tensor:
    """The plane [R, 8, K] of `Codes.pairs` [16 R, K / 2]: four columns of two rows at a time, even ones first."""
    rows = codes.contiguous().view(-1, 2, _PAIRS, codes.shape[-1]).view(torch.int64)
    low, high = rows[:, 0], rows[:, 1]
    even = (low & _LOW_NIBBLES) | ((high & _LOW_NIBBLES) << 4)
    odd = ((low >> 4) & _LOW_NIBBLES) | (high & ~_LOW_NIBBLES)
    return torch.stack((even.view(torch.int16), odd.view(torch.int16)), dim=-1).flatten(-2).view(torch.uint8)


def unpack_blocks(form: PackedFormat, blocks: Tensor, num_cols: int) -> Codes:
    """Codes [16 R, ..] of whole row blocks, uint8 [R, row_bytes], padding of rows included."""
    R, width = len(blocks), ceil_div(num_cols, TILE_COLS) * TILE_COLS
    num_blocks = ceil_div(num_cols, form.block_cols)
    device = blocks.device
    headers = torch.empty(R, num_blocks, form.header_bytes, dtype=torch.uint8, device=device)
    if form.bits == 8:
        planes = [torch.empty(R, 2, _PAIRS, width, dtype=torch.uint8, device=device)]
    else:
        sizes = [width] + ([width * (form.bits - 4) // 4] if form.bits > 4 else [])
        planes = [torch.empty(R, _PAIRS, size, dtype=torch.uint8, device=device) for size in sizes]
    for header, tiles, at, columns in _regions(form, blocks, num_cols):
        headers[:, at] = header
        start = 0
        for plane in planes:
            scale = width // plane.shape[-1]
            part = plane[..., columns.start // scale : columns.stop // scale]
            part = part.unflatten(-1, (tiles.shape[1], tiles.shape[2], -1))
            size = TILE_ROWS * TILE_COLS if form.bits == 8 else _PAIRS * part.shape[-1]
            _from_tiles(tiles[..., start : start + size], part)
            start += size
    q = planes[0] if form.bits == 8 else _two_rows(_swapped(planes[0]))
    if len(planes) > 1:
        q |= _two_rows(_from_high_plane(_swapped(planes[1]), form.bits - 4)) << 4
    codes = q.view(R * TILE_ROWS, width)[:, :num_cols]
    return Codes(codes, *_from_headers(form, headers, num_cols))


def _row_pairs(q: Tensor) -> Tensor:
    """Values below 16 of the rows of a block, uint8 [R, 2, 8, K] -> bytes of two rows [R, 8, K]."""
    wide = q.view(torch.int64)  # eight bytes at once: no shift leaves its byte
    return (wide[:, 0] | (wide[:, 1] << 4)).view(torch.uint8)


def _two_rows(pairs: Tensor) -> Tensor:
    """The inverse of `_row_pairs`."""
    wide = pairs.view(torch.int64)
    return torch.stack((wide & _LOW_NIBBLES, (wide >> 4) & _LOW_NIBBLES), dim=1).view(torch.uint8)


def _swapped(plane: Tensor) -> Tensor:
    """Bytes of a plane with the middle two of each four exchanged, two fours at once."""
    wide = plane.view(torch.int64)
    left, right = (wide >> 8) & _SECONDS, (wide & _SECONDS) << 8
    return ((wide & _OUTER) | left | right).view(torch.uint8)


def _high_plane(pairs: Tensor, bits: int) -> Tensor:
    """High bits by row pairs, uint8 [R, 8, K] with 1 or 2 bits a nibble -> [R, 8, K / 4 or K / 2]: steps of
    four columns share a byte, four of them with 1 bit, two with 2."""
    steps = pairs.unflatten(-1, (-1, 4 // bits, 4))
    out = steps[:, :, :, 0].clone()
    for step in range(1, 4 // bits):
        out |= steps[:, :, :, step] << (bits * step)
    return out.flatten(2)


def _from_high_plane(plane: Tensor, bits: int) -> Tensor:
    """The inverse of `_high_plane`."""
    mask = 0x11 if bits == 1 else 0x33
    by_step = plane.unflatten(-1, (-1, 4))
    steps = [(by_step >> (bits * step)) & mask for step in range(4 // bits)]
    return torch.stack(steps, dim=3).flatten(2)


def _to_tiles(part: Tensor, tiles: Tensor) -> None:
    """Copy a plane into its place in the tiles, [R, B, T, bytes]. Fewer than 8 bits: [R, 8, B, T, bytes of a
    row pair]; 8 bits: [R, 2, 8, B, T, 64]."""
    if part.ndim == 5:
        rows = part.permute(0, 2, 3, 1, 4)
        tiles.unflatten(-1, rows.shape[3:]).view(torch.int64).copy_(rows.view(torch.int64))
    else:
        pairs = _column_pairs(part)
        tiles.view(torch.int16).unflatten(-1, pairs.shape[3:]).copy_(pairs)


def _from_tiles(tiles: Tensor, part: Tensor) -> None:
    """The inverse of `_to_tiles`."""
    if part.ndim == 5:
        rows = part.permute(0, 2, 3, 1, 4)
        rows.view(torch.int64).copy_(tiles.unflatten(-1, rows.shape[3:]).view(torch.int64))
    else:
        pairs = _column_pairs(part)
        pairs.copy_(tiles.view(torch.int16).unflatten(-1, pairs.shape[3:]))


def _column_pairs(part: Tensor) -> Tensor:
    """A plane of 8 bits [R, row half, g, B, T, 64] as pairs of columns in the order of its tiles: [R, B, T, step / 2,
    g, lane's quarter, step % 2, pair, row half] int16, a view."""
    return part.view(torch.int16).unflatten(-1, (4, 2, 2, 2)).permute(0, 3, 4, 6, 2, 5, 7, 8, 1)


def _headers(form: PackedFormat, codes: Codes, num_blocks: int) -> Tensor:
    """uint8 [R, B, header_bytes] of the scales of whole row blocks."""
    lines = []
    if form.kind == "k":
        assert codes.offsets is not None and codes.supers is not None and codes.super_offsets is not None
        scales, minima = _by_block(codes.scales, num_blocks), _by_block(codes.offsets, num_blocks)
        lines.append((scales & 15) | (minima << 4))
        high = (scales >> 4) | ((minima >> 4) << 2)
        lines.append(high[..., 0::2] | (high[..., 1::2] << 4))
        supers = torch.stack((codes.supers, codes.super_offsets), dim=-1).flatten(-2)
        lines.append(_by_block(supers, num_blocks))
    elif form.kind == "q6_k":
        assert codes.supers is not None
        lines += [_by_block(codes.scales, num_blocks), _by_block(codes.supers, num_blocks)]
        lines.append(torch.zeros(*lines[0].shape[:2], 96, dtype=torch.uint8, device=lines[0].device))
    else:
        # [R, B, 16, 4] -> groups before rows.
        for part in (codes.scales, codes.offsets):
            if part is not None:
                part = F.pad(part, (0, num_blocks * 4 - part.shape[-1]))
                lines.append(_by_block(part, num_blocks).transpose(-1, -2))
    return torch.cat([line.contiguous().flatten(2).view(torch.uint8) for line in lines], dim=2)


def _by_block(part: Tensor, num_blocks: int) -> Tensor:
    """[16 R, n x B] -> [R, B, 16, n]."""
    return part.reshape(-1, TILE_ROWS, num_blocks, part.shape[-1] // num_blocks).transpose(1, 2)


def _from_block(line: Tensor) -> Tensor:
    """[R, B, 16, n] -> [16 R, n x B]."""
    R, B, rows, n = line.shape
    return line.transpose(1, 2).reshape(R * rows, B * n)


def _from_headers(
    form: PackedFormat, headers: Tensor, num_cols: int
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Scales, offsets, supers and super_offsets of `Codes`, rows [16 R]."""
    groups = ceil_div(num_cols, form.group_len)

    def line(start: int, stop: int, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return headers[..., start:stop].contiguous().view(dtype).unflatten(-1, shape)

    if form.kind == "k":
        low, packed = line(0, 128, 16, 8), line(128, 192, 16, 4)
        high = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
        scales, minima = (low & 15) | ((high & 3) << 4), (low >> 4) | ((high >> 2) << 4)
        supers = line(192, 256, 16, 2, dtype=torch.float16)
        d, dmin = _from_block(supers[..., :1]), _from_block(supers[..., 1:])
        return _from_block(scales), _from_block(minima), d, dmin
    if form.kind == "q6_k":
        scales = line(0, 256, 16, 16, dtype=torch.int8)
        return _from_block(scales), None, _from_block(line(256, 288, 16, 1, dtype=torch.float16)), None
    dtype = torch.float32 if form.kind == "fp8" else torch.float16
    size = 64 * dtype.itemsize
    parts = [
        _from_block(line(start, start + size, 4, 16, dtype=dtype).transpose(-1, -2))[:, :groups]
        for start in range(0, form.header_bytes, size)
    ]
    return parts[0], (parts[1] if len(parts) > 1 else None), None, None
