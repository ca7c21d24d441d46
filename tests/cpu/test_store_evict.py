"""What goes first: old leaves that nobody pins, and grid snapshots that are missed least."""

from packhorse.store.evict import LeafQueue, spare_leaf, thinnable
from packhorse.store.prefix import Entry, PrefixTree, encode_tokens


def add(tree: PrefixTree, text: str, stop: int, *, marked: bool = True, clock: int = 0) -> Entry:
    """The entry of `text` from the last that is there to `stop`, pages of one token."""
    tokens = encode_tokens(map(ord, text))
    tip = tree.descend(tree.root, tokens, stop)
    pages = range(stop - tip.stop)
    return tree.insert(tip, tokens, stop, pages, 0, marked=marked, last_used=clock).entry


def drain(tree: PrefixTree, queue: LeafQueue) -> list[str]:
    """Evict everything that can be; the last token of each entry tells which it was."""
    gone = []
    while (leaf := queue.pop()) is not None:
        tree.remove(leaf)
        queue.offer(leaf.parent)
        gone.append(bytes(leaf.tokens[-4::4]).decode())
    return gone


def test_least_recently_used_first_and_leaves_before_what_they_stand_on():
    tree = PrefixTree(1)
    queue = LeafQueue(tree)
    for text, clock in (("ab", 1), ("d", 2), ("ac", 3)):
        tip = None
        for stop in range(1, len(text) + 1):
            known = tree.descend(tree.root, encode_tokens(map(ord, text)), stop)
            tip = known if known.stop == stop else add(tree, text, stop)
        tree.touch(tip, clock)
        queue.offer(tip)
    assert drain(tree, queue) == ["b", "d", "c", "a"]
    assert not tree.entries


def test_pinned_entries_stay_until_they_are_offered_again():
    tree = PrefixTree(1)
    queue = LeafQueue(tree)
    old, new = add(tree, "a", 1, clock=1), add(tree, "b", 1, clock=2)
    queue.offer(old)
    queue.offer(new)
    tree.pin(old)
    assert queue.pop() is new
    assert queue.pop() is None
    tree.unpin(old)
    queue.offer(old)
    assert queue.pop() is old


def test_a_later_use_counts():
    tree = PrefixTree(1)
    queue = LeafQueue(tree)
    first, second = add(tree, "a", 1, clock=1), add(tree, "b", 1, clock=2)
    queue.offer(first)
    queue.offer(second)
    tree.touch(first, 3)
    queue.offer(first)
    assert [queue.pop(), queue.pop(), queue.pop()] == [second, first, None]


def test_the_queue_does_not_grow_with_use():
    tree = PrefixTree(1)
    queue = LeafQueue(tree)
    leaf = add(tree, "a", 1)
    for clock in range(10_000):
        tree.touch(leaf, clock)
        queue.offer(leaf)
    assert len(queue._heap) < 100
    assert queue.pop() is leaf


def test_thinning_takes_the_grid_not_marks_nor_ends_nor_forks():
    tree = PrefixTree(1)
    mark = add(tree, "abcdef", 1)
    grid = add(tree, "abcdef", 2, marked=False)
    fork = add(tree, "abcdef", 3, marked=False)
    add(tree, "abcdef", 4, marked=False)
    add(tree, "abcXYZ", 4, marked=False)
    assert thinnable(tree, marked=False) is grid
    assert thinnable(tree, marked=True) is mark
    tree.merge_into_child(grid)
    assert thinnable(tree, marked=False) is None
    assert (fork.start, fork.stop) == (1, 3)


def test_thinning_passes_over_an_entry_where_a_sequence_stands():
    tree = PrefixTree(1)
    first = add(tree, "abc", 1, marked=False)
    second = add(tree, "abc", 2, marked=False)
    last = add(tree, "abc", 3, marked=False)
    tree.pin(first)
    tree.pin(last)
    assert thinnable(tree, marked=False) is second


def test_thinning_takes_the_oldest_chain_and_keeps_a_chain_spread_out():
    tree = PrefixTree(1)
    for stop in (2, 3, 4, 9, 10):
        add(tree, "abcdefghijk", stop, marked=False, clock=5)
    stops = []
    while (entry := thinnable(tree, marked=False)) is not None:
        stops.append(entry.stop)
        tree.merge_into_child(entry)
    assert stops == [3, 2, 9, 4]
    add(tree, "bc", 1, marked=False, clock=4)
    old = add(tree, "bc", 2, marked=False, clock=4).parent
    add(tree, "cd", 1, marked=False, clock=3)
    older = add(tree, "cd", 2, marked=False, clock=3).parent
    assert thinnable(tree, marked=False) is older
    tree.merge_into_child(older)
    assert thinnable(tree, marked=False) is old


def test_an_entry_that_prompts_went_on_from_is_thinned_last():
    tree = PrefixTree(1)
    for stop in (6, 7, 8, 9):
        add(tree, "abcdefghijk", stop)
    document = next(e for e in tree.entries if e.stop == 7)
    document.reused = True
    stops = []
    while (entry := thinnable(tree, marked=True)) is not None:
        stops.append(entry.stop)
        tree.merge_into_child(entry)
    assert stops == [8, 6, 7]


def test_the_tip_of_a_sequence_goes_where_an_interior_entry_would_be_missed_more():
    tree = PrefixTree(1)
    document, tip = add(tree, "abcdefghijk", 6), add(tree, "abcdefghijk", 8)
    tree.pin(tip)
    chosen = lambda grown: thinnable(tree, marked=True, growing=tip, grown=grown)  # noqa: E731
    assert chosen(10) is tip
    assert chosen(15) is document, "what is left is spread out"
    document.reused = True
    assert chosen(15) is tip
    tree.pin(tip)
    assert chosen(10) is document, "another sequence stands at the tip"
    tree.unpin(tip)
    tree.unpin(tip)
    tree.remove(tip)
    tree.pin(document)
    assert thinnable(tree, marked=True, growing=document, grown=10) is None, "a chain's only snapshot stays"


def test_short_leaves_go_before_a_long_one_that_is_as_old():
    tree = PrefixTree(1)
    long = add(tree, "abcdefghijklmnopqrst", 20, clock=1)
    short = [add(tree, text, 1, clock=clock) for clock, text in enumerate("xyz", 2)]
    gone = []
    while (leaf := spare_leaf(tree, 9)) is not None:
        gone.append(leaf)
        tree.remove(leaf)
    assert gone == [*short, long]
    old, new = add(tree, "abcdefgh", 8, clock=1), add(tree, "x", 1, clock=50)
    assert spare_leaf(tree, 50) is old, "a long one that nobody has used for long goes too"
    tree.pin(old)
    assert spare_leaf(tree, 50) is new
