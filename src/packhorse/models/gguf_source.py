"""Weights of a GGUF file under transformers' names, with the converter's changes undone.

llama.cpp's converter renames tensors and, by family:
- llama: reorders the rows of q and k for its own rope (`_unpermute_rope`);
- qwen3next, qwen35, qwen35moe: stores norms as w + 1 (all but `ssm_norm`), A_log as -exp(A_log), the
  convolution without its middle dimension, and the shared expert's gate as a vector;
- qwen35, qwen35moe: orders value heads by their place under a key head first ("tiled"), where transformers
  has all heads of one key head together ("grouped");
- qwen3next: splits in_proj_qkvz, whose rows are grouped by key head, into q, k, v and z;
- experts: keeps gate and up apart, where transformers has one tensor, gate rows first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from packhorse.core.errors import WeightsError
from packhorse.core.formats import PACKED
from packhorse.core.protocols import StoredRows
from packhorse.facts.gguf_model import is_mtp_block
from packhorse.facts.model import DeltaFacts, ModelFacts, TensorFacts
from packhorse.models.raw import read_plain, read_raw
from packhorse.quant.gguf import check_scales, codes, dequantize
from packhorse.quant.packed import PackedRows, RowCodes

Undo = Callable[[Iterator[Tensor]], Tensor]
"""Takes the values of an entry's sources one after the other, fp32."""

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Modules of a layer, whose weight and bias keep their leaf names.
_MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_WHOLE = {
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
}
_UNUSED = ("rope_freqs.weight",)
"""Read with the header: `facts.rope` has what it says."""
_BLOCK = re.compile(r"^blk\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class _Entry:
    """One tensor as transformers has it: the file's tensors it is made of, its shape, and how. columns: `undo`
    moves columns, not rows."""

    sources: tuple[TensorFacts, ...]
    shape: tuple[int, ...]
    undo: Undo | None = None
    columns: bool = False


class GgufSource:
    """Weights of a GGUF file. Float types come as stored, packed ones and changed values as fp32.

    Names it does not know keep their GGUF names, so that a strict loader names them as left over. Raises
    WeightsError where experts have a gate and no up, or shapes do not allow what must be undone.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self._entries: dict[str, _Entry] = {}
        used = {
            name: tensor
            for name, tensor in facts.tensors.items()
            if name not in _UNUSED and not is_mtp_block(name, facts.num_layers)
        }
        for name, tensor in used.items():
            match = _BLOCK.match(name)
            if match is None:
                target = _TOP.get(name, name)
                self._add(target, (tensor,), tensor.shape, _minus_one if self._is_offset_norm(name) else None)
            else:
                self._add_layer_tensor(f"model.layers.{int(match[1])}.", match[2], tensor, used)
        self._shapes = {name: entry.shape for name, entry in self._entries.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        """The tensor as transformers has it, in memory of its own. Raises CorruptFileError where bytes are
        missing."""
        entry = self._entries[name]
        if entry.undo is None:
            return _values(entry.sources[0]).view(entry.shape)
        # A generator, so that the sources of a large tensor need not be in memory together.
        values = (_values(tensor).float() for tensor in entry.sources)
        return entry.undo(values).reshape(entry.shape).contiguous()

    def packed(self, name: str) -> StoredRows | None:
        """Rows as the file's blocks have them. Columns that cross blocks (value heads of `ssm_out`) stay where
        they are: the input is put into their order instead, which costs no precision."""
        entry = self._entries[name]
        if len(entry.shape) < 2 or not all(_can_pack(tensor) for tensor in entry.sources):
            return None
        # What becomes of row numbers is what becomes of rows; fp32 holds whole numbers up to 2^24.
        counts = [tensor.shape[-2] if len(tensor.shape) > 1 else 1 for tensor in entry.sources]
        numbers = torch.arange(sum(counts), dtype=torch.float32).split(counts)
        inputs = None
        if entry.columns and entry.undo is not None:
            columns = torch.arange(entry.shape[1], dtype=torch.float32)[None]
            inputs = entry.undo(iter([columns]))[0].long().argsort()
            order = numbers[0].long()
        elif entry.undo is not None:
            lead = [1] * (len(entry.shape) - 2)
            order = entry.undo(part.view(*lead, -1, 1) for part in numbers).flatten().long()
        else:
            order = numbers[0].long()
        ends = torch.tensor(counts).cumsum(0)
        part = torch.bucketize(order, ends, right=True)
        starts = ends - torch.tensor(counts)
        rows = tuple(_packed_rows(*item, inputs) for item in zip(entry.sources, counts, strict=True))
        return StoredRows(rows, part, order - starts[part])

    def _add(
        self,
        name: str,
        sources: tuple[TensorFacts, ...],
        shape: tuple[int, ...],
        undo: Undo | None = None,
        columns: bool = False,
    ) -> None:
        if name in self._entries:
            raise WeightsError(
                f"{sources[0].name!r} and {self._entries[name].sources[0].name!r} are both {name!r}.",
                hint="Convert the file again.",
            )
        self._entries[name] = _Entry(sources, shape, undo, columns)

    def _add_layer_tensor(
        self, prefix: str, leaf: str, tensor: TensorFacts, used: Mapping[str, TensorFacts]
    ) -> None:
        block = tensor.name.removesuffix(leaf)
        if leaf in ("ffn_gate_exps.weight", "ffn_up_exps.weight"):
            if leaf.startswith("ffn_gate"):
                up = self._partner(tensor, used, block + "ffn_up_exps.weight", same_shape=True)
                self._check(tensor, len(tensor.shape) == 3)
                experts, rows, columns = tensor.shape
                name, joined = f"{prefix}mlp.experts.gate_up_proj", (experts, 2 * rows, columns)
                self._add(name, (tensor, up), joined, _join_rows)
            else:
                self._partner(tensor, used, block + "ffn_gate_exps.weight", same_shape=True)
            return
        if self._facts.family == "qwen3_next" and leaf in ("attn_qkv.weight", "attn_gate.weight"):
            if leaf == "attn_qkv.weight":
                z = self._partner(tensor, used, block + "attn_gate.weight", same_shape=False)
                self._add_qkvz(f"{prefix}linear_attn.in_proj_qkvz.weight", tensor, z)
            else:
                self._partner(tensor, used, block + "attn_qkv.weight", same_shape=False)
            return
        module, _, kind = leaf.rpartition(".")
        if leaf in _WHOLE:
            target = _WHOLE[leaf]
        elif module in _MODULES and kind in ("weight", "bias"):
            target = f"{_MODULES[module]}.{kind}"
        else:
            self._add(tensor.name, (tensor,), tensor.shape)
            return
        shape, undo = self._undo(leaf, module, tensor)
        self._add(prefix + target, (tensor,), shape, undo, columns=module == "ssm_out")

    def _undo(self, leaf: str, module: str, tensor: TensorFacts) -> tuple[tuple[int, ...], Undo | None]:
        """Shape and way back of one layer tensor."""
        facts, shape = self._facts, tensor.shape
        if facts.family == "llama" and module in ("attn_q", "attn_k"):
            heads = facts.num_heads if module == "attn_q" else facts.num_kv_heads
            self._check(tensor, shape[0] == heads * facts.head_dim)
            return shape, lambda values: _unpermute_rope(next(values), heads)
        if module == "ffn_gate_inp_shexp":
            return (1, shape[-1]), None
        if facts.delta is None:
            return shape, None
        if self._is_offset_norm(leaf):
            return shape, _minus_one
        return self._undo_delta(leaf, module, tensor, facts.delta)

    def _undo_delta(
        self, leaf: str, module: str, tensor: TensorFacts, delta: DeltaFacts
    ) -> tuple[tuple[int, ...], Undo | None]:
        """Shape and way back of one tensor of a delta-net layer."""
        shape, tiled = tensor.shape, self._facts.family != "qwen3_next"
        K, R, V = delta.num_k_heads, delta.num_v_heads // delta.num_k_heads, delta.v_head_dim

        def grouped(values: Tensor, width: int, first: int = 0) -> Tensor:
            return _grouped(values, K, R, width, first) if tiled else values

        if leaf == "ssm_a":
            self._check(tensor, shape == (K * R,))
            return shape, lambda values: grouped(torch.log(-next(values)), 1)
        if module == "ssm_conv1d":
            self._check(tensor, shape == (delta.conv_dim, delta.conv_kernel))
            return (shape[0], 1, shape[1]), lambda values: grouped(next(values), V, 2 * delta.key_dim)
        if not tiled:
            return shape, None
        # Rows of a value head, and rows before them, of what is ordered by rows.
        by_rows = {"attn_gate": (V, 0), "attn_qkv": (V, 2 * delta.key_dim)}
        by_rows |= dict.fromkeys(("ssm_dt", "ssm_alpha", "ssm_beta"), (1, 0))
        if module in by_rows:
            width, first = by_rows[module]
            self._check(tensor, shape[0] == first + K * R * width)
            return shape, lambda values: grouped(next(values), width, first)
        if module == "ssm_out":
            self._check(tensor, len(shape) == 2 and shape[1] == delta.value_dim)
            return shape, lambda values: grouped(next(values).T, V).T
        return shape, None

    def _add_qkvz(self, name: str, qkv: TensorFacts, z: TensorFacts) -> None:
        delta = self._facts.delta
        assert delta is not None
        self._check(qkv, len(qkv.shape) == 2 and qkv.shape[0] == delta.conv_dim)
        self._check(z, z.shape == (delta.value_dim, qkv.shape[1]))
        K = delta.num_k_heads

        def undo(values: Iterator[Tensor]) -> Tensor:
            parts = next(values).split([delta.key_dim, delta.key_dim, delta.value_dim])
            parts = (*parts, next(values))
            return torch.cat([part.view(K, -1, part.shape[-1]) for part in parts], dim=1)

        self._add(name, (qkv, z), (delta.conv_dim + delta.value_dim, qkv.shape[1]), undo)

    def _is_offset_norm(self, name: str) -> bool:
        return self._facts.norm_offset and name.endswith("norm.weight") and name != "ssm_norm.weight"

    def _partner(
        self, tensor: TensorFacts, used: Mapping[str, TensorFacts], name: str, *, same_shape: bool
    ) -> TensorFacts:
        other = used.get(name)
        if other is None or (same_shape and other.shape != tensor.shape):
            found = "missing" if other is None else f"of shape {list(other.shape)}"
            raise WeightsError(
                f"{name} is {found}, and {tensor.name} is there with the shape {list(tensor.shape)}.",
                hint="Fetch or convert the file again.",
                tensor=name,
            )
        return other

    def _check(self, tensor: TensorFacts, fits: bool) -> None:
        if not fits:
            raise WeightsError(
                f"{tensor.name} has the shape {list(tensor.shape)}, and the metadata ask for another.",
                hint="Fetch or convert the file again.",
                tensor=tensor.name,
            )


def _values(tensor: TensorFacts) -> Tensor:
    """Values in the file's own shape: floats as stored, blocks as fp32."""
    if tensor.format.block_len == 1:
        return read_plain(tensor)
    return dequantize(read_raw(tensor), tensor.format).view(tensor.shape)


def _can_pack(tensor: TensorFacts) -> bool:
    name = tensor.format.packed
    return name is not None and PACKED[name].fits(tensor.shape[-1])


def _packed_rows(tensor: TensorFacts, num_rows: int, inputs: Tensor | None) -> PackedRows:
    assert tensor.format.packed is not None

    def load(device: str) -> tuple[RowCodes, Tensor | None]:
        blocks = read_raw(tensor, device).view(-1, tensor.format.num_bytes(tensor.shape[-1]))
        check_scales(tensor.name, blocks, tensor.format)
        return lambda rows: codes(blocks[rows], tensor.format), inputs

    return PackedRows(PACKED[tensor.format.packed], num_rows, load, inputs is not None)


def _minus_one(values: Iterator[Tensor]) -> Tensor:
    return next(values) - 1.0


def _join_rows(values: Iterator[Tensor]) -> Tensor:
    """[E, I, H] twice -> [E, 2I, H]."""
    first = next(values)
    rows = first.shape[1]
    joined = first.new_empty(first.shape[0], 2 * rows, first.shape[2])
    joined[:, :rows] = first
    del first
    joined[:, rows:] = next(values)
    return joined


def _unpermute_rope(values: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from pairs (x0, y0, x1, y1, ...) back to halves (x0, x1, ..., y0, y1, ...)."""
    return values.view(num_heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def _grouped(values: Tensor, num_k_heads: int, ratio: int, width: int, first: int) -> Tensor:
    """Rows from `first` on, `width` for each value head: from [ratio, key head] to [key head, ratio]."""
    head, tail = values[:first], values[first:]
    ordered = tail.reshape(ratio, num_k_heads, width, *tail.shape[1:]).transpose(0, 1).reshape(tail.shape)
    return torch.cat([head, ordered])
