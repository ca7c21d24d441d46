"""Pinned host memory of our own mapping."""

import pytest
import torch

from packhorse.core.errors import DoesNotFitError
from packhorse.core.units import MIB
from packhorse.store import arena

pytestmark = pytest.mark.gpu


def test_segments_are_pinned_and_readable(monkeypatch):
    monkeypatch.setattr(arena, "SEGMENT_BYTES", 8 * MIB)
    seen = []
    pinned = arena.PinnedArena(37 * MIB + 5, lambda done, total: seen.append((done, total)))
    assert pinned.num_bytes == 38 * MIB and seen[-1] == (38 * MIB, 38 * MIB)
    assert pinned.bytes.is_pinned() and pinned.bytes[37 * MIB :].is_pinned()
    pinned.bytes.copy_(torch.arange(pinned.num_bytes, dtype=torch.int64) % 251)
    card = torch.empty(pinned.num_bytes, dtype=torch.uint8, device="cuda")
    for part, place in zip(pinned.bytes.split(8 * MIB), card.split(8 * MIB), strict=True):
        place.copy_(part, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(card.cpu(), pinned.bytes)
    pinned.close()
    assert not pinned.bytes.is_pinned()


def test_what_cannot_be_mapped_is_refused_with_the_size():
    with pytest.raises(DoesNotFitError, match="GiB"):
        arena.PinnedArena(1 << 50)
