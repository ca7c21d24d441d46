"""Engines over tiny models for tests."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

import oracle
from packhorse.core.types import EXACT_ROWS, PAGE_LEN, Event, Request, SamplingParams, Span
from packhorse.engine.engine import Engine
from packhorse.engine.runner import Runner, buckets
from packhorse.engine.schedule import Step, Work
from packhorse.facts.read import read_model
from packhorse.models.checkpoint import open_checkpoint
from packhorse.models.loader import load_model
from packhorse.models.model import Model
from packhorse.store.kv import KVStore
from packhorse.store.tier import StoreGeometry


class IdsAsText:
    """A detokenizer that spells a token as <id>."""

    def add(self, token_id: int) -> str:
        return f"<{token_id}>"

    def finish(self) -> str:
        return ""


class RecordingRunner(Runner):
    """Keeps the logits of every sampled row by (request id, position)."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.logits: dict[tuple[str, int], torch.Tensor] = {}

    def run(self, step: Step, views: list) -> torch.Tensor:
        logits = super().run(step, views)
        for span, row in zip([s for s in step.spans if s.samples], logits, strict=True):
            self.logits[span.sequence.id, span.end - 1] = row.clone()
        return logits

    def read_out(self, work: Work, part: Span, x: torch.Tensor, row: int) -> torch.Tensor | None:
        logits = super().read_out(work, part, x, row)
        if logits is not None:
            self.logits[work.sequence.id, work.end - 1] = logits.clone()
        return logits


@cache
def tiny_model(family: str, exact: bool) -> Model:
    """The shared checkpoint of the family as a loaded model, one a process."""
    return load_folder(oracle.shared_checkpoint(family)[1], exact=exact)


def load_folder(folder: Path, *, exact: bool = False, dtype: torch.dtype = torch.float32) -> Model:
    facts = read_model(folder)
    return load_model(facts, open_checkpoint(facts), dtype=dtype, exact=exact)


def make_engine(
    model: Model,
    *,
    num_pages: int = 160,
    page_len: int = 64,
    chunk_len: int = 256,
    snapshot_len: int = 1024,
    sequences: int = 4,
    snapshots: int = 16,
    window: int = 8192,
    eos_ids: tuple[int, ...] = (),
    device: str = "cpu",
    kv: str | None = None,
    ram: int = 0,
    **sweep: object,
) -> Engine:
    """An engine whose free memory is NaN, so that nothing stale can be read unseen. sweep: settings of Engine."""
    store = KVStore(
        StoreGeometry.of(model.facts, model.dtype, page_len, kv),
        num_pages=num_pages,
        sequences=sequences,
        snapshots=snapshots,
        snapshot_len=snapshot_len,
        exact=model.exact,
        device=device,
        poison=True,
    )
    if ram:
        store.add_tiers(ram_bytes=ram)
    return Engine(
        RecordingRunner(model),
        store,
        sequences=sequences,
        chunk_len=chunk_len,
        window=window,
        eos_ids=eos_ids,
        detokenizer=IdsAsText,
        **sweep,
    )


def run_all(engine: Engine) -> dict[str, list[Event]]:
    """Step until nothing is live: the events of each request."""
    events: dict[str, list[Event]] = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def ask(
    engine: Engine, ids: Iterable[int], *, max_tokens: int = 1, marks: tuple[int, ...] = (), name: str = "r"
) -> tuple[list[int], Event]:
    """One greedy request to its end: its tokens and its last event."""
    engine.add(Request(name, tuple(ids), SamplingParams(max_tokens=max_tokens), marks))
    events = run_all(engine)[name]
    if events[-1].error is not None:
        raise events[-1].error
    return [t for e in events for t in e.token_ids], events[-1]


@torch.inference_mode()
def one_pass(model: Model, ids: list[int], kv: str | None = None) -> torch.Tensor:
    """Logits [T, V] of all positions from one pass over a fresh store, without scheduler or engine."""
    store = KVStore(
        StoreGeometry.of(model.facts, model.dtype, PAGE_LEN, kv),
        num_pages=len(ids) // PAGE_LEN + 2,
        sequences=1,
        snapshots=0,
        snapshot_len=2**20,
        exact=model.exact,
        poison=True,
    )
    handle = store.open(ids, len(ids) + 1)
    whole = Span(handle.slot, 0, 0, len(ids))
    logits = []
    for span in buckets(whole) if model.exact else [whole]:
        rows = EXACT_ROWS if model.exact else len(ids)
        tokens = torch.zeros(rows, dtype=torch.int64)
        tokens[: span.length] = torch.tensor(ids[span.position : span.end])
        views = store.views([Span(span.slot, 0, span.position, span.length)])
        x = model.embed(tokens)
        positions = torch.arange(span.position, span.position + rows)
        for layer, view, weights in zip(
            model.layers, views, map(model.weights.layer, range(len(views))), strict=True
        ):
            x = layer(x, positions, view, weights)
        logits.append(model.head(x)[: span.length])
        if model.exact:
            store.complete([span], {span.slot: ids[span.position : span.end]})
    return torch.cat(logits)
