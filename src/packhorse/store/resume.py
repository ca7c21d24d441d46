"""What a cancelled sweep had done, in host memory, for the next prompt that begins with the same tokens.

    progress  int64: the next unit's layer and sub-chunk, and the position at which each sub-chunk ends
    hidden    fp32 residuals of all rows, of each row after the last layer that it has passed
    layers.N  pages of the tokens, of full-attention layers that the sweep had begun
    state     recurrent state of each linear layer, as far as the sweep had brought that layer
    state.P   snapshot at position P, of the layers that had passed it; what it holds of others is of no use

One image (store/records.py) a prompt of the tier in RAM, which counts it and drops it as any other. A prompt need not
be the same to its end: it goes on with the leading sub-chunks that both have, up to the last whose state is known.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from torch import Tensor

from packhorse.core.units import ceil_div
from packhorse.store import transfer
from packhorse.store.prefix import encode_tokens
from packhorse.store.records import Image, Kind, RamRecords, Record
from packhorse.store.tier import ComputeTier, StoreGeometry

if TYPE_CHECKING:
    from packhorse.store.kv import StoredSequence

PROGRESS, HIDDEN = "progress", "hidden"
_TOKEN_BYTES = len(encode_tokens([0]))


@dataclass(frozen=True)
class Resumable:
    """What of a prompt a cancelled sweep had done: its first `count` sub-chunks go on at sub-chunk `index` under
    `layer`; index == count: they have passed all layers."""

    image: Image
    count: int
    layer: int
    index: int


def save(
    tier: ComputeTier,
    ram: RamRecords,
    sequence: StoredSequence,
    ends: Sequence[int],
    at: tuple[int, int],
    hidden: Tensor,
) -> bool:
    """Keep what a sweep has done of a sequence. ends: where its sub-chunks end. at: the next unit's layer and
    sub-chunk. hidden: residuals of its rows. False where the tier has no room for it, or its beginning is in no
    entry."""
    if sequence.tip.stop != sequence.position:
        return False
    geometry, (layer, index) = tier.geometry, at
    start, stop = sequence.position, ends[-1]
    tokens = bytes(sequence.encoded[start * _TOKEN_BYTES : stop * _TOKEN_BYTES])
    record = Record(Kind.SWEEP, sequence.tip.key, blake2b(tokens).digest(), start, stop, tokens)
    page_ids = sequence.page_ids[start // geometry.page_len : ceil_div(stop, geometry.page_len)]
    begun = [i for i in geometry.full_layers if i < layer + (index > 0)]
    progress = array("q", [layer, index, *ends])
    shapes: dict[str, tuple[int, ...]] = {PROGRESS: (len(progress) * progress.itemsize,)}
    shapes |= {HIDDEN: (hidden.nbytes,)} | transfer.pages_shapes(geometry, len(page_ids), begun)
    states = {transfer.STATE: sequence.slot} if geometry.is_hybrid else {}
    states |= {_snapshot(position): slot for position, slot in sequence.collected.items()}
    for name in states:
        shapes |= transfer.state_shapes(geometry, name)
    if ram.has(record):
        before = array("q", bytes(ram.read(record).parts[PROGRESS]))
        if tuple(before[:2]) >= at:
            return True
        ram.drop(record)
    if not ram.make_room(Image.size(record, shapes)):
        return False
    image = Image.make(record, shapes)
    image.parts[PROGRESS][:] = progress.tobytes()
    transfer.save_tensor(hidden, image, HIDDEN)
    transfer.save_pages(tier, page_ids, image)
    for name, slot in states.items():
        transfer.save_state(tier, slot, image, name)
    return ram.put(image)


def find(
    geometry: StoreGeometry, ram: RamRecords, sequence: StoredSequence, ends: Sequence[int]
) -> Resumable | None:
    """What of a sequence, whose sub-chunks end there, a cancelled sweep had done. Changes nothing."""
    if sequence.tip.stop != sequence.position:
        return None
    found = [_match(geometry, image, sequence, ends) for image in ram.sweeps(sequence.tip.key)]
    known = [resumable for resumable in found if resumable is not None]
    return max(known, key=lambda r: r.layer * r.count + r.index, default=None)


def _match(
    geometry: StoreGeometry, image: Image, sequence: StoredSequence, ends: Sequence[int]
) -> Resumable | None:
    """`find`, of one image."""
    layer, index, *stored = array("q", bytes(image.parts[PROGRESS]))
    tokens, base = image.record.tokens, sequence.position * _TOKEN_BYTES
    agreed = 0
    for end, other in zip(ends, stored, strict=False):
        size = end * _TOKEN_BYTES
        if end != other or tokens[: size - base] != sequence.encoded[base:size]:
            break
        agreed += 1
    for count in range(agreed, 0, -1):
        end = ends[count - 1]
        whole = count == len(stored) and end % geometry.page_len == 0
        if geometry.is_hybrid and not whole and _snapshot(end) not in image.parts:
            continue
        if index < count:
            return Resumable(image, count, layer, index)
        if layer + 1 < len(geometry.layer_kinds):
            return Resumable(image, count, layer + 1, 0)
        if end < sequence.prompt_len:  # else the prompt's last row is wanted, which nobody kept
            return Resumable(image, count, layer, count)
    return None


def load(
    tier: ComputeTier, found: Resumable, sequence: StoredSequence, stop: int, hidden: Tensor
) -> list[int]:
    """Bring back what was found. stop: where its last sub-chunk ends. hidden: takes the residuals of its rows.
    Returns positions of the sequence's collected snapshots of which the parts of layers that have passed them were
    not kept."""
    geometry, image = tier.geometry, found.image
    transfer.load_tensor(image, HIDDEN, hidden)
    page_ids = sequence.page_ids[sequence.position // geometry.page_len : ceil_div(stop, geometry.page_len)]
    transfer.load_pages(image, 0, tier, page_ids)
    for layer in geometry.linear_layers:
        passed = layer < found.layer or found.index == found.count
        snapshot = passed and _snapshot(stop) in image.parts
        name = _snapshot(stop) if snapshot else transfer.STATE
        transfer.load_state(image, tier, sequence.slot, name, geometry.state_part(layer))
    lost = []
    for position, slot in sequence.collected.items():
        if _snapshot(position) in image.parts:
            transfer.load_state(image, tier, slot, _snapshot(position))
        else:
            lost.append(position)
    return lost


def _snapshot(position: int) -> str:
    return f"{transfer.STATE}.{position}"
