"""The disk tier: records in files, and an index of them. No torch; works on buffers alone.

    DIR/ lock  secret  index.sqlite(-wal, -shm)
         models/7/ 0f3a....safetensors  ...                      one folder a model identity

A record's file is written under another name, synced, renamed and its folder synced before its row is
committed, and its row is deleted before its file is: whatever is cut short leaves at most a file without a row,
which the next process that is alone in the folder sweeps away. The index is never believed: what is read must
have the row's size and CRC-32, and be the record that was looked for.

The checksum is zlib's CRC-32: damage is what it is for, not people, and its 3 GB/s on each reading thread keep up
with a disk, so that no library beside Python's own is needed on a bare host.

One connection reads, for one thread at a time, and one writes. The writing half (`write`, `touch`, `drop`, ...) belongs
to one thread. What is found and read never waits for its transactions and files, at most for one query of it. Several
processes may share a folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import sqlite3
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from packhorse.core.errors import CorruptFileError, RefusedError, UsageError
from packhorse.core.units import GIB, MIB, format_bytes, round_up
from packhorse.store.files import FileSystem
from packhorse.store.index import LAYOUT, SCHEMA, connect
from packhorse.store.prefix import chain_value
from packhorse.store.records import BLOCK, Buffer, Image, Kind, Record, UnreadableError, Walk, anonymous, walk
from packhorse.store.snapshots import OLD_THINNING, THINNING, thinned

RESERVE = GIB
"""Bytes of the file system that are left free whatever the quota says."""
MIN_TOKENS = 256
"""Shorter chains are not written: to read them again takes less than to look them up."""
MIN_QUOTA = 16 * MIB
"""The index and its log may take some MiB of the quota."""
OLD_AT_ONCE = 64
"""Prefixes looked at for states that they can do without, before each eviction."""
PREFIX_SHARE = 50
"""The token ids of prefixes, and documents, take at most this part of the quota."""
_TOKEN_BYTES = 4
_SUFFIX = ".safetensors"
_NAME = re.compile(r"[0-9a-f]{32}")
_JOINED = "LEFT JOIN documents ON documents.prefix = prefixes.id"
TEXTS = "length(tokens) + ifnull(length(text) + length(pages), 0)"
"""Bytes that a prefix, and its document, take of the index."""
_COLUMNS = "kind, parent, key, start, stop, tokens, bytes, id, model, file, crc"
_TYPES = (str, bytes, bytes, int, int, bytes, int, int, int, str, int)


@dataclass(frozen=True, slots=True)
class DiskRecord(Record):
    """A record of the index. crc: CRC-32 of the whole file."""

    id: int = 0
    model: int = 0
    file: str = ""
    crc: int = 0


@dataclass(frozen=True)
class Prefix:
    """What somebody once asked: a chain of records with a name. tokens: encoded ids. created, used: seconds.
    pinned: 0 or 1. lifetime: seconds from `created` on after which it is forgotten, None for ever. document: the
    id of the document (store/documents.py) that it is the reading of, None where it is of none."""

    id: int
    model: int
    root: bytes
    key: bytes
    tokens: bytes
    label: str
    created: float
    used: float
    hits: int
    pinned: int
    lifetime: float | None
    document: str | None


class DurableStore:
    """A folder of records within a quota. `counters` only grow; `trouble` says what is wrong now, if it is.

    max_age: seconds after which what was written is deleted, None for never. Closed by `close`; until then the
    folder is locked against processes that would sweep it.
    """

    def __init__(
        self, folder: Path, *, quota: int, reserve: int = RESERVE, max_age: float | None = None,
        may_empty: bool = True, files: FileSystem | None = None,
    ) -> None:  # fmt: skip
        """Open a store, or make one. may_empty: begin a damaged index, or one of an older layout, anew.

        Raises UsageError for a quota below MIN_QUOTA or a folder of something else, RefusedError where the folder
        cannot be written or has no locks, or where a store of another layout cannot be replaced.
        """
        if quota < MIN_QUOTA:
            raise UsageError(
                f"The store may take {format_bytes(quota)}, and {format_bytes(MIN_QUOTA)} is the least.",
                hint="Raise --disk, or leave out --store.",
            )
        self.folder = folder
        self.quota = quota
        self.reserve = reserve
        self.max_age = max_age
        self.files = files or FileSystem()
        self.counters: Counter[str] = Counter()
        self.trouble = ""
        self.direct: bool | None = None
        self._gone: set[str] = set()  # files: numbers of rows come again
        self._thinned: set[int] = set()
        self._lock = -1
        self._reading = Lock()
        try:
            self._prepare_folder()
            self.secret = self._read_secret()
            alone = self._take_lock()
            self._open_index(alone, may_empty)
            if alone:
                self._sweep()
                fcntl.flock(self._lock, fcntl.LOCK_SH)
            self._write("the quota", self._evict_to, self.quota)
            self.expire()
        except OSError as error:
            self.close()
            raise RefusedError(
                f"The store {folder} cannot be used: {error.strerror or error}.",
                hint="Give a folder on a local disk that has room and that you may write to.",
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the folder. Nothing that was written is lost without it."""
        for name in ("_reader", "_writer"):
            connection = getattr(self, name, None)
            if connection is not None:
                connection.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # Reading.

    def candidates(self, parents: Sequence[bytes]) -> Sequence[DiskRecord]:
        """See Records."""
        return self._select(f"kind = 'pages' AND parent IN ({_marks(len(parents))})", parents)

    def states(self, keys: Sequence[bytes]) -> Mapping[bytes, DiskRecord]:
        """See Records."""
        # A state's parent is its own chain value: the index is sorted by it.
        rows = self._select(f"kind = 'state' AND parent IN ({_marks(len(keys))})", keys)
        return {row.key: row for row in rows}

    def read(self, record: Record, into: Buffer | None = None) -> Image:
        """See Records. Whoever gets an UnreadableError passes the record to `drop`. into: whole blocks, aligned to
        them, that get the image where they are enough for it."""
        assert isinstance(record, DiskRecord)
        try:
            buffer = self._read_file(record, into)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise UnreadableError("io_error") from error
            # Its row goes first: who has found it before may come too late.
            there = self._select("file = ?", [record.file], gone=True)
            raise UnreadableError("missing" if there else "gone") from error
        if zlib.crc32(memoryview(buffer)[: record.num_bytes]) != record.crc:
            raise UnreadableError("checksum")
        image = Image.parse(buffer, record.num_bytes)
        if _fields(image.record) != _fields(record):
            raise UnreadableError("other_record")
        return image

    def _read_file(self, record: DiskRecord, into: Buffer | None) -> Buffer:
        """The file's bytes. Direct, past the page cache, where the file system has that."""
        if self.direct is not False:
            try:
                buffer = self._read_with(record, into, os.O_DIRECT)
                self.direct = True
                return buffer
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
        return self._read_with(record, into, 0)

    def _read_with(self, record: DiskRecord, into: Buffer | None, flags: int) -> Buffer:
        flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path(record.model, record.file), flags)
        try:
            if os.fstat(fd).st_size != record.num_bytes:
                raise UnreadableError("size")
            if into is None or len(into) < record.num_bytes:
                into = anonymous(record.num_bytes)
            view, done = memoryview(into)[: round_up(record.num_bytes, BLOCK)], 0
            while done < record.num_bytes:
                # Direct reads begin at blocks: what a short one leaves of a block is read again.
                at = done // BLOCK * BLOCK
                count = self.files.read(fd, view[at:], at)
                if at + count <= done:
                    raise UnreadableError("truncated")
                done = at + count
        finally:
            os.close(fd)
        return into

    # Writing.

    def add_model(self, identity: bytes, about: Mapping[str, Any]) -> int:
        """The number of a model, a new one where the identity is new. about: for people, JSON-ready."""
        text = json.dumps(about)
        with self.transaction() as write:
            update = "ON CONFLICT (identity) DO UPDATE SET about = excluded.about"
            write.execute(f"INSERT INTO models (identity, about) VALUES (?, ?) {update}", (identity, text))
            number = int(write.execute("SELECT id FROM models WHERE identity = ?", (identity,)).fetchone()[0])
        (self.folder / "models" / str(number)).mkdir(mode=0o700, exist_ok=True)
        return number

    def room(self, *, by_quota: bool = False) -> int:
        """Bytes of the largest set of records that could be written now, evicting all that may be evicted. by_quota:
        as if its disk were empty."""
        pinned, held = self._sum("bytes", "pinned"), self._held()
        room = self.quota - self._index_bytes() - pinned
        free = self.files.free_bytes(self.folder) - self.reserve + held - pinned
        return max(0, room if by_quota else min(room, free))

    def shortage(self, missing: int, whole: int = 0) -> str:
        """Why a chain of `whole` bytes, `missing` of which are not there, cannot be, in a few words: also where what is
        written of it would make what is there of it go. Empty where it can."""
        need = max(missing, whole - self._sum("bytes", "pinned"))
        if need <= self.room():
            return ""
        if need > self.room(by_quota=True):
            return f"the quota has no room for {format_bytes(need)} (--disk gives it more)"
        return f"the disk has no room for {format_bytes(need)} beside {format_bytes(self.reserve)} that stay free"

    def write(self, model: int, images: Sequence[Image]) -> bool:
        """Make images durable, in order; True: they are. Those that are there already, and whole, are left alone.

        On failure nothing of them is left, `trouble` says why, and the next write tries again.
        """
        return self._write("a write", self._write_images, model, images) is True

    def _write_images(self, model: int, images: Sequence[Image]) -> bool:
        new = [image for image in images if not self._is_whole(image.record)]
        if not new:
            return True
        need = sum(round_up(image.record.num_bytes, BLOCK) for image in new)
        if shortage := self.shortage(need):
            self.counters["refused_for_room"] += len(new)
            self.trouble = shortage
            return False
        self._evict_to(self.quota - need)
        short = self.reserve + need - self.files.free_bytes(self.folder)
        if short > 0:
            self._evict_to(self._held() + self._index_bytes() - short)
        written: list[tuple[Image, str, int]] = []
        try:
            for image in new:
                name = secrets.token_hex(16)
                written.append((image, name, zlib.crc32(image.view)))
                self._write_file(self._path(model, name), image.view)
            self._sync_folder(self._path(model, name).parent)
            self.files.reached("folder synced")
            kept = self._insert(model, written)
        except BaseException:
            for _, name, _ in written:
                for path in (self._path(model, name), self._path(model, name).with_suffix(".part")):
                    with suppress(OSError):
                        path.unlink()
            raise
        self.files.reached("committed")
        for image, name, _ in written:
            if name in kept:
                self.counters["written_records"] += 1
                self.counters["written_bytes"] += image.record.num_bytes
            else:  # another process was sooner
                self._path(model, name).unlink()
        self.trouble = ""
        return True

    def _write_file(self, path: Path, view: memoryview) -> None:
        part = path.with_suffix(".part")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self.files.reached("opened")
            done = 0
            while done < len(view):
                done += self.files.write(fd, view[done:])
            self.files.reached("written")
            self.files.fsync(fd)
            self.files.reached("synced")
        finally:
            os.close(fd)
        os.rename(part, path)
        self.files.reached("renamed")

    def _insert(self, model: int, written: Sequence[tuple[Image, str, int]]) -> set[str]:
        """Rows for files that are durable; the names of those that got one."""
        with self.transaction() as write:
            used, now = self._next_use(), self.files.now()
            write.executemany(
                "INSERT OR IGNORE INTO records (kind, parent, key, start, stop, tokens, bytes, model, file,"
                " crc, used, created) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(*_fields(image.record), model, name, crc, used, now) for image, name, crc in written],
            )
            names = [name for _, name, _ in written]
            query = f"SELECT file FROM records WHERE file IN ({_marks(len(names))})"
            return {row[0] for row in write.execute(query, names)}

    def touch(self, records: Sequence[Record]) -> None:
        """These were used: they are evicted last. An order is kept, no time: clocks may go back."""
        self._write("a use", self._touch, records)

    def _touch(self, records: Sequence[Record]) -> None:
        with self.transaction() as write:
            used = self._next_use()
            query = "UPDATE records SET used = ? WHERE kind = ? AND parent = ? AND key = ?"
            write.executemany(query, [(used, *record.identity) for record in records])

    def mark_gone(self, record: Record) -> None:
        """From now on a record is not offered any more. Of the reading half; `drop` follows."""
        assert isinstance(record, DiskRecord)
        self._gone.add(record.file)

    def drop(self, record: Record) -> None:
        """Delete a record that could not be used."""
        assert isinstance(record, DiskRecord)
        self._write("a deletion", self._delete, [(record.id, record.model, record.file)])

    def note_prefix(self, model: int, root: bytes, key: bytes, tokens: bytes, label: str) -> None:
        """Remember a chain under a name. It replaces the prefixes that it goes on from, unless pinned."""
        self._write("a prefix", self._note_prefix, model, root, key, tokens, label)

    def _note_prefix(self, model: int, root: bytes, key: bytes, tokens: bytes, label: str) -> None:
        now = self.files.now()
        with self.transaction() as write:
            write.execute(
                "DELETE FROM prefixes WHERE root = ? AND NOT pinned AND length(tokens) < ?"
                " AND tokens = substr(?, 1, length(tokens)) AND label IN ('', ?)"
                " AND id NOT IN (SELECT prefix FROM documents)",
                (root, len(tokens), tokens, label),
            )
            write.execute(
                "INSERT INTO prefixes (model, root, key, tokens, label, created, used, hits)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, 0) ON CONFLICT (key) DO UPDATE SET used = ?, hits = hits + 1",
                (model, root, key, tokens, label, now, now, now),
            )
            self.trim_prefixes(write)
        if self._sum("pinned", of="prefixes"):
            self._pin_again(model, root, tokens)

    def _pin_again(self, model: int, root: bytes, tokens: bytes) -> None:
        """Pin what was read again, after damage, of pinned prefixes that a chain covers."""
        pinned = [prefix for prefix in self._covered(model, root, tokens) if prefix.pinned]
        held = {record.id for prefix in pinned for record in self.records_of(prefix)}
        with self.transaction() as write:
            write.executemany("UPDATE records SET pinned = 1 WHERE id = ?", [(number,) for number in held])

    def _covered(self, model: int, root: bytes, tokens: bytes) -> list[Prefix]:
        """Prefixes whose whole pages a chain begins with: what else a document has stands in no page."""
        pages = f"length(tokens) / {self.page_bytes(model)} * {self.page_bytes(model)}"
        return self.prefixes(
            f"root = ? AND substr(tokens, 1, {pages}) = substr(?, 1, {pages})", (root, tokens)
        )

    def thin(self, model: int, root: bytes, tokens: bytes, share: int = THINNING) -> None:
        """Delete what few tokens of a chain would be read again for: see `thinned`. Where others leave it, where
        another prefix or a document ends, and what is pinned, stays."""
        self._write("thinning", self._thin, model, root, tokens, share)

    def _thin(self, model: int, root: bytes, tokens: bytes, share: int) -> None:
        walked, page_bytes = self.walk(model, root, tokens), self.page_bytes(model)
        states = self.states(walked.keys)
        at = {page: states[key] for page, key in enumerate(walked.keys) if key in states}
        ends = [len(prefix.tokens) // page_bytes for prefix in self._covered(model, root, tokens)]
        stays = walked.forks.union(ends)
        doomed = [at[page].id for page in thinned(sorted(at), stays, share)]
        query = f"SELECT id, model, file FROM records WHERE NOT pinned AND id IN ({_marks(len(doomed))})"
        if rows := self.query(query, doomed):
            self._delete(rows)
            self.counters["thinned_states"] += len(rows)

    def _thin_old(self, limit: int) -> None:
        """`thin` the longer unused half of the prefixes further, once each, until `limit` is kept."""
        half = "(SELECT count(*) / 2 FROM prefixes)"
        models = "(SELECT DISTINCT model FROM records WHERE kind = 'state')"
        rows = self.query(f"SELECT id FROM prefixes WHERE model IN {models} ORDER BY used LIMIT {half}")
        old = [number for (number,) in rows if number not in self._thinned]
        for number in old[:OLD_AT_ONCE]:
            if self._held() + self._index_bytes() <= limit:
                return
            self._thinned.add(number)
            for prefix in self.prefixes("prefixes.id = ?", (number,)):
                self._thin(prefix.model, prefix.root, prefix.tokens, OLD_THINNING)

    def trim_prefixes(self, write: sqlite3.Connection) -> None:
        """Delete the prefixes, and documents, that go beyond their share of the quota, the least recently used
        first. Inside a transaction."""
        write.execute(
            f"DELETE FROM prefixes WHERE NOT pinned AND id IN (SELECT id FROM (SELECT prefixes.id AS id, sum({TEXTS})"
            f" OVER (ORDER BY used DESC, prefixes.id DESC) AS total FROM prefixes {_JOINED}) WHERE total > ?)",
            (self.quota // PREFIX_SHARE,),
        )

    def expire(self) -> None:
        """Delete what is older than `max_age`, and prefixes and documents whose own lifetime is over, pinned or not.
        A clock that goes back keeps nothing longer than that from then on."""
        try:
            self._write("expiry", self._expire)
        except (KeyError, TypeError, ValueError) as error:  # rows that are damaged
            self._complain(error)

    def _expire(self) -> None:
        now = self.files.now()
        oldest = -1.0 if self.max_age is None else now - self.max_age
        with self.transaction() as write:
            for table in ("records", "prefixes"):
                write.execute(f"UPDATE {table} SET created = ? WHERE created > ?", (now, now))
            write.execute("DELETE FROM prefixes WHERE created < ?", (oldest,))
            query = "SELECT id, model, file FROM records WHERE created < ?"
            doomed = write.execute(query, (oldest,)).fetchall()
        self._delete(doomed)
        self.counters["expired_records"] += len(doomed)
        for prefix in self.prefixes("created + lifetime <= ?", (now,)):
            self.remove(prefix)
            self.counters["expired_documents"] += 1

    # For people.

    def models(self) -> dict[int, dict[str, Any]]:
        """What is known of each model, by number."""
        rows = self.query("SELECT id, identity, about FROM models")
        return {number: {"identity": identity.hex(), **json.loads(about)} for number, identity, about in rows}

    def prefixes(self, where: str = "1", values: Sequence[Any] = ()) -> list[Prefix]:
        """All prefixes, documents too, or those that a condition of SQL holds for, the last used first."""
        query = (
            "SELECT prefixes.id, model, root, key, tokens, label, created, used, hits, pinned, lifetime, documents.id"
            f" FROM prefixes {_JOINED} WHERE {where} ORDER BY used DESC, prefixes.id DESC"
        )
        return [Prefix(*row) for row in self.query(query, values)]

    def query(self, text: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of the index, for reading: as it is now. From any thread. While one reads, the connection would give
        all others the index as it was when that began, without what has been written since."""
        with self._reading:
            return self._reader.execute(text, values).fetchall()

    def page_bytes(self, model: int) -> int:
        """Of a page's encoded tokens."""
        return _TOKEN_BYTES * int(self.models()[model]["page_len"])

    def walk(self, model: int, root: bytes, tokens: bytes) -> Walk:
        """How far the whole pages of a chain are there, `tokens` being encoded."""
        size, chain = self.page_bytes(model), partial(chain_value, self.secret)
        return walk([self], root, tokens, len(tokens) // size, size, chain)

    def records_of(self, prefix: Prefix) -> list[DiskRecord]:
        """What a prefix needs, as far as it is there: pages and states."""
        walked = self.walk(prefix.model, prefix.root, prefix.tokens)
        pages = [piece.record for piece in walked.pieces]
        return [r for r in (*pages, *self.states(walked.keys).values()) if isinstance(r, DiskRecord)]

    def set_pinned(self, prefix: Prefix, pinned: bool) -> None:
        """Keep what a prefix needs from eviction, or not any more."""
        others = self.prefixes("pinned AND prefixes.id != ?", (prefix.id,))
        held = {record.id for p in [*others, *[prefix] * pinned] for record in self.records_of(p)}
        with self.transaction() as write:
            write.execute("UPDATE prefixes SET pinned = ? WHERE id = ?", (pinned, prefix.id))
            write.execute("UPDATE records SET pinned = 0")
            write.executemany("UPDATE records SET pinned = 1 WHERE id = ?", [(number,) for number in held])

    def remove(self, prefix: Prefix) -> int:
        """Forget a prefix and what no other needs; bytes that are free now. With a document goes what was asked
        about it, unless pinned: it holds the document's text."""
        if prefix.pinned:  # others may need some of it, and did not ask for it to stay
            self.set_pinned(prefix, False)
        gone = {prefix.id}
        page_bytes = self.page_bytes(prefix.model)
        text = prefix.tokens[: len(prefix.tokens) // page_bytes * page_bytes]
        if prefix.document and text:
            about = self.prefixes("root = ? AND NOT pinned AND documents.id IS NULL", (prefix.root,))
            gone |= {p.id for p in about if p.tokens.startswith(text)}
        found = {p: self.records_of(p) for p in self.prefixes()}
        needed = {r.id for p, records in found.items() if p.id not in gone for r in records}
        doomed = {r for p, records in found.items() if p.id in gone for r in records if r.id not in needed}
        self._delete([(r.id, r.model, r.file) for r in doomed], gone)
        return sum(r.num_bytes for r in doomed)

    def verify(self) -> Iterator[tuple[Path, str]]:
        """Read every file; yields those that cannot be used, and why. Changes nothing."""
        for record in self._select("1", []):
            try:
                self.read(record)
            except UnreadableError as error:
                yield self._path(record.model, record.file), error.reason

    def usage(self) -> dict[str, int]:
        """Records, their bytes on disk, the index's bytes, and documents."""
        held = {"records": self._sum("1"), "bytes": self._held(), "index_bytes": self._index_bytes()}
        return {**held, "num_documents": self._sum("1", of="documents")}

    # Inside.

    def _prepare_folder(self) -> None:
        folder = self.folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = {entry.name for entry in folder.iterdir()}
        if names and "secret" not in names and names - {"lock"}:
            raise UsageError(
                f"{folder} holds {sorted(names)[0]} and is no store.",
                hint="Give --store a folder of its own.",
            )
        folder.chmod(0o700)
        (folder / "models").mkdir(mode=0o700, exist_ok=True)

    def _read_secret(self) -> bytes:
        """What keys the hash chains. Written once: the first process to link it wins."""
        path, own = self.folder / "secret", self.folder / f"lock.{secrets.token_hex(8)}"
        if not path.exists():
            fd = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "wb") as stream:
                stream.write(secrets.token_bytes(32))
                stream.flush()
                os.fsync(stream.fileno())
            try:
                with suppress(FileExistsError):
                    os.link(own, path)
            finally:
                own.unlink()
            self._sync_folder(self.folder)
        secret = path.read_bytes()
        if len(secret) != 32:
            raise CorruptFileError(
                f"{path} has {len(secret)} bytes, not 32.",
                hint=f"Nothing in the store can be found without it: delete {self.folder}.",
            )
        return secret

    def _take_lock(self) -> bool:
        """Lock the folder; True where no other process has it."""
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            return False

    def _open_index(self, alone: bool, may_empty: bool) -> None:
        """Connect; a damaged or older index is begun anew, which makes every file an orphan."""
        path = self.folder / "index.sqlite"
        try:
            layout = self._connect(path)
            if alone:
                self._writer.execute("SELECT model, file FROM records").fetchall()  # what the sweep reads
        except sqlite3.OperationalError as error:
            raise OSError(errno.EIO, f"the index: {error}") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError):  # its complaint may quote the damage
            layout = -1
        if layout == LAYOUT:
            return
        what = "damaged" if layout < 0 else f"of layout {layout}, and this is {LAYOUT}"
        if layout > LAYOUT:
            raise RefusedError(
                f"The store {self.folder} is {what}.", hint="Use the newer Packhorse, or another folder."
            )
        if not alone:
            raise RefusedError(
                f"The store {self.folder} is {what}, and another process uses it.",
                hint="End that process: the store is emptied then.",
            )
        if not may_empty:
            raise RefusedError(
                f"The store {self.folder} is {what}: nothing in it can be found.",
                hint="The next ask, chat or serve with this --store empties it, and `packhorse cache wipe` deletes it.",
            )
        self.counters["emptied"] += 1
        for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
            (self.folder / name).unlink(missing_ok=True)
        self._connect(path)

    def _connect(self, path: Path) -> int:
        """Open both connections; the layout that the index says."""
        for name in ("_reader", "_writer"):
            if getattr(self, name, None) is not None:
                getattr(self, name).close()
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._writer = connect(path)
        self._reader = connect(path)
        if self._writer.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise OSError(errno.ENOLCK, "its file system cannot share memory between processes")
        with self.transaction() as write:
            if not write.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in SCHEMA.split(";"):
                    write.execute(statement)
                write.execute("INSERT INTO meta VALUES (?)", (LAYOUT,))
            return int(write.execute("SELECT layout FROM meta").fetchone()[0])

    def _sweep(self) -> None:
        """Delete files without a row."""
        known = {(str(m), f) for m, f in self._writer.execute("SELECT model, file FROM records")}
        for path in (self.folder / "models").glob("*/*"):
            if path.suffix != _SUFFIX or (path.parent.name, path.stem) not in known:
                path.unlink()
                self.counters["swept_files"] += 1
        for path in self.folder.glob("lock.*"):
            path.unlink()

    def _evict_to(self, limit: int) -> None:
        """Delete records, the least recently used first and of those the deepest, until `limit` is kept. Before that,
        states that old prefixes can do without."""
        try:
            self._thin_old(limit)
        except (sqlite3.Error, KeyError, TypeError, ValueError) as error:  # rows of prefixes that are damaged
            self._complain(error)
        while self._held() + self._index_bytes() > limit:
            rows = self._writer.execute(
                "SELECT id, model, file, bytes FROM records WHERE NOT pinned ORDER BY used, stop DESC LIMIT 64"
            ).fetchall()
            over, chosen = self._held() + self._index_bytes() - limit, []
            for number, model, file, num_bytes in rows:
                if over <= 0:
                    break
                chosen.append((number, model, file))
                over -= round_up(num_bytes, BLOCK)
            if not chosen:
                return
            self._delete(chosen)
            self.counters["evicted_records"] += len(chosen)

    def _delete(self, rows: Sequence[tuple[int, int, str]], prefixes: Collection[int] = ()) -> None:
        """Delete records, by number, model and file, and prefixes, by number."""
        with self.transaction() as write:
            write.executemany("DELETE FROM prefixes WHERE id = ?", [(number,) for number in prefixes])
            # Numbers of rows come again: of one that was found earlier another record may have it now.
            gone = [(number, file) for number, _, file in rows]
            write.executemany("DELETE FROM records WHERE id = ? AND file = ?", gone)
        self.files.reached("row deleted")
        for _, model, file in rows:
            with suppress(FileNotFoundError):
                self._path(model, file).unlink()
            self.files.reached("file deleted")

    def _held(self) -> int:
        """Bytes of all files on disk, in whole blocks."""
        return self._sum(f"(bytes + {BLOCK - 1}) / {BLOCK}") * BLOCK

    def _sum(self, what: str, where: str = "1", of: str = "records") -> int:
        """A sum over a table; 0 where the index cannot be read."""
        try:
            return int(self.query(f"SELECT total({what}) FROM {of} WHERE {where}")[0][0])
        except (sqlite3.Error, ValueError) as error:
            self._complain(error)
            return 0

    def _complain(self, error: Exception) -> None:
        self.counters["index_errors"] += 1
        self.trouble = f"the index cannot be read: {error}"

    def _index_bytes(self) -> int:
        total = 0
        for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
            with suppress(FileNotFoundError):
                total += (self.folder / name).stat().st_size
        return total

    def _is_whole(self, record: Record) -> bool:
        """Whether a record is there. One that is damaged is deleted: whoever asks has it anew."""
        for found in self._select("kind = ? AND parent = ? AND key = ?", record.identity, gone=True):
            try:
                self.read(found)
            except UnreadableError as error:
                if error.reason != "io_error":  # which may pass
                    self._delete([(found.id, found.model, found.file)])
                    self.counters["replaced_records"] += 1
                    return False
            self._gone.discard(found.file)
            return True
        return False

    def _next_use(self) -> int:
        return int(self._writer.execute("SELECT ifnull(max(used), 0) + 1 FROM records").fetchone()[0])

    def _select(self, where: str, values: Sequence[Any], *, gone: bool = False) -> list[DiskRecord]:
        """Records that a condition of SQL holds for; gone: those too that are not offered any more."""
        try:
            rows = self.query(f"SELECT {_COLUMNS} FROM records WHERE {where}", values)
            found = [DiskRecord(Kind(row[0]), *row[1:]) for row in rows if tuple(map(type, row)) == _TYPES]
        except (sqlite3.Error, ValueError) as error:
            self._complain(error)
            return []
        found = [record for record in found if _NAME.fullmatch(record.file)]
        return [record for record in found if gone or record.file not in self._gone]

    def _write(self, what: str, function: Any, *args: Any) -> Any:
        """Call a writing function; a failure of the system is counted and remembered, and None is returned."""
        try:
            return function(*args)
        except (OSError, sqlite3.Error) as error:
            self.counters["write_failures"] += 1
            self.trouble = f"{what} failed: {getattr(error, 'strerror', None) or error}"
            return None

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """The writing connection, for changes that are made together, or not at all where the block raises."""
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            yield self._writer
        except BaseException:
            with suppress(sqlite3.Error):
                self._writer.execute("ROLLBACK")
            raise
        self._writer.execute("COMMIT")

    def _path(self, model: int, file: str) -> Path:
        assert _NAME.fullmatch(file)
        return self.folder / "models" / str(int(model)) / (file + _SUFFIX)

    def _sync_folder(self, folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.files.fsync(fd)
        finally:
            os.close(fd)


def wipe(folder: Path) -> None:
    """Delete a store and its secret. Raises RefusedError while a process uses it and where it cannot be deleted,
    UsageError for another folder."""
    if not (folder / "secret").is_file() or not (folder / "lock").is_file():
        raise UsageError(f"{folder} is no store.", hint="Give --store the folder of one.")
    try:
        with (folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    except BlockingIOError as error:
        raise RefusedError(f"A process uses the store {folder}.", hint="End it first.") from error
    except OSError as error:
        reason = f"{folder} cannot be deleted: {error.strerror or error}."
        hint = "Delete it as its owner; a read-only file system has to be mounted so that you may write."
        raise RefusedError(reason, hint=hint) from error


def _marks(count: int) -> str:
    return ", ".join("?" * count)


def _fields(record: Record) -> tuple[Any, ...]:
    return (
        str(record.kind), record.parent, record.key, record.start, record.stop, record.tokens, record.num_bytes,
    )  # fmt: skip
