"""Random sequences of opens, chunks, tokens, cancels and closes against what the tokens alone say."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import store_model as model
from packhorse.core.errors import DoesNotFitError

TOKENS = st.integers(0, 1)


class StoreMachine(RuleBasedStateMachine):
    """Opens and runs sequences on a small store; `store_model` checks every value and every count."""

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
    def start(self, hybrid, exact, page_len, num_pages, sequences, snapshots, grid, segment):
        self.store = model.make_store(
            hybrid=hybrid,
            exact=exact,
            page_len=page_len,
            num_pages=num_pages,
            sequences=sequences,
            snapshots=snapshots,
            snapshot_len=grid * page_len,
            segment_len=segment * page_len,
        )
        self.open = {}
        self.prompts = [[0]]

    @rule(data=st.data())
    def open_sequence(self, data):
        store = self.store
        base = data.draw(st.sampled_from(self.prompts))
        prompt = base[: data.draw(st.integers(0, len(base)))] + data.draw(st.lists(TOKENS, max_size=8))
        prompt = prompt or [1]
        max_len = len(prompt) + data.draw(st.integers(0, 6))
        marks = data.draw(st.lists(st.integers(1, len(prompt)), max_size=2))
        best, chain = self.longest_stored(prompt)
        match, before = store.match(prompt), store.stats
        assert match.length == best and set(match.entries) == chain
        if max_len > store.capacity:
            try:
                store.open(prompt, max_len, marks)
            except DoesNotFitError as error:
                assert (error.asked, error.available) == (max_len, store.capacity)
                assert store.stats == before
                return
            raise AssertionError("a sequence that cannot fit was not refused")
        evictable = sum(len(e.page_ids) for e in store._tree.entries if not e.pins and e not in chain)
        needed = -(-max_len // store.page_len) - best // store.page_len
        fits = len(self.open) < store._slots.sequences and needed <= before.pages_free + evictable
        sequence = store.open(prompt, max_len, marks)
        assert (sequence is not None) is fits
        if sequence is None:
            assert self.open and store.stats == before
            return
        assert sequence.slot not in self.open and sequence.cached_len == sequence.position == best
        assert sequence.token_ids == prompt
        self.open[sequence.slot] = (sequence, max_len)
        self.prompts = [*self.prompts[-5:], prompt]

    def longest_stored(self, prompt):
        """By looking at every entry: the longest one that leaves a token of the prompt, and its chain."""
        best, chain = 0, set()
        for entry in self.store._tree.entries:
            tokens = model.chain_tokens(entry)
            if best < entry.stop < len(prompt) and tokens == tuple(prompt[: entry.stop]):
                best, chain = entry.stop, set(self.store._tree.chain(entry))
        return best, chain

    @rule(data=st.data())
    def step(self, data):
        parts = []
        for sequence, max_len in self.open.values():
            if data.draw(st.integers(0, 3)) == 3:
                continue
            position = sequence.position
            if position < sequence.prompt_len:
                stop = min(position + data.draw(st.sampled_from([4, 9, 1, 2])), sequence.prompt_len)
                if sequence.next_boundary is not None:
                    assert position < sequence.next_boundary < sequence.prompt_len
                    stop = min(stop, sequence.next_boundary)
                parts.append((sequence, sequence.token_ids[position:stop]))
            elif position < max_len:
                assert sequence.next_boundary is None
                parts.append((sequence, [data.draw(TOKENS)]))
        if parts:
            model.run_step(self.store, data.draw(st.permutations(parts)))

    @rule(
        base=st.integers(0, 5),
        cut=st.integers(0, 20),
        more=st.lists(TOKENS, min_size=1, max_size=9),
        answer=st.lists(TOKENS, max_size=6),
        chunk=st.sampled_from([100, 5, 1]),
        marked=st.booleans(),
    )
    def whole_request(self, base, cut, more, answer, chunk, marked):
        """A prompt that goes on from an earlier one, or leaves it on the way, from open to close."""
        earlier = self.prompts[base % len(self.prompts)]
        prompt = earlier[: len(earlier) - cut % (len(earlier) + 1)] + more
        max_len = len(prompt) + len(answer)
        marks = [len(prompt) - len(more)] if marked and len(prompt) > len(more) else []
        sequence = self.store.open(prompt, max_len, marks) if max_len <= self.store.capacity else None
        if sequence is None:
            return
        assert sequence.cached_len == self.longest_stored(prompt)[0]
        model.prefill(self.store, sequence, chunk)
        for token in answer:
            model.run_step(self.store, [(sequence, [token])])
        self.store.close(sequence)
        self.prompts = [*self.prompts[-5:], prompt + answer]

    @rule(data=st.data(), keep=st.booleans())
    def close(self, data, keep):
        if self.open:
            slot = data.draw(st.sampled_from(sorted(self.open)))
            sequence, _ = self.open.pop(slot)
            self.store.close(sequence, keep=keep)
            assert not sequence.is_open
            self.prompts = [*self.prompts[-5:], sequence.token_ids]

    @rule()
    def clear(self):
        self.store.clear()
        pinned = {e for sequence, _ in self.open.values() for e in self.store._tree.chain(sequence.tip)}
        assert set(self.store._tree.entries) == pinned

    @invariant()
    def books_and_bytes_agree(self):
        model.check(self.store)
        assert self.store.stats.open_sequences == len(self.open)

    def teardown(self):
        if hasattr(self, "store"):
            for sequence, _ in self.open.values():
                self.store.close(sequence)
            model.check(self.store)
            model.check_all_free(self.store)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
