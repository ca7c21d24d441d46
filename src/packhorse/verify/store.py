"""What the disk tier makes of faults, tried on somebody's own disk: a miss, a write that says it failed, or what was
written; never other bytes, and nothing is lost that was said to be kept. No torch.

python -m packhorse.verify.store DIR STEP    writes 3, drops 0, and ends there and then at a step of STEPS
"""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from packhorse.core.errors import DoesNotFitError, RefusedError
from packhorse.core.units import MIB, format_bytes
from packhorse.store.durable import DurableStore
from packhorse.store.files import ENDED, STEPS, Faults, FileSystem
from packhorse.store.records import Image, Kind, Record, UnreadableError

SIZE = 400_000
"""Bytes of what a record holds."""
NEEDED = 4 * MIB
"""Bytes of the disk that one trial's store, of four records and an index, has to find free; it takes half of that."""
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "short reads and writes": ({"short": True}, "served, kept"),
    "slow disk": ({"delay": 0.1}, "served, kept"),
    "clock going back": ({"clock": 0.0}, "served, kept"),
    "bit flip": ({"flip": 9000}, "miss checksum, kept"),
    "EIO of a read": ({"errors": {"read": errno.EIO}}, "miss io_error, kept"),
    "EIO of a write": ({"errors": {"write": errno.EIO}}, "served, not kept and told"),
    "ENOSPC": ({"errors": {"write": errno.ENOSPC}}, "served, not kept and told"),
    "fsync error": ({"errors": {"fsync": errno.EIO}}, "served, not kept and told"),
}
"""Attributes of Faults, and what becomes then of a record that is there and of one that is not; afterwards all is well
again."""


def try_faults(folder: Path) -> Iterator[dict[str, Any]]:
    """Inject each fault into a store of its own in a folder below this one, which is deleted then: what was injected,
    expected and happened, and whether that is the same. Raises RefusedError where it cannot be written to, and
    DoesNotFitError where less than NEEDED bytes are free, before the first fault or after one."""
    trials: dict[str, tuple[Callable[[Path], str], str]] = {
        **{
            name: (partial(_fail, faults), f"{wanted}; well again")
            for name, (faults, wanted) in FAULTS.items()
        },
        **{f"crash: {step}": (partial(_crash, step), "nothing lost, nothing left") for step in STEPS},
    }
    try:
        _check_free(folder)
        for name, (trial, expected) in trials.items():
            with tempfile.TemporaryDirectory(prefix="verify-store-", dir=folder) as below:
                happened = trial(Path(below))
            _check_free(folder)  # what others took meanwhile is no fault of the disk's
            yield {"fault": name, "expected": expected, "happened": happened, "passed": happened == expected}
    except OSError as error:
        reason = f"{folder} cannot be used: {error.strerror or error}."
        raise RefusedError(reason, hint="Give a folder on a local disk that you may write to.") from error


def _check_free(folder: Path) -> None:
    free = FileSystem().free_bytes(folder)
    if free < NEEDED:
        raise DoesNotFitError(
            f"The trials need {format_bytes(NEEDED)} of the disk of {folder}, and {format_bytes(free)} are free.",
            asked=NEEDED,
            available=free,
            hint="Make room there, or give a folder on another disk.",
        )


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[DurableStore, int, Faults]]:
    files = Faults()
    store = DurableStore(folder, quota=64 * MIB, reserve=0, max_age=2e9, files=files)
    try:
        yield store, store.add_model(b"m" * 32, {"name": "verify", "page_len": "4"}), files
    finally:
        store.close()


def _image(number: int) -> Image:
    """A page of tokens; all of it follows from the number."""
    random = Random(number)
    record = Record(Kind.PAGES, random.randbytes(32), random.randbytes(32), 0, 4, random.randbytes(16))
    made = Image.make(record, {"layers.0": (SIZE,)})
    made.parts["layers.0"][:] = random.randbytes(SIZE)
    return made


def _outcome(store: DurableStore, number: int) -> str:
    """What becomes of looking for a record."""
    want = _image(number)
    for record in store.candidates([want.record.parent]):
        try:
            return "served" if store.read(record).view == want.view else "WRONG BYTES"
        except UnreadableError as error:
            return f"miss {error.reason}"
    return "absent"


def _has(store: DurableStore, *numbers: int) -> bool:
    """Whether these and no others are there, each whole and in a file of its own."""
    num_files = len([*(store.folder / "models").glob("*/*")])
    return num_files == len(numbers) and all(_outcome(store, number) == "served" for number in numbers)


def _fail(faults: dict[str, Any], folder: Path) -> str:
    with _opened(folder) as (store, model, files):
        store.write(model, [_image(0)])
        vars(files).update(faults)
        kept = store.write(model, [_image(1)])
        store.expire()
        said = f"{_outcome(store, 0)}, {'kept' if kept else 'not kept and told' if store.trouble else 'NOT TOLD'}"
        vars(files).update(vars(Faults()))
        well = _has(store, 0, *[1] * kept) and store.write(model, [_image(1)]) and _has(store, 0, 1)
    return f"{said}; {'well again' if well else 'LOST, OR LEFT SOMETHING'}"


def _crash(step: str, folder: Path) -> str:
    with _opened(folder) as (store, model, _):
        store.write(model, [_image(n) for n in range(3)])
    done = subprocess.run([sys.executable, "-m", "packhorse.verify.store", folder, step], check=False)
    if done.returncode != ENDED:
        return f"the step was not reached: exit code {done.returncode}"
    kept = STEPS.index(step) >= STEPS.index("committed")
    with _opened(folder) as (store, _, _):
        well = _has(store, *range(step.endswith(" deleted"), 3 + kept))
    return "nothing lost, nothing left" if well else "LOST, OR LEFT SOMETHING"


if __name__ == "__main__":
    with _opened(Path(sys.argv[1])) as (store, model, files):
        files.end_at = sys.argv[2]
        store.write(model, [_image(3)])
        store.drop(store.candidates([_image(0).record.parent])[0])
