"""Runs of `bench offline` that were kept, and how two of them differ. No torch.

A history is a file of one document a line, the oldest first; a run's number is its line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from packhorse.core.errors import CorruptFileError, UsageError

FILE = "bench-offline.jsonl"
FIRST_TOKEN = "first token s"
MAX_PAIRS = 5
"""Pairs of runs alike that an error names, the last ones."""
SLACK = 0.01
"""What a range of a run's fifths is widened by to each side: less than this is never called a difference."""
SLACK_ONCE = 0.03
"""The same for what was measured once, such as one long prompt."""


class Difference(NamedTuple):
    """One figure in two runs. where: cap, context and sequences. verdict: faster, slower or noise; "" where the
    figure has no range to judge by."""

    where: str
    figure: str
    before: float
    after: float
    verdict: str

    @property
    def change(self) -> float:
        """Of the first, 0.1 for a tenth more."""
        return self.after / self.before - 1 if self.before else 0.0


def append(folder: Path, document: dict[str, Any]) -> int:
    """Keep a run; its number."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    before = path.read_text() if path.is_file() else ""  # as it is: a damaged line must not cost the new one
    with path.open("a") as file:
        file.write("\n" * (before[-1:] not in ("", "\n")) + json.dumps(document, default=str) + "\n")
    return len(before.splitlines()) + 1


def runs(folder: Path) -> list[dict[str, Any]]:
    """All runs that were kept. Raises CorruptFileError for a line that is none."""
    file = folder / FILE
    lines = file.read_text().splitlines() if file.is_file() else []
    return [_parse(line, f"{file}, line {number}") for number, line in enumerate(lines, 1)]


def _parse(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
        if {"version", "model", "settings", "loads"} <= document.keys():
            return dict(document)
    except (ValueError, AttributeError):
        pass
    raise CorruptFileError(f"{where} is no run of bench offline.", hint="Remove the line, or the file.")


def choose(folder: Path, first: str | None, second: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two runs by number or file; one that is not named is the one before the other of the same settings, and the
    last of all. Raises UsageError where there is no such run, which names the pairs that there are."""
    kept = runs(folder)
    if first is not None and second is not None:
        return _find(kept, first), _find(kept, second)
    after = _find(kept, first) if first is not None else (kept[-1] if kept else None)
    earlier = kept if after is None or after not in kept else kept[: len(kept) - 1 - kept[::-1].index(after)]
    before = next((run for run in reversed(earlier) if after is not None and same(run, after)), None)
    if after is None:
        hint = "Run bench offline twice, or name two files."
        raise UsageError(f"There is no run in {folder / FILE}.", hint=hint)
    if before is None:
        found = ", ".join(f"{one} and {other}" for one, other in _pairs(kept)[-MAX_PAIRS:])
        whose = f"before run {len(earlier) + 1} has its" if after in kept else f"has {first}'s"
        raise UsageError(
            f"No run {whose} model and settings, among {len(kept)} in {folder / FILE}.",
            hint=f"Alike are {found or 'none'}; any two can be named, by number or file.",
        )
    return before, after


def _pairs(kept: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Numbers of runs of the same settings, each with the last one before it."""
    pairs = []
    for after in range(len(kept)):
        before = [number for number in range(after) if same(kept[number], kept[after])]
        pairs += [(before[-1] + 1, after + 1)] if before else []
    return pairs


def _find(kept: list[dict[str, Any]], name: str) -> dict[str, Any]:
    if name.isdecimal() and 1 <= int(name) <= len(kept):
        return kept[int(name) - 1]
    if not Path(name).is_file():
        raise UsageError(f"There is no run and no file {name!r}.", hint=f"Runs are 1 to {len(kept)}.")
    return _parse(Path(name).read_bytes(), name)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs measured the same model with the same settings."""
    return bool(one["model"]["name"] == other["model"]["name"] and one["settings"] == other["settings"])


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[Difference]:
    """Figures that both runs have. Speeds differ where their ranges (of fifths of the steps, of several prompts,
    or of several further questions) do not meet; else the difference is noise."""
    old = dict(_figures(before))
    return [
        Difference(*key, old[key][0], value, _verdict(old[key], (value, spread), key[1] == FIRST_TOKEN))
        for key, (value, spread) in _figures(after)
        if key in old
    ]


_Figure = tuple[float, tuple[float, float] | None]


def _figures(run: dict[str, Any]) -> Iterator[tuple[tuple[str, str], _Figure]]:
    """((where, figure), (value, range)) of all that is compared."""
    for load in run["loads"]:
        cap = "" if load["vram"] is None else f"cap {load['vram']}, "
        yield (f"{cap}loaded", "seconds"), (load["load_s"], None)
        if load["memory"]["used_bytes"]:
            yield (f"{cap}loaded", "used bytes"), (load["memory"]["used_bytes"], None)
        for row in load["prefill"]:
            yield (
                (f"{cap}{row['context']:,} tokens", "prefill tok/s"),
                (row["tok_s"], tuple(row["range_tok_s"])),
            )
        for row in load["tails"]:
            seconds = row["seconds"]
            where = f"{cap}{row['context']:,} tokens + {row['tail']:,}"
            yield (where, FIRST_TOKEN), (median(seconds), (min(seconds), max(seconds)))
        if load["beside"] is not None:
            where = f"{cap}{load['beside']['context']:,} tokens beside"
            yield (where, "longest gap s"), (load["beside"]["gap_s"]["max"], None)
        for row in load["decode"]:
            where = f"{cap}{row['context']:,} tokens x {row['sequences']}"
            yield (where, "decode tok/s"), (row["tok_s"], tuple(row["range_tok_s"]))
            yield (where, "p99 ms"), (1e3 * row["step_s"]["p99"], None)
            if row["experts"]:
                yield (where, "hit rate"), (row["experts"]["hit_rate"], None)


def _verdict(before: _Figure, after: _Figure, less: bool) -> str:
    """less: the smaller figure is the faster one."""
    if before[1] is None or after[1] is None:
        return ""
    (low_a, high_a), (low_b, high_b) = (_widened(spread) for spread in (before[1], after[1]))
    if low_b <= high_a and low_a <= high_b:
        return "noise"
    return "faster" if (low_b > high_a) != less else "slower"


def _widened(spread: tuple[float, float]) -> tuple[float, float]:
    slack = SLACK_ONCE if spread[0] == spread[1] else SLACK
    return spread[0] * (1 - slack), spread[1] * (1 + slack)
