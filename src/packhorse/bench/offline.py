"""How fast a model reads prompts and decodes here, at given contexts and caps, beside what each link allows.

    ceilings -> for each cap: load -> for each context: read prompts, tails -> for each number of sequences: decode

Times are of whole engine steps, from the scheduler to the sampled ids. Tokens are random, so that experts are wanted
as the routers of the checkpoint have it and do not settle in the loop that a model without sense falls into.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import psutil
import torch

from packhorse.bench.card import link_rates, product_rate
from packhorse.bench.doctor import memory_rates, read_rate
from packhorse.bench.serve import percentiles
from packhorse.core.config import EngineConfig
from packhorse.core.errors import ComputeError, UsageError
from packhorse.core.types import PAGE_LEN, Event, Request, SamplingParams
from packhorse.core.units import MIB, round_up
from packhorse.engine.engine import Engine
from packhorse.engine.load import DTYPES, Loaded, check_device, choose_dtype, load_engine, set_threads
from packhorse.engine.schedule import Sequence as LiveSequence
from packhorse.engine.schedule import SequenceState
from packhorse.facts.hardware import probe
from packhorse.facts.model import ModelFacts
from packhorse.facts.recipes import Recipe
from packhorse.kernels.cuda.launch import use_arch
from packhorse.models.checkpoint import open_checkpoint
from packhorse.plan import account
from packhorse.plan.place import Footprint
from packhorse.plan.predict import dense_bytes, prefill_flops, touched_share
from packhorse.plan.size import check_window
from packhorse.store.kv import KVStore, StoredSequence

VERSION = 1
"""Of the document that `measure` gives: docs/bench.md."""
SHARED = ("device", "as_arch", "dtype", "kv", "weights", "exact", "threads")
"""Fields of EngineConfig that are part of a run's settings."""
FIFTHS = 5
"""Parts into which the steps are cut: how much their medians differ says what is noise."""
FILL_LEN = 16_384
"""Tokens of random K and V that are made; a pool repeats them."""
DISK_BYTES = 256 * MIB
TAIL_RUNS = 3
"""Follow-ups of one length that are timed."""
ANSWER_LEN = 8192
"""Tokens that the answer may have which is generated while a prompt is read."""
BESIDE_LEN = 256
"""Tokens of its own prompt."""
LOST = 2 * PAGE_LEN
"""Tokens of a prompt that was kept which are read again, and one more."""
Rates = dict[str, float]


@dataclass(frozen=True)
class Settings:
    """What is measured. contexts: tokens held before decoding. sequences: at once. decode: steps that count, after
    `warmup` that do not. vram: caps, each a load of its own; None: none. fill_kv: nothing is read, pages hold random
    K and V and states are zero. own_tokens: each sequence goes on from what it drew. tails: tokens of follow-ups to
    each context, timed to their first token. beside: an answer is generated while the longest context is
    read once more.

    Raises UsageError for what means nothing."""

    contexts: tuple[int, ...] = (4096,)
    sequences: tuple[int, ...] = (1,)
    decode: int = 64
    warmup: int = 8
    vram: tuple[int | None, ...] = (None,)
    fill_kv: bool = False
    own_tokens: bool = False
    tails: tuple[int, ...] = ()
    beside: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("contexts", "sequences"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise UsageError(f"{name} are {values}.", hint="Give numbers from 1 on, by commas.")
        if self.tails and min(self.tails) < 1:
            raise UsageError(f"tails are {self.tails}.", hint="Give numbers from 1 on, by commas.")
        if self.beside and self.fill_kv:
            hint = "Leave out one of --beside and --fill-kv."
            raise UsageError("A prompt is to be read beside an answer, and --fill-kv reads none.", hint=hint)
        if self.decode < FIFTHS or self.warmup < 0:
            hint = f"Time at least {FIFTHS} steps."
            raise UsageError(f"decode is {self.decode}, warmup {self.warmup}.", hint=hint)

    @property
    def room(self) -> int:
        """Tokens that a sequence may come to hold beyond its context."""
        return max((self.warmup + self.decode + 2, *(tail + 1 for tail in self.tails)))


def measure(
    facts: ModelFacts,
    config: EngineConfig,
    settings: Settings,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The figures as a document (docs/bench.md), without what the caller adds. config: device, types and codec; the
    pools follow from the settings. say: gets a line for each part that is done.

    Raises what loading raises, DoesNotFitError for contexts that do not fit among it.
    """
    open_checkpoint(facts)  # what cannot be loaded is refused before anything is measured
    configs = [_config(facts, config, settings, vram) for vram in settings.vram]
    ceilings = measure_ceilings(facts, config)
    rates = [f"{name} {rate / 1e9:.2f}" for name, rate in ceilings.items() if name != "products"]
    say(f"ceilings: {', '.join(rates)} GB/s, products {ceilings['products'] / 1e12:.3g} TFLOP/s")
    loads = []
    for sized in configs:
        loads.append(_measure_load(facts, sized, settings, ceilings, say) | {"vram": sized.vram})
        gc.collect()  # the engine and its pools, before the next one
        if config.device != "cpu":
            torch.cuda.empty_cache()
    asked = asdict(settings) | {name: getattr(config, name) for name in SHARED}
    model = {"name": facts.name, "path": str(facts.path)}
    return {"version": VERSION, "model": model, "settings": asked, "ceilings": ceilings, "loads": loads}


def measure_ceilings(facts: ModelFacts, config: EngineConfig) -> Rates:
    """Bytes a second that plain reads reach: `vram` or `memory`, `host` (pinned, by kernels), copies, `disk` (of the
    model's own files); operations a second of dense products: `products`."""
    hardware = probe()
    check_device(config)
    if config.as_arch is not None:
        use_arch(config.as_arch)
    device, dtype = torch.device(config.device), DTYPES[choose_dtype(config, hardware)[0]]
    set_threads(config, hardware)
    threads, on_card = torch.get_num_threads(), device.type == "cuda"
    rates = link_rates(device) if on_card else {"memory": memory_rates(threads)[threads]}
    files = [facts.path] if facts.path.is_file() else list(facts.path.glob("*.safetensors"))
    largest = max(files, key=lambda file: file.stat().st_size)
    rates["disk"] = read_rate(largest, DISK_BYTES, 4 * MIB)
    rates["products"] = product_rate(device, dtype, 8192 if on_card else 1024)
    if on_card:
        torch.cuda.empty_cache()
    return rates


def _config(facts: ModelFacts, config: EngineConfig, settings: Settings, vram: int | None) -> EngineConfig:
    """Pools for the longest context and the most sequences."""
    longest, most = max(settings.contexts) + settings.room, max(settings.sequences)
    tokens, snapshots = most * round_up(longest, config.page_len), max(config.snapshots, 2 * most)
    if settings.beside:
        most, tokens = most + 1, tokens + round_up(longest, config.page_len) + ANSWER_LEN
    pools: dict[str, Any] = {
        "context": longest,
        "sequences": most,
        "kv_tokens": tokens,
        "snapshots": snapshots,
    }
    sized = replace(config, vram=vram, **pools)
    check_window(facts, sized)
    return sized


def _measure_load(
    facts: ModelFacts, config: EngineConfig, settings: Settings, ceilings: Rates, say: Callable[[str], None]
) -> dict[str, Any]:
    """All that is measured of one loaded engine."""
    began = time.perf_counter()
    loaded = load_engine(facts, config, Mute)
    load_s, notes = time.perf_counter() - began, list(loaded.notes)
    run = Run(loaded, config, settings, ceilings)
    prefill, decode, tails = [], [], []
    for context in sorted(settings.contexts):
        prompts: list[tuple[int, ...]] = []
        reads: list[tuple[float, int]] = []
        for sequences in sorted(settings.sequences):
            new = [run.prompt(context, index) for index in range(len(prompts), sequences)]
            reads += [] if settings.fill_kv else [run.read(prompt) for prompt in new]
            prompts += new
            decode.append(run.decode(context, prompts))
            say(f"{context:,} tokens, {sequences} at once: {decode[-1]['tok_s']:.1f} tok/s")
        if reads:
            prefill.append(run.prefill_row(context, reads))
            say(f"{context:,} tokens: read at {prefill[-1]['tok_s']:.0f} tok/s")
        for tail in settings.tails:
            tails.append(run.tail(context, prompts[0], tail))
            say(f"{context:,} tokens and {tail:,}: first token in {min(tails[-1]['seconds']):.3f} s")
        run.engine.store.clear()
    beside = run.beside(max(settings.contexts)) if settings.beside else None
    taken = memory(loaded, config)
    run.engine.close()
    rows = {"prefill": prefill, "tails": tails, "beside": beside, "decode": decode}
    return {"load_s": load_s, "notes": notes, "memory": taken} | rows


def memory(loaded: Loaded, config: EngineConfig) -> dict[str, int | None]:
    """planned_bytes: of the device, before loading. used_bytes: of this process, by the driver's figure, or resident
    on a CPU. reserved_bytes: by torch's allocator. host_bytes: of a card's weights, planned in host memory."""
    found: dict[str, int | None] = {"planned_bytes": loaded.sizes.total_bytes + loaded.sizes.runtime_bytes}
    if config.device == "cpu":
        return found | {"used_bytes": psutil.Process().memory_info().rss, "reserved_bytes": None}
    assert loaded.card is not None
    reserved = torch.cuda.memory_reserved(torch.device(config.device))
    used = loaded.card.used_bytes()
    return found | {"used_bytes": used, "reserved_bytes": reserved, "host_bytes": loaded.sizes.host_bytes}


def expert_counts(engine: Engine) -> dict[str, int] | None:
    """What the kernels of captured steps counted of routed experts since loading: `used`, each once a layer and step,
    `bytes` read of them, `host_bytes` of these from host memory, `kept_bytes` of these kept in the card's. None where
    steps are not captured or the model has no experts."""
    graphs, model = engine.runner.graphs, engine.runner.model
    if graphs is None or not any(model.facts.moe_layers):
        return None
    used, read, _, host, kept = graphs.counters.tolist()
    if model.experts is not None and model.experts.shared is not None:
        # The kernels count the shared expert too, which every step reads in every layer: it is no routed one.
        shared = graphs.num_steps * len(model.experts.layout.layers)
        used, read = used - shared, read - shared * model.experts.layout.block_bytes
    return {"used": used, "bytes": read, "host_bytes": host, "kept_bytes": kept}


class Run:
    """One loaded engine under measurement."""

    def __init__(self, loaded: Loaded, config: EngineConfig, settings: Settings, ceilings: Rates) -> None:
        self.engine, self.settings, self.ceilings = loaded.engine, settings, ceilings
        facts, sizes = loaded.engine.runner.model.facts, loaded.sizes
        recipe = Recipe("as loaded", sizes.dtype, from_files=sizes.packed)
        self._footprint, self._kv = Footprint(facts, recipe, 0 if config.device == "cpu" else 1), sizes.kv
        self._own = "memory" if config.device == "cpu" else "vram"
        self._random = random.Random(settings.seed)
        self._number = 0
        if settings.fill_kv:
            fill(self.engine)

    def prompt(self, context: int, index: int) -> tuple[int, ...]:
        """Random tokens, others for each context and index."""
        draw = random.Random(f"{self.settings.seed} {context} {index}")
        return tuple(draw.choices(range(self._footprint.facts.vocab_size), k=context))

    def read(self, prompt: tuple[int, ...], *, store: bool = True, held: int = 0) -> tuple[float, int]:
        """Seconds from a prompt to its first token, alone, and bytes of experts that crossed the link for it; what was
        read is kept, or (store) is not. Raises ComputeError where of `held` first tokens, which were read before,
        some have to be read again."""
        before, cached = self._link_bytes, 0
        self.engine.add(self._request(prompt, 1, marks=(len(prompt),), store=store))
        began = time.perf_counter()
        while self.engine.has_work:
            for event in self._step():
                cached = event.usage.cached_len
        seconds = time.perf_counter() - began
        if not self.settings.fill_kv:
            _check_kept(held, held - cached)
        return seconds, self._link_bytes - before

    def tail(self, context: int, prompt: tuple[int, ...], length: int) -> dict[str, Any]:
        """A row of the document: a prompt that was read, and `length` tokens more, to the first token."""
        if self.settings.fill_kv:
            self.engine.store.held = context  # type: ignore[attr-defined]
        try:
            runs = [
                self.read(prompt + self.prompt(length, -1 - run), store=False, held=context)
                for run in range(TAIL_RUNS)
            ]
        finally:
            if self.settings.fill_kv:
                self.engine.store.held = None  # type: ignore[attr-defined]
        seconds, moved = zip(*runs, strict=True)
        return {"context": context, "tail": length, "seconds": list(seconds), "link_bytes": max(moved)}

    def beside(self, context: int) -> dict[str, Any]:
        """Of the document: seconds between the tokens of one answer while another prompt is read, the gap that its end
        falls into among them, and until that one's first token."""
        length = min(BESIDE_LEN, context)
        room = min(ANSWER_LEN, context + self.settings.room) - length
        answer = self._request(self.prompt(length, 0), room, store=False)
        self.engine.add(answer)
        while not any(event.token_ids for event in self._step()):
            pass
        other = self._request(self.prompt(context, -1), 1, store=False)
        self.engine.add(other)
        began = last = time.perf_counter()
        gaps: list[float] = []
        seconds: float | None = None
        tokens = 0
        while seconds is None or not tokens:
            tokens = sum(len(event.token_ids) for event in self._step() if event.request_id == answer.id)
            now = time.perf_counter()
            if tokens:
                gaps.append(now - last)
                last = now
            if seconds is None and self.engine.scheduler.find(other.id) is None:
                seconds = now - began
            if not self.engine.has_work:  # the answer has come to its end before
                break
        self.engine.cancel(answer.id)
        asked = self.engine.max_decode_gap
        return {"context": context, "seconds": seconds, "gap_s": percentiles(gaps), "asked_gap_s": asked}

    @property
    def _link_bytes(self) -> int:
        """Bytes of layers of experts that crossed the link for prompts so far."""
        experts = self.engine.experts
        return 0 if experts is None else experts.link_bytes["prompts"]

    def decode(self, context: int, prompts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
        """A row of the document: decode steps of as many sequences as there are prompts."""
        engine, settings = self.engine, self.settings
        requests = [self._request(prompt, settings.room, store=False) for prompt in prompts]
        for request in requests:
            engine.add(request)
        sequences = self._start(requests)
        self._steps(sequences, settings.warmup)
        before, disk = expert_counts(engine), _disk_bytes()
        times = self._steps(sequences, settings.decode)
        after, disk = expert_counts(engine), _disk_bytes() - disk
        for request in requests:
            engine.cancel(request.id)
        experts = None
        if before is not None and after is not None:
            experts = {name: (after[name] - before[name]) / settings.decode for name in after}
            experts["hit_rate"] = 1 - experts["host_bytes"] / experts["bytes"]
        row = {"context": context, "sequences": len(prompts), "filled": settings.fill_kv, "experts": experts}
        read = self._step_bytes(context, len(prompts), experts) | {"disk": disk / settings.decode}
        return row | self._figures(len(prompts), times, read)

    def _step(self) -> list[Event]:
        events = self.engine.step()
        for event in events:
            if event.error is not None:
                raise event.error
        return events

    def _steps(self, sequences: Sequence[LiveSequence], num: int) -> list[float]:
        """Seconds of each of `num` decode steps."""
        times = []
        for _ in range(num):
            began = time.perf_counter()
            self._step()
            times.append(time.perf_counter() - began)
            if not self.settings.own_tokens:
                for sequence in sequences:
                    sequence.generated[-1] = self._random.randrange(self._footprint.facts.vocab_size)
        return times

    def prefill_row(self, context: int, reads: Sequence[tuple[float, int]]) -> dict[str, Any]:
        """A row of the document: prompts of `context` tokens that were read one after the other."""
        seconds = [read[0] for read in reads]
        moved = statistics.median(read[1] for read in reads) / context
        median, spread = statistics.median(seconds), [context / max(seconds), context / min(seconds)]
        flops = prefill_flops(self._footprint, 0, context) / median
        row = {"context": context, "seconds": seconds, "tok_s": context / median, "range_tok_s": spread}
        row |= {"link_bytes_token": moved}
        return row | {"flops_s": flops, "ratio": flops / self.ceilings["products"]}

    def _figures(self, sequences: int, times: list[float], read: Rates) -> dict[str, Any]:
        """Speed, and bytes of each link (`read`, a step) beside its ceiling. A step's is the sum over the links."""
        mean = statistics.fmean(times)
        cuts = [len(times) * part // FIFTHS for part in range(FIFTHS + 1)]
        fifths = [statistics.median(times[a:b]) for a, b in itertools.pairwise(cuts)]
        least = sum(size / self.ceilings[link] for link, size in read.items())
        links = {
            link: {"bytes_step": size, "bytes_s": size / mean, "ratio": size / mean / self.ceilings[link]}
            for link, size in read.items()
        }
        spread = [sequences / max(fifths), sequences / min(fifths)]
        speed = {"tok_s": sequences / mean, "ceiling_tok_s": sequences / least, "ratio": least / mean}
        return speed | {"range_tok_s": spread, "step_s": percentiles(times), "links": links}

    def _step_bytes(self, context: int, sequences: int, experts: Rates | None) -> Rates:
        """Bytes that a step must read, by link: weights once, experts as counted (else as uniform routing has it),
        KV, and states read and written."""
        footprint = self._footprint
        facts, held = footprint.facts, context + self.settings.warmup + self.settings.decode / 2
        own = float(dense_bytes(footprint)) + 2 * sequences * footprint.snapshot_bytes
        own += sequences * held * account.kv_token_bytes(facts, self._kv)
        moving = footprint.classes.get(footprint.mover, 0)
        if experts is None:
            return {self._own: own + touched_share(facts, sequences) * moving}
        return {self._own: own + experts["bytes"] - experts["host_bytes"], "host": experts["host_bytes"]}

    def _request(self, prompt: tuple[int, ...], max_tokens: int, **options: Any) -> Request:
        self._number += 1
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return Request(f"bench {self._number}", prompt, sampling, **options)

    def _start(self, requests: Sequence[Request]) -> list[LiveSequence]:
        """Step until all decode. Raises ComputeError where a prompt that was read has to be read again: then the
        steps of some would be timed beside the chunks of others."""
        while True:
            self._step()
            found = [self.engine.scheduler.find(request.id) for request in requests]
            sequences = [sequence for sequence in found if sequence is not None]
            for sequence in sequences:
                if sequence.handle is not None and not self.settings.fill_kv:
                    _check_kept(sequence.prompt_len, sequence.prompt_len - sequence.usage.cached_len)
            if all(sequence.state is SequenceState.DECODING for sequence in sequences):
                return sequences


def _check_kept(held: int, lost: int) -> None:
    """Raises ComputeError where more of a prompt that was read has to be read again than always has."""
    if lost >= LOST:
        hint = "Measure fewer sequences at once, or give --fill-kv."
        raise ComputeError(f"{lost:,} tokens of a prompt of {held:,} were not kept.", hint=hint)


def fill(engine: Engine) -> None:
    """Random K and V in all pages of the pool, and an engine that takes every prompt but its last token for read."""
    store = engine.store
    codec = store.geometry.codec
    block: torch.Tensor | None = None
    for layer in store.geometry.full_layers:
        pages = store.layer_memory(layer).pages
        assert pages is not None
        num = min(len(pages), FILL_LEN // store.page_len)
        if block is None:
            shape = (num * store.page_len, codec.num_kv_heads, codec.head_dim)
            k, v = (torch.randn(shape, device=pages.device) for _ in range(2))
            codec.bind(pages).write(range(num), 0, k, v)
            block = pages[:num].clone()
        for part in pages.split(num):
            part.copy_(block[: len(part)])
    engine.store = cast(KVStore, _Filled(store))


class _Filled:
    """A store whose sequences begin at the last token of their prompts, or (held) behind so many tokens."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self.held: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open(self, *args: Any, **options: Any) -> StoredSequence | None:
        """See KVStore."""
        sequence = self._store.open(*args, **options)
        if sequence is not None:
            sequence.position, sequence.wanted = self.held or sequence.prompt_len - 1, []
        return sequence


class Mute:
    """A detokenizer of tokens that mean nothing."""

    def add(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def _disk_bytes() -> int:
    """Read by this process from a disk so far; 0 where the system does not count."""
    counters = getattr(psutil.Process(), "io_counters", None)
    return 0 if counters is None else counters().read_bytes
