"""The packed layout: what goes in comes out, every byte is where docs/formats.md says, values are right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packed_cases import columns_for, random_codes
from packhorse.core.formats import PACKED, PackedFormat
from packhorse.core.units import ceil_div
from packhorse.quant.packed import Codes, PackedTensor, pack, unpack, write_rows

NAMES = sorted(PACKED)


def equal(a: Codes, b: Codes) -> bool:
    return all(
        x.dtype == y.dtype and torch.equal(x, y) if isinstance(x, torch.Tensor) else x is y
        for x, y in zip(a, b, strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([name for name in NAMES if PACKED[name].bits == 4]),
    st.integers(1, 70),
    st.integers(1, 20),
    st.integers(0, 99),
)
def test_codes_two_a_byte_are_packed_as_those_with_a_byte_each(name, rows, tiles, seed):
    form = PACKED[name]
    cols = 64 * ceil_div(columns_for(form, 64 * tiles), 64)
    codes = random_codes(form, rows, cols, seed, ())
    pairs = codes._replace(codes=codes.codes[:, ::2] | codes.codes[:, 1::2] << 4, pairs=True)
    assert equal(pairs.spread(), codes)
    packed = pack(form, codes)
    out = torch.full_like(packed.data, 255)
    write_rows(form, lambda at: pairs.each(lambda part: part[at]), torch.arange(rows), out)
    assert torch.equal(out, packed.data)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.integers(1, 70),
    st.integers(1, 900),
    st.integers(0, 99),
    st.sampled_from([(), (3,)]),
)
def test_unpack_gives_back_what_was_packed(name, rows, cols, seed, lead):
    form = PACKED[name]
    codes = random_codes(form, rows, columns_for(form, cols), seed, lead)
    packed = pack(form, codes)
    assert equal(unpack(packed), codes)
    assert packed.data.is_contiguous() and packed.data.data_ptr() % 128 == 0
    assert packed.shape == codes.codes.shape
    assert packed.num_bytes == form.num_bytes(rows, packed.num_cols) * (3 if lead else 1)


def byte_of(form: PackedFormat, tile: int) -> int:
    per = form.block_cols // 64
    return (
        tile // per * (form.header_bytes + per * form.tile_bytes)
        + form.header_bytes
        + tile % per * form.tile_bytes
    )


def code_at(form: PackedFormat, data: list[int], row: int, col: int) -> int:
    """One code, found by the words of docs/formats.md alone. data: the bytes of the row's row block."""
    tile, within = byte_of(form, col // 64), col % 64
    g, upper = row % 8, row % 16 // 8
    t, j, e = within // 16, within % 16 // 4, within % 4
    lane, element = 4 * g + t, [0, 1, 4, 5][e] + 2 * upper
    if form.bits == 8:
        return data[tile + 512 * (j // 2) + 16 * lane + 8 * (j % 2) + element]
    word = int.from_bytes(bytes(data[tile + 16 * lane + 4 * j :][:4]), "little")
    i = element // 2 + 4 * (element % 2)  # the nibble at bit 4i
    code = word >> (4 * i) & 15
    if form.bits == 5:
        plane = int.from_bytes(bytes(data[tile + 512 + 4 * lane :][:4]), "little")
        code |= (plane >> (4 * i + j) & 1) << 4
    if form.bits == 6:
        plane = int.from_bytes(bytes(data[tile + 512 + 8 * lane + 4 * (j // 2) :][:4]), "little")
        code |= (plane >> (4 * i + 2 * (j & 1)) & 3) << 4
    return code


@pytest.mark.parametrize(
    "name",
    ["int4-g16", "int4z-g128", "int5-g32", "int6m-g64", "int8-g32", "fp8-g128", "q4_k", "q5_k", "q6_k"],
)
def test_every_code_lies_where_the_layout_says(name):
    form = PACKED[name]
    rows, cols = 21, columns_for(form, 330)
    codes = random_codes(form, rows, cols, 1)
    packed = pack(form, codes)
    for block in range(2):
        data = packed.data[block].tolist()
        for row in range(16 * block, min(rows, 16 * block + 16)):
            assert [code_at(form, data, row, col) for col in range(cols)] == codes.codes[row].tolist()


def test_headers_lie_where_the_layout_says():
    def half(data: torch.Tensor, at: int) -> float:
        return float(data[at : at + 2].contiguous().view(torch.float16))

    form = PACKED["int4z-g32"]
    codes = random_codes(form, 40, 288, 2)
    data = pack(form, codes).data
    for row, group in [(0, 0), (17, 3), (39, 8), (5, 4)]:
        start = group // 4 * form.block_bytes + 2 * (16 * (group % 4) + row % 16)
        assert half(data[row // 16], start) == codes.scales[row, group]
        assert half(data[row // 16], start + 128) == codes.offsets[row, group]
    form = PACKED["q4_k"]
    codes = random_codes(form, 16, 512, 3)
    data = pack(form, codes).data[0]
    for row, sub in [(0, 0), (3, 5), (15, 15), (9, 8)]:
        start, s = sub // 8 * form.block_bytes, sub % 8
        low = int(data[start + 8 * row + s])
        word = int.from_bytes(bytes(data[start + 128 + 4 * row :][:4].tolist()), "little") >> (4 * s) & 15
        assert (low & 15) | (word & 3) << 4 == codes.scales[row, sub]
        assert low >> 4 | (word >> 2) << 4 == codes.offsets[row, sub]
        assert half(data, start + 192 + 4 * row) == codes.supers[row, sub // 8]
        assert half(data, start + 194 + 4 * row) == codes.super_offsets[row, sub // 8]
    form = PACKED["q6_k"]
    codes = random_codes(form, 16, 256, 4)
    data = pack(form, codes).data[0]
    assert data[16 * 7 + 3 : 16 * 7 + 4].view(torch.int8) == codes.scales[7, 3]
    assert half(data, 256 + 2 * 7) == codes.supers[7, 0]
    form = PACKED["fp8-g128"]
    codes = random_codes(form, 16, 256, 4)
    at = 4 * (16 * 1 + 7)
    assert pack(form, codes).data[0][at : at + 4].view(torch.float32) == codes.scales[7, 1]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 40), st.integers(1, 600), st.integers(0, 99))
def test_values(name, rows, cols, seed):
    """Against one formula a format, in fp64; padding is 0 or belongs to no real column."""
    form = PACKED[name]
    cols = columns_for(form, cols)
    codes = random_codes(form, rows, cols, seed)
    group = torch.arange(cols) // form.group_len
    q, scale = codes.codes.double(), codes.scales.double()[:, group]
    if form.kind == "fp8":
        expected = codes.codes.view(torch.float8_e4m3fn).double() * scale
    elif form.kind == "symmetric":
        expected = (q - 2 ** (form.bits - 1)) * scale
    elif form.kind == "zero":
        expected = (q - codes.offsets.double()[:, group]) * scale
    elif form.kind == "min":
        expected = q * scale + codes.offsets.double()[:, group]
    else:
        block = torch.arange(cols) // 256
        d = codes.supers.double()[:, block]
        if form.kind == "k":
            expected = (
                d * scale * q - codes.super_offsets.double()[:, block] * codes.offsets.double()[:, group]
            )
        else:
            expected = d * scale * (q - 32)
    packed = pack(form, codes)
    torch.testing.assert_close(
        packed.dequantize().double(), expected, rtol=1e-6, atol=1e-4 if form.kind == "k" else 1e-6
    )
    assert torch.equal(packed.dequantize(torch.bfloat16), packed.dequantize().bfloat16())
    padded = PackedTensor(form, packed.data, ceil_div(rows, 16) * 16, ceil_div(cols, 64) * 64).dequantize()
    padded[:rows, :cols] = 0
    assert not padded.any()


def test_views():
    form = PACKED["int4m-g32"]
    packed = pack(form, random_codes(form, 80, 160, 5, (4,)))
    whole = packed.dequantize()
    assert len(packed) == 4
    assert torch.equal(packed[2].dequantize(), whole[2])
    assert packed[2].data.data_ptr() == packed.data[2].data_ptr()
    assert torch.equal(packed[1].rows(32, 70).dequantize(), whole[1, 32:70])


def test_sizes_of_the_35b_experts():
    form = PACKED["int4-g128"]
    assert form.num_bytes(1024, 2048) == 1_081_344
    assert form.num_bytes(2048, 512) == 540_672


def test_columns_that_cannot_be_padded_are_refused():
    for name, cols in [("q4_k", 320), ("int4z-g128", 100), ("int8m-g64", 33)]:
        form = PACKED[name]
        assert not form.fits(cols)
        scales = torch.ones(4, ceil_div(cols, form.group_len)).half()
        with pytest.raises(ValueError):
            pack(form, Codes(torch.zeros(4, cols, dtype=torch.uint8), scales, scales))
