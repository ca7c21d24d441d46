"""Safetensors headers: what they hold, and every way they can lie."""

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from packhorse.core.errors import CorruptFileError, PackhorseError, RefusedError, UnsupportedModelError
from packhorse.facts.safetensors_header import INDEX, read_folder, read_header

F32 = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def raw(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    file.write_bytes(size.to_bytes(8, "little") + text + data)
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_everything_the_library_reads(file):
    types = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
             torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
             torch.uint16, torch.uint32, torch.uint64]  # fmt: skip
    tensors = {f"t{i}": torch.zeros(3, i).to(dtype) for i, dtype in enumerate(types)}
    tensors["scalar"] = torch.tensor(1.5)
    save_file(tensors, file, metadata={"format": "pt"})
    found = read_header(file)
    with safe_open(file, "pt") as opened:
        assert set(found) == set(opened.keys())
        for name, tensor in found.items():
            part = opened.get_slice(name)
            assert (list(tensor.shape), tensor.format.name) == (part.get_shape(), part.get_dtype())
            assert tensor.num_bytes == tensors[name].numel() * tensors[name].element_size()
            stored = file.read_bytes()[tensor.offset : tensor.offset + tensor.num_bytes]
            assert stored == tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert (
        sum(t.num_bytes for t in found.values()) + min(t.offset for t in found.values())
        == file.stat().st_size
    )


def test_files_that_hold_nothing_or_are_not_there(file):
    assert read_header(raw(file, {})) == {}
    assert read_header(raw(file, {"__metadata__": {"a": "b"}})) == {}
    with pytest.raises(RefusedError, match="cannot be read"):
        read_header(file.with_name("absent"))


@pytest.mark.parametrize(
    ("header", "data", "match"),
    [
        ({"a": F32}, bytes(23), "has .* bytes, and its header describes"),
        ({"a": F32}, bytes(25), "has .* bytes, and its header describes"),
        ({"a": F32 | {"data_offsets": [0, 20]}}, bytes(20), "20 bytes, and its shape"),
        ({"a": F32 | {"data_offsets": [24, 0]}}, bytes(24), "-24 bytes"),
        ({"a": F32 | {"data_offsets": [4, 28]}}, bytes(28), "leaves a gap"),
        ({"a": F32, "b": F32 | {"data_offsets": [12, 36]}}, bytes(36), "overlaps"),
        ({"a": F32, "b": F32}, bytes(24), "overlaps"),
        ({"a": F32, "b": F32 | {"data_offsets": [28, 52]}}, bytes(52), "leaves a gap"),
        ({"a": F32 | {"data_offsets": [0, 2**70]}}, b"", "data_offsets"),
        ({"a": F32 | {"data_offsets": [0]}}, b"", "data_offsets"),
        ({"a": F32 | {"data_offsets": [0.0, 24.0]}}, b"", "data_offsets"),
        ({"a": F32 | {"data_offsets": "0"}}, b"", "data_offsets"),
        ({"a": F32 | {"shape": [2, -3]}}, bytes(24), "shape"),
        ({"a": F32 | {"shape": [2, True]}}, bytes(8), "shape"),
        ({"a": F32 | {"shape": 6}}, bytes(24), "shape"),
        ({"a": F32 | {"shape": [1] * 17}}, bytes(4), "shape"),
        ({"a": F32 | {"shape": [2**62, 2**62]}}, bytes(24), "24 bytes, and its shape"),
        ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4), "entry"),
        ({"a": F32 | {"more": 1}}, bytes(24), "entry"),
        ({"a": 1}, b"", "entry"),
        (b'{"a": 1, "a": 1}', b"", "'a' occurs twice"),
        (b'{"a": {"dtype": "F32", "dtype": "F16"}}', b"", "'dtype' occurs twice"),
        (b"[1, 2]", b"", "brace"),
        (b"  {}", b"", "brace"),
        (b"{nonsense", b"", "not JSON"),
        (b'{"\xff": 1}', b"", "not JSON"),
        (b"{" + b'"a":[' * 100_000, b"", "not JSON"),
    ],
)  # fmt: skip
def test_lies_are_refused(header, data, match, file):
    with pytest.raises(CorruptFileError, match=match) as error:
        read_header(raw(file, header, data))
    assert "model.safetensors" in error.value.reason and error.value.hint


@pytest.mark.parametrize("length", [0, 1, 3, 100, 2**31, 2**63, 2**64 - 1])
def test_header_length_is_checked_before_it_is_read(length, file):
    raw(file, {}, length=length)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFileError, match="header takes") as error:
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert f"{length:,}" in error.value.reason


@pytest.mark.parametrize("size", range(8))
def test_shorter_than_its_own_length_field(size, file):
    file.write_bytes(bytes(size))
    with pytest.raises(CorruptFileError):
        read_header(file)


def test_unknown_types_are_refused_by_name(file):
    for dtype in ("Q4_0", "F4", "bfloat16", 7, None, []):
        with pytest.raises(UnsupportedModelError, match="dtype"):
            read_header(raw(file, {"a": F32 | {"dtype": dtype}}, bytes(24)))


def test_damage_anywhere_is_an_error_of_the_tree(file):
    """Hundreds of damaged copies: read as before, or refused with a typed error, without large memory."""
    save_file({f"layer.{i}": torch.ones(2, i + 1) for i in range(6)}, file, metadata={"format": "pt"})
    good = file.read_bytes()
    header_end = 8 + int.from_bytes(good[:8], "little")
    rng = random.Random(0)
    refused = 0
    tracemalloc.start()
    for trial in range(600):
        data = bytearray(good)
        if trial % 3 == 0:
            del data[rng.randrange(len(data)) :]
        elif trial % 3 == 1:
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(header_end)] = rng.randrange(256)
        else:
            at = rng.randrange(header_end)
            data[at : at + rng.randrange(4)] = rng.randbytes(rng.randrange(6))
        file.write_bytes(data)
        try:
            read_header(file)
        except PackhorseError as error:
            assert error.hint
            refused += 1
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.stop()
    assert refused > 400


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    for number in (1, 2):
        save_file({f"t{number}": torch.ones(number)}, tmp_path / f"s-{number}.safetensors")
    write_index(tmp_path, {"t1": "s-1.safetensors", "t2": "s-2.safetensors"})
    return tmp_path


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards(sharded):
    found = read_folder(sharded)
    assert {name: tensor.file.name for name, tensor in found.items()} == {
        "t1": "s-1.safetensors",
        "t2": "s-2.safetensors",
    }


@pytest.mark.parametrize(
    ("weight_map", "match"),
    [
        ({"t1": "s-1.safetensors", "t2": "s-3.safetensors"}, r"s-3\.safetensors, which is not there"),
        ({"t1": "s-1.safetensors", "t2": "s-2.safetensors", "t3": "s-1.safetensors"}, "places 't3'"),
        ({"t1": "s-1.safetensors", "t2": "s-1.safetensors"}, "places 't2'"),
        ({"t1": "s-2.safetensors", "t2": "s-2.safetensors"}, "places 't1'"),
        ({"t1": "s-1.safetensors", "t3": "s-2.safetensors"}, "places nowhere"),
        ({"t1": "../s-1.safetensors"}, "outside itself"),
        ({"t1": "/etc/s-1.safetensors"}, "outside itself"),
        ({"t1": "sub/s-1.safetensors"}, "outside itself"),
        ({"t1": "..\\s-1.safetensors"}, "outside itself"),
        ({"t1": "C:s-1.safetensors"}, "outside itself"),
        ({"t1": "s-1.bin"}, "outside itself"),
        ({"t1": "s\0.safetensors"}, "outside itself"),
        ({"t1": 7}, "outside itself"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_indexes_that_lie(weight_map, match, sharded):
    write_index(sharded, weight_map)
    with pytest.raises(CorruptFileError) as error:
        read_folder(sharded)
    import re

    assert re.search(match, str(error.value))


def test_a_tensor_in_two_shards(sharded):
    save_file({"t1": torch.ones(1), "t2": torch.ones(2)}, sharded / "s-2.safetensors")
    with pytest.raises(CorruptFileError, match=r"s-2\.safetensors holds the tensor 't1', which .* in s-1"):
        read_folder(sharded)


def test_one_file_goes_before_shards_and_may_have_any_name(sharded):
    (sharded / INDEX).unlink()
    with pytest.raises(CorruptFileError, match="2 safetensors files and no"):
        read_folder(sharded)
    (sharded / "s-2.safetensors").unlink()
    assert list(read_folder(sharded)) == ["t1"]
    save_file({"whole": torch.ones(1)}, sharded / "model.safetensors")
    write_index(sharded, {"t1": "s-1.safetensors"})
    assert list(read_folder(sharded)) == ["whole"]


def test_pickle_alone_is_refused_and_beside_safetensors_ignored(tmp_path):
    assert read_folder(tmp_path) == {}
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin") as error:
        read_folder(tmp_path)
    assert "safetensors" in error.value.hint
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(read_folder(tmp_path)) == ["a"]
