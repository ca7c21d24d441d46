"""Strict, streaming load: every tensor has its place or is refused before a byte is read.

Peak host memory is the model as it is kept plus the largest tensor of the checkpoint as it is stored, or a small one
(SMALL_VALUES) for each thread where these are more. Beside a card, which packs what stays packed (`packing.fill`), a
large tensor of that kind passes through 2 x `raw.STAGE_BYTES` instead, unless the card has no room for it. A tensor of
a GGUF file that is unpacked counts in fp32, and half as much again where gate and up experts are joined.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from packhorse.core.errors import WeightsError
from packhorse.core.protocols import CheckpointSource
from packhorse.facts.model import ModelFacts
from packhorse.kernels.linear import int4
from packhorse.layers.linear import Piece
from packhorse.models.experts import ExpertBlocks, ExpertLayout, expert_layout
from packhorse.models.model import Model, Weight
from packhorse.models.packing import (
    PiecePlan,
    Place,
    Run,
    SideBySide,
    allocate,
    copy_packed,
    fill,
    plan_pieces,
    side_by_side,
)
from packhorse.models.params import Param, Part, norm_param, single
from packhorse.models.registry import LAYER_PARAMS
from packhorse.quant.packed import PackedTensor

# Left by old exports; recomputed from the config.
_DERIVED = ("rotary_emb.inv_freq",)
_HEAD = "lm_head.weight"
SMALL_VALUES = 1 << 22
"""Values of the largest tensors that are filled beside others."""
_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def model_params(facts: ModelFacts) -> list[Param]:
    """All parameters of a model, layer paths under `layers.I.`."""
    vocab = (facts.vocab_size, facts.hidden_size)
    params = [
        single("embed", "model.embed_tokens.weight", vocab),
        norm_param(facts, "norm", "model.norm.weight", facts.hidden_size),
    ]
    if not facts.tied:
        params.append(single("head", _HEAD, vocab))
    for index in range(facts.num_layers):
        for p in LAYER_PARAMS[facts.family](facts, index):
            params.append(Param(f"layers.{index}.{p.path}", p.shape, p.choices, p.fp32, p.add))
    return params


def load_model(
    facts: ModelFacts,
    source: CheckpointSource,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    exact: bool = False,
    packed: bool = False,
    experts: Callable[[ExpertLayout], Tensor] | None = None,
    place_experts: Place | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """The model with its weights in `dtype` on `device`. packed: matrices that are stored packed stay so.
    experts: gives the memory for all routed experts, see ExpertBlocks.memory; asked once, and only where all of them
    stay packed in one layout. place_experts: copies what a card has packed into that memory; None: `copy_packed`.
    progress(done, total) counts tensors.

    Raises WeightsError for missing, left-over, misshapen or non-finite tensors, naming them, and
    CorruptFileError from the source.
    """
    params = model_params(facts)
    chosen = _choose(params, source, facts)
    plans = {p.path: plan_pieces(p, chosen[p.path], source) if packed else None for p in params}
    layout = None if experts is None else expert_layout(facts, plans)
    blocks = None if experts is None or layout is None else ExpertBlocks(layout, experts(layout))
    weights: dict[str, Weight] = {}
    jobs: dict[str, list[Job]] = {}
    for param in params:
        parts, plan = chosen[param.path], plans[param.path]
        # Looked up by token, a few rows a step: its place is host memory.
        place = "cpu" if param.path == "embed" and not facts.tied else device
        weights[param.path] = _prepare(param, parts, plan, blocks, jobs, dtype, place)
    int4_product = device == "cpu" and dtype == torch.bfloat16 and not exact
    to_experts = copy_packed if blocks is None or place_experts is None else place_experts
    _Filler(source, weights, jobs, device, int4_product, to_experts).run(progress)
    _check_tied_head(facts, source, weights["embed"])
    return Model(facts, weights, dtype=dtype, device=device, exact=exact, experts=blocks)


class _Plain(NamedTuple):
    """Values that go to `target`."""

    target: Tensor
    part: Part
    add: float


class _Packed(NamedTuple):
    """Rows that are packed into a piece of the parameter `path`."""

    path: str
    weight: PackedTensor
    plan: PiecePlan
    runs: list[Run]


Job = _Plain | _Packed


class _Filler:
    """Reads each tensor once and puts it where it belongs: small ones side by side in as many threads as torch has,
    large ones one after the other, their experts side by side."""

    def __init__(
        self,
        source: CheckpointSource,
        weights: dict[str, Weight],
        jobs: dict[str, list[Job]],
        device: str,
        int4_product: bool,
        to_experts: Place,
    ) -> None:
        self.source, self.weights, self.jobs = source, weights, jobs
        self.device, self.int4_product, self.to_experts = device, int4_product, to_experts
        self.card = None if device == "cpu" else device
        self._lock = threading.Lock()
        packed = (job for here in jobs.values() for job in here if isinstance(job, _Packed))
        self._left = Counter(job.path for job in packed)

    def run(self, progress: Callable[[int, int], None] | None) -> None:
        """Fill all. progress(done, total) is called by the calling thread, in order."""
        names = [name for name in self.source.shapes if name in self.jobs]
        small = [name for name in names if math.prod(self.source.shapes[name]) <= SMALL_VALUES]
        large = (name for name in names if math.prod(self.source.shapes[name]) > SMALL_VALUES)
        try:
            with side_by_side() as each:
                fills = itertools.chain(map(partial(self._fill, each=each), large), each(self._fill, small))
                for done, _ in enumerate(fills, start=1):
                    if progress is not None:
                        progress(done, len(names))
        finally:
            if self.card is not None:
                # Copies to host memory may be under way; and what packing took is for what comes after.
                torch.cuda.synchronize(self.card)
                torch.cuda.empty_cache()

    def _fill(self, name: str, each: SideBySide = map) -> None:
        with self._lock:
            # Taken out, so that what is packed is let go of when it has become something else.
            here = self.jobs.pop(name)
        plain = [job for job in here if isinstance(job, _Plain)]
        if plain:
            value = self.source.read(name)
            _check_values(name, value)
            for to in plain:
                _check_range(name, value, to.target.dtype)
                _place(to.target, value, to.part, to.add)
        for job in here:
            if isinstance(job, _Packed):
                place = self.to_experts if len(job.weight.shape) == 3 else copy_packed
                inputs = fill(job.weight, job.plan, job.runs, each, self.card, place)
                with self._lock:
                    self._filled(job, inputs)

    def _filled(self, job: _Packed, inputs: Tensor | None) -> None:
        path = job.path
        if inputs is not None:
            self.weights[path] = _with_inputs(self.weights[path], job.weight, inputs.to(self.device))
        self._left[path] -= 1
        if self.int4_product and not self._left[path] and path != "embed":
            self.weights[path] = _for_int4_product(self.weights[path])


def _prepare(
    param: Param,
    parts: tuple[Part, ...],
    plans: list[PiecePlan] | None,
    blocks: ExpertBlocks | None,
    jobs: dict[str, list[Job]],
    dtype: torch.dtype,
    device: str,
) -> Weight:
    """Memory of a parameter, and what fills it, by tensor of the checkpoint. plans: None keeps it dense. blocks: of
    experts, if they have memory of their own."""
    if plans is None:
        whole = torch.empty(param.shape, dtype=torch.float32 if param.fp32 else dtype, device=device)
        for part in parts:
            jobs.setdefault(part.source, []).append(_Plain(whole[part.at], part, param.add))
        return whole
    pieces = []
    for plan in plans:
        if blocks is not None and len(param.shape) == 3:
            weight: Tensor | PackedTensor = blocks.stack(param.path)
        else:
            weight = allocate(plan, param, dtype, device)
        pieces.append(Piece(weight))
        for run in plan.runs:
            here = jobs.setdefault(run.part.source, [])
            if isinstance(weight, Tensor):
                rows = slice(run.start - plan.start, run.start - plan.start + run.length)
                here.append(_Plain(weight[rows], run.part, param.add))
            elif here and isinstance(here[-1], _Packed) and here[-1].weight is weight:
                here[-1].runs.append(run)
            else:
                here.append(_Packed(param.path, weight, plan, [run]))
    return tuple(pieces)


def _for_int4_product(weight: Weight) -> Weight:
    """A parameter whose pieces are in the layout of torch's int4 product where it can hold them."""
    if isinstance(weight, Tensor):
        return weight
    pieces = []
    for piece in weight:
        packed = piece.weight
        if isinstance(packed, PackedTensor) and packed.format.has_int4_product(
            packed.num_rows, packed.num_cols
        ):
            piece = Piece(int4.from_packed(packed), piece.inputs)
        pieces.append(piece)
    return tuple(pieces)


def _with_inputs(weight: Weight, of: PackedTensor, inputs: Tensor) -> Weight:
    """A parameter whose piece `of` takes its inputs in an order of its own."""
    assert not isinstance(weight, Tensor)
    return tuple(Piece(p.weight, inputs) if p.weight is of else p for p in weight)


def _place(target: Tensor, value: Tensor, part: Part, add: float) -> None:
    if part.order is not None:
        value = value[part.order]
    if add:
        # In fp32, so that 1 + w keeps the small bits of w.
        value = value.float() + add
    target.copy_(value.reshape(target.shape))


def _choose(params: list[Param], source: CheckpointSource, facts: ModelFacts) -> dict[str, tuple[Part, ...]]:
    """The tensors that fill each parameter; raises WeightsError unless names and shapes match exactly."""
    chosen: dict[str, tuple[Part, ...]] = {}
    used: set[str] = set()
    missing: list[str] = []
    for param in params:
        parts = next((c for c in param.choices if all(p.source in source.shapes for p in c)), None)
        if parts is None:
            best = max(param.choices, key=lambda c: sum(p.source in source.shapes for p in c))
            missing += [p.source for p in best if p.source not in source.shapes]
            continue
        for part in parts:
            found = tuple(source.shapes[part.source])
            if found != part.shape:
                raise WeightsError(
                    f"{part.source} has shape {list(found)}; the config asks for {list(part.shape)}.",
                    hint="config.json and the weights are of different models.",
                    tensor=part.source,
                )
        chosen[param.path] = parts
        used |= {part.source for part in parts}
    if missing:
        hint = "The download may be incomplete: fetch it again."
        raise WeightsError(f"{_some(missing)} missing from {facts.path}.", hint=hint, missing=missing)
    left = [n for n in source.shapes if n not in used and not n.endswith(_DERIVED)]
    if facts.tied and _HEAD in left:
        left.remove(_HEAD)
    if left:
        raise WeightsError(
            f"{_some(left)} in {facts.path} that {facts.family} has no place for.",
            hint="The config names another architecture, or an adapter was saved with the model: merge it.",
            left_over=left,
        )
    return chosen


def _some(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(names[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{len(names)} tensor{'s' if len(names) != 1 else ''} ({shown}{more})"


def _check_values(name: str, value: Tensor) -> None:
    if value.dtype not in _PLAIN:
        raise WeightsError(
            f"{name} is stored as {str(value.dtype).removeprefix('torch.')}: no weights without scales.",
            hint="Weights are read as fp16, bf16, fp32 or fp64, or packed as in a GGUF file.",
            tensor=name,
        )
    # A sum costs no memory and is finite only if all values are, but for overflow: then look closely.
    if not torch.isfinite(value.sum(dtype=torch.float32)) and not torch.isfinite(value).all():
        bad = int((~torch.isfinite(value)).sum())
        raise WeightsError(
            f"{name} holds {bad} values that are not finite, of {value.numel()}.",
            hint="The file is damaged or was exported from a broken run: fetch or export it again.",
            tensor=name,
        )


def _check_range(name: str, value: Tensor, dtype: torch.dtype) -> None:
    """A value beyond the compute type's range would turn into an infinity."""
    limit = torch.finfo(dtype).max
    if torch.finfo(value.dtype).max > limit:
        largest = float(value.abs().max()) if value.numel() else 0.0
        if largest > limit:
            raise WeightsError(
                f"{name} holds {largest:g}, and {str(dtype).removeprefix('torch.')} ends at {limit:g}.",
                hint="Compute in a wider type: --dtype bf16 or fp32.",
                tensor=name,
            )


def _check_tied_head(facts: ModelFacts, source: CheckpointSource, weight: Weight) -> None:
    """A tied model may still carry its head: then it must be the embedding."""
    if facts.tied and _HEAD in source.shapes:
        head = source.read(_HEAD)
        embedding = weight if isinstance(weight, Tensor) else weight[0].weight
        if isinstance(embedding, PackedTensor):
            embedding = embedding.dequantize()
        if head.shape != embedding.shape or not torch.equal(head.to(embedding), embedding):
            raise WeightsError(
                f"{_HEAD} differs from the embedding, and the config says that they are tied.",
                hint="Set tie_word_embeddings to false in config.json if the head was trained on its own.",
                tensor=_HEAD,
            )
