"""What a process takes of a card's memory, by the driver's figure, and the cap on it.

card | others | our context and modules | torch's allocator: pools, buffers, graphs | free
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from packhorse.core.errors import CardLostError, DoesNotFitError
from packhorse.core.units import MIB, format_bytes, parse_bytes
from packhorse.facts.machine import DISPLAY_BYTES
from packhorse.facts.nvml import has_display, process_bytes

MODULE_BYTES = 160 * MIB
"""Kernels of libraries and our own that are loaded when they first run: they come out of no pool of ours."""
LATER_BYTES = 40 * MIB
"""Of these, what may be loaded when requests have come: up to 39 MiB in 20 loads on one H200."""
SLACK_BYTES = 64 * MIB
"""What the allocator holds beyond what is asked of it, and small tensors that nobody counts."""
_SMALL = 512 * 1024
_PIECE = 20 * MIB
"""As much as the allocator maps at a time."""


class CardMemory:
    """The memory of one card that this process may take: `cap` bytes, or (None) what is free when this is made, less
    what a desktop needs where a display is attached.

    runtime_bytes: what will be taken beside what is planned. num_sms: the card's multiprocessors. Makes this card the
    calling thread's and its CUDA context, which takes some itself. Raises DoesNotFitError where less than `cap` is
    there.
    """

    def __init__(self, device: str, cap: int | None) -> None:
        self.device = torch.device("cuda", torch.device(device).index or 0)
        # Streams, events and graphs are made without naming a card: they are to be of this one.
        torch.cuda.set_device(self.device)
        free, self.total = torch.cuda.mem_get_info(self.device)
        properties = torch.cuda.get_device_properties(self.device)
        self._uuid, self.num_sms = f"GPU-{properties.uuid}", properties.multi_processor_count
        context = self.used_bytes()
        there = free + context
        if cap is not None and cap > there:
            raise DoesNotFitError(
                f"--vram {format_bytes(cap)} was asked for, and this process can have {format_bytes(there)} of the "
                f"card's {format_bytes(self.total)}.",
                asked=cap,
                available=there,
                unit="bytes",
                hint="Lower --vram, or end what else uses the card.",
            )
        if cap is None:
            cap = there - (DISPLAY_BYTES if has_display(self._uuid) else 0)
        self.cap = cap
        held = torch.cuda.memory_reserved(self.device)
        self.runtime_bytes = context - held + MODULE_BYTES + SLACK_BYTES
        # Memory that the allocator gives back in part, so that freed blocks of any size serve the next.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        self._limit(context - held + MODULE_BYTES)

    def hold(self, device_bytes: int) -> None:
        """When all is loaded: have the allocator hold what is left of `device_bytes`, which were planned, some of it in
        small blocks. So what requests take and give back is there, and what the driver counts does not grow later."""
        taken = [
            torch.empty(_SMALL, dtype=torch.uint8, device=self.device)
            for _ in range(SLACK_BYTES // 2 // _SMALL)
        ]
        beside = self.used_bytes() - torch.cuda.memory_reserved(self.device) + LATER_BYTES
        self._limit(beside)
        most = min(device_bytes, self.cap) - beside - _PIECE
        with suppress(torch.OutOfMemoryError):  # somebody else has it: then there is less for experts
            # Piece by piece: what the allocator holds free already is used up first.
            while torch.cuda.memory_reserved(self.device) <= most:
                taken.append(torch.empty(_PIECE, dtype=torch.uint8, device=self.device))

    def _limit(self, beside: int) -> None:
        """The allocator's own limit, where so much is taken beside it."""
        limit = max(0, self.cap - beside)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / self.total), self.device)

    def used_bytes(self) -> int:
        """What the driver says that this process takes; where it tells no process apart, what the card's users take
        together."""
        ours = process_bytes(self._uuid)
        if ours is None:
            free, total = torch.cuda.mem_get_info(self.device)
            return total - free
        return ours


def asked_bytes(error: torch.OutOfMemoryError) -> int:
    """What the allocation asked for that failed, from the allocator's words; 0 where they say nothing of it."""
    found = re.search(r"Tried to allocate ([\d.]+ (?:[KMG]i)?)b(?:ytes)?", str(error), re.IGNORECASE)
    return 0 if found is None else parse_bytes(found[1] + "B")


def check_answers(device: str | torch.device, error: Exception) -> None:
    """After `error`. Raises CardLostError where the device is a card that has not survived it."""
    if torch.device(device).type == "cpu":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as again:
        raise CardLostError(
            f"{device} does not answer any more: {type(error).__name__}: {error}",
            hint="Start again. If it comes back: look at the driver's log (dmesg), and report it.",
        ) from again


@contextmanager
def room_on(card: CardMemory | None) -> Iterator[None]:
    """Raises DoesNotFitError where an allocation fails meanwhile: another program took memory that was free when sizes
    were decided, or more was needed than was planned."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        assert card is not None
        free, total = torch.cuda.mem_get_info(card.device)
        raise DoesNotFitError(
            f"The card ran out of memory: {format_bytes(card.cap)} were to be used, this process has "
            f"{format_bytes(card.used_bytes())}, and {format_bytes(free)} of {format_bytes(total)} are free.",
            asked=card.cap,
            available=card.used_bytes() + free,
            unit="bytes",
            hint="If another program uses the card, end it or give a --vram that leaves it room; else report this.",
        ) from error
