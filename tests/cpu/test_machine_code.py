"""All kernels compile for every supported card: no spills, within its shared memory, tensor cores where they are meant.

CI compiles `kernel_list.usual`; the slow test compiles `kernel_list.everything`, in at most 5 minutes on two cores.
"""

import pytest

import machine_code
from kernel_list import ARCHS, everything, first_start, packed, usual
from packhorse.kernels.cuda.nvrtc import KERNELS, Target, compile_code

PARTS = 12
"""Slices of the list that are tests of their own, so that two workers share it."""


@pytest.mark.parametrize("part", range(PARTS))
def test_usual_forms(part):
    assert not machine_code.faults(machine_code.part_of(usual(), part, PARTS))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_form(part):
    assert not machine_code.faults(machine_code.part_of(everything(), part, PARTS))


def test_no_kernel_is_left_out():
    """Each source that the engine compiles, for each card; the rate that `doctor` measures is no part of it."""
    sources = {str(path.relative_to(KERNELS)) for path in KERNELS.glob("*/*.cu")} - {"cuda/read.cu"}
    for arch in ARCHS:
        assert {variant.source for variant, known in usual() if known == arch} == sources
        assert any(variant.tensor_cores for variant in first_start(arch))


@pytest.mark.parametrize("arch", (75, 80, 90, 120))
def test_tensor_core_instructions_are_those_of_nvdisasm(arch):
    """One card of each generation of machine code: 8.6 and 8.9 have that of 8.0."""
    variant = packed("int4-g128")[2]
    code, _ = compile_code(variant, Target(arch))
    text = machine_code.disassemble(code, variant.kernel)
    assert text.count("HMMA.") == machine_code.count_tensor_ops(code, variant.kernel) > 0
