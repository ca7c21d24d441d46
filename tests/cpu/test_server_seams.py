"""What the server needs of the engine: biases, steering, log-probabilities of prompts, steps that fail."""

from types import SimpleNamespace

import pytest
import torch

import engines
import oracle
from packhorse.core.errors import ComputeError, InvalidRequestError, PackhorseError
from packhorse.core.types import Event, FinishReason, Request, SamplingParams
from packhorse.facts.model import MoeFacts
from packhorse.kernels import dispatch
from packhorse.kernels.experts.ref import expert_mix, route
from packhorse.kernels.linear import cpu as linear_cpu
from packhorse.layers.linear import Linear
from packhorse.layers.mlp import Moe


class Only:
    """Allows the given tokens, one after the other, then everything; records what was drawn."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)
        self.drawn: list[int] = []

    def steer(self, scores: torch.Tensor) -> torch.Tensor:
        if len(self.drawn) >= len(self.tokens):
            return scores
        steered = torch.full_like(scores, -torch.inf)
        allowed = self.tokens[len(self.drawn)]
        steered[allowed] = scores[allowed]
        return steered

    def advance(self, token_id: int) -> None:
        self.drawn.append(token_id)


class Refusing(Only):
    def steer(self, scores: torch.Tensor) -> torch.Tensor:
        raise PackhorseError("Nothing may come.")


def tokens(events) -> list[int]:
    return [t for e in events for t in e.token_ids]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "top_k": 5}])
def test_steering_decides_what_may_come(sampling):
    engine = engines.make_engine(engines.tiny_model("llama", True))
    ids = oracle.random_ids(20)
    free, _ = engines.ask(engine, ids, max_tokens=6)
    steering = Only(7, 7, 9)
    engine.add(Request("r", tuple(ids), SamplingParams(max_tokens=6, **sampling), steering=steering))
    engine.add(Request("other", tuple(ids), SamplingParams(max_tokens=6)))
    events = engines.run_all(engine)
    assert tokens(events["r"])[:3] == [7, 7, 9]
    assert steering.drawn == tokens(events["r"])
    assert tokens(events["other"]) == free


def test_steering_that_fails_ends_its_request_alone():
    engine = engines.make_engine(engines.tiny_model("llama", True))
    ids = tuple(oracle.random_ids(20))
    engine.add(Request("bad", ids, SamplingParams(max_tokens=3), steering=Refusing()))
    engine.add(Request("good", ids, SamplingParams(max_tokens=3)))
    events = engines.run_all(engine)
    assert events["bad"][-1].finish is FinishReason.ERROR
    assert "Nothing may come" in str(events["bad"][-1].error)
    assert len(tokens(events["good"])) == 3
    assert engine.store.stats.pages_used == 0


def test_logit_bias_moves_the_choice_and_not_the_logprobs():
    engine = engines.make_engine(engines.tiny_model("llama", True))
    ids = tuple(oracle.random_ids(20))
    free, _ = engines.ask(engine, ids)
    other = (free[0] + 1) % oracle.VOCAB
    params = SamplingParams(max_tokens=1, logit_bias=((other, 100.0),), logprobs=1)
    engine.add(Request("r", ids, params))
    [event] = engines.run_all(engine)["r"]
    assert event.token_ids == (other,)
    assert event.logprobs[0].top[0][0] == free[0], "logprobs are of the raw logits"
    with pytest.raises(InvalidRequestError, match=r"token 193.*193"):
        engine.add(Request("r", ids, SamplingParams(logit_bias=((oracle.VOCAB, 1.0),))))
    with pytest.raises(InvalidRequestError, match=r"logit_bias is 101.*\[-100, 100\]"):
        SamplingParams(logit_bias=((1, 101.0),))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_prompt_logprobs_are_those_of_one_pass(family, exact):
    """Read in several chunks, beside another request, with a prefix in the store that must not be reused."""
    engine = engines.make_engine(engines.tiny_model(family, exact), chunk_len=128)
    ids = tuple(oracle.random_ids(300))
    engines.ask(engine, ids)
    engine.add(Request("other", tuple(oracle.random_ids(90, seed=1)), SamplingParams(max_tokens=4)))
    engine.add(Request("r", ids, SamplingParams(max_tokens=2), prompt_logprobs=3))
    events = engines.run_all(engine)
    assert not any(e.prompt_logprobs for e in events["other"])
    assert events["r"][-1].usage.cached_len == 0
    reported = [p for e in events["r"] for p in e.prompt_logprobs]
    assert [p.token_id for p in reported] == list(ids[1:])
    logits = oracle.oracle_logits(oracle.shared_checkpoint(family)[0], list(ids))
    expected = logits.double().log_softmax(1)
    got = torch.tensor([p.logprob for p in reported], dtype=torch.float64)
    want = expected[torch.arange(299), torch.tensor(ids[1:])]
    assert (got - want).abs().max() < 1e-3
    best = expected[:-1].argmax(1).tolist()
    agree = sum(p.top[0][0] == b for p, b in zip(reported, best, strict=True))
    assert agree >= 298 and all(len(p.top) == 3 for p in reported)
    assert engines.ask(engine, ids)[1].usage.cached_len > 0


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("at", [0, 20])
def test_a_step_that_fails_ends_the_request_at_fault_alone(family, exact, at):
    """Steps with one request fail at its token `at`, with pages and states written: another that decodes, one
    that reads with log-probabilities, and one that waits get what they get without it."""
    model = engines.tiny_model(family, exact)
    bad, *prompts = (tuple(oracle.random_ids(length, seed=length)) for length in (30, 60, 200, 50))
    fine = [
        Request("decodes", prompts[0], SamplingParams(max_tokens=30)),
        Request("reads", prompts[1], SamplingParams(max_tokens=3), prompt_logprobs=1),
        Request("waits", prompts[2], SamplingParams(max_tokens=3)),
    ]
    expected = {}
    for request in fine:
        engine = engines.make_engine(model, chunk_len=64)
        engine.add(request)
        expected |= engines.run_all(engine)
    engine = engines.make_engine(model, chunk_len=64, sequences=3)
    run = engine.runner.run
    failed: list[list[str]] = []

    def failing(step, views):
        logits = run(step, views)
        if any(w.sequence.id == "bad" and len(w.sequence.generated) == at for w in step.spans):
            failed.append([w.sequence.id for w in step.spans])
            raise MemoryError
        return logits

    engine.runner.run = failing
    events: dict[str, list[Event]] = {name: [] for name in ("bad", *expected)}
    later = [Request("bad", bad, SamplingParams(max_tokens=30)), *fine[1:]]
    engine.add(fine[0])
    while engine.has_work:
        try:
            new = engine.step()
        except MemoryError:
            new = engine.recover(ComputeError("The step failed."))
        for event in new:
            events[event.request_id].append(event)
        if len(later) == 3 and events["decodes"][-1].token_ids:
            engine.add(later.pop(0))
        while len(later) in (1, 2) and (failed or len(tokens(events["bad"])) == at - 1):
            engine.add(later.pop(0))
    assert failed == [["decodes", "bad", "reads"] if at else ["decodes", "bad"], ["bad"]]
    assert events["bad"][-1].error.reason == "The step failed." and len(tokens(events["bad"])) == at
    for name, want in expected.items():
        assert tokens(events[name]) == tokens(want)
        scored, clean = ([p for e in some for p in e.prompt_logprobs] for some in (events[name], want))
        assert [p.token_id for p in scored] == [p.token_id for p in clean]
        near = pytest.approx([p.logprob for p in clean], abs=0 if exact else 1e-4)
        assert [p.logprob for p in scored] == near
    assert engine.store.stats.pages_used == 0 and engine.store.stats.open_sequences == 0


def test_an_engine_whose_every_step_fails_cannot_answer_a_probe(monkeypatch):
    engine = engines.make_engine(engines.tiny_model("qwen3_5", True))
    engine.probe()
    monkeypatch.setattr(engine.runner, "run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.probe()
    assert engine.store.stats.pages_used == 0 and engine.store.stats.open_sequences == 0


@pytest.mark.parametrize("rows", [1, 16, 17, 31, 32, 100])
def test_sixteen_bit_products_off_the_row_grid(rows):
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(s, generator=generator).bfloat16() for s in ((rows, 96), (40, 96), (40,)))
    out = dispatch.linear(x, weight, bias)
    expected = x.float() @ weight.float().T + bias.float()
    assert out.shape == (rows, 40)
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-1)
    assert linear_cpu.off_grid(x) == (rows in (17, 31, 100))


def test_sixteen_bit_experts_keep_to_the_row_grid(monkeypatch):
    """However tokens fall to the experts, oneDNN meets few numbers of rows."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    x, router = draw(150, 32), draw(6, 32).float()
    experts = SimpleNamespace(gate_up_proj=draw(6, 48, 32), down_proj=draw(6, 32, 24))
    weights = SimpleNamespace(gate=Linear(router), experts=experts)
    share, chosen = route(x.float() @ router.T, 2, True)
    counts = torch.bincount(chosen.flatten()).tolist()
    assert any(count > 16 and count % 16 for count in counts)
    expected = expert_mix(x, share, chosen, experts.gate_up_proj, experts.down_proj)
    met = []
    product = torch.nn.functional.linear

    def record(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        met.append((x.dtype, x.shape[0]))
        return product(x, *rest)

    monkeypatch.setattr(torch.nn.functional, "linear", record)
    out = Moe(MoeFacts(6, 2, 24, 0, True), exact=False)(x, weights)
    rows = [rows for dtype, rows in met if dtype == torch.bfloat16]
    assert len(rows) == 12 and all(number <= 16 or number % 16 == 0 for number in rows)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
