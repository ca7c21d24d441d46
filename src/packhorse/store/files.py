"""What the disk tier asks of the system, and a system that fails as it is told to. No torch."""

from __future__ import annotations

import os
import time
from pathlib import Path

STEPS = (
    "opened", "written", "synced", "renamed", "folder synced", "committed", "row deleted", "file deleted",
)  # fmt: skip
"""Where a write or an eviction may be cut short, in order."""
ENDED = 77
"""Exit code of a process that `Faults.end_at` has ended."""


class FileSystem:
    """What the store asks of the system."""

    def reached(self, step: str) -> None:
        """A step of STEPS is done."""

    def now(self) -> float:
        """Seconds of the wall clock: for people, and for what is to be forgotten with age."""
        return time.time()

    def write(self, fd: int, data: memoryview) -> int:
        """See os.write."""
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        """See os.fsync."""
        os.fsync(fd)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        """See os.preadv."""
        return os.preadv(fd, [buffer], offset)

    def free_bytes(self, folder: Path) -> int:
        """Bytes that may still be written there."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize


class Faults(FileSystem):
    """Faults, as attributes: none at first, and at any time others.

    errors: numbers by call, of write, fsync and read. short: reads end at a block, writes in the middle. flip: where in
    each file the lowest bit is turned as it is read. delay: seconds that each call takes longer. clock: what it says.
    end_at: the step of STEPS at which the process ends there and then.
    """

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.short = False
        self.flip: int | None = None
        self.delay = 0.0
        self.clock = 1e9
        self.end_at = ""

    def reached(self, step: str) -> None:
        """See FileSystem, as all below."""
        if step == self.end_at:
            os._exit(ENDED)

    def now(self) -> float:
        return self.clock

    def write(self, fd: int, data: memoryview) -> int:
        self._fail("write")
        return super().write(fd, data[: max(1, len(data) // 2)] if self.short else data)

    def fsync(self, fd: int) -> None:
        self._fail("fsync")
        super().fsync(fd)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._fail("read")
        # A direct read ends at a block or at the file's end.
        count = super().read(fd, buffer[:4096] if self.short else buffer, offset)
        if self.flip is not None and offset <= self.flip < offset + count:
            buffer[self.flip - offset] ^= 1
        return count

    def _fail(self, call: str) -> None:
        time.sleep(self.delay)
        if call in self.errors:
            raise OSError(self.errors[call], os.strerror(self.errors[call]))
