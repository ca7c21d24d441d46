"""Which parameters stay packed, and how their bytes get there from a checkpoint.

A parameter is one matrix, or one for each expert. Its rows come from one or several tensors of the checkpoint, in
an order of their own; runs of rows that are stored in one way become one piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packhorse.core.formats import TILE_ROWS, PackedFormat
from packhorse.core.protocols import CheckpointSource
from packhorse.core.units import ceil_div
from packhorse.models.params import Param, Part
from packhorse.quant.packed import (
    CARD_SLICE_LEN,
    PackedRows,
    PackedTensor,
    RowCodes,
    aligned_bytes,
    pack_rows,
    write_rows,
)


class Run(NamedTuple):
    """Rows start .. start + length of a parameter (of its expert `expert`, or of every expert where that is
    None), from one tensor. stored, rows: how the tensor is stored and which of its rows they are; None where
    it holds plain values."""

    part: Part
    start: int
    length: int
    expert: int | None = None
    stored: PackedRows | None = None
    rows: Tensor | None = None


class PiecePlan(NamedTuple):
    """Rows start .. stop of a parameter that are kept in one way: packed, or dense where form is None."""

    start: int
    stop: int
    form: PackedFormat | None
    runs: tuple[Run, ...]


def plan_pieces(param: Param, parts: tuple[Part, ...], source: CheckpointSource) -> list[PiecePlan] | None:
    """The pieces of a parameter made of `parts`; None where it is kept dense.

    Experts are packed only as a whole: in one format, and with their columns in order. The others' pieces are
    cut where the format changes, where an input order of their own begins, and where rows that were packed
    apart do not meet at a row block.
    """
    if param.fp32 or len(param.shape) < 2:
        return None
    runs = [run for part in parts for run in _runs(part, source)]
    if all(run.stored is None for run in runs):
        return None
    if len(param.shape) == 3:
        forms = {None if run.stored is None or run.stored.permuted else run.stored.form.name for run in runs}
        aligned = all(run.start % TILE_ROWS == 0 for run in runs)
        if len(forms) > 1 or None in forms or not aligned:
            return None
        assert runs[0].stored is not None
        return [PiecePlan(0, param.shape[1], runs[0].stored.form, tuple(runs))]
    pieces: list[PiecePlan] = []
    for run in sorted(runs, key=lambda run: run.start):
        form = None if run.stored is None else run.stored.form
        if pieces and _joins(pieces[-1], run, form):
            last = pieces.pop()
            pieces.append(PiecePlan(last.start, run.start + run.length, form, (*last.runs, run)))
        else:
            pieces.append(PiecePlan(run.start, run.start + run.length, form, (run,)))
    return pieces


def _joins(piece: PiecePlan, run: Run, form: PackedFormat | None) -> bool:
    """Whether a run can be part of the piece before it."""
    own_order = any(r.stored is not None and r.stored.permuted for r in (piece.runs[-1], run))
    whole_blocks = form is None or (run.start - piece.start) % TILE_ROWS == 0
    return form == piece.form and not own_order and whole_blocks


def _runs(part: Part, source: CheckpointSource) -> Iterator[Run]:
    """The rows of one tensor of the checkpoint, cut where its own parts meet."""
    *experts, rows = part.at
    expert: int | None = experts[0] if experts and isinstance(experts[0], int) else None
    if isinstance(rows, int):
        expert, start = rows, 0
    else:
        start = rows.start or 0
    length = part.shape[-2]
    stored = source.packed(part.source)
    if stored is None:
        yield Run(part, start, length, expert)
        return
    which, numbers = stored.part, stored.row
    if part.order is not None:
        which, numbers = which[part.order], numbers[part.order]
    cuts = (which[1:] != which[:-1]).nonzero().flatten() + 1
    bounds = [0, *cuts.tolist(), length]
    for begin, end in itertools.pairwise(bounds):
        yield Run(
            part, start + begin, end - begin, expert, stored.parts[int(which[begin])], numbers[begin:end]
        )


def allocate(plan: PiecePlan, param: Param, dtype: torch.dtype, device: str) -> Tensor | PackedTensor:
    """Memory for a piece, not yet written."""
    num_rows, num_cols = plan.stop - plan.start, param.shape[-1]
    if plan.form is None:
        return torch.empty(num_rows, num_cols, dtype=dtype, device=device)
    return PackedTensor.empty(plan.form, num_rows, num_cols, param.shape[:-2], device)


SideBySide = Callable[..., Iterable[Any]]
"""Like `map`: calls that may run at the same time, their results in order."""


@contextmanager
def side_by_side() -> Iterator[SideBySide]:
    """Runs calls in as many threads as torch has, each of one thread meanwhile; where that is one: `map`."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield map
        return
    # The caller too: OpenMP's threads would spin beside the pool's.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, initializer=lambda: torch.set_num_threads(1)) as pool:
            try:
                yield pool.map
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(threads)


Place = Callable[[Tensor, Tensor], None]
"""place(to, packed): copies packed bytes, uint8 [R, row_bytes], from a card to where they belong, on the current
stream."""


def copy_packed(to: Tensor, packed: Tensor) -> None:
    """A Place for any memory, which waits where that is the host's."""
    to.copy_(packed)


def fill(
    weight: PackedTensor,
    plan: PiecePlan,
    runs: list[Run],
    each: SideBySide = map,
    card: str | None = None,
    place: Place = copy_packed,
) -> Tensor | None:
    """Pack runs of one tensor of the checkpoint, which is read once, into their place in a piece. Returns the order of
    the piece's inputs, if it has one.

    card: packs, and `place` copies what it made; it takes at most four times the tensor as it is stored and 8 bytes
    for each of CARD_SLICE_LEN codes of the card's memory meanwhile. None, or where the card has less: the CPU packs,
    the experts of one tensor through `each`.
    """
    inputs = None
    for _, group in itertools.groupby(runs, key=lambda run: id(run.stored)):
        here = list(group)
        stored = here[0].stored
        assert stored is not None
        if card is not None:
            try:
                inputs = _fill_on_card(weight, plan, stored, here, card, place)
                continue
            except torch.OutOfMemoryError:
                pass  # a cap may leave less beside the weights; what was copied is written again
        codes, inputs = stored.load("cpu")
        for run in here:
            _fill_run(weight, plan, codes, run, each)
    return inputs


def _fill_run(weight: PackedTensor, plan: PiecePlan, codes: RowCodes, run: Run, each: SideBySide) -> None:
    blocks = _blocks(plan, run)

    def pack(index: int | None) -> None:
        assert run.stored is not None and run.rows is not None
        out = weight.data[blocks] if index is None else weight.data[index, blocks]
        # The tensor of one expert alone, or those of all, one under the other.
        rows = run.rows if run.expert is not None or not index else run.rows + index * run.stored.num_rows
        if out.device.type == "cpu":
            write_rows(weight.format, codes, rows, out)
        else:
            staged = aligned_bytes(out.numel()).view(out.shape)
            write_rows(weight.format, codes, rows, staged)
            out.copy_(staged)

    if weight.data.ndim == 3 and run.expert is None:
        for _ in each(pack, range(len(weight))):
            pass
    else:
        pack(run.expert)


def _fill_on_card(
    weight: PackedTensor, plan: PiecePlan, stored: PackedRows, runs: list[Run], card: str, place: Place
) -> Tensor | None:
    codes, inputs = stored.load(card)
    for run in runs:
        assert run.rows is not None
        experts = weight.data if weight.data.ndim == 3 else weight.data[None]
        experts = experts if run.expert is None else experts[run.expert : run.expert + 1]
        places = experts[:, _blocks(plan, run)]
        first = stored.num_rows * torch.arange(len(places), device=card)
        rows = run.rows.to(card) + first[:, None]
        num_blocks = max(1, CARD_SLICE_LEN // (TILE_ROWS * weight.num_cols))
        num_experts = max(1, num_blocks // places.shape[1])
        for expert in range(0, len(places), num_experts):
            for block in range(0, places.shape[1], num_blocks):
                numbers = rows[expert : expert + num_experts]
                numbers = numbers[:, block * TILE_ROWS : (block + num_blocks) * TILE_ROWS]
                to = places[expert : expert + num_experts, block : block + num_blocks]
                for here, packed in zip(to, pack_rows(weight.format, codes, numbers), strict=True):
                    place(here, packed)
    return inputs


def _blocks(plan: PiecePlan, run: Run) -> slice:
    """The row blocks of a piece that a run fills."""
    first = (run.start - plan.start) // TILE_ROWS
    return slice(first, first + ceil_div(run.length, TILE_ROWS))
