"""Kernels of prompts' chunks on a card beside their torch twins: odd sizes, strides, and rows that stand alone."""

import dataclasses
import math

import pytest
import test_packed_experts as packed_experts
import torch
import torch.nn.functional as F

from kernel_cases import close, randn
from matrix_cases import bound, error, to_device
from packhorse.core.formats import PACKED
from packhorse.kernels import dispatch
from packhorse.kernels.attention.merge import CardMerger
from packhorse.kernels.attention.ref import Merger
from packhorse.kernels.conv.cuda import conv_silu
from packhorse.kernels.conv.ref import causal_conv
from packhorse.kernels.cuda.launch import saturated, target_of
from packhorse.kernels.experts import combine as card
from packhorse.kernels.experts import mma
from packhorse.kernels.experts.grouped import ranked_sum
from packhorse.kernels.experts.ref import route, swiglu
from packhorse.kernels.norm.heads import head_rows
from packhorse.kernels.norm.ref import gated_rms_norm, rms_norm, sigmoid_gate

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def dtype(request):
    if request.param == torch.bfloat16 and not target_of(torch.device("cuda")).has_bf16:
        pytest.skip("bf16 needs compute capability 8.0")
    return request.param


@pytest.mark.parametrize(("tokens", "top_k", "hidden"), [(1, 1, 8), (5, 3, 2048), (33, 8, 72), (7, 10, 4104)])
def test_combine(tokens, top_k, hidden, dtype):
    """Bit for bit the sum over ranks, and the same for a token alone."""
    results = randn(tokens * top_k, hidden, device="cuda").to(dtype)
    places = torch.randperm(tokens * top_k, generator=torch.Generator().manual_seed(1)).view(-1, top_k).cuda()
    weights = randn(tokens, top_k, device="cuda", seed=2)
    got = card.combine(results, places, weights)
    assert torch.equal(got, ranked_sum(results, places, weights))
    assert torch.equal(card.combine(results, places[-1:], weights[-1:]), got[-1:])


@pytest.mark.parametrize(("rows", "inner"), [(1, 8), (37, 512), (300, 24), (0, 8)])
def test_swiglu(rows, inner, dtype):
    gate_up = (3 * randn(rows, 2 * inner, device="cuda")).to(dtype)
    got, want = card.swiglu(gate_up), swiglu(gate_up.double(), torch.float64)
    assert got.shape == want.shape and got.dtype == dtype
    eps = torch.finfo(dtype).eps / 2 * 1.01
    assert bool(((got.double() - want).abs() <= eps * want.abs() + 1e-6).all())


def test_swiglu_counts_what_does_not_fit():
    """fp16 ends at 65,504; 300 times 300 does not fit."""
    rows = torch.tensor([[300.0] * 7 + [-300.0] + [300.0] * 8], device="cuda").half()
    before = int(saturated(rows.device))
    got = card.swiglu(rows)
    assert got[0, :7].tolist() == [65504.0] * 7 and got[0, 7] == 0
    assert int(saturated(rows.device)) - before == 7


@pytest.mark.parametrize(
    ("num_kv", "groups", "tokens", "dim"), [(1, 1, 1, 8), (2, 8, 33, 256), (3, 1, 65, 64), (2, 3, 7, 96)]
)
def test_merge(num_kv, groups, tokens, dim, dtype):
    """Segments of grouped heads and of single heads, in the library's order of memory, whose weights differ by up to
    e^60; some saw no key. Rows alone give the bits of all together."""
    heads = num_kv * groups
    twin, card_merger, alone = Merger(), CardMerger(), CardMerger()
    for segment in range(4):
        out = randn(heads, tokens, dim, device="cuda", seed=segment).to(dtype)
        lse = 20 * randn(heads, tokens, device="cuda", seed=10 + segment)
        if segment == 1:
            lse[0, -1] = -math.inf
        twin.add(out, lse)
        alone.add(out[:, -1:], lse[:, -1:])
        if segment == 2:  # heads outermost
            card_merger.add(out, lse)
            continue
        # As flash attention leaves it: token by token, a token the rows of its group one after another.
        memory = out.view(num_kv, groups, tokens, dim).permute(1, 2, 0, 3).contiguous()
        card_merger.add(memory.permute(2, 0, 1, 3), lse.view(num_kv, groups, tokens))
    close(card_merger.result, twin.result)
    assert torch.equal(alone.result, card_merger.result[:, -1:])


def test_merge_of_nothing():
    """A row that no segment showed a key has weights of 0."""
    merger, out = CardMerger(), randn(1, 2, 8, device="cuda").half()
    for lse in (-math.inf, -math.inf, 3.0):
        merger.add(torch.zeros_like(out) if lse < 0 else out, torch.full((1, 2), lse, device="cuda"))
    close(merger.result, out.float())


@pytest.mark.parametrize(
    ("rows", "channels", "taps"), [(1, 2, 4), (2, 34, 4), (33, 520, 4), (100, 64, 2), (64, 6, 3)]
)
def test_conv_silu(rows, channels, taps, dtype):
    """A chunk in rows that lie apart, at once and in pieces: the same bits and the same state."""
    x = randn(rows, channels + 10, device="cuda").to(dtype)[:, :channels]
    weight = randn(channels, taps, device="cuda", seed=1)
    before = randn(channels, taps - 1, device="cuda", seed=2).to(dtype)
    state, want_state = before.clone(), before.clone()
    got = torch.full((rows, channels), math.nan, device="cuda")
    conv_silu(x, weight, state, got)
    close(got, F.silu(causal_conv(x, weight, want_state).double()), 1e-6)
    assert torch.equal(state, want_state)
    state, parts = before.clone(), torch.empty_like(got)
    for start in range(0, rows, 13):
        conv_silu(x[start : start + 13], weight, state, parts[start : start + 13])
    assert torch.equal(parts, got) and torch.equal(state, want_state)


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 4), (9, 3, 128), (17, 2, 256), (3, 5, 100)])
def test_head_rows(tokens, heads, dim, dtype):
    """Norms of heads within wider rows, the gated norm of fp32, and a gate alone."""
    wide = randn(tokens, (heads + 2) * dim, device="cuda").to(dtype).view(tokens, heads + 2, dim)
    x, gate, fp32 = wide[:, :heads], wide[:, 2:], randn(tokens, heads, dim, device="cuda", seed=1)
    weight = 1 + randn(dim, device="cuda", seed=2) / 8
    exact = torch.float64
    unit = weight.double(), 1e-6, exact

    def check(got, want):
        assert got.is_contiguous() and got.dtype == dtype
        eps = torch.finfo(dtype).eps / 2 * 1.01
        assert bool(((got.double() - want).abs() <= eps * want.abs() + 1e-6).all())

    check(head_rows(x, dtype, weight=weight, eps=1e-6), norm64(x, *unit))
    want = norm64(fp32, *unit) * F.silu(gate.double())
    check(head_rows(fp32, dtype, weight=weight, eps=1e-6, gate=gate), want)
    close(gated_rms_norm(fp32, gate, weight, 1e-6, torch.float32), want, 1e-6)
    close(rms_norm(x, weight, 1e-6, torch.float32), norm64(x, *unit), 1e-6)
    want = fp32.double() * gate.double().sigmoid()
    check(head_rows(fp32, dtype, gate=gate, act="sigmoid"), want)
    close(sigmoid_gate(fp32, gate, torch.float32), want, 1e-6)


def norm64(x, weight, eps, dtype):
    x = x.to(dtype)
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.parametrize("case", packed_experts.CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_expert_tiles(case, dtype):
    """Experts on the card and in pinned memory, for tiles of few and of many tokens, an expert that most want and one
    that nobody does: within the bound of float64, with the same bits for a token whoever is beside it."""
    gate_up, down, hidden, _, num_experts, top_k = case
    experts = packed_experts.Experts(*case[:5])
    table = dataclasses.replace(experts.table, address=experts.table.address[1:])
    many = 64 * num_experts // top_k + 3
    x = randn(many, hidden, device="cuda").to(dtype)
    logits = randn(many, num_experts, device="cuda", seed=1)
    logits[:, 0] += 4
    logits[:, 1] -= 99 if top_k < num_experts else 0
    weights, ids = route(logits, top_k, True)
    got = mma.mix(x, weights, ids, table)
    for num in (21, 1):
        assert torch.equal(mma.mix(x[:num], weights[:num], ids[:num], table), got[:num])
    want = experts.want(x[:21], weights[:21], ids[:21])
    rounded = bound(PACKED[gate_up], dtype) + bound(PACKED[down], dtype)
    assert error(got[:21].cpu(), want) <= 2 * rounded + 2 * torch.finfo(dtype).eps
    last = experts.want(x[-1:], weights[-1:], ids[-1:])
    assert error(got[-1:].cpu(), last) <= 2 * rounded + 2 * torch.finfo(dtype).eps


def test_expert_tiles_through_dispatch(dtype):
    """Stacks as the loader lays them, and a table of blocks: the same bits."""
    experts = packed_experts.Experts("int4-g128", "int6-g32", 256, 128, 12)
    table = dataclasses.replace(experts.table, address=experts.table.address[1:])
    x = randn(21, 256, device="cuda").to(dtype)
    weights, ids = route(randn(21, 12, device="cuda", seed=1), 3, True)
    stacks = to_device(experts.gate_up), to_device(experts.down)
    assert torch.equal(
        dispatch.expert_mix(x, weights, ids, *stacks, exact=False), mma.mix(x, weights, ids, table)
    )


def test_what_does_not_fit_is_counted():
    """Inner values of an expert beyond fp16."""
    experts = packed_experts.Experts("int4-g128", "int4-g128", 256, 128, 4)
    table = dataclasses.replace(experts.table, address=experts.table.address[1:])
    x = 3000 * randn(20, 256, device="cuda").half()
    before = int(saturated(x.device))
    got = mma.mix(x, torch.ones(20, 2, device="cuda"), torch.tensor([[0, 3]] * 20, device="cuda"), table)
    assert torch.isfinite(got).all() and int(saturated(x.device)) > before
