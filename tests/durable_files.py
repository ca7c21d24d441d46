"""Records whose bytes follow from a number, and processes that write them.

python tests/durable_files.py DIR FIRST    prints each number when its record is durable, until it is killed
python tests/durable_files.py DIR STEP     writes 3 and 4 and drops 0, and ends there and then at a step of STEPS
"""

import sys
from pathlib import Path
from random import Random

from packhorse.core.units import MIB
from packhorse.store.durable import DurableStore
from packhorse.store.files import Faults, FileSystem
from packhorse.store.records import Image, Kind, Record

MODEL = b"m" * 32


def key(number: int, what: str = "key") -> bytes:
    return f"{what} {number}".encode().rjust(32, b".")


def content(number: int, layer: int, size: int) -> bytes:
    return Random(number * 8 + layer).randbytes(size)


def image(number: int, size: int = 5000) -> Image:
    """Pages of two layers of one page of 4 tokens; every third number a state."""
    if number % 3 == 2:
        made = Image.make(Record(Kind.STATE, key(number), key(number), 4, 4, b""), {"state": (size,)})
        made.parts["state"][:] = content(number, 0, size)
        return made
    tokens = Random(number).randbytes(16)
    record = Record(Kind.PAGES, key(number, "parent"), key(number), 0, 4, tokens)
    made = Image.make(record, {f"layers.{i}": (1, size) for i in (0, 1)})
    for layer in (0, 1):
        made.parts[f"layers.{layer}"][:] = content(number, layer, size)
    return made


def find(store: DurableStore, number: int) -> Record | None:
    """The record of that number in the index."""
    if number % 3 == 2:
        return store.states([key(number)]).get(key(number))
    found = store.candidates([key(number, "parent")])
    return found[0] if found else None


def open_store(folder: Path, *, quota: int = 64 * MIB, files: FileSystem | None = None) -> tuple:
    """A store and the number of a model in it."""
    store = DurableStore(folder, quota=quota, reserve=0, files=files)
    return store, store.add_model(MODEL, {"name": "numbers"})


def write_for_ever(folder: Path, first: int) -> None:
    store, model = open_store(folder)
    number = first
    while True:
        if store.write(model, [image(number)]):
            print(number, flush=True)
        number += 1


def end_at(folder: Path, step: str) -> None:
    files = Faults()
    store, model = open_store(folder, files=files)
    files.end_at = step
    store.write(model, [image(3), image(4)])
    found = find(store, 0)
    assert found is not None
    store.drop(found)


if __name__ == "__main__":
    where, what = Path(sys.argv[1]), sys.argv[2]
    if what.isdigit():
        write_for_ever(where, int(what))
    else:
        end_at(where, what)
