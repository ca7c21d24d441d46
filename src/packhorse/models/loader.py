"""Strict, streaming load: every tensor has its place or is refused before a byte is read.

Peak host memory is the model in its compute type plus the largest tensor of the checkpoint; for a GGUF file
that tensor is in fp32, and half as much again where gate and up experts are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from packhorse.core.errors import WeightsError
from packhorse.core.protocols import CheckpointSource
from packhorse.facts.model import ModelFacts
from packhorse.models.model import Model
from packhorse.models.params import Param, Part, norm_param, single
from packhorse.models.registry import LAYER_PARAMS

# Left by old exports; recomputed from the config.
_DERIVED = ("rotary_emb.inv_freq",)
_HEAD = "lm_head.weight"
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
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """The model with its weights in `dtype` on `device`. progress(done, total) counts tensors.

    Raises WeightsError for missing, left-over, misshapen or non-finite tensors, naming them, and
    CorruptFileError from the source.
    """
    params = model_params(facts)
    places = _places(params, source, facts)
    tensors = {
        p.path: torch.empty(p.shape, dtype=torch.float32 if p.fp32 else dtype, device=device) for p in params
    }
    total = len(places)
    for done, name in enumerate([n for n in source.shapes if n in places], start=1):
        value = source.read(name)
        _check_values(name, value)
        for param, part in places[name]:
            _check_range(name, value, tensors[param.path].dtype)
            _place(tensors[param.path], value, part, param.add)
        if progress is not None:
            progress(done, total)
    _check_tied_head(facts, source, tensors["embed"])
    return Model(facts, tensors, dtype=dtype, device=device, exact=exact)


def _place(target: Tensor, value: Tensor, part: Part, add: float) -> None:
    if part.order is not None:
        value = value[part.order]
    if add:
        # In fp32, so that 1 + w keeps the small bits of w.
        value = value.float() + add
    place = target[part.at]
    place.copy_(value.reshape(place.shape))


def _places(
    params: list[Param], source: CheckpointSource, facts: ModelFacts
) -> dict[str, list[tuple[Param, Part]]]:
    """Which parameters each tensor fills; raises WeightsError unless names and shapes match exactly."""
    places: dict[str, list[tuple[Param, Part]]] = {}
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
            places.setdefault(part.source, []).append((param, part))
    if missing:
        raise WeightsError(
            f"{_some(missing)} missing from {facts.path}.",
            hint="The download may be incomplete: fetch it again.",
            missing=missing,
        )
    left = [n for n in source.shapes if n not in places and not n.endswith(_DERIVED)]
    if facts.tied and _HEAD in left:
        left.remove(_HEAD)
    if left:
        raise WeightsError(
            f"{_some(left)} in {facts.path} that {facts.family} has no place for.",
            hint="The config names another architecture, or an adapter was saved with the model: merge it.",
            left_over=left,
        )
    return places


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


def _check_tied_head(facts: ModelFacts, source: CheckpointSource, embedding: Tensor) -> None:
    """A tied model may still carry its head: then it must be the embedding."""
    if facts.tied and _HEAD in source.shapes:
        head = source.read(_HEAD)
        if head.shape != embedding.shape or not torch.equal(head.to(embedding), embedding):
            raise WeightsError(
                f"{_HEAD} differs from the embedding, and the config says that they are tied.",
                hint="Set tie_word_embeddings to false in config.json if the head was trained on its own.",
                tensor=_HEAD,
            )
