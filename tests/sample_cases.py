"""Draws on a device against engine.sample, called by the CPU and by the GPU tests."""

from __future__ import annotations

import torch

from packhorse.core.types import Request, SamplingParams
from packhorse.engine.sample import Sampled, Sampler, sample, uniform
from packhorse.kernels.sample.ref import draw

CHOICES = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.3, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 5.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.05, "top_p": 0.999},
    {"temperature": 100.0, "top_k": 5},
]


def check_draws(vocab: int, device: str, rounds: int) -> None:
    """The tokens of engine.sample for each of CHOICES, over many rows and seeds; ties are common in half of them."""
    params = [SamplingParams(seed=i, **choice) for i, choice in enumerate(CHOICES * 3)]
    samplers = [Sampler(Request(str(i), (1,), p)) for i, p in enumerate(params)]
    seen = set()
    for index in range(rounds):
        logits = 4 * torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(index))
        if index % 2:
            logits = logits.round()
        want = [token.token_id for token in sample(logits, samplers) if isinstance(token, Sampled)]
        fields = {
            name: torch.tensor([getattr(p, name) for p in params], dtype=torch.float64, device=device)
            for name in ("temperature", "top_p", "min_p")
        }
        got = draw(
            logits.to(device),
            top_k=torch.tensor([p.top_k for p in params], device=device),
            uniform=torch.tensor(
                [uniform(p.seed or 0, index) for p in params], dtype=torch.float64, device=device
            ),
            **fields,
        )
        assert got.tolist() == want
        seen |= set(want)
    assert len(seen) > min(vocab, 3 * rounds) // 2


def check_broken_rows(device: str) -> None:
    """A NaN or an infinity gives -1, and the other rows what they give alone."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(4, dtype=torch.float64, device=device)
    rest = ones, torch.zeros(4, dtype=torch.int64, device=device), ones, 0 * ones, 0.37 * ones
    want = draw(logits.to(device), *rest)
    logits[1, 7], logits[2, 0] = torch.nan, torch.inf
    assert draw(logits.to(device), *rest).tolist() == [int(want[0]), -1, -1, int(want[3])]
