"""What counts as a right answer: tables of both for every kind of task."""

# ruff: noqa: RUF001 - Chinese text has Chinese punctuation

from functools import cache

import pytest

from packhorse.verify.tasks import Sample, build, score


def encode(chat: list[dict[str, str]]) -> list[int]:
    return list("".join(f"[{m['role']}] {m['content']}\n" for m in chat).encode())


@cache
def make(task: str, language: str = "en") -> Sample:
    """A sample of a tokenizer whose tokens are bytes."""
    return build(task, encode, length=6000, depth=0.4, seed=3, language=language)


def names_of(sample: Sample) -> dict[str, str]:
    """What stands for the sample's values in the tables: v1, v2, ... in the asked order; k1, k2, ... for keys."""
    values = {f"v{i}": value for i, value in enumerate(sample.expected, start=1)}
    return values | {f"k{i}": key for i, key in enumerate(sample.keys, start=1)}


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(
    ("wording", "right"),
    [
        ("{a}{b}", True),
        ("**{a}{b}**.", True),
        ("{a},{b}", True),
        ("{a} {b}", True),
        ("{a}\u2009{b}", True),
        ("{a}\u202f{b}", True),
        ("{a}，{b}", True),
        ("{a}_{b}", True),
        ("是{a}{b}。", True),
        ("{a}{b}.00", True),
        ("fox-{a}{b}", True),
        ("No.{a}{b}: {a}{b}", True),
        ("{a}.{b}", False),
        ("-{a}{b}", False),
        ("−{a}{b}", False),
        ("1.{a}{b}", False),
        ("{a}{b}.5", False),
        ("{a}{b}e9", False),
        ("x{a}{b}y", False),
        ("1{a}{b}", False),
        ("{a}{b},000", False),
        ("{a}{b},000,000", False),
        ("{a},{b},000", False),
        ("{a}{b} or 111111", False),
        ("{a}{b} or 111,111", False),
        ("{a}{b}-111111", False),
    ],
)
def test_numbers(language, wording, right):
    sample = make("single", language)
    (value,) = sample.expected
    assert score(sample, wording.format(a=value[:3], b=value[3:])).right is right
    wide = str.maketrans("0123456789", "０１２３４５６７８９")
    assert score(sample, wording.format(a=value[:3], b=value[3:]).translate(wide)).right is right


def test_a_chain_ends_in_a_number_of_five_digits():
    sample = make("variables")
    (value,) = sample.expected
    assert score(sample, f"It is {value[:2]},{value[2:]}.").right
    assert not score(sample, f"beacon{value}").right


MANY = [
    ("k1: v1. k2: v2. k3: v3. k4: v4.", True),
    ("- **K1**: v1\n- **K2**: v2\n- **K3**: v3\n- **K4**: v4", True),
    ("k4: v4. k3: v3. k2: v2. k1: v1.", True),
    ("v1, v2, v3, v4", True),
    ("k1, k2, k3 and k4 are v1, v2, v3 and v4", True),
    ("v2 is for k2, v1 for k1, v4 for k4, v3 for k3", True),
    ("k1: v2. k2: v1. k3: v3. k4: v4.", False),
    ("v2, v1, v3, v4", False),
    ("v2 is for k1, v1 for k2, v4 for k4, v3 for k3", False),
    ("v1, v2, v3", False),
    ("v1, v2, v3, v4, 111111", False),
]
TWO = [
    ("Document 1: v1. Document 2: v2.", True),
    ("**Document 2**: v2\n**Document 1**: v1", True),
    ("The second document says v2 and the first v1.", True),
    ("文件二：v2。文件一：v1。", True),
    ("v1 and v2", True),
    ("v1，v2", True),
    ("In doc. #1 it is v1, in doc. #2 v2", True),
    ("Document 1: v2. Document 2: v1.", False),
    ("The second document says v1 and the first v2.", False),
    ("文件一：v2。文件二：v1。", False),
    ("v2 and v1", False),
    ("Document 1: v1.", False),
]


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(
    ("task", "answer", "right"),
    [("multi_query", *row) for row in MANY] + [("two_documents", *row) for row in TWO],
)
def test_values_stand_with_their_own(task, answer, right, language):
    sample = make(task, language)
    names = (
        names_of(sample) if task == "multi_query" else {f"v{i}": v for i, v in enumerate(sample.expected, 1)}
    )
    for name, text in names.items():
        answer = answer.replace(name, text).replace(name.upper(), text.upper())
    assert score(sample, answer).right is right


def test_share_counts_values_with_their_own():
    sample = make("multi_query")
    assert score(sample, f"{sample.keys[1]}: {sample.expected[1]}").share == 0.25
    assert score(sample, f"{sample.keys[1]}: {sample.expected[0]}").share == 0
    assert score(make("multi_value"), " ".join(reversed(make("multi_value").expected))).right


@pytest.mark.parametrize("language", ["en", "zh"])
def test_words_and_names_and_codes(language):
    words = make("frequent_words", language)
    one, two, three = words.expected
    spare = {"en": ["acorn", "fox", "wolf", "owl"], "zh": ["猎鹰", "水獭", "灯塔", "风筝"]}[language]
    other = next(word for word in spare if word not in words.expected)
    assert score(words, f"{three.title()}, _{one}_ and **{two.upper()}**").right
    assert not score(words, f"{one}, {two}, {three}, {other}").right
    assert not score(words, f"{one}, {two}").right
    person = make("no_shared_words", language)
    (name,) = person.expected
    half = len(name) // 2 if language == "zh" else name.index(" ")
    assert score(person, f"**{name[:half]}**{name[half:].upper()} lives there.").right
    assert not score(person, name[:half]).right
    assert not score(person, name + {"en": " or Ada Abel", "zh": "或王明"}[language]).right
    code = make("kv_json", language)
    assert score(code, f'`"{code.expected[0].upper()}"`').right
    assert not score(code, f"{code.expected[0]}0").right


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_line_again_word_for_word(language):
    sample = make("repeated_request", language)
    (line,) = sample.expected
    others = [m["content"] for m in sample.chat if m["role"] == "assistant" and m["content"] != line]
    assert score(sample, line).right
    assert score(sample, f'Line: "{line[:-1]}"').right
    assert score(sample, line.upper()).right
    assert not score(sample, f"{line} {others[0]}").right
    assert not score(sample, line[:-4]).right
    assert not score(sample, others[-1]).right


ORDER = [
    ("W", True),
    ("The W was sold first.", True),
    ("The W was sold before the L.", True),
    ("The **W** was sold first. The L was sold second.", True),
    ("the W, then the L", True),
    ("The W was sold first, not the L.", True),
    ("The L was sold after the W.", True),
    ("The L was sold after the W, so the W was first.", True),
    ("W先被卖掉，L后被卖掉。", True),
    ("W在L之前被卖掉。", True),
    ("W比L先被卖掉。", True),
    ("W早于L。", True),
    ("先卖掉W，然后卖掉L。", True),
    ("L在W之后被卖掉。", True),
    ("L晚于W。", True),
    ("L", False),
    ("The L was sold before the W.", False),
    ("The L was sold first. The W was sold second.", False),
    ("The W was sold after the L.", False),
    ("The W was not sold before the L.", False),
    ("The W or the L was sold first.", False),
    ("Which was first, the W or the L?", False),
    ("The W and the L.", False),
    ("L在W之前被卖掉。", False),
    ("W在L之后被卖掉。", False),
    ("L先被卖掉，W后被卖掉。", False),
    ("W和L", False),
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("language", ["en", "zh"])
def test_order_may_name_both(language, seed):
    sample = build("order", encode, length=4000, depth=0.4, seed=seed, language=language)
    (winner,) = sample.expected
    text = sample.question.removeprefix("Which was sold first, the ")
    keys = text.rstrip("?").split(" or the ") if language == "en" else text.split("，")[0].split("和")
    (loser,) = set(keys) - {winner}
    for answer, right in ORDER:
        said = answer.replace("W", winner).replace("L", loser)
        said = said.replace(f"{winner}hich", "Which")
        assert score(sample, said).right is right, said


NUMBERS = {
    1: ("one", "once", "一"), 2: ("two", "twice", "两"), 3: ("three", "三"), 4: ("four", "四"),
    5: ("five", "五"), 6: ("six", "六"), 7: ("seven", "七"), 8: ("eight", "八"),
}  # fmt: skip


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("seed", range(8))
def test_counts_in_words(language, seed):
    sample = build("counting", encode, length=4000, depth=0.4, seed=seed, language=language)
    count = int(sample.expected[0])
    for number, (word, *others) in NUMBERS.items():
        said = [f"{number}", f"{number}.0", f"{number}次", word.title(), f"It rang {word} times."]
        said += [f"一共响了{others[-1]}次。", others[-1], f"{others[0]}"]
        for text in said:
            assert score(sample, text).right is (number == count), text
    for text in ("-{}", "{}.5", "{}th", "{}-12", "{} or twelve", "第{}x", "1{}", "{} 000"):
        assert not score(sample, text.format(count)).right, text
    assert not score(sample, "没有一点声音").share
    assert not score(sample, "第一次").right
    assert not score(sample, "No one knows it, one by one they left.").share
