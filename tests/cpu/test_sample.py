"""Sampling against exact distributions, transformers' processors, and itself in other company."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from packhorse.core.errors import ComputeError
from packhorse.core.types import Request, SamplingParams, TokenLogprob
from packhorse.engine.sample import Sampled, Sampler, distribution, sample, token_logprob, uniform

PROMPT = (3, 5, 5, 8)


def logits_of(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sampler_of(name: str = "a", prompt: tuple[int, ...] = PROMPT, **params: object) -> Sampler:
    return Sampler(Request(name, prompt, SamplingParams(**params)))


def tokens(results: list[Sampled | ComputeError]) -> list[int]:
    assert all(isinstance(r, Sampled) for r in results)
    return [r.token_id for r in results]


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution to draw from, written down once more, plainly: [V] float64."""
    p = (logits.double() / params.temperature).softmax(0)
    order = sorted(range(len(p)), key=lambda i: (-p[i].item(), i))
    if params.top_k:
        order = order[: params.top_k]
    total, kept, mass = sum(p[i].item() for i in order), [], 0.0
    for i in order:
        if mass < params.top_p * total:
            kept.append(i)
        mass += p[i].item()
    kept = [i for i in kept if p[i] >= params.min_p * p.max()]
    out = torch.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


def chi_square_limit(df: int) -> float:
    """The value a chi-square variable exceeds once in 30,000 times (Wilson and Hilferty)."""
    return df * (1 - 2 / (9 * df) + 4.0 * math.sqrt(2 / (9 * df))) ** 3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_p=0.9),
        SamplingParams(temperature=1.7, top_k=7),
        SamplingParams(temperature=1.3, min_p=0.05),
    ],
    ids=["temperature", "top_p", "top_k", "min_p"],
)
def test_draws_follow_the_distribution(params: SamplingParams):
    num_samplers, draws_each = 20, 1000
    logits = logits_of(1, 24, scale=1.5)
    samplers = [sampler_of(**vars(replace(params, seed=n))) for n in range(num_samplers)]
    counts = torch.zeros(24, dtype=torch.float64)
    for _ in range(draws_each):
        ids = torch.tensor(tokens(sample(logits.expand(num_samplers, -1), samplers)))
        counts += torch.bincount(ids, minlength=24)
    expected = probabilities(logits[0], params) * num_samplers * draws_each
    assert counts[expected == 0].sum() == 0
    some = expected > 0
    chi_square = float(((counts - expected)[some] ** 2 / expected[some]).sum())
    assert expected[some].min() > 5 and chi_square < chi_square_limit(int(some.sum()) - 1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("vocab", [3, 50, 700, 5000])
@pytest.mark.parametrize(
    "temperature, top_k, top_p, min_p",
    [
        (1, 0, 0.9, 0),
        (0.5, 0, 0.3, 0),
        (1, 5, 1, 0),
        (2, 0, 1, 0.1),
        (0.7, 20, 0.8, 0.02),
        (100, 0, 0.999, 0),
    ],
)
def test_kept_tokens_are_those_transformers_keeps(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
):
    logits = logits_of(1, vocab, seed).double()
    scores = TemperatureLogitsWarper(float(temperature))(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, weights = distribution(logits[0], params)
    assert ids.tolist() == scores[0].isfinite().nonzero().squeeze(1).tolist()
    torch.testing.assert_close(weights / weights.sum(), scores[0].softmax(0)[ids])


def test_greedy_takes_the_best_and_the_lowest_id_of_equals():
    logits = logits_of(3, 500)
    logits[1, [17, 400]] = 99.0
    logits[2, [0, 499]] = 99.0
    assert tokens(sample(logits, [sampler_of()] * 3)) == [int(logits[0].argmax()), 17, 0]


def test_greedy_of_equals_after_penalties():
    logits = torch.zeros(1, 10)
    logits[0, [2, 5, 7]] = 4.0
    sampler = sampler_of(frequency_penalty=1.0)
    assert [tokens(sample(logits, [sampler]))[0] for _ in range(5)] == [2, 5, 7, 2, 5]


def test_top_k_keeps_exactly_k_of_equals():
    ids, _ = distribution(torch.ones(10), SamplingParams(temperature=1.0, top_k=3))
    assert ids.tolist() == [0, 1, 2]
    logits = torch.tensor([1.0, 2.0, 1.0, 3.0, 1.0])
    ids, _ = distribution(logits, SamplingParams(temperature=1.0, top_k=4))
    assert ids.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("off", [{"top_k": 100}, {"top_k": 101}, {"top_k": 2**31}, {"top_p": 1.0}, {}])
def test_options_that_are_off_keep_all(off: dict):
    ids, _ = distribution(logits_of(1, 100)[0], SamplingParams(temperature=1.0, **off))
    assert ids.tolist() == list(range(100))


@pytest.mark.parametrize("tight", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-300}])
def test_the_best_is_always_kept(tight: dict):
    logits = logits_of(8, 1000)
    samplers = [sampler_of(**{"temperature": 1.0, "seed": n, **tight}) for n in range(8)]
    assert tokens(sample(logits, samplers)) == logits.argmax(1).tolist()


def test_a_nucleus_of_most_of_a_flat_vocabulary():
    ids, _ = distribution(torch.zeros(4000), SamplingParams(temperature=1.0, top_p=0.75))
    assert ids.tolist() == list(range(3000))


@pytest.mark.parametrize(
    "u, token", [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.7501, 4), (1 - 2**-53, 4)]
)
def test_the_draw_is_the_inverse_cdf(u: float, token: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("packhorse.engine.sample.uniform", lambda seed, index: u)
    logits = torch.tensor([[-2e4, 0.0, -2e4, math.log(2), 0.0, -2e4]])  # those of -2e4 have no weight at all
    assert tokens(sample(logits, [sampler_of(temperature=1.0)])) == [token]


def test_uniform_numbers():
    # The constants are the definition: other values would change every seeded answer.
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0)] == [
        0.8982192545865182,
        0.7792877342192932,
        0.03433208507872065,
    ]
    drawn = torch.tensor([uniform(7, n) for n in range(4000)], dtype=torch.float64)
    assert drawn.min() >= 0 and drawn.max() < 1 and abs(drawn.mean() - 0.5) < 0.02
    assert uniform(-5, 0) != uniform(5, 0) and uniform(2**100, 0) != uniform(0, 0)
    assert uniform(1, 23) != uniform(12, 3)


def test_a_seed_repeats_and_another_differs():
    logits = logits_of(1, 1000, scale=0.5).expand(32, -1)

    def draw(seed: int | None) -> list[int]:
        sampler = sampler_of(temperature=1.0, seed=seed)
        return [tokens(sample(logits[:1], [sampler]))[0] for _ in range(12)]

    assert draw(11) == draw(11)
    assert draw(11) != draw(12)
    assert len(set(draw(11))) > 6  # the index of the token counts
    assert draw(None) != draw(None)


MIX = [
    {},
    {"logprobs": 3},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 0},
    {"temperature": 1.5, "top_k": 20, "repetition_penalty": 1.3},
    {"temperature": 1.0, "min_p": 0.02, "presence_penalty": 1.0, "frequency_penalty": 0.3, "logprobs": 5},
    {"repetition_penalty": 1.2, "logprobs": 1},
]


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(len(MIX))), size=st.integers(1, len(MIX)), vocab=st.integers(30, 1200))
def test_rows_do_not_depend_on_their_company(order: list[int], size: int, vocab: int):
    """To the bit, log-probabilities included, over three tokens."""
    steps = [logits_of(len(MIX), vocab, seed) for seed in range(3)]
    alone = {i: sampler_of(str(i), seed=i, **MIX[i]) for i in order[:size]}
    together = {i: sampler_of(str(i), seed=i, **MIX[i]) for i in order[:size]}
    for logits in steps:
        results = sample(logits[list(together)], list(together.values()))
        for i, result in zip(together, results, strict=True):
            assert sample(logits[i : i + 1].clone(), [alone[i]]) == [result]


def test_logits_are_left_alone():
    logits = logits_of(len(MIX), 64)
    before = logits.clone()
    sample(logits, [sampler_of(seed=1, **params) for params in MIX])
    assert torch.equal(logits, before)


def expected_penalties(
    logits: torch.Tensor, params: SamplingParams, prompt: tuple, answer: list
) -> torch.Tensor:
    """Penalties rebuilt from scratch, token by token, beside transformers' processor."""
    scores = logits.double()[None].clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor([[*prompt, *answer]])
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(seen, scores)
    for token_id in set(answer):
        scores[0, token_id] -= params.presence_penalty + params.frequency_penalty * answer.count(token_id)
    return scores[0]


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 1.5},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 0.8},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    ],
)
def test_penalties_over_a_whole_answer(penalties: dict):
    vocab, prompt = 12, (3, 5, 5, 8)
    sampler = sampler_of(prompt=prompt, max_tokens=40, **penalties)
    answer: list[int] = []
    for step in range(40):  # more tokens than the vocabulary holds
        logits = logits_of(1, vocab, step, scale=1.0)
        want = int(expected_penalties(logits[0], sampler.params, prompt, answer).argmax())
        answer += tokens(sample(logits, [sampler]))
        assert answer[-1] == want
    assert len(set(answer)) > 4


def test_penalties_come_before_temperature():
    logits = torch.tensor([[4.0, 3.0, 0.0]])
    for seed in range(20):
        sampler = sampler_of(temperature=0.01, presence_penalty=1.5, seed=seed)
        assert [tokens(sample(logits, [sampler]))[0] for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("params", MIX)
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: dict):
    logits = logits_of(3, 300)
    expected = sample(logits, [sampler_of("x"), sampler_of("y", seed=4, **params), sampler_of("z")])
    logits[1, 200] = bad
    samplers = [sampler_of("x"), sampler_of("y", seed=4, **params), sampler_of("z")]
    first, error, last = sample(logits, samplers)
    assert [first, last] == [expected[0], expected[2]]
    assert isinstance(error, ComputeError) and error.facts == {"request_id": "y", "position": len(PROMPT)}
    assert "'y'" in error.reason and [s.num_drawn for s in samplers] == [1, 0, 1]


def test_huge_finite_logits_stay_finite_under_penalties():
    logits = torch.tensor([[3e38, -3e38, 1.0]])
    sampler = sampler_of(prompt=(0, 1), repetition_penalty=0.01, temperature=1.0)
    assert tokens(sample(logits, [sampler])) == [0]


def test_no_rows():
    assert sample(torch.empty(0, 10), []) == []


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_are_of_the_raw_logits(count: int):
    logits = logits_of(1, 300)
    sampler = sampler_of(temperature=5.0, top_k=50, repetition_penalty=1.5, logprobs=count, seed=1)
    expected = logits[0].double().log_softmax(0)
    for _ in range(5):
        [result] = sample(logits, [sampler])
        logprob = result.logprob
        assert logprob.token_id == result.token_id
        assert logprob.logprob == pytest.approx(float(expected[result.token_id]), abs=1e-12)
        best = expected.topk(count) if count else None
        assert [i for i, _ in logprob.top] == ([] if best is None else best.indices.tolist())
        for token_id, value in logprob.top:
            assert value == pytest.approx(float(expected[token_id]), abs=1e-12)


def test_no_logprobs_unless_asked():
    assert sample(logits_of(1, 30), [sampler_of()])[0].logprob is None


def test_alternatives_of_equals_and_of_a_small_vocabulary():
    logits = torch.zeros(4)
    half = pytest.approx(math.log(0.25), abs=1e-12)
    assert token_logprob(logits, 3, 2) == TokenLogprob(3, half, ((0, half), (1, half)))
    assert [i for i, _ in token_logprob(logits, 3, 20).top] == [0, 1, 2, 3]
