"""Documents in a store: a text with its page map and owner, and the prefix that is its reading. No torch.

    prefixes   root | key | tokens up to the document's end | label: its name | created, lifetime, pinned
    documents  prefix | id | owner | text | pages                                 one row each, gone with its prefix

An id follows from the store's secret, the model, the tenant and the document's tokens: the same document has the
same id, and nobody else's can be guessed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from sqlite3 import Connection

from packhorse.core.errors import DoesNotFitError, PackhorseError
from packhorse.core.units import format_bytes
from packhorse.store.durable import PREFIX_SHARE, TEXTS, DurableStore, Prefix
from packhorse.store.prefix import chain_value

_ID_BYTES = 16
_MORE = "Give the store more (--disk), or unpin or delete documents."

PageMap = tuple[tuple[int, int, int], ...]
"""Number, first character and end of each page in a document's text."""


@dataclass(frozen=True)
class NewDocument:
    """A document that has been read. root: where its chain begins (`root_of`). tokens: encoded, those of a prompt
    up to the document's end. lifetime: seconds, None for ever. owner: see `owner_of`. renew: one that is there gets
    this pin and lifetime; False leaves it its own."""

    root: bytes
    owner: bytes
    name: str
    text: str
    pages: PageMap
    tokens: bytes
    pinned: bool = False
    lifetime: float | None = None
    renew: bool = True


@dataclass(frozen=True)
class StoredDocument:
    """A document of the store."""

    id: str
    prefix: Prefix
    owner: bytes
    packed_text: bytes
    packed_pages: str

    @property
    def text(self) -> str:
        """What was read of it."""
        return zlib.decompress(self.packed_text).decode()

    @property
    def pages(self) -> PageMap:
        """Where its pages are."""
        return tuple((number, start, end) for number, start, end in json.loads(self.packed_pages))

    @property
    def expires(self) -> float | None:
        """When it is forgotten, in seconds of the wall clock; None: never."""
        return None if self.prefix.lifetime is None else self.prefix.created + self.prefix.lifetime


def owner_of(disk: DurableStore, tenant: str) -> bytes:
    """What stands for a tenant in the index, which holds no tenant by name."""
    return blake2b(tenant.encode(), digest_size=32, key=disk.secret, person=b"owner").digest()


def root_of(disk: DurableStore, model: int, tenant: str) -> bytes:
    """Where the chains of a tenant begin with a model: as PrefixTree.root_of says."""
    identity = bytes.fromhex(disk.models()[model]["identity"])
    return chain_value(disk.secret, identity, tenant.encode())


def add_document(disk: DurableStore, model: int, new: NewDocument) -> StoredDocument:
    """Note a document whose pages are written, or have failed to be. Of the writing half of the store.

    One that is there already gets the new name, and as `renew` says pin and lifetime. Raises DoesNotFitError where
    its text and tokens, or those of all that is pinned with it, are more than the index may hold.
    """
    key = _key(disk, model, new)
    name = f"doc-{key[:_ID_BYTES].hex()}"
    now = disk.files.now()
    prefix = (model, new.root, key, new.tokens, new.name, now, now, new.lifetime)
    document = (key, name, new.owner, zlib.compress(new.text.encode()), json.dumps(new.pages))
    with disk.transaction() as write:
        write.execute(
            "INSERT INTO prefixes (model, root, key, tokens, label, created, used, lifetime, hits)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0) ON CONFLICT (key) DO UPDATE SET label = excluded.label,"
            " used = excluded.used"
            + ", created = excluded.created, lifetime = excluded.lifetime"
            * new.renew,
            prefix,
        )
        write.execute(
            "INSERT OR REPLACE INTO documents (prefix, id, owner, text, pages)"
            " VALUES ((SELECT id FROM prefixes WHERE key = ?), ?, ?, ?, ?)",
            document,
        )
        _check_share(write, name, disk.quota, new.pinned)
        disk.trim_prefixes(write)
    [noted] = disk.prefixes("key = ?", (key,))
    pinned = new.pinned if new.renew else bool(noted.pinned)
    if pinned or noted.pinned:
        disk.set_pinned(noted, pinned)
    found = find_document(disk, new.owner, name)
    assert found is not None
    return found


def check_fits(disk: DurableStore, model: int, new: NewDocument, need: int) -> None:
    """Raises DoesNotFitError where a document that is about to be read can never be kept: its text and tokens are more
    than the index may hold, or there is no room for its `need` bytes of pages and state."""
    share = disk.quota // PREFIX_SHARE
    taken = len(new.tokens) + len(zlib.compress(new.text.encode())) + len(json.dumps(new.pages))
    if taken > share:
        raise no_room("Text and tokens of the document take", taken, share, _MORE)
    num_pages = len(new.tokens) // disk.page_bytes(model)
    missing = need - need * disk.walk(model, new.root, new.tokens).num_pages // max(num_pages, 1)
    if disk.shortage(missing, need):
        raise no_room("The document takes", need, disk.room(), _more(disk, need))


def check_written(disk: DurableStore, model: int, new: NewDocument, need: int, *, with_state: bool) -> None:
    """Raises where a document's pages, or the state at the last one's end, are not on disk: DoesNotFitError where the
    store has no room for their `need` bytes, else PackhorseError."""
    num_pages = len(new.tokens) // disk.page_bytes(model)
    walked = disk.walk(model, new.root, new.tokens)
    if walked.num_pages == num_pages and (not with_state or disk.states(walked.keys[-1:])):
        return
    if need > disk.room():
        raise no_room("The document takes", need, disk.room(), _more(disk, need))
    raise PackhorseError(
        f"The document could not be written: {disk.trouble or 'a copy failed, or no snapshot was free'}."
    )


def no_room(what: str, asked: int, available: int, hint: str) -> DoesNotFitError:
    """The error for what takes more bytes of the store than it has for that."""
    reason = f"{what} {format_bytes(asked)}, and the store has room for {format_bytes(available)}."
    return DoesNotFitError(reason, asked=asked, available=available, unit="bytes", hint=hint)


def _more(disk: DurableStore, asked: int) -> str:
    """What gives the store room for so many bytes."""
    if asked > disk.room(by_quota=True):
        return _MORE
    return (
        f"Make room on the disk of {disk.folder}, of which {format_bytes(disk.reserve)} are always left free."
    )


def find_document(disk: DurableStore, owner: bytes | None, name: str) -> StoredDocument | None:
    """The document of that id, if it is the owner's (None: whoever's)."""
    found = _documents(disk, "documents.id = ?", [name])
    return next((d for d in found if owner in (None, d.owner)), None)


def documents_of(disk: DurableStore, model: int, owner: bytes) -> list[StoredDocument]:
    """An owner's documents with a model, the last used first."""
    return _documents(disk, "model = ? AND owner = ?", [model, owner])


def _documents(disk: DurableStore, where: str, values: Sequence[object]) -> list[StoredDocument]:
    rows = disk.query(
        "SELECT prefix, owner, text, pages FROM documents JOIN prefixes ON prefixes.id = prefix WHERE "
        + where,
        values,
    )
    parts = {row[0]: row[1:] for row in rows}
    return [
        StoredDocument(str(prefix.document), prefix, *parts[prefix.id])
        for prefix in disk.prefixes(where, values)
        if prefix.id in parts
    ]


def _key(disk: DurableStore, model: int, new: NewDocument) -> bytes:
    """The chain value at the document's end: pages as ever, then what is left of it, as no chain has it."""
    page_bytes = disk.page_bytes(model)
    key = new.root
    whole = len(new.tokens) // page_bytes * page_bytes
    for at in range(0, whole, page_bytes):
        key = chain_value(disk.secret, key, new.tokens[at : at + page_bytes])
    return blake2b(key + new.tokens[whole:], digest_size=32, key=disk.secret, person=b"document").digest()


def _check_share(write: Connection, name: str, quota: int, pinned: bool) -> None:
    """Raises DoesNotFitError where the document could not stay in the index. Inside the transaction."""
    share = quota // PREFIX_SHARE
    query = f"SELECT total({TEXTS}) FROM prefixes LEFT JOIN documents ON prefix = prefixes.id WHERE documents.id = ?"
    taken = int(write.execute(query + " OR pinned" * pinned, (name,)).fetchone()[0])
    if taken > share:
        what = f"Text and tokens of the document{' and of what is pinned' * pinned} take"
        raise no_room(what, taken, share, _MORE)
