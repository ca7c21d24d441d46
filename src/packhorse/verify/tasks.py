"""Recall tasks made from a seed: prompts of an exact number of tokens for any tokenizer, and their scoring.

seed -> maker (units, plant, distractors) -> as many units as fit -> padding -> exactly `length` tokens

Scoring. Every kind has a pattern that finds candidate answers in a text (numbers of so many digits, two-word
names, words of the list, ...). An answer is right when the set of candidates in it equals the set of expected
values: all of them, in any order, as often as it likes, and no other. `share` is the part of the expected
values that was named, 0 where another candidate was named too. Case counts as the text has it, and full-width
digits are read as plain ones. A model's thoughts are no part of its answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from packhorse.core.errors import DoesNotFitError, UsageError
from packhorse.verify.makers import MAKERS, Maker, Plant

TASKS = tuple(MAKERS)
LANGUAGES = ("en", "zh")
PADS = (" the", " and", " a", " so", " x", ".", " 1", "\n")
"""Texts of which one repeats at a token each with most tokenizers; they make lengths exact."""
PLAIN_DIGITS = {0xFF10 + digit: str(digit) for digit in range(10)}
ANSWER_MARGIN = 48
"""Tokens an answer may have beyond a right one, for another wording."""

Chat = list[dict[str, str]]
EncodeChat = Callable[[Chat], list[int]]
"""Token ids of a chat as the model gets it, with the opening of its answer."""


@dataclass(frozen=True)
class Sample:
    """One prompt and what a right answer holds.

    depth: where the (first) plant was wanted, 0 at the document's start and 1 at its end. token_ids: exactly
    `length`. answer_len: tokens a direct answer may have.
    """

    task: str
    language: str
    length: int
    depth: float
    seed: int
    chat: Chat
    token_ids: tuple[int, ...]
    question: str
    reply: str
    expected: tuple[str, ...]
    pattern: str
    answer_len: int


@dataclass(frozen=True)
class Score:
    """right: as the module says. share: part of the expected values that was named, 0 with a wrong one."""

    right: bool
    share: float


def score(sample: Sample, answer: str) -> Score:
    """How right an answer is; the rule stands at the head of this module."""
    found = set(re.findall(sample.pattern, answer.translate(PLAIN_DIGITS)))
    expected = set(sample.expected)
    share = 0.0 if found - expected else len(found & expected) / len(expected)
    return Score(found == expected, share)


def build(
    task: str,
    encode: EncodeChat,
    *,
    length: int,
    depth: float,
    seed: int,
    language: str = "en",
    density: float | None = None,
    haystack: Sequence[str] | None = None,
) -> Sample:
    """The sample of these settings: the same ones give the same sample, whatever was built before.

    encode: the model's own tokenizer and chat template. length: tokens of the whole prompt, template
    included. density: distractors of the same kind a thousand tokens; None takes the kind's own. haystack:
    sentences to hide things in instead of generated ones (`read_haystack`).

    Raises UsageError for settings that mean nothing, DoesNotFitError where the task needs more tokens.
    """
    (sample,) = build_together(
        task, encode, length=length, depths=(depth,), seed=seed, language=language, density=density, haystack=haystack
    )  # fmt: skip
    return sample


def build_together(
    task: str,
    encode: EncodeChat,
    *,
    length: int,
    depths: Sequence[float],
    seed: int,
    language: str = "en",
    density: float | None = None,
    haystack: Sequence[str] | None = None,
) -> list[Sample]:
    """Samples over one document that hides a target at each of `depths`; only the question and its padding differ.
    Otherwise as `build`."""
    for depth in depths:
        _check(task, language, depth, density, haystack)
    rng = Random(f"{task}/{language}/{length}/{'+'.join(f'{d:.6f}' for d in depths)}/{seed}")
    maker = MAKERS[task](rng, language)
    wanted = maker.density if density is None else density
    hidden = [hide(maker, maker.target(), depth) for depth in depths]
    for _ in range(min(round(wanted * length / 1000), maker.most_distractors)):
        hidden.append(hide(maker, maker.distractor(), rng.random()))
    document = _Document(maker, hidden, _filler(maker, haystack))
    units, plants = document.compose(_fit(document, encode, length, len(depths)))
    samples = []
    for depth, plant in zip(depths, plants, strict=False):
        chat, ids = _pad(maker, units, plant, encode, length)
        answer_len = len(encode([*chat[:-1], {"role": "user", "content": plant.reply}])) - len(
            encode([*chat[:-1], {"role": "user", "content": ""}])
        )
        samples.append(
            Sample(
                task, language, length, depth, seed, chat, tuple(ids), plant.question, plant.reply, plant.expected,
                plant.pattern, answer_len + ANSWER_MARGIN,
            )
        )  # fmt: skip
    return samples


def read_haystack(folder: Path) -> list[str]:
    """Sentences of the .txt and .md files of a folder, in the order of their names.

    Raises UsageError where there are none, or no such folder.
    """
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder}.", hint="Name one with text files for --haystack.")
    files = sorted(p for p in folder.rglob("*") if p.suffix in (".txt", ".md") and p.is_file())
    text = "\n".join(p.read_text(encoding="utf-8", errors="replace") for p in files)
    parts = re.split(r"(?<=[.!?])\s+|\n\s*\n|(?<=[。！？])", text)  # noqa: RUF001 - Chinese marks
    sentences = [" ".join(part.split()) for part in parts]
    found = [s for s in sentences if s]
    if not found:
        raise UsageError(
            f"{folder} holds no text: {len(files)} .txt and .md files were found.",
            hint="Name a folder with plain text files for --haystack.",
        )
    return found


def _check(
    task: str, language: str, depth: float, density: float | None, haystack: Sequence[str] | None
) -> None:
    if task not in MAKERS:
        raise UsageError(f"There is no task {task!r}.", hint=f"The tasks are {', '.join(TASKS)}.")
    if language not in LANGUAGES:
        raise UsageError(f"There is no language {language!r}.", hint=f"Use one of {', '.join(LANGUAGES)}.")
    if not 0 <= depth <= 1:
        raise UsageError(
            f"The depth is {depth:g}, which is not in [0, 1].", hint="0 is the start, 1 the end of the text."
        )
    if density is not None and not 0 <= density <= 50:
        raise UsageError(
            f"The density is {density:g}, which is not in [0, 50] distractors a thousand tokens.",
            hint="Give --density a number in that range.",
        )
    if haystack is not None and not MAKERS[task].prose:
        prose = [name for name, maker in MAKERS.items() if maker.prose]
        raise UsageError(
            f"The task {task!r} makes its own document and takes no haystack.",
            hint=f"Tasks that hide facts in text are {', '.join(prose)}.",
        )


def _filler(maker: Maker, haystack: Sequence[str] | None) -> Iterator[str]:
    """Filler units without end."""
    if haystack is None:
        while True:
            yield maker.filler()
    at = maker.rng.randrange(len(haystack))
    while True:
        yield haystack[at % len(haystack)]
        at += 1


@dataclass(frozen=True)
class Hidden:
    """A plant and where each of its lines goes, as parts of the filler before it."""

    maker: Maker
    plant: Plant
    fractions: tuple[float, ...]


def hide(maker: Maker, plant: Plant, depth: float) -> Hidden:
    """Places for a plant's lines, its first at `depth`."""
    lines = len(plant.lines)
    return Hidden(maker, plant, tuple(maker.fractions(depth, lines)) if lines else ())


def arrange(filler: Sequence[str], hidden: Sequence[Hidden]) -> tuple[list[str], list[Plant]]:
    """All units of a document and the settled plants, in the order of `hidden`."""
    lines = [
        (round(fraction * len(filler)), which, index, line)
        for which, entry in enumerate(hidden)
        for index, (fraction, line) in enumerate(zip(entry.fractions, entry.plant.lines, strict=True))
    ]
    # Lines at one place come in an order drawn for the document; those of a plant keep theirs.
    shuffled = list(range(len(hidden)))
    Random(len(lines)).shuffle(shuffled)
    lines.sort(key=lambda line: (line[0], shuffled[line[1]], line[2]))
    places = [[0] * len(entry.plant.lines) for entry in hidden]
    units: list[str] = []
    at = 0
    for until, which, index, line in lines:
        units += filler[at:until]
        at = until
        places[which][index] = len(units)
        units.append(line)
    units += filler[at:]
    plants = [entry.plant for entry in hidden]
    for maker in dict.fromkeys(entry.maker for entry in hidden):
        ours = [i for i, entry in enumerate(hidden) if entry.maker is maker]
        units, settled = maker.settle(units, [(plants[i], places[i]) for i in ours])
        for i, plant in zip(ours, settled, strict=True):
            plants[i] = plant
    return units, plants


class _Document:
    """A document of any number of filler units; the filler is drawn once, so that sizes can be tried."""

    def __init__(self, maker: Maker, hidden: Sequence[Hidden], filler: Iterator[str]) -> None:
        self.maker = maker
        self._hidden = hidden
        self._filler = filler
        self._drawn: list[str] = []

    def compose(self, count: int) -> tuple[list[str], list[Plant]]:
        """Units with `count` of filler, and the plants in the order of `hidden`."""
        while len(self._drawn) < count:
            self._drawn.append(next(self._filler))
        return arrange(self._drawn[:count], self._hidden)


def _fit(document: _Document, encode: EncodeChat, length: int, asked: int) -> int:
    """The most filler units with which the prompt has at most `length` tokens, whichever of the first `asked` plants
    it asks about."""

    def question_len(plant: Plant) -> int:
        return len(encode([{"role": "user", "content": plant.question}]))

    def tokens(count: int) -> int:
        units, plants = document.compose(count)
        longest = max(plants[:asked], key=question_len) if asked > 1 else plants[0]
        return len(encode(document.maker.messages(units, longest.question, "")))

    low, low_tokens = 0, tokens(0)
    if low_tokens > length:
        raise DoesNotFitError(
            f"The task needs {low_tokens:,} tokens without any filler, and {length:,} were asked for.",
            asked=low_tokens,
            available=length,
            unit="tokens",
            hint="Ask for a longer prompt or fewer distractors.",
        )
    # Secant steps from measured sizes; `high` is the least count known to be too large.
    high: int | None = None
    rate = (tokens(16) - low_tokens) / 16
    while high is None or high - low > 1:
        guess = low + max(1, int((length - low_tokens) / max(rate, 0.1)))
        if high is not None:
            guess = min(guess, high - 1)
        size = tokens(guess)
        if size <= length:
            rate = max(0.1, (size - low_tokens) / (guess - low))
            low, low_tokens = guess, size
        else:
            high = guess
            rate = max(rate * 1.02, (size - low_tokens) / (guess - low))
            if high - low > 1 and (length - low_tokens) / rate < 1:
                break  # less than a unit is missing: padding fills it
    return low


def _pad(
    maker: Maker, units: list[str], plant: Plant, encode: EncodeChat, length: int
) -> tuple[Chat, list[int]]:
    """The chat with padding to exactly `length` tokens, and its ids."""
    for pad in PADS:
        count = length - len(encode(maker.messages(units, plant.question, "")))
        for _ in range(4):
            chat = maker.messages(units, plant.question, pad * max(0, count))
            ids = encode(chat)
            if len(ids) == length:
                return chat, ids
            count += length - len(ids)
    raise UsageError(
        f"No padding gives a prompt of exactly {length:,} tokens with this tokenizer.",
        hint="Choose a slightly different length.",
    )
