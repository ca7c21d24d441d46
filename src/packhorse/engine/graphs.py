"""Decode steps on a card as captured graphs, one for each number of sequences that steps are filled up to.

    host, pinned   | places [7, S] int32 | page tables [S, P] int32, where they changed |
    device         | the same, at the addresses that the graph reads | logits [S, V] fp32 |

A step writes the first line, copies it over and replays the graph. Places are: first row, tokens, position, row's
sequence, row's position, state slot, token id. A sequence that is not there has no tokens, and its row is
nobody's: it routes to no expert.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packhorse.core.errors import UsageError
from packhorse.core.types import PAGE_LEN, LayerKind
from packhorse.core.units import ceil_div
from packhorse.engine.experts import StreamedExperts
from packhorse.engine.schedule import Work
from packhorse.kernels.attention.cuda import DecodeBatch, PagedAttention
from packhorse.kernels.experts.cuda import ExpertTable, new_counters
from packhorse.layers.step import LayerStep, StepContext, misfit
from packhorse.models.model import Model
from packhorse.store.kv import KVStore, StoredSequence

BUCKETS = (1, 2, 4, 8, 16)

Experts = ExpertTable | StreamedExperts | None
"""All on the card, some in host memory, or none."""


class StepGraphs:
    """Runs steps in which each sequence has one token. sequences: at once, at most 16. max_len: tokens of the longest.

    experts: where the model's routed experts are, if it has any. capture: False runs the same kernels one by one
    (tests compare).

    Raises UsageError, saying why, where the model or the store has no step kernels.
    """

    def __init__(
        self, model: Model, store: KVStore, experts: Experts, *, sequences: int, max_len: int,
        capture: bool = True,
    ) -> None:  # fmt: skip
        why = self.misfit(model, store, experts, sequences)
        if why is not None:
            raise UsageError(f"{model.facts.name} has no decode graphs: {why}.", hint="It runs without them.")
        self.model = model
        self._store = store
        self.streamed = experts if isinstance(experts, StreamedExperts) else None
        self.counters = new_counters(model.device) if self.streamed is None else self.streamed.counters
        self.num_steps = 0
        self._capture = capture
        sizes = [size for size in BUCKETS if size < sequences] + [
            next(size for size in BUCKETS if size >= sequences)
        ]
        pages = ceil_div(max_len, store.page_len)
        attention = {size: _attention(model, store, size, pages * store.page_len) for size in sizes}
        workspace = torch.empty(attention[sizes[-1]].workspace_floats, device=model.device)
        unused = torch.zeros(2, dtype=torch.int64, device=model.device)
        self._buckets: list[_Bucket] = []
        # The largest first: smaller graphs then fit into the memory that its capture took.
        for done, size in enumerate(reversed(sizes)):
            self._buckets.insert(
                0, _Bucket(model, store, experts, attention[size], workspace, unused, self.counters, pages)
            )
            if capture:
                pool = self._buckets[-1].graph.pool() if done else None
                self._buckets[0].capture(model, pool)

    @staticmethod
    def misfit(model: Model, store: KVStore, experts: Experts, sequences: int) -> str | None:
        """Why these have no step kernels, in words; None where they have."""
        facts = model.facts
        if store.geometry.codec.name == "fp32":
            return "KV is kept in fp32"
        if store.page_len != PAGE_LEN:
            return f"pages hold {store.page_len} tokens, not {PAGE_LEN}"
        if sequences > BUCKETS[-1]:
            return f"{sequences} sequences are more than {BUCKETS[-1]}"
        if any(facts.moe_layers) and experts is None:
            return "its routed experts are not packed, or not all in one format"
        return misfit(facts, model.dtype)

    @property
    def max_sequences(self) -> int:
        """Sequences that one step holds."""
        return self._buckets[-1].size

    @torch.inference_mode()
    def run(self, spans: Sequence[Work]) -> Tensor:
        """Logits [len(spans), V] fp32 of spans of one token each: valid until the next call."""
        bucket = next(b for b in self._buckets if b.size >= len(spans))
        self._store.arrive()
        if self.streamed is not None:
            self.streamed.begin_step()
        bucket.place(spans)
        if self.model.embed_device.type == "cpu":
            ids = torch.tensor([span.token_ids[0] for span in spans])
            bucket.rows[: len(spans)].copy_(self.model.embed(ids), non_blocking=True)
        if self._capture:
            bucket.graph.replay()
        else:
            bucket.logits = bucket.forward(self.model)
        if self.streamed is not None:
            self.streamed.after_step()
        self.num_steps += 1
        return bucket.logits[: len(spans)]


def _attention(model: Model, store: KVStore, size: int, max_len: int) -> PagedAttention:
    facts = model.facts
    heads = (facts.num_heads, facts.num_kv_heads, facts.head_dim)
    return PagedAttention(store.geometry.codec.name, *heads, model.dtype, size, 1, max_len)


class _Bucket:
    """The tensors and the graph of steps of up to `size` sequences."""

    def __init__(
        self,
        model: Model,
        store: KVStore,
        experts: Experts,
        attention: PagedAttention,
        workspace: Tensor,
        unused: Tensor,
        counters: Tensor,
        num_pages: int,
    ) -> None:
        facts, self.size = model.facts, attention.sequences
        device, delta = model.device, facts.delta
        self.graph = torch.cuda.CUDAGraph()
        self.rows = torch.zeros(self.size, facts.hidden_size, device=device)
        self.logits = torch.empty(0)
        self._host_places = torch.zeros(7, self.size, dtype=torch.int32).pin_memory()
        self._places = torch.zeros(7, self.size, dtype=torch.int32, device=device)
        self._tables = torch.zeros(self.size, num_pages, dtype=torch.int32, device=device)
        # Whose pages each row of the tables holds.
        self._seats: list[StoredSequence | None] = [None] * self.size
        self._copied = torch.cuda.Event()
        first_row, num_tokens, position, row_sequence, row_position, slots, self._ids = self._places
        self._host_places[3] = -1
        self._places.copy_(self._host_places)
        batch = DecodeBatch(self._tables, first_row, num_tokens, position, row_sequence, row_position)
        mixed = turns = None
        if delta is not None:
            shape = (self.size, delta.num_v_heads, delta.v_head_dim)
            mixed = torch.zeros(shape, dtype=model.dtype, device=device)
            turns = torch.zeros(self.size, delta.num_k_heads, dtype=torch.int32, device=device)
        attended = torch.zeros(self.size, facts.num_heads, facts.head_dim, dtype=model.dtype, device=device)
        self._streamed = experts if isinstance(experts, StreamedExperts) else None
        table = experts.table if isinstance(experts, StreamedExperts) else experts
        self.context = StepContext(
            batch, slots, attention, workspace, attended, mixed, turns, counters, table
        )
        self._layers = []
        for index, kind in enumerate(facts.layer_kinds):
            memory = store.layer_memory(index)
            misfits = memory.misfits if memory.misfits is not None else unused
            moe_index = sum(facts.moe_layers[:index])
            parts = (memory.pages, misfits if kind is LayerKind.FULL else None, memory.conv, memory.recurrent)
            self._layers.append(LayerStep(self.context, *parts, moe_index))

    def place(self, spans: Sequence[Work]) -> None:
        """Say whose token each row is: copied over on the current stream."""
        self._copied.synchronize()  # the copy before may still read the host's side
        columns = []
        for row, span in enumerate(spans):
            assert span.length == 1
            handle = span.sequence.handle
            assert isinstance(handle, StoredSequence)
            columns.append((row, 1, span.position, row, span.position, span.slot, span.token_ids[0]))
            self._seat(row, handle)
        # At once: a value that is set by itself takes microseconds.
        nobody = [(0, 0, 0, -1, 0, 0, 0)] * (self.size - len(spans))
        self._host_places.numpy()[:] = np.array(columns + nobody, dtype=np.int32).T
        self._places.copy_(self._host_places, non_blocking=True)
        self._copied.record()

    def _seat(self, row: int, sequence: StoredSequence) -> None:
        if self._seats[row] is not sequence:
            page_ids = torch.tensor(sequence.page_ids, dtype=torch.int32)
            self._tables[row, : len(page_ids)].copy_(page_ids)
            self._seats[row] = sequence

    def forward(self, model: Model) -> Tensor:
        """The step's kernels, from token ids (from `rows` where the embedding is the host's) to logits [size, V]."""
        if self._streamed is not None:
            self._streamed.in_step()
        self.context.cos_sin = model.rope.cos_sin(self.context.batch.row_position)
        x = self.rows if model.embed_device.type == "cpu" else model.embed(self._ids.long())
        for index, layer in enumerate(model.layers):
            x = layer.step(x, self._layers[index], model.weights.layer(index))
        if self._streamed is not None:
            self._streamed.end_step()
        return model.head_step(x)

    @torch.inference_mode()
    def capture(self, model: Model, pool: Any) -> None:
        """Run once, which compiles and loads what is missing, then capture. All rows are nobody's meanwhile.
        pool: of a graph whose memory this one may use."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.forward(model)
        torch.cuda.current_stream().wait_stream(stream)
        # NOTE: garbage that holds memory of a card must not be freed during a capture: the driver refuses that.
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(self.graph, pool=pool):
                self.logits = self.forward(model)
        finally:
            if collects:
                gc.enable()
