"""Safetensors files written tensor by tensor: what is in a file is known before its first byte is made.

A shard is written beside its name and takes it when all of it is on disk, so that a shard with its name is whole.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from packhorse.core.errors import DoesNotFitError, RefusedError
from packhorse.core.formats import FORMATS
from packhorse.core.units import format_bytes
from packhorse.facts.safetensors_header import INDEX
from packhorse.models.raw import DTYPES

T = TypeVar("T")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorSpec(NamedTuple):
    """A tensor to be written. dtype: as safetensors calls it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, value: Tensor) -> TensorSpec:
        return cls(name, _NAMES[value.dtype], tuple(value.shape))

    @property
    def num_bytes(self) -> int:
        return FORMATS[self.dtype].num_bytes(math.prod(self.shape))


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A block that writes to a folder. Raises RefusedError where that cannot be done."""
    try:
        yield
    except OSError as error:
        hint = "Check the folder and its disk."
        raise RefusedError(f"{folder} cannot be written: {error.strerror or error}.", hint=hint) from error


def check_space(folder: Path, size: int) -> None:
    """Raises DoesNotFitError where a folder's disk has no room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise DoesNotFitError(
            f"{format_bytes(size)} are to be written to {folder}, and its disk has {format_bytes(free)} free.",
            asked=size,
            available=free,
            hint="Free space, or give a folder on another disk.",
        )


def in_shards(
    items: Iterable[T], specs: Callable[[T], Iterable[TensorSpec]], most_bytes: int
) -> list[list[T]]:
    """Items in files of at most `most_bytes`, or of one item, in order. specs: the tensors that an item becomes."""
    shards: list[list[T]] = [[]]
    size = 0
    for item in items:
        made = sum(spec.num_bytes for spec in specs(item))
        if shards[-1] and size + made > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += made
    return shards


def shard_name(index: int, count: int) -> str:
    """File name of shard `index`, from 0, of `count`."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def shard_bytes(specs: Sequence[TensorSpec]) -> int:
    """Bytes of the file with these tensors."""
    return len(_header(specs)) + sum(spec.num_bytes for spec in specs)


def write_shard(file: Path, specs: Sequence[TensorSpec], values: Iterable[Tensor]) -> None:
    """Write a shard; `values` are asked for one after the other, in the order of `specs`, and not kept.

    An OSError is the caller's; a value of another type or shape than its spec is a fault of ours.
    """
    part = file.with_suffix(".part")
    with part.open("wb") as stream:
        stream.write(_header(specs))
        for spec, value in zip(specs, values, strict=True):
            assert TensorSpec.of(spec.name, value) == spec, f"{spec.name} is not what was said of it"
            stream.write(value.contiguous().view(-1).view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)


def write_json(file: Path, document: object) -> None:
    """A JSON file, whole or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def write_index(folder: Path, shards: Sequence[Sequence[TensorSpec]]) -> None:
    """The index of a folder whose shards have these tensors."""
    where = {
        spec.name: shard_name(index, len(shards)) for index, specs in enumerate(shards) for spec in specs
    }
    total = sum(spec.num_bytes for specs in shards for spec in specs)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries, at = {}, 0
    for name, dtype, shape in specs:
        size = TensorSpec(name, dtype, shape).num_bytes
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)  # so that the first tensor is aligned
    return len(text).to_bytes(8, "little") + text
