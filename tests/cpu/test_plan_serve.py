"""A saved plan run by the server, and what the server tells of plan and use."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
from gguf_files import write_model

import oracle
import servers
from packhorse.bench import synth
from packhorse.cli import main as cli
from packhorse.core.config import EngineConfig
from packhorse.core.errors import CorruptFileError, DoesNotFitError, UsageError
from packhorse.core.units import GIB
from packhorse.facts.known import known_model
from packhorse.facts.machine import SYSTEM_BYTES, calibration, read_profile
from packhorse.facts.read import read_model
from packhorse.plan.predict import EXPECTED
from packhorse.plan.report import check_planned, read_saved, to_document
from packhorse.plan.size import size_engine
from packhorse.plan.solve import Wishes, solve
from packhorse.server import worker


@pytest.fixture
def save(tmp_path, capsys):
    """Writes what `packhorse plan` prints into a file."""

    def to_file(*args: str):
        cli.run(["plan", *args, "--json", "--cache", str(tmp_path)])
        file = tmp_path / "plan.json"
        file.write_text(capsys.readouterr().out)
        return file

    return to_file


def test_the_server_runs_a_plan_and_shows_it_beside_what_it_takes(save):
    file = save(
        str(servers.folder()), "--context", "1000", "--sequences", "2", "--recipe", "fp32", "--kv", "fp8"
    )
    planned = json.loads(file.read_text())
    items = planned["tiers"]["host"]["items"]
    with servers.process("--plan", str(file)) as live:
        told = live.get("/plan").json()
        assert told["context"] == 1000 and told["sequences"] == 2 and told["device"] == "cpu"
        assert told["process_resident_bytes"] > 0
        for consumer, mine in (("pages", "kv"), ("states", "states")):
            assert told["bytes"][consumer]["planned"] == told["bytes"][consumer]["allocated"] == items[mine]
        assert told["bytes"]["weights"]["planned"] == told["bytes"]["weights"]["allocated"]
        others = {"process", "kv", "states", "workspace", "logits_and_sampler"}
        assert told["bytes"]["weights"]["planned"] == sum(items[name] for name in items.keys() - others)
        assert told["bytes"]["workspace"] == {"planned": items["workspace"] + items["logits_and_sampler"]}
        assert told["bytes"]["pages"]["used"] == 0
        assert live.chat("hi " * 100, max_tokens=3).status_code == 200
        live.wait(lambda: live.get("/plan").json()["bytes"]["pages"]["used"] > 0)
        metrics = live.get("/metrics").text
        for kind, size in told["bytes"]["weights"].items():
            label = f'packhorse_bytes{{consumer="weights",kind="{kind}",tier="device"}} '
            assert [float(line[len(label) :]) for line in metrics.splitlines() if line.startswith(label)] == [
                size
            ]


def test_the_drivers_figure_stands_beside_the_plan(monkeypatch):
    """Of a card, asked for in the engine's thread and not at every step."""
    asked = []

    def used_bytes() -> int:
        asked.append(threading.current_thread().name)
        return 7 * GIB + len(asked)

    monkeypatch.setattr(worker, "CARD_S", 3600.0)
    with servers.scripted() as live:
        assert "card" not in live.get("/plan").json()["bytes"]
        session = live.service.session
        session.card = SimpleNamespace(cap=8 * GIB, used_bytes=used_bytes)
        for _ in range(2):
            live.chat("hi", max_tokens=4)
        live.wait_idle()
        assert asked == ["engine"]
        told = {"cap": 8 * GIB, "planned": session.sizes.device_bytes, "used": 7 * GIB + 1}
        assert live.get("/plan").json()["bytes"]["card"] == told
        label = 'packhorse_bytes{consumer="card",kind="used",tier="device"} '
        [line] = [line for line in live.get("/metrics").text.splitlines() if line.startswith(label)]
        assert float(line[len(label) :]) == told["used"]


def test_packed_files_are_planned_as_the_engine_keeps_them(tmp_path):
    model = oracle.make_model("qwen3_moe", hidden_size=256, intermediate_size=256, moe_intermediate_size=256,
                              num_attention_heads=4)  # fmt: skip
    facts = read_model(write_model(model, tmp_path / "m.gguf", quant=gguf.GGMLQuantizationType.Q4_0))
    roomy = replace(read_profile("t4"), card=None, native_bf16=True)
    sizes = {name: size_engine(facts, EngineConfig(context=256, sequences=1, dtype="bf16", weights=name), "bf16", GIB)
             for name in ("packed", "unpacked")}  # fmt: skip
    plans = {"packed": solve(facts, roomy, Wishes(context=256, recipe="packed")),
             "unpacked": solve(facts, roomy, Wishes(context=256))}  # fmt: skip
    for name, plan in plans.items():
        assert sum(plan.footprint.classes.values()) == sizes[name].weight_bytes
        assert plan.executable and to_document(plan, "m.gguf")["engine"]["weights"] == name
    assert sizes["packed"].weight_bytes < sizes["unpacked"].weight_bytes
    # On disk lie the files, whatever is made of them, and that takes its time on a CPU.
    for plan in plans.values():
        assert plan.placement.tiers["disk"].items["weights"] == facts.file_bytes
    rates = calibration()["cpu_load_mb_s_per_core"]
    for name, plan in plans.items():
        made = sizes[name].weight_bytes / (1e6 * rates[name][EXPECTED] * roomy.cores)
        assert plan.times[EXPECTED].load_s == max(made, facts.file_bytes / (roomy.drive_rate * 0.85))
    # Where unpacked ones do not fit, packed ones are planned.
    need = plans["packed"].placement.tiers["host"].total_bytes + SYSTEM_BYTES + 1024
    tight = solve(facts, replace(roomy, ram_bytes=need, assumed=False), Wishes(context=256))
    assert tight.fits and tight.recipe.from_files
    for cards in (1, 2):
        card = replace(read_profile("t4").card, count=cards)
        on_card = solve(facts, replace(read_profile("t4"), card=card), Wishes(context=256))
        assert on_card.fits and on_card.recipe.from_files and "the recipe packed" not in on_card.unbuilt
    with pytest.raises(UsageError, match="holds no packed weights"):
        solve(known_model("qwen3-32b"), roomy, Wishes(recipe="packed"))


def serve(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "packhorse.cli.main", "serve", *args, "--port", "0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_plan_that_cannot_be_run_is_refused_by_name(save):
    file = save("qwen3.6-35b-a3b", "--profile", "rtx-3090-x2", "--context", "245760", "--recipe", "3bit")
    done = serve(str(servers.folder()), "--plan", str(file))
    assert done.returncode == 2 and "2 cards; the recipe 3bit" in done.stderr
    with pytest.raises(UsageError, match="2 cards"):
        read_saved(file)
    with pytest.raises(DoesNotFitError, match=r"3\.\d+ GiB are missing"):
        read_saved(save("qwen3.6-27b", "--profile", "rtx-3060-12g", "--context", "131072", "--kv", "fp16"))


def test_a_plan_for_a_card_is_settings_of_the_engine(save, tmp_path, monkeypatch):
    """The same model by name and as files in its recipe: one plan, one set of sizes; other files are refused."""
    small = {"num_hidden_layers": 8, "num_experts": 32, "vocab_size": 4096, "moe_intermediate_size": 256}
    true_config = synth.known_config
    monkeypatch.setattr(synth, "known_config", lambda name: true_config(name) | small)
    synth.synthesize(tmp_path / "m", "qwen3-30b-a3b", "int4", layers=8)
    synth.synthesize(tmp_path / "other", "qwen3-30b-a3b", "int8", layers=8)
    files = read_model(tmp_path / "m")
    pools = {
        "device": "cuda",
        "context": 2048,
        "sequences": 1,
        "kv_tokens": 2048,
        "chunk_len": 1024,
        "sweep_len": 0,
    }
    whole = size_engine(files, EngineConfig(kv="fp8", **pools), "bf16", 10 * GIB)
    cap = whole.device_bytes // 2**20 - 40
    wishes = "--profile", "rtx-3060-12g", "--context", "2048", "--vram", f"{cap}MiB"
    document = read_saved(save(str(tmp_path / "m"), *wishes))
    config = EngineConfig(**document["engine"])
    assert config.device == "cuda" and config.vram == cap * 2**20 and config.weights == "packed"
    sizes = size_engine(files, config, config.dtype, config.vram)
    assert 0 < sizes.expert_slots < 256 == document["experts"]["total"]
    assert document["tiers"]["device0"]["total_bytes"] == sizes.device_bytes
    named = replace(files, tensors={}, stored={}, container="config")
    plan = solve(named, read_profile("rtx-3060-12g"), Wishes(context=2048, vram=config.vram, recipe="int4"))
    assert plan.executable and plan.placement.sizes == sizes
    check_planned(document, files)
    with pytest.raises(UsageError, match="weight_bytes"):
        check_planned(document, read_model(tmp_path / "other"))
    converted = solve(files, read_profile("rtx-3090"), Wishes(context=2048, recipe="int8"))
    assert "the recipe int8 of these files" in converted.unbuilt[0]


DENSE = Path(__file__).parents[2] / "assets" / "recall-dense"


def test_files_are_planned_as_they_are_where_these_run():
    """Else as `packhorse convert` packs them, and how is said."""
    dense, card = read_model(DENSE), read_profile("rtx-3060-12g")
    plan = solve(dense, card, Wishes())
    assert plan.recipe.name == "bf16" and plan.executable and not plan.alternatives
    # As large as 32B: 65 GB as they are, 18 GB with the products in four bits.
    large = replace(known_model("qwen3-32b"), tensors=dense.tensors, container="safetensors", path=DENSE)
    command = f"`packhorse convert {DENSE} OUT --recipe int4-rtn`"
    for facts, machine, wishes in (
        (dense, card, Wishes(prefer="context")),
        (large, read_profile("rtx-3090"), Wishes()),
        (large, read_profile("rtx-3090"), Wishes(recipe="int4-rtn", context=8192)),
        (large, replace(card, card=None, ram_bytes=40 * GIB, native_bf16=True), Wishes()),
    ):
        plan = solve(facts, machine, wishes)
        assert plan.recipe.name == "int4-rtn" and plan.executable
        assert any(command in text for text in plan.warnings)
    assert solve(large, read_profile("a40"), Wishes(prefer="quality", context=8192)).recipe.name == "int8-rtn"
    # Another model is planned in four bits by itself: the recipe that is meant is said.
    others = [
        offer.change
        for offer in solve(large, card, Wishes(context=8192)).alternatives
        if "model" in offer.change
    ]
    assert others and all("recipe" in change for change in others)
    named = solve(known_model("qwen3-32b"), read_profile("rtx-3090"), Wishes(recipe="int4-rtn", context=8192))
    assert named.executable and not any("convert" in text for text in named.warnings)


def test_a_plan_for_a_conversion_is_for_what_it_writes(save, tmp_path):
    card = ("--profile", "rtx-3060-12g", "--context", "2048", "--recipe")
    file = save(str(DENSE), *card, "int4")
    with pytest.raises(UsageError, match=r"the recipe int4 of these files .*makes int4-rtn") as caught:
        read_saved(file)
    assert "Plan again with --recipe bf16" in caught.value.hint
    document = read_saved(save(str(DENSE), *card, "int4-rtn"))
    with pytest.raises(UsageError, match="weight_bytes") as caught:
        check_planned(document, read_model(DENSE))
    assert "in the plan's recipe, int4-rtn" in caught.value.hint
    assert cli.run(["convert", str(DENSE), str(tmp_path / "out"), "--recipe", "int4-rtn"]) == 0
    check_planned(document, read_model(tmp_path / "out"))


def test_a_plan_for_another_model_and_options_beside_it(save):
    file = save(str(servers.folder()), "--context", "1000")
    check_planned(read_saved(file), read_model(servers.folder()))
    with pytest.raises(UsageError, match="Plan for this model"):
        check_planned(read_saved(file), known_model("qwen3-32b"))
    done = serve(str(servers.folder()), "--plan", str(file), "--sequences", "2", "--kv-tokens", "512")
    assert done.returncode == 2 and "--kv-tokens, --sequences" in done.stderr


@pytest.mark.parametrize("text", ["{}", '{"version": 99}', "[]", "no"])
def test_files_that_are_no_plans(text, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(CorruptFileError, match="is no plan of version 1") as caught:
        read_saved(tmp_path / "plan.json")
    assert "packhorse plan MODEL --json > FILE" in caught.value.hint
