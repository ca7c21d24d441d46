"""What stored pages are of: a digest of everything that their bytes depend on, beside the tokens.

Two runs have one identity only where each may go on from the other's pages: the same weights to the byte, the
same tokenizer, architecture and rope settings, compute type, codec and layout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path

from packhorse.core.units import MIB
from packhorse.facts.fields import reading
from packhorse.facts.model import ModelFacts
from packhorse.store.index import LAYOUT
from packhorse.store.tier import StoreGeometry

PIECE_BYTES = 16 * MIB
"""A file's digest is one over the digests of pieces of this size, several of which are read at once."""
READERS = 4
# What of a model's facts says nothing of how it computes.
_OTHER = {
    "name", "path", "container", "context", "bos_id", "eos_ids", "chat_template", "stored_dtype", "generation",
    "tensors", "metadata", "num_mtp_layers", "notes",
}  # fmt: skip
_TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt",
)  # fmt: skip


def model_identity(
    facts: ModelFacts, geometry: StoreGeometry, known: Path, *, device: str, exact: bool, packed: bool
) -> bytes:
    """The digest, 32 bytes. known: a file that remembers digests of files that have not changed since.

    Raises RefusedError where a file of the model cannot be read.
    """
    shape = {f.name: repr(getattr(facts, f.name)) for f in fields(facts) if f.name not in _OTHER}
    how = (repr(geometry.codec), geometry.codec.format.version, str(geometry.dtype), device.partition(":")[0])
    digest = blake2b(repr((LAYOUT, sorted(shape.items()), how, exact, packed)).encode(), digest_size=32)
    for path, found in _digests(_files(facts), known):
        digest.update(path.name.encode() + b"\0" + found)
    return digest.digest()


def _files(facts: ModelFacts) -> list[Path]:
    """Files of weights and tokenizer, by name."""
    folder = facts.path if facts.path.is_dir() else facts.path.parent
    weights = {tensor.file for tensor in facts.tensors.values()}
    own = [folder / name for name in _TOKENIZER if facts.path.is_dir()]
    return sorted(weights | {path for path in own if path.is_file()})


def _digests(paths: Iterable[Path], known: Path) -> list[tuple[Path, bytes]]:
    """The digest of each file's bytes."""
    try:
        remembered = json.loads(known.read_text())
    except (OSError, ValueError):
        remembered = {}
    found: list[tuple[Path, bytes]] = []
    for path in paths:
        with reading(path):
            stat = path.stat()
            # Whoever changes a file cannot set its ctime.
            now = [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
            name = str(path.resolve())
            before = remembered.get(name)
            if not (isinstance(before, list) and before[:-1] == now):
                remembered[name] = [*now, file_digest(path).hex()]
            found.append((path, bytes.fromhex(remembered[name][-1])))
    part = known.with_name(f"{known.name}.{os.getpid()}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as stream:
        json.dump(remembered, stream)
    part.replace(known)
    return found


def file_digest(path: Path) -> bytes:
    """A digest of a file's bytes, 32 bytes. Raises OSError."""
    with path.open("rb", buffering=0) as stream, ThreadPoolExecutor(READERS) as pool:
        fd = stream.fileno()
        starts = range(0, os.fstat(fd).st_size, PIECE_BYTES)
        whole = blake2b(digest_size=32)
        for piece in pool.map(lambda start: _piece_digest(fd, start), starts):
            whole.update(piece)
        return whole.digest()


def _piece_digest(fd: int, start: int) -> bytes:
    digest = blake2b(digest_size=32)
    at = start
    while at < start + PIECE_BYTES and (data := os.pread(fd, min(MIB, start + PIECE_BYTES - at), at)):
        digest.update(data)
        at += len(data)
    return digest.digest()
