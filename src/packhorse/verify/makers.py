"""The kinds of recall tasks: what a document is made of, what is hidden in it and what is asked.

A document is a row of units (sentences, lines, words, turns). Most are filler; a plant's lines are units that
answer a question. `tasks.build` decides how many units there are and where the lines go.
"""

# ruff: noqa: RUF001 - Chinese text has Chinese punctuation

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import ClassVar

from packhorse.core.errors import DoesNotFitError
from packhorse.verify import words as w

Found = tuple["Plant", Sequence[int]]
"""A plant, and the index among the document's units of each of its lines."""
DIGITS = r"(?<!\d)\d{%d}(?!\d)"


@dataclass(frozen=True)
class Plant:
    """Something hidden in a document, and what is asked about it.

    lines: the units that hold it, in order. reply: an answer that is right. expected: all the values that a
    right answer names, and no others that `pattern` (a regular expression) finds.
    """

    lines: tuple[str, ...]
    question: str
    reply: str
    expected: tuple[str, ...]
    pattern: str


class Maker:
    """Makes the parts of one document of one kind. Seeded by `rng`; keys never repeat within a document.

    prose: filler is running text, so that a reader's own text may stand in for it. density: distractor
    plants a thousand tokens unless a caller says otherwise. ordered: lines after a plant's first follow it.
    """

    name: ClassVar[str]
    prose: ClassVar[bool] = True
    density: ClassVar[float] = 0.0
    ordered: ClassVar[bool] = False
    most_distractors: ClassVar[int] = 100_000

    def __init__(self, rng: Random, language: str) -> None:
        self.rng = rng
        self.language = language
        self._keys: set[str] = set()
        self._used: set[str] = set()

    def share(self, other: Maker) -> None:
        """Keys and values of the two never repeat in the document they make together."""
        self._keys, self._used = other._keys, other._used

    @property
    def zh(self) -> bool:
        """Whether the document is Chinese."""
        return self.language == "zh"

    @property
    def separator(self) -> str:
        """What stands between two units."""
        return "" if self.zh else " "

    @property
    def opening(self) -> str:
        """What stands before the first unit."""
        if self.zh:
            return "请阅读下面的文字，然后回答问题。\n\n"
        return "Read the text below, then answer the question.\n\n"

    closing: ClassVar[str] = ""

    def filler(self) -> str:
        """A unit that answers nothing."""
        r = self.rng.choice
        if self.zh:
            return f"{r(w.ZH_TIMES)}，{r(w.ZH_SUBJECTS)}{r(w.ZH_VERBS)}{r(w.ZH_OBJECTS)}。"
        kind = self.rng.random()
        if kind < 0.06:
            return f"{r(w.FIRST_NAMES)} {r(w.LAST_NAMES)} {r(w.VERBS)} {r(w.OBJECTS)} {r(w.ENDINGS)}."
        if kind < 0.10:
            return f"The ticket number was {self.rng.randrange(10, 9_999)}."
        return f"{r(w.SUBJECTS)} {r(w.VERBS)} {r(w.OBJECTS)} {r(w.ENDINGS)}."

    def target(self) -> Plant:
        """The plant that is asked about."""
        raise NotImplementedError

    def distractor(self) -> Plant:
        """A plant of the same kind with other keys."""
        return self.target()

    def fractions(self, depth: float, count: int) -> list[float]:
        """Where `count` lines of the target go, as parts of the filler before them; the first at `depth`."""
        if self.ordered:
            return [depth, *sorted(depth + (1 - depth) * self.rng.random() for _ in range(count - 1))]
        return [depth, *(self.rng.random() for _ in range(count - 1))]

    def settle(self, units: list[str], hidden: Sequence[Found]) -> tuple[list[str], list[Plant]]:
        """Units and plants once the document is complete: what depends on the whole of it."""
        return units, [plant for plant, _ in hidden]

    def messages(self, units: Sequence[str], question: str, pad: str) -> list[dict[str, str]]:
        """The chat that asks `question`. pad: text without meaning that makes the length exact."""
        text = self.opening + self.separator.join(units) + self.closing
        return [{"role": "user", "content": f"{text}{pad}\n\n{question}"}]

    def key(self) -> str:
        """Two words that name a thing, new in this document.

        Raises DoesNotFitError where most pairs of words are taken.
        """
        pairs = len(w.ZH_ADJECTIVES) * len(w.ZH_NOUNS) if self.zh else len(w.ADJECTIVES) * len(w.NOUNS)
        if len(self._keys) > 0.9 * pairs:
            raise DoesNotFitError(
                f"The language {self.language} has names for {pairs:,} things, and the document needs more.",
                asked=len(self._keys) + 1,
                available=pairs,
                unit="names",
                hint="Ask for fewer distractors (--density) or a shorter prompt.",
            )
        pair = self.spare_key()
        self._keys.add(pair)
        return pair

    def spare_key(self) -> str:
        """Two words that name a thing no `key` names; it may come again."""
        while True:
            r = self.rng.choice
            pair = r(w.ZH_ADJECTIVES) + r(w.ZH_NOUNS) if self.zh else f"{r(w.ADJECTIVES)} {r(w.NOUNS)}"
            if pair not in self._keys:
                return pair

    def number(self, digits: int = 6) -> str:
        """A number of so many digits, new in this document."""
        while True:
            value = str(self.rng.randrange(10 ** (digits - 1), 10**digits))
            if value not in self._used:
                self._used.add(value)
                return value


class Single(Maker):
    """One fact in plain text."""

    name = "single"

    def fact(self, key: str, value: str) -> str:
        return f"{key}的专用号码是{value}。" if self.zh else f"The special number for {key} is {value}."

    def target(self) -> Plant:
        key, value = self.key(), self.number()
        question = f"{key}的专用号码是多少？" if self.zh else f"What is the special number for {key}?"
        line = self.fact(key, value)
        return Plant((line,), question, line, (value,), DIGITS % 6)


class MultiKey(Single):
    """One fact among many that differ in their key."""

    name = "multi_key"
    density = 4.0


class MultiValue(Single):
    """Four facts with one key; all are asked for."""

    name = "multi_value"
    density = 2.0
    ordered = True
    num_values: ClassVar[int] = 4

    def target(self) -> Plant:
        key, values = self.key(), [self.number() for _ in range(self.num_values)]
        listed = join(values, self.language)
        if self.zh:
            question = f"{key}的{self.num_values}个专用号码是多少？"
            reply = f"{key}的专用号码是{listed}。"
        else:
            question = f"What are the {self.num_values} special numbers for {key}?"
            reply = f"The special numbers for {key} are {listed}."
        return Plant(tuple(self.fact(key, v) for v in values), question, reply, tuple(values), DIGITS % 6)

    def distractor(self) -> Plant:
        return Single.target(self)


class MultiQuery(Single):
    """Four facts with four keys; all are asked for."""

    name = "multi_query"
    density = 2.0
    num_queries: ClassVar[int] = 4

    def target(self) -> Plant:
        keys = [self.key() for _ in range(self.num_queries)]
        values = [self.number() for _ in keys]
        facts = tuple(map(self.fact, keys, values))
        listed = join(keys, self.language)
        question = (
            f"{listed}的专用号码各是多少？" if self.zh else f"What are the special numbers for {listed}?"
        )
        return Plant(facts, question, self.separator.join(facts), tuple(values), DIGITS % 6)

    def distractor(self) -> Plant:
        return Single.target(self)


class KeyValueJson(Maker):
    """A JSON object of random keys and values; one key is asked for."""

    name = "kv_json"
    prose = False
    separator = "\n"
    closing = "\n}"

    @property
    def opening(self) -> str:
        return ("下面是一个对象。\n\n{\n") if self.zh else "Below is a JSON object.\n\n{\n"

    def code(self) -> str:
        """Eight hexadecimal digits, new in this document."""
        while True:
            value = f"{self.rng.getrandbits(32):08x}"
            if value not in self._used:
                self._used.add(value)
                return value

    def filler(self) -> str:
        return f'"{self.code()}": "{self.code()}",'

    def target(self) -> Plant:
        key, value = self.code(), self.code()
        question = f'"{key}"的值是什么？' if self.zh else f'What is the value of the key "{key}"?'
        line = f'"{key}": "{value}",'
        # The answer may repeat the key: only what is not the key is a value.
        pattern = rf"(?<![0-9a-f])(?!{key})[0-9a-f]{{8}}(?![0-9a-f])"
        return Plant((line,), question, f'"{key}": "{value}"', (value,), pattern)


class Variables(Maker):
    """Assignments that refer to each other; the number at the end of a chain is asked for.

    hops: references between the variable that is asked for and the number.
    """

    name = "variables"
    density = 1.0
    ordered = True
    hops: int = 2

    def target(self) -> Plant:
        names: list[str] = []
        while len(names) <= self.hops:
            name = f"{self.rng.choice(w.NOUNS)}{self.rng.randrange(10, 100)}"
            if name not in self._used:
                self._used.add(name)
                names.append(name)
        value = self.number(5)
        lines = [f"VAR {names[0]} = {value}."]
        lines += [f"VAR {new} = VAR {old}." for old, new in pairwise(names)]
        question = f"Which number is VAR {names[-1]}? Follow the assignments one by one."
        if self.zh:
            question = f"VAR {names[-1]}是哪个数？请一步一步写出。"
        reply = " = ".join(f"VAR {name}" for name in reversed(names)) + f" = {value}"
        return Plant(tuple(lines), question, reply, (value,), DIGITS % 5)


class FrequentWords(Maker):
    """Words drawn by Zipf's law (exponent 2); the three most frequent are asked for."""

    name = "frequent_words"
    prose = False
    separator = " "
    num_asked: ClassVar[int] = 3

    def __init__(self, rng: Random, language: str) -> None:
        super().__init__(rng, language)
        self.words = rng.sample(w.ZH_NOUNS if self.zh else w.NOUNS, 36)
        self.weights = self.make_weights()

    def make_weights(self) -> list[float]:
        """How often each word comes, up to a factor."""
        return [(rank + 1) ** -2.0 for rank in range(len(self.words))]

    def order(self, words: list[str]) -> list[str]:
        """The order in which a right answer names them; it is not scored."""
        return words

    @property
    def opening(self) -> str:
        return "下面是一串词。\n\n" if self.zh else "Below is a list of words.\n\n"

    def filler(self) -> str:
        return self.rng.choices(self.words, self.weights)[0]

    def target(self) -> Plant:
        if self.zh:
            question = f"最常见的{self.num_asked}个词是什么？"
        else:
            question = f"What are the {self.num_asked} most frequent words?"
        # Chinese words may stand side by side.
        edge = "" if self.zh else r"\b"
        return Plant((), question, "", (), f"{edge}(?:{'|'.join(self.words)}){edge}")

    def settle(self, units: list[str], hidden: Sequence[Found]) -> tuple[list[str], list[Plant]]:
        top = self.order([word for word, _ in Counter(units).most_common(self.num_asked)])
        listed = join(top, self.language)
        reply = f"最常见的词是{listed}。" if self.zh else f"The most frequent words are {listed}."
        return units, [replace(plant, reply=reply, expected=tuple(top)) for plant, _ in hidden]


class CommonWords(FrequentWords):
    """Five words are eight times as common as all others; they are asked for."""

    name = "common_words"
    num_asked = 5

    def make_weights(self) -> list[float]:
        return [8.0 if rank < self.num_asked else 1.0 for rank in range(len(self.words))]

    def order(self, words: list[str]) -> list[str]:
        # They are about equally frequent.
        return sorted(words)


class RepeatedRequest(Maker):
    """A chat in which the same request comes three times; one of the replies is asked for again."""

    name = "repeated_request"
    prose = False
    num_repeats: ClassVar[int] = 3
    ordered = True

    def __init__(self, rng: Random, language: str) -> None:
        super().__init__(rng, language)
        self._topics = list(w.ZH_NOUNS if self.zh else w.NOUNS)
        rng.shuffle(self._topics)
        self._asked = self._topics.pop()

    def turn(self, topic: str) -> str:
        """A request and its reply, split by a line end."""
        ask = f"写一句关于{topic}的话。" if self.zh else f"Write a line about the {topic}."
        while True:
            said = Maker.filler(self)
            if said not in self._used:
                self._used.add(said)
                return f"{ask}\n{said}"

    def filler(self) -> str:
        return self.turn(self.rng.choice(self._topics))

    def target(self) -> Plant:
        turns = tuple(self.turn(self._asked) for _ in range(self.num_repeats))
        which = self.rng.randrange(self.num_repeats)
        said = turns[which].partition("\n")[2]
        if self.zh:
            question = f"请重复你写的关于{self._asked}的第{which + 1}句话。"
        else:
            question = f"Repeat line {which + 1} that you wrote about the {self._asked}, word for word."
        others = [t.partition("\n")[2] for t in turns]
        return Plant(turns, question, said, (said,), "|".join(re.escape(text) for text in others))

    def messages(self, units: Sequence[str], question: str, pad: str) -> list[dict[str, str]]:
        chat: list[dict[str, str]] = []
        for unit in units:
            ask, _, said = unit.partition("\n")
            chat += [{"role": "user", "content": ask}, {"role": "assistant", "content": said}]
        return [*chat, {"role": "user", "content": f"{question}{pad}"}]


class NoSharedWords(Maker):
    """A fact that shares no word with its question: a landmark stands for its town."""

    name = "no_shared_words"
    density = 0.5
    most_distractors = 6

    def target(self) -> Plant:
        pairs = w.ZH_LANDMARKS if self.zh else w.LANDMARKS
        landmark, town = self.rng.choice([p for p in pairs if p[1] not in self._used])
        names = w.ZH_NAMES if self.zh else [f"{a} {b}" for a in w.FIRST_NAMES for b in w.LAST_NAMES]
        name = self.rng.choice([n for n in names if n not in self._used])
        self._used |= {town, name}
        if self.zh:
            line, question, reply = f"{name}住在{landmark}旁边。", f"谁住在{town}？", f"{name}住在{town}。"
            return Plant((line,), question, reply, (name,), "|".join(w.ZH_NAMES))
        line, question = f"{name} lives right beside {landmark}.", f"Who lives in {town}?"
        pattern = rf"(?:{'|'.join(w.FIRST_NAMES)}) (?:{'|'.join(w.LAST_NAMES)})"
        return Plant((line,), question, f"{name} lives in {town}.", (name,), pattern)


class Clauses(Maker):
    """A contract in numbered clauses; one clause refers to a duty in another."""

    name = "clauses"
    prose = False
    separator = "\n"
    ordered = True
    density = 1.0

    @property
    def opening(self) -> str:
        return "下面是一份合同。\n\n" if self.zh else "Below is a contract.\n\n"

    def clause(self, thing: str) -> str:
        days = self.rng.randrange(2, 99)
        if self.zh:
            return f"第{{n}}条：承租人须在{days}天内归还{thing}。"
        return f"Clause {{n}}. The tenant shall return the {thing} within {days} days."

    def filler(self) -> str:
        return self.clause(self.spare_key())

    def target(self) -> Plant:
        thing, fee = self.key(), self.rng.randrange(100, 999)
        if self.zh:
            later = f"第{{n}}条：违反上文第{{ref}}条义务者须付{fee}元。"
            question = "第{n}条提到的义务是归还什么？"
            reply = f"第{{n}}条提到第{{ref}}条。第{{ref}}条：归还{thing}。"
            pattern = rf"(?:{'|'.join(w.ZH_ADJECTIVES)})(?:{'|'.join(w.ZH_NOUNS)})"
        else:
            later = f"Clause {{n}}. Whoever breaks the duty in clause {{ref}} above shall pay {fee} euros."
            question = "What must be returned under the duty that clause {n} refers to?"
            reply = (
                f"Clause {{n}} refers to clause {{ref}}. Clause {{ref}}. The tenant shall return the {thing}."
            )
            pattern = rf"(?:{'|'.join(w.ADJECTIVES)}) (?:{'|'.join(w.NOUNS)})"
        return Plant((self.clause(thing), later), question, reply, (thing,), pattern)

    def settle(self, units: list[str], hidden: Sequence[Found]) -> tuple[list[str], list[Plant]]:
        points_to = {places[1]: places[0] + 1 for _, places in hidden}
        done = [
            unit.replace("{n}", str(at + 1)).replace("{ref}", str(points_to.get(at)))
            for at, unit in enumerate(units)
        ]
        plants = []
        for plant, (ref, own) in hidden:
            question = plant.question.format(n=own + 1)
            reply = plant.reply.format(n=own + 1, ref=ref + 1)
            plants.append(replace(plant, question=question, reply=reply))
        return done, plants


class TwoDocuments(Single):
    """Two documents that hold a number each for the same thing; both are asked for."""

    name = "two_documents"
    density = 2.0

    def target(self) -> Plant:
        key, values = self.key(), (self.number(), self.number())
        if self.zh:
            question = f"两份文件中{key}的专用号码各是多少？"
            reply = f"文件一：{values[0]}。文件二：{values[1]}。"
        else:
            question = f"What is the special number for {key} in each of the two documents?"
            reply = f"Document 1, {key}: {values[0]}. Document 2, {key}: {values[1]}."
        return Plant(tuple(self.fact(key, v) for v in values), question, reply, values, DIGITS % 6)

    def distractor(self) -> Plant:
        return Single.target(self)

    def fractions(self, depth: float, count: int) -> list[float]:
        # A distractor has one line, somewhere.
        return [depth / 2, 0.5 + depth / 2] if count == 2 else [depth]

    def messages(self, units: Sequence[str], question: str, pad: str) -> list[dict[str, str]]:
        heads = ("文件一：\n", "\n\n文件二：\n") if self.zh else ("Document 1:\n", "\n\nDocument 2:\n")
        half = (len(units) + 1) // 2
        first, second = (self.separator.join(part) for part in (units[:half], units[half:]))
        text = f"{self.opening}{heads[0]}{first}{heads[1]}{second}{pad}\n\n{question}"
        return [{"role": "user", "content": text}]


class Order(Maker):
    """Two events; which came first is asked."""

    name = "order"
    ordered = False
    density = 0.5

    def event(self, key: str) -> str:
        return f"这时{key}被卖掉了。" if self.zh else f"Then the {key} was sold."

    def target(self) -> Plant:
        first, second = self.key(), self.key()
        return Plant((self.event(first), self.event(second)), "", "", (first, second), "")

    def settle(self, units: list[str], hidden: Sequence[Found]) -> tuple[list[str], list[Plant]]:
        return units, [self._ask(plant, *places) for plant, places in hidden]

    def _ask(self, plant: Plant, place: int, other_place: int) -> Plant:
        keys = plant.expected
        winner = keys[0] if place < other_place else keys[1]
        one, two = sorted(keys)
        if self.zh:
            question, reply = f"{one}和{two}，哪个先被卖掉？", f"{winner}先被卖掉。"
        else:
            question, reply = (
                f"Which was sold first, the {one} or the {two}?",
                f"The {winner} was sold first.",
            )
        return replace(plant, question=question, reply=reply, expected=(winner,), pattern=f"{one}|{two}")


class Counting(Maker):
    """An event that comes one to eight times; how often is asked."""

    name = "counting"
    density = 0.5

    def target(self) -> Plant:
        key, count = self.key(), self.rng.randrange(1, 9)
        if self.zh:
            line, question = f"{key}旁的钟响了。", f"{key}旁的钟响了几次？"
            reply = f"{key}旁的钟响了{count}次。"
        else:
            line, question = f"The bell rang by the {key}.", f"How many times did the bell ring by the {key}?"
            reply = f"The bell rang by the {key} {count} times."
        return Plant((line,) * count, question, reply, (str(count),), r"\d+")


def join(items: Sequence[str], language: str) -> str:
    """A list as it is said in a sentence."""
    if language == "zh" or len(items) < 2:
        return "、".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


MAKERS: dict[str, type[Maker]] = {
    maker.name: maker
    for maker in (
        Single, MultiKey, MultiValue, MultiQuery, KeyValueJson, Variables, CommonWords, FrequentWords,
        RepeatedRequest, NoSharedWords, Clauses, TwoDocuments, Order, Counting,
    )
}  # fmt: skip
