"""Host memory that a card reads by itself: our own mapping, registered with the driver in segments.

    mapping  | segment 0, at most 256 MiB | segment 1 | ... |        each registered by a thread of its own

torch's pinned allocator rounds a request up to a power of two, so 17 GB would take 32.

NOTE: an asynchronous copy must not cross from one segment into the next (the driver refuses it); kernels may.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from concurrent.futures import wait as wait_for
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from packhorse.core.errors import DoesNotFitError
from packhorse.core.units import MIB, format_bytes, round_up

SEGMENT_BYTES = 256 * MIB
"""Bytes registered at once, at most: so many that calls cost nothing, so few that the first are ready soon."""
RING_BYTES = 64 * MIB
"""Pinned memory of a PagedArena."""
THREADS = 8
"""Segments registered at the same time: the time goes into clearing the pages."""
_POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE, which Python does not name: pages are there, cleared, when it returns."""
_POPULATE_BYTES = 16 * MIB
"""Cleared in one call, which other threads that map memory wait for."""


class PinnedArena:
    """`size` bytes of host memory at one address, which kernels of every card may read.

    bytes: uint8 [size], valid until `close`, or until nobody holds the arena. progress(done, total) counts bytes.
    Resident memory is the size rounded up to 2 MiB. wait: False returns while threads still register the segments, in
    order; `bytes` may be written meanwhile, and `wait` is to be called before anything but `copy_from`.

    Raises DoesNotFitError where the system maps or (see `wait`) pins less, with what it did pin.
    """

    def __init__(
        self, size: int, progress: Callable[[int, int], None] | None = None, *, wait: bool = True
    ) -> None:
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
        weakref.finalize(self, _unregister, self._registered)
        torch.cuda.init()
        pin = _registrar()
        # NOTE: the jobs hold the arena, so that its memory is not unmapped under them.
        pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
        starts = range(0, size, SEGMENT_BYTES)
        self._jobs = [pool.submit(self._register, pin, start) for start in starts]
        pool.shutdown(wait=False)
        if wait:
            self.wait(progress)

    @property
    def num_bytes(self) -> int:
        """Bytes mapped and pinned."""
        return self.bytes.numel()

    def wait(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Until all is pinned. Raises DoesNotFitError where the system pins less; what was pinned is given back then,
        and `bytes` stays as memory of the host alone."""
        done = 0
        for job in as_completed(self._jobs):
            length, code = job.result()
            done += length
            if code:
                self._stop()
                pinned = SEGMENT_BYTES * len(self._registered)
                self.close()
                raise _too_large(self.num_bytes, min(pinned, self.num_bytes), f"CUDA error {code}")
            if progress is not None:
                progress(done, self.num_bytes)

    def copy_to(self, target: Tensor, start: int) -> None:
        """Fill target, uint8 [n] on a card, with the bytes from `start` on: asynchronously, on the current stream."""
        done = 0
        for here in self._parts(start, target.numel()):
            part = target[done : done + len(here)]
            part.copy_(here, non_blocking=True)
            done += len(here)

    def copy_from(self, place: Tensor, source: Tensor) -> None:
        """Fill place, uint8 [...], contiguous, a view of `bytes`, with source, alike, on a card: asynchronously, on the
        current stream, as soon as the place is registered."""
        start, done, flat = place.data_ptr() - self.bytes.data_ptr(), 0, source.flatten()
        for here in self._parts(start, len(flat)):
            # Where it was refused, the copy takes its time; `wait` will say so.
            self._jobs[(start + done) // SEGMENT_BYTES].result()
            here.copy_(flat[done : done + len(here)], non_blocking=True)
            done += len(here)

    def close(self) -> None:
        """Give the memory back; nobody may read it any more."""
        self._stop()
        _unregister(self._registered)

    def _stop(self) -> None:
        for job in self._jobs:
            job.cancel()
        wait_for(self._jobs)

    def _parts(self, start: int, size: int) -> Iterator[Tensor]:
        """The bytes from `start` on, cut where segments meet."""
        done = 0
        while done < size:
            stop = min(size, round_up(start + done + 1, SEGMENT_BYTES) - start)
            yield self.bytes[start + done : start + stop]
            done = stop

    def _register(self, pin: Callable[[int, int], int], start: int) -> tuple[int, int]:
        """Bytes of the segment that begins there and were pinned, and CUDA's error."""
        address = self.bytes.data_ptr() + start
        length = min(SEGMENT_BYTES, self.num_bytes - start)
        for done in range(0, length, _POPULATE_BYTES):
            # Before the driver, which holds others up while it pins. Refused by kernels before 5.14: no harm.
            _madvise()(address + done, min(_POPULATE_BYTES, length - done), _POPULATE_WRITE)
        code = pin(address, length)
        if code:
            return 0, code
        self._registered.append(address)
        return length, 0


class PagedArena:
    """Host memory that a card cannot read by itself, for systems that pin little (WSL2: about 1 GiB).
    What it is to have passes through a small pinned ring.

    bytes: uint8 [size], the memory it is given. Raises DoesNotFitError where not even the ring can be pinned.
    """

    def __init__(self, memory: Tensor) -> None:
        self.bytes = memory
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


@cache
def _madvise() -> Callable[[int, int, int], int]:
    """The C library's, called without the interpreter's lock, which Python's own holds."""
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


def _unregister(registered: list[int]) -> None:
    while registered:
        torch.cuda.cudart().cudaHostUnregister(registered.pop())


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
