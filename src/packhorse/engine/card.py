"""What a process takes of a card's memory, by the driver's figure, and the cap on it.

card | others | our context and modules | torch's allocator: pools, buffers, graphs | free
"""

from __future__ import annotations

import torch

from packhorse.core.errors import DoesNotFitError
from packhorse.core.units import MIB, format_bytes
from packhorse.facts.nvml import process_bytes

MODULE_BYTES = 96 * MIB
"""Kernels of libraries and our own that are loaded when they first run: they come out of no pool of ours."""


class CardMemory:
    """The memory of one card that this process may take: `cap` bytes, or (None) what is free when this is made.

    Makes the CUDA context, which takes some itself. Raises DoesNotFitError where less than `cap` is there.
    """

    def __init__(self, device: str, cap: int | None) -> None:
        self.device = torch.device("cuda", torch.device(device).index or 0)
        free, self.total = torch.cuda.mem_get_info(self.device)
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
        self.cap = there if cap is None else cap
        # Memory that the allocator gives back in part, so that freed blocks of any size serve the next.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        held = torch.cuda.memory_reserved(self.device)
        limit = max(0, self.cap - (context - held) - MODULE_BYTES)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / self.total), self.device)

    def used_bytes(self) -> int:
        """What the driver says that this process takes; where it tells no process apart, what the card's users take
        together."""
        ours = process_bytes(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}")
        if ours is None:
            free, total = torch.cuda.mem_get_info(self.device)
            return total - free
        return ours
