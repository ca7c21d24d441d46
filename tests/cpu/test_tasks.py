"""Recall tasks: exact to the token, same from the same seed, true to what they hide, scored as documented."""

import itertools
import os
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import tokenizers

from packhorse.core.errors import DoesNotFitError, UsageError
from packhorse.verify import words as w
from packhorse.verify.makers import MAKERS
from packhorse.verify.tasks import LANGUAGES, TASKS, Sample, build, build_together, read_haystack, score

ASSETS = Path(__file__).parents[2] / "assets"


@cache
def recall_tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(ASSETS / "recall-hybrid" / "tokenizer.json"))


@cache
def merging_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE with merges across words of this text: lengths of parts do not add up."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the special number for the old harbor is 482913. The clerk"] * 9, trainer)
    return tokenizer


def recall_chat(chat: list[dict[str, str]]) -> list[int]:
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat)
    return recall_tokenizer().encode(f"{text}<|im_start|>assistant\n").ids


def other_chat(chat: list[dict[str, str]]) -> list[int]:
    text = "".join(f"[{m['role']}] {m['content']}\n" for m in chat)
    return merging_tokenizer().encode(f"{text}[assistant]").ids


def make(task: str, **changes) -> Sample:
    settings = {"length": 1500, "depth": 0.4, "seed": 3} | changes
    return build(task, recall_chat, **settings)


def text_of(sample: Sample) -> str:
    return "\n".join(m["content"] for m in sample.chat)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("encode", [recall_chat, other_chat])
def test_prompts_are_exact_to_the_token(task, language, encode):
    for length in (1487, 1488):
        sample = build(task, encode, length=length, depth=0.5, seed=1, language=language)
        assert len(sample.token_ids) == length
        assert list(sample.token_ids) == encode(sample.chat)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("task", TASKS)
def test_the_right_reply_scores_and_no_answer_or_a_wrong_one_does_not(task, language):
    sample = make(task, language=language)
    other = make(task, language=language, seed=4)
    assert sample.expected
    assert score(sample, sample.reply).right
    assert not score(sample, "").right
    assert not score(sample, "I do not know.").right
    if sample.expected != other.expected and task not in ("frequent_words", "common_words"):
        assert not score(sample, other.reply).right


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_sample_and_other_seed_another(task):
    assert make(task) == make(task)
    assert make(task).token_ids != make(task, seed=5).token_ids


@pytest.mark.parametrize("task", sorted(set(TASKS) - {"counting", "no_shared_words"}))
def test_what_is_asked_for_is_in_the_document(task):
    sample = make(task)
    assert all(value in text_of(sample) for value in sample.expected)


@pytest.mark.parametrize("task", ["single", "multi_key", "kv_json", "multi_value"])
def test_depth_is_where_the_fact_lies(task):
    length = 4000
    for depth in (0.0, 0.25, 0.5, 1.0):
        text = text_of(make(task, length=length, depth=depth))
        sample = make(task, length=length, depth=depth)
        at = text.index(sample.expected[0]) / len(text)
        assert abs(at - depth) < 0.06


@pytest.mark.parametrize("task", ["single", "multi_key", "kv_json", "variables", "clauses"])
@pytest.mark.parametrize("encode", [recall_chat, other_chat])
def test_questions_about_one_document_differ_in_question_and_padding_alone(task, encode):
    depths = (0.0, 0.9, 0.4)
    samples = build_together(task, encode, length=2000, depths=depths, seed=3)
    assert [(len(s.token_ids), s.depth) for s in samples] == [(2000, depth) for depth in depths]
    assert len({s.expected for s in samples}) == len({s.question for s in samples}) == 3
    document = os.path.commonprefix([text_of(s) for s in samples])  # noqa: RUF071 - by character
    assert all(len(text_of(s)) - len(document) < len(s.question) + 60 for s in samples)
    # (A clause's duty is asked for, which its number stands before.)
    places = [min(document.index(value) for value in s.expected) for s in samples]
    assert sorted(places) == [places[0], places[2], places[1]]
    (alone,) = build_together(task, encode, length=2000, depths=(0.4,), seed=3)
    assert alone == build(task, encode, length=2000, depth=0.4, seed=3)


def test_density_is_the_number_of_distractors():
    for density, expected in ((0.0, 1), (2.0, 7), (10.0, 31)):
        sample = make("multi_key", length=3000, density=density)
        assert text_of(sample).count("The special number for") == expected


def test_naming_a_distractor_beside_the_answer_is_wrong():
    sample = make("multi_value")
    assert score(sample, f"{sample.reply} Or 999999.").share == 0
    partial = score(sample, f"It is {sample.expected[0]}.")
    assert not partial.right
    assert partial.share == 0.25


def test_full_width_digits_are_digits():
    sample = make("single", language="zh")
    wide = sample.expected[0].translate({ord(str(d)): chr(0xFF10 + d) for d in range(10)})
    assert score(sample, f"是{wide}。").right


def test_counting_counts_what_the_document_says():
    for seed in range(6):
        sample = make("counting", seed=seed)
        key = sample.question.split(" by the ")[1].rstrip("?")
        assert text_of(sample).count(f"The bell rang by the {key}.") == int(sample.expected[0])


def test_order_names_the_first():
    for seed in range(8):
        sample = make("order", seed=seed)
        text = text_of(sample)
        keys = sample.question.rstrip("?").partition("the ")[2].split(" or the ")
        first = min(keys, key=lambda k: text.index(f"Then the {k} was sold."))
        assert sample.expected == (first,)


def test_clauses_refer_to_the_clause_before_them():
    sample = make("clauses", length=3000)
    own = sample.question.split("clause ")[1].split(" ")[0]
    lines = {line.split(".")[0]: line for line in text_of(sample).splitlines() if line.startswith("Clause")}
    ref = lines[f"Clause {own}"].split("in clause ")[1].split(" ")[0]
    assert int(ref) < int(own)
    assert sample.expected[0] in lines[f"Clause {ref}"]


def test_variables_chain_leads_to_the_number():
    sample = make("variables")
    text, name = text_of(sample), sample.question.split("VAR ")[1].split("?")[0]
    for _ in range(2):
        name = text.split(f"VAR {name} = VAR ")[1].split(".")[0]
    assert f"VAR {name} = {sample.expected[0]}." in text


def test_frequent_words_are_the_most_frequent():
    sample = make("frequent_words", length=2000)
    words = sample.chat[0]["content"].split("\n\n")[1].split()
    counts = sorted((words.count(word) for word in set(words) - {"the"}), reverse=True)
    assert sorted((words.count(w) for w in sample.expected), reverse=True) == counts[:3]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("density", [None, 1.0, 6.0, 7.0])
def test_the_repeated_request_comes_three_times_and_its_line_is_expected(density, language):
    for seed in range(12):
        sample = make("repeated_request", length=2000, seed=seed, density=density, language=language)
        said = [m["content"] for m in sample.chat]
        topic = re.search(r"about the (\w+),|关于(.+)的第", sample.question)
        ask = f"Write a line about the {topic[1]}." if topic[1] else f"写一句关于{topic[2]}的话。"
        assert said.count(ask) == 3
        lines = [reply for asked, reply in itertools.pairwise(said) if asked == ask]
        assert sample.expected == (lines[int(re.search(r"\d", sample.question)[0]) - 1],)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("density", [0.0, None, 8.0, 30.0])
def test_two_documents_hold_a_value_each(density, language):
    for depth, seed in itertools.product((0.0, 0.1, 0.5, 0.9, 1.0), range(8)):
        sample = make(
            "two_documents", length=1024, depth=depth, seed=seed, density=density, language=language
        )
        first, second = re.split(r"\n\n(?:Document 2|文件二)", text_of(sample))
        assert [(value in first, value in second) for value in sample.expected] == [
            (True, False),
            (False, True),
        ]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(("task", "asked"), [("frequent_words", 3), ("common_words", 5)])
def test_no_word_is_as_frequent_as_the_last_that_is_asked_for(task, asked, language):
    for length, seed in itertools.product((150, 256, 300), range(20)):
        sample = make(task, length=length, seed=seed, language=language)
        text = text_of(sample).split("\n\n")[1]
        nouns = w.NOUNS if language == "en" else w.ZH_NOUNS
        counts = Counter(re.findall("|".join(sorted(nouns, key=len, reverse=True)), text)).most_common(
            asked + 1
        )
        assert {word for word, _ in counts[:asked]} == set(sample.expected)
        assert counts[asked - 1][1] > counts[asked][1]


def test_a_document_too_short_to_have_one_right_answer_is_refused():
    with pytest.raises(UsageError, match="None of 100 documents of 32 tokens for frequent_words"):
        make("frequent_words", length=32)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("task", ["counting", "variables", "repeated_request"])
def test_a_density_that_does_not_fit_is_refused_with_one_that_does(task, language):
    with pytest.raises(DoesNotFitError, match="without any filler, and 1,100 were asked for") as found:
        make(task, length=1100, density=50.0, language=language)
    density = float(re.search(r"Give --density ([\d.]+) or less", found.value.hint)[1])
    assert density > 1
    for seed in range(8):
        make(task, length=1100, density=density, seed=seed, language=language)


def test_a_length_that_does_not_fit_is_refused_with_one_that_does():
    with pytest.raises(DoesNotFitError) as found:
        make("multi_value", length=90, density=50.0)
    length = int(re.search(r"Ask for (\d+) tokens or more", found.value.hint)[1])
    assert make("multi_value", length=length, density=0.0).length == length


ENGLISH, CHINESE = "the old clerk mended seven ropes by the mill ", "老人在早上修好了几张旧地图然后去了市场"
DOCS = "\n".join(file.read_text() for file in sorted((Path(__file__).parents[2] / "docs").glob("*.md")))
WRITTEN = {
    "lines": "\n".join(f"{ENGLISH}{number}" for number in range(3000)),
    "english": ENGLISH * 9000,
    "chinese": CHINESE * 9000,
    "code": "abcdefgh" * 9000,
    "docs": DOCS,
}


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("written", WRITTEN)
def test_a_haystack_is_used_whatever_its_lines_are_like(written, language, tmp_path):
    (tmp_path / "a.TXT").write_text(WRITTEN[written])
    haystack = read_haystack(tmp_path)
    assert max(map(len, haystack)) <= 240
    blank = str.maketrans("", "", " \n")
    assert (
        "".join(haystack).translate(blank) == WRITTEN[written].replace("\t", "").translate(blank)
        or written == "docs"
    )
    own = set("".join(haystack)) | {" "}
    for length, encode in itertools.product((700, 2000), (recall_chat, other_chat)):
        sample = build(
            "single", encode, length=length, depth=0.5, seed=1, language=language, haystack=haystack
        )
        body = sample.chat[0]["content"].split("\n\n", 1)[1].removesuffix(f"\n\n{sample.question}")
        pad = re.search(r"(( the)*|( and)*|( a)*|( so)*|( x)*|\.*|( 1)*|\n*)$", body)[0]
        assert len(encode([{"role": "user", "content": pad}])) < 0.04 * length + 8
        fact = sample.reply
        assert set(body.removesuffix(pad).replace(fact, "")) <= own
        assert length < 2000 or 0.3 < body.index(fact) / len(body) < 0.7


def test_an_endless_line_costs_no_time(tmp_path):
    (tmp_path / "a.txt").write_text(ENGLISH * 10_000)
    haystack = read_haystack(tmp_path)
    counted: list[int] = []

    def encode(chat: list[dict[str, str]]) -> list[int]:
        ids = recall_chat(chat)
        counted.append(len(ids))
        return ids

    build("single", encode, length=1000, depth=0.5, seed=1, haystack=haystack)
    assert sum(counted) < 40_000


def test_words_of_a_haystack_stay_whole(tmp_path):
    (tmp_path / "a.txt").write_text(ENGLISH * 100)
    assert set(" ".join(read_haystack(tmp_path)).split()) == set(ENGLISH.split())


def test_special_tokens_of_a_haystack_are_text(tmp_path):
    (tmp_path / "a.txt").write_text("It ends.<|im_end|>\n<|im_start|>user <think> </s> a < b. One > two.")
    haystack = read_haystack(tmp_path)
    sample = make("single", haystack=haystack, length=600)
    assert sample.token_ids.count(recall_tokenizer().token_to_id("<|im_end|>")) == 1
    assert "< |im_end|>" in text_of(sample)
    assert "a < b." in text_of(sample)


@pytest.mark.parametrize(
    "content", [b"\x89PNG\r\n\x1a\n\0\0", b"plain \0 text", "Gr\u00fc\u00dfe".encode("latin-1")]
)
def test_a_file_that_is_no_text_is_named(content, tmp_path):
    (tmp_path / "good.txt").write_text("A sentence.")
    (tmp_path / "bad.md").write_bytes(content)
    with pytest.raises(UsageError, match=r"bad\.md cannot be read: it is no text in UTF-8") as found:
        read_haystack(tmp_path)
    assert "--haystack" in found.value.hint


def test_haystack_of_ones_own_files(tmp_path):
    (tmp_path / "a.txt").write_text("Der Turm steht am Fluss. Er ist alt.\n\nNiemand weiss wie alt.")
    (tmp_path / "b.md").write_text("Ein zweiter Text! Mit zwei Saetzen.")
    haystack = read_haystack(tmp_path)
    assert len(haystack) == 5
    sample = make("multi_key", haystack=haystack, length=1000)
    assert "Niemand weiss wie alt." in text_of(sample)
    assert score(sample, sample.reply).right


def test_refusals_name_what_is_wrong(tmp_path):
    with pytest.raises(UsageError, match="no task 'nope'"):
        make("nope")
    with pytest.raises(UsageError, match="no language 'fr'"):
        make("single", language="fr")
    with pytest.raises(UsageError, match=r"depth is 1\.5"):
        make("single", depth=1.5)
    with pytest.raises(UsageError, match=r"density is 99"):
        make("multi_key", density=99.0)
    with pytest.raises(UsageError, match="takes no haystack"):
        make("kv_json", haystack=["a."])
    with pytest.raises(UsageError, match="holds no text"):
        read_haystack(tmp_path)
    with pytest.raises(UsageError, match=f"There is no folder {tmp_path / 'none'}"):
        read_haystack(tmp_path / "none")
    with pytest.raises(DoesNotFitError, match="without any filler, and 20 were asked for"):
        make("multi_key", length=20)
    with pytest.raises(DoesNotFitError, match="has names for"):
        make("multi_key", language="zh", length=60_000, density=40.0)


def test_every_task_has_a_maker():
    assert list(MAKERS) == list(TASKS)
    assert len(TASKS) == 14
