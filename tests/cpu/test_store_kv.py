"""The store as the engine uses it: reuse, forks, thinning, eviction, waiting, refusing, cancelling."""

import psutil
import pytest
import torch

import store_model as model
from packhorse.core.errors import DoesNotFitError, UsageError
from packhorse.core.formats import kv_token_bytes
from packhorse.core.types import LayerKind, Span
from packhorse.facts.model import DeltaFacts
from packhorse.quant.codec import PlainCodec
from packhorse.store import kv
from packhorse.store.kv import MAX_RUNS, KVStore
from packhorse.store.tier import ALIGNMENT, StoreGeometry

PAGE = 4
BOTH = pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])


def text(length: int, seed: int = 1) -> list[int]:
    """Tokens that no other seed shares a page with."""
    return [(i * 7919 + seed * 104_729) % 50_000 for i in range(length)]


DOC = text(18)


def stops(store: KVStore) -> list[int]:
    return sorted(e.stop for e in store._tree.entries)


# Reuse


@BOTH
@pytest.mark.parametrize("length", [1, 2, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1])
def test_the_same_prompt_again_rereads_from_the_last_boundary_before_its_last_token(hybrid, length):
    store = model.make_store(hybrid=hybrid)
    assert model.run(store, text(length)) == 0
    assert model.run(store, text(length)) == (length - 1) // PAGE * PAGE
    assert model.run(store, text(length)) == (length - 1) // PAGE * PAGE
    model.check_all_free(store)


@BOTH
def test_the_next_turn_goes_on_from_the_last_page_of_the_answer(hybrid):
    store = model.make_store(hybrid=hybrid)
    answer = text(9, seed=2)
    assert model.run(store, DOC, answer) == 0
    turn = DOC + answer + text(3, seed=3)
    assert model.run(store, turn, text(6, seed=4)) == (18 + 9) // PAGE * PAGE
    assert model.run(store, turn + text(6, seed=4) + [1]) == (30 + 6) // PAGE * PAGE


@BOTH
def test_the_next_turn_reads_one_run_of_pages(hybrid):
    """The pages behind those of the last turn are free again, and a smaller run elsewhere is not taken."""
    store = model.make_store(hybrid=hybrid, num_pages=16, sequences=3)
    other = store.open([9], 2 * PAGE)
    turn = store.open(DOC, 24)
    behind = store.open([8], 2 * PAGE)
    model.prefill(store, turn)
    store.close(turn)
    store.close(other)
    again = store.open(DOC, 24)
    assert again.cached_len == 16
    assert [f.page_ids for f in again.fragments] == [range(2, 8)]
    store.close(behind)
    store.close(again)


@BOTH
def test_another_question_on_a_marked_document_hits_at_once(hybrid):
    store = model.make_store(hybrid=hybrid)
    assert model.run(store, DOC + text(9, seed=2), marks=[len(DOC)]) == 0
    assert model.run(store, DOC + text(9, seed=3), marks=[len(DOC)]) == 16


def test_without_a_mark_the_second_prompt_finds_the_fork_and_the_third_hits():
    store = model.make_store(hybrid=True)
    assert model.run(store, DOC + text(9, seed=2)) == 0
    match = store.match(DOC + text(9, seed=3))
    assert (match.length, match.fork) == (0, 16)
    assert model.run(store, DOC + text(9, seed=3)) == 0
    assert stops(store) == [16, 24, 24], "the first entry was split where the second prompt left it"
    assert model.run(store, DOC + text(9, seed=4)) == 16
    assert model.run(store, DOC + text(9, seed=2)) == 24


@BOTH
def test_prompts_that_share_nothing_reuse_nothing(hybrid):
    store = model.make_store(hybrid=hybrid)
    model.run(store, DOC)
    assert model.run(store, text(18, seed=9)) == 0
    assert store.stats.hits == 0 and store.stats.opened == 2


@BOTH
def test_two_sequences_share_pages_and_neither_writes_them(hybrid):
    store = model.make_store(hybrid=hybrid)
    model.run(store, DOC)
    one = store.open(DOC + text(5, seed=2), 30)
    two = store.open(DOC + text(5, seed=3), 30)
    assert one.cached_len == two.cached_len == 16 and one.slot != two.slot
    assert one.page_ids[:4] == two.page_ids[:4]
    assert not set(one.page_ids[4:]) & set(two.page_ids[4:])
    for sequence in (one, two):
        model.prefill(store, sequence)
    with pytest.raises(AssertionError, match="leaves a gap"):
        store.views([Span(one.slot, 0, 12, 1)])
    store.close(one)
    model.check(store)
    model.run_step(store, [(two, [5])])
    store.close(two)
    model.check_all_free(store)


@BOTH
def test_identical_prompts_at_once_are_stored_once(hybrid):
    store = model.make_store(hybrid=hybrid, num_pages=20)
    pair = [store.open(DOC, 24), store.open(DOC, 24)]
    for sequence in pair:
        model.prefill(store, sequence, chunk=5)
    entries = stops(store)
    assert entries == ([16] if hybrid else [4, 8, 12, 16])
    assert store.stats.pages_cached == 4 and store.stats.pages_used == 2 + 6
    for token in (1, 2, 3):
        model.run_step(store, [(sequence, [token]) for sequence in pair])
    for sequence in pair:
        store.close(sequence)
        model.check(store)
    assert stops(store) == sorted([*entries, 20])
    model.check_all_free(store)


# Snapshots


def test_prefill_stops_where_a_snapshot_is_wanted():
    store = model.make_store(hybrid=True, snapshot_len=12)
    sequence = store.open(DOC, 30, marks=[7])
    reached = []
    while sequence.next_boundary is not None:
        reached.append(sequence.next_boundary)
        stop = sequence.next_boundary
        model.run_step(store, [(sequence, DOC[sequence.position : stop])])
    assert reached == [4, 12, 16] == stops(store)
    with pytest.raises(AssertionError, match="across a snapshot boundary"):
        other = store.open(text(9, seed=5), 9)
        model.run_step(store, [(other, text(9, seed=5))])


def test_dense_models_want_no_boundary():
    assert model.make_store().open(DOC, 30, marks=[7]).next_boundary is None


def test_a_long_document_with_few_snapshots_keeps_its_end_and_thins_its_grid():
    store = model.make_store(hybrid=True, num_pages=40, snapshots=4, snapshot_len=PAGE)
    document = text(100)
    assert model.run(store, document + text(7, seed=2), text(5, seed=3), marks=[100]) == 0
    kept = stops(store)
    assert kept[-3:] == [100, 104, 112] and len(kept) == 4, "document, prompt and turn end, one of the grid"
    assert store.stats.skipped_snapshots == 0 and store.stats.thinned_entries == 23
    assert store.stats.pages_cached == 28, "thinning gives up no page"
    assert model.run(store, document + text(7, seed=4), marks=[100]) == 100


def test_what_remains_of_a_grid_is_spread_out():
    store = model.make_store(hybrid=True, num_pages=40, snapshots=5, snapshot_len=PAGE)
    model.run(store, text(129))
    assert len(stops(store)) == 5
    gaps = [b - a for a, b in zip([0, *stops(store)], stops(store), strict=False)]
    assert max(gaps) <= 64


def test_without_snapshots_nothing_is_reused_and_that_is_counted():
    store = model.make_store(hybrid=True, snapshots=0)
    model.run(store, DOC, text(8, seed=2))
    assert model.run(store, DOC) == 0
    assert store.stats.skipped_snapshots == 2 and store.stats.entries == 0
    model.check_all_free(store)


def test_a_snapshot_is_skipped_where_every_slot_is_at_the_end_of_an_open_sequence():
    store = model.make_store(hybrid=True, snapshots=1)
    first = store.open(DOC, 18)
    model.prefill(store, first)
    second = store.open(text(9, seed=2), 9)
    model.prefill(store, second)
    assert store.stats.skipped_snapshots == 1 and stops(store) == [16]
    store.close(second)
    store.close(first)
    model.check_all_free(store)


def test_the_turn_end_takes_over_the_rolling_snapshot_without_a_copy():
    store = model.make_store(hybrid=True)
    sequence = store.open(DOC, 30)
    model.prefill(store, sequence)
    for token in range(3):
        model.run_step(store, [(sequence, [token])])
    rolling = sequence.rolling
    assert (sequence.rolling_position, sequence.position) == (20, 21)
    store.close(sequence)
    assert [e.snapshot for e in store._tree.entries if e.stop == 20] == [rolling]
    model.check(store)


@pytest.mark.parametrize("still_open", [False, True])
def test_copies_made_at_the_same_time_become_one_when_their_fork_is_seen(still_open):
    store = model.make_store(hybrid=True, num_pages=24, sequences=3)
    pair = [store.open(DOC + text(9, seed=s), 28) for s in (2, 3)]
    for sequence in pair:
        model.prefill(store, sequence)
    assert stops(store) == [24, 24] and store.stats.pages_cached == 12
    if not still_open:
        for sequence in pair:
            store.close(sequence)
    assert model.run(store, DOC + text(3, seed=4)) == 0
    assert stops(store) == [16, 20, 24, 24] and store.stats.pages_cached == 4 + 1 + 2 + 2
    if still_open:
        for sequence in pair:
            model.run_step(store, [(sequence, [7])])
            store.close(sequence)
            model.check(store)
    assert [model.run(store, DOC + text(9, seed=s)) for s in (2, 3)] == [24, 24]
    model.check_all_free(store)


def test_an_old_turn_end_goes_before_a_document_end():
    store = model.make_store(hybrid=True, snapshots=2)
    model.run(store, DOC + text(9, seed=2), marks=[len(DOC)])
    assert stops(store) == [16, 24]
    model.run(store, text(9, seed=3))
    assert stops(store) == [8, 16] and store.match(DOC).length == 16


def test_of_many_marks_those_stay_that_are_spread_out():
    store = model.make_store(hybrid=True, snapshots=2)
    sequence = store.open(DOC, 18, marks=[4, 8, 12])
    model.prefill(store, sequence)
    assert stops(store) == [8, 16] and store.stats.thinned_entries == 2
    assert store.stats.skipped_snapshots == 0
    model.check(store)


@pytest.mark.parametrize("snapshots", [2, 3, 4, 8])
@pytest.mark.parametrize("marked", [True, False])
def test_a_document_keeps_its_end_whatever_is_asked_about_it(snapshots, marked):
    """24 steps of the grid, and 16 pages beside the document: neither questions of several lengths nor a long chat
    take the place of its end."""
    grid, document = 8 * PAGE, text(24 * 8 * PAGE, seed=1)
    store = model.make_store(
        hybrid=True, num_pages=24 * 8 + 16, sequences=1, snapshots=snapshots, snapshot_len=grid
    )
    model.run(store, document, [7], marks=[len(document)] if marked else [])
    for number, length in enumerate((4, 4, 16, 40, 16, 40, 7, 9)):
        assert model.run(store, document + text(length, seed=9 + number), [7, 8]) == len(document)
    chat = document + text(6, seed=2)
    for number in range(12):
        turn = [number + 1] * 3
        reused = model.run(store, chat, turn)
        chat += [*turn, *text(2, seed=50 + number)]
        assert reused >= len(document) and len(chat) - reused <= 6 + 5 + 2 * PAGE
    assert model.run(store, document + text(9, seed=3)) == len(document)
    assert store.stats.skipped_snapshots <= 2


def test_questions_about_one_document_do_not_drop_another():
    """Snapshots are short and pages are not: the ends of questions go first."""
    store = model.make_store(hybrid=True, num_pages=100, snapshots=5)
    one, two = text(80, seed=1), text(80, seed=2)
    for document in (one, two):
        model.run(store, document, [7], marks=[len(document)])
    for number in range(9):
        assert model.run(store, two + text(9, seed=9 + number), [7, 8]) == 80
    assert model.run(store, one + text(9, seed=3)) >= 76


def run_with_grid(store: KVStore, seed: int) -> None:
    """Grid entries at 4 and 8, the prompt's end at 12."""
    model.run(store, text(13, seed=seed))


def test_an_open_sequence_thins_old_chains_before_its_own():
    store = model.make_store(hybrid=True, num_pages=40, snapshots=6, snapshot_len=PAGE)
    run_with_grid(store, seed=1)
    run_with_grid(store, seed=2)
    again = store.open(text(13, seed=1) + text(8, seed=3), 21)
    model.prefill(store, again)
    assert store.match(text(13, seed=2)).fork is None
    assert sorted(e.stop for e in store._tree.chain(again.tip)) == [4, 8, 12, 16, 20]
    assert [e.stop for e in store.match(text(13, seed=2)).entries] == [12]
    model.check(store)


def test_a_new_sequence_thins_old_chains_before_its_own():
    store = model.make_store(hybrid=True, num_pages=40, snapshots=6, snapshot_len=PAGE)
    run_with_grid(store, seed=1)
    run_with_grid(store, seed=2)
    sequence = store.open(text(17, seed=3), 17)
    model.prefill(store, sequence)
    assert sorted(e.stop for e in store._tree.chain(sequence.tip)) == [4, 8, 12, 16]
    model.check(store)


# Room


@BOTH
def test_too_long_for_the_store_is_refused_with_both_numbers(hybrid):
    store = model.make_store(hybrid=hybrid, num_pages=5)
    with pytest.raises(DoesNotFitError, match=r"21 tokens.*holds 20") as caught:
        store.open(DOC, 21)
    assert (caught.value.asked, caught.value.available, caught.value.unit) == (21, 20, "tokens")
    assert caught.value.hint
    sequence = store.open(DOC, 20)
    model.prefill(store, sequence)
    model.run_step(store, [(sequence, [1])])
    model.run_step(store, [(sequence, [2])])
    with pytest.raises(AssertionError, match="beyond max_len"):
        store.views([Span(sequence.slot, 0, 20, 1)])


@BOTH
def test_what_does_not_fit_now_waits_and_changes_nothing(hybrid):
    store = model.make_store(hybrid=hybrid, num_pages=8)
    first = store.open(DOC, 20)
    before = store.stats
    assert store.open(text(9, seed=2), 24) is None
    assert store.stats == before
    model.prefill(store, first)
    assert store.open(text(9, seed=2), 24) is None, "pages of an open sequence are not evicted"
    store.close(first)
    second = store.open(text(9, seed=2), 24)
    assert second is not None and store.stats.evicted_entries > 0
    model.prefill(store, second)
    model.check(store)


def test_no_more_sequences_than_slots():
    store = model.make_store(sequences=1)
    first = store.open(DOC, 20)
    assert store.open([1], 1) is None
    store.close(first)
    assert store.open([1], 1) is not None


@BOTH
def test_the_least_recently_used_goes_first(hybrid):
    store = model.make_store(hybrid=hybrid, num_pages=12)
    a, b, c = text(17, seed=1), text(17, seed=2), text(17, seed=3)
    model.run(store, a)
    model.run(store, b)
    assert model.run(store, a) == 16
    model.run(store, c)
    assert store.match(a).length == 16 and store.match(b).length == (0 if hybrid else 12)


@BOTH
def test_use_ends_when_a_sequence_closes(hybrid):
    store = model.make_store(hybrid=hybrid, num_pages=12)
    first, second = store.open(text(17, seed=1), 17), store.open(text(17, seed=2), 17)
    for sequence in (first, second):
        model.prefill(store, sequence)
    store.close(second)
    store.close(first)
    model.run(store, text(17, seed=3))
    assert store.match(text(17, seed=1)).length == 16
    assert store.match(text(17, seed=2)).length == (0 if hybrid else 12)


@BOTH
def test_a_prefix_cannot_be_reused_and_evicted_at_once(hybrid):
    store = model.make_store(hybrid=hybrid, num_pages=8)
    model.run(store, text(17))
    other = store.open([1], 2 * PAGE)
    before = store.stats
    assert store.open(text(17) + [1], 8 * PAGE) is None
    assert store.stats == before
    store.close(other)
    assert store.open(text(17) + [1], 8 * PAGE).cached_len == 16


@BOTH
def test_pages_of_a_matched_prefix_are_not_evicted_to_make_room_behind_it(hybrid):
    store = model.make_store(hybrid=hybrid, num_pages=8)
    model.run(store, text(17))
    sequence = store.open(text(17) + text(3, seed=2), 32)
    assert sequence.cached_len == 16 and store.stats.evicted_entries == 0
    model.prefill(store, sequence)
    model.check(store)


@BOTH
def test_clear_spares_what_is_in_use(hybrid):
    store = model.make_store(hybrid=hybrid)
    model.run(store, DOC)
    model.run(store, text(9, seed=2))
    sequence = store.open(DOC, 20)
    store.clear()
    assert store.stats.pages_cached == 4 and store.match(DOC).length == 16
    model.prefill(store, sequence)
    store.close(sequence)
    model.check_all_free(store)


@pytest.mark.parametrize(("exact", "longest"), [(True, 256), (False, 8192)])
def test_pages_longer_than_a_segment_are_refused(exact, longest):
    assert model.make_store(page_len=longest, num_pages=1, exact=exact).segment_len == longest
    assert model.make_store(page_len=100, num_pages=1, exact=exact).segment_len == longest // 100 * 100
    with pytest.raises(UsageError, match=rf"{longest + 1} tokens.*{longest} "):
        model.make_store(page_len=longest + 1, num_pages=1, exact=exact)


# Cancelling


@pytest.mark.parametrize("keep", [True, False])
@BOTH
def test_cancelled_before_anything_was_read(hybrid, keep):
    store = model.make_store(hybrid=hybrid)
    store.close(store.open(DOC, 40), keep=keep)
    assert store.stats.pages_free == 16
    model.check_all_free(store)


def test_a_cancelled_prefill_keeps_what_it_has_read():
    for keep, kept in ((True, [4, 8]), (False, [])):
        store = model.make_store(hybrid=True)
        sequence = store.open(DOC, 40, marks=[4])
        for stop in (4, 8):
            model.run_step(store, [(sequence, DOC[sequence.position : stop])])
        store.close(sequence, keep=keep)
        assert stops(store) == kept and store.stats.pages_used == 0
        assert model.run(store, DOC) == (kept[-1] if kept else 0)


def test_a_step_that_failed_half_way_leaves_no_snapshot_of_its_state():
    store = model.make_store(hybrid=True)
    sequence = store.open(DOC, 40)
    model.run_step(store, [(sequence, DOC[:8])])
    span = Span(sequence.slot, 0, 8, 4)
    store.views([span])[0].state(span).recurrent.fill_(3.0)
    with pytest.raises(AssertionError, match="not completed"):
        store.views([span])
    store.close(sequence)
    assert stops(store) == []
    model.check_all_free(store)


def test_a_step_that_failed_leaves_the_rolling_snapshot_usable():
    store = model.make_store(hybrid=True)
    sequence = store.open(DOC, 40)
    model.prefill(store, sequence)
    for token in (1, 2):
        model.run_step(store, [(sequence, [token])])
    span = Span(sequence.slot, 0, 20, 1)
    store.views([span])[0].state(span).recurrent.fill_(3.0)
    store.close(sequence)
    assert stops(store) == [16, 20]
    model.check(store)


def test_closing_twice_is_caught():
    store = model.make_store()
    sequence = store.open(DOC, 18)
    store.close(sequence)
    with pytest.raises(AssertionError, match="closed twice"):
        store.close(sequence)
    store.open(DOC, 18)
    with pytest.raises(AssertionError, match="closed twice"):
        store.close(sequence)


# Views


@pytest.mark.parametrize(
    ("num_runs", "exact", "views", "gathered"),
    [
        (1, False, 1, 0),
        (MAX_RUNS, False, MAX_RUNS, 0),
        (MAX_RUNS + 1, False, 0, 1),
        (1, True, 1, 0),
        (2, True, 0, 1),
    ],
)
def test_a_segment_is_cut_where_pages_are_not_consecutive_or_gathered(num_runs, exact, views, gathered):
    store = model.make_store(num_pages=2 * num_runs, sequences=2 * num_runs, exact=exact)
    ones = [store.open([i], 1) for i in range(2 * num_runs)]
    for sequence in ones[::2]:
        store.close(sequence)
    sequence = store.open(text(PAGE * num_runs - 1), PAGE * num_runs)
    consecutive = [isinstance(f.page_ids, range) for f in sequence.fragments]
    assert (consecutive.count(True), consecutive.count(False)) == (views, gathered)
    model.prefill(store, sequence, chunk=5)
    model.run_step(store, [(sequence, [3])])
    store.close(sequence)
    for other in ones[1::2]:
        store.close(other)
    model.check_all_free(store)


@pytest.mark.parametrize("apart", [False, True])
def test_few_queries_read_several_segments_at_once(apart, monkeypatch):
    """The same keys in fewer pieces, gathered where pages lie apart; many queries read segment by segment."""
    monkeypatch.setattr(kv, "FEW_QUERIES", 0)
    store = model.make_store(num_pages=24, sequences=9, segment_len=2 * PAGE, joined=3)
    if apart:
        ones = [store.open([i], 1) for i in range(8)]
        for other in ones[::2]:
            store.close(other)
    tokens = text(8 * PAGE)
    sequence = store.open(tokens, 8 * PAGE)
    model.prefill(store, sequence, chunk=3)
    monkeypatch.setattr(kv, "FEW_QUERIES", 5)
    lengths = {}
    for length in (6, 5):
        span = Span(sequence.slot, 0, 8 * PAGE - length, length)
        sequence.position = span.position
        segments = list(store.views([span])[0].segments(span, span.end))
        sequence.in_step = False
        lengths[length] = [len(segment.k) for segment in segments]
        k, v = model.expected_kv(tuple(tokens), 0, span.end, 0)
        assert torch.equal(torch.cat([segment.k for segment in segments]), k)
        assert torch.equal(torch.cat([segment.v for segment in segments]), v)
        assert [segment.start for segment in segments] == [
            sum(lengths[length][:n]) for n in range(len(segments))
        ]
    assert lengths[6] == [2 * PAGE] * 4 if not apart else sum(lengths[6]) == 8 * PAGE
    assert len(lengths[5]) < len(lengths[6]) and (apart or lengths[5] == [6 * PAGE, 2 * PAGE])
    # They are joined once: at 245,760 tokens that takes a third of a millisecond.
    monkeypatch.setattr(kv, "join", lambda *args: pytest.fail("joined again"))
    store.views([Span(sequence.slot, 0, sequence.position, 1)])


def test_two_spans_of_one_sequence_in_a_step():
    store = model.make_store()
    sequence = store.open(DOC, 20)
    spans = [Span(sequence.slot, 0, 0, 6), Span(sequence.slot, 6, 6, 12)]
    views = store.views(spans)
    for layer in (0, 1):
        for span in spans:
            tokens = tuple(DOC)
            views[layer].write(span, *model.expected_kv(tokens, span.position, span.end, layer))
            model.check_segments(store, views[layer].segments(span, span.end), tokens, span.end, layer)
    store.complete(spans, {sequence.slot: DOC})
    assert sequence.position == 18
    store.close(sequence)
    model.check(store)


def test_a_view_has_only_what_its_layer_has():
    store = model.make_store(hybrid=True)
    sequence = store.open(DOC, 20)
    span = Span(sequence.slot, 0, 0, 1)
    linear, full = store.views([span])[:2]
    with pytest.raises(AssertionError, match="no pages"):
        linear.segments(span, 1)
    with pytest.raises(AssertionError, match="no pages"):
        linear.write(span, *model.expected_kv((1,), 0, 1, 0))
    with pytest.raises(AssertionError, match="no recurrent state"):
        full.state(span)


def test_poison_is_seen_where_it_should_be():
    """The tests' safety net itself: what was never written is NaN."""
    store = model.make_store(hybrid=True, exact=True)
    sequence = store.open(DOC, 20)
    span = Span(sequence.slot, 0, 0, 6)
    linear, full = store.views([span])[:2]
    (segment,) = full.segments(span, 6)
    assert bool(segment.k.isnan().all()) and bool(segment.v.isnan().all())
    state = linear.state(span)
    assert bool(state.pending.isnan().all())
    assert not state.conv.any() and not state.recurrent.any(), "a new sequence begins at zero"


# Bytes


def geometry_35b(page_len: int = 64) -> StoreGeometry:
    """40 layers, every fourth full attention; shapes of Qwen3.6-35B-A3B."""
    kinds = (LayerKind.LINEAR, LayerKind.LINEAR, LayerKind.LINEAR, LayerKind.FULL) * 10
    return StoreGeometry(
        kinds,
        PlainCodec(torch.bfloat16, 2, 256, page_len),
        DeltaFacts(num_k_heads=16, num_v_heads=32, k_head_dim=128, v_head_dim=128, conv_kernel=4),
        torch.bfloat16,
    )


def test_bytes_are_those_of_the_formulas_and_memory_is_taken_as_it_is_written():
    before = psutil.Process().memory_info().rss
    store = KVStore(geometry_35b(), num_pages=512, sequences=2, snapshots=4, snapshot_len=8192)
    grown = psutil.Process().memory_info().rss - before
    state = 30 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)
    assert store.storage_bytes == {
        "pages": 512 * 64 * 10 * kv_token_bytes("bf16", 2, 256),
        "states": (2 + 2 + 4) * state,
        "pending": 0,
    }
    assert store.geometry.state_bytes == state
    assert sum(store.storage_bytes.values()) > 1_000_000_000 and grown < 50_000_000


def test_pending_rows_are_kept_for_open_sequences_only():
    store = model.make_store(hybrid=True, exact=True, sequences=3, snapshots=5)
    values = model.DELTA.conv_dim + 2 * model.DELTA.num_v_heads
    assert store.storage_bytes["pending"] == 3 * 2 * PAGE * values * 4


def test_everything_is_aligned():
    store = model.make_store(hybrid=True, exact=True)
    for layer in store.geometry.linear_layers:
        for state in store._tier.delta_states(layer):
            assert state.conv.data_ptr() % ALIGNMENT == 0 and state.recurrent.data_ptr() % ALIGNMENT == 0
    for layer in store.geometry.full_layers:
        assert store._tier.pages(layer).data_ptr() % ALIGNMENT == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype):
    store = KVStore(
        model.geometry(hybrid=True, page_len=PAGE, dtype=dtype),
        num_pages=8,
        sequences=1,
        snapshots=2,
        snapshot_len=64,
        poison=True,
    )
    sequence = store.open(DOC, 20)
    span = Span(sequence.slot, 0, 0, 18)
    linear, full = store.views([span])[:2]
    assert linear.state(span).conv.dtype == dtype and linear.state(span).recurrent.dtype == torch.float32
    k, v = model.expected_kv(tuple(DOC), 0, 18, 1)
    full.write(span, k / 65_536, v / 65_536)
    (segment,) = full.segments(span, 18)
    assert segment.k.dtype == dtype and torch.equal(segment.k, (k / 65_536).to(dtype))


def test_where_lent_pages_do_not_come_back_nothing_has_changed():
    store = model.make_store(num_pages=8)
    model.run(store, text(5 * PAGE), [7])
    before, pinned = store.stats, store._tree.unpinned_pages

    def fail() -> None:
        raise MemoryError

    store.before_taking = fail
    with pytest.raises(MemoryError):
        store.open(text(7 * PAGE), 8 * PAGE)
    assert store.stats == before and store._tree.unpinned_pages == pinned
    store.before_taking = None
    assert model.run(store, text(7 * PAGE), [7]) == 5 * PAGE
