"""The expert cache against a plain model of it, and what it must never do."""

import numpy as np
import pytest

from packhorse.store.experts import ExpertCache, LateUpdates


def slots_are_whole(cache: ExpertCache, num_slots: int) -> None:
    """Every slot has exactly one owner."""
    owned = np.concatenate([cache.slots[cache.slots >= 0], cache.spares.ravel()])
    assert sorted(owned.tolist()) == list(range(num_slots))


@pytest.mark.parametrize(("num_layers", "num_experts", "spares"), [(1, 4, 1), (3, 8, 1), (4, 16, 2)])
@pytest.mark.parametrize("share", [0.0, 0.37, 1.0])
def test_random_steps(num_layers, num_experts, spares, share):
    rng = np.random.default_rng(7)
    num_slots = int(share * num_layers * num_experts) + num_layers * spares
    cache = ExpertCache(num_layers, num_experts, num_slots, spares)
    last = np.zeros((num_layers, num_experts))
    fills = 0
    for step in range(1, 300):
        before = cache.slots.copy()
        spare_slots = cache.spares.copy()
        routed = np.full((num_layers, 3), -1)
        filled = np.full((num_layers, spares), -1)
        for layer in range(num_layers):
            chosen = rng.choice(num_experts, size=rng.integers(0, 4))
            routed[layer, : len(chosen)] = chosen
            missed = sorted({int(e) for e in chosen if before[layer, e] < 0})
            last[layer, chosen] = step
            kept = missed[: rng.integers(0, spares + 1)]
            filled[layer, : len(kept)] = kept
            fills += len(kept)
        changes = cache.update(routed, filled)
        slots_are_whole(cache, num_slots)
        evicted = {tuple(pair) for pair in changes.evicted.tolist()}
        assert len(evicted) == len(changes.evicted) == len(changes.spares)
        for layer, place in np.argwhere(filled >= 0):
            if (layer, filled[layer, place]) not in evicted:
                assert cache.slots[layer, filled[layer, place]] == spare_slots[layer, place]
        for layer, place, slot in changes.spares:
            assert cache.spares[layer, place] == slot and filled[layer, place] >= 0
        # Nobody older than an evicted expert stayed.
        stayed = last[cache.slots >= 0]
        if len(evicted) and len(stayed):
            assert max(last[pair] for pair in evicted) <= stayed.min()
    assert cache.evictions == fills


def test_a_repeating_choice_is_held():
    """As many experts as there is room for, chosen again and again: after the first round all hit."""
    cache = ExpertCache(2, 16, 2 * 4 + 2, 1)
    wanted, misses = [9, 11, 13], 0
    for step in range(40):
        expert = wanted[step % 3]
        missed = cache.slots[:, expert] < 0
        misses += missed.sum()
        cache.update(np.full((2, 1), expert), np.where(missed, expert, -1)[:, None])
    assert misses == 6


class PlainCard:
    """What the kernels do to the table, in plain words: address of an expert is a slot, or -1 for its host copy."""

    def __init__(self, cache: ExpertCache) -> None:
        self.cache = cache
        self.address = cache.slots.copy()
        self.content = {int(slot): (l, e) for (l, e), slot in np.ndenumerate(cache.slots) if slot >= 0}
        self.spares = np.full_like(cache.spares, -1)
        self.filled = np.full(cache.spares.shape, -2)
        self.reads = self.missed = 0

    def step(self, rows: np.ndarray, routed: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Changes, then each layer: places filled before enter, experts are read, misses are written to free places."""
        experts, spares = self.address.shape[1], self.spares.shape[1]
        for layer, place in np.argwhere(self.filled >= 0):
            self.address[layer, self.filled[layer, place]] = self.spares[layer, place]
        for expert, _, _ in rows[rows[:, 0] >= 0]:
            self.address[divmod(expert, experts)] = -1
        for _, place, slot in rows[rows[:, 1] >= 0]:
            self.spares[divmod(place, spares)] = slot
            self.filled[divmod(place, spares)] = -1
            self.content.pop(int(slot), None)
        used = np.full((len(routed), 8), -1)
        for layer, chosen in enumerate(routed):
            for place in np.flatnonzero(self.filled[layer] >= 0):
                self.address[layer, self.filled[layer, place]] = self.spares[layer, place]
            free = [int(place) for place in np.flatnonzero(self.filled[layer] == -1)]
            for at, expert in enumerate(sorted(set(chosen))):
                used[layer, at] = expert
                self.reads += 1
                slot = int(self.address[layer, expert])
                if slot >= 0:
                    assert self.content[slot] == (layer, expert), "a slot was read that holds another expert"
                    continue
                self.missed += 1
                if free:
                    place = free.pop(0)
                    self.filled[layer, place] = expert
                    slot = int(self.spares[layer, place])
                    assert slot not in self.address.ravel().tolist(), "a slot was written that is still read"
                    self.content[slot] = (layer, expert)
        return used, self.filled.copy()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.37, 0.8])
@pytest.mark.parametrize("spares", [1, 2, 4])
def test_decisions_one_step_late_never_point_at_a_wrong_slot(share, spares):
    """Random steps: what is read is always the expert that was asked for, and popular ones come to stay."""
    rng = np.random.default_rng(3)
    layers, experts = 3, 16
    num_slots = int(share * layers * experts) + layers * spares
    cache = ExpertCache(layers, experts, num_slots, spares)
    card, late = PlainCard(cache), LateUpdates(cache, experts)
    wanted = 1 / np.arange(1, experts + 1)
    seen = None
    for step in range(900):
        rows = late.begin(seen)
        taken = rows[rows[:, 1] >= 0]
        assert len(set(taken[:, 1].tolist())) == len(taken) == len(set(taken[:, 2].tolist()))
        if step == 300:
            card.reads = card.missed = 0
        routed = [rng.choice(experts, size=4, p=wanted / wanted.sum()).tolist() for _ in range(layers)]
        seen = card.step(rows, routed)
        late.decide()
        slots_are_whole(cache, num_slots)
    # The experts that are wanted most are there more often than chance has it.
    assert card.missed / card.reads < (1 - share if share else 1.001)
    assert cache.evictions > 100


def test_lent_experts_own_no_slot_and_give_none_up():
    """The ones used last that have no slot are lent; they are no victims, and are gone when `lent` is cleared."""
    cache = ExpertCache(2, 8, 2 * 2 + 2, 1)
    for expert in (7, 3, 5):
        cache.update(np.full((2, 1), expert), np.full((2, 1), -1))
    slots = cache.slots.copy()
    guests = cache.lend(3, np.array([[0, 5]]))
    assert guests.tolist() == [[0, 3], [1, 3], [1, 5]]
    changes = cache.update(np.array([[3], [5]]), np.full((2, 1), -1))
    assert not len(changes.evicted)
    assert (cache.slots == slots).all() and (slots[guests[:, 0], guests[:, 1]] == -1).all()
    assert len(cache.lend(100, np.zeros((0, 2), dtype=np.int64))) == 16 - (slots >= 0).sum() - 3
    cache.lent[:] = False
    assert cache.lend(2, np.zeros((0, 2), dtype=np.int64)).tolist() == [[0, 3], [1, 5]]
