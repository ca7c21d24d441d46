"""Which token prefixes the store holds: a tree of entries, each whole pages of one token chain.

    root ─ [0, 8192) ─┬─ [8192, 12032) ── [12032, 12160)
                      └─ [8192, 9024)                       siblings agree in less than the shorter of them

An entry owns its pages and, for models with recurrent state, the one snapshot valid at its `stop`, which is
what makes the pages usable: both come and go together. For dense models every page is an entry without a
snapshot. Pure Python: pages and snapshot slots are numbers here, and the caller counts their holders.

Children are found by a keyed BLAKE2b chain over token ids (the chain value at the parent's stop and the first
page's tokens), and every hit compares the token ids themselves.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

_TOKEN_BYTES = 4
assert array("I").itemsize == _TOKEN_BYTES


def encode_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as 4 bytes each, the form in which the tree compares and hashes them."""
    return array("I", token_ids).tobytes()


def chain_value(secret: bytes, key: bytes, page: bytes | bytearray) -> bytes:
    """What stands for a chain: its value one page before, and that page's encoded tokens, hashed with a key."""
    return blake2b(key + page, digest_size=32, key=secret).digest()


@dataclass(eq=False, slots=True)
class Entry:
    """Pages [start, stop) of one token chain.

    key: chain value at `stop`. tokens: encoded ids of [start, stop). snapshot: state slot valid at `stop`, or
    None for dense models. marked: somebody asked for a snapshot here; else only the absolute grid did.
    pins: open sequences whose chain goes through this entry. last_used: store clock of the last use. reused: a
    prompt has gone on from its end.
    """

    key: bytes
    start: int
    stop: int
    tokens: bytes
    page_ids: tuple[int, ...]
    snapshot: int | None
    marked: bool
    last_used: int
    parent: Entry | None
    pins: int = 0
    alive: bool = True
    reused: bool = False
    children: dict[bytes, list[Entry]] = field(default_factory=dict)

    @property
    def only_child(self) -> Entry | None:
        """The child, where there is exactly one."""
        lists = list(self.children.values())
        return lists[0][0] if len(lists) == 1 and len(lists[0]) == 1 else None


@dataclass(frozen=True)
class PrefixMatch:
    """What of a prompt is stored.

    length: tokens covered by `entries`, the chain from the root on. fork: a page boundary behind `length` up
    to which the prompt agrees with a stored entry that has no snapshot there; None if there is none.
    """

    length: int
    entries: tuple[Entry, ...]
    fork: int | None


@dataclass(frozen=True)
class Inserted:
    """kept: pages that the tree holds from now on. dropped: pages that it held twice and holds no longer."""

    entry: Entry
    kept: tuple[int, ...]
    dropped: tuple[int, ...]


class PrefixTree:
    """The tree, its pins, and how many of its pages nobody pins.

    secret: keys the hashes. seed: hashed into every chain, what the pages are of. tenant, below: whose chains.

    No entry's tokens are a beginning of a sibling's, so at most one child continues a given prompt.
    """

    def __init__(self, page_len: int, secret: bytes = b"", seed: bytes = b"") -> None:
        self.page_bytes = page_len * _TOKEN_BYTES
        self._page_len = page_len
        self._secret = secret
        self._seed = seed
        self._roots: dict[bytes, Entry] = {}
        self.root = self.root_of(b"")
        self.entries: dict[Entry, None] = {}
        self.num_pages = 0
        self.unpinned_pages = 0

    def root_of(self, tenant: bytes) -> Entry:
        """Where the chains of a tenant begin; tenants see nothing of each other's."""
        root = self._roots.get(tenant)
        if root is None:
            root = Entry(self.chain_value(self._seed, tenant), 0, 0, b"", (), None, True, 0, None)
            self._roots[tenant] = root
        return root

    def match(self, tokens: bytes | bytearray, tenant: bytes = b"") -> PrefixMatch:
        """The longest stored chain that `tokens` (encoded) begin with, at least one token left to read."""
        num_tokens = len(tokens) // _TOKEN_BYTES
        limit = (num_tokens - 1) // self._page_len * self._page_len if num_tokens else 0
        tip = self.descend(self.root_of(tenant), tokens, limit)
        agreed = max((self._agreed(e, tokens, limit) for e in self._candidates(tip, tokens)), default=0)
        return PrefixMatch(tip.stop, tuple(self.chain(tip)), tip.stop + agreed if agreed else None)

    def chain(self, tip: Entry) -> list[Entry]:
        """The entries from the root (left out) to `tip`."""
        entries = []
        while tip.parent is not None:
            entries.append(tip)
            tip = tip.parent
        return entries[::-1]

    def descend(self, entry: Entry, tokens: bytes | bytearray, limit: int) -> Entry:
        """The last descendant of `entry` that ends at or before `limit` and continues `tokens`."""
        while True:
            for child in self._candidates(entry, tokens):
                if self._agreed(child, tokens, limit) == child.stop - child.start:
                    entry = child
                    break
            else:
                return entry

    def insert(
        self, parent: Entry, tokens: bytes | bytearray, stop: int, page_ids: Sequence[int], snapshot: int | None, *,
        marked: bool, last_used: int,
    ) -> Inserted:  # fmt: skip
        """Add the entry [parent.stop, stop) below `parent`, which `descend` has returned for these tokens.

        Children that begin with the same tokens are split there and move below: the new entry then keeps the
        pages of the first, and the other copies, `page_ids` too, are not the tree's.
        """
        start = parent.stop
        assert start < stop and (stop - start) % self._page_len == 0
        assert len(page_ids) == (stop - start) // self._page_len
        span = bytes(tokens[start * _TOKEN_BYTES : stop * _TOKEN_BYTES])
        candidates = list(self._candidates(parent, tokens))
        below = [e for e in candidates if self._agreed(e, tokens, stop) == stop - start]
        assert all(e.stop > stop for e in below), "the parent is not the last entry that continues the tokens"
        kept = () if below else tuple(page_ids)
        key = parent.key
        for page in self._pages_of(span):
            key = self.chain_value(key, page)
        new = Entry(key, start, stop, span, kept, snapshot, marked, last_used, parent)
        self._link(new)
        dropped: list[int] = []
        for entry in below:
            upper = self._move_below(entry, new)
            if new.page_ids:
                dropped += upper
            else:
                new.page_ids = upper
        self.num_pages += len(kept) - len(dropped)
        if not new.pins:
            self.unpinned_pages += len(new.page_ids)
        return Inserted(new, kept, tuple(dropped))

    def remove(self, entry: Entry) -> None:
        """Take out a leaf that nobody pins. Its pages and snapshot are the caller's."""
        assert not entry.pins and not entry.children
        self._unlink(entry)
        self.num_pages -= len(entry.page_ids)
        self.unpinned_pages -= len(entry.page_ids)

    def merge_into_child(self, entry: Entry) -> None:
        """Take out an entry with one child at which no sequence stands; the child takes over its pages.

        The entry's snapshot is the caller's.
        """
        child = entry.only_child
        assert child is not None and entry.parent is not None and entry.pins == child.pins
        self._unlink(entry)
        child.start = entry.start
        child.tokens = entry.tokens + child.tokens
        child.page_ids = entry.page_ids + child.page_ids
        child.parent = entry.parent
        self._link(child)

    def pin(self, tip: Entry, above: Entry | None = None) -> None:
        """One more sequence stands at `tip`: pin its chain, from below `above` (None: the root) on."""
        for entry in self._upwards(tip, above):
            if not entry.pins:
                self.unpinned_pages -= len(entry.page_ids)
            entry.pins += 1

    def unpin(self, tip: Entry) -> None:
        """A sequence leaves `tip`."""
        for entry in self._upwards(tip, None):
            assert entry.pins > 0, "unpinned twice"
            entry.pins -= 1
            if not entry.pins:
                self.unpinned_pages += len(entry.page_ids)

    def touch(self, tip: Entry, clock: int) -> None:
        """The chain of `tip` was used at `clock`."""
        for entry in self._upwards(tip, None):
            entry.last_used = clock

    def chain_value(self, key: bytes, page: bytes | bytearray) -> bytes:
        """See the function."""
        return chain_value(self._secret, key, page)

    def _upwards(self, tip: Entry, above: Entry | None) -> Iterator[Entry]:
        while tip.parent is not None and tip is not above:
            yield tip
            tip = tip.parent

    def _candidates(self, parent: Entry, tokens: bytes | bytearray) -> Sequence[Entry]:
        if not parent.children:
            return ()
        first = parent.stop * _TOKEN_BYTES
        return parent.children.get(self.chain_value(parent.key, tokens[first : first + self.page_bytes]), ())

    def _agreed(self, entry: Entry, tokens: bytes | bytearray, limit: int) -> int:
        """Tokens, in whole pages and up to `limit`, in which `entry` agrees with `tokens`."""
        base = entry.start * _TOKEN_BYTES
        end = (min(entry.stop, limit) - entry.start) * _TOKEN_BYTES
        if entry.tokens[:end] == tokens[base : base + end]:
            return end // _TOKEN_BYTES
        for at in range(0, end, self.page_bytes):
            to = at + self.page_bytes
            if entry.tokens[at:to] != tokens[base + at : base + to]:
                return at // _TOKEN_BYTES
        raise AssertionError("unequal tokens are equal page by page")

    def _move_below(self, entry: Entry, new: Entry) -> tuple[int, ...]:
        """Split `entry` at `new.stop`: its lower half goes below `new`; returns its upper half's pages."""
        self._unlink(entry)
        num_pages = len(new.tokens) // self.page_bytes
        upper, entry.page_ids = entry.page_ids[:num_pages], entry.page_ids[num_pages:]
        entry.tokens = entry.tokens[len(new.tokens) :]
        entry.start = new.stop
        entry.parent = new
        self._link(entry)
        new.pins += entry.pins
        if not entry.pins:
            self.unpinned_pages -= num_pages
        return upper

    def _link(self, entry: Entry) -> None:
        assert entry.parent is not None
        siblings = entry.parent.children.setdefault(self._first_key(entry), [])
        siblings.append(entry)
        entry.alive = True
        self.entries[entry] = None

    def _unlink(self, entry: Entry) -> None:
        assert entry.parent is not None
        key = self._first_key(entry)
        siblings = entry.parent.children[key]
        siblings.remove(entry)
        if not siblings:
            del entry.parent.children[key]
        entry.alive = False
        del self.entries[entry]

    def _first_key(self, entry: Entry) -> bytes:
        assert entry.parent is not None
        return self.chain_value(entry.parent.key, entry.tokens[: self.page_bytes])

    def _pages_of(self, tokens: bytes) -> Iterator[bytes]:
        for at in range(0, len(tokens), self.page_bytes):
            yield tokens[at : at + self.page_bytes]
