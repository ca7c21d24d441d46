"""The kinds of recall tasks: what a document is made of, what is hidden in it and what is asked.

A document is a row of units (sentences, lines, words, turns). Most are filler; a plant's lines are units that
answer a question. `tasks.build` decides how many units there are and where the lines go.
"""

# ruff: noqa: RUF001 - Chinese text has Chinese punctuation

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import ClassVar

from packhorse.core.errors import DoesNotFitError
from packhorse.verify import words as w


def any_of(words: Sequence[str]) -> str:
    """The pattern of one of some words."""
    return f"(?:{'|'.join(words)})"


Found = tuple["Plant", Sequence[int]]
"""A plant, and the index among the document's units of each of its lines."""
NUMBER = r"(?<!\w)(?<!\d\.)(?<!(?<!\w)[-−])\d%s(?!\w|\.\d|[,，]\d{3}(?!\d))"
"""A number of so many digits by itself, no part of a word, of a decimal or of a longer number."""
COUNTED = "one once 一,two twice 二 两,three 三,four 四,five 五,six 六,seven 七,eight 八,nine 九,ten 十,eleven,twelve"
COUNTS = {word: str(n) for n, words in enumerate(COUNTED.split(","), 1) for word in words.split()}
"""Digits of what is counted in words."""
COUNT = (
    rf"{NUMBER % '+'}|\b{any_of([word for word in COUNTS if word.isascii() and word != 'one'])}\b"
    r"|\bone(?= time|[.!]?$)|(?<!第)十?[一二两三四五六七八九十](?=[次下声回]|[。！.!]?$)"
)
EN_FILLER = (
    rf"(?:{any_of(w.SUBJECTS)}|{any_of(w.FIRST_NAMES)} {any_of(w.LAST_NAMES)}) {any_of(w.VERBS)} {any_of(w.OBJECTS)} "
    rf"{any_of(w.ENDINGS)}\b|The ticket number was \d+"
)
ZH_FILLER = f"{any_of(w.ZH_TIMES)}，{any_of(w.ZH_SUBJECTS)}{any_of(w.ZH_VERBS)}{any_of(w.ZH_OBJECTS)}"
"""Sentences of filler without their full stop."""


@dataclass(frozen=True)
class Plant:
    """Something hidden in a document, and what is asked about it.

    lines: the units that hold it, in order. reply: an answer that is right. expected: all the values that a
    right answer names, and no others that `pattern` (a regular expression; its group where it has some) finds.
    keys: patterns of what each value belongs to; none where any order of values is right.
    """

    lines: tuple[str, ...]
    question: str
    reply: str
    expected: tuple[str, ...]
    pattern: str
    keys: tuple[str, ...] = ()


class Maker:
    """Makes the parts of one document of one kind. Seeded by `rng`; keys never repeat within a document.

    prose: filler is running text, so that a reader's own text may stand in for it. density: distractor
    plants a thousand tokens unless a caller says otherwise. ordered: lines after a plant's first follow it.
    asked: the plants that tasks ask about; training, which asks about all, leaves it empty.
    """

    name: ClassVar[str]
    prose: ClassVar[bool] = True
    density: ClassVar[float] = 0.0
    ordered: ClassVar[bool] = False
    most_distractors: ClassVar[int] = 100_000
    asked: Sequence[Plant] = ()

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

    def say(self, english: str, chinese: str) -> str:
        """One of two texts, in the language of the document."""
        return chinese if self.zh else english

    @property
    def separator(self) -> str:
        """What stands between two units."""
        return self.say(" ", "")

    @property
    def opening(self) -> str:
        """What stands before the first unit."""
        english = "Read the text below, then answer the question.\n\n"
        return self.say(english, "请阅读下面的文字，然后回答问题。\n\n")

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

    def is_clear(self, units: Sequence[str]) -> bool:
        """Whether only one answer is right for a complete document; tasks draw another where not."""
        return True

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
                asked=len(self._keys) + 1, available=pairs, unit="names",
                hint="Ask for fewer distractors (--density) or a shorter prompt.",
            )  # fmt: skip
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

    def new(self, draw: Callable[[], str]) -> str:
        """What is drawn until it is new in this document."""
        while (value := draw()) in self._used:
            pass
        self._used.add(value)
        return value

    def number(self, digits: int = 6) -> str:
        """A number of so many digits, new in this document."""
        return self.new(lambda: str(self.rng.randrange(10 ** (digits - 1), 10**digits)))


class Single(Maker):
    """One fact in plain text."""

    name = "single"

    def fact(self, key: str, value: str) -> str:
        return self.say(f"The special number for {key} is {value}.", f"{key}的专用号码是{value}。")

    def target(self) -> Plant:
        key, value = self.key(), self.number()
        question = self.say(f"What is the special number for {key}?", f"{key}的专用号码是多少？")
        line = self.fact(key, value)
        return Plant((line,), question, line, (value,), NUMBER % "{6}")

    def distractor(self) -> Plant:
        return Single.target(self)


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
        count, listed = self.num_values, join(values, self.language)
        english = f"What are the {count} special numbers for {key}?"
        question = self.say(english, f"{key}的{count}个专用号码是多少？")
        reply = self.say(f"The special numbers for {key} are {listed}.", f"{key}的专用号码是{listed}。")
        return Plant(tuple(self.fact(key, v) for v in values), question, reply, tuple(values), NUMBER % "{6}")


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
        question = self.say(f"What are the special numbers for {listed}?", f"{listed}的专用号码各是多少？")
        reply = self.separator.join(facts)
        return Plant(facts, question, reply, tuple(values), NUMBER % "{6}", tuple(keys))


class KeyValueJson(Maker):
    """A JSON object of random keys and values; one key is asked for."""

    name = "kv_json"
    prose = False
    separator = "\n"
    closing = "\n}"

    @property
    def opening(self) -> str:
        return self.say("Below is a JSON object.\n\n{\n", "下面是一个对象。\n\n{\n")

    def code(self) -> str:
        """Eight hexadecimal digits, new in this document."""
        return self.new(lambda: f"{self.rng.getrandbits(32):08x}")

    def filler(self) -> str:
        return f'"{self.code()}": "{self.code()}",'

    def target(self) -> Plant:
        key, value = self.code(), self.code()
        question = self.say(f'What is the value of the key "{key}"?', f'"{key}"的值是什么？')
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
        rng, count = self.rng, self.hops + 1
        names = [self.new(lambda: f"{rng.choice(w.NOUNS)}{rng.randrange(10, 100)}") for _ in range(count)]
        value = self.number(5)
        lines = [f"VAR {names[0]} = {value}."]
        lines += [f"VAR {new} = VAR {old}." for old, new in pairwise(names)]
        english = f"Which number is VAR {names[-1]}? Follow the assignments one by one."
        question = self.say(english, f"VAR {names[-1]}是哪个数？请一步一步写出。")
        reply = " = ".join(f"VAR {name}" for name in reversed(names)) + f" = {value}"
        return Plant(tuple(lines), question, reply, (value,), NUMBER % "{5}")


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
        return self.say("Below is a list of words.\n\n", "下面是一串词。\n\n")

    def filler(self) -> str:
        return self.rng.choices(self.words, self.weights)[0]

    def target(self) -> Plant:
        count = self.num_asked
        question = self.say(f"What are the {count} most frequent words?", f"最常见的{count}个词是什么？")
        # Chinese words may stand side by side. Words of the kind that this list lacks are wrong ones, too.
        pattern = self.say(rf"\b{any_of(w.NOUNS)}\b", any_of(w.ZH_NOUNS))
        return Plant((), question, "", (), pattern)

    def settle(self, units: list[str], hidden: Sequence[Found]) -> tuple[list[str], list[Plant]]:
        top = self.order([word for word, _ in Counter(units).most_common(self.num_asked)])
        listed = join(top, self.language)
        reply = self.say(f"The most frequent words are {listed}.", f"最常见的词是{listed}。")
        return units, [replace(plant, reply=reply, expected=tuple(top)) for plant, _ in hidden]

    def is_clear(self, units: Sequence[str]) -> bool:
        counts = [count for _, count in Counter(units).most_common()]
        return len(counts) >= self.num_asked and counts[self.num_asked - 1] not in counts[self.num_asked :]


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
        ask = self.say(f"Write a line about the {topic}.", f"写一句关于{topic}的话。")
        return f"{ask}\n{self.new(super().filler)}"

    def filler(self) -> str:
        return self.turn(self.rng.choice(self._topics))

    def target(self) -> Plant:
        return self.repeated(self._asked)

    def distractor(self) -> Plant:
        return self.repeated(self.rng.choice(self._topics))

    def repeated(self, topic: str) -> Plant:
        """The request for a topic as often as it comes, and the question for one of the replies."""
        turns = tuple(self.turn(topic) for _ in range(self.num_repeats))
        which = self.rng.randrange(self.num_repeats)
        said = turns[which].partition("\n")[2]
        english = f"Repeat line {which + 1} that you wrote about the {topic}, word for word."
        question = self.say(english, f"请重复你写的关于{topic}的第{which + 1}句话。")
        return Plant(turns, question, said, (said,), self.say(EN_FILLER, ZH_FILLER))

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
        line = self.say(f"{name} lives right beside {landmark}.", f"{name}住在{landmark}旁边。")
        question = self.say(f"Who lives in {town}?", f"谁住在{town}？")
        reply = self.say(f"{name} lives in {town}.", f"{name}住在{town}。")
        pattern = self.say(rf"\b{any_of(w.FIRST_NAMES)} {any_of(w.LAST_NAMES)}\b", any_of(w.ZH_NAMES))
        return Plant((line,), question, reply, (name,), pattern)


class Clauses(Maker):
    """A contract in numbered clauses; one clause refers to a duty in another."""

    name = "clauses"
    prose = False
    separator = "\n"
    ordered = True
    density = 1.0

    @property
    def opening(self) -> str:
        return self.say("Below is a contract.\n\n", "下面是一份合同。\n\n")

    def clause(self, thing: str) -> str:
        days = self.rng.randrange(2, 99)
        english = f"Clause {{n}}. The tenant shall return the {thing} within {days} days."
        return self.say(english, f"第{{n}}条：承租人须在{days}天内归还{thing}。")

    def filler(self) -> str:
        return self.clause(self.spare_key())

    def target(self) -> Plant:
        thing, fee = self.key(), self.rng.randrange(100, 999)
        english = f"Clause {{n}}. Whoever breaks the duty in clause {{ref}} above shall pay {fee} euros."
        later = self.say(english, f"第{{n}}条：违反上文第{{ref}}条义务者须付{fee}元。")
        english = "What must be returned under the duty that clause {n} refers to?"
        question = self.say(english, "第{n}条提到的义务是归还什么？")
        english = "Clause {n} refers to clause {ref}. Clause {ref}. The tenant shall return the "
        reply = self.say(f"{english}{thing}.", f"第{{n}}条提到第{{ref}}条。第{{ref}}条：归还{thing}。")
        english = rf"\b{any_of(w.ADJECTIVES)} {any_of(w.NOUNS)}\b"
        pattern = self.say(english, any_of(w.ZH_ADJECTIVES) + any_of(w.ZH_NOUNS))
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
        english = f"What is the special number for {key} in each of the two documents?"
        question = self.say(english, f"两份文件中{key}的专用号码各是多少？")
        english = f"Document 1, {key}: {values[0]}. Document 2, {key}: {values[1]}."
        reply = self.say(english, f"文件一：{values[0]}。文件二：{values[1]}。")
        heads = (r"doc\w*\W*1\b|\bfirst\b|文件[一1]|第一", r"doc\w*\W*2\b|\bsecond\b|文件[二2]|第二")
        return Plant(tuple(self.fact(key, v) for v in values), question, reply, values, NUMBER % "{6}", heads)

    def fractions(self, depth: float, count: int) -> list[float]:
        # A distractor has one line, somewhere.
        return [depth / 2, 0.5 + depth / 2] if count == 2 else [depth]

    def messages(self, units: Sequence[str], question: str, pad: str) -> list[dict[str, str]]:
        heads = ("文件一：\n", "\n\n文件二：\n") if self.zh else ("Document 1:\n", "\n\nDocument 2:\n")
        half = (len(units) + 1) // 2
        for first, second in (plant.lines for plant in self.asked):
            half = min(max(half, units.index(first) + 1), units.index(second))
        first, second = (self.separator.join(part) for part in (units[:half], units[half:]))
        text = f"{self.opening}{heads[0]}{first}{heads[1]}{second}{pad}\n\n{question}"
        return [{"role": "user", "content": text}]


class Order(Maker):
    """Two events; which came first is asked."""

    name = "order"
    density = 0.5

    def event(self, key: str) -> str:
        return self.say(f"Then the {key} was sold.", f"这时{key}被卖掉了。")

    def target(self) -> Plant:
        first, second = self.key(), self.key()
        return Plant((self.event(first), self.event(second)), "", "", (first, second), "")

    def settle(self, units: list[str], hidden: Sequence[Found]) -> tuple[list[str], list[Plant]]:
        return units, [self._ask(plant, *places) for plant, places in hidden]

    def _ask(self, plant: Plant, place: int, other_place: int) -> Plant:
        keys = plant.expected
        winner = keys[0] if place < other_place else keys[1]
        one, two = sorted(keys)
        question = self.say(f"Which was sold first, the {one} or the {two}?", f"{one}和{two}，哪个先被卖掉？")
        reply = self.say(f"The {winner} was sold first.", f"{winner}先被卖掉。")
        # An answer that names both says of one that it came before the other; else both are candidates.
        key, other = any_of(keys), rf"(?!{one}|{two}|\bor\b|还是|或)"
        near, sure = f"(?:{other}.)*?", rf"(?:{other}(?!\bnot\b|不).)*?"
        pattern = (
            rf"({key})[在比]{key}(?:之?前|以前|先|早)|{key}[在比]({key})(?:之?后|以后|晚)|{key}晚于({key})"
            rf"|({key}){sure}(?:\b(?:first|before|then|earlier)\b|先|早于|再|然后){near}{key}"
            rf"|{key}{sure}\b(?:after|later)\b{near}({key})|({key})"
        )
        return replace(plant, question=question, reply=reply, expected=(winner,), pattern=pattern)


class Counting(Maker):
    """An event that comes one to eight times; how often is asked."""

    name = "counting"
    density = 0.5

    def target(self) -> Plant:
        key, count = self.key(), self.rng.randrange(1, 9)
        line = self.say(f"The bell rang by the {key}.", f"{key}旁的钟响了。")
        question = self.say(f"How many times did the bell ring by the {key}?", f"{key}旁的钟响了几次？")
        reply = self.say(f"The bell rang by the {key} {count} times.", f"{key}旁的钟响了{count}次。")
        return Plant((line,) * count, question, reply, (str(count),), COUNT)


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
