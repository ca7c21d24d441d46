"""Where recurrent-state snapshots are wanted, and which state slots hold them. Pure Python.

    slot     0 .. sequences      active state of the open sequences, changed by every step
             the others          `sequences` rolling snapshots of them and `snapshots` of entries

A rolling snapshot is the state at the last page boundary a sequence has crossed while it generates; when the
sequence ends, that slot becomes an entry's without a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

THINNING = 8
"""What of the tokens behind it a snapshot may stand from the next: see `thinned`."""
OLD_THINNING = 1
"""The same, of what has not been used for long."""


class WantedSnapshot(NamedTuple):
    """A page boundary to snapshot. marked: for a mark, the prompt's end or a fork, not the grid alone."""

    position: int
    marked: bool


def wanted_positions(
    prompt_len: int, marks: Iterable[int], fork: int | None, page_len: int, snapshot_len: int, start: int
) -> list[WantedSnapshot]:
    """Boundaries behind `start` at which a prompt's prefill stops for a snapshot, in ascending order.

    The absolute grid of snapshot_len, the last page boundary at or before each mark, the last before the
    prompt's last token, and the fork. All are multiples of page_len in (start, prompt_len).
    """
    last = (prompt_len - 1) // page_len * page_len
    marked = {min(mark, last) // page_len * page_len for mark in marks} | {last}
    if fork is not None:
        marked.add(fork)
    grid = range(start // snapshot_len * snapshot_len + snapshot_len, last + 1, snapshot_len)
    return [WantedSnapshot(p, p in marked) for p in sorted(marked.union(grid)) if p > start]


def thinned(
    positions: Sequence[int], stays: Collection[int] = (), share: int = THINNING, before: int = 0
) -> set[int]:
    """Of one chain's snapshots, in ascending order, those that may go: the further behind, the sparser the rest.

    The last stays, and those in `stays`. A prompt that leaves the chain anywhere reads at most a `share`-th of the
    distance from there to the last again beyond what it would have read. before: the last snapshot before them all.
    """
    gone = set()
    for position, after in pairwise(positions):
        if position not in stays and after - before <= (positions[-1] - after) // share:
            gone.add(position)
        else:
            before = position
    return gone


class StateSlots:
    """Numbers of the recurrent-state slots and who has them.

    At most `sequences` active, as many rolling, and `snapshots` of entries at any time; a rolling slot and an
    entry's come from one pool, so that one becomes the other by counting alone.
    """

    def __init__(self, sequences: int, snapshots: int) -> None:
        self.sequences = sequences
        self.snapshots = snapshots
        self.num_slots = 2 * sequences + snapshots
        self.num_entries = 0
        self.num_rolling = 0
        self._active = list(reversed(range(sequences)))
        self._pool = list(reversed(range(sequences, self.num_slots)))

    @property
    def num_active(self) -> int:
        return self.sequences - len(self._active)

    @property
    def entry_available(self) -> bool:
        """Whether one more entry may have a snapshot."""
        return self.num_entries < self.snapshots

    def take_active(self) -> int | None:
        """A slot for an open sequence, or None while all are taken."""
        return self._active.pop() if self._active else None

    def free_active(self, slot: int) -> None:
        """The sequence in `slot` has ended."""
        assert slot not in self._active
        self._active.append(slot)

    def take_rolling(self) -> int:
        """A slot for the rolling snapshot of an open sequence; there is always one."""
        self.num_rolling += 1
        assert self.num_rolling <= self.sequences
        return self._pool.pop()

    def take_entry(self) -> int:
        """A slot for the snapshot of an entry. Only while `entry_available`."""
        assert self.entry_available
        self.num_entries += 1
        return self._pool.pop()

    def promote(self, rolling: int) -> int:
        """Make a rolling slot an entry's. Only while `entry_available`."""
        assert self.entry_available and rolling not in self._pool
        self.num_rolling -= 1
        self.num_entries += 1
        return rolling

    def free_rolling(self, slot: int) -> None:
        """Give back a rolling slot."""
        self.num_rolling -= 1
        self._give_back(slot)

    def free_entry(self, slot: int) -> None:
        """Give back an entry's slot."""
        self.num_entries -= 1
        self._give_back(slot)

    def _give_back(self, slot: int) -> None:
        assert slot >= self.sequences and slot not in self._pool, f"state slot {slot} is given back twice"
        self._pool.append(slot)
