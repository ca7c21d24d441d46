"""Random opens, chunks, tokens, cancels and closes against what the tokens alone say must be there.

Hypothesis looks for short counter-examples on all kinds of stores; the walks go deep on a few.
"""

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import store_model as model
from packhorse.core.errors import DoesNotFitError
from packhorse.store.kv import StoredSequence


class Driver:
    """Uses a store as an engine would, and knows from looking at every entry what it should answer."""

    def __init__(self, **settings) -> None:
        self.store = model.make_store(**settings)
        self.open: list[tuple[StoredSequence, int]] = []
        self.prompts = [[0]]

    def prompt(self, base: int, keep: int, more: list[int]) -> list[int]:
        """The first `keep` tokens of an earlier prompt, and `more`."""
        earlier = self.prompts[base % len(self.prompts)]
        return earlier[: keep % (len(earlier) + 1)] + more

    def open_sequence(self, prompt: list[int], max_len: int, marks: list[int]) -> StoredSequence | None:
        """Opens where it must succeed, else sees that it is refused or has to wait."""
        store, before = self.store, self.store.stats
        length, chain = self.longest_stored(prompt)
        match = store.match(prompt)
        assert match.length == length and set(match.entries) == chain
        if max_len > store.capacity:
            with pytest.raises(DoesNotFitError) as caught:
                store.open(prompt, max_len, marks)
            assert (caught.value.asked, caught.value.available) == (max_len, store.capacity)
            assert store.stats == before
            return None
        evictable = sum(len(e.page_ids) for e in store._tree.entries if not e.pins and e not in chain)
        needed = -(-max_len // store.page_len) - length // store.page_len
        fits = len(self.open) < store._slots.sequences and needed <= before.pages_free + evictable
        sequence = store.open(prompt, max_len, marks)
        assert (sequence is not None) is fits
        if sequence is None:
            assert self.open and store.stats == before, "an empty store never makes anyone wait"
            return None
        assert sequence.cached_len == sequence.position == length and sequence.token_ids == prompt
        assert sequence.slot not in [other.slot for other, _ in self.open]
        self.open.append((sequence, max_len))
        self.prompts = [*self.prompts[-5:], prompt]
        return sequence

    def longest_stored(self, prompt: list[int]) -> tuple[int, set]:
        """Of all entries the longest that leaves a token of the prompt to read, and its chain."""
        best, chain = 0, set()
        for entry in self.store._tree.entries:
            tokens = model.chain_tokens(entry)
            if best < entry.stop < len(prompt) and tokens == tuple(prompt[: entry.stop]):
                best, chain = entry.stop, set(self.store._tree.chain(entry))
        return best, chain

    def step(self, chunks: list[int], token: int) -> None:
        """One step: each open sequence reads so many tokens of its prompt, or generates one; 0: it waits."""
        parts = []
        for (sequence, max_len), chunk in zip(self.open, chunks, strict=True):
            position = sequence.position
            if not chunk or position == max_len:
                continue
            if position < sequence.prompt_len:
                stop = min(position + chunk, sequence.prompt_len, sequence.next_boundary or max_len)
                assert stop > position
                parts.append((sequence, sequence.token_ids[position:stop]))
            else:
                assert sequence.next_boundary is None
                parts.append((sequence, [token]))
        if parts:
            model.run_step(self.store, parts)

    def finish(self, sequence: StoredSequence, answer: list[int], chunk: int) -> None:
        """Reads the rest of the prompt, generates, and closes."""
        max_len = next(length for other, length in self.open if other is sequence)
        model.prefill(self.store, sequence, chunk)
        for token in answer[: max_len - sequence.position]:
            model.run_step(self.store, [(sequence, [token])])
        self.close(sequence, keep=True)

    def close(self, sequence: StoredSequence, keep: bool) -> None:
        self.store.close(sequence, keep=keep)
        assert not sequence.is_open
        self.open = [item for item in self.open if item[0] is not sequence]
        self.prompts = [*self.prompts[-5:], sequence.token_ids]

    def clear(self) -> None:
        self.store.clear()
        in_use = {e for sequence, _ in self.open for e in self.store._tree.chain(sequence.tip)}
        assert set(self.store._tree.entries) == in_use

    def check(self) -> None:
        model.check(self.store)
        assert self.store.stats.open_sequences == len(self.open)

    def end(self) -> None:
        """Closes everything: nothing may be left."""
        for sequence, _ in self.open:
            self.store.close(sequence)
        model.check(self.store)
        model.check_all_free(self.store)


TOKENS = st.integers(0, 1)


class StoreMachine(RuleBasedStateMachine):
    """A `Driver` whose every choice hypothesis makes."""

    @initialize(
        hybrid=st.booleans(),
        exact=st.booleans(),
        page_len=st.sampled_from([2, 3]),
        num_pages=st.sampled_from([20, 12, 7, 3]),
        sequences=st.sampled_from([3, 2, 1]),
        snapshots=st.sampled_from([4, 2, 8, 1, 0]),
        grid=st.integers(1, 4),
        segment=st.integers(1, 4),
    )
    def start(self, page_len, grid, segment, **settings):
        self.driver = Driver(
            page_len=page_len, snapshot_len=grid * page_len, segment_len=segment * page_len, **settings
        )

    @rule(
        base=st.integers(0, 5),
        keep=st.integers(0, 20),
        more=st.lists(TOKENS, min_size=1, max_size=9),
        room=st.integers(0, 6),
        marks=st.lists(st.integers(0, 30), max_size=2),
    )
    def open_sequence(self, base, keep, more, room, marks):
        prompt = self.driver.prompt(base, keep, more)
        marks = [mark % len(prompt) + 1 for mark in marks]
        self.driver.open_sequence(prompt, len(prompt) + room, marks)

    @rule(
        base=st.integers(0, 5),
        keep=st.integers(0, 20),
        more=st.lists(TOKENS, min_size=1, max_size=9),
        answer=st.lists(TOKENS, max_size=6),
        chunk=st.sampled_from([100, 5, 1]),
    )
    def whole_request(self, base, keep, more, answer, chunk):
        prompt = self.driver.prompt(base, keep, more)
        sequence = self.driver.open_sequence(prompt, len(prompt) + len(answer), [])
        if sequence is not None:
            self.driver.finish(sequence, answer, chunk)

    @rule(chunks=st.lists(st.sampled_from([9, 4, 1, 0]), min_size=3, max_size=3), token=TOKENS)
    def step(self, chunks, token):
        self.driver.step(chunks[: len(self.driver.open)], token)

    @rule(which=st.integers(0, 2), keep=st.booleans())
    def close(self, which, keep):
        if self.driver.open:
            self.driver.close(self.driver.open[which % len(self.driver.open)][0], keep)

    @rule()
    def clear(self):
        self.driver.clear()

    @invariant()
    def books_and_bytes_agree(self):
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.end()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("num_pages", "snapshots"), [(40, 4), (40, 12), (14, 3)])
@pytest.mark.parametrize("kind", ["dense", "hybrid", "exact"])
def test_long_walk(kind, num_pages, snapshots, seed):
    """Prompts that go on from and leave earlier ones, several at once, short of pages or of snapshots."""
    random = Random(seed)
    driver = Driver(
        hybrid=kind != "dense",
        exact=kind == "exact",
        page_len=2,
        num_pages=num_pages,
        sequences=3,
        snapshots=snapshots,
        snapshot_len=6,
        segment_len=8,
    )
    for _ in range(150):
        action = random.choice(["open", "open", "step", "step", "finish", "finish", "close", "clear"])
        if action == "open":
            more = random.choices([0, 1], k=random.randint(1, 8))
            prompt = driver.prompt(random.randrange(6), random.randrange(24), more)
            marks = random.sample(range(1, len(prompt) + 1), k=random.randrange(2))
            driver.open_sequence(prompt, len(prompt) + random.randrange(7), marks)
        elif action == "step":
            driver.step(random.choices([9, 4, 1, 0], k=len(driver.open)), random.randrange(2))
        elif action == "clear" and random.random() < 0.2:
            driver.clear()
        elif driver.open:
            sequence, _ = random.choice(driver.open)
            if action == "finish":
                driver.finish(sequence, random.choices([0, 1], k=6), random.choice([100, 5, 1]))
            elif random.random() < 0.3:
                driver.close(sequence, keep=random.random() < 0.5)
        driver.check()
    stats = driver.store.stats
    assert stats.hits > 3 and stats.evicted_entries > 0, "the walk went where it should"
    assert stats.thinned_entries > 0 or kind == "dense"
    driver.end()
