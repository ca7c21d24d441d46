"""Packed weights to values on a card: the bits of the reference."""

import pytest
import torch

from packed_cases import columns_for, random_codes
from packhorse.core.formats import PACKED
from packhorse.kernels.cuda.launch import card_arch
from packhorse.kernels.linear import gather, packed
from packhorse.kernels.linear.unpack import unpack_into
from packhorse.quant.packed import PackedTensor, pack
from packhorse.store.arena import PinnedTensor

pytestmark = pytest.mark.gpu


def on_card(packed: PackedTensor) -> PackedTensor:
    return PackedTensor(packed.format, packed.data.cuda(), packed.num_rows, packed.num_cols)


@pytest.mark.parametrize("name", sorted(PACKED))
@pytest.mark.parametrize(("rows", "cols", "lead"), [(33, 5 * 64, ()), (16, 2048, (3,)), (70, 57, ())])
def test_values_are_those_of_the_reference(name, rows, cols, lead):
    form = PACKED[name]
    packed = pack(form, random_codes(form, rows, columns_for(form, cols), 5, lead))
    native = card_arch(0) >= 80
    for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if native else [])):
        out = torch.full(packed.shape, torch.nan, dtype=dtype, device="cuda")
        assert torch.equal(unpack_into(on_card(packed), out).cpu(), packed.dequantize(dtype))


@pytest.mark.parametrize("name", ["int8-g128", "int4-g32", "q6_k", "int4z-g64"])
def test_an_embedding_in_host_memory_gives_the_rows_of_the_reference(name):
    form = PACKED[name]
    table = pack(form, random_codes(form, 70, columns_for(form, 320), 3, ()))
    pinned = PinnedTensor(table.data)
    for ids in ([69], [0, 5, 5, 16, 68, 33], list(range(70)) * 3):
        want = packed.embed(torch.tensor(ids), table)
        assert torch.equal(gather.embed(torch.tensor(ids).cuda(), table).cpu(), want)
    assert pinned.tensor is table.data


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_plain_embedding_in_host_memory(dtype):
    table = torch.randn(50, 72).to(dtype)
    pinned = PinnedTensor(table)
    ids = torch.tensor([49, 0, 7, 7])
    assert torch.equal(gather.embed(ids.cuda(), table).cpu(), table[ids].float())
    assert pinned.tensor is table
