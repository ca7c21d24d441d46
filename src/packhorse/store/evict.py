"""What the store forgets first. Pure Python.

Pages come back by dropping whole entries: the least recently used leaf that nobody pins. Where only snapshot
slots are short, an interior entry with one child gives up its snapshot and its pages go to the child: the
prefix stays, only a prompt that leaves it in between has to read more.
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


def thinnable(tree: PrefixTree, *, marked: bool) -> Entry | None:
    """The interior entry whose snapshot is missed least, among those marked or not; None if there is none.

    It has one child and no open sequence stands at it (one further down does not need its snapshot). Oldest
    first; of one chain the one that makes the shortest merged entry, which keeps what remains spread out.
    """
    best: Entry | None = None
    best_cost = (0, 0)
    for entry in tree.entries:
        child = entry.only_child
        if child is None or entry.marked is not marked or entry.pins != child.pins:
            continue
        cost = (entry.last_used, child.stop - entry.start)
        if best is None or cost < best_cost:
            best, best_cost = entry, cost
    return best
