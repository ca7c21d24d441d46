"""benchmarks/plan_vs_used.py without a card: its loads, caps, fit and verdicts."""

from __future__ import annotations

import copy
import importlib.util
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from packhorse.bench import synth
from packhorse.core.config import EngineConfig
from packhorse.core.errors import DoesNotFitError
from packhorse.core.units import GIB, MIB
from packhorse.facts import machine
from packhorse.facts.known import known_model
from packhorse.facts.machine import read_profile
from packhorse.facts.read import read_model
from packhorse.plan.size import size_engine

FILE = Path(__file__).parents[2] / "benchmarks" / "plan_vs_used.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("plan_vs_used", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_vs_used"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def own_calibration(monkeypatch):
    """The script changes the numbers of the calibration in place."""
    data = copy.deepcopy(machine.calibration())
    monkeypatch.setattr("plan_vs_used.calibration", lambda: data, raising=False)
    monkeypatch.setattr("packhorse.plan.predict.calibration", lambda: data)


def test_twenty_loads_of_which_five_are_fitted(script):
    assert len(script.LOADS) == len(set(map(str, script.LOADS))) == 20
    assert sum(load.fitted for load in script.LOADS) == 5
    for load in script.LOADS:
        facts = known_model(load.like[0])
        assert load.config.context <= facts.context and load.config.kv_tokens >= load.sequences * load.context


def known_loads(script):
    """Facts and what children would have found of bytes, of all loads: whole models, as size_engine has them."""
    facts, found = {}, {}
    for index, load in enumerate(script.LOADS):
        facts[index] = known_model(load.like[0])
        sizes = size_engine(facts[index], load.config, "fp16", 10_000 * GIB)
        num = sum(facts[index].moe_layers) * (facts[index].moe.num_experts if facts[index].moe else 0)
        if load.held < 1:
            sizes = replace(sizes, expert_slots=int(load.held * num))
        found[index] = {"sizes": asdict(sizes), "prompt": 8192}
    return facts, found


def test_the_fit_finds_planted_numbers(script):
    """Times made by other numbers are predicted for all loads, fitted or not."""
    facts, found = known_loads(script)
    planted = script.Predictor(read_profile("h200"), facts, found)
    planted.values = [0.55, 0.8, 0.7, 1.4, 500.0]
    for index in found:
        found[index]["prefill_s"], found[index]["step_s"] = planted.times(index)
    predictor = script.Predictor(read_profile("h200"), facts, found)
    before = predictor.times(1)
    predictor.fit([index for index, load in enumerate(script.LOADS) if load.fitted])
    assert abs(before[1] / found[1]["step_s"] - 1) > 0.05
    for index in found:
        prefill, step = predictor.times(index)
        assert prefill == pytest.approx(found[index]["prefill_s"], rel=0.01)
        assert step == pytest.approx(found[index]["step_s"], rel=0.01)


def test_fewer_experts_on_the_card_are_slower(script):
    facts, found = known_loads(script)
    predictor = script.Predictor(read_profile("h200"), facts, found)
    whole, capped = (index for index, load in enumerate(script.LOADS)
                     if load.like == script.HYBRID_MOE and load.context == 245_760)  # fmt: skip
    assert predictor.times(whole)[1] < predictor.times(capped)[1]
    assert predictor.times(whole)[0] <= predictor.times(capped)[0]


def test_verdicts(script, capsys):
    row = {"number": 1, "load": "a", "fitted": False, "used_bytes": 100, "engine_bytes": 101, "plan_bytes": 110,
           "bytes_off": 0.01, "plan_off": 0.1, "step_off": 0.1, "prefill_off": -0.2, "step_s": 1, "prefill_s": 1,
           "hit_rate": 0.5}  # fmt: skip
    table = [
        row,
        row | {"bytes_off": -0.03, "fitted": True},
        {"number": 3, "load": "b", "fitted": False, "error": "x"},
    ]
    assert script.verdicts(table) == {
        "loads": 3, "ran": 2, "engine_bytes_within": 1, "plan_bytes_within": 0, "not_fitted": 1, "step_within": 1,
        "prefill_within": 0,
    }  # fmt: skip
    script.print_table(table)
    out = capsys.readouterr().out
    assert "| 1* |" in out and "failed: x" in out
    assert len({line.count("|") for line in out.splitlines()}) == 1


def test_more_memory_never_refuses_what_fitted(script, tmp_path, monkeypatch):
    """A model whose experts fit or not, and a pool that is more than one context: cap after cap."""
    true_config = synth.known_config
    sizes = {"num_experts": 32, "vocab_size": 4096, "moe_intermediate_size": 256, "num_attention_heads": 8}
    monkeypatch.setattr(synth, "known_config", lambda name: true_config(name) | sizes)
    synth.synthesize(tmp_path / "m", "qwen3-30b-a3b", layers=8)
    facts = read_model(tmp_path / "m")
    config = EngineConfig(
        device="cuda", dtype="fp16", kv="fp8", context=2048, sequences=16, kv_tokens=16 * 2048
    )
    fitted, slots = [], []
    for cap in range(1 * GIB, 3 * GIB, 16 * MIB):
        try:
            found = size_engine(facts, config, "fp16", cap)
        except DoesNotFitError:
            assert not fitted, f"{cap} is refused, and {fitted[-1]} fits"
            continue
        fitted.append(cap)
        slots.append(found.expert_slots)
        assert found.total_bytes + found.runtime_bytes <= cap
    assert fitted and slots[0] is not None and slots[-1] is None
    held = [slot for slot in slots if slot is not None]
    assert held == sorted(held) and None not in slots[: len(held)]
