"""How much a template's filters, methods and `%` would build, told from their arguments before they run.

Each estimate is a number of characters (bytes, items of a list) that the result does not exceed by more than
the small factor that escaping takes. Arguments of types that the operation refuses count as nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sized
from typing import Any

_NUMBER = re.compile(r"\d+")


def shallow_size(value: Any) -> int:
    """Characters of a text, items of a collection, 1 for the rest."""
    return len(value) + 1 if isinstance(value, str | bytes | list | tuple | dict) else 1


def text_size(value: Any, limit: int, indent: int = 0, between: int = 2) -> int:
    """Characters of a value written as text, or any number above `limit` as soon as it is passed.

    indent: characters before each item and level, between: around each item (JSON).
    """
    total, level, row = 0, 0, [value]
    while row and total <= limit:
        level += 1
        deeper: list[Any] = []
        for item in row:
            total += between + indent * level
            if isinstance(item, str | bytes):
                total += len(item)
            elif isinstance(item, Mapping):
                deeper += item.keys()
                deeper += item.values()
            elif isinstance(item, list | tuple | set | frozenset):
                deeper += item
            else:
                total += 20
            if total + len(deeper) > limit:
                return total + len(deeper)
        row = deeper
    return total


def width_of(spec: str) -> int:
    """The widths and precisions that a format asks for, in sum at most."""
    # 15 digits are more than anything may build, and Python refuses to read numbers of thousands.
    return sum(int(number[:15]) for number in _NUMBER.findall(spec))


def percent_size(text: str | bytes, args: Any, limit: int) -> int:
    """`text % args`: its own characters, the widths in it or given for a `*`, and the values it names."""
    form = text if isinstance(text, str) else text.decode("latin-1")
    named = isinstance(args, Mapping)
    values = list(args.values()) if named else list(args) if isinstance(args, tuple) else [args]
    stars = sum(abs(value) for value in values if isinstance(value, int)) if "*" in form else 0
    # By name a value may be written many times.
    times = form.count("%") if named else 1
    return len(form) + width_of(form) + stars + times * text_size(values, limit)


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 0


def _replaced(text: Any, old: Any, new: Any, count: Any = None) -> int:
    text = text if isinstance(text, str | bytes) else str(text)
    if not isinstance(old, type(text)) or not isinstance(new, type(text)):
        return 0
    times = text.count(old)
    if isinstance(count, int) and count >= 0:
        times = min(times, count)
    return len(text) + times * max(0, len(new) - len(old))


def _indented(text: Any, width: Any = 4, first: Any = False, blank: Any = False) -> int:
    step = len(width) if isinstance(width, str) else _number(width)
    return _length(text) + step * (1 + len(str(text).splitlines()))


def _wrapped(
    text: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = None, hyphens: Any = True
) -> int:
    return _length(text) * (1 + _length(wrapstring))


def _tabs(text: Any, tabsize: Any = 8) -> int:
    return _length(text) + text.count("\t" if isinstance(text, str) else b"\t") * _number(tabsize)


def _translated(text: Any, table: Any, *rest: Any) -> int:
    longest = max((_length(v) for v in table.values()), default=1) if isinstance(table, dict) else 1
    return len(text) * max(1, longest)


def _padded(text: Any, width: Any = 80, *rest: Any) -> int:
    return _length(text) + _number(width)


TEXT_FILTERS = frozenset(
    {
        "capitalize", "center", "e", "escape", "float", "forceescape", "format", "indent", "int", "join",
        "lower", "pprint", "replace", "safe", "string", "striptags", "sum", "title", "tojson", "trim",
        "truncate", "upper", "urlencode", "wordcount", "wordwrap", "xmlattr",
    }
)  # fmt: skip
"""Filters that write lists and dicts as text, given as their value or as arguments, or add them up."""

FILTER_SIZES: dict[str, Callable[..., int]] = {
    "center": _padded,
    "indent": _indented,
    "replace": _replaced,
    "wordwrap": _wrapped,
    "batch": lambda value, linecount, fill_with=None: 0 if fill_with is None else _number(linecount),
}
"""Of filters by name; called as the filter is, without its context."""

METHOD_SIZES: dict[str, Callable[..., int]] = {
    "center": _padded,
    "ljust": _padded,
    "rjust": _padded,
    "zfill": _padded,
    "expandtabs": _tabs,
    "replace": _replaced,
    "translate": _translated,
}
"""Of methods of str and bytes by name; called with the text first."""
