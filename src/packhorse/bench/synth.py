"""Packed random weights in a model's true shapes: what kernels, loaders and plans are measured with.

Codes are random bits, so nothing in 16 bits is ever held, and a scale keeps activations moderate through all layers:
a product's outputs vary as much as its inputs, and what a layer adds to the residual is a small part of it. The
declaration is our own (docs/formats.md); the same seed gives the same bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packhorse.core.errors import UsageError
from packhorse.core.formats import COMPUTE_DTYPES, PACKED, PackedFormat
from packhorse.core.units import GIB, ceil_div
from packhorse.facts.config_json import config_fields
from packhorse.facts.known import known_config
from packhorse.facts.model import ModelFacts
from packhorse.facts.recipes import Recipe, recipe
from packhorse.facts.weights import class_of
from packhorse.models import writer
from packhorse.models.loader import model_params
from packhorse.models.params import Part
from packhorse.models.writer import TensorSpec

ROUTERS = ("uniform", "zipf")
MADE = ("int4", "int8", "balanced", *COMPUTE_DTYPES)
"""Recipes whose formats are made up here."""
SHARD_BYTES = 4 * GIB
ZIPF = 1.0
"""Exponent of the skew: expert number r of a layer is wanted as r^-ZIPF."""
_RESIDUAL = ("o_proj", "out_proj", "down_proj")
_STEERED = 64
"""Columns of the embedding that are the same for all tokens: a skewed router reads them."""
_SHARE = 0.1
"""What a layer's parts add to the residual, over the embedding's size."""
_SLICE = 1 << 24
Item = tuple[Part, PackedFormat | None, bool]
"""A tensor, how it is packed, and whether it is fp32 whatever the compute type is."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def synthesize(
    out: Path,
    like: str,
    recipe_name: str = "int4",
    *,
    router: str = "uniform",
    seed: int = 0,
    layers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write the folder `out`: a model of the shapes of `like` (facts.known) under a recipe. Returns its bytes.

    router: uniform, or zipf, where the same experts of a layer are wanted most by every token. layers: of the first
    so many only. progress(done, total): bytes. Raises UsageError for names, formats and folders that cannot be,
    DoesNotFitError where the disk is too small.
    """
    if router not in ROUTERS:
        raise UsageError(f"The router {router!r} is not known.", hint=f"Choose {' or '.join(ROUTERS)}.")
    if recipe_name not in MADE:
        raise UsageError(f"The recipe {recipe_name!r} is not made up.", hint=f"Choose {', '.join(MADE)}.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        problem = "is not empty" if out.is_dir() else "is a file"
        raise UsageError(f"{out} {problem}.", hint="Give a folder that is not there yet.")
    config = _shortened(known_config(like), layers)
    fields = config_fields(config, out / "config.json")
    facts = ModelFacts(name=like, path=out, container="safetensors", **fields)
    if router == "zipf" and facts.moe is None:
        raise UsageError(f"{like} has no experts for the router zipf.", hint="Leave out --router.")
    maker = _Maker(facts, recipe(recipe_name), router, seed)
    shards = maker.shards()
    total = sum(writer.shard_bytes(maker.specs(shard)) for shard in shards)
    with writer.writing(out):
        out.mkdir(parents=True, exist_ok=True)
        writer.check_space(out, total)
        done = 0
        for index, parts in enumerate(shards):
            specs = maker.specs(parts)
            writer.write_shard(out / writer.shard_name(index, len(shards)), specs, maker.values(parts))
            done += writer.shard_bytes(specs)
            if progress is not None:
                progress(done, total)
        writer.write_index(out, [maker.specs(parts) for parts in shards])
        declared = {"quant_method": "packhorse", "version": 1, "modules": maker.modules}
        writer.write_json(
            out / "config.json", config | ({"quantization_config": declared} if maker.modules else {})
        )
    return total


def _shortened(config: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """The config with its first `layers` layers only."""
    text = config.get("text_config", config)
    if layers is not None:
        most = text["num_hidden_layers"]
        if not 1 <= layers <= most:
            hint = f"Ask for 1 to {most}."
            raise UsageError(f"{layers} layers were asked for, and the model has {most}.", hint=hint)
        text["num_hidden_layers"] = layers
        if "layer_types" in text:
            text["layer_types"] = text["layer_types"][:layers]
    return config


class _Maker:
    """Tensors of a model by name, each from a random stream of its own."""

    def __init__(self, facts: ModelFacts, recipe: Recipe, router: str, seed: int) -> None:
        self.facts = facts
        self.recipe = recipe
        self.router = router
        self.seed = seed
        self.modules: dict[str, str] = {}
        self.parts: list[Item] = []
        for param in model_params(facts):
            for part in param.choices[0]:
                form = None if param.fp32 else self._format(part)
                self.parts.append((part, form, param.fp32))
                if form is not None:
                    self.modules[_module(part)] = form.name

    def _format(self, part: Part) -> PackedFormat | None:
        """How a tensor is packed; None where it is not."""
        kind = class_of(part.source, self.facts)
        name = self.recipe.formats.get(kind, self.recipe.rest)
        if len(part.shape) < 2 or part.shape[-2] == 1 or name is None:
            return None
        return PACKED[name]

    def shards(self) -> list[list[Item]]:
        """Parts of each file."""
        return writer.in_shards(self.parts, lambda item: self.specs([item]), SHARD_BYTES)

    def specs(self, parts: list[Item]) -> list[TensorSpec]:
        """The tensors of parts, in order."""
        specs = []
        for part, form, fp32 in parts:
            *lead, cols = part.shape
            if form is None:
                dtype = "F32" if fp32 else COMPUTE_DTYPES[self.recipe.dtype].name
                specs.append(TensorSpec(part.source, dtype, part.shape))
            else:
                groups = ceil_div(cols, form.group_len)
                specs.append(TensorSpec(f"{_module(part)}.q", "U8", (*lead, cols * form.bits // 8)))
                specs.append(TensorSpec(f"{_module(part)}.scale", "F16", (*lead, groups)))
        return specs

    def values(self, parts: list[Item]) -> Iterator[Tensor]:
        """The tensors of `specs`, made one after the other."""
        for part, form, fp32 in parts:
            word = hashlib.blake2b(f"{self.seed} {part.source}".encode(), digest_size=16).digest()
            rng = np.random.Generator(np.random.SFC64(int.from_bytes(word, "little")))
            if form is not None:
                yield from self._packed(part, form, rng)
            else:
                dtype = torch.float32 if fp32 else _DTYPES[self.recipe.dtype]
                yield self._plain(part, rng).to(dtype)

    def _packed(self, part: Part, form: PackedFormat, rng: np.random.Generator) -> Iterator[Tensor]:
        *lead, cols = part.shape
        data = np.empty(math.prod(lead) * cols * form.bits // 8, np.uint8)
        for start in range(0, len(data), _SLICE):
            piece = data[start : start + _SLICE]
            # Whole words: many times as quick as bytes.
            drawn = rng.integers(0, 2**64 - 1, ceil_div(len(piece), 8), dtype=np.uint64, endpoint=True)
            piece[:] = drawn.view(np.uint8)[: len(piece)]
        q = torch.from_numpy(data).view(*lead, -1)
        if self.router == "zipf" and "embed_tokens" in part.source:
            q[..., : _STEERED * form.bits // 8] = 255  # the largest code in all of them
        yield q
        # Codes are uniform: their deviation is 2^bits / sqrt(12). Signs differ by group, for their mean is not 0.
        spread = self._deviation(part) * math.sqrt(12) / 2**form.bits
        signs = torch.from_numpy(rng.integers(0, 2, (*lead, ceil_div(cols, form.group_len)))) * 2 - 1
        if "embed_tokens" in part.source:
            signs = signs.abs()
        yield (signs * spread).half()

    def _deviation(self, part: Part) -> float:
        """Standard deviation of a matrix's values."""
        if "embed_tokens" in part.source:
            return 1.0
        unit = 1 / math.sqrt(part.shape[-1])
        return unit * _SHARE if any(name in part.source for name in _RESIDUAL) else unit

    def _plain(self, part: Part, rng: np.random.Generator) -> Tensor:
        """fp32 values of what is not packed."""
        name, shape = part.source, part.shape

        def normal(deviation: float) -> Tensor:
            return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) * deviation

        if name.endswith("A_log"):
            return torch.from_numpy(rng.uniform(-3, 0.5, shape).astype(np.float32))
        if name.endswith("dt_bias"):
            return torch.from_numpy(rng.uniform(-4, 0, shape).astype(np.float32))
        if "norm" in name:
            offset = self.facts.norm_offset and not name.endswith("linear_attn.norm.weight")
            return torch.zeros(shape) if offset else torch.ones(shape)
        if name.endswith("bias"):
            return normal(0.1)
        if "conv1d" in name:
            return normal(0.5)
        if name.endswith("mlp.gate.weight") and self.router == "zipf":
            return normal(1 / math.sqrt(shape[-1])) + self._skew(shape[0], rng)
        return normal(self._deviation(part))

    def _skew(self, num_experts: int, rng: np.random.Generator) -> Tensor:
        """[E, H]: what adds log of an expert's wanted share to its logit, read from the steered columns."""
        wish = -ZIPF * np.log(1 + rng.permutation(num_experts).astype(np.float32))
        # A steered column holds half a range of the codes, whose deviation is 1: sqrt(3). The norm divides by the
        # root of the mean square of all columns.
        H = self.facts.hidden_size
        level = math.sqrt(3) / math.sqrt((3 * _STEERED + (H - _STEERED)) / H)
        row = torch.zeros(H)
        row[:_STEERED] = 1 / (level * _STEERED)
        return torch.from_numpy(wish - wish.mean())[:, None] * row


def _module(part: Part) -> str:
    return part.source.removesuffix(".weight")
