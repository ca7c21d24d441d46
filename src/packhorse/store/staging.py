"""Pinned memory through which pages pass on their way to a card and back, and the stream that carries them.

    file, image --- reading threads ---> slot --- copies ---> pages        up
    file <---- writing thread ---------- slot <-- copies ---- pages        down
    image in a slab (store/slabs.py) <------------ copies ---> pages        both

A slot is one record's image, or one layer's pages of several (store/restore.py). Copies run behind all that was sent
to the card before them, or before `begin`, and what is sent after `join` waits for them, what is sent after `wait_for`
for those before a mark; a slot is written again only when the copies from it are over. So nobody waits for a copy but
the thread that needs its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

import torch

from packhorse.core.errors import DoesNotFitError
from packhorse.core.units import round_up
from packhorse.store.arena import PinnedTensor
from packhorse.store.records import BLOCK
from packhorse.store.slabs import Place

SLOTS_UP = 12
"""More than are read ahead: the others' copies are on their way."""
SLOTS_DOWN = 16
"""Two batches of a writing thread."""


class Slot:
    """view: memory of a record, in whole blocks and aligned to them. copied: after the last copy of it."""

    __slots__ = ("copied", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.copied = torch.cuda.Event(blocking=True)  # who waits sleeps: cores are for others


class Slots:
    """Some slots of one direction. From any thread."""

    def __init__(self, memory: memoryview, size: int) -> None:
        self._free: SimpleQueue[Slot] = SimpleQueue()
        for start in range(0, len(memory), size):
            self._free.put(Slot(memory[start : start + size]))

    @property
    def available(self) -> bool:
        """Whether one could be taken now; stays true for the only thread that takes any."""
        return not self._free.empty()

    def take(self, *, wait: bool = True) -> Slot | None:
        """A slot that may be written; None, unless `wait`, where all are in use."""
        try:
            slot = self._free.get(block=wait)
        except Empty:
            return None
        try:
            slot.copied.synchronize()  # nothing where it was never recorded
        except BaseException:
            self.give(slot)  # of a card that has gone all who wait here are told
            raise
        return slot

    def give(self, slot: Slot) -> None:
        """Nobody needs its bytes any more, but copies that were sent."""
        self._free.put(slot)


class Staging:
    """The slots of one card, of `size` bytes each, rounded up to whole blocks. pinned: False where the system pins
    less: copies take longer then, and hold up whoever sends them."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.device, self.size = device, round_up(size, BLOCK)
        up, total = SLOTS_UP * self.size, (SLOTS_UP + SLOTS_DOWN) * self.size
        memory = torch.empty(total + BLOCK, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % BLOCK :][:total]
        try:
            self._pin: PinnedTensor | None = PinnedTensor(memory)
        except DoesNotFitError:
            self._pin = None
        self._stream = torch.cuda.Stream(device)
        view = memory.numpy().data
        self.up, self.down = Slots(view[:up], self.size), Slots(view[up:], self.size)

    @property
    def pinned(self) -> bool:
        return self._pin is not None

    @contextmanager
    def carrying(self, memory: Slot | Place | None = None) -> Iterator[None]:
        """Copies are sent, of a slot or others: behind all that the current stream was given."""
        self.begin()
        with self.sending(*([memory.copied] if isinstance(memory, Slot) else [])):
            yield

    def begin(self) -> None:
        """What is sent from now on, by any thread, comes behind all that the current stream was given."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    @contextmanager
    def sending(self, *behind: torch.cuda.Event) -> Iterator[None]:
        """Copies are sent, and these events behind them. From any thread, after `begin`."""
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                for event in behind:
                    event.record()

    def mark(self) -> torch.cuda.Event:
        """An event behind all that was sent until now, to be recorded again by `sending`; it knows its time."""
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        with self.sending(event):
            return event

    def wait_for(self, event: torch.cuda.Event) -> None:
        """What the current stream is given from now on comes after all that was sent before the event."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def join(self) -> None:
        """What the current stream is given from now on comes after all copies that were sent."""
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Wait for all copies that were sent."""
        self._stream.synchronize()
