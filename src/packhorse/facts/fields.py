"""Typed reads from files that nobody vouches for: every wrong value is named with its field and file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from packhorse.core.errors import CorruptFileError, RefusedError
from packhorse.core.units import MIB, format_bytes

MAX_JSON_BYTES = 64 * MIB
"""A config or tokenizer_config larger than this is not one."""
MAX_DIM = 2**31 - 1
"""No dimension, count or position reaches this."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A block that reads a file. Raises RefusedError where the system does not let us."""
    try:
        yield
    except OSError as error:
        hint = "Check the path and its permissions."
        raise RefusedError(f"{path} cannot be read: {error.strerror or error}.", hint=hint) from error


def read_bytes(file: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """The whole of a small file.

    Raises RefusedError where the system does not let us read it, CorruptFileError above `limit` bytes.
    """
    with reading(file):
        size = file.stat().st_size
        if size > limit:
            raise CorruptFileError(
                f"{file} holds {format_bytes(size)}; such a file may have {format_bytes(limit)}.",
                hint="Check that it is the right file.",
                bytes=size,
                limit=limit,
            )
        return file.read_bytes()


def parse_object(data: bytes, what: str, *, unique: bool = False) -> dict[str, Any]:
    """A JSON object. `unique` refuses keys that occur twice in one object.

    Raises CorruptFileError where the bytes are no UTF-8, no JSON or no object.
    """
    hook = _unique_keys if unique else None
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=hook)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{what} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CorruptFileError(f"{what} holds a {type(value).__name__}, not an object.")
    return value


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a small file. Raises what `read_bytes` and `parse_object` raise."""
    return parse_object(read_bytes(file), str(file))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} occurs twice")
        found[key] = value
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

    def _read(self, name: str, fits: Callable[[Any], bool], must_be: str) -> Any:
        """The value, or None where absent."""
        value = self.get(name)
        if value is not None and not fits(value):
            raise self.wrong(name, value, must_be)
        return value

    def _given(self, name: str, value: Any, default: Any) -> Any:
        """The value, else the default."""
        value = default if value is None else value
        if value is None:
            raise CorruptFileError(
                f"{self.file} does not say {self.prefix}{name}.",
                hint="The file is incomplete: fetch it again.",
                field=self.prefix + name,
            )
        return value

    def maybe_integer(self, name: str, *, low: int = 1, high: int = MAX_DIM) -> int | None:
        """A whole number in [low, high], or None where absent."""
        must_be = f"a whole number from {low} to {high}"
        return cast("int | None", self._read(name, lambda v: is_whole(v) and low <= v <= high, must_be))

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_DIM) -> int:
        """A whole number in [low, high]."""
        return int(self._given(name, self.maybe_integer(name, low=low, high=high), default))

    def maybe_number(self, name: str, *, low: float = 0.0, high: float = 1e30) -> float | None:
        """A finite number in [low, high], or None where absent."""

        def fits(value: Any) -> bool:
            # NOTE: the comparison comes before isfinite, which overflows on integers beyond a float.
            return (
                (is_whole(value) or isinstance(value, float))
                and low <= value <= high
                and math.isfinite(value)
            )

        value = self._read(name, fits, f"a number from {low:g} to {high:g}")
        return None if value is None else float(value)

    def number(
        self, name: str, default: float | None = None, *, low: float = 0.0, high: float = 1e30
    ) -> float:
        """A finite number in [low, high]."""
        return float(self._given(name, self.maybe_number(name, low=low, high=high), default))

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        return bool(
            self._given(name, self._read(name, lambda v: isinstance(v, bool), "true or false"), default)
        )

    def text(self, name: str, default: str | None = None) -> str | None:
        """A string."""
        value = self._read(name, lambda v: isinstance(v, str), "a string")
        return default if value is None else str(value)

    def items(self, name: str) -> list[Any] | None:
        """A list, or None where absent."""
        return cast("list[Any] | None", self._read(name, lambda v: isinstance(v, list), "a list"))

    def table(self, name: str) -> Fields | None:
        """The fields of an object inside this one, or None where absent."""
        value = self._read(name, lambda v: isinstance(v, dict), "an object")
        return None if value is None else Fields(value, self.file)

    def ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty where absent."""

        def listed(value: Any) -> list[Any]:
            return value if isinstance(value, list) else [value]

        def fits(value: Any) -> bool:
            return all(is_whole(item) and 0 <= item <= MAX_DIM for item in listed(value))

        value = self._read(name, fits, "a token id or a list of them")
        return () if value is None else tuple(listed(value))


def is_whole(value: Any) -> bool:
    """Whether it is an integer, which True and False are not here."""
    return isinstance(value, int) and not isinstance(value, bool)
