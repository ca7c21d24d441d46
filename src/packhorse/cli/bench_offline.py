"""packhorse bench offline and bench compare: how fast a model runs here, and how two such runs differ."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated, Any

import platformdirs
import typer

from packhorse.bench import history
from packhorse.bench.origin import origin
from packhorse.bench.report import table
from packhorse.cli.common import check_file, check_folder, find_model, note, print_json, write_file, writing
from packhorse.core.config import EngineConfig
from packhorse.core.errors import UsageError
from packhorse.core.units import format_bytes, parse_bytes
from packhorse.facts.read import read_model


def _option(name: str, metavar: str | None, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=f"offline: {text}", show_default=False)


Contexts = Annotated[str, _option("--contexts", "N,N", "tokens held before decoding. [default: 4096]")]
Sequences = Annotated[str, _option("--sequences", "N,N", "at once. [default: 1]")]
Decode = Annotated[int, _option("--decode", "N", "steps that are timed. [default: 64]")]
Warmup = Annotated[int, _option("--warmup", "N", "steps before these. [default: 8]")]
Vram = Annotated[str | None, _option("--vram", "SIZE,SIZE", "caps on the card, each a load; none: no cap.")]
Kv = Annotated[str, _option("--kv", "CODEC", "how K and V are stored. [default: auto]")]
Dtype = Annotated[str, _option("--dtype", "TYPE", "what to compute in. [default: auto]")]
Weights = Annotated[str, _option("--weights", "HOW", "auto, packed or unpacked.")]
Device = Annotated[str, _option("--device", "NAME", "cpu, cuda or cuda:N. [default: cpu]")]
AsArch = Annotated[int | None, _option("--as-arch", "75", "treat the card as a Turing one.")]
Threads = Annotated[int | None, _option("--threads", "N", "CPU threads.")]
FillKv = Annotated[bool, _option("--fill-kv", None, "read no prompt: random K and V, states of zeros.")]
OwnTokens = Annotated[bool, _option("--own-tokens", None, "go on from what was drawn, not random tokens.")]
Tails = Annotated[str | None, _option("--tails", "N,N", "tokens of follow-ups, timed to the first token.")]
Beside = Annotated[bool, _option("--beside", None, "read the longest context beside an answer, too.")]
History = Annotated[Path | None, _option("--history", "DIR", "where runs are kept, for compare.")]


def numbers(text: str, name: str) -> tuple[int, ...]:
    """Whole numbers by commas. Raises UsageError for others."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{name} is {text!r}.", hint="Give whole numbers by commas.") from error


def run_offline(
    model: str | None, settings: dict[str, Any], config: dict[str, Any], folder: Path | None,
    report: Path | None, json: bool,
) -> None:  # fmt: skip
    """Measure, print, and keep the run in `folder`. settings: fields of Settings, lists as they were written."""
    if model is None:
        raise UsageError("bench offline takes a MODEL.", hint="See packhorse bench --help.")
    from packhorse.bench.offline import Settings, measure  # imports torch

    caps = [None if size == "none" else parse_bytes(size) for size in (settings["vram"] or "none").split(",")]
    lists = {name: numbers(settings[name], name) for name in ("contexts", "sequences")}
    lists["tails"] = numbers(settings["tails"], "tails") if settings["tails"] else ()
    wanted = Settings(**settings | lists | {"vram": tuple(caps)})
    check_file(report)
    check_folder(_folder(folder))
    facts = read_model(find_model(model, None, False))
    document = measure(facts, EngineConfig(**config), wanted, note) | origin(sys.argv)
    try:  # written first, for whoever reads the table may leave, and shown whatever becomes of that
        with writing(_folder(folder)):
            number = history.append(_folder(folder), document)
        write_file(report, jsonlib.dumps(document, indent=1, default=str) + "\n")
    finally:
        if json:
            print_json(document)
        else:
            print(table(document))
    note(f"kept as run {number} in {_folder(folder)}")


def run_compare(first: str | None, second: str | None, history_folder: Path | None, json: bool) -> None:
    """Print how two runs differ."""
    before, after = history.choose(_folder(history_folder), first, second)
    found = history.compare(before, after)
    if json:
        heads = [{name: run[name] for name in ("time", "commit", "settings")} for run in (before, after)]
        print_json({"runs": heads, "differences": [one._asdict() | {"change": one.change} for one in found]})
        return
    if not history.same(before, after):
        note("The runs differ in model or settings: only what both have is compared.")
    print(f"{before['time']} {before['commit']}  ->  {after['time']} {after['commit']}")
    for one in found:
        both = (one.before, one.after)
        old, new = (format_bytes(int(v)) if one.figure.endswith("bytes") else f"{v:.6g}" for v in both)
        print(f"{one.where:<40} {one.figure:<15} {old:>14} {new:>14} {one.change:>+8.1%}  {one.verdict}")


def _folder(given: Path | None) -> Path:
    return given or platformdirs.user_data_path("packhorse")
