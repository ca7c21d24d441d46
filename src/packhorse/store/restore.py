"""Pages that come back from host memory layer by layer: a card computes with the first while the last are copied.

    image | image | image ---- one layer's pages of several, a reading thread each ----> slot ---- copies ----> pages
            layer 0 of all images, then layer 1 of all, ...; behind each layer's copies an event of its own

Nothing of that waits for the thread that computes. It waits, before it reads a layer's pages, until all copies of that
layer were sent, and has the card wait for their event.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from packhorse.store import transfer
from packhorse.store.records import Image
from packhorse.store.staging import Staging
from packhorse.store.tier import ComputeTier

Part = tuple[Image, range]
"""An image of pages, and which of them."""


@dataclass(frozen=True)
class _Layer:
    """sent: by batch of pages, when its copies were sent. arrived: behind all of them, once all are."""

    index: int
    sent: list[Future[float]]
    arrived: torch.cuda.Event


class LayerRestore:
    """Brings pages back through a card's slots, one call of `begin` after the other has arrived. readers: threads that
    nothing but slots keeps waiting. From one thread."""

    def __init__(self, tier: ComputeTier, staging: Staging, readers: ThreadPoolExecutor) -> None:
        self._tier = tier
        self._staging = staging
        self._readers = readers
        self._coming: deque[_Layer] = deque()
        self._error: BaseException | None = None
        self._then: Callable[[float], None] = lambda seconds: None

    def begin(self, parts: Sequence[Part], page_ids: Sequence[int], then: Callable[[float], None]) -> None:
        """Copy pages of images into `page_ids`, one id for each of them; they have arrived when `arrive` says so.
        then: called by `settle` with the seconds it took to send all."""
        assert not self._coming
        batches = _batches(parts, page_ids, self._staging.size // self._tier.geometry.codec.page_bytes)
        began, self._then = time.monotonic(), lambda stopped: then(stopped - began)
        self._staging.begin()
        for layer in self._tier.geometry.full_layers:
            arrived = self._staging.mark()
            sent = [self._readers.submit(self._send, layer, *batch, arrived) for batch in batches]
            self._coming.append(_Layer(layer, sent, arrived))

    def arrive(self, layer: int | None = None) -> None:
        """`settle`, before these pages are read. Raises what a copy has raised, now and ever after: what it was to
        bring may be in use by anybody."""
        self.settle(layer)
        if self._error is not None:
            raise self._error

    def settle(self, layer: int | None = None) -> None:
        """What the device is given from now on comes after all copies into a layer's pages, and those of the layers
        before it; None: into any."""
        while self._coming and (layer is None or self._coming[0].index <= layer):
            first = self._coming[0]
            errors = [error for sent in first.sent if (error := sent.exception()) is not None]
            self._staging.wait_for(first.arrived)
            self._error = self._error or next(iter(errors), None)
            self._coming.popleft()
            if not self._coming and self._error is None:
                self._then(max(sent.result() for sent in first.sent))

    def _send(
        self, layer: int, parts: Sequence[Part], page_ids: Sequence[int], arrived: torch.cuda.Event
    ) -> float:
        """In a reading thread."""
        staging = self._staging
        slot = staging.up.take()
        assert slot is not None
        try:
            image = transfer.gather_layer(parts, layer, self._tier.geometry, slot.view)
            # NOTE: whichever batch of a layer is the last to be sent leaves the event behind those of all.
            with staging.sending(slot.copied, arrived):
                transfer.load_pages(image, 0, self._tier, page_ids, wait=False)
        finally:
            staging.up.give(slot)
        return time.monotonic()


def _batches(
    parts: Sequence[Part], page_ids: Sequence[int], most: int
) -> list[tuple[list[Part], Sequence[int]]]:
    """The pages and their places, at most so many together."""
    batches: list[tuple[list[Part], Sequence[int]]] = []
    room = done = 0
    for image, pages in parts:
        while pages:
            if not room:
                room = most
                batches.append(([], page_ids[done : done + most]))
            now, pages = pages[:room], pages[room:]
            batches[-1][0].append((image, now))
            room, done = room - len(now), done + len(now)
    return batches
