"""The C library's heap: freed blocks are kept for the next, which looks like memory that is in use."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):  # no glibc
        return lambda keep: 0


def give_back_freed() -> None:
    """Give the system what the heap holds of freed blocks; nothing where the C library has no such function. Takes
    some ms: for moments when nothing is computed."""
    _trim()(0)
