"""Recall through the engine on the shipped models, features in pairs, and the report around it."""

import colorsys
import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

from packhorse.cli import demo_facts, main
from packhorse.core.config import EngineConfig
from packhorse.core.errors import CorruptFileError, DoesNotFitError, PackhorseError, UsageError
from packhorse.core.types import FinishReason, Usage
from packhorse.engine.session import Answer, Session
from packhorse.facts.read import read_model
from packhorse.verify.compare import Feature, Recorder, ask_pairs, parse_changes
from packhorse.verify.ladder import climb, rungs
from packhorse.verify.recall import (
    THINK_TOKENS,
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
        (False, False),
    ]
    assert room == [sample.answer_len + THINK_TOKENS] * 3
    (row,) = summarize(found)
    assert (row["right"], row["n"], row["unfinished"]) == (1, 3, 1)


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
    report = Report(tmp_path / "gone" / "x.json", {})
    with pytest.raises(PackhorseError, match="cannot be written: No such file"):
        report.save()


def test_report_resumes_where_it_was_cut(tmp_path, capfd):
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
    assert main.run(["verify", "ladder", "--context", "1536", *model]) == 0
    printed = capfd.readouterr()
    title, row = printed.out.splitlines()
    assert "Beside an answer's 512 tokens the window holds one rung" in printed.err
    assert main.run(["verify", "ladder", "--context", "500", *model]) == 2
    printed = capfd.readouterr()
    assert not printed.out and "window has 500 tokens" in printed.err
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
    against = ["--depths", "1", "--against", str(earlier.path)]
    for args, message in (
        ([*against, "--seed", "1"], "no sample in common"),
        ([*against, "--density", "3"], "report has density None, and this run 3.0: they share no sample"),
        ([*against, "--haystack", str(ASSETS)], "report has haystack None, and this run"),
        (["--compare", "chunk_len=4096"], "chunk_len=4096 would never be at work: a chunk holds all"),
        (["--compare", "chunk_len=many"], "'chunk_len=many' is nothing that can be compared"),
        (["--lengths", "4k"], "--lengths is '4k'"),
        (["--depths", "0"], "--depths is 0"),
        (["--tasks", "nope"], "no task 'nope'"),
        (["--languages", "fr"], "no language 'fr'"),
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
