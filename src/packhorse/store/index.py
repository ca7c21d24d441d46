"""The disk tier's index: what its rows hold, and how it is opened. No torch."""

from __future__ import annotations

import sqlite3
from pathlib import Path

LAYOUT = 2
"""Of folder, index and files. A store of an older one is emptied, one of a newer one is refused."""
# Long values come last: what stands behind them in a row is read through all of their pages.
SCHEMA = """
CREATE TABLE meta (layout INTEGER NOT NULL);
CREATE TABLE models (id INTEGER PRIMARY KEY, identity BLOB NOT NULL UNIQUE, about TEXT NOT NULL);
CREATE TABLE records (
    id INTEGER PRIMARY KEY, model INTEGER NOT NULL, kind TEXT NOT NULL, parent BLOB NOT NULL, key BLOB NOT NULL,
    start INTEGER NOT NULL, stop INTEGER NOT NULL, bytes INTEGER NOT NULL,
    file TEXT NOT NULL UNIQUE, crc INTEGER NOT NULL, used INTEGER NOT NULL, pinned INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL, tokens BLOB NOT NULL, UNIQUE (kind, parent, key)
);
CREATE INDEX by_use ON records (pinned, used, stop);
CREATE TABLE prefixes (
    id INTEGER PRIMARY KEY, model INTEGER NOT NULL, root BLOB NOT NULL, key BLOB NOT NULL UNIQUE,
    label TEXT NOT NULL, created REAL NOT NULL, used REAL NOT NULL, hits INTEGER NOT NULL,
    pinned INTEGER NOT NULL DEFAULT 0, lifetime REAL, tokens BLOB NOT NULL
);
CREATE TABLE documents (
    prefix INTEGER PRIMARY KEY REFERENCES prefixes (id) ON DELETE CASCADE, id TEXT NOT NULL UNIQUE,
    owner BLOB NOT NULL, text BLOB NOT NULL, pages TEXT NOT NULL
);
"""


def connect(path: Path) -> sqlite3.Connection:
    """A connection whose commits are on disk, for any thread."""
    connection = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
    connection.text_factory = lambda data: data.decode("utf-8", "replace")  # damage is found later
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA secure_delete = ON")  # texts and tokens do not stay in free pages
    connection.execute("PRAGMA wal_autocheckpoint = 256")
    connection.execute("PRAGMA journal_size_limit = 1048576")
    return connection
