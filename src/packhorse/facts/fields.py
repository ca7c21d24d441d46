"""Typed reads from files that nobody vouches for: every wrong value is named with its field and file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packhorse.core.errors import CorruptFileError, RefusedError
from packhorse.core.units import MIB, format_bytes

MAX_JSON_BYTES = 64 * MIB
"""A config or tokenizer_config larger than this is not one."""
MAX_DIM = 2**31 - 1
"""No dimension, count or position reaches this."""


def read_bytes(file: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """The whole of a small file.

    Raises RefusedError where the system does not let us read it, CorruptFileError above `limit` bytes.
    """
    try:
        size = file.stat().st_size
        if size > limit:
            raise CorruptFileError(
                f"{file} holds {format_bytes(size)}; such a file may have {format_bytes(limit)}.",
                hint="Check that it is the right file.",
                bytes=size,
                limit=limit,
            )
        return file.read_bytes()
    except OSError as error:
        raise RefusedError(
            f"{file} cannot be read: {error.strerror or error}.", hint="Check the path and its permissions."
        ) from error


def parse_object(data: bytes, what: str, *, unique: bool = False) -> dict[str, Any]:
    """A JSON object. `unique` refuses keys that occur twice in one object.

    Raises CorruptFileError where the bytes are no UTF-8, no JSON or no object.
    """
    hook = _unique_keys if unique else None
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=hook)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(
            f"{what} is not JSON: {error}.", hint="The file is damaged: fetch it again."
        ) from error
    if not isinstance(value, dict):
        raise CorruptFileError(
            f"{what} holds a {type(value).__name__}, not an object.",
            hint="The file is damaged: fetch it again.",
        )
    return value


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a small file. Raises what `read_bytes` and `parse_object` raise."""
    return parse_object(read_bytes(file), str(file))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} occurs twice")
            seen.add(key)
    return found


class Fields:
    """Fields of a config.json or of GGUF metadata, read as what they must be.

    `None` counts as absent. Every method raises CorruptFileError naming file, field and value where the value
    has another type or is out of range, and where the field is absent and has no default.
    """

    def __init__(self, values: Mapping[str, Any], file: Path, prefix: str = "") -> None:
        self.values = values
        self.file = file
        self.prefix = prefix

    def get(self, name: str) -> Any:
        """The raw value, or None."""
        return self.values.get(self.prefix + name)

    def wrong(self, name: str, value: object, must_be: str) -> CorruptFileError:
        """The error for a value that cannot be."""
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return CorruptFileError(
            f"{self.file}: {self.prefix}{name} is {shown}, and must be {must_be}.",
            hint="The file is damaged or was edited: fetch it again or correct the field.",
            field=self.prefix + name,
            value=shown,
        )

    def _absent(self, name: str) -> CorruptFileError:
        return CorruptFileError(
            f"{self.file} does not say {self.prefix}{name}.",
            hint="The file is incomplete: fetch it again.",
            field=self.prefix + name,
        )

    def maybe_integer(self, name: str, *, low: int = 1, high: int = MAX_DIM) -> int | None:
        """A whole number in [low, high], or None where absent."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(name, value, f"a whole number from {low} to {high}")
        return value

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_DIM) -> int:
        """A whole number in [low, high]."""
        value = self.maybe_integer(name, low=low, high=high)
        value = default if value is None else value
        if value is None:
            raise self._absent(name)
        return value

    def maybe_number(self, name: str, *, low: float = 0.0, high: float = 1e30) -> float | None:
        """A finite number in [low, high], or None where absent."""
        value = self.get(name)
        if value is None:
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # NOTE: the comparison comes first; math.isfinite overflows on integers beyond a float.
        if not number or not low <= value <= high or not math.isfinite(value):
            raise self.wrong(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def number(
        self, name: str, default: float | None = None, *, low: float = 0.0, high: float = 1e30
    ) -> float:
        """A finite number in [low, high]."""
        value = self.maybe_number(name, low=low, high=high)
        value = default if value is None else value
        if value is None:
            raise self._absent(name)
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        """A string."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def items(self, name: str) -> list[Any] | None:
        """A list, or None where absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(name, value, "a list")
        return value

    def table(self, name: str) -> Fields | None:
        """The fields of an object inside this one, or None where absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return Fields(value, self.file)

    def ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty where absent."""
        value = self.get(name)
        if value is None:
            return ()
        found = value if isinstance(value, list) else [value]
        for item in found:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_DIM:
                raise self.wrong(name, value, "a token id or a list of them")
        return tuple(found)
