"""Which routed experts lie on the device: decided here, followed by the kernels through a table of addresses.

    host arena   | expert 0 | expert 1 | ...            every expert of every layer, always valid
    device slots | expert | expert | spare | expert ... the ones used last, and some that wait to be filled

A spare slot is free when a step starts; a kernel that misses an expert writes what it reads into one of its
layer's spares, and from the next step on the table points there. What each step did is learnt afterwards, so
nothing on the device waits for this module. Letters: L layers with experts, E experts, S spares a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Changes:
    """What must be written on the device between two steps, in this order.

    evicted: (layer, expert) pairs [n, 2] whose entry goes back to the host copy. spares: (layer, place, slot)
    rows [m, 3] that may be written from then on.
    """

    evicted: Ints
    spares: Ints


class ExpertCache:
    """Least recently used experts give way, over all layers, so layers share one budget of slots.

    At the start the slots hold the same share of each layer's experts. Every layer keeps `spares` slots free to
    be filled in a step, so num_slots must be num_layers * spares or more. evictions: experts that gave up their slot
    since construction.
    """

    def __init__(self, num_layers: int, num_experts: int, num_slots: int, spares: int) -> None:
        held = num_slots - num_layers * spares
        assert held >= 0 and num_slots <= num_layers * num_experts + num_layers * spares
        self.num_layers, self.num_experts = num_layers, num_experts
        self.evictions = 0
        self._step = 0
        self._last_use = np.zeros((num_layers, num_experts), dtype=np.int64)
        # Slot of each expert, -1 for none: layer after layer takes its next expert until the slots are gone.
        self.slots: Ints = np.full((num_layers, num_experts), -1, dtype=np.int64)
        # Experts that lie on the card elsewhere for a while: they own no slot and give none up.
        self.lent = np.zeros((num_layers, num_experts), dtype=bool)
        at = np.arange(held)
        self.slots[at % num_layers, at // num_layers] = at
        self.spares: Ints = np.arange(held, num_slots).reshape(num_layers, spares)

    def update(self, routed: Ints, filled: Ints) -> Changes:
        """A step is over. routed [L, R]: experts it used, -1 for none, repeats allowed. filled [L, S]: the expert
        that now lies in each spare slot, -1 where it is still free.

        Filled experts have their slot from now on, and the least recently used ones give theirs to be spares.
        """
        self._step += 1
        layers = np.broadcast_to(np.arange(self.num_layers)[:, None], routed.shape)
        used = np.zeros_like(self._last_use, dtype=bool)
        real = routed >= 0
        used[layers[real], routed[real]] = True
        self._last_use[used] = self._step

        layer, place = np.nonzero(filled >= 0)
        expert = filled[layer, place]
        assert (self.slots[layer, expert] < 0).all(), "an expert was filled that has a slot"
        self.slots[layer, expert] = self.spares[layer, place]
        victims = self._oldest(len(layer))
        freed = self.slots[victims[:, 0], victims[:, 1]]
        self.slots[victims[:, 0], victims[:, 1]] = -1
        self.evictions += len(victims)
        self.spares[layer, place] = freed
        return Changes(victims, np.stack((layer, place, freed), axis=1))

    def shrink(self, num_slots: int) -> None:
        """Do with the first `num_slots` slots, at least all spares: experts in others lose theirs, and those used
        longest ago give theirs up where spares are missing then."""
        assert num_slots >= self.spares.size
        gone = self.slots >= num_slots
        self.slots[gone] = -1
        spares = self.spares[self.spares < num_slots]
        victims = self._oldest(self.spares.size - len(spares))
        self.spares = np.concatenate((spares, self.slots[victims[:, 0], victims[:, 1]])).reshape(
            self.spares.shape
        )
        self.slots[victims[:, 0], victims[:, 1]] = -1
        self.evictions += int(gone.sum()) + len(victims)

    def lend(self, count: int, but: Ints) -> Ints:
        """The `count` experts used last of those that are not on the card: (layer, expert) [at most count, 2]. but:
        [n, 2], experts that are on their way. They count as lent from now on, until `lent` is cleared."""
        there = (self.slots >= 0) | self.lent
        there[but[:, 0], but[:, 1]] = True
        age = np.where(there, -1, self._last_use).ravel()
        count = min(count, int((~there).sum()))
        order = np.argpartition(-age, max(0, count - 1))[:count]
        found = np.stack(np.divmod(np.sort(order), self.num_experts), axis=1)
        self.lent[found[:, 0], found[:, 1]] = True
        return found

    def _oldest(self, count: int) -> Ints:
        """The `count` resident experts that were used longest ago: (layer, expert) [count, 2]."""
        age = np.where(self.slots >= 0, self._last_use, np.iinfo(np.int64).max).ravel()
        order = np.argpartition(age, count - 1)[:count] if count else np.zeros(0, dtype=np.int64)
        return np.stack(np.divmod(np.sort(order), self.num_experts), axis=1)


class LateUpdates:
    """The host's half of the experts' life, one step behind the card: what a step did is looked at while the next one
    runs, and what was decided then begins the one after that. row_len: entries of a layer in the card's table, of which
    the first are the experts."""

    def __init__(self, cache: ExpertCache, row_len: int) -> None:
        self.cache = cache
        self._row_len = row_len
        layers, spares = cache.spares.shape
        places = np.moveaxis(np.indices((layers, spares)), 0, -1).reshape(-1, 2)
        # At first every place gets its slot.
        self._next = Changes(_NONE.evicted, np.column_stack((places, cache.spares.ravel())))
        self._renewed = np.zeros((layers, spares), dtype=bool)
        self._seen: tuple[Ints, Ints] | None = None

    @property
    def leaving(self) -> Ints:
        """Experts [n, 2] that leave their slots when the step begins that was begun last."""
        return self._next.evicted

    def begin(self, step: tuple[Ints, Ints] | None) -> Ints:
        """A step is to begin. step: what the one before used [L, R] and the places [L, S] as it left them, None
        where there was none. Returns the rows [L * S, 3] that it begins with: entry l * row_len + e that leaves, place
        l * S + s that is renewed, with which slot; -1 for none."""
        if step is not None:
            used, filled = step
            # A place whose renewal goes over with the coming step still shows whom it was written to before.
            self._seen = used, np.where(self._renewed, -1, filled)
        rows = np.full((self._renewed.size, 3), -1, dtype=np.int64)
        evicted, spares = self._next.evicted, self._next.spares
        rows[: len(evicted), 0] = evicted[:, 0] * self._row_len + evicted[:, 1]
        rows[: len(spares), 1] = spares[:, 0] * self.cache.spares.shape[1] + spares[:, 1]
        rows[: len(spares), 2] = spares[:, 2]
        return rows

    def decide(self) -> None:
        """The step was sent: decide what the next begins with."""
        self._next = _NONE if self._seen is None else self.cache.update(*self._seen)
        self._seen = None
        self._renewed[:] = False
        self._renewed[self._next.spares[:, 0], self._next.spares[:, 1]] = True


_NONE = Changes(np.zeros((0, 2), dtype=np.int64), np.zeros((0, 3), dtype=np.int64))
