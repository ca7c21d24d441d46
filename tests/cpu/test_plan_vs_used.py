"""benchmarks/plan_vs_used.py without a card: its loads, caps, fit and verdicts."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from packhorse.bench import synth
from packhorse.core.config import EngineConfig
from packhorse.core.errors import DoesNotFitError
from packhorse.core.units import GIB, MIB
from packhorse.facts import machine
from packhorse.facts.machine import read_profile
from packhorse.facts.read import read_model
from packhorse.plan.size import size_engine
from packhorse.plan.solve import solve

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
    for module in ("predict", "account"):
        monkeypatch.setattr(f"packhorse.plan.{module}.calibration", lambda: data)


@pytest.fixture(scope="module")
def loads(script):
    """Machines and plans of all loads."""
    machine, plans = read_profile("h200"), {}
    for index, load in enumerate(script.LOADS):
        plans[index] = load.plan(script.shapes(load.like), machine)
    return {index: plan.machine for index, plan in plans.items()}, plans


def test_twenty_loads_of_which_five_are_fitted(script, loads):
    assert len(script.LOADS) == len(set(map(str, script.LOADS))) == 20
    assert sum(load.fitted for load in script.LOADS) == 5
    for load, plan in zip(script.LOADS, loads[1].values(), strict=True):
        assert (
            plan.executable and plan.placement.job.context == load.context + script.ROOM <= plan.facts.context
        )
        assert (plan.placement.sizes.expert_slots is not None) == (load.held < 1)


def test_a_cap_leaves_room_for_as_many_experts_as_were_asked_for(script):
    load = script.Load(script.HYBRID_MOE, 32_768, 1, "fp8", 0.45)
    facts = script.shapes(load.like)
    plan = load.plan(facts, read_profile("h200"))
    less = solve(facts, read_profile("h200"), load.wishes(plan.machine.card.usable_bytes - MIB))
    assert plan.placement.on_device >= 922 and (not less.fits or less.placement.on_device < 922)


def test_the_fit_finds_planted_numbers(script, loads):
    """Times made by other numbers are predicted for all loads, fitted or not."""
    planted = script.Predictor(script.LOADS, *loads)
    planted.values = [0.45, 0.3, 0.6, 0.8, 0.5, 0.3, 2.5, 250, 70, 2500, 7.0]
    found = {index: planted.times(index) for index in loads[1]}
    planted.values = list(planted.start)
    predictor = script.Predictor(script.LOADS, *loads)
    predictor.values = list(planted.start)
    before = predictor.times(1)
    predictor.start = [1.1 * value for value in predictor.values]
    predictor.WEIGHT = 0.05  # these loads are exact
    predictor.fit({index: found[index] for index, load in enumerate(script.LOADS) if load.fitted})
    assert abs(before[1] / found[1][1] - 1) > 0.05
    for index, times in found.items():
        assert predictor.times(index) == pytest.approx(times, rel=0.12)


def test_fewer_experts_on_the_card_are_slower(script, loads):
    predictor = script.Predictor(script.LOADS, *loads)
    whole, capped = (index for index, load in enumerate(script.LOADS)
                     if load.like == script.HYBRID_MOE and load.context == 245_440)  # fmt: skip
    assert predictor.times(whole)[1] < predictor.times(capped)[1]
    assert predictor.times(whole)[0] <= predictor.times(capped)[0]


def test_the_context_that_was_measured_is_planned_with(script, loads):
    before = loads[1][0].placement.tiers["device0"].items["runtime"]
    script.fit_context({0: {"sizes": {"runtime_bytes": before + 96 * MIB}}}, [0])
    after = script.Predictor(script.LOADS, *loads).placement(0).tiers["device0"].items["runtime"]
    assert after == before + 96 * MIB


def test_a_report_is_judged_again_and_adopted(script, loads, tmp_path, monkeypatch, capsys):
    """What a report holds is enough: planted times give the planted numbers, which the calibration then expects."""
    machines, plans = loads
    planted = script.Predictor(script.LOADS, machines, plans)
    planted.values = [1.2 * value for value in planted.start]
    found = {}
    for index, plan in plans.items():
        prefill, step = planted.times(index)
        sizes = plan.placement.sizes
        found[index] = {
            "prefill_s": prefill, "step_s": step, "experts": None, "load_s": 1.0, "sizes": vars(sizes),
            "memory": {"planned_bytes": sizes.device_bytes, "used_bytes": sizes.device_bytes},
        }  # fmt: skip
    found[3] = {"error": ["no answer"]}
    table, _ = script.rows(script.LOADS, machines, plans, found)
    (tmp_path / "report.json").write_text(json.dumps({"rows": table}, default=str))
    calibration = tmp_path / "calibration.json"
    text = script.CALIBRATION.read_text()
    calibration.write_text(text)
    monkeypatch.setattr(script, "CALIBRATION", calibration)
    monkeypatch.setattr(sys, "argv", ["plan_vs_used.py", "--again", str(tmp_path / "report.json"), "--adopt"])
    with pytest.raises(SystemExit):  # one load failed
        script.main()
    out = capsys.readouterr().out
    assert "'ran': 19, 'engine_bytes_within': 19, 'plan_bytes_within': 19" in out
    assert "'step_within': 14, 'prefill_within': 14" in out
    document, before = json.loads(calibration.read_text()), json.loads(text)
    for name in ("link", "tensor"):
        low, value, high = document["fractions"][name]["values"]
        was = before["fractions"][name]["values"]
        assert low <= was[0] and high >= was[2] and low <= value <= high and 1.05 < value / was[1] < 1.35


def test_verdicts(script, capsys):
    row = {"number": 1, "load": "a", "fitted": False, "used_bytes": 100, "engine_bytes": 101, "plan_bytes": 110,
           "engine_off": 0.01, "plan_off": 0.1, "step_off": 0.1, "prefill_off": -0.2, "step_s": 1, "prefill_s": 1,
           "hit_rate": 0.5, "hit_rate_planned": 0.6, "cap_bytes": 200, "chunk_len": 64, "load_s": 1}  # fmt: skip
    table = [
        row,
        row | {"engine_off": -0.03, "fitted": True},
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
