"""Recall over a grid of lengths and depths, measured by asking the engine and scoring its answers exactly.

grid -> trials (task, language, length, depth, seed) -> sample -> answer -> record -> report file

A report holds a record for each trial and is written as the run goes; a run with the same settings goes on
where the file ends. Figures come with 95 % Wilson intervals. Two reports over the same trials are compared in
pairs by McNemar's exact test.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packhorse.core.errors import CorruptFileError, DoesNotFitError, PackhorseError, UsageError
from packhorse.core.protocols import Steering
from packhorse.core.types import FinishReason
from packhorse.text.reasoning import Think, may_think, thinking_options
from packhorse.verify.tasks import LANGUAGES, TASKS, Chat, Sample, build, score

if TYPE_CHECKING:
    from packhorse.engine.session import Session

VERSION = 1
ANSWER_ROOM = 512
"""Tokens a grid leaves behind its longest prompt for the answer."""
THINK_TOKENS = 4096
"""Tokens a model that thinks may use before its answer."""
SAVE_SECONDS = 5.0
_TRIAL = ("task", "language", "length", "depth", "seed")
"""What makes a sample."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Grid:
    """What is measured. n: samples of each task, language, length and depth. depths: in [0, 1].

    Raises UsageError for values that mean nothing.
    """

    tasks: tuple[str, ...] = ("single", "multi_key")
    lengths: tuple[int, ...] = (4096,)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    n: int = 5
    languages: tuple[str, ...] = ("en",)
    density: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, values, known in (("task", self.tasks, TASKS), ("language", self.languages, LANGUAGES)):
            unknown = [v for v in values if v not in known]
            if unknown:
                raise UsageError(
                    f"There is no {name} {unknown[0]!r}.", hint=f"Choose from {', '.join(known)}."
                )
        if self.n < 1 or not self.lengths or min(self.lengths) < 1 or not self.depths or not self.tasks:
            raise UsageError(
                f"The grid has {len(self.tasks)} tasks, {len(self.lengths)} lengths, "
                f"{len(self.depths)} depths and {self.n} samples a cell.",
                hint="Each must be at least 1, and lengths are numbers of tokens.",
            )

    def trials(self) -> Iterator[dict[str, Any]]:
        """Settings of each sample, short prompts first."""
        seeds = range(self.seed, self.seed + self.n)
        for length in sorted(self.lengths):
            for trial in product(self.tasks, self.languages, (length,), self.depths, seeds):
                yield dict(zip(_TRIAL, trial, strict=True))

    @property
    def num_trials(self) -> int:
        """How many samples there are."""
        return len(self.tasks) * len(self.languages) * len(self.lengths) * len(self.depths) * self.n


def even_depths(count: int) -> tuple[float, ...]:
    """`count` depths from the start of the text to its end."""
    return (0.5,) if count == 1 else tuple(round(i / (count - 1), 4) for i in range(count))


def trial_key(record: Record) -> tuple[Any, ...]:
    """What makes two records ones of the same sample."""
    return tuple(record[name] for name in _TRIAL)


class Asker:
    """Builds samples for a session's tokenizer and template, and asks them."""

    def __init__(
        self,
        session: Session,
        think: Think | None = None,
        haystack: Sequence[str] | None = None,
        density: float | None = None,
    ) -> None:
        """Raises UsageError for a session without a chat template."""
        if session.template is None:
            raise UsageError("Recall needs a chat template.", hint="Give one with --chat-template FILE.")
        self.session = session
        self._template = session.template
        self._options = {} if think is None else thinking_options(session.template, think)
        self._haystack = haystack
        self._density = density
        tail = self._template.render([{"role": "user", "content": "?"}], **self._options)[-64:]
        self.thinks = may_think(tail, self._template)

    def encode(self, chat: Chat) -> list[int]:
        """Token ids of a chat, the opening of the answer included."""
        return self.session.tokenizer.encode(self._template.render(chat, **self._options), special=False)

    def sample(self, trial: dict[str, Any]) -> Sample:
        """The sample of a trial's settings."""
        settings = {k: trial[k] for k in ("length", "depth", "seed", "language")}
        return build(trial["task"], self.encode, density=self._density, haystack=self._haystack, **settings)

    def ask(self, sample: Sample, steering: Steering | None = None) -> Record:
        """Greedy answer and its score. unfinished: the tokens ran out before an answer came. read_steps: steps
        that read the prompt."""
        budget = sample.answer_len + (THINK_TOKENS if self.thinks else 0)
        budget = min(budget, self.session.window - sample.length)
        steps: list[int] = []
        answer = self.session.answer(
            sample.chat,
            on_progress=lambda read, _: steps.append(read),
            steering=steering,
            max_tokens=budget,
            temperature=0.0,
        )
        scored = score(sample, answer.text)
        return {
            **{name: getattr(sample, name) for name in _TRIAL},
            "right": scored.right,
            "share": round(scored.share, 4),
            "unfinished": answer.finish is FinishReason.LENGTH and not answer.text.strip(),
            "expected": list(sample.expected),
            "answer": answer.text.strip()[:400],
            "read_steps": len(steps),
            **answer.counts,
            **answer.timings,
        }


class Report:
    """Records of a run in a file, written whole and renamed, so that a cut run leaves a readable one.

    features: the records of each feature that is compared, by its name.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Reads what an earlier run with the same settings left at `path`.

        Raises UsageError where the file is of other settings, CorruptFileError where it is no report.
        """
        self.path = path
        self.settings = settings
        self.records: list[Record] = []
        self.features: dict[str, list[Record]] = {}
        self._saved = time.monotonic()
        if path is not None and path.exists():
            found = read_report(path)
            differ = [k for k in settings if found["settings"].get(k) != settings[k]]
            if differ:
                theirs = found["settings"].get(differ[0])
                raise UsageError(
                    f"{path} is a report with {differ[0]} {theirs!r}, and this run has "
                    f"{settings[differ[0]]!r}.",
                    hint="Name another file for --report, or delete that one.",
                )
            self.records, self.features = found["records"], found.get("features", {})

    def add(self, record: Record) -> None:
        """Keep a record, and write the file every few seconds."""
        self.records.append(record)
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the file now. Raises PackhorseError where it cannot be written."""
        self._saved = time.monotonic()
        if self.path is not None:
            partial = self.path.with_name(self.path.name + ".partial")
            text = json.dumps(self.document(), ensure_ascii=False, indent=1)
            try:
                partial.write_text(text, encoding="utf-8")
                os.replace(partial, self.path)
            except OSError as error:
                raise PackhorseError(
                    f"{self.path} cannot be written: {error.strerror or error}.",
                    hint="Check its folder and disk.",
                ) from error

    def document(self) -> dict[str, Any]:
        """Settings, summary and records."""
        return {
            "format": "packhorse-recall",
            "version": VERSION,
            "settings": self.settings,
            "summary": summarize(self.records),
            "records": self.records,
            **({"features": self.features} if self.features else {}),
        }


def read_report(path: Path) -> dict[str, Any]:
    """A report file. Raises CorruptFileError where it is none."""
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != "packhorse-recall" or found["version"] != VERSION:
            raise ValueError
        found["settings"] = dict(found["settings"])
        for record in found["records"]:
            trial_key(record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        other = f"is no recall report of version {VERSION}"
        why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else other
        raise CorruptFileError(f"{path} {why}.", hint="Name another file.") from error
    return dict(found)


def check_shared(earlier: dict[str, Any], grid: Grid, haystack: Path | None) -> None:
    """Raises UsageError where a report that was read holds no sample of the grid: nothing could be compared."""
    for name, ours in (("density", grid.density), ("haystack", None if haystack is None else str(haystack))):
        if (theirs := earlier["settings"].get(name)) != ours:
            reason = f"The earlier report has {name} {theirs!r}, and this run {ours!r}: they share no sample."
            raise UsageError(reason, hint=f"Run both with the same --{name}.")
    compare(({**trial, "right": False} for trial in grid.trials()), earlier["records"])


def run_grid(
    asker: Asker,
    grid: Grid,
    report: Report,
    on_trial: Callable[[int, int, Record], None] | None = None,
    ask: Callable[[Sample], Record] | None = None,
) -> None:
    """Ask every trial of the grid that the report does not hold. on_trial(done, all, record) after each.
    ask: in place of the asker's own.

    Raises DoesNotFitError before anything is asked where the longest prompt leaves no room in the window.
    """
    longest = max(grid.lengths)
    if longest + ANSWER_ROOM > asker.session.window:
        raise DoesNotFitError(
            f"A prompt of {longest:,} tokens and {ANSWER_ROOM} for the answer are more than the window of "
            f"{asker.session.window:,}.",
            asked=longest + ANSWER_ROOM,
            available=asker.session.window,
            unit="tokens",
            hint="Ask for shorter lengths, or give --context and the memory it needs.",
        )
    have = {trial_key(record) for record in report.records}
    done = 0
    try:
        for trial in grid.trials():
            done += 1
            if trial_key(trial) in have:
                continue
            record = (ask or asker.ask)(asker.sample(trial))
            report.add(record)
            if on_trial is not None:
                on_trial(done, grid.num_trials, record)
    finally:
        report.save()


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a rate, 95 % unless z says otherwise; (0, 1) where n is 0."""
    if n == 0:
        return 0.0, 1.0
    rate = right / n
    middle = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def rates(records: Iterable[Record], names: Sequence[str]) -> list[dict[str, Any]]:
    """Rate, interval and counts of each group of records that agree in `names`, in order of appearance."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[name] for name in names), []).append(record)
    rows = []
    for key, members in groups.items():
        right = sum(bool(r["right"]) for r in members)
        low, high = wilson(right, len(members))
        rows.append(
            {
                **dict(zip(names, key, strict=True)), "n": len(members), "right": right,
                "rate": round(right / len(members), 4), "low": round(low, 4), "high": round(high, 4),
                "share": round(sum(r["share"] for r in members) / len(members), 4),
                "unfinished": sum(bool(r["unfinished"]) for r in members),
            }
        )  # fmt: skip
    return rows


def summarize(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row for each task, language and length."""
    return rates(records, ("task", "language", "length"))


@dataclass(frozen=True)
class Comparison:
    """Two runs over the same trials.

    only_first, only_second: solved by one alone. p: of McNemar's exact test, two-sided; small where the runs
    truly differ.
    """

    pairs: int
    both: int
    only_first: int
    only_second: int
    p: float


def compare(first: Iterable[Record], second: Iterable[Record]) -> Comparison:
    """Paired comparison of the trials that both have. Raises UsageError where they share none."""
    others = {trial_key(r): bool(r["right"]) for r in second}
    pairs = [(bool(r["right"]), others[trial_key(r)]) for r in first if trial_key(r) in others]
    if not pairs:
        raise UsageError(
            "The two reports have no sample in common.",
            hint="Run both with the same tasks, languages, lengths, depths and seed.",
        )
    one = sum(a and not b for a, b in pairs)
    two = sum(b and not a for a, b in pairs)
    return Comparison(len(pairs), sum(a and b for a, b in pairs), one, two, mcnemar(one, two))


def mcnemar(one: int, two: int) -> float:
    """Two-sided p of McNemar's exact test from the numbers of pairs that differ either way."""
    total, least = one + two, min(one, two)
    tail = sum(math.comb(total, i) for i in range(least + 1)) / 2**total
    return min(1.0, 2 * tail)


def settings_of(
    session: Session, grid: Grid, haystack: Path | None, features: Sequence[str] = ()
) -> dict[str, Any]:
    """What a report says of a run: model, arithmetic and what its samples depend on."""
    fields = asdict(grid)
    model = session.engine.runner.model
    return {
        "model": session.facts.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "exact": model.exact,
        "density": fields["density"],
        "haystack": None if haystack is None else str(haystack),
        "kv": session.engine.store.geometry.codec.name,
        "compare": ", ".join(features) or None,
    }
