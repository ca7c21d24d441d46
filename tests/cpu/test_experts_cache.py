"""The expert cache against a plain model of it, and what it must never do."""

import numpy as np
import pytest

from packhorse.store.experts import ExpertCache


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
    hits = misses = fills = 0
    for step in range(1, 300):
        before = cache.slots.copy()
        spare_slots = cache.spares.copy()
        routed = np.full((num_layers, 3), -1)
        filled = np.full((num_layers, spares), -1)
        for layer in range(num_layers):
            chosen = rng.choice(num_experts, size=rng.integers(0, 4))
            routed[layer, : len(chosen)] = chosen
            missed = sorted({int(e) for e in chosen if before[layer, e] < 0})
            hits += len(set(chosen.tolist())) - len(missed)
            misses += len(missed)
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
    stats = cache.stats
    assert (stats.hits, stats.misses, stats.fills, stats.evictions) == (hits, misses, fills, fills)


def test_a_repeating_choice_is_held():
    """As many experts as there is room for, chosen again and again: after the first round all hit."""
    cache = ExpertCache(2, 16, 2 * 4 + 2, 1)
    wanted = [9, 11, 13]
    for step in range(40):
        expert = wanted[step % 3]
        missed = cache.slots[:, expert] < 0
        cache.update(np.full((2, 1), expert), np.where(missed, expert, -1)[:, None])
    assert cache.stats.misses == 6 and cache.stats.hits == 74
