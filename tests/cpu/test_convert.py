"""packhorse convert: rounding of least error, a declaration that other engines read, cut and resumed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import oracle
from engines import one_pass
from packhorse.cli import main as cli
from packhorse.core.errors import DoesNotFitError, RefusedError, UsageError, WeightsError
from packhorse.core.formats import PACKED
from packhorse.facts.packed import packed_matrices
from packhorse.facts.read import read_model
from packhorse.facts.recipes import recipe
from packhorse.models import convert as module
from packhorse.models.checkpoint import open_checkpoint
from packhorse.models.convert import convert
from packhorse.models.loader import load_model
from packhorse.plan import account
from packhorse.plan.place import Footprint
from packhorse.quant.packed import Codes, values
from packhorse.quant.rounding import nibbles, round_groups

IDS = oracle.random_ids(50, seed=8)
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "linear_value_head_dim": 64}
MOE = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 96}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """qwen3_5_moe in bf16, experts fused, some matrices whose inputs are no multiple of 128."""
    model = oracle.make_model("qwen3_5_moe", **WIDE, **MOE).bfloat16()
    return oracle.save(model, tmp_path_factory.mktemp("source") / "m", fused=True)


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_rounding_has_the_least_error_that_was_tried():
    """Less than rounding to the largest value, and no scale nearby is better."""
    torch.manual_seed(0)
    weight = torch.randn(40, 256) * torch.rand(40, 1)
    weight[3, 5] = 9.0
    weight[7] = 0
    for bits in (4, 8):
        top = 2 ** (bits - 1) - 1
        codes, scales = round_groups(weight, bits, 128)
        assert codes.dtype == torch.uint8 and int(codes.max()) < 2**bits and scales.shape == (40, 2)
        assert scales.isfinite().all() and (scales > 0).all()
        found = values(PACKED[f"int{bits}-g128"], Codes(codes, scales))

        def error(scale: torch.Tensor, top: int = top) -> torch.Tensor:
            wide = scale.float().repeat_interleave(128, 1)
            return (
                (weight - (weight / wide).round().clamp(-top - 1, top) * wide)
                .square()
                .view(40, 2, 128)
                .sum(-1)
            )

        ours = (weight - found).square().view(40, 2, 128).sum(-1)
        plain = error((weight.view(40, 2, 128).abs().amax(-1) / top).clamp_min(1e-4).half())
        assert (ours <= plain * 1.0001 + 1e-12).all() and ours.sum() < (
            0.95 if bits == 4 else 1.0
        ) * plain.sum()
        assert (found[7] == 0).all()
    assert torch.equal(
        nibbles(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)), torch.tensor([[33, 15]]).byte()
    )


def test_converted_model_runs_on_its_codes(source, tmp_path):
    convert(read_model(source), tmp_path / "out", "int4-rtn")
    facts = read_model(tmp_path / "out")
    forms = {(m.kind, m.form.name) for m in packed_matrices(facts)}
    assert forms == {(kind, "int4-g128") for kind in ("attention", "delta_net", "experts", "shared_expert")}
    checkpoint = open_checkpoint(facts)
    packed = load_model(facts, checkpoint, dtype=torch.float32, packed=True)
    reference = oracle.make_model("qwen3_5_moe", **WIDE, **MOE)
    with torch.no_grad():
        state = {name: checkpoint.read(name).float() for name in checkpoint.shapes}
        for layer in range(4):
            prefix = f"model.layers.{layer}.mlp.experts."
            for fused, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                rows = [torch.cat([state.pop(f"{prefix}{e}.{p}.weight") for p in parts]) for e in range(8)]
                state[prefix + fused] = torch.stack(rows)
        reference.load_state_dict(state)
    want = oracle.oracle_logits(reference, IDS)
    assert oracle.relative_error(one_pass(packed, IDS), want) < oracle.BOUND
    state = load_file(source / "model.safetensors")
    name = "model.layers.0.linear_attn.in_proj_a.weight"
    assert torch.equal(checkpoint.read(name), state[name])
    name = "model.layers.3.self_attn.q_proj.weight"
    assert 0.01 < oracle.rms_error(checkpoint.read(name), state[name].float()) < 0.12


@pytest.mark.parametrize(("family", "sizes"), [
    ("qwen3_5_moe", WIDE | MOE), ("qwen3_5_moe", WIDE | MOE | {"shared_expert_intermediate_size": 128}),
    ("qwen3_5", WIDE | {"tie_word_embeddings": True}), ("qwen3_5", WIDE | {"tie_word_embeddings": False}),
    ("qwen3", WIDE | {"intermediate_size": 192}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["int4-rtn", "int8-rtn"])
def test_the_plan_of_a_conversion_counts_what_it_writes(family, sizes, name, tmp_path):
    """Of the files as they are and of nothing but their dimensions; embeddings, heads and odd matrices unpacked."""
    folder = oracle.save(oracle.make_model(family, **sizes).bfloat16(), tmp_path / "m", fused=True)
    facts = read_model(folder)
    convert(facts, tmp_path / "out", name)
    made = read_model(tmp_path / "out")
    kinds = {matrix.kind for matrix in packed_matrices(made)}
    assert kinds and not kinds & {"embeddings", "lm_head"}
    for cards in (0, 1):
        for dtype in ("bf16", "fp32"):
            own = replace(recipe(name), dtype=dtype)
            want = account.weight_bytes(made, dtype, packed=True, cpu=not cards)
            assert sum(Footprint(facts, own, cards).classes.values()) == want
            assert sum(Footprint(replace(facts, tensors={}), own, cards).classes.values()) == want


class CutError(Exception):
    """Stands for whatever ends a process."""


def test_cut_and_resumed_gives_the_same_bytes(source, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD_BYTES", 200_000)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    facts = read_model(source)
    convert(facts, whole, "int4-rtn")
    assert len(list(whole.glob("*.safetensors"))) > 3 and not (whole / module.STATE).exists()
    calls = []

    def stop(done: int, total: int) -> None:
        calls.append((done, total))
        if len(list(cut.glob("*.safetensors"))) == 2:
            raise CutError

    with pytest.raises(CutError):
        convert(facts, cut, "int4-rtn", stop)
    # As a kill in the middle of the third shard leaves it.
    (cut / "model-00003-of-00009.part").write_bytes(b"half")
    first = (cut / module.writer.shard_name(0, len(list(whole.glob("*.safetensors"))))).stat().st_mtime_ns
    with pytest.raises(RefusedError, match=r"no config\.json"):
        read_model(cut)
    # What is being made of a shard is seen while it is made.
    one = (cut / module.writer.shard_name(0, len(list(whole.glob("*.safetensors"))))).stat().st_size
    steps = sorted({done for done, _ in calls if done < one})
    assert steps[0] == 0 and len(steps) > 3 and sorted(calls) == calls
    notes: list[str] = []
    convert(facts, cut, "int4-rtn", note=notes.append)
    there = sum(map(len, module.plan_conversion(facts, "int4-rtn").shards[:2]))
    assert notes == [f"{there} of {len(facts.tensors)} tensors were there already"]
    assert digest(cut) == digest(whole)
    assert (cut / next(iter(sorted(f.name for f in cut.glob("*.safetensors"))))).stat().st_mtime_ns == first
    assert calls[0][1] == sum(file.stat().st_size for file in whole.glob("*.safetensors"))


def test_what_is_refused(source, tmp_path, monkeypatch):
    facts = read_model(source)
    for wrong, meant in (("int3", "int4-rtn or int8-rtn"), ("int4", "int4-rtn"), ("int8", "int8-rtn")):
        with pytest.raises(UsageError, match=f"recipe '{wrong}' is not one") as caught:
            convert(facts, tmp_path / "x", wrong)
        assert caught.value.hint.startswith(f"Choose {meant}: ")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        convert(facts, tmp_path / "full", "int4-rtn")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["notes.txt"]
    monkeypatch.setattr(module.writer.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(DoesNotFitError, match=r"has 1000 B free"):
        convert(facts, tmp_path / "y", "int4-rtn")
    monkeypatch.undo()
    convert(facts, tmp_path / "z", "int8-rtn")
    with pytest.raises(RefusedError, match="is packed already"):
        convert(read_model(tmp_path / "z"), tmp_path / "zz", "int4-rtn")
    # Cut, then asked for something else.
    (tmp_path / "z" / module.STATE).write_text(json.dumps({"recipe": "int8-rtn"}))
    with pytest.raises(UsageError, match="no cut conversion"):
        convert(facts, tmp_path / "z", "int4-rtn")


@pytest.mark.parametrize("name", ["layers.1.mlp.experts.down_proj", "embed_tokens.weight", "norm.weight"])
def test_values_that_are_no_numbers_are_refused(source, tmp_path, name):
    """In matrices that are packed, and in what stays as it is."""
    state = load_file(source / "model.safetensors")
    state[f"model.{name}"].view(-1)[7] = float("inf")
    folder = tmp_path / "bad"
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(WeightsError, match=f"{name} holds values"):
        convert(read_model(folder), tmp_path / "out", "int4-rtn")


def test_command(source, tmp_path, capsys):
    assert cli.run(["convert", str(source), str(tmp_path / "out"), "--recipe", "int8-rtn", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recipe"] == "int8-rtn" and document["bytes"] < document["source_bytes"]
    assert any("shared_expert.down_proj" in name for name in document["kept"])
    forms = {matrix.form.name for matrix in packed_matrices(read_model(tmp_path / "out"))}
    assert forms == {"int8-g128"}
    again = ["convert", str(source), str(tmp_path / "out"), "--recipe"]
    assert cli.run([*again, "int4-rtn"]) == 2
    assert "holds no cut conversion" in capsys.readouterr().err
    assert cli.run([*again, "int8-rtn"]) == 2
    said = capsys.readouterr().err
    assert (
        f"finished conversion to int8-rtn with the config of {source}" in said
        and "weights is not known" in said
    )


def test_what_was_interrupted_says_that_it_goes_on(source, tmp_path, capsys, monkeypatch):
    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.writer, "write_shard", interrupt)
    assert cli.run(["convert", str(source), str(tmp_path / "out")]) == 130
    assert "the same command goes on" in capsys.readouterr().err
