"""packhorse bench offline and compare: what is timed, which bytes are counted, how runs are kept and told apart."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

import machine_code
import oracle
from engines import ask, make_engine, tiny_model
from packhorse.bench import history, offline
from packhorse.bench.card import READ
from packhorse.bench.offline import Settings, measure
from packhorse.cli import bench_offline
from packhorse.cli import main as cli
from packhorse.core.config import EngineConfig
from packhorse.core.errors import ComputeError, CorruptFileError, DoesNotFitError, RefusedError, UsageError
from packhorse.core.units import MIB
from packhorse.engine import engine as engine_module
from packhorse.engine.engine import Engine
from packhorse.facts import nvml
from packhorse.facts.read import read_model

CONFIG = EngineConfig(threads=1, dtype="fp32")
true_ceilings = offline.measure_ceilings


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Ceilings of one byte and one operation a second, so that ratios are times."""
    monkeypatch.setattr(
        offline, "measure_ceilings", lambda facts, config: {"memory": 1.0, "disk": 1.0, "products": 1.0}
    )


def facts_of(family: str):
    return read_model(oracle.shared_checkpoint(family)[1])


def steps_of(monkeypatch) -> list[list[tuple[int, int]]]:
    """(position, length) of the spans of each step that is computed from now on."""
    steps = []
    true_compute = Engine._compute

    def compute(self, step):
        steps.append([(span.position, span.length) for span in step.spans])
        return true_compute(self, step)

    monkeypatch.setattr(Engine, "_compute", compute)
    return steps


@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe"])
def test_what_is_timed(family, monkeypatch):
    steps = steps_of(monkeypatch)
    settings = Settings(contexts=(300, 130), sequences=(2, 1), decode=5, warmup=3)
    document = measure(facts_of(family), CONFIG, settings)
    [load] = document["loads"]
    assert [(row["context"], row["sequences"]) for row in load["decode"]] == [
        (130, 1),
        (130, 2),
        (300, 1),
        (300, 2),
    ]
    # Every prompt was read once alone, and what follows it was decoded together: 3 + 5 steps, one token each.
    for context, at_once in ((130, 1), (130, 2), (300, 1), (300, 2)):
        timed = [step for step in steps if step[0][1] == 1 and step[0][0] >= context and len(step) == at_once]
        decoded = [step for step in timed if all(context <= position < context + 8 for position, _ in step)]
        assert len(decoded) >= 8
    assert (
        sum(span == (0, 130) for step in steps for span in step)
        + sum(span == (0, 128) for step in steps for span in step)
        == 2
    )
    for row in load["prefill"]:
        assert len(row["seconds"]) == 2
        assert row["range_tok_s"][0] <= row["tok_s"] <= row["range_tok_s"][1]
    for row in load["decode"]:
        assert row["tok_s"] * row["step_s"]["mean"] == pytest.approx(row["sequences"], rel=0.01)
        low, high = row["range_tok_s"]
        assert 0 < low <= high
        assert row["ratio"] == pytest.approx(row["tok_s"] / row["ceiling_tok_s"])
    assert load["memory"]["planned_bytes"] > 0 and load["memory"]["used_bytes"] > 100 * MIB


def test_tails_and_an_answer_beside(monkeypatch):
    """A tail reads its own tokens alone, from where the context ends; another prompt is read between tokens."""
    steps = steps_of(monkeypatch)
    settings = Settings(contexts=(256,), decode=5, warmup=0, tails=(40, 130), beside=True)
    [load] = measure(facts_of("qwen3_5_moe"), CONFIG, settings)["loads"]
    assert [(row["tail"], len(row["seconds"]), row["link_bytes"]) for row in load["tails"]] == [
        (40, 3, 0),
        (130, 3, 0),
    ]
    assert steps.count([(256, 40)]) == 3 and steps.count([(256, 130)]) == 3
    beside = load["beside"]
    at_once = [step for step in steps if len(step) == 2 and sorted(length for _, length in step) == [1, 256]]
    assert len(at_once) == 1 and beside["asked_gap_s"] == 0.25
    assert 0 < beside["gap_s"]["max"] <= beside["seconds"] + 1e-3
    [filled] = measure(
        facts_of("llama"), CONFIG, Settings(contexts=(256,), decode=5, tails=(40,), fill_kv=True)
    )["loads"]
    assert steps.count([(256, 40)]) == 6 and filled["beside"] is None
    for wrong, message in (
        ({"tails": (0,)}, "tails are"),
        ({"beside": True, "fill_kv": True}, "beside an answer"),
    ):
        with pytest.raises(UsageError, match=message):
            Settings(**wrong)


def test_bytes_of_a_step():
    """A dense model: every weight but the embedding's other rows once, K and V of what is held, by hand."""
    facts = facts_of("llama")  # embeddings tied to the head: read once, as the head
    settings = Settings(contexts=(200,), sequences=(2,), decode=6, warmup=2)
    [row] = measure(facts, CONFIG, settings)["loads"][0]["decode"]
    weights = tiny_model("llama", False).storage_bytes
    kv = 2 * facts.num_layers * 2 * facts.num_kv_heads * facts.head_dim * 4 * (200 + 2 + 3)
    assert row["links"]["memory"]["bytes_step"] == weights + kv
    assert row["links"]["disk"]["bytes_step"] == 0


def test_states_and_experts_are_counted():
    facts, settings = facts_of("qwen3_5_moe"), Settings(contexts=(200,), sequences=(1,), decode=6, warmup=2)
    [row] = measure(facts, CONFIG, settings)["loads"][0]["decode"]
    delta, moe = facts.delta, facts.moe
    state = delta.num_v_heads * delta.k_head_dim * delta.v_head_dim + delta.conv_dim * (delta.conv_kernel - 1)
    expert = 3 * moe.expert_dim * facts.hidden_size
    left_out = 4 * facts.vocab_size * facts.hidden_size
    left_out += 4 * facts.num_layers * (moe.num_experts - moe.top_k) * expert
    read = tiny_model("qwen3_5_moe", False).storage_bytes - left_out
    read += 2 * 4 * facts.num_linear_layers * state
    read += facts.num_full_layers * 2 * facts.num_kv_heads * facts.head_dim * 4 * (200 + 2 + 3)
    assert row["links"]["memory"]["bytes_step"] == pytest.approx(read, abs=1)


def test_filled_pools_read_no_prompt(monkeypatch):
    steps = steps_of(monkeypatch)
    settings = Settings(contexts=(1000,), sequences=(2,), decode=5, warmup=1, fill_kv=True)
    [load] = measure(facts_of("qwen3_5"), CONFIG, settings)["loads"]
    assert load["prefill"] == [] and load["decode"][0]["filled"]
    assert steps[0] == [(999, 1), (999, 1)] and steps[-1] == [(1005, 1), (1005, 1)]
    assert all(length == 1 for step in steps for _, length in step)


@pytest.mark.parametrize("kv", ["fp16", "fp8", "k5v4"])
def test_filled_pages_hold_values(kv):
    engine = make_engine(tiny_model("qwen3_5", False), kv=kv, num_pages=20)
    offline.fill(engine)
    store = engine.store
    for layer in store.geometry.full_layers:
        pages = store.geometry.codec.bind(store.layer_memory(layer).pages)
        for values in pages.read(range(20), 0, 20 * 64):
            assert values.isfinite().all() and values.float().std() == pytest.approx(1, abs=0.1)
    _, event = ask(engine, oracle.random_ids(1000), max_tokens=4)
    assert event.usage.generated_len == 4


@pytest.mark.parametrize("own", [False, True])
def test_whose_tokens_are_fed(own, monkeypatch):
    """Random ones, which never settle in a loop; where they are asked for, those that were drawn."""
    fed, drawn = [], []
    true_compute, true_sample = Engine._compute, engine_module.sample

    def compute(self, step):
        fed.extend(work.token_ids[0] for work in step.spans)
        return true_compute(self, step)

    def sample(logits, samplers):
        tokens = true_sample(logits, samplers)
        drawn.extend(token.token_id for token in tokens)
        return tokens

    monkeypatch.setattr(Engine, "_compute", compute)
    monkeypatch.setattr(engine_module, "sample", sample)
    settings = Settings(contexts=(64,), decode=40, fill_kv=True, own_tokens=own)
    measure(facts_of("llama"), CONFIG, settings)
    assert len(fed) == len(drawn) == 1 + 8 + 40
    assert (fed[2:] == drawn[1:-1]) == own
    assert own or len(set(fed)) > 30


def test_a_prompt_that_is_not_kept(monkeypatch):
    true_read = offline.Run.read

    def forget(self, prompt):
        seconds = true_read(self, prompt)
        self.engine.store.clear()
        return seconds

    monkeypatch.setattr(offline.Run, "read", forget)
    with pytest.raises(ComputeError, match="300 tokens of a prompt of 300"):
        measure(facts_of("qwen3"), CONFIG, Settings(contexts=(300,), decode=5))


def test_bytes_over_the_link_are_those_of_prompts(monkeypatch):
    """Wherever experts are streamed, with captured steps or without."""
    sent = SimpleNamespace(link_bytes={"decode": 7, "prompts": 0})
    true_step = Engine.step

    def step(self):
        monkeypatch.setattr(self, "experts", sent, raising=False)
        sent.link_bytes["prompts"] += 1000
        return true_step(self)

    monkeypatch.setattr(Engine, "step", step)
    [load] = measure(facts_of("qwen3"), CONFIG, Settings(contexts=(256,), decode=5, tails=(40,)))["loads"]
    [row], [tail] = load["prefill"], load["tails"]
    assert row["link_bytes_token"] * 256 > 0 and row["link_bytes_token"] * 256 % 1000 == 0
    assert tail["link_bytes"] > 0 and tail["link_bytes"] % 1000 == 0


def test_a_tail_whose_context_is_not_kept(monkeypatch):
    true_decode = offline.Run.decode

    def forget(self, context, prompts):
        row = true_decode(self, context, prompts)
        self.engine.store.clear()
        return row

    monkeypatch.setattr(offline.Run, "decode", forget)
    with pytest.raises(ComputeError, match="300 tokens of a prompt of 300"):
        measure(facts_of("qwen3"), CONFIG, Settings(contexts=(300,), decode=5, tails=(40,)))


def test_settings_that_mean_nothing():
    for bad in ({"contexts": ()}, {"contexts": (0,)}, {"sequences": (1, -1)}, {"decode": 4}, {"warmup": -1}):
        with pytest.raises(UsageError):
            Settings(**bad)
    with pytest.raises(DoesNotFitError, match="window"):
        measure(facts_of("llama"), CONFIG, Settings(contexts=(8192,)))
    with pytest.raises(UsageError, match="cuda:99 was asked for"):
        measure(facts_of("llama"), EngineConfig(device="cuda:99"), Settings())
    with pytest.raises(RefusedError, match="no weights"):
        measure(replace(facts_of("llama"), container="config"), CONFIG, Settings())


def test_ceilings():
    rates = true_ceilings(facts_of("llama"), CONFIG)
    assert set(rates) == {"memory", "disk", "products"} and min(rates.values()) > 1e5
    assert rates["products"] > 1e8


@pytest.mark.parametrize("arch", [75, 90])
def test_the_reading_kernel_compiles(arch):
    machine_code.check(READ, arch)


def test_expert_counts():
    """Of routed experts alone: the kernels count a shared one, of 100 bytes here, in each layer and step."""
    counters = torch.tensor([80, 8000, 0, 2000, 500])
    layout = SimpleNamespace(layers=(0, 1), block_bytes=100)
    model = SimpleNamespace(facts=SimpleNamespace(moe_layers=(True, True)), experts=None)
    graphs = SimpleNamespace(counters=counters, num_steps=5)
    engine = SimpleNamespace(runner=SimpleNamespace(graphs=graphs, model=model))
    want = {"used": 80, "bytes": 8000, "host_bytes": 2000, "kept_bytes": 500}
    assert offline.expert_counts(engine) == want
    model.experts = SimpleNamespace(layout=layout, shared=None)
    assert offline.expert_counts(engine) == want
    model.experts.shared = torch.zeros(2, 100)
    assert offline.expert_counts(engine) == want | {"used": 70, "bytes": 7000}
    model.facts.moe_layers = (False, False)
    assert offline.expert_counts(engine) is None


def test_the_drivers_figure_of_this_process(monkeypatch):
    """By process id; a single process of another id is this one in a container; two of them are not."""
    own, other = SimpleNamespace(pid=os.getpid(), usedGpuMemory=5), SimpleNamespace(pid=-1, usedGpuMemory=7)
    lists = {"computing": [own, other], "drawing": [other]}
    fake = SimpleNamespace(
        NVMLError=ValueError, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: lists["computing"],
        nvmlDeviceGetGraphicsRunningProcesses=lambda handle: lists["drawing"],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert nvml.process_bytes("GPU-1") == 5
    lists["computing"] = [other]
    assert nvml.process_bytes("GPU-1") == 7
    lists["drawing"] = [SimpleNamespace(pid=-2, usedGpuMemory=1)]
    assert nvml.process_bytes("GPU-1") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.process_bytes("GPU-1") is None


def run_document(tok_s: float, spread: float, name: str = "m") -> dict:
    """A run with one decode row whose fifths lie `spread` around its speed."""
    row = {
        "context": 64, "sequences": 1, "tok_s": tok_s, "range_tok_s": [tok_s - spread, tok_s + spread],
        "step_s": {"p99": 0.01}, "experts": {"hit_rate": 0.5},
    }  # fmt: skip
    prefill = {"context": 64, "tok_s": 10 * tok_s, "range_tok_s": [10 * tok_s] * 2}
    tail = {"context": 64, "tail": 9, "seconds": [(100 + step * spread) / tok_s for step in (-1, 0, 1)]}
    beside = {"context": 64, "gap_s": {"max": 30 / tok_s}}
    load = {"vram": None, "memory": {"used_bytes": 100}, "prefill": [prefill], "decode": [row],
            "load_s": 7.0, "tails": [tail], "beside": beside}  # fmt: skip
    return {"version": 1, "model": {"name": name}, "settings": {"decode": 5}, "loads": [load],
            "time": "now", "commit": None}  # fmt: skip


@pytest.mark.parametrize(("before", "after", "spread", "verdict"), [
    (100, 110, 1, "faster"), (100, 90, 1, "slower"), (100, 110, 6, "noise"), (100, 101.5, 0.1, "noise"),
    (100, 103, 0.1, "faster"),
])  # fmt: skip
def test_what_is_noise(before, after, spread, verdict):
    found = history.compare(run_document(before, spread), run_document(after, spread))
    by_figure = {one.figure: one for one in found}
    assert by_figure["decode tok/s"].verdict == verdict
    assert by_figure["decode tok/s"].change == pytest.approx(after / before - 1)
    assert by_figure["first token s"].verdict == verdict
    assert by_figure["first token s"].change == pytest.approx(before / after - 1)
    assert by_figure["longest gap s"].change == pytest.approx(before / after - 1)
    assert by_figure["longest gap s"].verdict == by_figure["seconds"].verdict == ""
    # Measured once: 3 % to each side are noise.
    assert by_figure["prefill tok/s"].verdict == ("noise" if abs(after - before) < 6 else verdict.replace(
        "noise", "faster"))  # fmt: skip
    assert (
        by_figure["p99 ms"].verdict == by_figure["hit rate"].verdict == by_figure["used bytes"].verdict == ""
    )


def test_which_runs_are_compared(tmp_path):
    for document in (run_document(1, 0), run_document(2, 0), run_document(3, 0, "other"), run_document(4, 0)):
        number = history.append(tmp_path, document)
    assert number == 4

    def speeds(*names):
        return tuple(run["loads"][0]["decode"][0]["tok_s"] for run in history.choose(tmp_path, *names))

    assert speeds(None, None) == (2, 4)
    assert speeds("2", None) == (1, 2)
    assert speeds("3", "1") == (3, 1)
    file = tmp_path / "report.json"
    file.write_text(json.dumps(run_document(9, 0)))
    assert speeds(str(file), None) == (4, 9)
    for names in (("3", None), ("5", None), ("0", "1"), ("nothing", "1")):
        with pytest.raises(UsageError):
            history.choose(tmp_path, *names)
    with pytest.raises(UsageError, match="There is no run in"):
        history.choose(tmp_path / "empty", None, None)
    for name, words in (("1", "No run before run 1 has its"), ("3", "No run before run 3 has its")):
        with pytest.raises(UsageError, match=f"{words} model .* among 4 .*Alike are 1 and 2, 2 and 4;"):
            history.choose(tmp_path, name, None)
    file.write_text(json.dumps(run_document(9, 0, "third")))
    with pytest.raises(UsageError, match=f"No run has {file}'s model"):
        history.choose(tmp_path, str(file), None)
    file.write_bytes(b"\xd4\x00")
    with pytest.raises(CorruptFileError, match="is no run"):
        history.choose(tmp_path, str(file), "1")
    with (tmp_path / history.FILE).open("a") as out:
        out.write('{"version": 1}')
    with pytest.raises(CorruptFileError, match="line 5"):
        history.choose(tmp_path, None, None)
    assert history.append(tmp_path, run_document(6, 0)) == 6
    assert len((tmp_path / history.FILE).read_text().splitlines()) == 6


def test_command(tmp_path, capsys):
    folder = str(oracle.shared_checkpoint("qwen3_5_moe")[1])
    args = [
        "bench",
        "offline",
        folder,
        "--contexts",
        "64,130",
        "--decode",
        "5",
        "--threads",
        "1",
        "--fill-kv",
    ]
    args += ["--history", str(tmp_path)]
    assert cli.run([*args, "--report", str(tmp_path / "one.json")]) == 0
    captured = capsys.readouterr()
    assert "K and V are random" in captured.out and "130" in captured.out and "run 1" in captured.err
    assert cli.run([*args, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["version"] == offline.VERSION and document["versions"]["torch"] == metadata.version(
        "torch"
    )
    assert document["hardware"]["num_cores"] >= 1 and document["settings"]["contexts"] == [64, 130]
    kept = json.loads((tmp_path / "one.json").read_text())
    assert set(kept) == set(document)
    assert cli.run(["bench", "compare", "--history", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "decode tok/s" in shown and re.search(r"used bytes +[\d.]+ MiB +[\d.]+ MiB ", shown)
    assert cli.run(["bench", "compare", "1", "2", "--json", "--history", str(tmp_path)]) == 0
    assert len(json.loads(capsys.readouterr().out)["differences"]) == 6


@pytest.mark.parametrize(("option", "words"), [
    ("--report=/nonexistent/x.json", "folder that does not exist"), ("--report=/", "is a folder"),
    ("--report=/proc/x.json", "cannot be written"), ("--history=/proc/x", "cannot be written"),
])  # fmt: skip
def test_what_cannot_be_written_is_said_before_the_work(option, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(offline, "measure", lambda *_: pytest.fail("work began"))
    folder = str(oracle.shared_checkpoint("llama")[1])
    assert cli.run(["bench", "offline", folder, "--history", str(tmp_path), option]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 2 and captured.out == ""


def test_a_report_that_fails_after_the_work_costs_no_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_offline, "check_file", lambda file: None)
    folder = str(oracle.shared_checkpoint("llama")[1])
    args = ["bench", "offline", folder, "--fill-kv", "--contexts", "64", "--decode", "5", "--threads", "1"]
    assert cli.run([*args, "--history", str(tmp_path), "--report", str(tmp_path / "no" / "x")]) == 1
    captured = capsys.readouterr()
    assert "K and V are random" in captured.out and "cannot be written" in captured.err
    assert len(history.runs(tmp_path)) == 1


@pytest.mark.parametrize("args", [
    ["offline"], ["offline", "FOLDER", "--contexts", "4k"], ["offline", "FOLDER", "--vram", "1GiB"],
    ["offline", "FOLDER", "more"], ["serve", "FOLDER"],
])  # fmt: skip
def test_usage(args, tmp_path):
    folder = str(oracle.shared_checkpoint("llama")[1])
    words = [folder if arg == "FOLDER" else arg for arg in args]
    assert cli.run(["bench", *words, "--history", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("args", "stray"),
    [
        (["compare", "--like", "x"], "--like"),
        (["serve", "--against", "http://x", "--vram", "1GiB", "--recipe", "int8"], "--recipe, --vram"),
        (["serve", "here", "--against", "http://x"], "a target"),
        (["offline", "a", "b"], "a second target"),
        (["synth", "out", "--like", "x", "--report", "f"], "--report"),
    ],
)
def test_options_of_another_kind_are_refused(args, stray):
    command = [sys.executable, "-m", "packhorse.cli.main", "bench", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"takes no {stray}." in done.stderr
