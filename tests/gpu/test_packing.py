"""Checkpoints packed on a card: the bytes that the CPU makes, wherever they go, and the same refusals."""

import contextlib
import dataclasses
import gc

import numpy as np
import pytest
import torch

from packed_cases import columns_for, filled, random_codes, stored_cases
from packhorse.core.errors import CorruptFileError, WeightsError
from packhorse.core.formats import FORMATS, PACKED
from packhorse.core.units import MIB
from packhorse.facts.model import TensorFacts
from packhorse.models import packing, raw
from packhorse.quant import gguf
from packhorse.quant.packed import Codes, PackedTensor, pack
from packhorse.quant.stored import row_codes
from packhorse.store import arena

pytestmark = pytest.mark.gpu

STORED = stored_cases()
BLOCKS = [name for name, form in FORMATS.items() if form.packed is not None]


@pytest.mark.parametrize("slice_len", [1 << 25, 3 * 48 * 320])
@pytest.mark.parametrize(("lead", "apart"), [((), False), ((3,), False), ((3,), True)])
@pytest.mark.parametrize("name", sorted(PACKED))
def test_bytes_are_those_of_the_cpu(name, lead, apart, slice_len, monkeypatch):
    """In every format; onto the card and into host memory."""
    monkeypatch.setattr(packing, "CARD_SLICE_LEN", slice_len)
    form, rows = PACKED[name], 70
    codes = random_codes(form, rows, columns_for(form, 320), 5, lead)
    want = pack(form, codes).data
    for device in ("cuda", "cpu"):
        out = PackedTensor.empty(form, rows, columns_for(form, 320), lead, device)
        out.data.fill_(255)
        assert torch.equal(filled(form, codes, out, "cuda", apart=apart).cpu(), want)


def test_into_pinned_memory_across_its_segments(monkeypatch):
    """Asynchronously, while segments are still being registered; the experts lie over the borders between them."""
    monkeypatch.setattr(arena, "SEGMENT_BYTES", 2 * MIB)
    form = PACKED["int4-g128"]
    codes = random_codes(form, 1024, 1024, 5, (40,))
    want = pack(form, codes).data
    assert (2 * MIB) % want[0].numel()
    pinned = arena.PinnedArena(want.numel(), wait=False)
    out = PackedTensor(form, pinned.bytes[: want.numel()].view(want.shape), 1024, 1024)
    filled(form, codes, out, "cuda", place=pinned.copy_from)
    torch.cuda.synchronize()
    assert torch.equal(out.data, want)
    pinned.wait()
    assert out.data.is_pinned()
    pinned.close()


def check_codes(got: Codes, want: Codes) -> None:
    for mine, theirs in zip(got, want, strict=True):
        if isinstance(theirs, torch.Tensor):
            assert mine.device.type == "cuda" and mine.dtype == theirs.dtype
            # Bytes: fp16 scales of random blocks may be no numbers.
            assert torch.equal(
                mine.cpu().contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)
            )
        else:
            assert mine is theirs


@pytest.mark.parametrize("name", STORED)
def test_codes_of_every_layout(name):
    matrix, tensors = STORED[name]
    want, order = row_codes(matrix, tensors)
    got, on_card = row_codes(matrix, {role: tensor.cuda() for role, tensor in tensors.items()})
    assert (on_card is None) == (order is None) == (not matrix.permuted)
    assert order is None or torch.equal(on_card.cpu(), order)
    num_rows = matrix.shape[-2] * (matrix.shape[0] if len(matrix.shape) == 3 else 1)
    for rows in (torch.arange(num_rows), torch.arange(5, num_rows, 3).flip(0)):
        check_codes(got(rows.cuda()), want(rows))


@pytest.mark.parametrize("name", BLOCKS)
def test_codes_of_every_gguf_format(name):
    form = FORMATS[name]
    gen = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 256, (19, 2 * form.block_bytes), generator=gen).byte()
    check_codes(gguf.codes(rows.cuda(), form), gguf.codes(rows, form))


def test_what_cannot_be_is_refused_there_too():
    for name, role, value in [
        ("awq", "scales", 0.0), ("own", "scale", torch.inf), ("fp8", "scale", torch.nan),
        ("compressed", "weight_scale", 1e30), ("own-zeros", "zero", 17.0),
    ]:  # fmt: skip
        matrix, tensors = STORED[name]
        broken = {key: tensor.clone().cuda() for key, tensor in tensors.items()}
        broken[role].view(-1)[5] = value
        with pytest.raises(WeightsError):
            row_codes(matrix, broken)
    matrix, tensors = STORED["fp8"]
    broken = {key: tensor.cuda() for key, tensor in tensors.items()}
    broken["weight"] = (
        broken["weight"].view(torch.uint8).clone().index_fill_(0, torch.tensor([2]).cuda(), 127)
    )
    with pytest.raises(WeightsError, match="256 values that are not finite"):
        row_codes(matrix, broken)
    matrix, tensors = STORED["gptq-symmetric-order"]
    for group in (8, 0):
        broken = {key: tensor.clone().cuda() for key, tensor in tensors.items()}
        broken["g_idx"][(tensors["g_idx"] == 7).nonzero()[0]] = group
        with pytest.raises(WeightsError, match="group"):
            row_codes(matrix, broken)
    with pytest.raises(WeightsError, match="order of their own"):
        row_codes(dataclasses.replace(matrix, permuted=False), broken | {"g_idx": tensors["g_idx"].cuda()})
    blocks = torch.zeros(4, 2 * FORMATS["Q6_K"].block_bytes, dtype=torch.uint8)
    blocks[2, 209] = 0x7C
    with pytest.raises(WeightsError, match="1 blocks whose scales are not finite, of 8"):
        gguf.check_scales("x", blocks.cuda(), FORMATS["Q6_K"])


def test_large_tensors_reach_the_card_through_a_small_stage(tmp_path, monkeypatch):
    monkeypatch.setattr(raw, "LARGE_BYTES", 1000)
    monkeypatch.setattr(raw, "STAGE_BYTES", 700_000)
    monkeypatch.setattr(raw, "PART_BYTES", 50_001)
    data = torch.from_numpy(np.random.default_rng(2).integers(0, 256, 5_000_123, np.uint8))
    file = tmp_path / "bytes"
    file.write_bytes(data.numpy().tobytes())
    for size in (999, 1000, 700_000, 4_999_000):
        tensor = TensorFacts("x", (size,), FORMATS["U8"], file, 123)
        for _ in range(2):  # the stage is used again
            got = raw.read_plain(tensor, "cuda")
            assert got.device.type == "cuda" and torch.equal(got.cpu(), data[123 : 123 + size])
    with file.open("rb+") as stream:
        stream.truncate(4_000_000)
    with pytest.raises(CorruptFileError, match="ends 999,123 bytes before the end of the tensor 'x'"):
        raw.read_raw(tensor, "cuda")


def test_without_room_the_host_packs():
    """The allocator refuses; what it had given is free again, and the host's bytes are the same."""
    form = PACKED["int8z-g32"]
    codes = random_codes(form, 4096, 2048, 5)
    want = pack(form, codes).data
    out = PackedTensor.empty(form, 4096, 2048, (), "cuda")
    gc.collect()  # else what tests before this one left in cycles may become free meanwhile
    torch.cuda.empty_cache()
    held, total = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 28 * MIB) / total)
    spare = [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(6)]  # for small blocks
    asked, filler = [], {2 * MIB: [], MIB: []}
    for (
        size,
        blocks,
    ) in filler.items():  # the allocator may hold blocks free, which are of a pool for each of the sizes
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    del spare, filler[2 * MIB][-6:]

    def note(to: torch.Tensor, packed: torch.Tensor) -> None:
        asked.append(to)
        to.copy_(packed)

    try:
        got = filled(form, codes, out, "cuda", place=note).cpu()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    del filler, blocks
    # Rows 0 .. 32 are a tensor of their own, which finds room.
    assert torch.equal(got, want) and sum(to.numel() for to in asked) == 2 * want[0].numel()
    assert torch.cuda.memory_allocated() == held


@pytest.mark.parametrize(("name", "case"), [("int4-g128", "own"), ("int8z-g32", None), ("q5_k", None)])
def test_what_it_takes_of_the_card(name, case):
    """At most four times the stored tensor and 8 bytes for each code of a slice."""
    form = PACKED[name]
    num_rows, cols = 2 * packing.CARD_SLICE_LEN // 4096, 4096
    if case == "own":
        gen = torch.Generator().manual_seed(1)
        q = torch.randint(0, 256, (num_rows, cols // 2), generator=gen).byte()
        scale = torch.ones(num_rows, cols // 128).half()
        matrix = dataclasses.replace(STORED["own"][0], form=form, shape=(num_rows, cols), group_len=128)
        stored = q.numel() + scale.numel() * 2
        load = lambda device: row_codes(matrix, {"q": q.to(device), "scale": scale.to(device)})  # noqa: E731
    else:
        codes = random_codes(form, 4096, cols, 1)
        codes = codes.each(lambda part: part.repeat(num_rows // 4096, 1))
        stored = sum(part.numel() * part.element_size() for part in codes if isinstance(part, torch.Tensor))

        def load(device: str):
            here = codes.each(lambda part: part.to(device))
            return (lambda rows: here.each(lambda part: part[rows])), None

    rows = packing.PackedRows(form, num_rows, load)
    run = packing.Run(packing.Part("", ()), 0, num_rows, None, rows, torch.arange(num_rows))
    plan = packing.PiecePlan(0, num_rows, form, (run,))
    out = PackedTensor.empty(form, num_rows, cols)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    placed = []

    def note(to: torch.Tensor, packed: torch.Tensor) -> None:
        placed.append(to.shape)

    packing.fill(out, plan, [run], card="cuda", place=note)
    taken = torch.cuda.max_memory_allocated() - held
    print(
        f"{name}: {taken / MIB:.0f} MiB, stored {stored / MIB:.0f}, a slice {packing.CARD_SLICE_LEN / MIB:.0f}"
    )
    assert len(placed) >= 2 and taken <= 4 * stored + 8 * packing.CARD_SLICE_LEN
