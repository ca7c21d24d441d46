"""Lines at the head of a prompt that are another each time, and cost the reuse of all that stands behind them.

Clients, and some chat templates, put them there: billing lines, clocks, dates, ids. They are recognised and reported;
nobody but the client may take them out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HEAD_CHARS = 8192
"""Of a prompt that are looked at."""
SHOWN_CHARS = 120

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DATE = rf"(?:\d{{4}}[-/.]\d\d?[-/.]\d\d?|\d\d?[-/.]\d\d?[-/.]\d{{4}}|{_MONTH} \d\d?,? \d{{4}}|\d\d? {_MONTH} \d{{4}})"
_NOW = r"\b(?:today(?:'?s)?|current|now|local|date|time|timestamp)\b"
RULES = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("billing", r"^\W*[\w-]*billing[\w-]*\s*[:=]"),
        ("clock", rf"{_NOW}.{{0,40}}\d\d?:\d\d|^\W*{_DATE}[T ,]+\d\d?:\d\d"),
        ("date", rf"\b(?:today(?:'?s)?|current)\b(?: date)?.{{0,20}}?{_DATE}|^\W*date\W+{_DATE}\W*$"),
        ("id", r"\b(?:session|request|conversation|trace|thread|run)[ _-]?id\W{1,3}[0-9a-z][0-9a-z_-]{7,}"),
    )
)
"""Kind, and what a line of it looks like."""


@dataclass(frozen=True)
class Volatile:
    """Such a line. position: of its first character in the prompt. text: how it begins."""

    kind: str
    position: int
    text: str


def find_volatile(prompt: str) -> list[Volatile]:
    """Such lines in a prompt's head, in order."""
    found, position = [], 0
    for line in prompt[:HEAD_CHARS].splitlines(keepends=True):
        kind = volatile_kind(line)
        if kind is not None:
            found.append(Volatile(kind, position, line.strip()[:SHOWN_CHARS]))
        position += len(line)
    return found


def volatile_kind(line: str) -> str | None:
    """The kind of a line, None for one that stays as it is."""
    return next((kind for kind, pattern in RULES if pattern.search(line[:1000])), None)
