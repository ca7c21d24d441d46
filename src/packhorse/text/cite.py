"""Quotes with which an answer shows what it rests on, checked word for word against the documents."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from packhorse.text.documents import Document, page_list

CITE_REQUEST = (
    "\n\nAfter the answer write a line that says QUOTES, and below it the sentences of the text above that the "
    "answer rests on: word for word, each in double quotes on a line of its own."
)
"""Put behind a question whose answer is to be cited."""
MIN_QUOTE_CHARS = 12
"""Of a quote without such a heading: names in quotes are no evidence."""

_HEADING = re.compile(r"^[^\w\n]*quotes[^\w\n]*$", re.IGNORECASE | re.MULTILINE)
_QUOTED = re.compile(r'"([^"\n]+)"|“([^”\n]+)”')
_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])?\s*")


@dataclass(frozen=True)
class Citation:
    """A quote. verbatim: a document holds it, line breaks aside; then its name, and the numbers of all pages that
    the quote stands on, else None and none."""

    quote: str
    document: str | None
    pages: tuple[int, ...]
    verbatim: bool

    def __str__(self) -> str:
        if not self.verbatim:
            return f'NOT in the documents: "{self.quote}"'
        return f'{self.document}, page {page_list(self.pages)}: "{self.quote}"'


def check_quotes(answer: str, documents: Sequence[Document]) -> list[Citation]:
    """The quotes of an answer, each looked for in the documents."""
    return [_check(quote, documents) for quote in dict.fromkeys(find_quotes(answer))]


def find_quotes(answer: str) -> list[str]:
    """What stands below the last line QUOTES, line by line; without one whatever is quoted at some length."""
    headings = list(_HEADING.finditer(answer))
    if not headings:
        found = (a or b for a, b in _QUOTED.findall(answer))
        return [quote.strip() for quote in found if len(quote.strip()) >= MIN_QUOTE_CHARS]
    quotes: list[str] = []
    for line in answer[headings[-1].end() :].splitlines():
        quoted = [a or b for a, b in _QUOTED.findall(line)]
        quotes += quoted or [_BULLET.sub("", line)]
    return [quote.strip() for quote in quotes if quote.strip(' "“”')]


def _check(quote: str, documents: Sequence[Document]) -> Citation:
    pattern = re.compile(r"\s+".join(map(re.escape, quote.split())))
    for document in documents:
        pages: set[int] = set()
        for found in pattern.finditer(document.text):
            pages.update(range(document.page_of(found.start()), document.page_of(found.end() - 1) + 1))
        if pages:
            return Citation(quote, document.name, tuple(sorted(pages)), True)
    return Citation(quote, None, (), False)
