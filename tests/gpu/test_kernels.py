"""The same cases on a card."""

import pytest
import torch

import kernel_cases as cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("which", ["ref", "dispatch"])
@pytest.mark.parametrize("case", cases.ATTENTION_CASES)
def test_attention(case, which):
    cases.check_attention(case, "cuda", which)


@pytest.mark.parametrize("case", cases.EXACT_CASES)
def test_exact_attention(case):
    cases.check_attention(case, "cuda", "exact")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_16bit(dtype):
    cases.check_attention_16bit(dtype, "cuda")


@pytest.mark.parametrize("rule", ["delta_steps", "delta_chunks", "delta_scan"])
@pytest.mark.parametrize("case", cases.DELTA_CASES)
def test_delta(case, rule):
    cases.check_delta(case, "cuda", rule)


@pytest.mark.parametrize(
    "case", [(1, 1, 1, 32, 32), (64, 2, 6, 128, 128), (65, 2, 4, 64, 96), (2500, 1, 2, 128, 32)]
)
@pytest.mark.parametrize("decay", [1.0, 60.0])
def test_delta_chunk_kernel(case, decay):
    cases.check_delta_kernel(case, decay)


def test_delta_strong_decay():
    cases.check_delta_strong_decay("cuda")


@pytest.mark.parametrize("num_tokens", [1, 2, 37, 300])
def test_grouped_experts(num_tokens):
    cases.check_grouped_experts("cuda", num_tokens)


def test_conv():
    cases.check_conv("cuda")


@pytest.mark.parametrize("exact", [False, True])
def test_experts(exact):
    cases.check_experts("cuda", exact)


def test_norms():
    cases.check_norms("cuda")


def test_rope():
    cases.check_rope("cuda")
