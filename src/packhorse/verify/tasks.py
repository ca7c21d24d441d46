"""Recall tasks made from a seed: prompts of an exact number of tokens for any tokenizer, and their scoring.

seed -> maker (units, plant, distractors) -> as many units as fit -> padding -> exactly `length` tokens

Scoring. Every kind has a pattern that finds candidate answers in a text (numbers of so many digits, two-word
names, words of the kind that a list has, ...). An answer is right when the set of candidates in it equals the set
of expected values: all of them, as often as it likes, and no other. Their order counts where each belongs to a key or
a document: the ones named go with the values named, first with first, and those not named follow as they were asked.
`share` is the part of the expected values that was named (with its own), 0 where another candidate was named too.
Case, full-width digits, the marks of emphasis and separators of thousands make no difference (`plain`). A model's
thoughts are no part of its answer.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from operator import eq
from pathlib import Path
from random import Random

from packhorse.core.errors import DoesNotFitError, UsageError
from packhorse.verify.makers import COUNTS, MAKERS, Maker, Plant

TASKS = tuple(MAKERS)
LANGUAGES = ("en", "zh")
PADS = (" the", " and", " a", " so", " x", ".", " 1", "\n")
"""Texts of which one repeats at a token each with most tokenizers; they make lengths exact."""
PLAIN = {0xFF10 + digit: str(digit) for digit in range(10)} | dict.fromkeys(map(ord, "*_`"), "")
"""Full-width digits as plain ones, and marks of emphasis as nothing."""
GROUPED = re.compile(r"(?<![\w.,\uff0c-])\d{1,3}([,\uff0c ])\d{3}(?:\1\d{3})*(?!\w|[.,\uff0c]\d)", re.ASCII)
"""A number with separators of thousands. A full stop is none: 317.698 is a decimal."""
LONGEST_UNIT, PIECE = 240, 80
"""Characters a haystack's sentence may have, and those of the pieces that longer ones are cut into."""
WORDS = re.compile(r"[\u2e80-\uffef]|[^\s\u2e80-\uffef]{1,20}")
"""What text is cut between: words (endless ones within), or the characters of scripts without spaces."""
MOST_DRAWS = 100
"""Documents tried until one asks what has a single right answer."""
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
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Score:
    """right: as the module says. share: part of the expected values that was named, 0 with a wrong one."""

    right: bool
    share: float


def plain(text: str) -> str:
    """Lower case, one blank at a time, without marks of emphasis, separators of thousands and decimals of zero."""
    text = " ".join(text.translate(PLAIN).lower().split())
    text = re.sub(r"(?<=\d)\.0+(?!\w|\.\d)", "", text, flags=re.ASCII)
    return GROUPED.sub(lambda number: re.sub(r"\D", "", number[0]), text)


def score(sample: Sample, answer: str) -> Score:
    """How right an answer is; the rule stands at the head of this module."""
    text = plain(answer)
    named = [m[m.lastindex or 0] for m in re.finditer(sample.pattern, text, re.ASCII | re.IGNORECASE)]
    found = list(dict.fromkeys(COUNTS.get(name, name) for name in named))
    expected = [value.lower().rstrip(".。") for value in sample.expected]
    hits = len(found)
    if sample.keys:
        at = [m.start() if (m := re.search(key, text, re.ASCII)) else len(text) for key in sample.keys]
        expected = [expected[which] for which in sorted(range(len(at)), key=at.__getitem__)]
        hits = sum(map(eq, found, expected))
    share = 0.0 if set(found) - set(expected) else hits / len(expected)
    return Score(share == 1, share)


def build(
    task: str, encode: EncodeChat, *, length: int, depth: float, seed: int, language: str = "en",
    density: float | None = None, haystack: Sequence[str] | None = None,
) -> Sample:  # fmt: skip
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
    task: str, encode: EncodeChat, *, length: int, depths: Sequence[float], seed: int, language: str = "en",
    density: float | None = None, haystack: Sequence[str] | None = None,
) -> list[Sample]:  # fmt: skip
    """Samples over one document that hides a target at each of `depths`; only the question and its padding differ.
    Otherwise as `build`. (Depths 0 and 1 together do not go with two_documents: a value may lie in the wrong one.)"""
    for depth in depths:
        _check(task, language, depth, density, haystack)
    draw = f"{task}/{language}/{length}/{'+'.join(f'{d:.6f}' for d in depths)}/{seed}"
    for _ in range(MOST_DRAWS):
        maker = MAKERS[task](Random(draw), language)
        wanted = maker.density if density is None else density
        hidden = [hide(maker, maker.target(), depth) for depth in depths]
        maker.asked = [entry.plant for entry in hidden]
        for _ in range(min(round(wanted * length / 1000), maker.most_distractors)):
            hidden.append(hide(maker, maker.distractor(), maker.rng.random()))
        document = _Document(maker, hidden, _filler(maker, haystack))
        units, plants = document.compose(*_fit(document, encode, length, len(depths), haystack is not None))
        if maker.is_clear(units):
            break
        draw += "/again"
    else:
        reason = f"None of {MOST_DRAWS} documents of {length:,} tokens for {task} has a single right answer."
        raise UsageError(reason, hint="Ask for a longer prompt.")
    samples = []
    for depth, plant in zip(depths, plants, strict=False):
        chat, ids = _pad(maker, units, plant, encode, length)
        said = [[*chat[:-1], {"role": "user", "content": text}] for text in (plant.reply, "")]
        answer_len = len(encode(said[0])) - len(encode(said[1]))
        samples.append(
            Sample(
                task, language, length, depth, seed, chat, tuple(ids), plant.question, plant.reply, plant.expected,
                plant.pattern, answer_len + ANSWER_MARGIN, plant.keys,
            )
        )  # fmt: skip
    return samples


def read_haystack(folder: Path) -> list[str]:
    """Sentences of the .txt and .md files of a folder, in the order of their names; long ones in pieces.

    What looks like a special token (`<...>`) gets a blank, so that no tokenizer takes it for one. Raises UsageError
    where there are no files, no such folder, or a file is no text in UTF-8.
    """
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder}.", hint="Name one with text files for --haystack.")
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".txt", ".md") and p.is_file())
    text = re.sub(r"<(?=[^\s<>]+>)", "< ", "\n".join(map(_read_text, files)))
    parts = re.split(r"(?<=[.!?])\s+|\n\s*\n|(?<=[。！？])", text)  # noqa: RUF001 - Chinese marks
    pieces = rf".{{1,{PIECE}}}(?:\s|$)|.{{1,{PIECE}}}"
    found: list[str] = []
    for sentence in filter(None, (" ".join(part.split()) for part in parts)):
        cut = re.findall(pieces, sentence) if len(sentence) > LONGEST_UNIT else [sentence]
        found += map(str.strip, cut)
    if not found:
        reason = f"{folder} holds no text: {len(files)} .txt and .md files were found."
        raise UsageError(reason, hint="Name a folder with plain text files for --haystack.")
    return found


def _read_text(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8-sig")
        if "\0" in text:
            raise ValueError
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        hint = "Take it out of the --haystack folder, or convert it."
        raise UsageError(f"{file} cannot be read: {why}.", hint=hint) from error
    return text


def _check(
    task: str, language: str, depth: float, density: float | None, haystack: Sequence[str] | None
) -> None:
    prose = [name for name, maker in MAKERS.items() if maker.prose]
    for wrong, reason, hint in (
        (task not in MAKERS, f"There is no task {task!r}.", f"The tasks are {', '.join(TASKS)}."),
        (language not in LANGUAGES, f"There is no language {language!r}.", f"Use one of {', '.join(LANGUAGES)}."),
        (not 0 <= depth <= 1, f"The depth is {depth:g}, which is not in [0, 1].", "0 is the text's start, 1 its end."),
        (density is not None and not 0 <= density <= 50,
            f"The density is {density}, which is not in [0, 50] distractors a thousand tokens.", "Use 0 to 50."),
        (haystack is not None and task not in prose, f"The task {task!r} makes its own document and takes no haystack.",
            f"Tasks that hide facts in text are {', '.join(prose)}."),
    ):  # fmt: skip
        if wrong:
            raise UsageError(reason, hint=hint)


def _filler(maker: Maker, haystack: Sequence[str] | None) -> Iterator[str]:
    """Filler units without end."""
    if haystack is None:
        return iter(maker.filler, None)
    at = maker.rng.randrange(len(haystack))
    return cycle([*haystack[at:], *haystack[:at]])


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

    def __init__(self, maker: Maker, hidden: list[Hidden], filler: Iterator[str]) -> None:
        self.maker = maker
        self.hidden = hidden
        self._filler = filler
        self.drawn: list[str] = []

    def compose(self, count: int, last: str = "") -> tuple[list[str], list[Plant]]:
        """Units with `count` of filler and `last`, and the plants in the order of `hidden`."""
        while len(self.drawn) <= count:
            self.drawn.append(next(self._filler))
        return arrange(self.drawn[:count] + [last] * bool(last), self.hidden)


def _fit(document: _Document, encode: EncodeChat, length: int, asked: int, cut: bool) -> tuple[int, str]:
    """The most filler units with which the prompt has at most `length` tokens, whichever of the first `asked` plants
    it asks about, and if `cut` as much of the next unit as fits behind them."""

    def question_len(plant: Plant) -> int:
        return len(encode([{"role": "user", "content": plant.question}]))

    def tokens(count: int, last: str = "") -> int:
        units, plants = document.compose(count, last)
        longest = max(plants[:asked], key=question_len) if asked > 1 else plants[0]
        return len(encode(document.maker.messages(units, longest.question, "")))

    low, low_tokens = 0, tokens(0)
    if low_tokens > length:
        distractors = len(document.hidden) - asked
        del document.hidden[asked:]
        alone = tokens(0)
        # Distractors differ in size: a quarter of the room is left for that.
        fits = 0.75 * (length - alone) * distractors // max(1, low_tokens - alone) * 1000 / length
        raise DoesNotFitError(
            f"The task needs {low_tokens:,} tokens without any filler, and {length:,} were asked for.",
            asked=low_tokens, available=length, unit="tokens",
            hint=f"Ask for {alone:,} tokens or more." if alone > length else f"Give --density {fits:.1f} or less.",
        )  # fmt: skip
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
    if not cut:
        return low, ""
    unit = document.drawn[low]
    ends = [0, *(word.end() for word in WORDS.finditer(unit))]
    return low, unit[: ends[bisect_right(ends, length, lo=1, key=lambda end: tokens(low, unit[:end])) - 1]]


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
    reason = f"No padding gives a prompt of exactly {length:,} tokens with this tokenizer."
    raise UsageError(reason, hint="Choose a slightly different length.")
