"""Where there is no card, what prompts' kernels stand for is done by their torch twins."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kernel_cases import close, randn
from packhorse.facts.model import MoeFacts
from packhorse.kernels import dispatch
from packhorse.kernels.attention.merge import CardMerger, merger_for
from packhorse.kernels.attention.ref import Merger
from packhorse.kernels.experts.grouped import ranked_sum
from packhorse.layers.mlp import Moe


def test_twins_stand_in():
    x, gate, weight = randn(5, 3, 16, device="cpu"), randn(5, 3, 16, device="cpu", seed=1), torch.ones(16)
    unit = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    close(dispatch.rms_norm(x, weight, 1e-6, torch.float32), unit)
    close(dispatch.gated_rms_norm(x, gate, weight, 1e-6, torch.float32), unit * F.silu(gate))
    close(dispatch.sigmoid_gate(x, gate, torch.float32), x * gate.sigmoid())
    close(dispatch.swiglu(x[:, 0], torch.float32), F.silu(x[:, 0, :8]) * x[:, 0, 8:])
    assert isinstance(merger_for(x.half()), Merger) and not isinstance(merger_for(x.half()), CardMerger)


def test_conv_silu():
    """Out is written where it lies, the state moves on."""
    x, weight, state = randn(5, 4, device="cpu"), randn(4, 3, device="cpu", seed=1), torch.zeros(4, 2)
    out = torch.full((7, 4), torch.nan)
    dispatch.conv_silu(x, weight, state, out[1:6])
    padded = torch.cat((torch.zeros(2, 4), x))
    close(out[1:6], F.silu(sum(padded[tap : tap + 5] * weight[:, tap] for tap in range(3))))
    assert torch.equal(state, x[-2:].t()) and out[0].isnan().all() and out[6].isnan().all()


def test_ranked_sum():
    """Each token's results, by rank, from where they lie."""
    results, weights = randn(6, 4, device="cpu"), randn(3, 2, device="cpu", seed=1)
    places = torch.tensor([[5, 0], [2, 2], [1, 4]])
    want = [sum(weights[t, k] * results[places[t, k]] for k in range(2)) for t in range(3)]
    close(ranked_sum(results, places, weights), torch.stack(want))


@pytest.mark.parametrize("num_tokens", [1, 16, 17])
def test_few_tokens_read_experts_where_they_lie(num_tokens, monkeypatch):
    """As a decode step has; more are for the layer's stacks, which are let go of then."""
    asked = []

    class Staged:
        gate_up_proj, down_proj = "gate_up", "down"

        def few(self, ids):
            return "table"

        def sent(self):
            asked.append("sent")

    monkeypatch.setattr(dispatch, "table_mix", lambda x, *args: asked.append(args[-1]) or x)
    monkeypatch.setattr(dispatch, "expert_mix", lambda x, *args, exact: asked.append(args[-2:]) or x)
    weights = SimpleNamespace(gate=lambda x: x, experts=Staged())
    facts = MoeFacts(num_experts=8, top_k=2, expert_dim=4, shared_dim=0, norm_topk=True)
    Moe(facts, exact=False)(randn(num_tokens, 8, device="cpu"), weights)
    assert asked == (["table"] if num_tokens <= 16 else [("gate_up", "down"), "sent"])
