"""Sizes: bytes in code, GiB in print."""

from __future__ import annotations

import re

from packhorse.core.errors import UsageError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `10.4GiB`, `512MiB`, `2GB` (powers of ten), `4096B` or bytes alone.

    Raises UsageError where the text is not a size, and for one below 1 MiB without a unit, but 0: it is meant in GiB.
    """
    match = _SIZE.match(text)
    if match is None:
        raise UsageError(f"{text!r} is not a size.", hint="Write it like 10.4GiB or 512MiB.")
    number, prefix, binary = match.groups()
    if text.strip() == number and 0 < float(number) < MIB:
        hint = f"Write {number}GiB, or {number}B for bytes."
        raise UsageError(f"{text!r} has no unit, and is too little in bytes.", hint=hint)
    base = 1024 if binary or not prefix else 1000
    return int(float(number) * base ** _POWER[prefix.lower()])


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` as GiB, MiB or KiB for print, two decimals."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def ceil_div(value: int, by: int) -> int:
    """The least n with n * by >= value."""
    return -(-value // by)


def round_up(value: int, to: int) -> int:
    """`value` raised to the next multiple of `to`."""
    return ceil_div(value, to) * to
