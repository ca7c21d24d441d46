"""Recall through the engine on the shipped models, features in pairs, and the report around it."""

import colorsys
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest
import torch

from packhorse.cli import asking, demo_facts, main
from packhorse.core.config import EngineConfig
from packhorse.core.errors import CorruptFileError, DoesNotFitError, PackhorseError, UsageError
from packhorse.core.types import FinishReason, Usage
from packhorse.engine.session import Answer, Session
from packhorse.facts.read import read_model
from packhorse.text.reasoning import Think
from packhorse.text.template import ChatTemplate
from packhorse.verify import recall
from packhorse.verify.compare import Feature, Recorder, ask_pairs, parse_changes
from packhorse.verify.ladder import climb, rungs
from packhorse.verify.recall import (
    THINK_TOKENS,
    Asker,
    Grid,
    Report,
    Sampler,
    compare,
    even_depths,
    mcnemar,
    read_report,
    run_grid,
    settings_of,
    summarize,
    wilson,
)
from packhorse.verify.report import render_html

ASSETS = Path(__file__).parents[2] / "assets"
MODELS = ("recall-hybrid", "recall-dense")


@cache
def asker(model: str) -> Asker:
    config = EngineConfig(context=4608, sequences=1, dtype="fp32", threads=1, snapshot_len=1024)
    return Asker(Session.open(ASSETS / model, config))


def record(task: str, seed: int, right: bool, **changes) -> dict:
    blank = {"language": "en", "length": 4096, "depth": 0.5, "share": float(right), "unfinished": False}
    blank |= {"expected": ["1"], "answer": "<1>", "finish": "stop"}
    return {"task": task, "seed": seed, "right": right} | blank | changes


def test_the_shipped_models_are_small_and_of_the_large_ones_class():
    files = {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    for model, most in (("recall-hybrid", 12e6), ("recall-dense", 6e6)):
        folder = ASSETS / model
        assert (
            files <= {file.name for file in folder.iterdir()}
            and "cannot" in (folder / "README.md").read_text()
        )
        assert sum(file.stat().st_size for file in folder.iterdir()) <= most
    hybrid, dense = (read_model(ASSETS / model) for model in MODELS)
    assert (hybrid.family, dense.family) == ("qwen3_5_moe", "qwen3")
    assert hybrid.num_layers >= 8 and hybrid.num_linear_layers == 3 * hybrid.num_full_layers >= 6
    assert 64 <= hybrid.head_dim <= 256 and hybrid.rope.rotary_dim < hybrid.head_dim
    assert 1 < hybrid.num_kv_heads < hybrid.num_heads and min(hybrid.context, dense.context) >= 131_072
    assert hybrid.moe.num_experts >= 16 and hybrid.moe.top_k >= 2 and hybrid.moe.shared_dim > 0


@pytest.mark.parametrize("model", MODELS)
def test_facts_are_found_in_4096_tokens_and_again_in_what_was_read(model):
    """Chunks of 1,024 tokens, pages of 64, then reuse: the facts pass through all of the engine's paths."""
    ours = asker(model)
    for task, depth in (("variables", 0.3), ("multi_key", 0.6)):
        sample = ours.sample({"task": task, "language": "en", "length": 4096, "depth": depth, "seed": 11})
        found = ours.ask(sample)
        assert found["right"], found["answer"]
        assert (found["read_tokens"], found["reused_tokens"]) == (4096, 0)
    again = ours.ask(sample)
    assert again["reused_tokens"] >= 4096 - 1024
    assert again["answer"] == found["answer"]


@pytest.mark.parametrize("model", MODELS)
def test_a_damaged_context_is_not_answered(model):
    """The answer comes from the document: without its fact the number is not said."""
    sample = asker(model).sample({"task": "single", "language": "zh", "length": 512, "depth": 0.5, "seed": 2})
    assert asker(model).ask(sample)["right"]
    line = sample.reply
    bare = [{"role": "user", "content": sample.chat[0]["content"].replace(line, "")}]
    answer = asker(model).session.answer(bare, max_tokens=sample.answer_len)
    assert sample.expected[0] not in answer.text


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_transformers_gives_the_same_tokens_on_50_prompts(model):
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(ASSETS / model, dtype=torch.float32).eval()
    ours = asker(model)
    tasks = ("single", "multi_key", "multi_value", "kv_json", "variables")
    for seed in range(50):
        trial = {
            "task": tasks[seed % 5],
            "language": ("en", "zh")[seed % 2],
            "length": 4096,
            "depth": seed / 49,
        }
        sample = ours.sample(trial | {"seed": seed})
        answer = ours.session.answer(sample.chat, max_tokens=sample.answer_len)
        prompt = torch.tensor([sample.token_ids])
        with torch.no_grad():
            out = theirs.generate(prompt, max_new_tokens=sample.answer_len, do_sample=False)
        assert ours.session.tokenizer.decode(out[0, 4096:].tolist()) == answer.text


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_grid_at_4096(model):
    grid = Grid(("single", "multi_key", "multi_query", "kv_json", "variables"), (4096,), even_depths(10), n=4)
    report = Report(None, {})
    run_grid(asker(model), grid, report)
    assert {r["task"]: r["rate"] for r in summarize(report.records) if r["rate"] < 0.95} == {}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_chunked_and_reused_paths_give_the_same_answers(model):
    """Exact mode against chunks of 128, and asked again: no bit of a distribution differs."""
    reference, cut, again = (
        Asker(
            Session.open(
                ASSETS / model,
                EngineConfig(
                    context=2560, sequences=1, exact=True, threads=1, snapshot_len=1024, chunk_len=length
                ),
            )
        )
        for length in (1024, 128, 1024)
    )
    features = [Feature("chunk_len=128", {"chunk_len": 128}, cut), Feature("reuse", {}, again)]
    grid = Grid(("multi_key", "variables"), (2048,), (0.1, 0.6), n=1)
    report = Report(None, {})
    run_grid(reference, grid, report, ask=lambda sample: ask_pairs(reference, features, sample))
    for feature in features:
        row = feature.row(report.records)
        assert (row["kl_max"], row["same_token"], row["only_reference"], row["only_feature"]) == (0, 1, 0, 0)
        assert row["pairs"] == row["right"] == 4


def pair_up(changes: str, model: str = "recall-dense", length: int = 256, **more) -> tuple[dict, list]:
    """The figures of a feature over two samples, and the reference's records."""
    config = {"context": length + 512, "sequences": 1, "dtype": "fp32", "threads": 1}
    found = parse_changes(changes, 4096)
    second = EngineConfig(**(config | found | more))
    feature = Feature(changes, found, Asker(Session.open(ASSETS / model, second)))
    reference = Asker(Session.open(ASSETS / model, EngineConfig(**config)))
    report = Report(None, {})
    ask = lambda sample: ask_pairs(reference, [feature], sample)  # noqa: E731
    run_grid(reference, Grid(("multi_key",), (length,), (0.2, 0.8), n=1), report, ask=ask)
    return feature.row(report.records), report.records


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [("kv=fp8", 1e-9, 1e-3), ("kv=k4v4", 1e-9, 1e-2), ("chunk_len=128", 0, 1e-9), ("reuse", 0, 1e-9)],
)
def test_features_are_compared_token_by_token(changes, least, most):
    """Coded KV moves the distributions and cuts do not; both are seen to be at work."""
    row, records = pair_up(changes)
    assert (row["pairs"], row["right"], row["reference_right"]) == (2, 2, 2)
    assert row["tokens"] == sum(r["generated_tokens"] for r in records)
    assert least <= row["kl_max"] <= most
    assert row["active"] >= 2


def test_a_feature_that_does_harm_is_seen(monkeypatch):
    """A second model whose keys are stored without their signs: other tokens, its own wrong answers."""
    from packhorse.quant.codec import Fp8Pages

    write = Fp8Pages.write
    monkeypatch.setattr(Fp8Pages, "write", lambda self, ids, start, k, v: write(self, ids, start, k.abs(), v))
    row, _ = pair_up("kv=fp8")
    assert (row["right"], row["reference_right"], row["only_reference"], row["p"]) == (0, 2, 2, 0.5)
    assert row["same_token"] < 1
    assert row["kl_max"] > 0.1


@pytest.mark.parametrize(
    ("changes", "more"),
    [("kv=fp8", {"kv": "auto"}), ("chunk_len=1024", {}), ("dtype=bf16", {"dtype": "fp32"})],
)
def test_a_feature_that_is_not_at_work_is_no_result(changes, more):
    """Dense against dense, a chunk longer than the prompt, a type that the engine does not have."""
    with pytest.raises(UsageError, match="was not at work in any of 2 samples"):
        pair_up(changes, **more)


def test_what_cannot_be_compared_is_refused():
    for text in ("threads=2", "kv", "kv=", "reuse,kv=fp8", ""):
        with pytest.raises(UsageError, match="nothing that can be compared"):
            parse_changes(text, 4096)
    for text, said in (
        ("exact=yes", "'exact=yes' does not say what exact is to be"),
        ("exact=True", "'exact=True' does not say"),
        ("kv=fp8,kv=k4v4", "gives kv two values"),
        ("kv=auto", "'kv=auto' does not say what kv is to be. Name the kv to compare with"),
        ("page_len=64,dtype=auto", "'dtype=auto' does not say what dtype is to be"),
    ):
        with pytest.raises(UsageError, match=said):
            parse_changes(text, 4096)
    assert parse_changes("exact=true", 4096) == {"exact": True}
    assert parse_changes("kv=fp8,chunk_len=128,exact=false", 129) == {
        "kv": "fp8",
        "chunk_len": 128,
        "exact": False,
    }


def test_an_answer_is_led_over_given_tokens():
    ours = asker("recall-dense")
    sample = ours.sample({"task": "single", "language": "en", "length": 256, "depth": 0.5, "seed": 1})
    free = Recorder()
    text = ours.ask(sample, free)["answer"]
    other = [*reversed(free.token_ids[:-1]), free.token_ids[-1]]
    led = Recorder(other)
    answer = ours.ask(sample, led)["answer"]
    assert led.token_ids == other
    assert answer == ours.session.tokenizer.decode(other).strip() != text
    torch.testing.assert_close(led.rows[0], free.rows[0], atol=1e-3, rtol=0)
    assert (led.rows[1] - free.rows[1]).abs().max() > 0.1


def test_thoughts_have_room_of_their_own_and_are_not_scored(tmp_path, monkeypatch):
    """A model whose template opens a thought; one that never came to its answer is counted apart."""
    template = tmp_path / "thinks.jinja"
    template.write_text(
        (ASSETS / "recall-dense/chat_template.jinja").read_text() + "{{ '<think>' }}{# </think> #}"
    )
    config = EngineConfig(context=8192, sequences=1, dtype="fp32", threads=1)
    ours = Asker(Session.open(ASSETS / "recall-dense", config, chat_template=template))
    assert ours.thinks and not asker("recall-dense").thinks
    sample = ours.sample({"task": "single", "language": "en", "length": 256, "depth": 0.5, "seed": 1})
    room = []

    def answers(text: str, finish: FinishReason) -> dict:
        usage = Usage(256, 0, 9)
        made = Answer(text, sample.reply, usage, finish, first_token_s=1.0, read_s=1.0, tokens_per_s=1.0)
        monkeypatch.setattr(
            ours.session, "answer", lambda *_, max_tokens, **__: (room.append(max_tokens), made)[1]
        )
        return ours.ask(sample)

    found = [
        answers(sample.reply, FinishReason.STOP),
        answers(" ", FinishReason.LENGTH),
        answers("", FinishReason.STOP),
    ]
    assert [(record["right"], record["unfinished"]) for record in found] == [
        (True, False),
        (False, True),
        (False, True),  # ended inside its thought
    ]
    assert [record["finish"] for record in found] == ["stop", "length", "stop"]
    assert room == [sample.answer_len + THINK_TOKENS] * 3
    (row,) = summarize(found)
    assert (row["right"], row["n"], row["unfinished"]) == (1, 3, 2)


def test_an_answer_that_is_cut_is_unfinished(monkeypatch):
    ours = asker("recall-dense")
    sample = ours.sample({"task": "single", "language": "en", "length": 256, "depth": 0.5, "seed": 1})
    for finish, cut in ((FinishReason.LENGTH, True), (FinishReason.STOP, False)):
        made = Answer("Let me see:", "", Usage(256, 0, 9), finish, 1.0, 1.0, 1.0)
        monkeypatch.setattr(ours.session, "answer", lambda *_, found=made, **__: found)
        asked = ours.ask(sample)
        assert (asked["unfinished"], asked["finish"], asked["right"]) == (cut, finish.value, False)


def test_the_demo_finds_facts_in_a_long_document(monkeypatch, capsys):
    monkeypatch.setattr(demo_facts, "LENGTH", 1024)
    shown: list[str] = []
    found = demo_facts.find_facts(1, shown.append)
    assert [answer["right"] for answer in found["answers"]] == [True] * 5
    assert len({answer["question"] for answer in found["answers"]}) == 5
    assert [answer["usage"]["reused_tokens"] >= 900 for answer in found["answers"]] == [False, *[True] * 4]
    assert shown[-1] == "5 of 5 facts were found."
    monkeypatch.setattr(demo_facts, "ROOM", 8)  # answers end before their number
    monkeypatch.setattr(demo_facts, "LENGTH", 512)
    monkeypatch.setattr(demo_facts, "NUM_FACTS", 2)
    with pytest.raises(PackhorseError, match="2 of 2 facts were not found"):
        demo_facts.find_facts(1, shown.append)
    monkeypatch.setattr(demo_facts, "FOLDER", Path("/nowhere"))
    assert demo_facts.find_facts(1, shown.append) is None
    assert "/nowhere is not there" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--report", "--html"])
def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_read(option, capsys):
    assert main.run(["verify", "recall", "/no/model", option, "/nonexistent/x"]) == 2
    assert "folder that does not exist" in capsys.readouterr().err


def test_a_report_whose_folder_goes_away(tmp_path):
    with pytest.raises(PackhorseError, match="cannot be written: No such file"):
        Report(tmp_path / "gone" / "x.json", {})
    (tmp_path / "goes").mkdir()
    with closing(Report(tmp_path / "goes" / "x.json", {})) as report:
        shutil.rmtree(tmp_path / "goes")
        with pytest.raises(PackhorseError, match="cannot be written: No such file"):
            report.save()


def test_report_resumes_where_it_was_cut(tmp_path, capfd):
    path = tmp_path / "report.json"
    ours = asker("recall-dense")
    grid = Grid(("multi_key",), (256, 512), (0.5,), n=2)
    settings = settings_of(read_model(ASSETS / "recall-dense"), ours, EngineConfig(dtype="fp32"), grid)
    seen = []

    def stop(done, total, record):
        seen.append(done)
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), closing(Report(path, settings)) as report:
        run_grid(ours, grid, report, stop)
    assert len(read_report(path)["records"]) == 3
    with closing(Report(path, settings)) as report:
        run_grid(ours, grid, report, lambda done, total, record: seen.append((done, total)))
    assert seen == [1, 2, 3, (4, 4)]
    assert len(read_report(path)["records"]) == 4
    with pytest.raises(UsageError, match="dtype 'fp32', and this run has 'fp16'"):
        Report(path, settings | {"dtype": "fp16"})
    path.write_text("{}")
    with pytest.raises(CorruptFileError, match="no recall report"):
        Report(path, settings)
    document = tmp_path / "small.md"
    document.write_text("# The hut")
    for option, file, said in (
        ("--report", document, f"{document} is no recall report"),
        ("--against", document, f"{document} is no recall report"),
        ("--against", tmp_path / "none.json", "none.json cannot be read: No such file"),
    ):
        assert main.run(["verify", "recall", "no-such-model", option, str(file)]) == 4
        printed = capfd.readouterr().err
        assert said in printed and "elete" not in printed and "Expecting" not in printed
    assert document.read_text() == "# The hut"


def test_prompts_beyond_the_window_are_refused_before_any_is_asked():
    with pytest.raises(DoesNotFitError, match=r"8,192 tokens and 512 .* window of 4,608"):
        run_grid(asker("recall-dense"), Grid(lengths=(256, 8192)), Report(None, {}))


def test_grids_that_mean_nothing_are_refused():
    with pytest.raises(UsageError, match="no task 'x'"):
        Grid(("x",))
    with pytest.raises(UsageError, match="0 samples a cell"):
        Grid(n=0)
    assert len(list(Grid(n=3, lengths=(256, 512)).trials())) == 60


def test_wilson_intervals():
    """Against published values: 0 of 10 and 81 of 263."""
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(300, 300)
    assert low > 0.98
    assert high == pytest.approx(1.0)


def test_mcnemar_is_exact():
    """Two-sided binomial tails with p = 1/2, by hand."""
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 5) == 1.0
    assert mcnemar(0, 6) == pytest.approx(2 / 64)
    assert mcnemar(8, 1) == pytest.approx(2 * 10 / 512)


def test_comparison_pairs_the_same_samples():
    first = [record("single", seed, seed > 1) for seed in range(6)]
    second = [record("single", seed, seed % 2 == 0) for seed in reversed(range(8))]
    found = compare(first, second)
    assert (found.pairs, found.both, found.only_first, found.only_second) == (6, 2, 2, 1)
    with pytest.raises(UsageError, match="no sample in common"):
        compare(first, [record("kv_json", 0, True)])


def test_html_stands_alone_and_shows_every_cell():
    records = [
        record("single", s, s > 0, depth=d, length=n)
        for s in range(4)
        for d in (0.0, 1.0)
        for n in (512, 4096)
    ]
    document = {"settings": {"model": "a<b"}, "records": records}
    page = render_html(document, compare(records, records))
    assert page.count("75%<small>3/4</small>") == 4
    assert "a&lt;b" in page
    assert "a<b" not in page
    assert "&lt;1&gt;" in page
    assert "16 pairs: 12 right in both" in page
    assert not re.search(r"(?:src|href|url)\s*[=(]|https?:|<script", page)


def browser() -> str | None:
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@pytest.mark.skipif(browser() is None, reason="no Chromium on this machine (Debian: chromium-headless-shell)")
def test_html_opens_in_a_browser(tmp_path):
    """Half of the cells solved: as many pixels of the one colour as of the other, and figures in the page."""
    from PIL import Image

    records = [
        record("single", s, d > 0.4, depth=d, length=n)
        for s in range(3)
        for d in (0.0, 0.25, 0.5, 1.0)
        for n in (512, 4096)
    ]
    row, reference = pair_up("kv=fp8")
    page = tmp_path / "r.html"
    page.write_text(render_html({"settings": {"model": "m"}, "records": records + reference}, None, [row]))
    shot = tmp_path / "r.png"
    args = [browser(), "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=900,1200"]
    args += [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}", page.as_uri()]
    subprocess.run(args, check=True, timeout=60, capture_output=True)
    image = Image.open(shot).convert("RGB")
    assert image.size == (900, 1200)
    colours = {colour: count for count, colour in image.getcolors(900 * 1200)}

    def area(hue: int) -> int:
        wanted = [255 * c for c in colorsys.hls_to_rgb(hue / 360, 0.68, 0.62)]
        return sum(
            n for c, n in colours.items() if all(abs(a - b) < 2 for a, b in zip(c, wanted, strict=True))
        )

    # Single's table: four red cells and four green; multi_key's: two more green ones.
    assert area(0) > 4 * 1000
    assert area(130) == pytest.approx(area(0) * 6 / 4, rel=0.1)


def test_rungs_end_at_the_window():
    assert rungs(5000) == (1024, 2048, 4096, 4488)
    assert rungs(1536) == (1024,)
    with pytest.raises(UsageError, match="window has 512 tokens, and an answer may need 512"):
        rungs(512)
    assert rungs(1536, 1000) == (536,)
    [row] = climb(asker("recall-dense"), (300,))
    assert row["right"] and not row["unfinished"]
    assert row["peak_bytes"] > 50_000_000


def test_command_prints_a_summary_and_writes_both_files(tmp_path, capfd):
    report, html = tmp_path / "r.json", tmp_path / "r.html"
    args = ["verify", "recall", str(ASSETS / "recall-dense"), "--tasks", "multi_key", "--lengths", "512"]
    args += ["--depths", "2", "--n", "1", "--dtype", "fp32", "--threads", "1", "--offline"]
    assert main.run([*args, "--report", str(report), "--html", str(html), "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed["summary"][0] | {"low": 0, "high": 0} == {
        "task": "multi_key", "language": "en", "length": 512, "n": 2, "right": 2, "rate": 1.0,
        "low": 0, "high": 0, "share": 1.0, "unfinished": 0,
    }  # fmt: skip
    assert len(read_report(report)["records"]) == 2
    assert "100%" in html.read_text()
    assert main.run([*args, "--report", str(report), "--against", str(report)]) == 2
    assert "--report and --against are one file" in capfd.readouterr().err
    first = shutil.copy(report, tmp_path / "first.json")
    assert main.run([*args, "--report", str(report), "--against", first]) == 0
    assert "2 pairs, 0 right here alone, 0 there alone, McNemar p 1" in capfd.readouterr().out
    # Another length beside those: what is shown is what was asked for, and what is kept is all.
    args[args.index("512")] = "256"
    assert main.run([*args, "--report", str(report), "--html", str(html), "--json"]) == 0
    printed = capfd.readouterr()
    assert [(row["length"], row["n"]) for row in json.loads(printed.out)["summary"]] == [(256, 2)]
    assert "r.json holds 0 of 2 answers, and 2 to what is not asked now" in printed.err
    assert "<th>256" in html.read_text() and "<th>512" not in html.read_text()
    assert {record["length"] for record in read_report(report)["records"]} == {256, 512}


def test_command_compares_features_and_climbs(tmp_path, capfd):
    model = ["--dtype", "fp32", "--threads", "1", "--offline", str(ASSETS / "recall-dense")]
    grid = ["recall", "--tasks", "multi_key", "--lengths", "256", "--depths", "1", "--n", "1"]
    assert main.run(["verify", *grid, "--compare", "kv=fp8", "--compare", "reuse", *model, "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)["features"]
    assert [(row["feature"], row["pairs"], row["right"]) for row in rows] == [
        ("kv=fp8", 1, 1),
        ("reuse", 1, 1),
    ]
    assert all(row["active"] > 0 for row in rows)
    for same in (
        "dtype=fp32",
        "device=cpu",
        "exact=false",
        "page_len=64",
        "kv=fp8,page_len=64",
    ):
        assert main.run(["verify", *grid, "--compare", same, *model]) == 2
        setting, value = same.split(",")[-1].split("=")
        said = f"--compare {same} would change nothing: without it {setting} is {value} too"
        assert said in capfd.readouterr().err
    assert main.run(["verify", *grid, "--lengths", "1100", "--compare", "chunk_len=1024", *model]) == 2
    assert "without it chunk_len is 1024 too" in capfd.readouterr().err
    assert main.run(["verify", *grid, "--compare", "kv=bf16", "--kv", "bf16", *model]) == 2
    assert "without it kv is bf16 too" in capfd.readouterr().err
    html = ["--html", str(tmp_path / "r.html")]
    idle = ["verify", *grid, "--compare", "page_len=512", "--compare", "kv=fp8", *html, *model]
    assert main.run(idle) == 2
    printed = capfd.readouterr()
    assert "page_len=512 was not at work in any of 1 sample, so" in printed.err
    assert "100.0%" in printed.out and "kv=fp8: right 1 of 1" in printed.out
    assert "kv=fp8" in Path(html[1]).read_text()
    assert main.run([*idle, "--json"]) == 2
    error = json.loads(capfd.readouterr().out)["error"]
    assert "page_len=512" in error["reason"] and error["summary"][0]["right"] == 1
    assert [(row["feature"], row["right"]) for row in error["features"]] == [("kv=fp8", 1)]
    assert main.run(["verify", "ladder", "--context", "1536", *model]) == 0
    printed = capfd.readouterr()
    title, row = printed.out.splitlines()
    assert "Beside 512 tokens for an answer the window holds one rung" in printed.err
    assert main.run(["verify", "ladder", "--context", "500", *model]) == 2
    printed = capfd.readouterr()
    assert not printed.out and "window has 500 tokens" in printed.err
    assert main.run(["verify", "ladder", "--context", "513", *model]) == 3
    printed = capfd.readouterr()
    assert not printed.out and "tokens without any filler, and 1 were asked for" in printed.err
    assert title.split()[0] == "tokens" and row.split()[0] == "1,024" and row.endswith("found")


def test_an_interrupted_run_says_how_it_goes_on(tmp_path, capfd, monkeypatch):
    report, html = tmp_path / "r.json", tmp_path / "r.html"
    command = f"verify recall {ASSETS / 'recall-dense'} --tasks multi_key --lengths 256 --depths 2 --n 1 --dtype fp32"
    command = [*command.split(), "--threads", "1", "--offline", "--report", str(report)]
    ask, asked = Asker.ask, []

    def interrupted(self: Asker, *args):
        asked.append(args)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return ask(self, *args)

    monkeypatch.setattr(Asker, "ask", interrupted)
    assert main.run(command) == 130
    assert f"The same command goes on from what {report} holds." in capfd.readouterr().err
    assert main.run([*command, "--html", str(html)]) == 0
    assert len(asked) == 3 and "r.json holds 1 of 2 answers" in capfd.readouterr().err
    assert "<p>2 questions; " in html.read_text()
    [one] = read_report(report)["records"][:1]
    assert "<p>1 question; " in render_html({"settings": {"model": "m"}, "records": [one]})


def test_command_refuses_before_it_loads(tmp_path, capfd):
    model = str(ASSETS / "recall-dense")
    earlier = Report(tmp_path / "c.json", {"density": None, "haystack": None})
    earlier.add(record("single", 0, True))
    earlier.save()
    earlier.close()
    against = ["--depths", "1", "--against", str(earlier.path)]
    for args, message in (
        ([*against, "--seed", "1"], "no sample in common"),
        ([*against, "--density", "3"], "report has density None, and this run 3.0: they share no sample"),
        ([*against, "--haystack", str(ASSETS)], "report has haystack None, and this run"),
        (
            ["--compare", "chunk_len=4096"],
            "chunk_len=4096 would never be at work: a chunk holds a whole prompt",
        ),
        (["--compare", "chunk_len=many"], "'chunk_len=many' is nothing that can be compared"),
        (["--lengths", "4k"], "--lengths is '4k'"),
        (["--depths", "0"], "--depths is 0"),
        (["--tasks", "nope"], "no task 'nope'"),
        (["--languages", "fr"], "no language 'fr'"),
        (["--tasks", "single,single"], "--tasks names single twice"),
        (["--lengths", "300,0300"], "--lengths names 300 twice"),
        (["--languages", "en,zh, en"], "--languages names en twice"),
        (["--density", "-1"], "--density is -1, which is not in [0, 50]"),
        (["--density", "nan"], "--density is nan, which is not in [0, 50]"),
        (["--compare", "kv=fp8,device=cude"], "device 'cude' is not known"),
        (["--tasks", "all", "--haystack", str(ASSETS)], "takes no haystack"),
    ):
        assert main.run(["verify", "recall", model, *args]) == 2
        err = capfd.readouterr().err
        assert message in err
        assert "planned" not in err
    chunks = ["--lengths", "4096,4097", "--compare", "chunk_len=4096"]
    assert main.run(["verify", "recall", "no-such-model", "--offline", *against, *chunks]) == 2
    assert "no folder or file 'no-such-model'" in capfd.readouterr().err
    stray = [
        "--html",
        "x.html",
        "--lengths",
        "512",
        "--n",
        "5",
    ]  # 5 is the default, and was given all the same
    assert main.run(["verify", "ladder", model, *stray]) == 2
    assert "A ladder takes no --html, --lengths, --n." in capfd.readouterr().err


RECALL = [
    "--lengths",
    "256",
    "--depths",
    "1",
    "--n",
    "2",
    "--tasks",
    "multi_key",
    "--dtype",
    "fp32",
    "--offline",
]


@pytest.fixture
def command(monkeypatch, capfd):
    """Runs verify recall on an open session whose answers are right, and gives the exit code and what was printed.

    loaded: the settings of each model that would have been loaded.
    """
    loaded = []
    blank = {"finish": "stop", "share": 1.0, "unfinished": False, "expected": ["1"], "answer": "1"}

    def ask(self: Asker, sample, *_):
        own = {name: getattr(sample, name) for name in ("task", "language", "length", "depth", "seed")}
        return blank | own | {"right": True}

    def open_session(model, config, *_, **__):
        loaded.append(config)
        return asker("recall-dense").session

    monkeypatch.setattr(Asker, "ask", ask)
    monkeypatch.setattr(asking, "open_session", open_session)

    def run(*args, model=ASSETS / "recall-dense"):
        code = main.run(["verify", "recall", str(model), *RECALL, *map(str, args)])
        return code, *capfd.readouterr()

    run.loaded = loaded
    return run


def test_a_report_says_what_answered(command, tmp_path):
    """A report is not gone on with by another model of the same name, template, thought or text, all before loading."""
    report, first, second = tmp_path / "r.json", tmp_path / "1/model", tmp_path / "2/model"
    shutil.copytree(ASSETS / "recall-dense", first)
    shutil.copytree(first, second)
    with (second / "model.safetensors").open("r+b") as stream:
        stream.seek(-1000, os.SEEK_END)
        stream.write(bytes(1000))
    template = tmp_path / "own.jinja"
    template.write_text((ASSETS / "recall-dense/chat_template.jinja").read_text() + "{# the same #}")
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        end = "cold" if name == "three" else "warm"
        (tmp_path / name / "a.txt").write_text(f"The hut stood by the road. It was {end}. " * 9)
    hay = ["--haystack", tmp_path / "one"]
    assert command("--report", report, *hay, model=first)[0] == 0
    for args, model, said in (
        (hay, second, "is a report with model files '"),
        (hay, ASSETS / "recall-hybrid", "is a report with model files '"),
        ([*hay, "--chat-template", template], first, "is a report with chat template '"),
        ([*hay, "--density", "2"], first, "is a report with density None, and this run has 2.0"),
        ([*hay, "--exact"], first, "is a report with exact False, and this run has True"),
        ([*hay, "--kv", "fp8"], first, "is a report with kv '"),
        (["--haystack", tmp_path / "three"], first, "is a report with haystack '"),
        ([], first, "and this run has None. Name another file for --report, or run with what"),
    ):
        before = len(command.loaded)
        code, _, err = command("--report", report, *args, model=model)
        assert (code, len(command.loaded)) == (2, before) and said in " ".join(err.split()), err
    for args, model in (
        (["--haystack", tmp_path / "two"], first),
        ([*hay, "--seed", "1"], shutil.copytree(first, tmp_path / "renamed")),
    ):
        assert command("--report", report, *args, model=model)[0] == 0
    assert len(read_report(report)["records"]) == 3


def test_thinking_is_a_setting_of_a_report(tmp_path):
    source = (ASSETS / "recall-dense/chat_template.jinja").read_text()
    source += "{% if enable_thinking | default(true) %}<think>{% else %}<think></think>{% endif %}"
    facts, tokenizer = read_model(ASSETS / "recall-dense"), asker("recall-dense").tokenizer
    found = []
    for think in (None, Think.ON, Think.OFF):
        sampler = Sampler(tokenizer, ChatTemplate(source), think)
        found.append(settings_of(facts, sampler, EngineConfig(), Grid())["thinking"])
        assert sampler.room == 512 + 4096 * (think is not Think.OFF)
    assert found == [None, {"enable_thinking": True}, {"enable_thinking": False}]


def test_room_for_thoughts_is_asked_for_or_said_to_be_missing(command, tmp_path):
    thinks = tmp_path / "thinks.jinja"
    source = (ASSETS / "recall-dense/chat_template.jinja").read_text()
    thinks.write_text(source + "{{ '<think>' }}{# </think> #}")
    args = ["--chat-template", thinks, "--lengths", "300,900"]
    command(*args)
    assert [config.context for config in command.loaded] == [900 + 4096 + 512]
    code, _, err = command(*args, "--context", "5000")
    assert (code, len(command.loaded)) == (3, 1)
    assert "900 tokens, 4,096 for thoughts and 512 for the answer are more than the window of 5,000" in err
    assert "or --think off" in err


def test_unfinished_answers_stand_in_the_table(command, monkeypatch):
    ask = Asker.ask
    cut = {"right": False, "unfinished": True}
    monkeypatch.setattr(Asker, "ask", lambda *args: ask(*args) | (cut if args[1].seed else {}))
    code, out, _ = command("--tasks", "multi_key, single")
    title, *rows = out.splitlines()
    assert code == 0 and title.split()[6] == "unfinished"
    assert [row.split()[0:7] for row in rows] == [
        [task, "en", "256", "1", "2", "50.0%", "1"] for task in ("multi_key", "single")
    ]


def test_files_of_others_stay(command, tmp_path):
    foreign, report, page = tmp_path / "foreign.txt", tmp_path / "r.json", tmp_path / "p.html"
    foreign.write_text("<p>mine")
    assert command("--html", foreign)[:2] == (4, "") and foreign.read_text() == "<p>mine"
    for one, two in (("--report", "--html"), ("--html", "--against"), ("--report", "--against")):
        code, _, err = command(one, page, two, tmp_path / "x" / ".." / "p.html")
        assert code == 2 and f"{one} and {two} are one file" in err
    assert not command.loaded and not page.exists()
    partial = tmp_path / "r.json.partial"
    partial.write_text("mine")
    for _ in range(2):  # the second time over what the first has written
        assert command("--report", report, "--html", page)[0] == 0
    assert partial.read_text() == "mine"
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "foreign.txt",
        "p.html",
        "r.json",
        "r.json.partial",
    ]


@pytest.mark.parametrize("there", [True, False])
def test_links_are_written_through(command, tmp_path, there):
    (tmp_path / "far").mkdir()
    links = [tmp_path / "r.json", tmp_path / "p.html"]
    for link in links:
        link.symlink_to(tmp_path / "far" / link.name)
    args = ["--report", links[0], "--html", links[1]]
    if there:
        assert command(*args, "--seed", "7")[0] == 0
    assert command(*args)[0] == 0
    assert all(link.is_symlink() and not (tmp_path / "far" / link.name).is_symlink() for link in links)
    assert len(read_report(tmp_path / "far/r.json")["records"]) == 2 + 2 * there
    assert "2 questions" in (tmp_path / "far/p.html").read_text()


def test_one_run_writes_a_report(command, tmp_path):
    """While one has it another is refused, however often the first has saved; one that was killed has it no more."""
    report = tmp_path / "r.json"
    code = (
        "import sys, time; from pathlib import Path; from packhorse.verify.recall import Report\n"
        "report = Report(Path(sys.argv[1]), {})\nreport.save()\nprint('has it', flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(report)], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"has it\n"
        got, _, err = command("--report", report)
        other.send_signal(signal.SIGKILL)
    assert (got, command.loaded) == (2, []) and f"Another run is writing {report}" in err
    assert command("--report", report)[0] == 0
    os.chmod(report, 0o640)
    with closing(Report(report, {})) as first:
        for _ in range(2):
            with pytest.raises(UsageError, match="Another run is writing"):
                Report(report, {})
            first.save()
    assert report.stat().st_mode & 0o777 == 0o640
    assert len(read_report(report)["records"]) == 2
    Report(tmp_path / "new.json", {}).close()
    assert not (tmp_path / "new.json").exists()


def test_a_folder_that_may_not_be_written_is_refused_first(command, tmp_path, monkeypatch):
    """As another user than root has it: the report can be opened, and none can be put in its place."""
    report = tmp_path / "r.json"
    assert command("--report", report)[0] == 0

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    code, out, err = command("--report", report)
    assert (code, out, len(command.loaded)) == (
        2,
        "",
        1,
    ) and f"{tmp_path} cannot be written: Permission" in err


def test_only_reports_are_read(command, tmp_path, monkeypatch):
    assert "is a folder" in command("--report", tmp_path)[2]
    for option in ("--report", "--against"):
        for file in ("/dev/full", "/dev/zero"):
            code, _, err = command(option, file)
            assert code == 4 and f"{file} is no file of at most 1" in err
    report = tmp_path / "r.json"
    with closing(Report(report, {"density": None, "haystack": None})) as made:
        made.features = {"reuse": [record("multi_key", 0, True, kl=[0.0], same=[True], active=1)]}
        made.add(record("multi_key", 0, True))
        made.save()
    good = json.loads(report.read_text())

    def refused(document) -> str:
        report.write_text(json.dumps(document))
        code, out, err = command("--against", report)
        assert (code, out) == (4, "") and "Traceback" not in err
        return err

    for name in good["records"][0]:
        for bad in ({}, {name: {}}):
            one = {k: v for k, v in good["records"][0].items() if k != name} | bad
            assert f"record 0 has no '{name}' as it should" in refused(good | {"records": [one]})
    for name in ("kl", "same", "active", "right"):
        one = {k: v for k, v in good["features"]["reuse"][0].items() if k != name}
        assert f"record 0 has no '{name}'" in refused(good | {"features": {"reuse": [one]}})
    assert "is a report of version 1, and only version 2 says what answered" in refused(good | {"version": 1})
    for damaged in ([], {}, good | {"records": 3}, good | {"records": ["x"]}, good | {"settings": 1}):
        assert "is no recall report" in refused(damaged)
    report.write_text("[" * 100_000)
    assert command("--against", report)[0] == 4
    monkeypatch.setattr(recall, "MAX_REPORT_BYTES", 10)
    assert "is no file of at most 10" in refused(good)


def test_what_cannot_be_built_is_said_before_loading(command):
    for args, code, said in (
        (
            ["--tasks", "all", "--haystack", ASSETS.parent / "docs"],
            2,
            "'kv_json' makes its own document and takes",
        ),
        (["--languages", "zh", "--density", "50", "--lengths", "600,32768"], 3, "document needs more"),
        (
            ["--tasks", "multi_key,kv_json", "--lengths", "32,600"],
            3,
            "tokens without any filler, and 32 were",
        ),
    ):
        got, out, err = command(*args)
        assert (got, out, command.loaded) == (code, "", []) and said in " ".join(err.split()), err


def test_a_run_that_fails_in_the_middle_shows_what_was_asked(command, monkeypatch, tmp_path):
    ask, page, report = Asker.ask, tmp_path / "p.html", tmp_path / "r.json"

    def fails(*args):
        if args[1].seed == 3:
            raise PackhorseError("The card is gone.", hint="Look for it.")
        return ask(*args)

    monkeypatch.setattr(Asker, "ask", fails)
    code, out, err = command("--n", "5", "--html", page, "--report", report)
    assert code == 1 and "The card is gone" in err
    assert out.splitlines()[1].split()[:6] == ["multi_key", "en", "256", "3", "3", "100.0%"]
    assert "3 questions" in page.read_text() and len(read_report(report)["records"]) == 3
    error = json.loads(command("--n", "5", "--json")[1])["error"]
    assert error["reason"] == "The card is gone." and error["summary"][0]["right"] == 3
