"""The same cases on a card."""

import pytest
import torch

import kernel_cases as cases
from packhorse.kernels import dispatch
from packhorse.kernels.attention import flash
from packhorse.kernels.cuda.launch import card_arch

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_attention_of_a_whole_chunk(dim, dtype):
    """Lengths for which Hopper has a kernel of its own, over keys in segments; against float64, row by row."""
    length, position, num_q, num_kv = 1024, 3072, 16, 2
    q, k, v = (
        cases.randn(rows, heads, dim, device="cuda", seed=heads + rows).to(dtype)
        for rows, heads in ((length, num_q), (position + length, num_kv), (position + length, num_kv))
    )
    scale = dim**-0.5
    got = dispatch.attention(q, cases.segments_of(k, v, [1024, 2048, 3072]), position, scale)
    keys, values = (x.double().repeat_interleave(num_q // num_kv, dim=1).transpose(0, 1) for x in (k, v))
    seen = torch.ones(length, position + length, dtype=torch.bool, device="cuda").tril(position)
    scores = (q.double().transpose(0, 1) @ keys.mT * scale).masked_fill(~seen, float("-inf"))
    cases.close(got, (scores.softmax(-1) @ values).transpose(0, 1), 4 * torch.finfo(dtype).eps)
    if card_arch(q.device) == 90:
        rows = flash.group_rows(q, num_kv)[None]
        assert flash._has_cudnn(rows, k[:1024].transpose(0, 1)[None]), "the test is of cuDNN's kernel there"
