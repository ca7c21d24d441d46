"""packhorse bench synth: random packed weights in true shapes, repeatable, finite through all layers."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import oracle
from engines import one_pass
from packhorse.bench import synth
from packhorse.bench.synth import synthesize
from packhorse.cli import main as cli
from packhorse.core.errors import DoesNotFitError, UsageError
from packhorse.facts import known
from packhorse.facts.packed import packed_matrices
from packhorse.facts.read import read_model
from packhorse.facts.recipes import recipe
from packhorse.kernels.experts import ref
from packhorse.models.checkpoint import open_checkpoint
from packhorse.models.loader import load_model
from packhorse.plan import account

VOCAB = 512
IDS = oracle.random_ids(96, seed=2, vocab=VOCAB)


EXPERTS = [12]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The known models at a width of a few heads, in all their layers."""
    true_config = known.known_config

    def shrunk(name: str):
        config = true_config(name)
        text = config.get("text_config", config)
        text |= {"vocab_size": VOCAB, "hidden_size": 256, "head_dim": 64, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "intermediate_size": 256}  # fmt: skip
        for field, value in {"num_experts": EXPERTS[0], "moe_intermediate_size": 128,
                             "shared_expert_intermediate_size": 128,
                             "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                             "linear_key_head_dim": 32, "linear_value_head_dim": 32}.items():  # fmt: skip
            if field in text:
                text[field] = value
        return config

    monkeypatch.setattr(synth, "known_config", shrunk)


def load(folder: Path, dtype: torch.dtype = torch.float32):
    facts = read_model(folder)
    return load_model(facts, open_checkpoint(facts), dtype=dtype, packed=True)


@pytest.mark.parametrize(("like", "recipe_name"), [
    ("qwen3.6-35b-a3b", "int4"), ("qwen3.6-27b", "int4"), ("qwen3-30b-a3b", "int8"),
    ("qwen3-next-80b-a3b", "int4"),
])  # fmt: skip
def test_activations_stay_finite_through_all_layers(like, recipe_name, tmp_path):
    layers = None if like.startswith("qwen3.6") else 6
    size = synthesize(tmp_path / "m", like, recipe_name, layers=layers)
    facts = read_model(tmp_path / "m")
    assert facts.num_layers == (layers or known.known_model(like).num_layers)
    assert size == sum(file.stat().st_size for file in (tmp_path / "m").glob("*.safetensors"))
    model = load(tmp_path / "m")
    assert model.storage_bytes == account.weight_bytes(facts, "fp32", packed=True)
    # What is not packed is in 16 bits in a plan, and in fp32 here.
    packed = sum(matrix.num_bytes for matrix in packed_matrices(facts))
    planned = sum(account.recipe_bytes(facts, recipe(recipe_name)).values())
    assert packed < planned < packed + 2 * 12_000 * facts.num_layers + 4 * 12 * 256 * facts.num_layers
    logits = one_pass(model, IDS)
    assert logits.isfinite().all() and 0.2 < float(logits.std()) < 5
    # Different tokens give different answers: nothing has collapsed.
    assert oracle.rms_error(logits[40], logits[41]) > 0.3
    half = one_pass(load(tmp_path / "m", torch.float16), IDS)
    assert half.isfinite().all()


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    def digest(folder: Path) -> list[str]:
        return [hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.glob("*.safetensors"))]

    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        synthesize(tmp_path / name, "qwen3.6-35b-a3b", seed=seed, layers=4)
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")
    assert read_model(tmp_path / "a").num_layers == 4


@pytest.mark.parametrize(("router", "low", "high"), [("uniform", 0.0, 0.12), ("zipf", 0.14, 0.5)])
def test_experts_are_wanted_as_asked(router, low, high, tmp_path, monkeypatch):
    """The share of the most wanted of 32 experts: 1/32 if all were alike, 1/4 by the first of Zipf's law."""
    monkeypatch.setattr(f"{__name__}.EXPERTS", [32])
    synthesize(tmp_path / "m", "qwen3.6-35b-a3b", router=router, layers=8)
    model = load(tmp_path / "m")
    shares = []
    true_mix = ref.expert_mix

    def counting(x, weights, experts, *args, **kwargs):
        first = experts[:, 0].bincount(minlength=32).float()
        shares.append(float(first.max() / first.sum()))
        return true_mix(x, weights, experts, *args, **kwargs)

    monkeypatch.setattr(ref, "expert_mix", counting)
    one_pass(model, IDS)
    assert len(shares) == 8
    assert low < sum(shares) / 8 < high


def test_memory_is_that_of_the_largest_tensor(tmp_path):
    """numpy's buffers are seen by tracemalloc: codes are made in place, and one tensor at a time."""
    tracemalloc.start()
    try:
        size = synthesize(tmp_path / "m", "qwen3.6-27b")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    largest = max(t.num_bytes for t in read_model(tmp_path / "m").tensors.values())
    assert peak < 4 * largest + 4_000_000 < size


def test_what_is_refused(tmp_path, monkeypatch):
    out = tmp_path / "m"
    for arguments, match in (
        ({"like": "qwen9"}, "qwen9"),
        ({"recipe_name": "int3"}, "int3"),
        ({"recipe_name": "int5"}, "'int5' is not made up. Choose int4, int8, balanced, fp32, bf16, fp16"),
        ({"recipe_name": "fp8"}, "'fp8' is not made up"),
        ({"router": "zipf"}, "qwen3.6-27b has no experts for the router zipf"),
        ({"recipe_name": "2.5bit"}, "2.5bit"),
        ({"router": "flat"}, "router 'flat'"),
        ({"layers": 999}, "999 layers were asked for, and the model has 64. Ask for 1 to 64"),
        ({"layers": 0}, "0 layers were asked for"),
    ):
        with pytest.raises(UsageError, match=match):
            synthesize(out, **({"like": "qwen3.6-27b"} | arguments))
    assert not out.exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(UsageError, match="is not empty"):
        synthesize(tmp_path / "full", "qwen3.6-27b")
    monkeypatch.setattr(synth.writer.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(DoesNotFitError, match=r"has 10 B free"):
        synthesize(out, "qwen3.6-27b")


def test_command(tmp_path, capsys):
    out = tmp_path / "m"
    assert cli.run(["bench", "synth", str(out), "--like", "qwen3.6-35b-a3b", "--layers", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["like"] == "qwen3.6-35b-a3b" and document["bytes"] > 1000
    for arguments in (
        ["synth"],
        ["synth", str(out)],
        ["serve"],
        ["serve", str(out), "--against", "http://x"],
    ):
        assert cli.run(["bench", *arguments]) == 2
