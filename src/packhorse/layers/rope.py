"""Rotary embedding shared by all layers of a model: cos and sin are made once a step."""

from __future__ import annotations

from torch import Tensor

from packhorse.facts.model import RopeFacts
from packhorse.kernels.rope import ref


class Rope:
    """Calls with the same `positions` tensor (by identity) reuse its cos and sin."""

    def __init__(self, facts: RopeFacts, device: str) -> None:
        inv_freq, self.factor = ref.frequencies(facts)
        self.inv_freq = inv_freq.to(device)
        self._positions: Tensor | None = None
        self._cos_sin: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [T, heads, D] at integer positions [T]."""
        if self._positions is not positions or self._cos_sin is None:
            self._positions = positions
            self._cos_sin = self.cos_sin(positions)
        return ref.apply_rope(x, *self._cos_sin)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, rotary_dim / 2] fp32 of integer positions [T], computed anew."""
        return ref.cos_sin(positions, self.inv_freq, self.factor)
