"""Thought and answer are told apart however the text is cut; switches that change nothing are refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chats import PLAIN, THINKING
from packhorse.core.errors import UsageError
from packhorse.text.reasoning import (
    Think,
    ThoughtSplitter,
    may_think,
    opens_thought,
    thinking_options,
)
from packhorse.text.template import ChatTemplate

QWEN3 = THINKING.replace("~ '<think>\\n' }}", "}}")
ALWAYS = PLAIN.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")


def split(pieces: list[str], inside: bool) -> tuple[str, str]:
    splitter = ThoughtSplitter(inside=inside)
    parts = [*map(splitter.feed, pieces), splitter.finish()]
    return "".join(p.thought for p in parts), "".join(p.answer for p in parts)


CASES = [
    # inside, output, thought, answer
    (True, "hm\n\nwell\n</think>\n\nNine.", "hm\n\nwell", "Nine."),
    (True, "\nhm</think>Nine.\n", "hm", "Nine.\n"),
    (True, "</think>\n\nNine.", "", "Nine."),
    (True, "cut off in thou", "cut off in thou", ""),
    (True, "a < b </thin k", "a < b </thin k", ""),
    (True, "half a mark </thi", "half a mark </thi", ""),
    (True, "hm</think>\n", "hm", ""),
    (False, "<think>\nhm\n</think>\n\nNine.", "hm", "Nine."),
    (False, "\n <think>hm</think> Nine.", "hm", "Nine."),
    (False, "Nine.", "", "Nine."),
    (False, "  Nine.", "", "  Nine."),
    (False, "<thin air> has nine.", "", "<thin air> has nine."),
    (False, "Nine <think>not a thought</think>", "", "Nine <think>not a thought</think>"),
    (False, "<thi", "", "<thi"),
    (False, "", "", ""),
    (True, "hm</think>Nine </think> <think>", "hm", "Nine </think> <think>"),
]


@pytest.mark.parametrize(("inside", "output", "thought", "answer"), CASES)
def test_split(inside, output, thought, answer):
    assert split([output], inside) == (thought, answer)
    assert split(list(output), inside) == (thought, answer)


@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "</th", "<", "a", "\n", " "]), max_size=12).map(
        "".join
    ),
    inside=st.booleans(),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_split_does_not_depend_on_how_text_comes(text, inside, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(pieces, inside) == split([text], inside)


def test_answers_are_not_held_back():
    splitter = ThoughtSplitter(inside=False)
    assert splitter.feed("Nine") == ("", "Nine")
    assert splitter.feed(" mules <") == ("", " mules <")


@pytest.mark.parametrize(
    ("source", "think", "options"),
    [
        (THINKING, Think.ON, {"enable_thinking": True}),
        (THINKING, Think.OFF, {"enable_thinking": False}),
        (THINKING, Think.LOW, {"enable_thinking": True, "reasoning_effort": "low"}),
        (QWEN3, Think.ON, {"enable_thinking": True}),
        (ALWAYS, Think.ON, {}),
        (PLAIN, Think.OFF, {}),
    ],
)
def test_switch(source, think, options):
    assert thinking_options(ChatTemplate(source), think) == options


@pytest.mark.parametrize(
    ("source", "think", "words"),
    [
        (PLAIN, Think.ON, "does not let it think"),
        (PLAIN, Think.LOW, "reasoning_effort"),
        (ALWAYS, Think.OFF, "always lets it think"),
        (ALWAYS, Think.LOW, "reasoning_effort"),
        (THINKING.replace("reasoning_effort", "effort"), Think.LOW, "reasoning_effort"),
        # Named in the template, and without effect.
        (PLAIN + "{# enable_thinking #}", Think.ON, "no such switch"),
    ],
)
def test_switch_that_would_do_nothing(source, think, words):
    with pytest.raises(UsageError, match=words):
        thinking_options(ChatTemplate(source), think)


def test_what_a_prompt_leads_to():
    template = ChatTemplate(THINKING)
    chat = [{"role": "user", "content": "?"}]
    opened, closed = template.render(chat), template.render(chat, enable_thinking=False)
    assert opens_thought(opened) and not opens_thought(closed)
    assert may_think(opened, template) and not may_think(closed, template)
    assert may_think(ChatTemplate(QWEN3).render(chat), ChatTemplate(QWEN3))
    assert not may_think(ChatTemplate(PLAIN).render(chat), ChatTemplate(PLAIN))
