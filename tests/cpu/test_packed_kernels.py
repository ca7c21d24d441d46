"""Products over packed weights compile for every supported card: no spills, its shared memory, its tensor cores."""

import pytest
import torch

import machine_code
from packhorse.core.formats import PACKED
from packhorse.kernels.cuda.nvrtc import Variant
from packhorse.kernels.experts import cuda as experts
from packhorse.kernels.linear import cuda as linear

ARCHS = (75, 80, 86, 89, 90, 120)
DTYPES = (torch.float16, torch.bfloat16)
# What importers and the recipes give.
FORMATS = (
    *("int4-g32", "int4-g64", "int4-g128", "int4z-g32", "int4z-g64", "int4z-g128", "int4m-g32"),
    *("int5-g32", "int5m-g32", "int6-g32", "int8-g32", "int8-g64", "int8-g128", "int8z-g128"),
    *("q4_k", "q5_k", "q6_k", "fp8-g128"),
)


def forms(name: str, dtype: torch.dtype = torch.float16) -> list[Variant]:
    """gemv of 8 tokens, with two row blocks, of 16; router's plan; gate_up and down of 8 and of 16."""
    form = PACKED[name]
    table = experts.ExpertTable(torch.zeros(1, 1), form, form, 2048, 512)
    return [*linear.variants(form, dtype), *experts.variants(table, dtype)]


# A format's shortest of registers for some cards each. The slow test has the rest.
USUAL = [
    *((forms("int4-g128")[2], arch) for arch in ARCHS),
    (forms("int4-g128")[0], 75),
    (forms("int4-g128")[1], 86),
    (forms("int4-g128", torch.bfloat16)[2], 86),
    (forms("int4-g128")[3], 75),
    (forms("int4-g128")[6], 75),
    (forms("int4-g128")[6], 120),
    (forms("int4-g128")[7], 86),
    (forms("q4_k")[2], 75),
    (forms("q5_k", torch.bfloat16)[7], 89),
    (forms("q6_k")[6], 86),
    (forms("q6_k")[7], 120),
    (forms("int4-g32", torch.bfloat16)[7], 86),
    (forms("int8-g32")[2], 75),
    (forms("int8-g128", torch.bfloat16)[2], 80),
    (forms("fp8-g128")[1], 75),
    (forms("int5m-g32")[2], 86),
]


@pytest.mark.parametrize(("variant", "arch"), USUAL, ids=str)
def test_usual_forms(variant, arch):
    machine_code.check(variant, arch)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_form(arch, name):
    wrong = []
    for variant in [variant for dtype in DTYPES for variant in forms(name, dtype)]:
        if variant.min_arch <= arch:
            try:
                machine_code.check(variant, arch)
            except AssertionError as error:
                wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


def test_rings_fit_every_card():
    """Rings of two row blocks leave room on the cards with the least shared memory; each K has its warps."""
    for form in PACKED.values():
        warps = linear.num_warps(form, 1 << 20)
        assert 4 <= warps <= linear.MAX_WARPS
        assert linear.ring_bytes(form, 2, warps) <= 96 << 10
        for units in range(1, 70):
            used = linear.num_warps(form, 512 * units)
            rounds = -(-units // used)
            assert used <= min(warps, units) and (rounds - 1) * warps < units
