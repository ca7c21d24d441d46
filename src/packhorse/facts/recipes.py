"""Recipes: in which format each class of weights is kept. By class name (facts.weights), formats by name.

A recipe called `Xbit` (`2.5bit`) stands for X bits a value and an fp16 scale for 128 values in every matrix:
no format of ours, but enough to plan what such files would do. `int4-rtn` and `int8-rtn` are what `packhorse convert`
writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from packhorse.core.errors import UsageError
from packhorse.core.formats import COMPUTE_DTYPES, PACKED, TILE_COLS, TILE_ROWS, PackedFormat
from packhorse.facts.model import ModelFacts, StoredMatrix
from packhorse.facts.weights import ParamGroup, param_groups


@dataclass(frozen=True)
class Recipe:
    """dtype: of whatever is not packed, and what is computed in. formats: packed format by class; `rest`: of
    matrices of other classes, None to leave them in dtype. from_files: matrices that the files hold packed stay as
    they are (plan.account). converted: as `packhorse convert` does it, which packs whole groups alone, and no gates."""

    name: str
    dtype: str = "fp16"
    formats: Mapping[str, str] = field(default_factory=dict)
    rest: str | None = None
    from_files: bool = False
    converted: bool = False

    @property
    def is_packed(self) -> bool:
        return self.from_files or self.rest is not None or bool(self.formats)

    @property
    def has_formats(self) -> bool:
        """Whether formats of ours hold all that it packs."""
        return self.rest is None or self.rest in PACKED

    def form(self, group: ParamGroup) -> PackedFormat | None:
        """The packed format of a group's matrices, None where they are in dtype or fp32."""
        name = self.formats.get(group.kind, self.rest)
        kept = self.converted and (group.gates or group.num_cols % GROUP_LEN != 0)
        if group.fp32 or group.num_cols == 0 or name is None or kept:
            return None
        if name in PACKED:
            return PACKED[name]
        like = PACKED["int8-g128"]
        sizes = like.group_len, like.kind, like.block_cols, like.header_bytes
        return _Bits(name, 0, *sizes, value_bits=float(name.removesuffix("bit")))

    def group_bytes(self, group: ParamGroup) -> int:
        """Bytes of a group of weights; norms, routers, convolutions and decay parameters are fp32 always."""
        form = self.form(group)
        if form is not None:
            return group.num_matrices * form.num_bytes(group.num_rows, group.num_cols)
        return COMPUTE_DTYPES["fp32" if group.fp32 else self.dtype].num_bytes(group.num_values)


@dataclass(frozen=True)
class _Bits(PackedFormat):
    """Any number of bits a value, in the layout of whole ones: no kernel reads it."""

    value_bits: float

    @property
    def tile_bytes(self) -> int:
        return int(TILE_ROWS * TILE_COLS * self.value_bits / 8)


CONVERTED, GROUP_LEN = {"int4-rtn": 4, "int8-rtn": 8}, 128
"""Bits of what `packhorse convert` packs, by recipe, and columns of a group."""
PRODUCTS = ("attention", "delta_net", "experts", "shared_expert", "mlp")
"""What it packs; embeddings and output head stay as they are, since one matrix may be both."""
_EIGHT = {"embeddings": "int8-g128"}
_GROUPED = {f"int{bits}": Recipe(f"int{bits}", "fp16", _EIGHT, f"int{bits}-g128") for bits in (4, 5, 6, 8)}
_FOUR = dict.fromkeys(("experts", "mlp", "mtp"), "int4-g128")
RECIPES: dict[str, Recipe] = {
    **{name: Recipe(name, name) for name in COMPUTE_DTYPES},
    **_GROUPED,
    # Four bits where most of the bytes are, eight where errors add up: attention, delta net, shared expert, head.
    "balanced": Recipe("balanced", "fp16", _FOUR, "int8-g128"),
    "fp8": Recipe("fp8", "fp16", {}, "fp8-g128"),
    **{
        name: Recipe(name, formats=dict.fromkeys(PRODUCTS, f"int{bits}-g{GROUP_LEN}"), converted=True)
        for name, bits in CONVERTED.items()
    },
}


CHOICES = f"Choose {', '.join(RECIPES)}, Xbit such as 2.5bit, or packed for files that are."
"""What a recipe may be called, for people."""


def recipe(name: str) -> Recipe:
    """The recipe called `name`. Raises UsageError for another."""
    if name in RECIPES:
        return RECIPES[name]
    match = re.fullmatch(r"(\d(?:\.\d+)?)bit", name)
    if match is None or not 1 <= float(match[1]) <= 8:
        raise UsageError(f"The recipe {name!r} is not known.", hint=CHOICES)
    return Recipe(name, "fp16", _EIGHT, name)


_NAMES = {
    "embeddings": "model.embed_tokens", "lm_head": "lm_head", "attention": "model.layers.{}.self_attn",
    "delta_net": "model.layers.{}.linear_attn", "shared_expert": "model.layers.{}.mlp.shared_expert",
    "experts": "model.layers.{}.mlp.experts", "mlp": "model.layers.{}.mlp",
}  # fmt: skip


def as_stored(facts: ModelFacts, recipe: Recipe) -> ModelFacts:
    """The model as a folder would hold it whose matrices were packed by a recipe; as it is where its files count or
    nothing is packed. Names are the classes' own, numbered."""
    if recipe.from_files or not recipe.is_packed:
        return facts
    stored = {}
    for number, group in enumerate(param_groups(facts)):
        form = recipe.form(group)
        if form is not None:
            name, shape = _NAMES[group.kind].format(number) + ".weight", (group.num_rows, group.num_cols)
            whole = (group.num_matrices, *shape) if group.kind == "experts" else shape
            stored[name] = StoredMatrix(name, form, whole, "packhorse", {}, form.group_len)
    return replace(facts, container="safetensors", tensors={}, stored=stored)


def class_bytes(groups: Iterable[ParamGroup], recipe: Recipe) -> dict[str, int]:
    """Bytes of each class of `groups` under a recipe."""
    totals: dict[str, int] = {}
    for group in groups:
        totals[group.kind] = totals.get(group.kind, 0) + recipe.group_bytes(group)
    return totals
