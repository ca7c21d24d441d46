"""Where snapshots are wanted, and who has which state slot."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.store.snapshots import StateSlots, thinned, wanted_positions


def test_grid_marks_end_and_fork():
    wanted = wanted_positions(
        20_000, marks=(130, 8192, 19_999), fork=640, page_len=64, snapshot_len=8192, start=0
    )
    assert wanted == [(128, True), (640, True), (8192, True), (16_384, False), (19_968, True)]


@pytest.mark.parametrize(
    ("prompt_len", "expected"),
    [(1, []), (63, []), (64, []), (65, [64]), (127, [64]), (128, [64]), (129, [128])],
)
def test_the_last_boundary_before_the_last_token(prompt_len, expected):
    wanted = wanted_positions(prompt_len, (prompt_len,), None, 64, 8192, 0)
    assert [w.position for w in wanted] == expected


def test_nothing_at_or_before_what_is_stored():
    assert wanted_positions(300, (64, 128), None, 64, 64, start=256) == []
    assert [w.position for w in wanted_positions(300, (64,), 192, 64, 64, start=128)] == [192, 256]


@given(
    prompt_len=st.integers(1, 400),
    page_len=st.integers(1, 9),
    pages=st.integers(1, 6),
    data=st.data(),
)
def test_they_are_boundaries_in_order(prompt_len, page_len, pages, data):
    last = (prompt_len - 1) // page_len
    start = data.draw(st.integers(0, last)) * page_len
    marks = data.draw(st.lists(st.integers(1, prompt_len), max_size=4))
    grid = pages * page_len
    wanted = wanted_positions(prompt_len, marks, None, page_len, grid, start)
    positions = [w.position for w in wanted]
    assert positions == sorted(set(positions))
    assert all(start < p < prompt_len and p % page_len == 0 for p in positions)
    by_mark = {m // page_len * page_len for m in marks if m < prompt_len} | {last * page_len}
    everything = by_mark | set(range(0, prompt_len, grid))
    assert set(positions) == {p for p in everything if p > start}
    assert {w.position for w in wanted if w.marked} == {p for p in by_mark if p > start}


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.sampled_from([1, 2, 8]), st.data())
def test_the_further_behind_the_sparser(gaps, share, data):
    """Wherever a chain is left, little more of it is read again; ends and what has to stay do; once is enough."""
    positions = list(accumulate(gaps))
    stays = set(data.draw(st.lists(st.sampled_from(positions), max_size=5)))
    gone = thinned(positions, stays, share)
    left = [p for p in positions if p not in gone]
    assert left[-1] == positions[-1] and stays <= set(left) and gone < {*positions}
    for leaving in range(positions[-1] + 1):
        before = max((p for p in positions if p <= leaving), default=0)
        reused = max((p for p in left if p <= leaving), default=0)
        assert before - reused <= (positions[-1] - leaving) / share
    assert thinned(left, stays, share) == set()


def test_a_long_chat_keeps_few():
    turns = range(500, 100_001, 500)
    assert [len(set(turns) - thinned(turns, (), share)) for share in (8, 1)] == [39, 9]


def test_slots_of_the_three_kinds():
    slots = StateSlots(sequences=2, snapshots=1)
    assert slots.num_slots == 5
    assert [slots.take_active() for _ in range(3)] == [0, 1, None]
    rolling = [slots.take_rolling(), slots.take_rolling()]
    entry = slots.take_entry()
    assert sorted([*rolling, entry]) == [2, 3, 4]
    assert not slots.entry_available
    slots.free_entry(entry)
    assert slots.promote(rolling[0]) == rolling[0] and not slots.entry_available
    assert slots.take_rolling() == entry, "the sequence that takes over always finds a rolling slot"
    slots.free_active(1)
    assert slots.num_active == 1


def test_slot_misuse_is_caught():
    slots = StateSlots(sequences=1, snapshots=1)
    slots.take_active()
    entry = slots.take_entry()
    with pytest.raises(AssertionError):
        slots.take_entry()
    slots.free_entry(entry)
    with pytest.raises(AssertionError, match="twice"):
        slots.free_entry(entry)
    slots.take_rolling()
    with pytest.raises(AssertionError):
        slots.take_rolling()
