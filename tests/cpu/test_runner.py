"""Rows of a step: whose they are, and what becomes of those that are nobody's."""

import pytest
import torch

import oracle
from engines import ask, make_engine, run_all, tiny_model
from oracle import relative_error
from packhorse.core.types import Request, SamplingParams
from packhorse.engine.runner import PartView
from packhorse.layers.decoder import DecoderLayer


class Graphs:
    """Step kernels for sequences with one token, played by the layers."""

    max_sequences, streamed = 16, None

    def __init__(self, runner):
        self.runner, self.views, self.steps = runner, None, []
        run = runner.run
        runner.graphs = self
        runner.run = lambda step, views: self.note(step, views) or run(step, views)

    def note(self, step, views):
        self.views = views
        self.steps.append([work.length for work in step.spans])

    def run(self, part):
        places = dict(enumerate(part))
        ids = torch.tensor([work.token_ids[0] for work in part])
        positions = torch.tensor([work.position for work in part])
        x = self.runner._layers(
            self.runner.model.embed(ids), positions, [PartView(view, places) for view in self.views]
        )
        return self.runner.model.head(x)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe"])
def test_a_chunk_of_one_token_between_others(family):
    """It is computed as decode steps are, and those around it find their own rows."""
    prompts = {"a": oracle.random_ids(40), "b": [17], "c": oracle.random_ids(30, seed=1)}
    want = {}
    for name, ids in prompts.items():
        engine = make_engine(tiny_model(family, False))
        ask(engine, ids, name=name)
        want |= engine.runner.logits
    engine = make_engine(tiny_model(family, False))
    graphs = Graphs(engine.runner)
    for name, ids in prompts.items():
        engine.add(Request(name, tuple(ids), SamplingParams(max_tokens=1)))
    run_all(engine)
    assert graphs.steps == [[40, 1, 30]]
    assert engine.runner.logits.keys() == want.keys()
    for key, logits in want.items():
        assert relative_error(engine.runner.logits[key], logits) < oracle.BOUND, key


@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_rows_of_nobody_stay_finite(family, monkeypatch):
    """Exact mode's padding lies before and behind a span; memory that is taken holds NaN."""
    seen = []

    def finite(layer, x, *args, call=DecoderLayer.__call__):
        out = call(layer, x, *args)
        seen.append(bool(out.isfinite().all()))
        return out

    monkeypatch.setattr(DecoderLayer, "__call__", finite)
    for name in ("empty", "empty_like"):
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, made=made, **k: poisoned(made(*a, **k)))
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poisoned(new_empty(*a, **k)))
    engine = make_engine(tiny_model(family, True), chunk_len=64)
    ask(engine, oracle.random_ids(70), max_tokens=3)
    assert len(seen) > 2 and all(seen)


def poisoned(tensor):
    return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor
