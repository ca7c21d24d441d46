"""The only module that copies between places of a tier, and later between tiers.

A copy has two halves: whoever calls prepares (both places are known, reserved and pinned before the call) and
completes (the destination is entered in the books after the call). Between tensors of one device a copy is
done, or ordered before whatever the device computes next, when the call returns.
"""

from __future__ import annotations

from packhorse.store.tier import Tier


def copy_state(source: Tier, source_slot: int, target: Tier, target_slot: int) -> None:
    """Copy the recurrent state of all linear layers from one slot to another."""
    target.state_record(target_slot).copy_(source.state_record(source_slot))


def zero_state(tier: Tier, slot: int) -> None:
    """Make a slot the state before the first token."""
    tier.state_record(slot).zero_()
