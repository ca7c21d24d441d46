"""Thinking models: the switch in their templates, and what of their output is thought and what is answer.

The output of such a model is `<think>` thought `</think>` answer; where the template ends with `<think>`, the
output starts inside the thought.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

from packhorse.core.errors import UsageError
from packhorse.text.template import ChatTemplate

OPEN, CLOSE = "<think>", "</think>"
_PROBE = [{"role": "user", "content": "?"}]


class Think(StrEnum):
    """Whether a model thinks before it answers; LOW asks for a short thought."""

    ON = "on"
    OFF = "off"
    LOW = "low"


def thinking_options(template: ChatTemplate, think: Think) -> dict[str, Any]:
    """The options of `ChatTemplate.render` that `think` stands for.

    Raises UsageError where the template would not do what is asked: it is tried out, so that a switch which
    changes nothing is found. A template that cannot think needs no switch to be OFF.
    """
    with_on = template.render(_PROBE, enable_thinking=True)
    with_off = template.render(_PROBE, enable_thinking=False)
    if think is Think.LOW:
        options: dict[str, Any] = {"reasoning_effort": "low"}
        if with_on != with_off:
            options["enable_thinking"] = True
        if template.render(_PROBE, **options) == with_on:
            raise UsageError(
                "--think low: the model's chat template does not read reasoning_effort.",
                hint="Give --think on or --think off, or leave it out.",
            )
        return options
    if with_on != with_off:
        return {"enable_thinking": think is Think.ON}
    if opens_thought(with_on) == (think is Think.ON):
        return {}
    does = "always lets it think" if think is Think.OFF else "does not let it think"
    raise UsageError(
        f"--think {think}: the model's chat template has no such switch (enable_thinking), and {does}.",
        hint="Leave --think out, or give another template with --chat-template FILE.",
    )


def opens_thought(prompt: str) -> bool:
    """Whether what follows the prompt (its end is enough) is a thought from the first character on."""
    return prompt.rstrip().endswith(OPEN)


def may_think(prompt: str, template: ChatTemplate) -> bool:
    """Whether a thought may follow the prompt: it opens one, or has none and the template knows thoughts."""
    return opens_thought(prompt) or (CLOSE in template.source and not prompt.rstrip().endswith(CLOSE))


class Split(NamedTuple):
    """New text of the thought and new text of the answer."""

    thought: str = ""
    answer: str = ""


class ThoughtSplitter:
    """Parts the text of an output into thought and answer as it comes.

    A thought is only recognised at the beginning; a later `<think>` is part of the answer. Text that may be
    the beginning of a mark is held back until it is clear. The line breaks around a thought belong to
    neither, and a closing mark written twice counts once.
    """

    def __init__(self, *, inside: bool, interrupt: str | None = None) -> None:
        """inside: the output starts inside the thought. interrupt: a mark that ends a thought which was not
        closed, and begins the answer (a tool call, for models that forget to close)."""
        self._held = ""
        self._marks = (CLOSE,) if interrupt is None else (CLOSE, interrupt)
        self._step: Callable[[], Split] = self._think if inside else self._begin
        self._at_start = inside

    def feed(self, text: str) -> Split:
        """What became clear with `text`."""
        self._held += text
        return self._step()

    def finish(self) -> Split:
        """What was held back; nothing follows."""
        held, self._held = self._held, ""
        return Split(thought=held) if self._step == self._think else Split(answer=held)

    def _begin(self) -> Split:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._held, self._step, self._at_start = text.removeprefix(OPEN), self._think, True
            return self._step()
        if OPEN.startswith(text):
            return Split()
        self._step = self._answer
        return self._step()

    def _think(self) -> Split:
        if self._at_start:
            self._held = self._held.lstrip("\n")
            self._at_start = not self._held
        ends = [(at, mark) for mark in self._marks if (at := self._held.find(mark)) >= 0]
        if ends:
            at, mark = min(ends)
            thought = self._held[:at].rstrip("\n")
            self._held, self._step = self._held[at:], self._gap if mark == CLOSE else self._answer
            return Split(thought, self._step().answer)
        # Line breaks are held with a half mark: the last ones before the mark are not part of the thought.
        half = max(overlap(self._held, mark) for mark in self._marks)
        body = self._held[: len(self._held) - half].rstrip("\n")
        self._held = self._held[len(body) :]
        return Split(thought=body)

    def _gap(self) -> Split:
        self._held = self._held.lstrip()
        while self._held.startswith(CLOSE):
            self._held = self._held.removeprefix(CLOSE).lstrip()
        if self._held and not CLOSE.startswith(self._held):
            self._step = self._answer
            return self._answer()
        return Split()

    def _answer(self) -> Split:
        text, self._held = self._held, ""
        return Split(answer=text)


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
