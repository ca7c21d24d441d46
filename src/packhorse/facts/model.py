"""What a model is: one frozen description, whatever file it came from.

`read_model` (facts/read.py) fills it. Units: dims in values, `_bytes` in bytes, context in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from packhorse.core.formats import Format, PackedFormat
from packhorse.core.types import LayerKind

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")


@dataclass(frozen=True)
class RopeFacts:
    """Rotary embedding. kind: default, linear, yarn or llama3; the other fields matter only for theirs.

    rotary_dim: dims of each head that rotate (rotate_half form over the first rotary_dim dims).
    original_context: the window the factor stretches. attention_factor: what cos and sin are multiplied
    with (None: the rule of the kind).
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    original_context: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class DeltaFacts:
    """Gated delta-net layers (linear attention)."""

    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_kernel: int

    @property
    def key_dim(self) -> int:
        return self.num_k_heads * self.k_head_dim

    @property
    def value_dim(self) -> int:
        return self.num_v_heads * self.v_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True)
class MoeFacts:
    """Routed experts. shared_dim: inner size of the shared expert, 0 without one. norm_topk: the top-k
    router weights are normalised to sum 1."""

    num_experts: int
    top_k: int
    expert_dim: int
    shared_dim: int
    norm_topk: bool


@dataclass(frozen=True)
class TensorFacts:
    """One tensor of a file, under the name it has there. offset: bytes from the start of the file.
    shape: outermost first (GGUF's order is reversed when read)."""

    name: str
    shape: tuple[int, ...]
    format: Format
    file: Path
    offset: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.format.num_bytes(self.num_values)


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix of a checkpoint folder that is packed over several tensors. name: of its weight, in the files.

    shape: [N, K], or [E, N, K] for experts in one. layout: of which method; facts/quantization.py names the
    tensors' roles. group_len: columns that share a scale as stored. permuted: columns are in groups by another
    order (act-order). zero_shift: what stored zeros lack. row_block: rows that share an FP8 scale, 0: each its own.
    """

    name: str
    form: PackedFormat
    shape: tuple[int, ...]
    layout: str
    tensors: Mapping[str, TensorFacts]
    group_len: int
    permuted: bool = False
    zero_shift: int = 0
    row_block: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """Everything known of a model before a byte of weights is read.

    container: safetensors, gguf, or config (a folder without weights: enough to plan). norm_offset: norms
    are stored so that the factor is 1 + w. notes: what is in the files and not used (vision, MTP).
    generation: sampling defaults of generation_config.json. stored_dtype: torch_dtype of the config, if any.
    stored: packed matrices of a folder, by the name transformers gives their weight.
    """

    family: str
    name: str
    path: Path
    container: str
    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[LayerKind, ...]
    moe_layers: tuple[bool, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope: RopeFacts
    context: int
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attn_gate: bool = False
    norm_offset: bool = False
    delta: DeltaFacts | None = None
    moe: MoeFacts | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    stored_dtype: str | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, TensorFacts] = field(default_factory=dict)
    stored: Mapping[str, StoredMatrix] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    num_mtp_layers: int = 0
    notes: tuple[str, ...] = ()

    def __hash__(self) -> int:
        """Of a few fields, as mappings have none: what is derived from facts is kept by them."""
        return hash((self.name, self.container, self.layer_kinds, self.context))

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @cached_property
    def num_full_layers(self) -> int:
        return sum(kind is LayerKind.FULL for kind in self.layer_kinds)

    @property
    def num_linear_layers(self) -> int:
        return self.num_layers - self.num_full_layers

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers carry recurrent state that cannot be cut."""
        return self.num_linear_layers > 0

    @property
    def file_bytes(self) -> int:
        """Bytes of all tensors in the files, used or not."""
        return sum(t.num_bytes for t in self.tensors.values())
