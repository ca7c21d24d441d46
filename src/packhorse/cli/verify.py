"""packhorse verify: does a model, as this engine runs it, find what it has read, and a store what a disk does to it?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packhorse.cli import asking, common
from packhorse.cli.common import (
    CacheOption,
    JsonOption,
    ModelArgument,
    OfflineOption,
    note,
    option,
    print_json,
)
from packhorse.core.config import EngineConfig
from packhorse.core.errors import UsageError
from packhorse.core.units import format_bytes
from packhorse.verify.tasks import read_haystack

if TYPE_CHECKING:
    from packhorse.verify.compare import Feature
    from packhorse.verify.recall import Asker, Comparison, Grid


class What(StrEnum):
    """What is verified."""

    RECALL = "recall"
    LADDER = "ladder"
    STORE = "store"


WhatArgument = Annotated[
    What,
    typer.Argument(
        help="recall: facts found, over lengths and depths. ladder: length, memory, first token, speed and "
        "recall up to the window. store: what a store makes of a disk's faults and of crashes, in a folder of its own "
        "below DIR, which stands in MODEL's place."
    ),
]
TasksOption = Annotated[str, option("--tasks", "NAMES", "Tasks by commas, or all.")]
LengthsOption = Annotated[str, option("--lengths", "N,N", "Tokens of the prompts.")]
DepthsOption = Annotated[int, option("--depths", "N", "How many depths, from the text's start to its end.")]
SamplesOption = Annotated[int, option("--n", "N", "Samples of each task, length and depth.")]
LanguagesOption = Annotated[str, option("--languages", "NAMES", "en, zh or both by commas.")]
DensityOption = Annotated[
    float | None, option("--density", "X", "Distractors a thousand tokens. [default: what the task has]")
]
HaystackOption = Annotated[
    Path | None, option("--haystack", "DIR", "Hide facts in the .txt and .md files of a folder.")
]
SeedOption = Annotated[int, option("--seed", "N", "The first sample's seed.")]
ReportOption = Annotated[
    Path | None, option("--report", "FILE", "Write every answer as JSON; a cut run goes on from it.")
]
HtmlOption = Annotated[Path | None, option("--html", "FILE", "Write heat maps as one HTML file.")]
AgainstOption = Annotated[
    Path | None, option("--against", "FILE", "Compare in pairs with an earlier report (McNemar).")
]
CompareOption = Annotated[
    list[str] | None,
    option(
        "--compare",
        "FIELD=VALUE",
        "Run each sample with this too, and compare token by token: kv=fp8, dtype=bf16, device=cuda, "
        "exact=false, chunk_len=N, page_len=N, several by commas, or reuse. May be repeated.",
    ),
]


ONLY_RECALL = {
    "tasks", "lengths", "depths", "n", "languages", "seed", "report", "html", "against", "compare",
}  # fmt: skip
"""Parameters that a ladder has no use for."""


def command(
    ctx: typer.Context,
    what: WhatArgument,
    model: ModelArgument,
    tasks: TasksOption = "single,multi_key",
    lengths: LengthsOption = "4096",
    depths: DepthsOption = 5,
    n: SamplesOption = 5,
    languages: LanguagesOption = "en",
    density: DensityOption = None,
    haystack: HaystackOption = None,
    seed: SeedOption = 0,
    report: ReportOption = None,
    html: HtmlOption = None,
    against: AgainstOption = None,
    compare: CompareOption = None,
    think: asking.ThinkOption = None,
    context: asking.ContextOption = None,
    threads: asking.ThreadsOption = None,
    dtype: asking.DtypeOption = EngineConfig.dtype,
    kv: asking.KvOption = EngineConfig.kv,
    weights: asking.WeightsOption = EngineConfig.weights,
    device: asking.DeviceOption = EngineConfig.device,
    as_arch: asking.AsArchOption = None,
    exact: asking.ExactOption = False,
    chat_template: asking.ChatTemplateOption = None,
    json: JsonOption = False,
    cache: CacheOption = None,
    offline: OfflineOption = False,
) -> None:
    """What is wrong with options is said before the model is loaded."""
    if what is What.STORE:
        if stray := common.given_names(ctx) - {"what", "model", "json"}:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(stray))
            raise UsageError(f"A store's verification takes no {names}.", hint=f"Leave out {names}.")
        run_store(Path(model), json)
        return
    from packhorse.verify.compare import Feature, check_differs, parse_changes  # imports torch
    from packhorse.verify.recall import ANSWER_ROOM, Asker, check_shared, read_report

    grid = make_grid(tasks, lengths, depths, n, languages, density, seed)
    sentences = None if haystack is None else read_haystack(haystack)
    if what is What.LADDER and (stray := ONLY_RECALL & common.given_names(ctx)):
        names = ", ".join(f"--{name}" for name in sorted(stray))
        raise UsageError(f"A ladder takes no {names}.", hint=f"Leave out {names}, or verify recall.")
    common.check_file(report)
    common.check_file(html)
    if report is not None and report.exists():
        read_report(report)
    if earlier := None if against is None else read_report(against):
        check_shared(earlier, grid, haystack)
    if context is None and what is What.RECALL:
        context = max(grid.lengths) + ANSWER_ROOM
    config = EngineConfig(
        context=context, sequences=1, dtype=dtype, kv=kv, weights=weights, device=device, as_arch=as_arch,
        exact=exact, threads=threads,
    )  # fmt: skip
    changes = {name: parse_changes(name, max(grid.lengths)) for name in compare or ()}
    configs = {name: replace(config, **changed) for name, changed in changes.items()}

    def open_asker(config: EngineConfig) -> Asker:
        session = asking.open_session(
            model, config, note, cache=cache, offline=offline, chat_template=chat_template, think=think
        )
        return Asker(session, think, sentences, density)

    asker = open_asker(config)
    if what is What.LADDER:
        run_ladder(asker, json)
        return
    for name in changes:
        check_differs(name, changes[name], asker)
    features = [Feature(name, changes[name], open_asker(configs[name])) for name in configs]
    run_recall(asker, grid, haystack, report, html, earlier, features, json)


def make_grid(
    tasks: str, lengths: str, depths: int, n: int, languages: str, density: float | None, seed: int
) -> Grid:
    """The grid of the options. Raises UsageError for numbers that are none and names that are not known."""
    from packhorse.verify.recall import Grid, even_depths
    from packhorse.verify.tasks import TASKS

    try:
        numbers = tuple(int(part.replace("_", "")) for part in lengths.split(","))
    except ValueError as error:
        raise UsageError(
            f"--lengths is {lengths!r}.", hint="Give token counts by commas, such as 4096,16384."
        ) from error
    if not 1 <= depths <= 100:
        raise UsageError(f"--depths is {depths}, which is not in [1, 100].", hint="5 or 10 are usual.")
    names = TASKS if tasks == "all" else tuple(tasks.split(","))
    return Grid(names, numbers, even_depths(depths), n, tuple(languages.split(",")), density, seed)


def run_recall(
    asker: Asker,
    grid: Grid,
    haystack: Path | None,
    report_file: Path | None,
    html: Path | None,
    earlier: dict[str, Any] | None,
    features: list[Feature],
    as_json: bool,
) -> None:
    """Ask the grid, then print the summary and write the files. Raises UsageError, after these, where a feature never
    was at work."""
    from packhorse.verify.compare import ask_pairs
    from packhorse.verify.recall import Report, compare, run_grid, settings_of, trial_key
    from packhorse.verify.report import render_html

    names = [feature.name for feature in features]
    report = Report(report_file, settings_of(asker.session, grid, haystack, names))
    for feature in features:
        feature.records = report.features.setdefault(feature.name, feature.records)
    asked = {trial_key(trial) for trial in grid.trials()}
    if report.records:
        have = sum(trial_key(record) in asked for record in report.records)
        rest = len(report.records) - have
        more = f", and {rest:,} to what is not asked now: they stay in it, unseen" if rest else ""
        note(f"{report_file} holds {have:,} of {len(asked):,} answers{more}.")
    try:
        run_grid(asker, grid, report, progress(), lambda sample: ask_pairs(asker, features, sample))
    except KeyboardInterrupt:
        if report_file is not None:
            note(f"\nThe same command goes on from what {report_file} holds.")
        raise
    report.records = [record for record in report.records if trial_key(record) in asked]
    document = report.document()
    comparison = None if earlier is None else compare(report.records, earlier["records"])
    rows, idle = [], None
    for feature in features:
        try:
            rows.append(feature.row(report.records))
        except UsageError as error:
            idle = error
    if idle is None or not as_json:  # else the error is the one document
        _print(document, comparison, rows, as_json)
    common.write_file(html, render_html(document, comparison, rows))
    if idle is not None:
        idle.facts["summary"] = document["summary"]
        raise idle


def _print(
    document: dict[str, Any], comparison: Comparison | None, rows: Sequence[Any], as_json: bool
) -> None:
    """The summary, the comparison with an earlier report, and the features."""
    if as_json:
        more: dict[str, Any] = {} if comparison is None else {"comparison": asdict(comparison)}
        more |= {"features": rows} if rows else {}
        print_json({k: v for k, v in document.items() if k != "records"} | more)
        return
    print(f"{'task':<18}{'language':<10}{'tokens':>9}{'right':>8}{'of':>6}{'rate':>9}   95 % interval")
    for row in document["summary"]:
        print(
            f"{row['task']:<18}{row['language']:<10}{row['length']:>9,}{row['right']:>8}{row['n']:>6}"
            f"{row['rate']:>9.1%}   {row['low']:.1%} - {row['high']:.1%}"
        )
    if comparison is not None:
        print(
            f"against the earlier report: {comparison.pairs} pairs, {comparison.only_first} right here alone, "
            f"{comparison.only_second} there alone, McNemar p {comparison.p:.3g}"
        )
    for row in rows:
        print(
            f"{row['feature']}: right {row['right']} of {row['pairs']} and {row['reference_right']} without, McNemar "
            f"p {row['p']:.3g}; {row['tokens']:,} tokens, {row['same_token']:.2%} the same, KL mean "
            f"{row['kl_mean']:.2e}, max {row['kl_max']:.2e}; active {row['active']:,}"
        )


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
        print_json({"folder": str(folder), "passed": passed, "rows": rows})
    if not passed:
        raise typer.Exit(1)


def run_ladder(asker: Asker, as_json: bool) -> None:
    """Climb to the window and print a table."""
    from packhorse.verify.ladder import climb, rungs
    from packhorse.verify.recall import ANSWER_ROOM

    def show(row: dict[str, Any]) -> None:
        print(
            f"{row['length']:>9,}{format_bytes(row['peak_bytes']):>13}{row['first_token_s']:>13.2f} s"
            f"{row['tokens_per_s']:>9.1f}   {'found' if row['right'] else 'NOT FOUND'}"
        )

    lengths = rungs(asker.session.window)
    if len(lengths) == 1:
        note(f"Beside an answer's {ANSWER_ROOM} tokens the window holds one rung: more --context makes more.")
    if not as_json:
        print(f"{'tokens':>9}{'peak memory':>13}{'first token':>15}{'tok/s':>9}   fact")
    rows = climb(asker, lengths, on_row=None if as_json else show)
    if as_json:
        print_json({"model": asker.session.facts.name, "rows": rows})
