"""Shared memory and warps of the products over packed weights."""

from packhorse.core.formats import PACKED
from packhorse.kernels.linear import cuda as linear


def test_rings_fit_every_card():
    """Rings of two row blocks leave room on the cards with the least shared memory; each K has its warps."""
    for form in PACKED.values():
        warps = linear.num_warps(form, 1 << 20)
        assert 4 <= warps <= linear.MAX_WARPS
        assert linear.ring_bytes(form, 2, warps) <= 96 << 10
        for units in range(1, 70):
            used = linear.num_warps(form, 512 * units)
            rounds = -(-units // used)
            assert used <= min(warps, units) and (rounds - 1) * warps < units
