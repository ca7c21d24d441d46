"""What packs beside a card makes the bytes that the CPU makes; here the CPU stands in for the card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_packed_models import random_file, wide_model
from test_quantized import CASES, packed_folder
from test_quantized import wide_model as wide_quantized

from packed_cases import columns_for, filled, random_codes
from packhorse.core.formats import PACKED
from packhorse.facts.read import read_model
from packhorse.layers.linear import PackedLinear
from packhorse.models import loader, packing
from packhorse.models.checkpoint import open_checkpoint
from packhorse.models.loader import load_model
from packhorse.quant.packed import PackedTensor, pack


@pytest.mark.parametrize("slice_len", [1 << 25, 16 * 320, 3 * 48 * 320])
@pytest.mark.parametrize(("lead", "apart"), [((), False), ((3,), False), ((3,), True)])
@pytest.mark.parametrize("name", sorted(PACKED))
def test_large_slices_are_the_bytes_of_small_ones(name, lead, apart, slice_len, monkeypatch):
    """All at once, a row block at a time, some experts at a time; rows that fill no block, an order of their own."""
    monkeypatch.setattr(packing, "CARD_SLICE_LEN", slice_len)
    form, rows = PACKED[name], 70
    codes = random_codes(form, rows, columns_for(form, 320), 5, lead)
    want = pack(form, codes).data
    placed = []

    def place(to: torch.Tensor, packed: torch.Tensor) -> None:
        placed.append(to.numel())
        assert to.is_contiguous() and packed.is_contiguous()
        to.copy_(packed)

    for card in (None, "cpu"):
        out = PackedTensor.empty(form, rows, columns_for(form, 320), lead)
        out.data.fill_(255)
        assert torch.equal(filled(form, codes, out, card, apart=apart, place=place), want)
    assert sum(placed) == want.numel()


def packed_bytes(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a model that stays packed, by parameter and piece."""
    facts = read_model(path)
    found: dict[str, torch.Tensor] = {}

    def walk(name: str, value: object) -> None:
        if isinstance(value, PackedTensor):
            found[name] = value.data
        elif isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, PackedLinear):
            for index, piece in enumerate(value.pieces):
                walk(f"{name}.{index}", piece.weight)
                walk(f"{name}.{index}.inputs", piece.inputs)
        elif hasattr(value, "__dict__"):
            for key, part in vars(value).items():
                walk(f"{name}.{key}", part)

    model = load_model(facts, open_checkpoint(facts), dtype=torch.float32, packed=True)
    for index in range(facts.num_layers):
        walk(str(index), model.weights.layer(index))
    walk("embedding", model._embedding)
    walk("head", model._head)
    return found


def check_same(path: Path, monkeypatch) -> None:
    want = packed_bytes(path)
    calls = []

    def on_card(weight, plan, runs, each, card, place):
        calls.append(card)
        return packing.fill(weight, plan, runs, each, "cpu", place)

    monkeypatch.setattr(loader, "fill", on_card)
    monkeypatch.setattr(packing, "write_rows", None)
    got = packed_bytes(path)
    assert calls and got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


@pytest.mark.parametrize("case", sorted(CASES))
def test_checkpoints_of_every_layout(case, tmp_path, monkeypatch):
    packed_folder(wide_quantized("qwen3_5_moe"), tmp_path / "m", case, fused=case.startswith("own"))
    check_same(tmp_path / "m", monkeypatch)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
@pytest.mark.parametrize("kinds", [["Q4_0", "Q8_0"], ["Q4_1", "Q5_1"], ["Q4_K", "Q6_K", "Q5_K"], ["Q5_0"]])
def test_gguf_files(family, kinds, tmp_path, monkeypatch):
    check_same(random_file(wide_model(family), tmp_path / "m.gguf", kinds), monkeypatch)


def test_without_room_on_the_card_the_host_packs(monkeypatch):
    """Whenever it runs out: while a tensor comes, or after half of it was placed."""
    form = PACKED["int4-g32"]
    codes = random_codes(form, 64, 320, 5, (3,))
    want = pack(form, codes).data
    full = torch.OutOfMemoryError("no room")
    for after in (0, 1, 4):
        placed = []

        def place(to: torch.Tensor, packed: torch.Tensor, placed=placed, after=after) -> None:
            if len(placed) == after:
                raise full
            placed.append(to)
            to.copy_(packed)

        out = PackedTensor.empty(form, 64, 320, (3,))
        assert torch.equal(filled(form, codes, out, "cpu", place=place), want) and len(placed) == after
    failed = []

    def no_room(form, codes, rows):
        failed.append(rows)
        raise full

    monkeypatch.setattr(packing, "pack_rows", no_room)
    out = PackedTensor.empty(form, 64, 320, (3,))
    assert torch.equal(filled(form, codes, out, "cpu"), want) and len(failed) == 2
