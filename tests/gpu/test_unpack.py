"""Packed weights to values on a card: the bits of the reference."""

import pytest
import torch

from packed_cases import columns_for, random_codes
from packhorse.core.formats import PACKED
from packhorse.kernels.cuda.launch import card_arch
from packhorse.kernels.linear.unpack import unpack_into
from packhorse.quant.packed import PackedTensor, pack

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
