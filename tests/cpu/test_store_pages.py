"""Page numbers: who holds them, which are preferred, and that none is lost or given out twice."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.store.pages import PageAllocator, consecutive_runs


def test_runs():
    assert consecutive_runs([]) == []
    assert consecutive_runs([4]) == [range(4, 5)]
    assert consecutive_runs([4, 5, 6, 2, 3, 9]) == [range(4, 7), range(2, 4), range(9, 10)]


def holed() -> PageAllocator:
    """Free: 2-3, 6-11, 14-15 of 16."""
    pages = PageAllocator(16)
    pages.allocate(16)
    pages.release([2, 3, *range(6, 12), 14, 15])
    return pages


def test_the_run_that_follows_is_preferred_where_it_is_long_enough():
    assert holed().allocate(2, after=1) == [2, 3]
    assert holed().allocate(2, after=13) == [14, 15]
    assert holed().allocate(3, after=1) == [6, 7, 8]


def test_one_run_is_preferred_to_several():
    assert holed().allocate(6) == [6, 7, 8, 9, 10, 11]
    pages = holed()
    pages.allocate(1, after=5)
    assert pages.allocate(5) == [7, 8, 9, 10, 11], "in its own size class"


def test_several_runs_where_no_single_one_is_long_enough():
    assert consecutive_runs(holed().allocate(8))[0] == range(6, 12)
    assert consecutive_runs(holed().allocate(8, after=1))[:2] == [range(2, 4), range(6, 12)]
    assert sorted(holed().allocate(10)) == [2, 3, *range(6, 12), 14, 15]


def test_a_page_is_free_when_its_last_holder_leaves():
    pages = PageAllocator(4)
    taken = pages.allocate(3)
    pages.share(taken[:1])
    assert pages.release(taken) == [1, 2] and pages.num_free == 3
    assert pages.release([0]) == [0]
    assert pages.free_runs() == [range(4)]


def test_misuse_is_caught():
    pages = PageAllocator(4)
    pages.allocate(2)
    with pytest.raises(AssertionError, match="released twice"):
        pages.release([0, 0])
    with pytest.raises(AssertionError, match="is free"):
        pages.share([3])
    with pytest.raises(AssertionError, match="5 pages asked"):
        pages.allocate(5)


@settings(max_examples=150, deadline=None)
@given(size=st.integers(0, 40), data=st.data())
def test_against_a_set(size, data):
    pages = PageAllocator(size)
    free, held = set(range(size)), []
    for _ in range(data.draw(st.integers(0, 25))):
        if held and data.draw(st.booleans()):
            taken = held.pop(data.draw(st.integers(0, len(held) - 1)))
            keep = set(data.draw(st.lists(st.sampled_from(taken), unique=True)) if taken else [])
            gone = [p for p in taken if p not in keep]
            assert pages.release(gone) == sorted(gone)
            free |= set(gone)
            held.append([p for p in taken if p in keep])
        else:
            count = data.draw(st.integers(0, len(free)))
            after = data.draw(st.none() | st.integers(0, size))
            runs = [run for run in pages.free_runs() if len(run) >= max(count, 1)]
            following = [run for run in runs if after is not None and run.start == after + 1]
            taken = pages.allocate(count, after)
            assert len(set(taken)) == count and set(taken) <= free
            if following:
                assert taken == list(following[0])[:count]
            elif count and any(len(run) >= 2 * count for run in runs):
                assert len(consecutive_runs(taken)) == 1
            free -= set(taken)
            held.append(taken)
        assert pages.num_free == len(free)
        assert [p for run in pages.free_runs() for p in run] == sorted(free)
        runs = pages.free_runs()
        assert all(a.stop < b.start for a, b in pairwise(runs)), "runs are maximal"


def test_many_pages_are_cheap():
    """Half a million pages in alternating order: quadratic work would take minutes."""
    pages = PageAllocator(500_000)
    taken = pages.allocate(500_000)
    for page in taken[::2]:
        pages.release([page])
    for page in taken[1::2]:
        pages.release([page])
    assert pages.free_runs() == [range(500_000)]
