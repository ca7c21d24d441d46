"""Safetensors files written tensor by tensor: what is in a file is known before its first byte is made.

A shard is written beside its name and takes it when all of it is on disk, so that a shard with its name is whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from packhorse.core.formats import FORMATS
from packhorse.facts.safetensors_header import INDEX
from packhorse.models.raw import DTYPES

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
        count = 1
        for dim in self.shape:
            count *= dim
        return FORMATS[self.dtype].num_bytes(count)


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
