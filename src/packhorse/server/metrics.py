"""Figures for Prometheus. Every name starts with packhorse_."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from packhorse.core.types import Usage
from packhorse.server.worker import Status, Worker

if TYPE_CHECKING:
    from packhorse.engine.experts import FetchedExperts, StreamedExperts
    from packhorse.engine.session import Session
    from packhorse.store.kv import KVStore

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
RATES = (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 400)


class Metrics:
    """Counters of finished calls, and what the engine holds now."""

    def __init__(self, worker: Callable[[], Worker]) -> None:
        self._registry = CollectorRegistry()
        own: Any = {"registry": self._registry, "namespace": "packhorse"}
        self.requests = Counter("requests", "Calls by path and status.", ["path", "status"], **own)
        self.errors = Counter("errors", "Calls that ended with an error, by its code.", ["code"], **own)
        self.gone = Counter("disconnects", "Clients that left before their answer was complete.", **own)
        self.volatile = Counter(
            "volatile_lines", "Lines at the head of prompts that change, by kind.", ["kind"], **own
        )
        self._prompt = Counter("prompt_tokens", "Tokens of prompts, read or reused.", **own)
        self._cached = Counter("cached_tokens", "Tokens of prompts that were reused.", **own)
        self._generated = Counter("generated_tokens", "Tokens generated.", **own)
        self._first = Histogram("first_token_seconds", "From call to first token.", buckets=SECONDS, **own)
        self._whole = Histogram("request_seconds", "From call to end.", buckets=SECONDS, **own)
        self._rate = Histogram(
            "tokens_per_second", "Of one answer after its first token.", buckets=RATES, **own
        )
        self._registry.register(_Live(worker))

    def count_answer(self, usage: Usage, first_s: float | None, whole_s: float) -> None:
        """A call that generated has ended, whole or not."""
        self._prompt.inc(usage.prompt_len)
        self._cached.inc(usage.cached_len)
        self._generated.inc(usage.generated_len)
        self._whole.observe(whole_s)
        if first_s is not None:
            self._first.observe(first_s)
            if usage.generated_len > 1 and whole_s > first_s:
                self._rate.observe((usage.generated_len - 1) / (whole_s - first_s))

    def text(self) -> bytes:
        """The page, in Prometheus' text format."""
        return generate_latest(self._registry)


class _Live(Collector):
    """What is true at the moment of asking."""

    def __init__(self, worker: Callable[[], Worker]) -> None:
        self._worker = worker

    def describe(self) -> Iterator[Metric]:
        """Nothing to register ahead: names are unique."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        worker = self._worker()
        health = GaugeMetricFamily("packhorse_health", "1 for the status of now.", labels=["status"])
        for status in Status:
            health.add_metric([status], worker.health.status is status)
        yield health
        snapshot = worker.snapshot
        yield GaugeMetricFamily("packhorse_requests_running", "Requests computed now.", snapshot.running)
        yield GaugeMetricFamily("packhorse_requests_waiting", "Requests in the queue.", snapshot.waiting)
        yield CounterMetricFamily("packhorse_failed_steps", "Steps that failed.", worker.failed_steps)
        resident = psutil.Process().memory_info().rss
        yield GaugeMetricFamily("packhorse_process_resident_bytes", "Memory of the process.", resident)
        if worker.session is not None and snapshot.store is not None:
            stats, store = snapshot.store, worker.session.engine.store
            pages = GaugeMetricFamily(
                "packhorse_pages", "KV pages by tier and use.", labels=["tier", "state"]
            )
            pages.add_metric(["device", "free"], stats.pages_free)
            pages.add_metric(["device", "used"], stats.pages_used)
            pages.add_metric(["device", "cached"], stats.pages_cached)
            yield pages
            yield GaugeMetricFamily(
                "packhorse_snapshots", "Recurrent states kept for reuse.", stats.snapshots
            )
            yield CounterMetricFamily("packhorse_evicted_entries", "Prefixes dropped.", stats.evicted_entries)
            names = ("opened", "hits", "reused_tokens", "thinned_entries", "skipped_snapshots")
            reuse = {name: getattr(stats, name) for name in names}
            yield _counts("reuse", "Of prompts, whatever tier it is from.", "event", reuse)
            misfits = store.kv_misfits
            yield _counts("kv_misfits", "Values of K and V that their codec could not hold.", "kind", misfits)
            yield _bytes(worker.session, stats.pages_free, snapshot.card_bytes)
            if worker.session.engine.experts is not None:
                yield from _experts(worker.session.engine.experts)
            if store.lower is not None:
                yield _counts("store", "Of the tiers below.", "event", store.lower.events)
                yield _held("store_held", "By the tiers below.", "what", store.lower.held)


def _counts(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    """What only grows, by one label."""
    family = CounterMetricFamily(f"packhorse_{name}", text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _held(name: str, text: str, label: str, held: Mapping[str, int]) -> Metric:
    """What is there now, by one label."""
    family = GaugeMetricFamily(f"packhorse_{name}", text, labels=[label])
    for value, count in held.items():
        family.add_metric([value], count)
    return family


def page_bytes(store: KVStore) -> int:
    """Bytes of one page over all layers."""
    return store.storage_bytes["pages"] // max(1, store.capacity // store.page_len)


def accounts(session: Session, pages_free: int, card_bytes: int | None) -> dict[str, dict[str, int]]:
    """By consumer: bytes planned before loading, allocated by the engine, and of these in use now. `card`: of all of
    them by the driver's figure (card_bytes), under its cap."""
    store, sizes = session.engine.store, session.sizes
    parts, weights = store.storage_bytes, session.engine.runner.model.storage_bytes
    states = parts["states"] + parts.get("pending", 0)
    used = parts["pages"] - pages_free * page_bytes(store)
    if sizes is not None:
        weights -= sizes.host_bytes
    found = {"weights": {"allocated": weights, "used": weights}}
    found["pages"] = {"allocated": parts["pages"], "used": used}
    found["states"] = {"allocated": states, "used": states}
    if sizes is not None:
        planned = {"weights": sizes.weight_bytes, "pages": sizes.kv_bytes, "states": sizes.state_bytes}
        planned |= {"workspace": sizes.workspace_bytes, "experts": sizes.expert_bytes}
        for consumer, size in planned.items():
            found.setdefault(consumer, {})["planned"] = size
        if session.card is not None and card_bytes is not None:
            found["card"] = {"cap": session.card.cap, "planned": sizes.device_bytes, "used": card_bytes}
    return found


def _bytes(session: Session, pages_free: int, card_bytes: int | None) -> Metric:
    gauge = GaugeMetricFamily(
        "packhorse_bytes",
        "Bytes by tier and consumer: planned before loading, allocated, in use.",
        labels=["tier", "consumer", "kind"],
    )
    for consumer, kinds in accounts(session, pages_free, card_bytes).items():
        for kind, size in kinds.items():
            gauge.add_metric(["device", consumer, kind], size)
    if session.sizes is not None:
        gauge.add_metric(["host", "weights", "planned"], session.sizes.host_bytes)
    return gauge


def _experts(experts: StreamedExperts | FetchedExperts) -> Iterator[Metric]:
    text = "Experts that decode steps used, missed, kept and dropped."
    yield _counts("experts", text, "event", experts.counts)
    yield _held("experts_on_card", "Experts on the card now.", "where", experts.held)
    yield _counts("link_bytes", "Experts over the card's link.", "by", experts.link_bytes)
