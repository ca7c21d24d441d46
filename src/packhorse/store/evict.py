"""What the store forgets first. Pure Python.

Pages come back by dropping whole entries: the least recently used leaf that nobody pins. Where only snapshot
slots are short, a short leaf goes before a long one that has not been used for as long, and an interior entry with
one child gives up its snapshot and its pages go to the child: the prefix stays, only a prompt that leaves it in
between has to read more.
"""

from __future__ import annotations

import heapq
from itertools import count

from packhorse.store.prefix import Entry, PrefixTree


class LeafQueue:
    """Unpinned leaves of the tree, least recently used first.

    `offer` an entry whenever it may have become one; those that are none any more are passed over.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._heap: list[tuple[int, int, Entry]] = []
        self._order = count()

    def offer(self, entry: Entry) -> None:
        """`entry` lost a pin or its last child."""
        item = (entry.last_used, next(self._order), entry)
        if self._is_current(item):
            heapq.heappush(self._heap, item)
        if len(self._heap) > 2 * len(self._tree.entries) + 64:
            self._heap = [old for old in self._heap if self._is_current(old)]
            heapq.heapify(self._heap)

    def pop(self) -> Entry | None:
        """Take the least recently used unpinned leaf, if there is one. The caller removes it from the tree
        and offers its parent."""
        while self._heap:
            item = heapq.heappop(self._heap)
            if self._is_current(item):
                return item[2]
        return None

    def _is_current(self, item: tuple[int, int, Entry]) -> bool:
        last_used, _, entry = item
        evictable = entry.alive and entry.parent is not None and not entry.pins and not entry.children
        return evictable and entry.last_used == last_used


def spare_leaf(tree: PrefixTree, clock: int) -> Entry | None:
    """The unpinned leaf whose snapshot is missed least: the longer unused and the fewer tokens to read again, the
    less. So the ends of single questions go before the document that they are about, and before others.
    """
    leaves = [entry for entry in tree.entries if not entry.pins and not entry.children]
    return max(leaves, key=lambda e: (clock + 1 - e.last_used) / (e.stop - e.start), default=None)


def thinnable(
    tree: PrefixTree, *, marked: bool, growing: Entry | None = None, grown: int = 0
) -> Entry | None:
    """The entry whose snapshot is missed least, among those marked or not; None if there is none.

    It is an interior one with one child, at which no open sequence stands (one further down does not need its
    snapshot). Those from which no prompt has gone on first, then the oldest; of one chain the one that makes the
    shortest merged entry, which keeps what remains spread out. growing: a leaf of which the same may be said once the
    one sequence that stands at it has added its pages up to `grown`: it is returned instead of an interior one that
    would be missed more, and never where there is none.
    """
    best: Entry | None = None
    best_cost = (True, 0, 0)
    for entry in tree.entries:
        child = entry.only_child
        if child is None or entry.marked is not marked or entry.pins != child.pins:
            continue
        cost = (entry.reused, entry.last_used, child.stop - entry.start)
        if best is None or cost < best_cost:
            best, best_cost = entry, cost
    if best is None or growing is None or growing.children or growing.pins != 1:
        return best
    cost = (growing.reused, growing.last_used, grown - growing.start)
    return growing if growing.parent is not None and cost < best_cost else best
