"""What every kernel has to give, on any device: called by the CPU and by the GPU tests.

References are written out here in float64 and share no code with the kernels.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.core.protocols import Segment
from packhorse.facts.model import RopeFacts
from packhorse.kernels import dispatch
from packhorse.kernels.attention import ref as attention_ref
from packhorse.kernels.conv.ref import causal_conv
from packhorse.kernels.delta import chunk
from packhorse.kernels.delta import ref as delta_ref
from packhorse.kernels.delta.scan import delta_scan
from packhorse.kernels.experts.grouped import grouped_mix
from packhorse.kernels.experts.ref import expert_mix, route
from packhorse.kernels.norm.ref import gated_rms_norm, l2_norm, rms_norm
from packhorse.kernels.rope.ref import apply_rope, cos_sin, frequencies


def randn(*shape: int, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device)


def close(got: Tensor, want: Tensor, bound: float = 2e-6) -> None:
    """Equal within `bound` of the largest wanted value; NaN nowhere."""
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    error = (got.double() - want.double()).abs().max() / want.double().abs().max()
    assert error <= bound, f"relative error {error:.2e} above {bound:.0e}"


def segments_of(k: Tensor, v: Tensor, cuts: list[int]) -> list[Segment]:
    """k, v [S, Hkv, D] cut at `cuts`, as strided views of pages that hold K and V side by side."""
    pages = torch.stack((k, v), dim=1)
    edges = [0, *cuts, k.shape[0]]
    return [Segment(a, pages[a:b, 0], pages[a:b, 1]) for a, b in pairwise(edges) if a < b]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, position: int, scale: float) -> Tensor:
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys = k[: position + t + 1, h // groups]
            weights = torch.softmax(keys @ q[t, h] * scale, dim=0)
            out[t, h] = weights @ v[: position + t + 1, h // groups]
    return out


ATTENTION_CASES = [
    # num_tokens, position, q heads, kv heads, head dim, cuts
    (1, 0, 4, 2, 64, []),
    (1, 200, 9, 3, 64, [64, 128]),
    (1, 77, 16, 2, 256, [50]),
    (7, 0, 6, 2, 128, [3]),
    (13, 100, 6, 1, 64, [64, 101, 105]),
    (70, 130, 4, 4, 64, [64, 128, 192]),
    (33, 31, 8, 1, 256, [31]),
    (1, 1279, 6, 2, 64, []),
    (1, 2600, 3, 3, 64, [1100]),
]
# Exact mode's segments are short.
EXACT_CASES = [case for case in ATTENTION_CASES if case[0] + case[1] <= attention_ref.EXACT_SEGMENT_LEN]


def check_attention(case: tuple, device: str, which: str) -> None:
    num_tokens, position, num_q, num_kv, dim, cuts = case
    q = randn(num_tokens, num_q, dim, device=device, seed=1)
    k = randn(position + num_tokens, num_kv, dim, device=device, seed=2)
    v = randn(position + num_tokens, num_kv, dim, device=device, seed=3)
    scale = dim**-0.5
    function = {
        "ref": attention_ref.attention,
        "exact": attention_ref.exact_attention,
        "dispatch": dispatch.attention,
    }[which]
    got = function(q, segments_of(k, v, cuts), position, scale)
    close(got, plain_attention(q, k, v, position, scale))


def check_attention_16bit(dtype: torch.dtype, device: str) -> None:
    """Against float64 over the same rounded inputs: the bound is a few roundings of the output type."""
    q, k, v = (randn(n, h, 64, device=device, seed=h).to(dtype) for n, h in ((20, 6), (120, 2), (120, 2)))
    got = dispatch.attention(q, segments_of(k, v, [64]), 100, 0.125)
    close(got, plain_attention(q, k, v, 100, 0.125), 4 * torch.finfo(dtype).eps)


def plain_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    out = torch.empty_like(v)
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            s = state[h] * g[t, h].exp()
            s = s + torch.outer(k[t, h], beta[t, h] * (v[t, h] - s.T @ k[t, h]))
            state[h] = s
            out[t, h] = s.T @ q[t, h]
    return out, state


def delta_inputs(num_tokens: int, heads: int, dk: int, dv: int, device: str) -> list[Tensor]:
    q = l2_norm(randn(num_tokens, heads, dk, device=device, seed=1)) * dk**-0.5
    k = l2_norm(randn(num_tokens, heads, dk, device=device, seed=2))
    v = randn(num_tokens, heads, dv, device=device, seed=3)
    g = -F.softplus(randn(num_tokens, heads, device=device, seed=4))
    beta = randn(num_tokens, heads, device=device, seed=5).sigmoid()
    return [q, k, v, g, beta]


DELTA_CASES = [(1, 2, 32, 32), (5, 3, 16, 48), (64, 2, 32, 32), (65, 1, 128, 128), (200, 6, 32, 24)]


def check_delta(case: tuple[int, int, int, int], device: str, rule: str) -> None:
    _, heads, dk, dv = case
    inputs = delta_inputs(*case, device)
    state = randn(heads, dk, dv, device=device, seed=6)
    want, want_state = plain_delta(*inputs, state)
    got = (delta_scan if rule == "delta_scan" else getattr(delta_ref, rule))(*inputs, state)
    close(got, want, 5e-6)
    close(state, want_state, 5e-6)


def check_delta_strong_decay(device: str) -> None:
    """Gates that wipe the state within a chunk: nothing overflows or turns NaN."""
    for rule in (delta_ref.delta_chunks, delta_scan):
        inputs = delta_inputs(130, 2, 16, 16, device)
        inputs[3] = torch.full_like(inputs[3], -40.0)
        state = randn(2, 16, 16, device=device, seed=6)
        want, want_state = plain_delta(*inputs, state)
        close(rule(*inputs, state), want, 5e-6)
        close(state, want_state, 5e-6)


def check_delta_kernel(case: tuple[int, int, int, int, int], decay: float) -> None:
    """The card's kernel normalises and repeats key heads itself; rows of q, k and v are strided. Keys repeat, so
    that the updates of a chunk depend on one another. decay: how strong; 60 wipes the state at each token."""
    num_tokens, num_k, num_v, dk, dv = case
    mixed = randn(num_tokens, 2 * num_k * dk + num_v * dv + 7, device="cuda", seed=1)
    mixed[:, num_k * dk : 2 * num_k * dk] += 2 * randn(num_k * dk, device="cuda", seed=2)
    g = -decay * F.softplus(randn(num_tokens, num_v, device="cuda", seed=3))
    beta = randn(num_tokens, num_v, device="cuda", seed=4).sigmoid()
    state = randn(num_v, dk, dv, device="cuda", seed=5)
    q, k, v, _ = mixed.double().split([num_k * dk, num_k * dk, num_v * dv, 7], dim=1)
    heads = [x.view(num_tokens, num_k, dk) for x in (q, k)]
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(num_v // num_k, dim=1)
        for x in heads
    )
    want_state = state.double()
    v, rows = v.view(num_tokens, num_v, dv), []
    for t in range(num_tokens):
        want_state = want_state * g[t].double().exp()[:, None, None]
        change = (v[t] - torch.einsum("hkv,hk->hv", want_state, k[t])) * beta[t].double()[:, None]
        want_state = want_state + k[t][:, :, None] * change[:, None, :]
        rows.append(torch.einsum("hkv,hk->hv", want_state, q[t]) * dk**-0.5)
    got = chunk.delta_rule(mixed, g, beta, state, num_k)
    close(got, torch.stack(rows), 1e-5)
    close(state, want_state, 1e-5)


def check_conv(device: str) -> None:
    """One call, and the same input in calls of 1, 2, 5 and 9 rows: torch's own convolution."""
    x, weight = randn(17, 20, device=device), randn(20, 4, device=device, seed=1)
    before = randn(20, 3, device=device, seed=2)
    full = torch.cat((before, x.t()), dim=1).double()
    want = F.conv1d(full[None], weight.double()[:, None], groups=20)[0].t()
    state = before.clone()
    one = causal_conv(x, weight, state)
    close(one, want)
    assert torch.equal(state, x[-3:].t())
    state = before.clone()
    parts = torch.cat([causal_conv(part, weight, state) for part in x.split([1, 2, 5, 9])])
    assert torch.equal(parts, one)


def check_experts(device: str, exact: bool) -> None:
    num_tokens, hidden, inner, num, top_k = 37, 24, 20, 7, 3
    x = randn(num_tokens, hidden, device=device)
    gate_up = randn(num, 2 * inner, hidden, device=device, seed=1)
    down = randn(num, hidden, inner, device=device, seed=2)
    logits = randn(num_tokens, num, device=device, seed=3)
    for norm_topk in (True, False):
        weights, experts = route(logits, top_k, norm_topk)
        share = logits.double().softmax(-1)
        want = torch.zeros(num_tokens, hidden, dtype=torch.float64, device=device)
        for t in range(num_tokens):
            best = sorted(range(num), key=lambda e: -float(share[t, e]))[:top_k]
            assert sorted(best) == sorted(experts[t].tolist())
            total = sum(share[t, e] for e in best) if norm_topk else 1.0
            for e in best:
                gate, up = (gate_up[e].double() @ x[t].double()).chunk(2)
                want[t] += share[t, e] / total * (down[e].double() @ (F.silu(gate) * up))
        close(expert_mix(x, weights, experts, gate_up, down, exact=exact), want)


def check_grouped_experts(device: str, num_tokens: int) -> None:
    """Groups that divide the experts, that do not, and one for all; experts that nobody chose. Against the
    reference over the same bf16 values in fp32: what is rounded between is the inner result and each output."""
    hidden, inner, num, top_k = 64, 32, 7, 3
    x = randn(num_tokens, hidden, device=device).bfloat16()
    gate_up = (randn(num, 2 * inner, hidden, device=device, seed=1) / 8).bfloat16()
    down = (randn(num, hidden, inner, device=device, seed=2) / 6).bfloat16()
    logits = randn(num_tokens, num, device=device, seed=3)
    logits[:, 2] = -30.0
    weights, experts = route(logits, top_k, True)
    want = expert_mix(x.float(), weights, experts, gate_up.float(), down.float())
    for group in (1, 3, 7, 100):
        args = (lambda a, b: gate_up[a:b], lambda a, b: down[a:b], num, group)
        close(grouped_mix(x, weights, experts, *args), want, 1e-2)


def check_norms(device: str) -> None:
    x, w = randn(5, 48, device=device), randn(48, device=device, seed=1)
    unit = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    close(rms_norm(x, w, 1e-6, torch.float32), unit * w.double())
    gate = randn(5, 48, device=device, seed=2)
    close(gated_rms_norm(x, gate, w, 1e-6, torch.float32), unit * w.double() * F.silu(gate.double()))
    close(l2_norm(x), x.double() / (x.double().pow(2).sum(-1, keepdim=True) + 1e-6).sqrt())


def check_rope(device: str) -> None:
    """A rotation by position times frequency in every (d, d + R / 2) plane; dims from R on stay."""
    x = randn(3, 2, 20, device=device)
    positions = torch.tensor([0, 5, 100_000], device=device)
    inv_freq, factor = frequencies(RopeFacts(theta=1e4, rotary_dim=8))
    got = apply_rope(x, *cos_sin(positions, inv_freq.to(device), factor))
    want = x.double().clone()
    for t, position in enumerate([0, 5, 100_000]):
        for d in range(4):
            # The angle is a product rounded to fp32, as in transformers.
            angle = torch.tensor(float(position)) * torch.tensor(1e4 ** (-2 * d / 8), dtype=torch.float32)
            c, s = angle.double().cos(), angle.double().sin()
            a, b = x[t, :, d].double(), x[t, :, d + 4].double()
            want[t, :, d], want[t, :, d + 4] = a * c - b * s, b * c + a * s
    close(got, want)
    assert torch.equal(got[..., 8:], x[..., 8:])
