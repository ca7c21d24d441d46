"""What measures a card: rates that no other can be above, a graph's self-test, a benchmark of a model made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from packhorse.bench import card
from packhorse.bench.nvml import cards, looker
from packhorse.bench.report import table
from packhorse.core.units import GIB, MIB

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def test_rates():
    before = torch.cuda.memory_reserved()
    rates = card.link_rates(DEVICE)
    assert rates["vram"] > 100e9 and 1e9 < rates["host"] < rates["vram"]
    assert 0.5 < rates["host"] / rates["copy_in"] < 1.5
    assert torch.cuda.memory_reserved() <= before + 2 * MIB, "what was taken is given back"


def test_host_memory_is_pinned():
    assert card.pinned_bytes(DEVICE, 300 * MIB) == {"asked": 300 * MIB, "pinned": 300 * MIB}


def test_a_graph_that_works_and_one_that_does_not(monkeypatch):
    assert card.self_test(DEVICE) == ""
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: None)
    assert "other values" in card.self_test(DEVICE)

    def refuse(*args, **options):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(card, "launch", refuse)
    assert card.self_test(DEVICE) == "RuntimeError: no kernel image"
    assert card.measure_card(DEVICE, 0.1, dict) == {"graph": "RuntimeError: no kernel image"}


def test_under_load():
    uuid = card.card_uuid(DEVICE)
    listed, _ = cards()
    if listed:
        assert uuid in [each["uuid"] for each in listed]
    found = card.under_load(DEVICE, 0.3, looker(uuid))
    assert found["seconds"] >= 0.3 and found["products"] > 1e12
    assert card.under_load(DEVICE, 0.0, dict)["clock_mhz"] is None


MADE_UP = """
import json, sys
from packhorse.bench import synth
from packhorse.bench.offline import Settings, measure
from packhorse.core.config import EngineConfig
from packhorse.facts.read import read_model
from pathlib import Path

true_config = synth.known_config

def with_few_experts(name):
    return true_config(name) | {"num_experts": 32}

synth.known_config = with_few_experts
synth.synthesize(Path(sys.argv[1]), "qwen3-30b-a3b", layers=8)
settings = Settings(contexts=(2048, 300), sequences=(1, 2), decode=10, vram=(None, int(sys.argv[2])))
config = EngineConfig(device="cuda", dtype="fp16", kv="fp8", chunk_len=256)
print(json.dumps(measure(read_model(Path(sys.argv[1])), config, settings)))
"""


def test_a_model_made_up(tmp_path):
    """Experts streamed under a cap, in a process of its own, which is what a cap is on: bytes of each link stay below
    its ceiling, memory below the cap."""
    cap = int(2.15 * GIB)
    words = [sys.executable, "-c", MADE_UP, str(tmp_path / "m"), str(cap)]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | path)
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    print(table(document | {"hardware": {"cards": []}}))
    whole, capped = document["loads"]
    assert capped["memory"]["used_bytes"] <= cap
    for load in (whole, capped):
        assert len(load["prefill"]) == 2 and len(load["decode"]) == 4
        for row in load["decode"]:
            assert 0 < row["ratio"] < 1.05
            assert all(link["ratio"] < 1.05 for link in row["links"].values())
            experts, most = row["experts"], 8 * 8 * row["sequences"]
            assert 8 * 8 <= experts["used"] <= most
            assert experts["kept_bytes"] <= experts["host_bytes"] <= experts["bytes"]
    assert all(row["experts"]["hit_rate"] == 1 for row in whole["decode"])
    assert all(0.1 < row["experts"]["hit_rate"] < 0.95 for row in capped["decode"])
