"""Thought and tool calls found in text, however it is cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.core.errors import InvalidRequestError
from packhorse.text.reasoning import ThoughtSplitter
from packhorse.text.template import ChatTemplate
from packhorse.text.tools import ToolCall, ToolCallSplitter, ToolFormat, tool_format

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "metric": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                    "tags": {"type": "array"},
                    "note": {"type": ["string", "null"]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
XML = "<tool_call>\n<function=weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Chur"}}\n</tool_call>'


def pieces(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({c % (len(text) + 1) for c in cuts} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def split(text: str, cuts: list[int] | None = None) -> list[str | ToolCall]:
    """The parts, neighbouring texts joined."""
    splitter = ToolCallSplitter(TOOLS)
    found = [part for piece in pieces(text, cuts or []) for part in splitter.feed(piece)] + splitter.finish()
    joined: list[str | ToolCall] = []
    for part in found:
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def call(name: str, **arguments) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (XML.format("Chur"), [call("weather", city="Chur")]),
        (HERMES, [call("weather", city="Chur")]),
        ("I look.\n" + HERMES + "\n" + HERMES, ["I look.\n"] + 2 * [call("weather", city="Chur")]),
        ("\n\n" + HERMES + "\n", [call("weather", city="Chur")]),
        (XML.format("a\n\nb <b>"), [call("weather", city="a\n\nb <b>")]),
        ("<tool_call>\n<function=stop>\n</function>\n</tool_call>", [call("stop")]),
        # What models forget: the first mark, the last one, the end of a parameter.
        (XML.format("Chur").removeprefix("<tool_call>\n"), [call("weather", city="Chur")]),
        (XML.format("Chur").removesuffix("\n</tool_call>"), [call("weather", city="Chur")]),
        (XML.format("Chur").replace("</parameter>\n", ""), [call("weather", city="Chur")]),
        ('<tool_call>{"name": "weather", "arguments": "{\\"days\\": 2}"}', [call("weather", days=2)]),
        # What is no call stays text.
        ("<tool_call>\n{broken\n</tool_call> so", ["<tool_call>\n{broken\n</tool_call> so"]),
        ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',) * 2,
        ("a < b and <tool", ["a < b and <tool"]),
        ("<tool_call>\n<function=weather>\nloose words\n</function>\n</tool_call>",) * 2,
        ("", []),
    ],
)  # fmt: skip
def test_calls_are_found_and_nothing_is_lost(text, parts):
    assert split(text) == ([parts] if isinstance(parts, str) else parts)


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("city", "007", "007"),
        ("city", "true", "true"),
        ("days", "3", 3),
        ("days", "three", "three"),
        ("metric", "True", True),
        ("metric", "null", None),
        ("tags", '["a", {"b": 1}]', ["a", {"b": 1}]),
        ("note", "null", None),
        ("note", "12", "12"),
        ("unknown", "12", "12"),
    ],
)
def test_values_have_the_types_of_the_schema(key, written, value):
    text = XML.replace("city", key).format(written)
    assert split(text) == [call("weather", **{key: value})]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([HERMES, XML.format("é"), "text ", "<tool_", "\n", "<", "call>"]), max_size=6),
    st.lists(st.integers(0, 600), max_size=8),
)
def test_how_the_text_is_cut_changes_nothing(parts, cuts):
    text = "".join(parts)
    assert split(text, cuts) == split(text)


THOUGHTS = [
    ("so\n</think>\n\nyes", "so", "yes"),
    ("so</think></think>\nyes", "so", "yes"),
    ("never closed", "never closed", ""),
    ("hm\n<tool_call>x", "hm", "<tool_call>x"),
    ("</think>a </think>", "", "a </think>"),
    ("a</think>\n</thi", "a", "</thi"),
]


@pytest.mark.parametrize(("text", "thought", "answer"), THOUGHTS)
@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_thoughts(text, thought, answer, size):
    splitter = ThoughtSplitter(inside=True, interrupt="<tool_call>")
    parts = [splitter.feed(text[i : i + size]) for i in range(0, len(text), size)] + [splitter.finish()]
    assert "".join(p.thought for p in parts) == thought
    assert "".join(p.answer for p in parts) == answer


def test_formats_are_read_from_the_template():
    xml = ChatTemplate("{% if tools %}<tool_call><function=x>{% endif %}")
    hermes = ChatTemplate('{% if tools %}<tool_call>{"name": ...}{% endif %}')
    assert tool_format(xml) is ToolFormat.XML
    assert tool_format(hermes) is ToolFormat.HERMES
    with pytest.raises(InvalidRequestError, match="does not know tools"):
        tool_format(ChatTemplate("{{ messages }}"))
