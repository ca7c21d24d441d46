"""The same draws on a card, also from a graph."""

import pytest
import torch

import sample_cases as cases
from packhorse.kernels.sample.ref import draw

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("vocab", "rounds"), [(1, 2), (300, 20), (151_936, 3)])
def test_draws(vocab, rounds):
    cases.check_draws(vocab, "cuda", rounds)


def test_broken_rows():
    cases.check_broken_rows("cuda")


def test_captured():
    ones = torch.ones(2, dtype=torch.float64, device="cuda")
    inputs = [torch.randn(2, 5000, device="cuda"), ones, torch.zeros(2, dtype=torch.int64, device="cuda")]
    inputs += [ones, 0 * ones, 0.5 * ones]
    draw(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = draw(*inputs)
    for seed in range(3):
        inputs[0].copy_(torch.randn(2, 5000, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(drawn, draw(*inputs))
