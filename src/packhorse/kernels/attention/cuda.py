"""Launches of the attention kernels of decode steps: `write.cu` and `cuda.cu`.

Their twins: `quant.codec` for what is stored, `ref.attention` over what is read from there.

Everything that changes from step to step is a device tensor, and grids depend on capacities alone: a launch may
be captured in a graph and replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from packhorse.core.errors import UsageError
from packhorse.core.formats import KV_FORMATS, kv_token_bytes
from packhorse.core.types import PAGE_LEN
from packhorse.core.units import ceil_div
from packhorse.kernels.cuda.launch import launch, multiprocessors
from packhorse.kernels.cuda.nvrtc import MIN_ARCH, Variant

MAX_QUERIES = 16
"""Query tokens of one sequence in one launch."""
MAX_GROUP = 8
"""Query heads of a KV head."""
MAX_SPLITS = 256
MIN_SPLIT = 128
_LEAST_SPLITS = 96
_WARPS = 4
_SPLIT_STEP = 16 * _WARPS
MAX_CONTEXT = 1 << 20
"""Tokens of a sequence: a split has at most 176 pages."""
CODECS = {"fp16": 0, "bf16": 0, "fp8": 1, "k5v4": 2, "k4v4": 3}
"""Layouts of pages by their numbers in kv.cuh."""
HEAD_DIMS = (64, 128, 256)

_BLOCKS = {256: (2, 3), 128: (3, 4), 64: (5, 6)}
"""Blocks of a multiprocessor, as many as registers allow without spills: by dims of a head, in 16 bits and in codes."""


class DecodeBatch(NamedTuple):
    """Where the rows of a step belong. All int32, on the device; contents may change between replays.

    page_table [B, P]: pages of each sequence in the order of their tokens. first_row, num_tokens, position [B]:
    its rows, 0 tokens for none, and the position of the first. row_sequence, row_position [R]: of each row; -1:
    nobody's.
    """

    page_table: Tensor
    first_row: Tensor
    num_tokens: Tensor
    position: Tensor
    row_sequence: Tensor
    row_position: Tensor


def split_len(num_keys: int, splits: int) -> int:
    """Keys of a split for a query that sees `num_keys` of them and has at most so many splits: as in cuda.cu."""
    return max(MIN_SPLIT, ceil_div(num_keys, _SPLIT_STEP * splits) * _SPLIT_STEP)


@dataclass(frozen=True)
class PagedAttention:
    """Attention over pages for one shape of heads, one KV codec and one type of activations.

    dtype: of projections (or fp32) and outputs, fp16 or bf16. sequences, max_tokens, max_len: capacities: sequences
    of a step, query tokens of each (at most MAX_QUERIES), tokens of its context.

    Raises UsageError where the kernels have no such form.
    """

    codec: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    sequences: int
    max_tokens: int
    max_len: int

    def __post_init__(self) -> None:
        group = self.num_heads // self.num_kv_heads
        wrong = {
            f"a KV codec {self.codec}": self.codec not in CODECS,
            f"activations in {self.dtype}": self.dtype not in (torch.float16, torch.bfloat16),
            f"heads of {self.head_dim} dims": self.head_dim not in HEAD_DIMS,
            f"{group} query heads a KV head": not 1 <= group <= MAX_GROUP
            or self.num_heads % self.num_kv_heads != 0,
            f"{self.max_tokens} query tokens": not 1 <= self.max_tokens <= MAX_QUERIES,
            f"a context of {self.max_len:,} tokens": self.max_len > MAX_CONTEXT,
        }
        if any(wrong.values()):
            raise UsageError(
                f"The attention kernels have no form for {next(what for what, bad in wrong.items() if bad)}.",
                hint="They take heads of 64, 128 or 256 dims, 1 to 8 query heads a KV head, 1 to 16 tokens, "
                f"at most {MAX_CONTEXT:,} tokens of context, and fp16 or bf16.",
            )

    @property
    def math_dtype(self) -> torch.dtype:
        """What queries, keys and values are multiplied in."""
        return torch.bfloat16 if self.codec == "bf16" else torch.float16

    @property
    def variants(self) -> dict[str, Variant]:
        """The kernels by name."""
        bf16 = self.dtype == torch.bfloat16
        math_bf16 = self.codec == "bf16"
        defines = (
            ("CODEC", CODECS[self.codec]),
            ("HEAD_DIM", self.head_dim),
            ("MATH_BF16", int(math_bf16)),
            ("BF16", int(bf16)),
        )
        split = (("MAX_SPLITS", MAX_SPLITS), ("MIN_BLOCKS", self._blocks))
        arch = 80 if bf16 or math_bf16 else MIN_ARCH
        return {
            "write_kv": Variant("attention/write.cu", "write_kv", defines, min_arch=arch),
            "attend_split": Variant(
                "attention/cuda.cu", "attend_split", defines + split, min_arch=arch, tensor_cores=True
            ),
            "attend_merge": Variant("attention/cuda.cu", "attend_merge", defines + split, min_arch=arch),
        }

    def _check_pages(self, pages: Tensor) -> None:
        page_bytes = PAGE_LEN * kv_token_bytes(self.codec, self.num_kv_heads, self.head_dim)
        assert pages.shape[1] == page_bytes and pages.is_contiguous(), (
            f"the kernels read pages of {PAGE_LEN} tokens"
        )

    @property
    def _blocks(self) -> int:
        return _BLOCKS[self.head_dim][CODECS[self.codec] > 0]

    def splits(self, device: torch.device) -> int:
        """Most splits of a query: as many as make blocks that fill a card's multiprocessors a whole number of times.
        A wave that is not full takes as long as a full one."""
        at_once = multiprocessors(device) * self._blocks
        waves = ceil_div(_LEAST_SPLITS * self.num_kv_heads, at_once)
        return min(MAX_SPLITS, waves * at_once // self.num_kv_heads)

    @property
    def workspace_floats(self) -> int:
        """fp32 values of the scratch of one `attend`, which layers may share."""
        rows = self.sequences * self.num_heads * self.max_tokens
        return rows * MAX_SPLITS * (self.head_dim + 2)

    def write(
        self,
        pages: Tensor,
        rows: Tensor,
        batch: DecodeBatch,
        queries: Tensor,
        *,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        cos_sin: tuple[Tensor, Tensor] | None,
        gated: bool,
        misfits: Tensor,
    ) -> None:
        """Store K and V of a step's rows, and make its queries [R, Hq, D] in `math_dtype`, in the codec's basis.

        pages: of the layer. rows [R, (q, gates if gated, k, v) heads x D]: projections, fp32 or `dtype`. norms: fp32
        [D] of q and k. cos_sin: fp32 [R, 1, rotary dims / 2] each. misfits: int64 [2], what fp8 did not hold is added.
        """
        self._check_pages(pages)
        num_rows, width = rows.shape
        heads = self.num_heads + 2 * self.num_kv_heads
        assert width == (heads + self.num_heads * gated) * self.head_dim and rows.stride(1) == 1
        q_norm, k_norm = norms or (None, None)
        cos, sin = cos_sin or (None, None)
        where = (batch.page_table, batch.row_sequence, batch.row_position)
        is_fp32 = int(rows.dtype == torch.float32)
        launch(
            self.variants["write_kv"],
            (ceil_div(heads, _WARPS), num_rows),
            32 * _WARPS,
            *(rows, pages, queries, *where, q_norm, k_norm, cos, sin),
            *(misfits, eps, rows.stride(0), is_fp32, self.num_heads, self.num_kv_heads),
            *(int(gated), batch.page_table.shape[1], 0 if cos is None else cos.shape[-1]),
            device=rows.device,
            overlap=True,
        )

    def attend(
        self,
        pages: Tensor,
        queries: Tensor,
        batch: DecodeBatch,
        out: Tensor,
        workspace: Tensor,
        *,
        gate: Tensor | None = None,
    ) -> None:
        """Attention of the queries of `write` over what is stored: out [R, Hq, D] in `dtype`, times the sigmoid of
        gate where there is one.

        gate [R, Hq, D]: fp32 or `dtype`, rows at any stride. workspace: fp32 [workspace_floats], of any contents.
        Rows that belong to nobody stay as they are.
        """
        self._check_pages(pages)
        assert workspace.numel() >= self.workspace_floats and workspace.dtype == torch.float32
        block_tokens = MAX_GROUP // (self.num_heads // self.num_kv_heads)
        blocks = ceil_div(self.max_tokens, block_tokens) + (self.max_tokens > 1)
        stats = workspace[self.workspace_floats // (self.head_dim + 2) * self.head_dim :]
        where = (batch.first_row, batch.num_tokens, batch.position)
        scale = self.head_dim**-0.5 * 1.4426950408889634  # exponentials are powers of two
        splits = self.splits(out.device)
        launch(
            self.variants["attend_split"],
            (blocks, min(splits, ceil_div(self.max_len, MIN_SPLIT)), self.sequences * self.num_kv_heads),
            32 * _WARPS,
            *(pages, queries, batch.page_table, *where, workspace, stats, self.num_heads, self.num_kv_heads),
            *(batch.page_table.shape[1], self.max_tokens, splits, scale),
            device=out.device,
            overlap=True,
        )
        assert gate is None or gate.stride()[1:] == (self.head_dim, 1)
        launch(
            self.variants["attend_merge"],
            (self.max_tokens, self.num_heads, self.sequences),
            4 * self.head_dim,
            *(workspace, stats, *where, gate, out),
            *(0 if gate is None else gate.stride(0), int(gate is not None and gate.dtype == torch.float32)),
            splits,
            device=out.device,
            overlap=True,
        )


assert set(CODECS) | {"fp32"} == set(KV_FORMATS)
