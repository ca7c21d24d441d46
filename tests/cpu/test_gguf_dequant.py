"""Unpacking of GGUF blocks against gguf's own, to the bit."""

import gguf
import numpy as np
import pytest
import torch
from gguf_files import random_blocks

from packhorse.core.errors import UnsupportedModelError
from packhorse.core.formats import FORMATS
from packhorse.quant import gguf as ours

KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def unpacked(data: np.ndarray, name: str) -> torch.Tensor:
    return ours.dequantize(torch.from_numpy(data.reshape(-1).copy()), FORMATS[name])


def same_bits(found: torch.Tensor, expected: np.ndarray) -> bool:
    return torch.equal(found.view(torch.int32), torch.from_numpy(expected).reshape(-1).view(torch.int32))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("rows", [1, 37])
def test_bits_equal_the_reference(name, rows):
    kind = gguf.GGMLQuantizationType[name]
    data = random_blocks(kind, rows, 768, seed=rows)
    found = unpacked(data, name)
    assert found.dtype == torch.float32 and found.shape == (rows * 768,)
    assert same_bits(found, gguf.dequantize(data, kind))


def test_q8_k_is_its_scale_times_its_values():
    data = random_blocks(gguf.GGMLQuantizationType.Q8_K, 5, 256)
    scale = data[:, :4].copy().view(np.float32)
    assert same_bits(unpacked(data, "Q8_K"), scale * data[:, 4:260].view(np.int8).astype(np.float32))


def test_slices_join_without_a_seam(monkeypatch):
    data = random_blocks(gguf.GGMLQuantizationType.Q5_K, 11, 512)
    whole = unpacked(data, "Q5_K")
    monkeypatch.setattr(ours, "SLICE_LEN", 3 * 256)
    assert torch.equal(unpacked(data, "Q5_K"), whole)


@pytest.mark.parametrize("name", KINDS)
def test_block_sizes_are_those_of_the_format(name):
    form = FORMATS[name]
    kind = gguf.GGMLQuantizationType[name]
    assert (form.block_len, form.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
    assert form.gguf_type == kind.value


def test_other_formats_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="F8_E4M3"):
        ours.dequantize(torch.zeros(4, dtype=torch.uint8), FORMATS["F8_E4M3"])
