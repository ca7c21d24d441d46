"""What measures a card: rates that no other can be above, a graph's self-test, a benchmark of a model made up."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from packhorse.bench import card
from packhorse.bench.nvml import cards, looker
from packhorse.bench.offline import Settings, measure
from packhorse.bench.report import table
from packhorse.bench.synth import synthesize
from packhorse.core.config import EngineConfig
from packhorse.core.units import GIB, MIB
from packhorse.facts.read import read_model

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def test_rates():
    before = torch.cuda.mem_get_info()[0]
    rates = card.link_rates(DEVICE)
    assert rates["vram"] > 100e9 and 1e9 < rates["host"] < rates["vram"]
    assert 0.5 < rates["host"] / rates["copy_in"] < 1.5
    assert torch.cuda.mem_get_info()[0] > before - 64 * MIB


def test_a_graph_that_works_and_one_that_does_not(monkeypatch):
    assert card.self_test(DEVICE) == ""
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: None)
    assert "other values" in card.self_test(DEVICE)

    def refuse(*args):
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
    assert card.under_load(DEVICE, 0.0, dict)["clock_mhz_last"] is None


def test_a_model_made_up():
    """Streamed experts under a cap: bytes of each link stay below its ceiling, memory below the cap."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "m")
        synthesize(model, "qwen3-30b-a3b", layers=2)
        settings = Settings(contexts=(2048, 300), sequences=(1, 2), decode=10, vram=(None, 2 * GIB))
        config = EngineConfig(device="cuda", dtype="fp16", kv="fp8", chunk_len=256)
        document = measure(read_model(model), config, settings)
    print(table(document | {"hardware": {"cards": []}}))
    whole, capped = document["loads"]
    assert capped["memory"]["used_bytes"] <= 2 * GIB
    for load in (whole, capped):
        for row in load["decode"]:
            assert 0 < row["ratio"] < 1.05
            assert all(link["ratio"] < 1.05 for link in row["links"].values())
            facts_used = row["experts"]["used"]
            assert 2 * 8 <= facts_used <= 2 * 16
            assert row["experts"]["kept_bytes"] <= row["experts"]["host_bytes"] <= row["experts"]["bytes"]
    assert all(row["experts"]["hit_rate"] == 1 for row in whole["decode"])
    assert len(whole["prefill"]) == 2 and whole["prefill"][1]["tok_s"] > 0
