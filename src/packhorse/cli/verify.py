"""packhorse verify: does a model, as this engine runs it, find what it has read, and a store what a disk does to it?"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packhorse.cli import asking, common
from packhorse.cli.common import CacheOption, JsonOption, ModelArgument, OfflineOption, note, option
from packhorse.core.config import EngineConfig
from packhorse.core.errors import PackhorseError, UsageError
from packhorse.core.units import format_bytes
from packhorse.facts.read import read_model
from packhorse.verify.tasks import read_haystack

if TYPE_CHECKING:
    from packhorse.verify.compare import Feature
    from packhorse.verify.recall import Asker, Grid, Report


class What(StrEnum):
    """What is verified."""

    RECALL = "recall"
    LADDER = "ladder"
    STORE = "store"


# fmt: off
WhatArgument = Annotated[What, typer.Argument(
    help="recall: facts found, over lengths and depths. ladder: length, memory, first token, speed and recall up to "
    "the window. store: what a store makes of a disk's faults and of crashes, in a folder of its own below DIR, which "
    "stands in MODEL's place."
)]
TasksOption = Annotated[str, option("--tasks", "NAMES", "Tasks by commas, or all.")]
LengthsOption = Annotated[str, option("--lengths", "N,N", "Tokens of the prompts.")]
DepthsOption = Annotated[int, option("--depths", "N", "How many depths, from the text's start to its end.")]
SamplesOption = Annotated[int, option("--n", "N", "Samples of each task, length and depth.")]
LanguagesOption = Annotated[str, option("--languages", "NAMES", "en, zh or both by commas.")]
DensityOption = Annotated[
    float | None, option("--density", "X", "Distractors a thousand tokens. [default: what the task has]")]
HaystackOption = Annotated[
    Path | None, option("--haystack", "DIR", "Hide facts in the .txt and .md files of a folder.")]
SeedOption = Annotated[int, option("--seed", "N", "The first sample's seed.")]
ReportOption = Annotated[
    Path | None, option("--report", "FILE", "Write every answer as JSON; a cut run goes on from it.")]
HtmlOption = Annotated[Path | None, option("--html", "FILE", "Write heat maps as one HTML file.")]
AgainstOption = Annotated[
    Path | None, option("--against", "FILE", "Compare in pairs with an earlier report (McNemar).")]
CompareOption = Annotated[list[str] | None, option(
    "--compare", "FIELD=VALUE",
    "Run each sample with this too, and compare token by token: kv=fp8, dtype=bf16, device=cuda, exact=false, "
    "chunk_len=N, page_len=N, several by commas, or reuse. May be repeated.",
)]

# fmt: on
ONLY_RECALL = {"tasks", "lengths", "depths", "n", "languages", "seed", "report", "html", "against", "compare"}
"""Parameters that a ladder has no use for."""


def command(
    ctx: typer.Context, what: WhatArgument, model: ModelArgument, tasks: TasksOption = "single,multi_key",
    lengths: LengthsOption = "4096", depths: DepthsOption = 5, n: SamplesOption = 5, languages: LanguagesOption = "en",
    density: DensityOption = None, haystack: HaystackOption = None, seed: SeedOption = 0, report: ReportOption = None,
    html: HtmlOption = None, against: AgainstOption = None, compare: CompareOption = None,
    think: asking.ThinkOption = None, context: asking.ContextOption = None, threads: asking.ThreadsOption = None,
    dtype: asking.DtypeOption = EngineConfig.dtype, kv: asking.KvOption = EngineConfig.kv,
    weights: asking.WeightsOption = EngineConfig.weights, device: asking.DeviceOption = EngineConfig.device,
    as_arch: asking.AsArchOption = None, exact: asking.ExactOption = False,
    chat_template: asking.ChatTemplateOption = None, json: JsonOption = False, cache: CacheOption = None,
    offline: OfflineOption = False,
) -> None:  # fmt: skip
    """What is wrong with options is said before the model is loaded."""
    if what is What.STORE:
        if stray := common.given_names(ctx) - {"what", "model", "json"}:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(stray))
            raise UsageError(f"A store's verification takes no {names}.", hint=f"Leave out {names}.")
        run_store(Path(model), json)
        return
    from packhorse.text.template import ChatTemplate
    from packhorse.text.tokenizer import Tokenizer
    from packhorse.verify.compare import Feature, check_differs, parse_changes, settings_in_use
    from packhorse.verify.recall import Asker, Report, Sampler, check_shared, settings_of  # imports torch

    grid = make_grid(tasks, lengths, depths, n, languages, density, seed)
    sentences = None if haystack is None else read_haystack(haystack)
    if what is What.LADDER and (stray := ONLY_RECALL & common.given_names(ctx)):
        names = ", ".join(f"--{name}" for name in sorted(stray))
        raise UsageError(f"A ladder takes no {names}.", hint=f"Leave out {names}, or verify recall.")
    if earlier := check_files(report, html, against):
        check_shared(earlier, grid, sentences)
    config = EngineConfig(
        context=context, sequences=1, dtype=dtype, kv=kv, weights=weights, device=device, as_arch=as_arch,
        exact=exact, threads=threads,
    )  # fmt: skip
    changes = {name: parse_changes(name, max(grid.lengths)) for name in compare or ()}

    def open_asker(changed: dict[str, Any]) -> Asker:
        session = asking.open_session(
            model, replace(config, **changed), note, cache=cache, offline=offline, chat_template=chat_template,
            think=think,
        )  # fmt: skip
        return Asker(session, think, sentences, density)

    if what is What.LADDER:
        run_ladder(open_asker({}), json)
        return
    for changed in changes.values():
        replace(config, **changed)  # raises where these do not go together
    facts = read_model(common.find_model(model, cache, offline))
    tokenizer = Tokenizer.load(facts)
    template = ChatTemplate.load(facts, tokenizer, chat_template)
    sampler = Sampler(tokenizer, template, think, sentences, density)
    config = replace(config, context=context or max(grid.lengths) + sampler.room)
    with closing(Report(report, settings_of(facts, sampler, config, grid, list(changes)))) as kept:
        sampler.check(grid, kept.records, min(facts.context, context or facts.context))
        asker = open_asker({})
        kept.settle({name: settings_in_use(asker)[name] for name in ("dtype", "kv")})
        for name in changes:
            check_differs(name, changes[name], asker)
        features = [Feature(name, changed, open_asker(changed)) for name, changed in changes.items()]
        run_recall(asker, grid, kept, html, earlier, features, json)


def check_files(report: Path | None, html: Path | None, against: Path | None) -> dict[str, Any] | None:
    """The earlier report, if there is one. Raises UsageError where a file cannot be written or is two at once,
    RefusedError where one is no report, or no page, of recall."""
    from packhorse.verify.recall import read_report
    from packhorse.verify.report import check_page

    names: dict[str, str] = {}
    for name, file in (("--report", report), ("--html", html), ("--against", against)):
        if file is not None and (other := names.setdefault(os.path.realpath(file), name)) != name:
            hint = "Name another for one of them."
            raise UsageError(f"{other} and {name} are one file, {file}.", hint=hint)
    if report and report.exists() and not report.is_dir() and (report.stat().st_size or not report.is_file()):
        read_report(report)
    if html is not None:
        check_page(html)
    common.check_file(report, replaced=True)
    common.check_file(html)
    return None if against is None else read_report(against)


def make_grid(
    tasks: str, lengths: str, depths: int, n: int, languages: str, density: float | None, seed: int
) -> Grid:  # fmt: skip
    """The grid of the options. Raises UsageError for numbers that are none and names that are not known."""
    from packhorse.verify.recall import Grid, even_depths
    from packhorse.verify.tasks import TASKS

    try:
        numbers = tuple(int(part.replace("_", "")) for part in lengths.split(","))
    except ValueError as error:
        hint = "Give token counts by commas, such as 4096,16384."
        raise UsageError(f"--lengths is {lengths!r}.", hint=hint) from error
    if not 1 <= depths <= 100:
        raise UsageError(f"--depths is {depths}, which is not in [1, 100].", hint="5 or 10 are usual.")
    names, spoken = (tuple(name.strip() for name in text.split(",")) for text in (tasks, languages))
    names = TASKS if names == ("all",) else names
    return Grid(names, numbers, even_depths(depths), n, spoken, density, seed)


def run_recall(
    asker: Asker, grid: Grid, report: Report, html: Path | None, earlier: dict[str, Any] | None,
    features: list[Feature], as_json: bool,
) -> None:  # fmt: skip
    """Ask the grid, then print the summary and write the files. Raises, after these, what ended the asking, or
    UsageError where a feature never was at work."""
    from packhorse.verify.compare import ask_pairs
    from packhorse.verify.recall import compare, run_grid, trial_key
    from packhorse.verify.report import render_html

    for feature in features:
        feature.records = report.features.setdefault(feature.name, feature.records)
    asked = {trial_key(trial) for trial in grid.trials()}
    if report.records:
        have = sum(trial_key(record) in asked for record in report.records)
        rest = len(report.records) - have
        more = f", and {rest:,} to what is not asked now: they stay in it, unseen" if rest else ""
        note(f"{report.path} holds {have:,} of {len(asked):,} answers{more}.")
    trouble: PackhorseError | None = None
    try:
        run_grid(asker, grid, report, progress(), lambda sample: ask_pairs(asker, features, sample))
    except KeyboardInterrupt:
        if report.path is not None and report.records:
            note(f"\nThe same command goes on from what {report.path} holds.")
        raise
    except PackhorseError as error:
        trouble = error
    report.records = [record for record in report.records if trial_key(record) in asked]
    if trouble is not None and not report.records:
        raise trouble
    document, rows = report.document(), []
    # Of a run that was cut it may be that no sample is one of the other report's.
    comparison = None if earlier is None or trouble else compare(report.records, earlier["records"])
    for feature in features:
        try:
            rows.append(feature.row(report.records))
        except UsageError as error:
            trouble = trouble or error
    shown = {k: v for k, v in document.items() if k not in ("records", "features")}
    shown |= ({} if comparison is None else {"comparison": asdict(comparison)}) | (
        {"features": rows} if rows else {}
    )
    if not as_json:
        _print(shown)
    elif trouble is None:  # else the error is the one document, and holds the figures
        common.print_json(shown)
    common.write_file(html, render_html(document, comparison, rows))
    if trouble is not None:
        trouble.facts |= {k: v for k, v in shown.items() if k in ("summary", "comparison", "features")}
        raise trouble


def _print(shown: dict[str, Any]) -> None:
    """The summary, the comparison with an earlier report, and the features."""
    print(
        f"{'task':<18}{'language':<10}{'tokens':>9}{'right':>8}{'of':>6}{'rate':>9}  unfinished   95 % interval"
    )
    for row in shown["summary"]:
        of = f"{row['task']:<18}{row['language']:<10}{row['length']:>9,}{row['right']:>8}{row['n']:>6}"
        print(f"{of}{row['rate']:>9.1%}{row['unfinished']:>12}   {row['low']:.1%} - {row['high']:.1%}")
    if found := shown.get("comparison"):
        alone = f"{found['only_first']} right here alone, {found['only_second']} there alone"
        print(f"against the earlier report: {found['pairs']} pairs, {alone}, McNemar p {found['p']:.3g}")
    for row in shown.get("features", ()):
        right = f"right {row['right']} of {row['pairs']} and {row['reference_right']} without, McNemar p {row['p']:.3g}"
        kl = f"KL mean {row['kl_mean']:.2e}, max {row['kl_max']:.2e}; active {row['active']:,}"
        print(f"{row['feature']}: {right}; {row['tokens']:,} tokens, {row['same_token']:.2%} the same, {kl}")


def progress() -> Callable[[int, int, dict[str, Any]], None]:
    """A line on standard error, rewritten on a terminal."""
    right = asked = 0

    def show(done: int, total: int, record: dict[str, Any]) -> None:
        nonlocal right, asked
        right, asked = right + record["right"], asked + 1
        text = f"{done:,}/{total:,}  {record['task']} {record['length']:,}  right {right}/{asked}"
        if sys.stderr.isatty():
            print(f"\r{text:<70}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif done == total or asked % 20 == 0:
            note(text)

    return show


def run_store(folder: Path, as_json: bool) -> None:
    """Inject faults and print a table. Ends with 1 where the store does anything else than it should."""
    from packhorse.verify.store import try_faults

    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder.", hint="Give one on the disk that is to hold a store.")
    rows = []
    for row in try_faults(folder):
        rows.append(row)
        if not as_json:
            verdict, wanted = ("ok", "") if row["passed"] else ("FAILED", f"   expected: {row['expected']}")
            print(f"{verdict:<8}{row['fault']:<26}{row['happened']}{wanted}", flush=True)
    passed = all(row["passed"] for row in rows)
    if as_json:
        common.print_json({"folder": str(folder), "passed": passed, "rows": rows})
    if not passed:
        raise typer.Exit(1)


def run_ladder(asker: Asker, as_json: bool) -> None:
    """Climb to the window and print a table."""
    from packhorse.verify.ladder import climb, rungs

    lengths, rows = rungs(asker.session.window, asker.room), list[dict[str, Any]]()
    if len(lengths) == 1:
        note(
            f"Beside {asker.room:,} tokens for an answer the window holds one rung: more --context makes more."
        )
    for row in climb(asker, lengths):
        if not rows and not as_json:
            print(f"{'tokens':>9}{'peak memory':>13}{'first token':>15}{'tok/s':>9}   fact")
        rows.append(row)
        if not as_json:
            verdict = "found" if row["right"] else "NOT FOUND" + ", unfinished" * row["unfinished"]
            size, speed = format_bytes(row["peak_bytes"]), row["tokens_per_s"]
            print(f"{row['length']:>9,}{size:>13}{row['first_token_s']:>13.2f} s{speed:>9.1f}   {verdict}")
    if as_json:
        common.print_json({"model": asker.session.facts.name, "rows": rows})
