"""Headers of safetensors files, read and checked without torch or the safetensors library.

Format: 8 bytes little-endian header length, that many bytes of JSON ({name: {dtype, shape, data_offsets}},
and __metadata__), then the tensor bytes, which the tensors cover exactly, in any order, without gaps.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from packhorse.core.errors import CorruptFileError, UnsupportedModelError
from packhorse.core.formats import FORMATS
from packhorse.facts.fields import is_whole, parse_object, read_object, reading
from packhorse.facts.model import TensorFacts

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_DIMS = 16
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_header(file: Path) -> dict[str, TensorFacts]:
    """Tensors of one file by name, in the order of their bytes. Offsets count from the start of the file.

    Raises CorruptFileError where the header contradicts itself or the size of the file, UnsupportedModelError
    for a dtype that is not known, RefusedError where the file cannot be read.
    """
    with reading(file), file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        head = stream.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > size - 8 or length > MAX_HEADER_BYTES or length < 2:
            raise CorruptFileError(
                f"{file} says that its header takes {length:,} bytes, and the file has {size:,}.",
                header_bytes=length,
                file_bytes=size,
            )
        data = stream.read(length)
    if not data.startswith(b"{"):
        raise CorruptFileError(f"The header of {file} does not start with a brace.")
    entries = parse_object(data, f"The header of {file}", unique=True)
    entries.pop("__metadata__", None)
    start = 8 + length
    found = [_tensor(file, start, name, entry) for name, entry in entries.items()]
    found.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    _check_cover(file, found, start, size)
    return {tensor.name: tensor for tensor in found}


def _tensor(file: Path, start: int, name: str, entry: Any) -> TensorFacts:
    """One entry of the header, checked by itself."""

    def wrong(what: str) -> CorruptFileError:
        return CorruptFileError(f"{file}: the tensor {name!r} has {what}.", tensor=name)

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise wrong("an entry that is not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    form = FORMATS.get(dtype) if isinstance(dtype, str) else None
    if form is None or form.block_len != 1:
        raise UnsupportedModelError(
            f"{file}: the tensor {name!r} has the dtype {dtype!r}, which is not supported.",
            hint="Use the model's BF16 checkpoint.",
            tensor=name,
        )
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_is_size(dim) for dim in shape):
        raise wrong(f"the shape {str(shape)[:80]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(value) for value in offsets):
        raise wrong(f"the data_offsets {str(offsets)[:80]}")
    tensor = TensorFacts(name, tuple(shape), form, file, start + offsets[0])
    if offsets[1] - offsets[0] != tensor.num_bytes:
        raise wrong(f"{offsets[1] - offsets[0]:,} bytes, and its shape {shape} in {dtype} takes"
                    f" {tensor.num_bytes:,}")  # fmt: skip
    return tensor


def _is_size(value: Any) -> bool:
    return is_whole(value) and 0 <= value < 2**63


def _check_cover(file: Path, tensors: list[TensorFacts], start: int, size: int) -> None:
    """The tensors, sorted by offset, cover the bytes after the header exactly."""
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps the one before it" if tensor.offset < end else "leaves a gap before it"
            raise CorruptFileError(
                f"{file}: the tensor {tensor.name!r} starts at byte {tensor.offset:,} and {what}, which ends"
                f" at {end:,}.",
                tensor=tensor.name,
            )
        end += tensor.num_bytes
    if end != size:
        raise CorruptFileError(
            f"{file} has {size:,} bytes, and its header describes {end:,}.", file_bytes=size, header_bytes=end
        )


def read_folder(folder: Path) -> dict[str, TensorFacts]:
    """Tensors of a checkpoint folder by name: one file, or shards with an index; empty without weights.

    Raises what `read_header` raises; CorruptFileError where index and shards disagree; UnsupportedModelError
    where the weights are pickle files.
    """
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return read_header(files[0])
    if files:
        hint = f"Fetch {INDEX}, or leave one file there."
        raise CorruptFileError(f"{folder} holds {len(files)} safetensors files and no {INDEX}.", hint=hint)
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise UnsupportedModelError(
            f"{folder} holds its weights as a pickle file ({pickles[0]}), which can run any code when it is"
            " opened. Packhorse does not open it.",
            hint="Use the model's safetensors files, or convert: load it where you trust it and save it with"
            " save_pretrained.",
            file=pickles[0],
        )
    return {}


def _read_shards(folder: Path) -> dict[str, TensorFacts]:
    index = folder / INDEX
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFileError(f"{index} has no weight_map.")
    for name, shard in weight_map.items():
        if not _is_plain_name(shard):
            raise CorruptFileError(
                f"{index} places {name!r} in {str(shard)[:80]!r}, which is not the name of a safetensors file"
                " in the same folder.",
                hint="Do not use this checkpoint: its index points outside itself.",
                tensor=name,
            )
    found: dict[str, TensorFacts] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            hint = "Fetch the missing file."
            raise CorruptFileError(f"{index} names {shard}, which is not there.", hint=hint, shard=shard)
        for name, tensor in read_header(folder / shard).items():
            if weight_map.get(name) != shard:
                where = weight_map.get(name)
                raise CorruptFileError(
                    f"{shard} holds the tensor {name!r}, which {INDEX} places"
                    f" {f'in {where}' if where else 'nowhere'}.",
                    tensor=name,
                )
            found[name] = tensor
    missing = sorted(set(weight_map) - set(found))
    if missing:
        raise CorruptFileError(
            f"{index} places {missing[0]!r} in {weight_map[missing[0]]}, and it is not there"
            f" ({len(missing)} such tensors).",
            tensor=missing[0],
        )
    return found


def _is_plain_name(shard: object) -> bool:
    """Whether a shard's name stays in its folder, on any system."""
    return (
        isinstance(shard, str)
        and shard.endswith(".safetensors")
        and PurePosixPath(shard).name == shard
        and PureWindowsPath(shard).name == shard
        and "\0" not in shard
    )
