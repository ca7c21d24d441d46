"""Recipes: in which format each class of weights is kept. By class name (facts.weights), formats by name.

A recipe called `Xbit` (`2.5bit`) stands for X bits a value and an fp16 scale for 128 values in every matrix:
no format of ours, but enough to plan what such files would do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from packhorse.core.errors import UsageError
from packhorse.core.formats import COMPUTE_DTYPES, PACKED
from packhorse.facts.weights import ParamGroup

_SCALED = 128


@dataclass(frozen=True)
class Recipe:
    """dtype: of whatever is not packed, and what is computed in. formats: packed format by class; `rest`: of
    matrices of other classes, None to leave them in dtype. bits: of matrices outside embeddings, where no
    format holds them. from_files: matrices that the files hold packed stay as they are (plan.account)."""

    name: str
    dtype: str = "fp16"
    formats: Mapping[str, str] = field(default_factory=dict)
    rest: str | None = None
    bits: float | None = None
    from_files: bool = False

    @property
    def is_packed(self) -> bool:
        return self.from_files or self.rest is not None or self.bits is not None or bool(self.formats)

    def group_bytes(self, group: ParamGroup) -> int:
        """Bytes of a group of weights; norms, routers, convolutions and decay parameters are fp32 always."""
        if group.fp32:
            return COMPUTE_DTYPES["fp32"].num_bytes(group.num_values)
        form = self.formats.get(group.kind, self.rest)
        if group.num_cols == 0 or (form is None and self.bits is None):
            return COMPUTE_DTYPES[self.dtype].num_bytes(group.num_values)
        if form is not None:
            return group.num_matrices * PACKED[form].num_bytes(group.num_rows, group.num_cols)
        assert self.bits is not None
        return int(group.num_values * (self.bits + 16 / _SCALED) / 8)


_EIGHT = {"embeddings": "int8-g128"}
_GROUPED = {f"int{bits}": Recipe(f"int{bits}", "fp16", _EIGHT, f"int{bits}-g128") for bits in (4, 5, 6, 8)}
_FOUR = dict.fromkeys(("experts", "mlp", "mtp"), "int4-g128")
RECIPES: dict[str, Recipe] = {
    **{name: Recipe(name, name) for name in COMPUTE_DTYPES},
    **_GROUPED,
    # Four bits where most of the bytes are, eight where errors add up: attention, delta net, shared expert, head.
    "balanced": Recipe("balanced", "fp16", _FOUR, "int8-g128"),
    "fp8": Recipe("fp8", "fp16", {}, "fp8-g128"),
}


def recipe(name: str) -> Recipe:
    """The recipe called `name`. Raises UsageError for another."""
    if name in RECIPES:
        return RECIPES[name]
    match = re.fullmatch(r"(\d(?:\.\d+)?)bit", name)
    if match is None or not 1 <= float(match[1]) <= 8:
        raise UsageError(
            f"The recipe {name!r} is not known.", hint=f"Choose {', '.join(RECIPES)}, or Xbit such as 2.5bit."
        )
    return Recipe(name, "fp16", _EIGHT, bits=float(match[1]))


def class_bytes(groups: Iterable[ParamGroup], recipe: Recipe) -> dict[str, int]:
    """Bytes of each class of `groups` under a recipe."""
    totals: dict[str, int] = {}
    for group in groups:
        totals[group.kind] = totals.get(group.kind, 0) + recipe.group_bytes(group)
    return totals
