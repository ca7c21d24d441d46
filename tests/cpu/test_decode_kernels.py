"""Decode kernels compile for every supported card, without spills, within its shared memory, on its tensor cores."""

import pytest
import torch

import machine_code
from packhorse.kernels.attention.cuda import PagedAttention
from packhorse.kernels.cuda.nvrtc import Variant
from packhorse.kernels.delta import cuda as delta
from packhorse.kernels.norm import cuda as norm

ARCHS = (75, 80, 86, 89, 90, 120)
CODECS = ("fp16", "bf16", "fp8", "k5v4", "k4v4")


def attention(codec: str, dim: int, dtype: torch.dtype = torch.float16) -> dict[str, Variant]:
    return PagedAttention(codec, 16, 2, dim, dtype, 1, 1, 262_144).variants


# One card for each codec's 256-dim form: registers are shortest there. The slow test has the rest.
USUAL = [
    *(
        (attention(codec, 256)["attend_split"], arch)
        for codec, arch in zip(CODECS, (75, 80, 75, 86, 89), strict=True)
    ),
    (attention("k5v4", 256)["attend_split"], 75),
    (attention("k5v4", 256)["attend_split"], 120),
    (attention("k5v4", 256)["attend_merge"], 75),
    (attention("k5v4", 256)["write_kv"], 75),
    (attention("fp8", 64)["write_kv"], 90),
    (delta.variant(128, 4, torch.float16), 75),
    (delta.variant(128, 4, torch.bfloat16), 120),
    (norm.variant(torch.float16), 75),
]


@pytest.mark.parametrize(("variant", "arch"), USUAL, ids=str)
def test_usual_forms(variant, arch):
    machine_code.check(variant, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_form(arch):
    variants = [
        variant
        for codec in CODECS
        for dim in (64, 128, 256)
        for dtype in (torch.float16, torch.bfloat16)
        for variant in attention(codec, dim, dtype).values()
    ]
    for dtype in (torch.float16, torch.bfloat16):
        variants += [delta.variant(dim, 4, dtype) for dim in delta.HEAD_DIMS] + [norm.variant(dtype)]
    wrong = []
    for variant in variants:
        if variant.min_arch <= arch:
            try:
                machine_code.check(variant, arch)
            except AssertionError as error:
                wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
