"""Random packed matrices of every format, for the tests of the CPU and of a card."""

from __future__ import annotations

from typing import Any

import torch

from packhorse.core.formats import PACKED, PackedFormat
from packhorse.core.units import ceil_div
from packhorse.facts.model import StoredMatrix
from packhorse.models.packing import PiecePlan, Run, copy_packed, fill
from packhorse.models.params import Part
from packhorse.quant.packed import Codes, PackedRows, PackedTensor


def random_codes(form: PackedFormat, rows: int, cols: int, seed: int, lead: tuple[int, ...] = ()) -> Codes:
    """Any codes with any scales the format can hold."""
    gen = torch.Generator().manual_seed(seed)

    def integers(width: int, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, (*lead, rows, width), generator=gen).to(dtype)

    def floats(width: int) -> torch.Tensor:
        return torch.randn(*lead, rows, width, generator=gen).half()

    groups = ceil_div(cols, form.group_len)
    q = integers(cols, 0, 2**form.bits, torch.uint8)
    if form.kind == "fp8":
        q[(q & 127) == 127] = 0  # the two codes that are NaN
        return Codes(q, floats(groups).float())
    if form.kind == "k":
        sub = [integers(groups, 0, 64, torch.uint8) for _ in range(2)]
        return Codes(q, *sub, floats(cols // 256), floats(cols // 256))
    if form.kind == "q6_k":
        return Codes(q, integers(groups, -128, 128, torch.int8), None, floats(cols // 256))
    if form.kind == "zero":
        return Codes(q, floats(groups), integers(groups, 0, 2**form.bits + 1, torch.int64).half())
    return Codes(q, floats(groups), floats(groups) if form.kind == "min" else None)


def columns_for(form: PackedFormat, wanted: int) -> int:
    """The next number of columns from `wanted` on that the format can hold."""
    return next(cols for cols in range(wanted, wanted + 257) if form.fits(cols))


def filled(
    form: PackedFormat, codes: Codes, out: PackedTensor, card: str | None, *, apart: bool = False, place=None
) -> torch.Tensor:
    """Fill `out` with codes [(E,) N, ..] as `models.packing` does it, and return its bytes. card: what packs. apart:
    each expert is a tensor of its own; else, one under the other, as two tensors of rows (cut at 32), stored in
    reverse order."""
    num_rows = codes.codes.shape[-2]
    experts = codes.codes.shape[0] if codes.codes.ndim == 3 else None

    def stored(part: Codes) -> PackedRows:
        flat = part.each(lambda values: values.flatten(0, -2))

        def load(device: str):
            here = flat.each(lambda values: values.to(device))
            return (lambda rows: here.each(lambda values: values[rows])), None

        return PackedRows(form, part.codes.shape[-2], load)

    runs = []
    if apart and experts:
        for expert in range(experts):
            one = stored(codes.each(lambda values, expert=expert: values[expert]))
            runs.append(Run(Part("", ()), 0, num_rows, expert, one, torch.arange(num_rows)))
    else:
        for start, stop in ((0, 32), (32, num_rows)):
            one = stored(codes.each(lambda values, a=start, b=stop: values[..., a:b, :].flip(-2)))
            rows = torch.arange(stop - start).flip(0)
            runs.append(Run(Part("", ()), start, stop - start, None, one, rows))
    plan = PiecePlan(0, num_rows, form, tuple(runs))
    assert fill(out, plan, runs, map, card, place or copy_packed) is None
    return out.data


def stored_cases() -> dict[str, tuple[StoredMatrix, dict[str, torch.Tensor]]]:
    """Random matrices as each layout of `quant.stored` has them, valid, by name."""
    gen = torch.Generator().manual_seed(7)
    N, K, G = 48, 256, 8

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=gen).int()

    def scales(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return (torch.rand(*shape, generator=gen) + 0.1).to(dtype)

    def order() -> torch.Tensor:
        return (torch.randperm(K, generator=gen) // 32).int()

    def case(
        form: str, layout: str, tensors: dict[str, torch.Tensor], lead: tuple[int, ...] = (), **more: Any
    ):
        more = {"group_len": 32} | more
        return StoredMatrix("m", PACKED[form], (*lead, N, K), layout, {}, **more), tensors

    fp8 = torch.randint(0, 127, (N, K), generator=gen).byte() | 128
    gptq = {"qweight": words(K // 8, N), "qzeros": words(G, N // 8), "scales": scales(G, N)}
    sevens = torch.full((G, N // 8), 0x77777777, dtype=torch.int32)
    awq = {"qweight": words(K, N // 8), "qzeros": words(G, N // 8), "scales": scales(G, N)}
    shape = {"weight_shape": torch.tensor([N, K])}
    packed = {"weight_packed": words(N, K // 8), "weight_scale": scales(N, G, dtype=torch.bfloat16)} | shape
    own = {"q": words(3, N, K // 8).view(torch.uint8), "scale": scales(3, N, G)}
    zero = torch.randint(0, 17, (3, N, G), generator=gen).half()
    return {
        "gptq": case("int4z-g32", "gptq", gptq, zero_shift=1),
        "gptq-symmetric-order": case(
            "int4-g32", "gptq", gptq | {"qzeros": sevens, "g_idx": order()}, zero_shift=1, permuted=True
        ),
        "gptq-8": case(
            "int8z-g32", "gptq", {"qweight": words(K // 4, N), "qzeros": words(G, N // 4), "scales": scales(G, N)}
        ),
        "awq": case("int4z-g32", "awq", awq),
        "compressed": case("int4-g32", "compressed", packed),
        "compressed-order": case(
            "int4-g32", "compressed", packed | {"weight_g_idx": order()}, permuted=True
        ),
        "compressed-zero": case(
            "int4z-g32", "compressed", packed | {"weight_zero_point": words(N // 8, G)}
        ),
        "fp8": case(
            "fp8-g128", "fp8",
            {"weight": fp8.view(torch.float8_e4m3fn), "scale": scales(3, 2, dtype=torch.float32)},
            group_len=128, row_block=16,
        ),
        "own": case("int4-g32", "packhorse", own, (3,)),
        "own-zeros": case("int4z-g32", "packhorse", own | {"zero": zero}, (3,)),
        "own-8": case(
            "int8-g32", "packhorse", {"q": words(3, N, K // 4).view(torch.uint8), "scale": scales(3, N, G)}, (3,)
        ),
    }  # fmt: skip
