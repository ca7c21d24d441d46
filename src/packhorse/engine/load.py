"""From a model's facts to an engine ready for requests."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread

import torch
from torch import Tensor

from packhorse.core.config import EngineConfig
from packhorse.core.errors import DoesNotFitError, UnsupportedCardError, UsageError
from packhorse.core.types import Request, SamplingParams
from packhorse.core.units import format_bytes
from packhorse.engine.card import CardMemory, room_on
from packhorse.engine.engine import Engine
from packhorse.engine.experts import (
    KEPT_FOR_TIERS,
    FetchedExperts,
    StreamedExperts,
    join_shared_experts,
    resident_table,
)
from packhorse.engine.graphs import Experts, StepGraphs
from packhorse.engine.heap import give_back_freed
from packhorse.engine.identity import model_identity
from packhorse.engine.kernels import compile_ahead
from packhorse.engine.output import Detokenizer
from packhorse.engine.runner import Runner
from packhorse.facts.hardware import HardwareFacts, probe
from packhorse.facts.model import ModelFacts
from packhorse.facts.nvml import driver_of
from packhorse.kernels.cuda.launch import card_arch, target_of, use_arch
from packhorse.kernels.cuda.nvrtc import MIN_ARCH
from packhorse.kernels.dispatch import FEW_TOKENS
from packhorse.layers.step import misfit
from packhorse.models.checkpoint import open_checkpoint
from packhorse.models.experts import ExpertLayout
from packhorse.models.loader import load_model
from packhorse.models.model import Model
from packhorse.plan.account import SEGMENT_LEN
from packhorse.plan.size import Sizes, card_flops, size_engine
from packhorse.quant.packed import aligned_bytes
from packhorse.store.arena import RING_BYTES, PagedArena, PinnedArena, PinnedTensor
from packhorse.store.durable import DurableStore
from packhorse.store.kv import KVStore
from packhorse.store.tier import StoreGeometry

DAY_S = 86400.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Loaded:
    """An engine and what was decided while it was made. notes: for people, to be printed at start. card: its memory,
    None on a CPU."""

    engine: Engine
    sizes: Sizes
    notes: tuple[str, ...]
    card: CardMemory | None = None


def load_engine(
    facts: ModelFacts,
    config: EngineConfig,
    detokenizer: Callable[[], Detokenizer],
    progress: Callable[[int, int], None] | None = None,
) -> Loaded:
    """Size the pools, load the weights, make the engine. progress(done, total) counts tensors. The engine is for the
    calling thread, whose current card becomes config's.

    Raises UsageError or UnsupportedCardError for a device, card or type that cannot be used, DriverTooOldError where
    as_arch asks for what the driver cannot read, DoesNotFitError before anything is loaded, and WeightsError or
    CorruptFileError from the checkpoint.
    """
    hardware = probe()
    check_device(config)
    if config.as_arch is not None:
        use_arch(config.as_arch)
    if config.device != "cpu" and card_arch(torch.device(config.device)) < MIN_ARCH:
        target_of(torch.device(config.device))  # raises, naming both
    threads = set_threads(config, hardware)
    dtype, why = choose_dtype(config, hardware)
    card = None if config.device == "cpu" else CardMemory(config.device, config.vram)
    host = host_bytes(config, hardware)
    if card is None:
        sizes = size_engine(facts, config, dtype, host)
    else:
        flops = card_flops(card_arch(card.device), card.num_sms)
        sizes = size_engine(facts, config, dtype, card.cap, host, card.runtime_bytes, flops)
    why_not = misfit(facts, DTYPES[dtype])
    if sizes.expert_slots is not None and why_not is not None:
        raise UsageError(
            f"{facts.name} does not fit on the card as a whole, and its experts cannot be streamed: {why_not}.",
            hint="Compute in 16 bits (--dtype), raise --vram, or use a smaller model.",
        )
    with room_on(card):
        engine, disk, stepping = _assemble(facts, config, detokenizer, sizes, card, progress)
    if config.as_arch is not None:
        why += f", which stands in for a card of compute capability {config.as_arch / 10}"
    planned = _planned(sizes, engine.store, disk, card)
    notes = (*facts.notes, f"{why}; {threads}", *sizes.notes, planned, *stepping)
    if engine.store.lower is not None and (trouble := engine.store.lower.trouble):
        notes += (f"Warning: what is read may not be kept: {trouble}.",)
    return Loaded(engine, sizes, notes, card)


def _assemble(
    facts: ModelFacts,
    config: EngineConfig,
    detokenizer: Callable[[], Detokenizer],
    sizes: Sizes,
    card: CardMemory | None,
    progress: Callable[[int, int], None] | None,
) -> tuple[Engine, DurableStore | None, tuple[str, ...]]:
    """Load the weights and make the engine; its disk tier, and what to say of its decode steps."""
    dtype = DTYPES[sizes.dtype]
    geometry = StoreGeometry.of(facts, dtype, config.page_len, sizes.kv)
    disk, identity = open_disk(facts, config, geometry, sizes)
    model, arena, pinning = _load_weights(facts, config, sizes, card, progress)
    give_back_freed()  # of tensors as the files have them
    experts = place_experts(model, arena, sizes)
    store = KVStore(
        geometry, num_pages=sizes.num_pages, sequences=config.sequences, snapshots=config.snapshots,
        snapshot_len=config.snapshot_len, exact=config.exact, device=config.device, segment_len=sizes.segment_len,
        joined=sizes.joined_segments, secret=b"" if disk is None else disk.secret, seed=identity,
    )  # fmt: skip
    if disk is not None or config.ram:
        # All that two identities of one model's files can differ in.
        how = f"{sizes.dtype} on {config.device.partition(':')[0]}{', exact' * config.exact}{', packed' * sizes.packed}"
        about = {"name": facts.name, "path": str(facts.path), "computes_in": how, "kv": sizes.kv}
        about["page_len"] = str(config.page_len)
        number = 0 if disk is None else disk.add_model(identity, about)
        store.add_tiers(ram_bytes=config.ram, disk=disk, model=number)
    graphs, stepping = step_graphs(model, store, experts, config, sizes)
    stepping = (*pinning, *stepping)
    engine = Engine(
        Runner(model, graphs=graphs), store, sequences=config.sequences, chunk_len=sizes.chunk_len,
        window=sizes.context, eos_ids=facts.eos_ids, detokenizer=detokenizer, sweep_len=sizes.sweep_len,
        max_decode_gap=config.max_decode_gap,
        experts=experts if isinstance(experts, StreamedExperts | FetchedExperts) else None,
    )  # fmt: skip
    if isinstance(experts, StreamedExperts):
        for layer in geometry.full_layers:
            experts.lend(partial(store.idle_pages, layer))
        if engine.sweeper is not None:
            experts.lend(engine.idle_residuals)
        if store.lower is not None:
            experts.keep_free(KEPT_FOR_TIERS)
    if card is not None:
        warm_up(engine, sizes)
        if isinstance(experts, StreamedExperts):
            experts.warm_up()
        card.hold(sizes.device_bytes)
    return engine, disk, stepping


def _load_weights(
    facts: ModelFacts,
    config: EngineConfig,
    sizes: Sizes,
    card: CardMemory | None,
    progress: Callable[[int, int], None] | None,
) -> tuple[Model, PinnedArena | PagedArena | None, tuple[str, ...]]:
    """The model, the host memory of its experts, and what to say of that. While the weights are read, pages are cleared
    and pinned and kernels are compiled."""
    dtype, device = DTYPES[sizes.dtype], config.device
    arena = PinnedArena(sizes.pinned_bytes, wait=False) if sizes.pinned_bytes else None
    wanted = (facts, dtype, sizes.kv, config.sequences, arena is not None, torch.device(device))
    failed = Event()
    compiling = Thread(target=compile_ahead, args=(failed, *wanted))
    if card is not None:
        compiling.start()
    try:
        model = load_model(
            facts,
            open_checkpoint(facts),
            dtype=dtype,
            device=device,
            exact=config.exact,
            packed=sizes.packed,
            experts=None if card is None else partial(_expert_memory, arena, device),
            place_experts=None if arena is None else arena.copy_from,
            progress=progress,
        )
        memory, pinning = host_arena(arena)
        if card is not None:
            compiling.join()
            pinning += pin_embedding(model)
    except BaseException:
        failed.set()
        if arena is not None:
            arena.close()
        raise
    return model, memory, pinning


def host_arena(arena: PinnedArena | None) -> tuple[PinnedArena | PagedArena | None, tuple[str, ...]]:
    """The experts' host memory as it can be used, once it is pinned, and what to say where the system did not pin it:
    it stays where it is then."""
    if arena is None:
        return None, ()
    try:
        arena.wait()
    except DoesNotFitError as error:
        ring = format_bytes(RING_BYTES)
        note = f"{error} Experts pass through {ring} of pinned memory instead, and each layer waits for them: slower"
        return PagedArena(arena.bytes), (note,)
    return arena, ()


def pin_embedding(model: Model) -> tuple[str, ...]:
    """Have the card look tokens up in host memory by itself; what to say where the system does not pin that."""
    try:
        model.embed_from_host(PinnedTensor)
    except DoesNotFitError as error:
        return (f"{error} The host looks tokens up instead, and each step waits for it: slower",)
    return ()


def _expert_memory(arena: PinnedArena | None, device: str, layout: ExpertLayout) -> Tensor:
    """Where the routed experts are loaded to: their home in host memory, or the card."""
    if arena is not None:
        return arena.bytes[: layout.total_bytes]
    return aligned_bytes(layout.total_bytes, device)


def _planned(sizes: Sizes, store: KVStore, disk: DurableStore | None, card: CardMemory | None) -> str:
    """What was planned and what was taken, for people."""
    planned = f"planned {format_bytes(sizes.total_bytes)}: weights {format_bytes(sizes.weight_bytes)}, KV "
    planned += f"{format_bytes(sizes.kv_bytes)} in {sizes.kv} for {store.capacity:,} tokens in pages of "
    planned += f"{store.page_len}"
    if disk is not None:
        held = format_bytes(disk.usage()["bytes"])
        planned += f"; the store {disk.folder} holds {held} of {format_bytes(disk.quota)}"
        if disk.counters["emptied"]:
            planned += ", and was emptied: it was damaged or of an older layout"
    if card is not None:
        planned += f"; the card's driver counts {format_bytes(card.used_bytes())} of {format_bytes(card.cap)}"
    return planned


def warm_up(engine: Engine, sizes: Sizes) -> None:
    """Run every kind of shape once, the largest among them, so that all that is ever compiled, loaded or taken of a
    card is there before requests come: prompts for which there are kernels of their own, of 8 and of 16 tokens, and,
    beside an answer where sequences allow it, one that is longer than attention reads at once."""
    vocab_size = engine.runner.model.facts.vocab_size
    length = max(1, min(sizes.context - 9, SEGMENT_LEN + sizes.chunk_len))
    for lengths in ((min(8, length),), (min(FEW_TOKENS, length), length)):
        for name, num in enumerate(lengths):
            ids = tuple(token % vocab_size for token in range(num))
            engine.add(Request(f"warm-up {name}", ids, SamplingParams(max_tokens=8), store=False))
        while engine.has_work:
            for event in engine.step():
                if event.error is not None:
                    raise event.error


def place_experts(
    model: Model, arena: PinnedArena | PagedArena | None, sizes: Sizes
) -> Experts | FetchedExperts:
    """Where decode steps find the routed experts of a model on a card; None where they have no kernels for them."""
    if model.experts is None:
        return None
    join_shared_experts(model)
    if arena is None:
        return resident_table(model.experts)
    assert sizes.expert_slots is not None
    if isinstance(arena, PagedArena):
        return FetchedExperts(model, arena, sizes.expert_slots)
    return StreamedExperts(model, arena, sizes.expert_slots)


def step_graphs(
    model: Model, store: KVStore, experts: Experts | FetchedExperts, config: EngineConfig, sizes: Sizes
) -> tuple[StepGraphs | None, tuple[str, ...]]:
    """Captured decode steps where the device is a card and there are kernels for the model, and what to say of it."""
    if config.device == "cpu" or config.exact:
        return None, ()
    if isinstance(experts, FetchedExperts):
        return None, (
            "decode steps run kernel by kernel, without graphs: experts are fetched layer by layer",
        )
    try:
        graphs = StepGraphs(model, store, experts, sequences=config.sequences, max_len=sizes.context)
        return graphs, ("decode steps are captured graphs",)
    except UsageError as error:  # shapes for which there are no kernels: the layers run everywhere
        return None, (f"decode steps run kernel by kernel, without graphs: {error}",)


def open_disk(
    facts: ModelFacts, config: EngineConfig, geometry: StoreGeometry, sizes: Sizes
) -> tuple[DurableStore | None, bytes]:
    """The store that `config` names, and what this engine's pages are of, for which the model's files are read
    where they are new or have changed. Raises what DurableStore and model_identity raise."""
    if config.store is None:
        return None, b""
    max_age = None if config.keep_days is None else config.keep_days * DAY_S
    disk = DurableStore(config.store, quota=config.disk, max_age=max_age)
    known = config.store / "files.json"
    identity = model_identity(
        facts, geometry, known, device=config.device, exact=config.exact, packed=sizes.packed
    )
    return disk, identity


def check_device(config: EngineConfig) -> None:
    """Raises UsageError where the device that was asked for is not there: there is no silent fallback."""
    if config.device != "cpu" and not torch.cuda.is_available():
        raise UsageError(
            f"The device {config.device} was asked for, and torch {torch.__version__} sees no CUDA card{driver_of()}.",
            hint="Install a CUDA build of torch that the driver runs (or a newer driver), or use --device cpu.",
        )
    index = int(config.device.partition(":")[2] or 0)
    if config.device != "cpu" and index >= torch.cuda.device_count():
        raise UsageError(
            f"{config.device} was asked for, and there are {torch.cuda.device_count()} CUDA cards.",
            hint="Cards are numbered from 0.",
        )


def set_threads(config: EngineConfig, hardware: HardwareFacts) -> str:
    """Set torch's CPU threads for the whole process; how many and why, for people.

    `config.threads`, else OMP_NUM_THREADS, cut to the processors there are, else the physical cores. Raises
    UsageError where config asks for more than there are processors.
    """
    threads, why = config.threads or hardware.num_physical_cores, ""
    wished = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if config.threads is None and wished.isdecimal() and int(wished):
        threads, why = min(int(wished), hardware.num_cores), f", OMP_NUM_THREADS is {wished}"
    if threads > hardware.num_cores:
        raise UsageError(
            f"{threads} threads were asked for, and this process may use {hardware.num_cores} processors.",
            hint=f"Give --threads at most {hardware.num_cores}: more of them wait for each other.",
        )
    torch.set_num_threads(threads)
    return f"{threads} thread{'s' * (threads > 1)}{why}"


def choose_dtype(config: EngineConfig, hardware: HardwareFacts) -> tuple[str, str]:
    """The compute type and why. Raises UnsupportedCardError for bf16 on a card without it."""
    if config.exact:
        return "fp32", "computes in fp32, exact mode"
    if config.dtype == "bf16" and config.device != "cpu":
        arch = card_arch(torch.device(config.device))
        if arch < 80:
            raise UnsupportedCardError(
                f"bf16 was asked for, and {config.device} has compute capability {arch / 10}; bf16 needs 8.0.",
                hint="Leave out --dtype, or give --dtype fp16.",
            )
    if config.dtype != "auto":
        return config.dtype, f"computes in {config.dtype} on {config.device}"
    cpu = config.device == "cpu"
    if hardware.has_native_bf16 if cpu else card_arch(torch.device(config.device)) >= 80:
        return "bf16", f"computes in bf16 on {config.device}"
    dtype = "fp32" if cpu else "fp16"
    return dtype, f"computes in {dtype} on {config.device}, which has no bf16 products"


def host_bytes(config: EngineConfig, hardware: HardwareFacts) -> int:
    """Host memory that weights may take. Raises DoesNotFitError where `config.ram` is not there."""
    if config.ram > hardware.ram_available:
        raise DoesNotFitError(
            f"{format_bytes(config.ram)} of host memory were asked for, and {format_bytes(hardware.ram_available)} "
            "are available.",
            asked=config.ram,
            available=hardware.ram_available,
            hint="Lower --ram.",
        )
    return hardware.ram_available - config.ram
