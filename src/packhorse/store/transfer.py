"""The only module that copies between places of a tier, and between tiers.

A copy has two halves: whoever calls prepares (both places are known, reserved and pinned before the call) and
completes (the destination is entered in the books after the call). Between tensors of one device a copy is
done, or ordered before whatever the device computes next, when the call returns; one from or to an image is done,
but where `wait` is False: that is for images in a card's slots (store/staging.py) and slabs, which say when.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from packhorse.store.pages import consecutive_runs
from packhorse.store.records import Image
from packhorse.store.tier import ComputeTier, StoreGeometry, Tier

STATE = "state"
Layers = Sequence[int] | None


def copy_state(source: Tier, source_slot: int, target: Tier, target_slot: int) -> None:
    """Copy the recurrent state of all linear layers from one slot to another."""
    target.state_record(target_slot).copy_(source.state_record(source_slot))


def copy_layer_state(tier: Tier, source_slot: int, target_slot: int, part: slice) -> None:
    """Copy one layer's part of a state (`StoreGeometry.state_part`) from one slot to another."""
    tier.state_record(target_slot)[part].copy_(tier.state_record(source_slot)[part])


def zero_state(tier: Tier, slot: int) -> None:
    """Make a slot the state before the first token."""
    tier.state_record(slot).zero_()


def pages_shapes(geometry: StoreGeometry, count: int, layers: Layers = None) -> dict[str, tuple[int, ...]]:
    """The parts of an image of `count` pages: a run of pages for each full-attention layer, or each of `layers`."""
    layers = geometry.full_layers if layers is None else layers
    return {_name(layer): (count, geometry.codec.page_bytes) for layer in layers}


def state_shapes(geometry: StoreGeometry, name: str = STATE) -> dict[str, tuple[int, ...]]:
    """The part of an image of a state."""
    return {name: (geometry.state_bytes,)}


def save_pages(tier: ComputeTier, page_ids: Sequence[int], image: Image, *, wait: bool = True) -> None:
    """Copy pages into an image made with `pages_shapes`."""
    for layer in _layers(image, tier):
        place, at = _bytes(image, _name(layer)).view(len(page_ids), -1), 0
        for run in consecutive_runs(page_ids):
            pages = tier.pages(layer)[run.start : run.stop]
            place[at : at + len(run)].copy_(pages, non_blocking=not wait)
            at += len(run)


def load_pages(
    image: Image, first: int, tier: ComputeTier, ids: Sequence[int], only: Layers = None, *, wait: bool = True
) -> None:
    """Copy the image's pages from its `first` on into these pages, of all layers that it has or of some."""
    for layer in _layers(image, tier) if only is None else only:
        pages, at = _bytes(image, _name(layer)).view(-1, tier.geometry.codec.page_bytes), first
        for run in consecutive_runs(ids):
            place = tier.pages(layer)[run.start : run.stop]
            place.copy_(pages[at : at + len(run)], non_blocking=not wait)
            at += len(run)


def save_state(tier: Tier, slot: int, image: Image, name: str = STATE, *, wait: bool = True) -> None:
    """Copy a state into an image made with `state_shapes`."""
    _bytes(image, name).copy_(tier.state_record(slot), non_blocking=not wait)


def load_state(
    image: Image, tier: Tier, slot: int, name: str = STATE, part: slice = slice(None), *, wait: bool = True
) -> None:
    """Copy an image's state into a slot, or one layer's part of it."""
    tier.state_record(slot)[part].copy_(_bytes(image, name)[part], non_blocking=not wait)


def gather_layer(
    parts: Sequence[tuple[Image, range]], layer: int, geometry: StoreGeometry, into: memoryview
) -> Image:
    """One layer's pages of several images side by side in other memory: an image for `load_pages`, without a header.
    Of several threads each copies at the speed of its own core."""
    name, size, at = _name(layer), geometry.codec.page_bytes, 0
    # numpy's copies neither hold the interpreter's lock nor start threads of their own.
    target = np.frombuffer(into, np.uint8)
    for image, pages in parts:
        source = np.frombuffer(image.parts[name], np.uint8)[pages.start * size : pages.stop * size]
        np.copyto(target[at : at + len(source)], source)
        at += len(source)
    return Image(parts[0][0].record, into, {name: (0, at)})


def save_tensor(source: Tensor, image: Image, name: str) -> None:
    """Copy a contiguous tensor into a part of an image of as many bytes."""
    _bytes(image, name).copy_(source.view(torch.uint8).flatten())


def load_tensor(image: Image, name: str, target: Tensor) -> None:
    """Fill a contiguous tensor with the first bytes of a part of an image."""
    place = target.view(torch.uint8).flatten()
    place.copy_(_bytes(image, name)[: len(place)])


def fits(image: Image, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether an image has these parts, of these sizes."""
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    return all(len(image.parts.get(name, b"")) == size for name, size in sizes.items())


def _layers(image: Image, tier: ComputeTier) -> list[int]:
    """The full-attention layers whose pages an image has."""
    return [layer for layer in tier.geometry.full_layers if _name(layer) in image.parts]


def _bytes(image: Image, name: str) -> Tensor:
    return torch.frombuffer(image.parts[name], dtype=torch.uint8)


def _name(layer: int) -> str:
    return f"layers.{layer}"
