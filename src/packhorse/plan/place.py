"""Where everything goes: one model, one machine, one job -> bytes by tier and consumer, or what is missing.

    card:  runtime | weights | states | KV | working space | expert slots, buffers of two layers
    host:  process | embeddings | every expert, pinned | documents kept for reuse
    disk:  weights | documents kept for reuse

One card is what the engine's own sizes (plan.size) say. What the engine does not do is modelled beside it: several
cards, KV in host memory, draft heads, and models without experts that are larger than the card, whose MLP rows move in
frames. Pure arithmetic; with chunks of one length more memory never leaves fewer units (experts, frames) on a card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from packhorse.core import formats
from packhorse.core.config import EngineConfig
from packhorse.core.errors import DoesNotFitError
from packhorse.core.types import PAGE_LEN
from packhorse.core.units import MIB, ceil_div, round_up
from packhorse.facts.machine import Machine
from packhorse.facts.model import ModelFacts
from packhorse.facts.packed import packed_matrices
from packhorse.facts.recipes import Recipe, as_stored
from packhorse.facts.weights import body_params
from packhorse.plan import account
from packhorse.plan.account import FRAME_BYTES
from packhorse.plan.size import CHUNK_LEN, SPARES, Sizes, size_engine, workspace_bytes

SWEEPS = (2048, 4096, 8192, 16384, 32768, 65536)
"""Tokens that may pass the layers in one sweep, where it is modelled."""
SNAPSHOT_LEN, SNAPSHOTS = EngineConfig.snapshot_len, EngineConfig.snapshots
FEW_SNAPSHOTS = 4
"""Snapshots on a card that has no room for more beside a model without experts."""
NOT_LENT = 384 * MIB
"""Of the working space, what experts never get between prompts: as engine.experts has it."""
ANY_CONTEXT = 2**40
"""Windows that YaRN stretches are the caller's to check."""


@dataclass(frozen=True)
class Footprint:
    """A model under a recipe, cut for `num_cards` cards (0: all in host memory)."""

    facts: ModelFacts
    recipe: Recipe
    num_cards: int

    @cached_property
    def stored(self) -> ModelFacts:
        """The model as files hold it that the recipe made, of any context: what the engine would be sized for."""
        return replace(as_stored(self.facts, self.recipe), context=ANY_CONTEXT)

    @cached_property
    def parts(self) -> list[ModelFacts]:
        return account.layer_slices(self.facts, max(1, self.num_cards))

    @cached_property
    def classes(self) -> dict[str, int]:
        """Bytes of all weights by class."""
        held = Recipe(self.recipe.name, self.recipe.dtype, from_files=self.recipe.is_packed)
        return account.recipe_bytes(self.stored, held, cpu=self.num_cards == 0)

    @cached_property
    def part_classes(self) -> list[dict[str, int]]:
        """The same for each card's layers; embeddings and head belong to none of them."""
        ends = ("embeddings", "lm_head")
        if self.num_cards <= 1:
            return [{kind: size for kind, size in self.classes.items() if kind not in ends}]
        # Files name no cards: each gets its part of what they hold.
        plain = replace(self.recipe, from_files=False)
        cut = [account.recipe_bytes(part, plain) for part in self.parts]
        whole = account.recipe_bytes(self.facts, plain)
        return [
            {kind: size * self.classes[kind] // whole[kind] for kind, size in one.items() if kind not in ends}
            for one in cut
        ]

    @property
    def mover(self) -> str:
        """The class that moves between tiers."""
        return "experts" if self.facts.moe is not None else "mlp"

    @cached_property
    def unit_bytes(self) -> int:
        """What moves at once: an expert, or a frame of rows."""
        moe = self.facts.moe
        if moe is None:
            return FRAME_BYTES
        return self.classes["experts"] // (sum(self.facts.moe_layers) * moe.num_experts)

    @cached_property
    def snapshot_bytes(self) -> int:
        return account.snapshot_bytes(self.facts, self.recipe.dtype)

    @cached_property
    def draft_bytes(self) -> int:
        return account.draft_bytes(self.facts, self.recipe)

    @cached_property
    def body_params(self) -> int:
        """Values that one token is multiplied with, without the output head."""
        return body_params(self.facts)

    @cached_property
    def expert_params(self) -> int:
        """Those of them in routed experts."""
        facts, moe = self.facts, self.facts.moe
        return (
            0 if moe is None else sum(facts.moe_layers) * moe.top_k * 3 * facts.hidden_size * moe.expert_dim
        )

    @cached_property
    def packed_values(self) -> int:
        """Values of packed matrices that prompts unpack: neither the embeddings' nor, in chunks up to LONGEST_CHUNK,
        routed experts'."""
        found = packed_matrices(self.stored) if self.recipe.is_packed else ()
        return sum(matrix.num_values for matrix in found if matrix.kind not in ("embeddings", "experts"))

    @cached_property
    def file_bytes(self) -> int:
        """On disk: of the files, where there are some in this recipe, else as the recipe would make them."""
        kept = self.recipe.from_files or not self.recipe.is_packed
        return (kept and self.facts.file_bytes) or sum(self.classes.values())

    @property
    def layer_bytes(self) -> int:
        """All weights but the embeddings."""
        return sum(self.classes.values()) - self.classes["embeddings"]

    @property
    def active_params(self) -> int:
        """The same with the output head."""
        return self.body_params + self.facts.vocab_size * self.facts.hidden_size

    @property
    def head_bytes(self) -> int:
        """The output head: the embeddings where these are tied."""
        return self.classes["embeddings" if self.facts.tied else "lm_head"]


@dataclass(frozen=True)
class Job:
    """What is asked of a machine. context: tokens of each of `sequences`; host_kv: how many of them keep their KV in
    host memory while the others' is on the card. draft: tokens guessed ahead a step by the model's own head.
    chunk_len: prompt tokens of a step, None for as many as the engine takes."""

    context: int
    sequences: int
    kv: str
    draft: int = 0
    host_kv: int = 0
    chunk_len: int | None = None

    @property
    def device_kv(self) -> int:
        """Tokens of each sequence whose KV is on the card: the first ones."""
        return max(0, self.context - self.host_kv)


@dataclass(frozen=True)
class Tier:
    """One memory: what may be used of it, and by whom."""

    cap_bytes: int
    items: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.items.values())


@dataclass(frozen=True)
class Placement:
    """tiers: device0 .., host, disk. Of `num_units` units `on_device` are on cards while tokens are generated
    and `kept` while a prompt is swept; `in_host` have a copy in host memory, the others are read from disk.
    sweep_len: tokens of one sweep, or chunk of chunk_len. host_document, disk_document: a whole context can be kept
    there. config: the engine's settings that are this placement, of which `sizes` are the pools; None where it is
    modelled."""

    job: Job
    tiers: Mapping[str, Tier]
    num_units: int = 0
    on_device: int = 0
    kept: int = 0
    in_host: int = 0
    sweep_len: int = 0
    chunk_len: int = CHUNK_LEN
    host_document: bool = False
    disk_document: bool = False
    config: EngineConfig | None = None
    sizes: Sizes | None = None

    @property
    def shortfall(self) -> dict[str, int]:
        """Bytes missing, by tier; empty where all fits."""
        return {
            name: tier.total_bytes - tier.cap_bytes
            for name, tier in self.tiers.items()
            if tier.total_bytes > tier.cap_bytes
        }

    @property
    def fits(self) -> bool:
        return all(tier.total_bytes <= tier.cap_bytes for tier in self.tiers.values())

    @property
    def num_sweeps(self) -> int:
        """Sweeps that read a whole context."""
        return ceil_div(self.job.context, self.sweep_len)


@dataclass(frozen=True)
class _Card:
    """One card once its fixed bytes are known. frame: bytes; per_frame: units in one; room: bytes for frames.
    chunk_bytes: what a chunk of a prompt needs of it."""

    items: dict[str, int]
    num_units: int
    per_frame: int
    frame: int
    room: int
    chunk_bytes: int


@dataclass(frozen=True)
class _Share:
    """How the room of a card is used with one length of sweep. used_bytes: more than there is where it fails."""

    on_device: int
    kept: int
    used_bytes: int


def place(footprint: Footprint, machine: Machine, job: Job) -> Placement:
    """The placement of a job. Never raises for what does not fit: see `shortfall`.

    Raises UsageError for codecs that the engine does not have or that do not suit the model's heads."""
    if machine.card is None:
        return _place_host(footprint, machine, job)
    if machine.num_cards == 1 and not job.draft and not job.host_kv:
        moe = footprint.facts.moe is not None
        for snapshots in (SNAPSHOTS,) if moe else (SNAPSHOTS, FEW_SNAPSHOTS):
            config = _config(footprint, machine, job, snapshots)
            sizes, cap = _sizes(footprint, machine, config, least=moe)
            if sizes is not None:
                return _place_sized(footprint, machine, job, config, sizes, cap)
    return _place_modelled(footprint, machine, job)


def _config(footprint: Footprint, machine: Machine, job: Job, snapshots: int) -> EngineConfig:
    """The engine's settings for a job on one card, or on none."""
    card, dtype = machine.card, footprint.recipe.dtype
    return EngineConfig(
        device="cpu" if card is None else "cuda",
        context=job.context,
        sequences=job.sequences,
        kv_tokens=job.sequences * round_up(job.context, PAGE_LEN),
        dtype=dtype,
        kv="auto" if card is None and job.kv == dtype else job.kv,
        weights="packed" if footprint.recipe.is_packed else "unpacked",
        vram=None if card is None else card.usable_bytes,
        chunk_len=job.chunk_len,
        snapshots=snapshots,
    )


def _sizes(
    footprint: Footprint, machine: Machine, config: EngineConfig, *, least: bool
) -> tuple[Sizes | None, int]:
    """The engine's sizes on one card and the cap for which they are. Where it refuses the card's: None, or, if `least`
    is asked for, those under the lowest cap that it does not refuse."""
    assert machine.card is not None
    dtype, cap = footprint.recipe.dtype, machine.card.usable_bytes
    while True:
        try:
            return size_engine(footprint.stored, config, dtype, cap, flops=machine.card.flops), cap
        except DoesNotFitError as error:
            if not least:
                return None, cap
            cap += error.asked - error.available
            config = replace(config, chunk_len=config.chunk_len or CHUNK_LEN)


def _place_sized(
    footprint: Footprint, machine: Machine, job: Job, config: EngineConfig, sizes: Sizes, cap: int
) -> Placement:
    """What the engine makes of one card with these settings and sizes."""
    assert machine.card is not None
    fits = cap <= machine.card.usable_bytes
    num_units = ceil_div(footprint.classes.get(footprint.mover, 0), footprint.unit_bytes)
    streamed = sizes.expert_slots is not None
    tiers = {"device0": _tier(machine.card.usable_bytes, _sized_items(footprint, job, sizes))}
    host, in_host, host_document = _host(footprint, machine, job, num_units if streamed else 0)
    disk, disk_document = _disk(footprint, machine, job)
    documents = host.items.get("documents", 0)
    config = replace(config, chunk_len=sizes.chunk_len, sweep_len=sizes.sweep_len, ram=documents)
    return Placement(
        job=job,
        tiers=tiers | {"host": host, "disk": disk},
        num_units=num_units,
        on_device=_held(footprint, job, sizes, cap) if streamed else num_units,
        kept=0 if streamed else num_units,
        in_host=in_host,
        sweep_len=sizes.sweep_len or sizes.chunk_len,
        chunk_len=sizes.chunk_len,
        host_document=host_document,
        disk_document=disk_document,
        config=config if fits else None,
        sizes=sizes if fits else None,
    )


def _step_items(footprint: Footprint, job: Job) -> dict[str, int]:
    """What decode steps take of the working space."""
    rows = job.sequences * (1 + job.draft)
    return {
        "graphs": account.graph_bytes(job.sequences),
        "attention_splits": account.split_bytes(footprint.facts, rows),
        "logits_and_sampler": account.logits_bytes(footprint.facts, rows),
    }


def _sized_items(footprint: Footprint, job: Job, sizes: Sizes) -> dict[str, int]:
    """The parts of `sizes.device_bytes`."""
    classes = dict(footprint.part_classes[0])
    if sizes.expert_slots is not None:
        classes["experts"] = sizes.expert_bytes
    head = "embeddings" if footprint.facts.tied else "lm_head"
    steps, residuals = _step_items(footprint, job), account.residual_bytes(footprint.facts, sizes.sweep_len)
    return {
        "runtime": sizes.runtime_bytes,
        **classes,
        head: footprint.head_bytes,
        "states": sizes.state_bytes,
        "kv": sizes.kv_bytes,
        **steps,
        "sweep_residuals": residuals,
        "prefill_buffers": sizes.workspace_bytes - residuals - sum(steps.values()),
    }


def _held(footprint: Footprint, job: Job, sizes: Sizes, cap: int) -> int:
    """Experts on the card while answers are generated: in slots, in layer buffers, and in what only prompts need."""
    spares = SPARES * sum(footprint.facts.moe_layers)
    lent = sizes.workspace_bytes - sum(_step_items(footprint, job).values()) - NOT_LENT
    room = cap - sizes.device_bytes + sizes.expert_bytes + max(0, lent)
    everything = footprint.classes["experts"] // footprint.unit_bytes
    return min(everything, room // footprint.unit_bytes - spares)


def _place_modelled(footprint: Footprint, machine: Machine, job: Job) -> Placement:
    """The placement of a job for which the engine has no way yet that leaves the least to stream."""
    assert machine.card is not None
    cards = [_fixed(footprint, machine, job, index) for index in range(machine.num_cards)]
    num_units = sum(card.num_units for card in cards)
    options = []
    for sweep_len in SWEEPS[:1] + tuple(length for length in SWEEPS[1:] if length < 2 * job.context):
        shares = [_share(footprint, part, card, sweep_len)
                  for part, card in zip(footprint.parts, cards, strict=True)]  # fmt: skip
        fits = all(share.used_bytes <= card.room for share, card in zip(shares, cards, strict=True))
        left = num_units - sum(share.kept for share in shares)
        streamed = left * ceil_div(job.context, sweep_len) if fits else 0
        options.append((not fits, streamed, sweep_len, shares))
    _, _, sweep_len, shares = min(options, key=lambda option: option[:3])
    tiers = {}
    for index, (card, share) in enumerate(zip(cards, shares, strict=True)):
        slots = ceil_div(share.on_device, card.per_frame) * card.frame
        items = card.items | {footprint.mover: slots, "prefill_buffers": share.used_bytes - slots}
        tiers[f"device{index}"] = _tier(machine.card.usable_bytes, items)
    kept = sum(share.kept for share in shares)
    # Every expert keeps a copy in host memory, so that a slot may be given away at any moment.
    wanted = 0 if kept == num_units else num_units if footprint.facts.moe is not None else num_units - kept
    host, in_host, host_document = _host(footprint, machine, job, wanted)
    disk, disk_document = _disk(footprint, machine, job)
    return Placement(
        job=job,
        tiers=tiers | {"host": host, "disk": disk},
        num_units=num_units,
        on_device=sum(share.on_device for share in shares),
        kept=kept,
        in_host=in_host,
        sweep_len=sweep_len,
        host_document=host_document,
        disk_document=disk_document,
    )


def _tier(cap_bytes: int, items: Mapping[str, int]) -> Tier:
    return Tier(cap_bytes, {name: size for name, size in items.items() if size})


def _fixed(footprint: Footprint, machine: Machine, job: Job, index: int) -> _Card:
    """What a card holds whatever moves: its layers' weights, KV, states, pools."""
    assert machine.card is not None
    part, classes, facts = footprint.parts[index], dict(footprint.part_classes[index]), footprint.facts
    last = index == machine.num_cards - 1
    moving, dtype = classes.pop(footprint.mover, 0), footprint.recipe.dtype
    config = replace(_config(footprint, machine, job, FEW_SNAPSHOTS), chunk_len=CHUNK_LEN)
    chunk_bytes = workspace_bytes(footprint.stored, config, dtype, job.kv)
    chunk_bytes -= sum(_step_items(footprint, replace(job, draft=0)).values())
    steps = _step_items(footprint, job)
    items = {"runtime": account.runtime_bytes(), **classes}
    items["states"] = (2 * job.sequences + FEW_SNAPSHOTS) * account.snapshot_bytes(part, dtype)
    items["kv"] = job.sequences * account.kv_bytes(part, job.kv, job.device_kv, PAGE_LEN)
    if last:
        items["lm_head"] = footprint.head_bytes
    else:
        del steps["logits_and_sampler"]
    if last and job.draft:
        page = formats.kv_token_bytes(job.kv, facts.num_kv_heads, facts.head_dim) * PAGE_LEN
        pages = job.sequences * ceil_div(job.context, PAGE_LEN)
        items["draft_head"] = footprint.draft_bytes + pages * page
        # Drafts that are not taken are undone: recurrent states of every position are kept until then.
        items["draft_states"] = job.draft * job.sequences * footprint.snapshot_bytes
    items |= steps
    unit = footprint.unit_bytes
    frame = max(FRAME_BYTES, unit)
    room = machine.card.usable_bytes - sum(items.values())
    return _Card(items, ceil_div(moving, unit), frame // unit, frame, room, chunk_bytes)


def _share(footprint: Footprint, part: ModelFacts, card: _Card, sweep_len: int) -> _Share:
    """Units of a card with one length of sweep: all stay, or slots give way to a sweep's buffers."""
    units, per, frame = card.num_units, card.per_frame, card.frame
    scratch = account.residual_bytes(part, sweep_len) + card.chunk_bytes
    everything = ceil_div(units, per) * frame + scratch
    # Two buffers, each for what one layer moves: one is read while the other fills.
    layer = ceil_div(units, part.num_layers) * footprint.unit_bytes
    frames, needed = card.room // frame, ceil_div(scratch + 2 * layer, frame)
    if everything <= max(card.room, needed * frame):
        return _Share(units, units, everything)
    slots, kept = min(units, max(0, frames * per)), min(units, max(0, frames - needed) * per)
    used = max(ceil_div(slots, per), ceil_div(kept, per) + needed)
    return _Share(slots, kept, used * frame)


def _host(footprint: Footprint, machine: Machine, job: Job, wanted: int) -> tuple[Tier, int, bool]:
    """Host memory beside cards: what must be, then moving units, then a document for each sequence."""
    staging = account.staging_bytes(footprint.facts, job.kv, PAGE_LEN)
    items = {"process": account.PROCESS_BYTES, "staging": staging}
    if not footprint.facts.tied:
        items["embeddings"] = footprint.classes["embeddings"]
    host_kv = job.context - job.device_kv
    items["kv"] = job.sequences * account.kv_bytes(footprint.facts, job.kv, host_kv, PAGE_LEN)
    room = machine.ram_bytes - sum(items.values())
    in_host = max(0, min(wanted, room // footprint.unit_bytes))
    items[footprint.mover] = in_host * footprint.unit_bytes
    document = _document(footprint, job)
    rest = room - items[footprint.mover] if in_host == wanted else 0
    items["documents"] = max(0, min(job.sequences * document, rest))
    return _tier(machine.ram_bytes, items), in_host, items["documents"] >= document


def _disk(footprint: Footprint, machine: Machine, job: Job) -> tuple[Tier, bool]:
    items = {"weights": footprint.file_bytes + (footprint.draft_bytes if job.draft else 0)}
    document = _document(footprint, job)
    items["documents"] = max(0, min(job.sequences * document, machine.disk_bytes - items["weights"]))
    return _tier(machine.disk_bytes, items), items["documents"] >= document


def _document(footprint: Footprint, job: Job) -> int:
    dtype = footprint.recipe.dtype
    return account.document_bytes(footprint.facts, job.kv, dtype, job.context, PAGE_LEN, SNAPSHOT_LEN)


def _place_host(footprint: Footprint, machine: Machine, job: Job) -> Placement:
    """Everything in host memory, as the engine allocates it on a machine without a card."""
    facts, dtype = footprint.facts, footprint.recipe.dtype
    items = {"process": account.PROCESS_BYTES, **footprint.classes}
    items["kv"] = job.sequences * account.kv_bytes(facts, job.kv, job.context, PAGE_LEN)
    items["states"] = (2 * job.sequences + SNAPSHOTS) * account.snapshot_bytes(facts, dtype)
    config = _config(footprint, machine, job, SNAPSHOTS)
    workspace = workspace_bytes(footprint.stored, replace(config, chunk_len=CHUNK_LEN), dtype, job.kv)
    items["logits_and_sampler"] = account.logits_bytes(facts, job.sequences)
    items["workspace"] = workspace - items["logits_and_sampler"]
    disk, disk_document = _disk(footprint, machine, job)
    return Placement(
        job=job,
        tiers={"device0": Tier(0, {}), "host": _tier(machine.ram_bytes, items), "disk": disk},
        sweep_len=CHUNK_LEN,
        host_document=True,
        disk_document=disk_document,
        config=config,
    )
