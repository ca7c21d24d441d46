"""The prefix tree alone: what matches, how entries are split, moved and merged. Pages of two tokens."""

import pytest

from packhorse.store.prefix import Entry, PrefixTree, encode_tokens

PAGE = 2


class Tree(PrefixTree):
    """A tree that is given tokens as text, one letter a token, and numbers its pages and snapshots."""

    def __init__(self, secret: bytes = b"") -> None:
        super().__init__(PAGE, secret)
        self.next_page = 0

    def add(self, text: str, *stops: int, hybrid: bool = True, clock: int = 0) -> Entry:
        """Entries along `text` that end at `stops`; returns the last."""
        tokens = encode_tokens(map(ord, text))
        tip = self.root
        for stop in stops:
            tip = self.descend(tip, tokens, stop)
            if tip.stop < stop:
                count = (stop - tip.stop) // PAGE
                pages = range(self.next_page, self.next_page + count)
                self.next_page += count
                snapshot = 100 + self.next_page if hybrid else None
                self.last = self.insert(tip, tokens, stop, pages, snapshot, marked=True, last_used=clock)
                tip = self.last.entry
        return tip

    def find(self, text: str) -> tuple[int, int | None]:
        match = self.match(encode_tokens(map(ord, text)))
        assert [e.stop for e in match.entries][-1:] == ([match.length] if match.length else [])
        return match.length, match.fork


def test_an_empty_tree():
    assert Tree().find("abc") == (0, None)
    assert Tree().find("") == (0, None)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("a", 0),
        ("ab", 0),
        ("abc", 2),
        ("abcd", 2),
        ("abcde", 4),
        ("abcdef", 4),
        ("abcdefg", 6),
        ("abXdefg", 2),
    ],
)
def test_one_token_is_always_left_to_read(text, length):
    tree = Tree()
    tree.add("abcdef", 2, 4, 6, hybrid=False)
    assert tree.find(text) == (length, None)


def test_a_state_cannot_be_cut():
    tree = Tree()
    tree.add("abcdefgh", 4, 8)
    assert tree.find("abcdefghi") == (8, None)
    assert tree.find("abcdefgh") == (4, 6), "agrees up to 6, the last boundary before its last token"
    assert tree.find("abcdefXX") == (4, 6)
    assert tree.find("abcdeXXX") == (4, None)
    assert tree.find("abXXXX") == (0, 2)
    assert tree.find("XXXXXX") == (0, None)


def test_the_same_page_elsewhere_is_another_page():
    tree = Tree()
    tree.add("abcd", 2, 4, hybrid=False)
    assert tree.find("cdX") == (0, None)
    assert tree.find("ababX") == (2, None)


def test_token_ids_are_compared_when_hashes_collide(monkeypatch):
    monkeypatch.setattr(PrefixTree, "chain_value", lambda self, key, page: b"same")
    tree = Tree()
    tree.add("abcd", 2, 4)
    tree.add("efgh", 4)
    assert tree.find("abcdX") == (4, None)
    assert tree.find("efghX") == (4, None)
    assert tree.find("eXghX") == (0, None)


def test_token_ids_above_a_byte():
    tree = PrefixTree(1)
    tree.insert(tree.root, encode_tokens([70_000]), 1, [0], None, marked=True, last_used=0)
    assert tree.match(encode_tokens([70_000, 1])).length == 1
    assert tree.match(encode_tokens([70_000 % 65_536, 1])).length == 0


def test_the_secret_keys_the_chain():
    keys = [Tree(secret).add("abcd", 4).key for secret in (b"", b"a", b"a", b"b")]
    assert keys[1] == keys[2] and len(set(keys)) == 3


def test_the_chain_value_does_not_depend_on_where_entries_end():
    assert Tree().add("abcdef", 2, 6).key == Tree().add("abcdef", 6).key
    split = Tree()
    lower = split.add("abcdef", 6)
    upper = split.add("abcdXX", 4)
    assert lower.parent is upper
    assert (upper.key, lower.key) == (Tree().add("abcd", 4).key, Tree().add("abcdef", 6).key)


def test_a_new_snapshot_within_an_entry_splits_it():
    tree = Tree()
    lower = tree.add("abcdefgh", 8)
    old_pages, old_snapshot = lower.page_ids, lower.snapshot
    upper = tree.add("abcdXX", 4)
    assert (upper.page_ids, lower.page_ids) == (old_pages[:2], old_pages[2:])
    assert upper.snapshot not in (None, old_snapshot) and lower.snapshot == old_snapshot
    assert (upper.start, upper.stop, lower.start, lower.stop) == (0, 4, 4, 8)
    assert tree.last.kept == () and tree.last.dropped == ()
    assert tree.num_pages == tree.unpinned_pages == 4
    assert tree.find("abcdefghX") == (8, None) and tree.find("abcdYYY") == (4, None)


def test_split_below_pins():
    tree = Tree()
    lower = tree.add("abcdefgh", 8)
    tree.pin(lower)
    assert tree.unpinned_pages == 0
    upper = tree.add("abcdXX", 4)
    assert (upper.pins, lower.pins, tree.unpinned_pages) == (1, 1, 0)
    tree.unpin(lower)
    assert (upper.pins, lower.pins, tree.unpinned_pages) == (0, 0, 4)


def test_copies_of_a_shared_beginning_become_one_when_it_gets_a_snapshot():
    tree = Tree()
    one, two = tree.add("abcdef", 6), tree.add("abcdXXXX", 8)
    assert one.parent is two.parent is tree.root and tree.num_pages == 7
    copies = two.page_ids[:2]
    tree.pin(two)
    upper = tree.add("abcdYY", 4)
    assert one.parent is two.parent is upper
    assert tree.last.dropped == copies and tree.num_pages == 5
    assert (upper.pins, tree.unpinned_pages) == (1, 1)
    assert tree.find("abcdXXXXX") == (8, None) and tree.find("abcdefX") == (6, None)


def test_what_is_there_is_kept():
    tree = Tree()
    first = tree.add("abcdef", 4)
    assert tree.add("abcdef", 4) is first and tree.num_pages == 2
    with pytest.raises(AssertionError, match="last entry that continues"):
        tokens = encode_tokens(map(ord, "abcdef"))
        tree.insert(tree.root, tokens, 4, [8, 9], 1, marked=True, last_used=0)


def test_merging_keeps_pages_and_gives_up_the_boundary():
    tree = Tree()
    tree.add("abcdefgh", 2, 4, 8)
    middle = tree.match(encode_tokens(map(ord, "abcdX"))).entries[1]
    last = middle.only_child
    pages = middle.page_ids + last.page_ids
    tree.pin(last)
    tree.merge_into_child(middle)
    assert last.page_ids == pages and (last.start, last.stop) == (2, 8) and not middle.alive
    assert tree.num_pages == 4 and tree.unpinned_pages == 0
    assert tree.find("abcdefghX") == (8, None) and tree.find("abcdXX") == (2, 4)
    tree.unpin(last)
    assert tree.unpinned_pages == 4


def test_misuse_is_caught():
    tree = Tree()
    tip = tree.add("abcd", 2, 4)
    parent = tip.parent
    with pytest.raises(AssertionError):
        tree.remove(parent)
    tree.pin(tip)
    with pytest.raises(AssertionError):
        tree.remove(tip)
    tree.unpin(tip)
    with pytest.raises(AssertionError, match="unpinned twice"):
        tree.unpin(tip)
    tree.pin(parent)
    with pytest.raises(AssertionError):
        tree.merge_into_child(parent)


def test_removing_leaves_nothing():
    tree = Tree()
    tip = tree.add("abcdef", 2, 6)
    parent = tip.parent
    tree.remove(tip)
    tree.remove(parent)
    assert (tree.num_pages, tree.unpinned_pages, tree.entries, tree.root.children) == (0, 0, {}, {})
