"""The identity of stored pages: one for each way in which pages may differ."""

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from chats import PLAIN, shared_folder
from packhorse.core.errors import RefusedError
from packhorse.engine import identity
from packhorse.engine.identity import file_digest, model_identity
from packhorse.facts.read import read_model
from packhorse.quant.codec import PlainCodec
from packhorse.store.tier import StoreGeometry


@pytest.fixture
def model(tmp_path) -> Path:
    return Path(shutil.copytree(shared_folder("qwen3_5", PLAIN), tmp_path / "model"))


def of(folder: Path, *, kv=None, dtype=torch.float32, page_len=64, change=lambda g: g, **how) -> bytes:
    facts = read_model(folder)
    geometry = change(StoreGeometry.of(facts, dtype, page_len, kv))
    known = folder.parent / "files.json"
    return model_identity(facts, geometry, known, **({"device": "cpu", "exact": True, "packed": False} | how))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@dataclass(frozen=True)
class NextCodec(PlainCodec):
    """The same codec, of which a later version says something else."""


def test_everything_that_matters_gives_another(model):
    found = {"as it is": of(model)}
    assert of(model) == found["as it is"]
    found |= {kv: of(model, kv=kv) for kv in ("fp16", "fp8", "k5v4", "k4v4")}
    found["dtype"] = of(model, dtype=torch.bfloat16)
    found["kv as before, computed in 16 bits"] = of(model, kv="fp32", dtype=torch.bfloat16)
    found["page_len"] = of(model, page_len=32)
    found["device"] = of(model, device="cuda:1")
    assert found["device"] == of(model, device="cuda"), "cards of one machine are alike"
    found["exact"] = of(model, exact=False)
    found["packed"] = of(model, packed=True)

    def later(geometry):
        return replace(geometry, codec=NextCodec(**vars(geometry.codec)))

    found["codec version"] = of(model, change=later)
    config = json.loads((model / "config.json").read_text())
    for name, value in (("rope_theta", 5000.0), ("partial_rotary_factor", 0.5)):
        rope = {**config["rope_parameters"], name: value}
        (model / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
        found[name] = of(model)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    for factor in (2.0, 4.0):
        rope = {**config["rope_parameters"], **yarn, "factor": factor}
        (model / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
        found[f"yarn {factor}"] = of(model)
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 2e-6}))
    found["rms_norm_eps"] = of(model)
    (model / "config.json").write_text(json.dumps(config))
    flip(model / "model.safetensors")
    found["weights"] = of(model)
    flip(model / "model.safetensors")
    assert of(model) == found["as it is"]
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + " ")
    found["tokenizer"] = of(model)
    assert len(set(found.values())) == len(found)


def test_files_are_read_once_and_again_when_they_change(model, monkeypatch):
    read: list[Path] = []
    monkeypatch.setattr(identity, "file_digest", lambda path: read.append(path) or file_digest(path))
    before = of(model)
    assert {path.name for path in read} >= {"model.safetensors", "tokenizer.json"}
    read.clear()
    assert of(model) == before and read == []
    path = model / "model.safetensors"
    stat = path.stat()
    flip(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert of(model) != before and [p.name for p in read] == ["model.safetensors"]
    (model.parent / "files.json").write_text("not JSON")
    assert of(model) != before
    assert (model.parent / "files.json").stat().st_mode & 0o077 == 0


def test_a_digest_of_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "PIECE_BYTES", 1000)
    path = tmp_path / "x"
    found = set()
    for size in (0, 1, 999, 1000, 1001, 2000, 3500):
        path.write_bytes(bytes(size))
        found.add(file_digest(path))
    data = bytearray(3500)
    for at in (0, 999, 1000, 3499):
        data[at] = 1
        path.write_bytes(data)
        found.add(file_digest(path))
    assert len(found) == 11


def test_a_file_that_cannot_be_read(model, monkeypatch):
    def refuse(path):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(identity, "file_digest", refuse)
    with pytest.raises(RefusedError, match=r"cannot be read: Input/output error"):
        of(model)
