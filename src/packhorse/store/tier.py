"""Where pages and recurrent states lie. One tier is built: the memory that the model computes in.

    pages    one tensor a full-attention layer   [ page 0 | page 1 | ... ]
    states   one tensor for all linear layers    [ slot 0: conv, recurrent, conv, ... | slot 1 ... ]
    pending  exact mode, active slots only       [ slot, linear layer, page_len, P ]

A page id means the same place in each full-attention layer. One slot's state is one run of bytes, so that
a snapshot moves as one copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from packhorse.core.cost import conv_state_bytes, recurrent_state_bytes
from packhorse.core.protocols import DeltaState
from packhorse.core.types import LayerKind
from packhorse.core.units import round_up
from packhorse.facts.model import DeltaFacts, ModelFacts
from packhorse.quant.codec import Codec, PlainCodec, make_codec

ALIGNMENT = 64
"""Bytes to which every part of a tier is aligned: a cache line, and the widest vector loads."""


@dataclass(frozen=True)
class StoreGeometry:
    """Shapes of what the store keeps of one model. dtype: compute type, that of the conv state."""

    layer_kinds: tuple[LayerKind, ...]
    codec: Codec
    delta: DeltaFacts | None
    dtype: torch.dtype

    @classmethod
    def of(cls, facts: ModelFacts, dtype: torch.dtype, page_len: int, kv: str | None = None) -> StoreGeometry:
        """The geometry of a model computed in `dtype` with pages of `page_len` tokens in the codec `kv` (None:
        as computed). Raises UsageError where the model's heads do not suit the codec."""
        if kv is None:
            codec: Codec = PlainCodec(dtype, facts.num_kv_heads, facts.head_dim, page_len)
        else:
            codec = make_codec(kv, dtype, facts.num_kv_heads, facts.head_dim, page_len)
        return cls(facts.layer_kinds, codec, facts.delta, dtype)

    @property
    def page_len(self) -> int:
        return self.codec.page_len

    @property
    def full_layers(self) -> list[int]:
        """Indices of the layers that keep pages."""
        return [i for i, kind in enumerate(self.layer_kinds) if kind is LayerKind.FULL]

    @property
    def linear_layers(self) -> list[int]:
        """Indices of the layers that keep recurrent state."""
        return [i for i, kind in enumerate(self.layer_kinds) if kind is LayerKind.LINEAR]

    @property
    def is_hybrid(self) -> bool:
        return bool(self.linear_layers)

    @property
    def conv_bytes(self) -> int:
        """Convolution state of one layer, alignment included."""
        assert self.delta is not None
        width = conv_state_bytes(self.delta.conv_dim, self.delta.conv_kernel, self.dtype.itemsize)
        return round_up(width, ALIGNMENT)

    @property
    def recurrent_bytes(self) -> int:
        """Delta-rule state of one layer, alignment included."""
        assert self.delta is not None
        d = self.delta
        return round_up(recurrent_state_bytes(d.num_v_heads, d.k_head_dim, d.v_head_dim), ALIGNMENT)

    @property
    def state_bytes(self) -> int:
        """The whole recurrent state of one sequence at one position: what a snapshot takes."""
        return len(self.linear_layers) * (self.conv_bytes + self.recurrent_bytes) if self.is_hybrid else 0

    def state_part(self, layer: int) -> slice:
        """The bytes of a linear layer's part of a state."""
        size = self.conv_bytes + self.recurrent_bytes
        at = self.linear_layers.index(layer) * size
        return slice(at, at + size)

    @property
    def pending_values(self) -> int:
        """P: what exact mode holds back of a token in a layer: q, k, v after the convolution, gate, beta."""
        return self.delta.conv_dim + 2 * self.delta.num_v_heads if self.delta is not None else 0


class Tier(Protocol):
    """A memory that holds states as opaque bytes, under the slots the store hands out."""

    def state_record(self, slot: int) -> Tensor:
        """Bytes of the state in `slot`, uint8 [state_bytes]; a view."""

    @property
    def storage_bytes(self) -> Mapping[str, int]:
        """Bytes this tier has taken, by part: `pages`, `states`, `pending`."""


class ComputeTier:
    """The memory that the model computes in, taken in whole at construction.

    Nothing is initialised: on the CPU, memory is taken from the system page by page as it is first written.
    """

    def __init__(
        self, geometry: StoreGeometry, *, num_pages: int, num_state_slots: int, num_active: int, exact: bool,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.geometry = geometry
        self.device = device
        linear = geometry.linear_layers
        self._pages = {
            layer: self._take((num_pages, geometry.codec.page_bytes), torch.uint8)
            for layer in geometry.full_layers
        }
        self._states = self._take((num_state_slots if linear else 0, geometry.state_bytes), torch.uint8)
        held_back = num_active if exact else 0
        self._pending = self._take(
            (held_back, len(linear), geometry.page_len, geometry.pending_values), torch.float32
        )
        self._delta_states = {
            layer: [self._delta_state(at, slot) for slot in range(num_active)]
            for at, layer in enumerate(linear)
        }

    def pages(self, layer: int) -> Tensor:
        """All pages of a full-attention layer, uint8 [num_pages, page_bytes]."""
        return self._pages[layer]

    def state_record(self, slot: int) -> Tensor:
        """One state: see `Tier`."""
        return self._states[slot]

    def delta_states(self, layer: int) -> list[DeltaState]:
        """Views of a linear layer's state in each active slot."""
        return self._delta_states[layer]

    def delta_pool(self, layer: int) -> tuple[Tensor, Tensor]:
        """A linear layer's states in all slots: conv [slots, C, K - 1] and recurrent [slots, Hv, Dk, Dv], views
        whose slots lie `state_bytes` apart."""
        geometry = self.geometry
        first, slots = self._delta_states[layer][0], len(self._states)

        def pool(state: Tensor) -> Tensor:
            stride = geometry.state_bytes // state.element_size()
            return state.as_strided((slots, *state.shape), (stride, *state.stride()))

        return pool(first.conv), pool(first.recurrent)

    @property
    def storage_bytes(self) -> Mapping[str, int]:
        """Bytes by part: see `Tier`."""
        return {
            "pages": sum(t.nbytes for t in self._pages.values()),
            "states": self._states.nbytes,
            "pending": self._pending.nbytes,
        }

    def poison_pages(self, page_ids: list[int]) -> None:
        """Overwrite pages with bytes that are NaN in every float type."""
        for pages in self._pages.values():
            pages[page_ids] = 0xFF

    def poison_state(self, slot: int) -> None:
        """Overwrite a state, and what is pending on an active one, with NaN."""
        if len(self._states):
            self._states[slot].fill_(0xFF)
        if slot < len(self._pending):
            self._pending[slot].fill_(torch.nan)

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        assert tensor.data_ptr() % ALIGNMENT == 0
        return tensor

    def _delta_state(self, at: int, slot: int) -> DeltaState:
        geometry, delta = self.geometry, self.geometry.delta
        assert delta is not None
        channels, columns = delta.conv_dim, delta.conv_kernel - 1
        heads, k_dim, v_dim = delta.num_v_heads, delta.k_head_dim, delta.v_head_dim
        conv_at = at * (geometry.conv_bytes + geometry.recurrent_bytes)
        recurrent_at = conv_at + geometry.conv_bytes
        record = self._states[slot]
        conv = record[conv_at:recurrent_at].view(geometry.dtype)[: channels * columns]
        recurrent = record[recurrent_at : recurrent_at + geometry.recurrent_bytes].view(torch.float32)
        return DeltaState(
            conv.view(channels, columns),
            recurrent[: heads * k_dim * v_dim].view(heads, k_dim, v_dim),
            self._pending[slot, at] if len(self._pending) else None,
        )
