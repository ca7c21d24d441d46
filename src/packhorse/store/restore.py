"""Pages that come back from host memory layer by layer: a card computes with the first while the last are copied.

    image in a slab -------------------------------- copies -------------------------------> pages
    image | image | image ---- one layer's pages of several, a reading thread each ----> slot ---- copies ----> pages
            layer 0 of all images, then layer 1 of all, ...; behind each layer's copies an event of its own

Images in pinned slabs are sent by the thread that computes, before it computes anything. Of others nothing waits for
it. It waits, before it reads a layer's pages, until all copies of that layer were sent, and has the card wait for their
event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import torch

from packhorse.store import transfer
from packhorse.store.records import Image
from packhorse.store.staging import Staging
from packhorse.store.tier import ComputeTier

Part = tuple[Image, range]
"""An image of pages, and which of them."""
Told = Callable[..., None]


@dataclass(frozen=True)
class _Layer:
    """sent: by batch of pages. arrived: behind all of them, once all are sent."""

    index: int
    sent: list[Future[None]]
    arrived: torch.cuda.Event


class LayerRestore:
    """Brings pages back from slabs and through slots, one call of `begin` after the other has arrived. readers:
    threads that nothing but slots and the card keeps waiting. From one thread."""

    def __init__(self, tier: ComputeTier, staging: Staging, readers: ThreadPoolExecutor) -> None:
        self._tier = tier
        self._staging = staging
        self._readers = readers
        self._coming: deque[_Layer] = deque()
        self._error: BaseException | None = None
        self._then: Told = lambda: None

    def begin(
        self, first: Told | None, parts: Sequence[Part], page_ids: Sequence[int], then: Told, took: Told
    ) -> None:
        """Copy pages of images into `page_ids`, one id for each of them; they have arrived when `arrive` says so.
        first: sends what the first layers need already. then: called by `settle` when all were sent. took: called by
        some thread with the seconds the card took for all of it, when it has arrived, or never."""
        assert not self._coming
        ends = accumulate(len(pages) for _, pages in parts)
        placed = [(part, page_ids[end - len(part[1]) : end]) for part, end in zip(parts, ends, strict=True)]
        direct = [(image, pages.start, ids) for (image, pages), ids in placed if image.place is not None]
        others = [(part, ids) for part, ids in placed if part[0].place is None]
        batches = _batches(others, self._staging.size // self._tier.geometry.codec.page_bytes)
        self._then = then
        self._staging.begin()
        began = self._staging.mark()
        if first is not None:
            with self._staging.sending():
                first()
            self._staging.join()
        for layer in self._tier.geometry.full_layers:
            arrived = self._staging.mark()
            sent = [self._readers.submit(self._send, layer, *batch, arrived) for batch in batches]
            self._coming.append(_Layer(layer, sent, arrived))
            with self._staging.sending(arrived):
                for image, start, ids in direct:
                    transfer.load_pages(image, start, self._tier, ids, [layer], wait=False)
        self._readers.submit(self._time, began, list(self._coming), took)

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
                self._then()

    def _time(self, began: torch.cuda.Event, layers: Sequence[_Layer], took: Told) -> None:
        """In a reading thread."""
        if not any(sent.exception() for layer in layers for sent in layer.sent):
            layers[-1].arrived.synchronize()
            took(began.elapsed_time(layers[-1].arrived) / 1e3)

    def _send(
        self, layer: int, parts: Sequence[Part], page_ids: Sequence[int], arrived: torch.cuda.Event
    ) -> None:
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


def _batches(placed: Sequence[tuple[Part, Sequence[int]]], most: int) -> list[tuple[list[Part], list[int]]]:
    """The pages and their places, at most so many together."""
    batches: list[tuple[list[Part], list[int]]] = []
    for (image, pages), ids in placed:
        while pages:
            if not batches or len(batches[-1][1]) == most:
                batches.append(([], []))
            room = most - len(batches[-1][1])
            batches[-1][0].append((image, pages[:room]))
            batches[-1][1].extend(ids[:room])
            pages, ids = pages[room:], ids[room:]
    return batches
