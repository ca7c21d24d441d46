"""Which kernels an engine starts with on a card, from facts alone, so that they are compiled while weights are read."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from threading import Event

import torch

from packhorse.core.errors import KernelError, UsageError
from packhorse.core.formats import KV_FORMATS
from packhorse.core.types import PAGE_LEN
from packhorse.engine.graphs import BUCKETS
from packhorse.facts.model import ModelFacts
from packhorse.facts.packed import packed_matrices
from packhorse.kernels.attention import merge, pages, rotate
from packhorse.kernels.attention.cuda import PagedAttention
from packhorse.kernels.conv import cuda as conv
from packhorse.kernels.cuda.launch import prepare, target_of
from packhorse.kernels.cuda.nvrtc import Variant
from packhorse.kernels.delta import chunk
from packhorse.kernels.delta import cuda as delta
from packhorse.kernels.experts import combine, mma
from packhorse.kernels.experts import cuda as experts
from packhorse.kernels.experts.cuda import ExpertFills, ExpertTable
from packhorse.kernels.linear import cuda as linear
from packhorse.kernels.linear import dense, gather, unpack
from packhorse.kernels.norm import cuda as norm
from packhorse.kernels.norm import heads


class _StoppedError(Exception):
    pass


def compile_ahead(
    stop: Event,
    facts: ModelFacts,
    dtype: torch.dtype,
    kv: str,
    sequences: int,
    streamed: bool,
    device: torch.device,
) -> None:
    """Compile and load `first_kernels` for a card, in a thread of its own; standard error says so where that takes
    time, the first start. stop: set where nobody will use them."""

    def go_on(done: int, total: int) -> None:
        if stop.is_set():
            raise _StoppedError
        if done in (0, total // 2, total):
            print(f"compiled {done} of {total} kernels for this card, once", file=sys.stderr, flush=True)

    # What fails here is compiled again, and said, where it is used, if it is.
    with suppress(KernelError, UsageError, torch.OutOfMemoryError, _StoppedError):
        wanted = first_kernels(facts, dtype, kv, sequences, streamed, target_of(device).arch)
        prepare(wanted, device, go_on)


def first_kernels(
    facts: ModelFacts, dtype: torch.dtype, kv: str, sequences: int, streamed: bool, arch: int
) -> list[Variant]:
    """What decode steps and prompts of a model launch in `dtype`, 16 bits, with KV in `kv`, on cards of compute
    capability `arch`. sequences: of a step at most; streamed: routed experts are read from host memory too. A kernel
    that is not here is compiled when it is first used. Raises UsageError where there is none for the model."""
    sizes = [size for size in BUCKETS if size < 2 * sequences]
    matrices, moe, d = list(packed_matrices(facts)), facts.moe, facts.delta
    shape = (facts.num_heads, facts.num_kv_heads, facts.head_dim)
    found = [*PagedAttention(kv, *shape, dtype, 1, 1, PAGE_LEN).variants.values(), merge.variant(dtype)]
    if KV_FORMATS[kv].rotated:
        found += pages.variants(kv, facts.head_dim, dtype).values()
        found += [rotate.variant(facts.head_dim, kind) for kind in (dtype, torch.float32)]
    found += [gather.VARIANT, norm.variant(dtype), *combine.variants(dtype)]
    found += [dense.variant(dtype, dtype, size) for size in sizes]
    for form in dict.fromkeys(matrix.form for matrix in matrices):
        found += [*linear.variants(form, dtype), unpack.variant(form, dtype)]
    found += [unpack.variant(m.form, torch.float32) for m in matrices if m.kind == "embeddings"]
    if facts.qk_norm:
        found.append(heads.variant(dtype, fp32=False, norm=True, gate=None))
    if facts.attn_gate:
        found.append(heads.variant(dtype, fp32=True, norm=False, gate="sigmoid"))
    if d is not None:
        found += [conv.variant(d.conv_kernel, dtype), delta.variant(d.k_head_dim, d.conv_kernel, dtype)]
        found += chunk.variants(d.k_head_dim, d.v_head_dim, arch)
        found.append(heads.variant(dtype, fp32=True, norm=True, gate="silu"))
    # By what they take: gate and up the hidden state, down the inner one.
    stacks = {m.num_cols == facts.hidden_size: m.form for m in matrices if m.kind == "experts"}
    if moe is not None and len(stacks) == 2:
        home = torch.zeros(1, 1, dtype=torch.int64)
        table = ExpertTable(home, stacks[True], stacks[False], facts.hidden_size, moe.expert_dim)
        found += [dense.variant(torch.float32, dtype, size) for size in sizes]
        found += [*experts.variants(table, dtype), *mma.variants(table, dtype)]
        if streamed:
            table = replace(table, fills=ExpertFills.empty(home, 1))
            found += experts.variants(table, dtype, sizes[-1])
    return found
