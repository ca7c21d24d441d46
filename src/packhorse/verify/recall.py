"""Recall over a grid of lengths and depths, measured by asking the engine and scoring its answers exactly.

grid -> trials (task, language, length, depth, seed) -> sample -> answer -> record -> report file

A report holds a record for each trial and is written as the run goes; a run with the same settings goes on
where the file ends. The settings say what answered: digests of the model's files, of the chat template and of the
haystack's text stand for these, so that another model of the same name is another one. Figures come with 95 %
Wilson intervals. Two reports over the same trials are compared in pairs by McNemar's exact test.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packhorse.core.config import EngineConfig
from packhorse.core.errors import CorruptFileError, DoesNotFitError, PackhorseError, UsageError
from packhorse.core.protocols import Steering
from packhorse.core.types import FinishReason
from packhorse.core.units import GIB, MIB, format_bytes
from packhorse.facts.fields import reading
from packhorse.facts.model import ModelFacts
from packhorse.text.reasoning import Think, may_think, thinking_options
from packhorse.text.template import ChatTemplate
from packhorse.text.tokenizer import Tokenizer
from packhorse.verify.tasks import LANGUAGES, TASKS, Chat, Sample, build, score

if TYPE_CHECKING:
    from packhorse.engine.session import Session

VERSION = 2
MAX_REPORT_BYTES = GIB
SAMPLED_BYTES = 64 * MIB
"""What of a model's weights goes into its digest, shared out evenly over the tensors."""
ANSWER_ROOM = 512
"""Tokens a grid leaves behind its longest prompt for the answer."""
THINK_TOKENS = 4096
"""Tokens a model that thinks may use before its answer."""
SAVE_SECONDS = 5.0
_TRIAL = ("task", "language", "length", "depth", "seed")
"""What makes a sample."""
_FIELDS: dict[str, Any] = {
    "task": str, "language": str, "length": int, "depth": (int, float), "seed": int, "right": bool,
    "share": (int, float), "unfinished": bool, "finish": str, "expected": list, "answer": str,
}  # fmt: skip
"""What a record holds at least; that of a feature holds _FEATURE_FIELDS too."""
_FEATURE_FIELDS = {"kl": list, "same": list, "active": int}
Record = dict[str, Any]


@dataclass(frozen=True)
class Grid:
    """What is measured. n: samples of each task, language, length and depth. depths: in [0, 1].

    Raises UsageError for values that mean nothing, and for one that is named twice: it is no second sample.
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
            if unknown := [v for v in values if v not in known]:
                raise UsageError(f"There is no {name} {unknown[0]!r}.", hint=f"Known: {', '.join(known)}.")
        for name in ("tasks", "languages", "lengths", "depths"):
            if twice := [v for v in getattr(self, name) if getattr(self, name).count(v) > 1]:
                raise UsageError(f"--{name} names {twice[0]} twice.", hint="Name each once.")
        if self.density is not None and not 0 <= self.density <= 50:
            reason = f"--density is {self.density:g}, which is not in [0, 50] distractors a thousand tokens."
            raise UsageError(reason, hint="Give a number in that range.")
        if self.n < 1 or not self.lengths or min(self.lengths) < 1 or not self.depths or not self.tasks:
            counts = f"{len(self.tasks)} tasks, {len(self.lengths)} lengths, {len(self.depths)} depths"
            hint = "Each must be at least 1, and lengths are numbers of tokens."
            raise UsageError(f"The grid has {counts} and {self.n} samples a cell.", hint=hint)

    def trials(self) -> Iterator[dict[str, Any]]:
        """Settings of each sample, short prompts first."""
        seeds = range(self.seed, self.seed + self.n)
        for length in sorted(self.lengths):
            for trial in product(self.tasks, self.languages, (length,), self.depths, seeds):
                yield dict(zip(_TRIAL, trial, strict=True))


def even_depths(count: int) -> tuple[float, ...]:
    """`count` depths from the start of the text to its end."""
    return (0.5,) if count == 1 else tuple(round(i / (count - 1), 4) for i in range(count))


def trial_key(record: Record) -> tuple[Any, ...]:
    """What makes two records ones of the same sample."""
    return tuple(record[name] for name in _TRIAL)


class Sampler:
    """Builds samples for a tokenizer and a chat template; needs no weights. options: what the template is rendered
    with. thinks: whether a model may think before it answers. room: tokens that a prompt leaves behind it."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, think: Think | None = None,
        haystack: Sequence[str] | None = None, density: float | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer, self.template, self.haystack, self._density = tokenizer, template, haystack, density
        self.options = {} if think is None else thinking_options(template, think)
        tail = template.render([{"role": "user", "content": "?"}], **self.options)[-64:]
        self.thinks = may_think(tail, template)
        self.room = ANSWER_ROOM + (THINK_TOKENS if self.thinks else 0)

    def encode(self, chat: Chat) -> list[int]:
        """Token ids of a chat, the opening of the answer included."""
        return self.tokenizer.encode(self.template.render(chat, **self.options), special=False)

    def sample(self, trial: dict[str, Any]) -> Sample:
        """The sample of a trial's settings."""
        settings = {k: trial[k] for k in ("length", "depth", "seed", "language")}
        return build(trial["task"], self.encode, density=self._density, haystack=self.haystack, **settings)

    def check(self, grid: Grid, records: Iterable[Record], window: int) -> None:
        """Builds a sample of each task, language and length that the records lack, so that what cannot be built is
        said before a model is loaded. Raises what `check_room` and `build` raise."""
        check_room(self, grid, window)
        have = {trial_key(record) for record in records}
        missing = (trial for trial in grid.trials() if trial_key(trial) not in have)
        for trial in {trial_key(trial)[:3]: trial for trial in missing}.values():
            self.sample(trial)


def check_room(sampler: Sampler, grid: Grid, window: int) -> None:
    """Raises DoesNotFitError where the longest prompt leaves less than the sampler's room in the window."""
    asked = max(grid.lengths) + sampler.room
    if asked > window:
        room, off = (f", {THINK_TOKENS:,} for thoughts", ", or --think off") if sampler.thinks else ("", "")
        raise DoesNotFitError(
            f"A prompt of {max(grid.lengths):,} tokens{room} and {ANSWER_ROOM} for the answer are more than the window "
            f"of {window:,}.", asked=asked, available=window, unit="tokens",
            hint=f"Ask for shorter lengths, or a larger --context as far as the model's window goes{off}.",
        )  # fmt: skip


class Asker(Sampler):
    """Builds samples for a session's tokenizer and template, and asks them."""

    def __init__(
        self, session: Session, think: Think | None = None, haystack: Sequence[str] | None = None,
        density: float | None = None,
    ) -> None:  # fmt: skip
        """Raises UsageError for a session without a chat template."""
        if session.template is None:
            raise UsageError("Recall needs a chat template.", hint="Give one with --chat-template FILE.")
        super().__init__(session.tokenizer, session.template, think, haystack, density)
        self.session = session

    def ask(self, sample: Sample, steering: Steering | None = None) -> Record:
        """Greedy answer and its score. unfinished: the tokens ran out, or a model that may think never came to an
        answer. read_steps: steps that read the prompt."""
        steps: list[int] = []
        answer = self.session.answer(
            sample.chat, on_progress=lambda read, _: steps.append(read), steering=steering, temperature=0.0,
            max_tokens=sample.answer_len + (THINK_TOKENS if self.thinks else 0),
        )  # fmt: skip
        scored, text = score(sample, answer.text), answer.text.strip()
        return {
            **{name: getattr(sample, name) for name in _TRIAL}, "right": scored.right, "share": round(scored.share, 4),
            "finish": answer.finish.value, "expected": list(sample.expected), "answer": text[:400],
            "unfinished": answer.finish is FinishReason.LENGTH or (self.thinks and not text),
            "read_steps": len(steps), **answer.counts, **answer.timings,
        }  # fmt: skip


class Report:
    """Records of a run in a file, written whole and renamed, so that a cut run leaves a readable one.

    The file that stands at the path is locked until `close`, or until the process ends in whatever way. A link is
    followed. features: the records of each feature that is compared, by its name.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Reads what an earlier run with the same settings left at `path`. Settings that are known later: `settle`.

        Raises UsageError where the file is of other settings or another run writes it, CorruptFileError where it is
        no report, PackhorseError where it cannot be written.
        """
        self.path = path
        self.settings: dict[str, Any] = {}
        self.records: list[Record] = []
        self.features: dict[str, list[Record]] = {}
        self._saved, self._earlier, self._lock = time.monotonic(), dict[str, Any](), -1
        if path is not None:
            self._file = Path(os.path.realpath(path))
            self._new = not self._file.exists()
            with _writing(path):
                self._lock = _lock(self._file, path)
        try:
            if path is not None and self._file.stat().st_size:
                found = read_report(path)
                self.records, self.features = found["records"], found.get("features", {})
                self._earlier = found["settings"] if self.records else {}
            self.settle(settings)
        except BaseException:
            self.close()
            raise

    def settle(self, settings: dict[str, Any]) -> None:
        """Add settings. Raises UsageError where the records that were read are of another one; a model's name says
        nothing, its files do."""
        for name, ours in settings.items() if self._earlier else ():
            if name != "model" and (theirs := self._earlier.get(name)) != ours:
                reason = f"{self.path} is a report with {name.replace('_', ' ')} {theirs!r}, and this run has {ours!r}."
                hint = "Name another file for --report, or run with what that one was made with."
                raise UsageError(reason, hint=hint)
        self.settings |= settings

    def close(self) -> None:
        """Let others write the file. One that is new and empty goes away."""
        if self._lock >= 0:
            if self._new and not os.fstat(self._lock).st_size:
                self._file.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1

    def add(self, record: Record) -> None:
        """Keep a record, and write the file every few seconds."""
        self.records.append(record)
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the file now. Raises PackhorseError where it cannot be written."""
        self._saved = time.monotonic()
        if self.path is None or self._lock < 0:
            return
        text = json.dumps(self.document(), ensure_ascii=False, indent=1)
        with _writing(self.path):
            fd, name = tempfile.mkstemp(dir=self._file.parent, prefix=".packhorse-")
            try:
                os.fchmod(fd, os.fstat(self._lock).st_mode & 0o777)
                fcntl.flock(fd, fcntl.LOCK_EX)  # before it stands at the path: what stands there always is
                with open(fd, "w", encoding="utf-8", closefd=False) as stream:
                    stream.write(text)
                os.replace(name, self._file)
            except BaseException:
                os.close(fd)
                Path(name).unlink(missing_ok=True)
                raise
        before, self._lock = self._lock, fd
        os.close(before)

    def document(self) -> dict[str, Any]:
        """Settings, summary and records."""
        return {
            "format": "packhorse-recall", "version": VERSION, "settings": self.settings,
            "summary": summarize(self.records), "records": self.records,
            **({"features": self.features} if self.features else {}),
        }  # fmt: skip


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises PackhorseError in place of an OSError."""
    try:
        yield
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror or error}."
        raise PackhorseError(reason, hint="Check its folder and disk.") from error


def _lock(file: Path, shown: Path) -> int:
    """The file that stands at a path, made if there is none, open and locked. Raises UsageError where another run has
    it, OSError."""
    while True:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            hint = "Wait for it, or name another file for --report."
            raise UsageError(f"Another run is writing {shown}.", hint=hint) from error
        if file.exists() and os.path.samestat(os.fstat(fd), file.stat()):
            return fd
        os.close(fd)  # another was put in its place in between


def read_report(path: Path) -> dict[str, Any]:
    """A report file. Raises CorruptFileError where it is none, or is of another version."""
    why = f"is no recall report of version {VERSION}"
    try:
        size = path.stat().st_size
        if not path.is_file() or size > MAX_REPORT_BYTES:
            why = f"is no file of at most {format_bytes(MAX_REPORT_BYTES)}, as reports are"
            raise ValueError
        found = json.loads(path.read_bytes())
        if found["format"] == "packhorse-recall" and found["version"] != VERSION:
            why = f"is a report of version {found['version']}, and only version {VERSION} says what answered"
        if found["format"] != "packhorse-recall" or found["version"] != VERSION:
            raise ValueError
        found["settings"] = dict(found["settings"])
        features = found.get("features", {}).values()
        for records, more in ((found["records"], {}), *((records, _FEATURE_FIELDS) for records in features)):
            for number, record in enumerate(records):
                for name, kind in (_FIELDS | more).items():
                    if not isinstance(record.get(name), kind):
                        why = f"is damaged: record {number:,} has no {name!r} as it should"
                        raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else why
        raise CorruptFileError(f"{path} {why}.", hint="Name another file.") from error
    return dict(found)


def check_shared(earlier: dict[str, Any], grid: Grid, haystack: Sequence[str] | None) -> None:
    """Raises UsageError where a report that was read holds no sample of the grid: nothing could be compared."""
    for name, ours in (("density", grid.density), ("haystack", text_digest(haystack))):
        if (theirs := earlier["settings"].get(name)) != ours:
            reason = f"The earlier report has {name} {theirs!r}, and this run {ours!r}: they share no sample."
            raise UsageError(reason, hint=f"Run both with the same --{name}.")
    compare(({**trial, "right": False} for trial in grid.trials()), earlier["records"])


def run_grid(
    asker: Asker, grid: Grid, report: Report, on_trial: Callable[[int, int, Record], None] | None = None,
    ask: Callable[[Sample], Record] | None = None,
) -> None:  # fmt: skip
    """Ask every trial of the grid that the report does not hold. on_trial(done, all, record) after each.
    ask: in place of the asker's own.

    Raises DoesNotFitError before anything is asked where the longest prompt leaves no room in the window.
    """
    check_room(asker, grid, asker.session.window)
    have, trials = {trial_key(record) for record in report.records}, list(grid.trials())
    try:
        for done, trial in enumerate(trials, 1):
            if trial_key(trial) in have:
                continue
            record = (ask or asker.ask)(asker.sample(trial))
            report.add(record)
            if on_trial is not None:
                on_trial(done, len(trials), record)
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
        rows.append({
            **dict(zip(names, key, strict=True)), "n": len(members), "right": right,
            "rate": round(right / len(members), 4), "low": round(low, 4), "high": round(high, 4),
            "share": round(sum(r["share"] for r in members) / len(members), 4),
            "unfinished": sum(bool(r["unfinished"]) for r in members),
        })  # fmt: skip
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
        hint = "Run both with the same tasks, languages, lengths, depths and seed."
        raise UsageError("The two reports have no sample in common.", hint=hint)
    one = sum(a and not b for a, b in pairs)
    two = sum(b and not a for a, b in pairs)
    return Comparison(len(pairs), sum(a and b for a, b in pairs), one, two, mcnemar(one, two))


def mcnemar(one: int, two: int) -> float:
    """Two-sided p of McNemar's exact test from the numbers of pairs that differ either way."""
    total, least = one + two, min(one, two)
    tail = sum(math.comb(total, i) for i in range(least + 1)) / 2**total
    return min(1.0, 2 * tail)


def text_digest(texts: Iterable[str] | None) -> str | None:
    """A digest of texts, 16 hexadecimal digits; None of None."""
    return None if texts is None else blake2b("\0".join(texts).encode(), digest_size=8).hexdigest()


def model_digest(facts: ModelFacts) -> str:
    """A digest of a model's files, 16 hexadecimal digits, wherever they lie: settings and tokenizer whole, of the
    weights their layout and the middle of each tensor, SAMPLED_BYTES in all. Raises RefusedError where one cannot be
    read."""
    digest = blake2b(repr(sorted(facts.metadata.items())).encode(), digest_size=8)
    with reading(facts.path):
        own = sorted(facts.path.iterdir()) if facts.path.is_dir() else []
        for path in (path for path in own if path.suffix in (".json", ".model", ".txt")):
            digest.update(path.name.encode() + path.read_bytes())
        for tensor in sorted(facts.tensors.values(), key=lambda tensor: (tensor.file, tensor.offset)):
            digest.update(f"{tensor.name} {tensor.shape} {tensor.format.name}".encode())
            size = min(tensor.num_bytes, SAMPLED_BYTES // len(facts.tensors))
            with tensor.file.open("rb", buffering=0) as stream:
                stream.seek(tensor.offset + (tensor.num_bytes - size) // 2)
                digest.update(stream.read(size))
    return digest.hexdigest()


def settings_of(
    facts: ModelFacts, sampler: Sampler, config: EngineConfig, grid: Grid, features: Sequence[str] = ()
) -> dict[str, Any]:
    """What a report says of a run: what answers, and what its samples depend on; `dtype` and `kv` only where the
    config names them."""
    template = (sampler.template.source, repr(sorted(sampler.template.special_tokens.items())))
    return {
        "model": facts.name, "model_files": model_digest(facts), "chat_template": text_digest(template),
        "thinking": sampler.options or None, "haystack": text_digest(sampler.haystack), "density": grid.density,
        "exact": config.exact, "device": config.device.partition(":")[0], "weights": config.weights,
        "as_arch": config.as_arch, "compare": ", ".join(features) or None,
        **{name: getattr(config, name) for name in ("dtype", "kv") if getattr(config, name) != "auto"},
    }  # fmt: skip
