"""Tool calls in the two forms that these models write them, found in text as it comes.

    <tool_call>                               <tool_call>
    <function=NAME>                           {"name": NAME, "arguments": {KEY: VALUE}}
    <parameter=KEY>                           </tool_call>
    VALUE
    </parameter>
    </function>
    </tool_call>

The left one is the form of Qwen3.5 and later (qwen3_coder), the right one that of Hermes and Qwen2.5 to 3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from packhorse.core.errors import InvalidRequestError
from packhorse.text.reasoning import overlap
from packhorse.text.template import ChatTemplate

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BARE = "<function="
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*|\Z)\Z", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


class ToolFormat(StrEnum):
    """How a model writes its calls."""

    XML = "qwen3_coder"
    HERMES = "hermes"


@dataclass(frozen=True)
class ToolCall:
    """One call. arguments: a JSON object as text."""

    name: str
    arguments: str


def tool_format(template: ChatTemplate) -> ToolFormat:
    """The form that a chat template teaches its model.

    Raises InvalidRequestError where the template does nothing with tools, or shows neither form.
    """
    source = template.source
    if re.search(r"\btools\b", source) and OPEN in source:
        return ToolFormat.XML if _BARE in source else ToolFormat.HERMES
    raise InvalidRequestError(
        "The model's chat template does not know tools in a form that is read here.",
        hint=f"Leave tools out, or use a model whose template writes {OPEN} (Qwen, Hermes).",
        field="tools",
    )


class ToolCallSplitter:
    """Parts an answer into text and calls as it comes.

    What cannot be read as a call of one of `tools` stays text, character for character: nothing is lost.
    Text that may be the beginning of a call is held back until it is clear.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """tools: as in a request, `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""
        self._parameters = {
            tool["function"]["name"]: (tool["function"].get("parameters") or {}).get("properties") or {}
            for tool in tools
        }
        self._held = ""
        self._at_start = True
        self._blank = ""

    def feed(self, text: str) -> list[str | ToolCall]:
        """What became clear with `text`, in order."""
        self._held += text
        return self._joined(self._advance())

    def finish(self) -> list[str | ToolCall]:
        """What was held back; nothing follows. A call that only lacks its end marks still counts."""
        parts = list(self._advance())
        held, self._held = self._held, ""
        if held:
            call = self._read(held.removeprefix(OPEN)) if held.startswith((OPEN, _BARE)) else None
            parts.append(held if call is None else call)
        return self._joined(parts)

    def _advance(self) -> Iterator[str | ToolCall]:
        while self._held:
            start = self._call_start()
            if start:
                yield self._held[:start]
                self._held = self._held[start:]
            end_mark = CLOSE if self._held.startswith(OPEN) else "</function>"
            head, found, rest = self._held.partition(end_mark)
            if not found or not self._held.startswith((OPEN, _BARE)):
                return
            call = self._read(head.removeprefix(OPEN) + (found if found != CLOSE else ""))
            # After a bare function some models still write the end mark of the call.
            self._held = rest.removeprefix("\n").removeprefix(CLOSE) if call and found != CLOSE else rest
            yield head + found if call is None else call

    def _call_start(self) -> int:
        """Characters of the held text that are before any call, or the beginning of its mark."""
        found = [at for mark in (OPEN, _BARE) if (at := self._held.find(mark)) >= 0]
        if found:
            return min(found)
        keep = max(overlap(self._held, mark) for mark in (OPEN, _BARE))
        return len(self._held) - keep

    def _read(self, body: str) -> ToolCall | None:
        """The call that a body spells, in either form; None for anything else."""
        match = _FUNCTION.match(body)
        if match is not None:
            name = match[1].strip()
            arguments = _xml_arguments(match[2], self._parameters.get(name))
        else:
            try:
                call = json.loads(body)
                name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                return None
        if name not in self._parameters or not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))

    def _joined(self, parts: Sequence[str | ToolCall] | Iterator[str | ToolCall]) -> list[str | ToolCall]:
        """Parts without the blank text around calls, which belongs to the form and not to the answer."""
        joined: list[str | ToolCall] = []
        for part in parts:
            if isinstance(part, ToolCall):
                self._blank, self._at_start = "", True
                joined.append(part)
            elif self._at_start and not part.strip():
                self._blank += part
            else:
                joined.append(self._blank + part)
                self._blank, self._at_start = "", False
        return joined


def _xml_arguments(text: str, properties: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Arguments of a call in the XML form, by the types of its parameters; None where the text is no list of
    parameters."""
    arguments: dict[str, Any] = {}
    at = 0
    while match := _PARAMETER.match(text, at):
        key = match[1].strip()
        value = match[2].removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(value, (properties or {}).get(key))
        at = match.end()
    return arguments if not text[at:].strip() else None


def _typed(value: str, schema: Any) -> Any:
    """A value as its schema types it; as text where the schema says nothing or the text is no such value."""
    kinds = _kinds(schema)
    if not kinds or kinds == {"string"}:
        return value
    if value.strip().lower() in ("true", "false", "null", "none"):
        plain: Any = {"true": True, "false": False}.get(value.strip().lower())
        wanted = "null" if plain is None else "boolean"
        return plain if wanted in kinds or "string" not in kinds else value
    if "string" in kinds:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _kinds(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else []:
            kinds |= _kinds(option)
    return kinds
