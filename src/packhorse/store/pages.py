"""Which pages are free, and who holds the others. Pure Python: a page is a number here.

    id      0   1   2   3   4   5   6   7   8   9
          [ A   A   A ][ . ][ B   B ][ .   .   .   . ]      A, B: holders;  .: free
    free runs: 3 (1 page), 6 (4 pages, the tail)

A sequence takes all the pages of its worst case at once, so nobody who runs ever lacks a page. Runs of
consecutive ids are preferred, because the codec reads those without gathering, and low ids, so that the tail
stays free for other uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def consecutive_runs(page_ids: Sequence[int]) -> list[range]:
    """`page_ids` cut into the fewest ranges of consecutive ids, in order."""
    runs: list[range] = []
    first = 0
    for i in range(1, len(page_ids) + 1):
        if i == len(page_ids) or page_ids[i] != page_ids[i - 1] + 1:
            runs.append(range(page_ids[first], page_ids[i - 1] + 1))
            first = i
    return runs


class PageAllocator:
    """Pages 0 .. num_pages with a reference count each.

    A page is free while nobody holds it. Free pages are kept as maximal runs: giving one back costs O(1), taking
    pages a look at each run.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 0
        self.num_pages = num_pages
        self.num_free = num_pages
        self._holders = [0] * num_pages
        self._length: dict[int, int] = {}  # first page of a free run -> pages
        self._start: dict[int, int] = {}  # page after a free run -> first page
        if num_pages:
            self._add_run(0, num_pages)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` free pages, each with one holder; the caller has seen that so many are free.

        In order of preference: the run that follows page `after`; the lowest that is long enough; the longest.
        """
        assert 0 <= count <= self.num_free, f"{count} pages asked, {self.num_free} free"
        taken: list[int] = []
        for start in self._choose_runs(count, None if after is None else after + 1):
            missing = count - len(taken)
            if not missing:
                break
            length = self._length[start]
            self._remove_run(start)
            used = min(length, missing)
            if used < length:
                self._add_run(start + used, length - used)
            taken += range(start, start + used)
        for page in taken:
            self._holders[page] = 1
        self.num_free -= count
        return taken

    def share(self, page_ids: Iterable[int]) -> None:
        """One more holder for each of these pages, none of which is free."""
        for page in page_ids:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self._holders[page] += 1

    def release(self, page_ids: Iterable[int]) -> list[int]:
        """One holder less for each of these pages; returns those that are free now, in ascending order."""
        freed = []
        for page in page_ids:
            assert self._holders[page] > 0, f"page {page} is released twice"
            self._holders[page] -= 1
            if not self._holders[page]:
                freed.append(page)
        freed.sort()
        for run in consecutive_runs(freed):
            self._free_run(run.start, len(run))
        self.num_free += len(freed)
        return freed

    def holders(self, page: int) -> int:
        """How many hold this page."""
        return self._holders[page]

    @property
    def tail(self) -> range:
        """The free pages at the end, maybe none."""
        return range(self._start.get(self.num_pages, self.num_pages), self.num_pages)

    def free_runs(self) -> list[range]:
        """The maximal runs of free pages, in ascending order."""
        return [range(start, start + length) for start, length in sorted(self._length.items())]

    def _choose_runs(self, count: int, wanted: int | None) -> list[int]:
        """Where the runs begin that `count` pages are to be taken from, in order."""
        long = [start for start, length in self._length.items() if length >= count]
        first: list[int] = []
        if wanted is not None and self._length.get(wanted, 0) >= (count if long else 1):
            first = [wanted]
        if long:
            return first or [min(long)]
        others = sorted(self._length, key=lambda start: (-self._length[start], start))
        return first + [start for start in others if start != wanted]

    def _free_run(self, start: int, length: int) -> None:
        before = self._start.get(start)
        if before is not None:
            length += self._length[before]
            self._remove_run(before)
            start = before
        behind = self._length.get(start + length)
        if behind is not None:
            self._remove_run(start + length)
            length += behind
        self._add_run(start, length)

    def _add_run(self, start: int, length: int) -> None:
        self._length[start] = length
        self._start[start + length] = start

    def _remove_run(self, start: int) -> None:
        length = self._length.pop(start)
        del self._start[start + length]
