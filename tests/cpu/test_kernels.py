"""Reference kernels and their CPU twins against float64, odd sizes included."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import kernel_cases as cases
from packhorse.facts.model import RopeFacts
from packhorse.kernels import dispatch
from packhorse.kernels.attention import flash
from packhorse.kernels.linear import cpu as linear_cpu
from packhorse.kernels.rope.ref import frequencies


def test_the_cpu_twin_of_attention_is_there():
    assert flash.fits(torch.zeros(1)), (
        "this torch lacks the flash kernel: dispatch would fall back to the reference"
    )


@pytest.mark.parametrize("which", ["ref", "dispatch"])
@pytest.mark.parametrize("case", cases.ATTENTION_CASES)
def test_attention(case, which):
    cases.check_attention(case, "cpu", which)


@pytest.mark.parametrize("case", cases.EXACT_CASES)
def test_exact_attention(case):
    cases.check_attention(case, "cpu", "exact")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_16bit(dtype):
    cases.check_attention_16bit(dtype, "cpu")


@pytest.mark.parametrize("rule", ["delta_steps", "delta_chunks", "delta_rule", "delta_scan"])
@pytest.mark.parametrize("case", cases.DELTA_CASES)
def test_delta(case, rule):
    cases.check_delta(case, "cpu", rule)


def test_delta_strong_decay():
    cases.check_delta_strong_decay("cpu")


def test_conv():
    cases.check_conv("cpu")


@pytest.mark.parametrize("exact", [False, True])
def test_experts(exact):
    cases.check_experts("cpu", exact)


@pytest.mark.parametrize("num_tokens", [1, 2, 37, 300])
def test_grouped_experts(num_tokens):
    cases.check_grouped_experts("cpu", num_tokens)


def test_norms():
    cases.check_norms("cpu")


def test_rope():
    cases.check_rope("cpu")


ROPES = [
    ({"rope_type": "default", "rope_theta": 1e6}, {}),
    ({"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}, {"factor": 3.0}),
    (
        {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0, "original_max_position_embeddings": 262144},
        {"factor": 4.0, "original_context": 262144},
    ),
    (
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.8,
            "mscale_all_dim": 0.4,
            "truncate": False,
        },
        {
            "factor": 8.0,
            "original_context": 4096,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.8,
            "mscale_all_dim": 0.4,
            "truncate": False,
        },
    ),
    (
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {"factor": 8.0, "original_context": 8192},
    ),
]


@pytest.mark.parametrize(("theirs", "ours"), ROPES, ids=lambda x: x.get("rope_type"))
def test_frequencies_are_those_of_transformers(theirs, ours):
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters=theirs,
    )
    facts = RopeFacts(theta=theirs["rope_theta"], rotary_dim=64, kind=theirs["rope_type"], **ours)
    got, factor = frequencies(facts)
    if facts.kind == "default":
        want, want_factor = 1.0 / (1e6 ** (torch.arange(0, 64, 2).float() / 64)), 1.0
    else:
        want, want_factor = ROPE_INIT_FUNCTIONS[facts.kind](config, "cpu")
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert factor == pytest.approx(want_factor, rel=1e-6)


@pytest.mark.parametrize("rows", [256, 300, 1000, 301, 8])
@pytest.mark.parametrize("tokens", [1, 3])
def test_linear(rows, tokens, monkeypatch):
    """Split over threads or not, with and without a bias: the product in float64."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x, weight = cases.randn(tokens, 96, device="cpu"), cases.randn(rows, 96, device="cpu", seed=1)
    bias = cases.randn(rows, device="cpu", seed=2)
    assert linear_cpu.fits(x, weight) == (tokens == 1 and rows in (256, 300, 1000))
    want = x.double() @ weight.double().t()
    cases.close(dispatch.linear(x, weight), want)
    cases.close(dispatch.linear(x, weight, bias), want + bias)
