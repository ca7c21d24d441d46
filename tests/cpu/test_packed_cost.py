"""Bytes of packed matrices, against counting them."""

from packhorse.core.formats import PACKED


def test_published_shapes():
    """A row of int4-g128 takes 0.515625 bytes a weight."""
    form = PACKED["int4-g128"]
    assert form.num_bytes(5120, 17408) == 5120 * 17408 * 33 // 64
    assert form.num_bytes(1024, 2048) + form.num_bytes(2048, 512) == 1_622_016
