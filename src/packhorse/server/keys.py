"""Bearer keys: several, named, from a TOML file.

[alice]
key = "a long random text"
concurrent = 4          # requests at once; left out: no limit of her own
"""

from __future__ import annotations

import hmac
import tomllib
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from packhorse.core.errors import UsageError

MIN_KEY_LEN = 16
_FIELDS = {"key", "concurrent"}


@dataclass(eq=False)
class Key:
    """One key. digest: SHA-256 of it, so that the key itself is not kept. active: requests running now."""

    name: str
    digest: bytes = field(repr=False)
    concurrent: int | None = None
    active: int = 0


class Keyring:
    """The keys of a server; without any, everybody is let in."""

    def __init__(self, keys: list[Key]) -> None:
        self.keys = keys

    @classmethod
    def load(cls, path: Path) -> Keyring:
        """Read a key file. Raises UsageError where it cannot be read, is open to other users of the machine,
        or holds no key, a short one, one twice, or a field that is not known."""
        try:
            entries = tomllib.loads(path.read_text(encoding="utf-8"))
            mode = path.stat().st_mode
        except (OSError, ValueError) as error:
            hint = "See docs/server.md."
            raise UsageError(f"The key file {path} cannot be read: {error}.", hint=hint) from error
        if mode & 0o077:
            raise UsageError(
                f"The key file {path} is open to other users (mode {mode & 0o777:o}).",
                hint=f"Close it: chmod 600 {path}",
            )
        keys = [_key(path, name, entry) for name, entry in entries.items()]
        if not keys:
            raise UsageError(f"The key file {path} holds no key.", hint="See docs/server.md.")
        if len({key.digest for key in keys}) < len(keys):
            raise UsageError(f"Two names in {path} have the same key.", hint="Give each its own.")
        return cls(keys)

    def find(self, header: str) -> Key | None:
        """The key of an `Authorization: Bearer ...` header, compared in constant time; None if not known."""
        scheme, _, given = header.partition(" ")
        digest = sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found if scheme.lower() == "bearer" else None


def _key(path: Path, name: str, entry: object) -> Key:
    where = f"{path}, [{name}]"
    if not isinstance(entry, dict) or set(entry) - _FIELDS or not isinstance(entry.get("key"), str):
        raise UsageError(f"{where}: expected key and maybe concurrent.", hint="See docs/server.md.")
    if len(entry["key"]) < MIN_KEY_LEN:
        raise UsageError(
            f"{where}: the key has {len(entry['key'])} characters, and {MIN_KEY_LEN} are the least.",
            hint="Make one: openssl rand -hex 24",
        )
    concurrent = entry.get("concurrent")
    if concurrent is not None and (not isinstance(concurrent, int) or concurrent < 1):
        raise UsageError(f"{where}: concurrent is {concurrent!r}.", hint="Give a number from 1 on.")
    return Key(name, sha256(entry["key"].encode()).digest(), concurrent)
