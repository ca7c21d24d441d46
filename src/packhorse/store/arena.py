"""Host memory that a card reads by itself: our own mapping, registered with the driver in segments.

    mapping  | segment 0, at most 1 GiB | segment 1 | ... |        each registered by a thread of its own

torch's pinned allocator rounds a request up to a power of two, so 17 GB would take 32.

NOTE: an asynchronous copy must not cross from one segment into the next (the driver refuses it); kernels may.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress

import torch
from torch import Tensor

from packhorse.core.errors import DoesNotFitError
from packhorse.core.units import GIB, MIB, format_bytes, round_up

SEGMENT_BYTES = GIB
"""Bytes registered at once, at most."""
RING_BYTES = 64 * MIB
"""Pinned memory of a PagedArena."""
THREADS = 8
"""Segments registered at the same time: the time goes into clearing the pages."""


class PinnedArena:
    """`size` bytes of host memory at one address, which kernels of every card may read.

    bytes: uint8 [size], valid until `close`, or until nobody holds the arena. progress(done, total) counts bytes.
    Resident memory is the size rounded up to 2 MiB.

    Raises DoesNotFitError where the system maps or pins less, with what it did pin.
    """

    def __init__(self, size: int, progress: Callable[[int, int], None] | None = None) -> None:
        assert size > 0
        size = round_up(size, 2 * MIB)
        try:
            self._map = mmap.mmap(-1, size)
        except OSError as cause:
            raise _too_large(size, 0, str(cause)) from cause
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Fewer, larger pages: less to walk for the driver. Refused where the kernel has none: no harm.
            with suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._registered: list[int] = []
        self._register(size, progress)
        weakref.finalize(self, _unregister, self._registered)

    @property
    def num_bytes(self) -> int:
        """Bytes mapped and pinned."""
        return self.bytes.numel()

    def copy_to(self, target: Tensor, start: int) -> None:
        """Fill target, uint8 [n] on a card, with the bytes from `start` on: asynchronously, on the current stream."""
        done, size = 0, target.numel()
        while done < size:
            stop = min(size, round_up(start + done + 1, SEGMENT_BYTES) - start)
            target[done:stop].copy_(self.bytes[start + done : start + stop], non_blocking=True)
            done = stop

    def close(self) -> None:
        """Give the memory back; nobody may read it any more."""
        _unregister(self._registered)

    def _register(self, size: int, progress: Callable[[int, int], None] | None) -> None:
        torch.cuda.init()
        pin, base, done = _registrar(), self.bytes.data_ptr(), 0

        def register(start: int) -> tuple[int, int]:
            length = min(SEGMENT_BYTES, size - start)
            code = pin(base + start, length)
            if code:
                return 0, code
            self._registered.append(base + start)
            return length, 0

        threads = min(THREADS, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads) as pool:
            jobs = [pool.submit(register, start) for start in range(0, size, SEGMENT_BYTES)]
            for job in as_completed(jobs):
                length, code = job.result()
                done += length
                if code:
                    for other in jobs:
                        other.cancel()
                    pool.shutdown()
                    pinned = SEGMENT_BYTES * len(self._registered)
                    self.close()
                    raise _too_large(size, min(pinned, size), f"CUDA error {code}")
                if progress is not None:
                    progress(done, size)


class PagedArena:
    """`size` bytes of host memory that a card cannot read by itself, for systems that pin little (WSL2: about 1 GiB).
    What it is to have passes through a small pinned ring.

    bytes: uint8 [size]. Raises DoesNotFitError where not even the ring can be pinned.
    """

    def __init__(self, size: int) -> None:
        self.bytes: Tensor = torch.empty(size, dtype=torch.uint8)
        self._ring = [torch.empty(RING_BYTES // 2, dtype=torch.uint8) for _ in range(2)]
        self._pins = [PinnedTensor(half) for half in self._ring]
        self._sent = [torch.cuda.Event() for _ in self._ring]
        self._turn = 0

    def copy_to(self, target: Tensor, start: int) -> None:
        """Fill target, uint8 [n] on a card, with the bytes from `start` on, on the current stream; the caller's memory
        may change afterwards."""
        size = len(self._ring[0])
        for done in range(0, target.numel(), size):
            part = target[done : done + size]
            half, sent = self._ring[self._turn][: len(part)], self._sent[self._turn]
            sent.synchronize()  # nothing where it was never recorded
            half.copy_(self.bytes[start + done : start + done + len(part)])
            part.copy_(half, non_blocking=True)
            sent.record()
            self._turn ^= 1

    def close(self) -> None:
        """Give the memory back."""
        self._pins.clear()


class PinnedTensor:
    """Pins memory that is there already: tensor, contiguous, on the CPU, is readable for kernels until this is let go
    of. Raises DoesNotFitError where the system pins less."""

    def __init__(self, tensor: Tensor) -> None:
        torch.cuda.init()
        self.tensor = tensor
        size = tensor.numel() * tensor.element_size()
        with ThreadPoolExecutor(1) as pool:
            code = pool.submit(_registrar(), tensor.data_ptr(), size).result()
        if code:
            raise _too_large(size, 0, f"CUDA error {code}")
        weakref.finalize(self, _unregister, [tensor.data_ptr()])


def _registrar() -> Callable[[int, int], int]:
    """Registers (address, bytes) and gives CUDA's error, 0 for none; the card is the calling thread's current one.

    NOTE: a thread keeps the error of a call that failed, and torch would find it at its next kernel: so it is to be
    called in threads that end.
    """
    cudart, index = torch.cuda.cudart(), torch.cuda.current_device()

    def register(address: int, size: int) -> int:
        with torch.cuda.device(index):
            return int(cudart.cudaHostRegister(address, size, 0))

    return register


def _unregister(registered: list[int]) -> None:
    cudart = torch.cuda.cudart()
    while registered:
        cudart.cudaHostUnregister(registered.pop())


def _too_large(asked: int, available: int, why: str) -> DoesNotFitError:
    return DoesNotFitError(
        f"{format_bytes(asked)} of host memory were to be pinned, and the system pinned {format_bytes(available)} "
        f"({why}).",
        asked=asked,
        available=available,
        unit="bytes",
        hint="Raise the limit (`ulimit -l`, the container's memory; WSL2 pins about 1 GiB), or keep more "
        "experts on the card.",
    )
