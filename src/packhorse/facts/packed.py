"""Which matrices of a model's files are packed, and how: what the plan counts and the loader keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from packhorse.core.formats import PACKED, TILE_ROWS, PackedFormat
from packhorse.facts.gguf_model import is_mtp_block
from packhorse.facts.model import ModelFacts, StoredMatrix
from packhorse.facts.weights import class_of

_INDEX_BYTES = 8


@dataclass(frozen=True)
class PackedMatrix:
    """One matrix, or several equal ones (experts), that stay packed. permuted: its inputs have an order of their
    own, one index a column."""

    kind: str
    form: PackedFormat
    num_rows: int
    num_cols: int
    num_matrices: int = 1
    permuted: bool = False

    @property
    def num_values(self) -> int:
        return self.num_matrices * self.num_rows * self.num_cols

    @property
    def num_bytes(self) -> int:
        """Bytes in the kernels' layout."""
        return self.num_matrices * self.form.num_bytes(self.num_rows, self.num_cols) + self._order_bytes

    @property
    def cpu_bytes(self) -> int:
        """Bytes on a CPU that computes in bf16: of torch's int4 layout where that can hold the matrix."""
        if self.kind == "embeddings" or not self.form.has_int4_product(self.num_rows, self.num_cols):
            return self.num_bytes
        return self.num_matrices * self.form.int4_bytes(self.num_rows, self.num_cols) + self._order_bytes

    @property
    def _order_bytes(self) -> int:
        return _INDEX_BYTES * self.num_cols if self.permuted else 0


@lru_cache(maxsize=16)
def packed_matrices(facts: ModelFacts) -> tuple[PackedMatrix, ...]:
    """The text model's matrices that can stay packed.

    Left out is what the loader unpacks: types that no packed format holds, routers, and experts whose gate and
    up matrices differ in format or do not meet at a row block.
    """
    return tuple(_gguf_matrices(facts) if facts.container == "gguf" else _stored_matrices(facts))


def _stored_matrices(facts: ModelFacts) -> Iterator[PackedMatrix]:
    experts: dict[tuple[str, bool], list[StoredMatrix]] = {}
    for name, matrix in facts.stored.items():
        kind = class_of(name, facts)
        if kind == "experts":
            block = name.partition(".experts.")[0]
            experts.setdefault((block, "down_proj" in name), []).append(matrix)
        elif kind not in ("router", "other"):
            rows, cols = matrix.shape
            yield PackedMatrix(kind, matrix.form, rows, cols, permuted=matrix.permuted)
    for (_, down), parts in experts.items():
        assert facts.moe is not None
        *num, rows, cols = parts[0].shape
        fused = bool(num)
        whole = len(parts) == (1 if fused else facts.moe.num_experts * (1 if down else 2))
        aligned = down or fused or rows % TILE_ROWS == 0
        if (
            whole
            and aligned
            and len({part.form for part in parts}) == 1
            and not any(p.permuted for p in parts)
        ):
            yield PackedMatrix("experts", parts[0].form, rows, cols, num[0] if fused else len(parts))


def _gguf_matrices(facts: ModelFacts) -> Iterator[PackedMatrix]:
    tiled = facts.family in ("qwen3_5", "qwen3_5_moe")
    for name, tensor in facts.tensors.items():
        kind, form = class_of(name, facts), tensor.format.packed
        if form is None or kind in ("router", "norms", "other") or is_mtp_block(name, facts.num_layers):
            continue
        rows = tensor.shape[-2] if len(tensor.shape) > 1 else 1
        if not PACKED[form].fits(tensor.shape[-1]) or ".ssm_conv1d." in name:
            continue
        num = tensor.num_values // (rows * tensor.shape[-1])
        if not _joins(name, rows, facts):
            continue
        permuted = tiled and ".ssm_out." in name
        yield PackedMatrix(kind, PACKED[form], rows, tensor.shape[-1], num, permuted)


_JOINED = (("ffn_gate_exps", "ffn_up_exps"), ("attn_qkv", "attn_gate"))
"""Tensors that are one matrix here: of experts, and of qwen3_next's delta net."""


def _joins(name: str, num_rows: int, facts: ModelFacts) -> bool:
    """Whether a tensor can stay packed beside the one that it is joined with, if there is one."""
    for pair in _JOINED:
        for one, other in (pair, pair[::-1]):
            partner = facts.tensors.get(name.replace(one, other)) if f".{one}." in name else None
            if partner is None:
                continue
            if "exps" in one:
                return partner.format == facts.tensors[name].format and num_rows % TILE_ROWS == 0
            packed = partner.format.packed
            alone = facts.family != "qwen3_next"
            return alone or (packed is not None and PACKED[packed].fits(partner.shape[-1]))
    return True
