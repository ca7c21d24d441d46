"""Recall through the engine on the shipped models, and the report around it."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from packhorse.cli import main
from packhorse.core.config import EngineConfig
from packhorse.core.errors import CorruptFileError, DoesNotFitError, UsageError
from packhorse.engine.session import Session
from packhorse.verify.ladder import climb, rungs
from packhorse.verify.recall import (
    Asker,
    Grid,
    Report,
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
    return {"task": task, "seed": seed, "right": right, "expected": ["1"], "answer": "<1>"} | blank | changes


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


def test_report_resumes_where_it_was_cut(tmp_path):
    path = tmp_path / "report.json"
    ours = asker("recall-dense")
    grid = Grid(("multi_key",), (256, 512), (0.5,), n=2)
    settings = settings_of(ours.session, grid, None)
    seen = []

    def stop(done, total, record):
        seen.append(done)
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_grid(ours, grid, Report(path, settings), stop)
    assert len(read_report(path)["records"]) == 3
    report = Report(path, settings)
    run_grid(ours, grid, report, lambda done, total, record: seen.append((done, total)))
    assert seen == [1, 2, 3, (4, 4)]
    assert len(read_report(path)["records"]) == 4
    with pytest.raises(UsageError, match="dtype 'float32'"):
        Report(path, settings | {"dtype": "float16"})
    path.write_text("{}")
    with pytest.raises(CorruptFileError, match="no recall report"):
        Report(path, settings)


def test_prompts_beyond_the_window_are_refused_before_any_is_asked():
    with pytest.raises(DoesNotFitError, match=r"8,192 tokens and 512 .* window of 4,608"):
        run_grid(asker("recall-dense"), Grid(lengths=(256, 8192)), Report(None, {}))


def test_grids_that_mean_nothing_are_refused():
    with pytest.raises(UsageError, match="no task 'x'"):
        Grid(("x",))
    with pytest.raises(UsageError, match="0 samples a cell"):
        Grid(n=0)
    assert Grid(n=3, lengths=(256, 512)).num_trials == len(list(Grid(n=3, lengths=(256, 512)).trials())) == 60


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


def test_rungs_end_at_the_window():
    assert rungs(5000) == (1024, 2048, 4096, 4488)
    assert rungs(1536) == (1024,)
    assert rungs(300) == ()
    rows = climb(asker("recall-dense"), (300,))
    assert rows[0]["right"]
    assert rows[0]["peak_bytes"] > 50_000_000


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
    assert main.run([*args, "--report", str(report), "--against", str(report)]) == 0
    assert "2 pairs, 0 right here alone, 0 there alone, McNemar p 1" in capfd.readouterr().out


def test_command_refuses_before_it_loads(capfd):
    model = str(ASSETS / "recall-dense")
    for args, message in (
        (["--lengths", "4k"], "--lengths is '4k'"),
        (["--depths", "0"], "--depths is 0"),
        (["--tasks", "nope"], "no task 'nope'"),
        (["--languages", "fr"], "no language 'fr'"),
    ):
        assert main.run(["verify", "recall", model, *args]) == 2
        err = capfd.readouterr().err
        assert message in err
        assert "planned" not in err
    assert main.run(["verify", "ladder", model, "--html", "x.html"]) == 2
    assert "no report file" in capfd.readouterr().err
