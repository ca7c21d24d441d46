"""Facts and wishes -> a plan: what fits, how fast it will be, and what would fit instead where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from packhorse.core import formats
from packhorse.core.errors import UsageError
from packhorse.core.types import PAGE_LEN
from packhorse.core.units import GIB, format_bytes
from packhorse.facts.known import known_model
from packhorse.facts.machine import Machine, with_caps
from packhorse.facts.model import ModelFacts
from packhorse.facts.packed import packed_matrices
from packhorse.facts.recipes import Recipe, recipe
from packhorse.facts.steps import MAX_SEQUENCES, step_misfit
from packhorse.facts.weights import body_params
from packhorse.plan.place import Footprint, Job, Placement, place
from packhorse.plan.predict import EXPECTED, HIGH, LOW, Times, predict

PREFERENCES = {"speed": ("fp8", "int4"), "context": ("k4v4", "int4"), "quality": ("fp16", "balanced")}
"""KV codec and recipe of what is not asked for, on a card."""
COMFORT = 0.8
"""A context is comfortable while its end decodes at this part of the speed at SHORT tokens."""
SHORT = 8192
OLDEST, BF16_FROM = 75, 80
"""Compute capabilities, times ten, that kernels need, and products in bf16."""
MAX_STRETCH = 4
"""How many times its own window YaRN may stretch a model."""
CRAWL = 10.0
"""Tokens a second below which another model is worth a word."""
RAM_STEPS = tuple(size * GIB for size in (16, 24, 32, 48, 64, 96, 128, 192, 256))
CODECS = ("fp16", "fp8", "k5v4", "k4v4")
RECIPES = ("int8", "balanced", "int5", "int4", "3bit", "2.5bit")
"""From the largest to the smallest; `Xbit` is modelled only."""
OTHER_MODELS = ("qwen3.6-35b-a3b", "qwen3.5-9b", "qwen3.5-4b")


@dataclass(frozen=True)
class Wishes:
    """What a person asks for; None leaves it to the plan. Caps are bytes of the process, hard. vram: of each card.
    host_kv: tokens of each request whose KV stays in host memory.

    Raises UsageError for values that mean nothing.
    """

    context: int | None = None
    sequences: int = 1
    kv: str | None = None
    recipe: str | None = None
    vram: int | None = None
    ram: int | None = None
    disk: int | None = None
    draft: int = 0
    host_kv: int = 0
    prefer: str = "speed"

    def __post_init__(self) -> None:
        for name in ("context", "sequences", "vram", "ram", "draft", "host_kv", "disk"):
            low = 0 if name in ("draft", "host_kv", "disk") else 1
            value = getattr(self, name)
            if value is not None and value < low:
                raise UsageError(f"{name} is {value}.", hint=f"{name} must be at least {low}.")
        if self.kv is not None and self.kv not in formats.KV_FORMATS:
            raise UsageError(
                f"The KV codec {self.kv!r} is not known.", hint=f"Choose {', '.join(formats.KV_FORMATS)}."
            )
        if self.prefer not in PREFERENCES:
            raise UsageError(f"prefer is {self.prefer!r}.", hint=f"Choose one of {', '.join(PREFERENCES)}.")


@dataclass(frozen=True)
class Alternative:
    """Another wish that fits. change: what to ask instead, by option; built: whether the engine runs it."""

    change: Mapping[str, Any]
    why: str
    times: Times
    built: bool


@dataclass(frozen=True)
class Plan:
    """comfortable, limit: tokens of context at nearly full speed, and at most. times: in the order low, expected,
    high; empty where it does not fit. unbuilt: what of it the engine cannot run yet."""

    facts: ModelFacts
    machine: Machine
    recipe: Recipe
    placement: Placement
    comfortable: int
    limit: int
    times: tuple[Times, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    unbuilt: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    footprint: Footprint = field(repr=False, kw_only=True)

    @property
    def fits(self) -> bool:
        """Whether every tier holds its part, and the model reaches the context."""
        return self.placement.fits and self.placement.job.context <= reach(self.facts)

    @property
    def executable(self) -> bool:
        """Whether the engine can run it as planned, today."""
        return self.fits and not self.unbuilt


def reach(facts: ModelFacts) -> int:
    """Tokens that the model's window has, or may have where YaRN stretches it."""
    return facts.context * (MAX_STRETCH if facts.rope.kind == "default" else 1)


def solve(facts: ModelFacts, machine: Machine, wishes: Wishes) -> Plan:
    """The plan of a model on a machine. Where the wishes do not fit the plan says so and what would.

    Raises UsageError for recipes that are not known and codecs that do not suit the model's heads.
    """
    capped = with_caps(machine, vram=wishes.vram, ram=wishes.ram, disk=wishes.disk)
    own = _recipe(facts, machine, wishes)
    kv = wishes.kv or (PREFERENCES[wishes.prefer][0] if machine.card is not None else own.dtype)
    formats.check_kv_heads(kv, facts.head_dim)
    footprint = Footprint(facts, own, machine.num_cards)
    job = Job(wishes.context or facts.context, wishes.sequences, kv, wishes.draft, wishes.host_kv)
    packed = replace(footprint, recipe=replace(own, name="packed", from_files=True))
    if machine.card is None and wishes.recipe is None and packed_matrices(facts):
        # As the engine decides: unpacked products are faster on a CPU, where they fit.
        least = replace(job, context=wishes.context or 1)
        footprint = footprint if place(footprint, capped, least).fits else packed
    limit = longest(footprint, capped, job, min(reach(facts), max(facts.context, job.context)))
    comfortable = _comfortable(footprint, capped, job, limit)
    if wishes.context is None and limit:
        job = replace(job, context=comfortable if wishes.prefer == "speed" else limit)
    placement = place(footprint, capped, job)
    times: tuple[Times, ...] = ()
    if placement.fits and job.context <= reach(facts):
        times = tuple(predict(footprint, capped, placement, band) for band in (LOW, EXPECTED, HIGH))
    plan = Plan(
        facts, capped, footprint.recipe, placement, comfortable, limit, times,
        unbuilt=_unbuilt(footprint, capped, placement), footprint=footprint,
    )  # fmt: skip
    crawls = not times or times[EXPECTED].decode_tok_s_end < CRAWL
    offers = tuple(_offers(plan, machine, wishes)) if crawls else ()
    return replace(plan, alternatives=offers, warnings=tuple(_warnings(plan, machine, wishes)))


def _recipe(facts: ModelFacts, machine: Machine, wishes: Wishes) -> Recipe:
    """What was asked for; else on a card what the files hold packed, or what is preferred, and on a CPU no packing."""
    name = wishes.recipe
    if name is None:
        name = _dtype(machine) if machine.card is None else PREFERENCES[wishes.prefer][1]
        name = "packed" if machine.card is not None and packed_matrices(facts) else name
    if name != "packed":
        return _named(name, machine)
    if not packed_matrices(facts):
        raise UsageError(f"{facts.name} holds no packed weights.", hint=f"Choose {', '.join(RECIPES)}.")
    return Recipe("packed", _dtype(machine), from_files=True)


def _named(name: str, machine: Machine) -> Recipe:
    """The recipe called `name`; what it packs is computed on in the machine's own type."""
    own = recipe(name)
    return replace(own, dtype=_dtype(machine)) if own.is_packed else own


def _dtype(machine: Machine) -> str:
    """What the engine computes in unless it is told."""
    if machine.card is not None:
        return "bf16" if machine.card.arch >= BF16_FROM else "fp16"
    return "bf16" if machine.native_bf16 else "fp32"


def longest(footprint: Footprint, machine: Machine, job: Job, most: int) -> int:
    """The longest context up to `most` that fits, a multiple of a page or `most` itself; 0 where none does."""
    return _last(lambda tokens: place(footprint, machine, replace(job, context=tokens)).fits, most)


def _comfortable(footprint: Footprint, machine: Machine, job: Job, limit: int) -> int:
    """The longest context that decodes at COMFORT of the speed of a short one."""

    def speed(tokens: int) -> float:
        placement = place(footprint, machine, replace(job, context=tokens))
        return predict(footprint, machine, placement).decode_tok_s_end

    if limit <= SHORT:
        return limit
    least = COMFORT * speed(SHORT)
    return max(SHORT, _last(lambda tokens: speed(tokens) >= least, limit))


def _last(holds: Callable[[int], bool], most: int) -> int:
    """The largest multiple of a page up to `most`, or `most`, for which `holds`, which stops holding once."""
    if holds(most):
        return most
    low, high = 0, -(-most // PAGE_LEN)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle * PAGE_LEN) else (low, middle)
    return low * PAGE_LEN


def _offers(plan: Plan, machine: Machine, wishes: Wishes) -> Iterator[Alternative]:
    """Wishes near the one asked for that fit: of each kind the nearest that does not crawl, else the fastest."""
    job, kv, name = plan.placement.job, plan.placement.job.kv, plan.recipe.name
    lower = CODECS[CODECS.index(kv) + 1 :] if kv in CODECS else ()
    codecs = [codec for codec in lower if _suits(codec, plan.facts)]
    smaller = RECIPES[RECIPES.index(name) + 1 if name in RECIPES else 0 :] if machine.card is not None else ()
    eighths = range(1, 8) if machine.card is not None else ()
    more_memory = "more host memory" if machine.assumed else "more memory in the machine"
    tries: dict[str, list[dict[str, Any]]] = {
        "a shorter context": [{"context": plan.limit}] if 0 < plan.limit < job.context else [],
        "a lower KV codec": [{"kv": codec} for codec in codecs],
        "a smaller recipe": [{"recipe": other} for other in smaller],
        "a smaller recipe and a lower KV codec": [
            {"recipe": other, "kv": codec} for other in smaller for codec in codecs[-1:]
        ],
        "a part of the KV in host memory": [{"host_kv": job.context * part // 8} for part in eighths],
        "all that the card has": [{"vram": "auto"}] if wishes.vram is not None else [],
        "one request at a time": [{"sequences": 1}] if job.sequences > 1 else [],
        more_memory: [{"ram": size} for size in RAM_STEPS if size > plan.machine.ram_bytes],
        "another model": [{"model": other} for other in OTHER_MODELS],
    }
    least = 1.5 * plan.times[EXPECTED].decode_tok_s_end if plan.fits else 0.0
    for why, changes in tries.items():
        tried = [_offer(plan, machine, wishes, change, why) for change in changes]
        found = [offer for offer in tried if offer is not None and offer.times.decode_tok_s_end >= least]
        walks = [offer for offer in found if offer.times.decode_tok_s_end >= CRAWL]
        if found:
            yield walks[0] if walks else max(found, key=lambda offer: offer.times.decode_tok_s_end)


def _suits(kv: str, facts: ModelFacts) -> bool:
    """Whether a KV codec can hold the model's heads."""
    try:
        formats.check_kv_heads(kv, facts.head_dim)
    except UsageError:
        return False
    return True


def _offer(
    plan: Plan, machine: Machine, wishes: Wishes, change: Mapping[str, Any], why: str
) -> Alternative | None:
    """One change of the wishes, if it fits."""
    facts, job = plan.facts, plan.placement.job
    if "model" in change:
        facts = known_model(change["model"])
        if body_params(facts) >= plan.footprint.body_params or job.context > facts.context:
            return None
    if "ram" in change:  # another host around the same card
        machine, wishes = replace(machine, assumed=True), replace(wishes, ram=change["ram"])
    vram = None if "vram" in change else wishes.vram
    capped = with_caps(machine, vram=vram, ram=wishes.ram, disk=wishes.disk)
    own = plan.recipe if "recipe" not in change else _named(change["recipe"], machine)
    if "model" in change and own.from_files:
        own = _named(PREFERENCES[wishes.prefer][1], machine)
    footprint = Footprint(facts, own, machine.num_cards)
    asked = {key: change[key] for key in ("context", "kv", "sequences", "host_kv") if key in change}
    job = replace(job, **asked)
    placement = place(footprint, capped, job)
    if not placement.fits or job.context > reach(facts):
        return None
    built = not _unbuilt(footprint, capped, placement)
    return Alternative(change, why, predict(footprint, capped, placement), built)


def _unbuilt(footprint: Footprint, machine: Machine, placement: Placement) -> tuple[str, ...]:
    """What the engine cannot run yet, by name."""
    job, facts, card = placement.job, footprint.facts, machine.card
    found = []
    if footprint.num_cards > 1:
        found.append(f"{footprint.num_cards} cards")
    if card is not None and card.arch < OLDEST:
        found.append(f"kernels for compute capability {card.arch / 10} (they need {OLDEST / 10})")
    if card is not None and card.arch < BF16_FROM and footprint.recipe.dtype == "bf16":
        found.append(f"bf16 on compute capability {card.arch / 10} (it needs {BF16_FROM / 10})")
    if card is not None and job.sequences > MAX_SEQUENCES:
        found.append(f"captured steps of {job.sequences} requests ({MAX_SEQUENCES} at most)")
    if not footprint.recipe.has_formats:
        found.append(f"the recipe {footprint.recipe.name}, for which there is no format")
    elif footprint.recipe.is_packed and not footprint.recipe.from_files and facts.tensors:
        found.append(
            f"the recipe {footprint.recipe.name} of these files (plan for what `packhorse convert` writes)"
        )
    if placement.kept < placement.num_units and (facts.moe is None or not footprint.recipe.is_packed):
        found.append(f"{footprint.mover} in {footprint.recipe.name} outside the card")
    elif placement.kept < placement.num_units and placement.in_host < placement.num_units:
        found.append("experts on disk")
    elif footprint.num_cards == 1 and placement.kept < placement.num_units:
        why = step_misfit(facts, footprint.recipe.dtype)
        found += [] if why is None else [f"experts outside the card: {why}"]
    if footprint.num_cards and job.host_kv:
        found.append("active KV in host memory")
    if job.draft:
        found.append("draft heads")
    if job.context > facts.context:
        found.append(
            f"a context beyond the model's window of {facts.context:,} (set YaRN in its config.json)"
        )
    return tuple(found)


def _warnings(plan: Plan, machine: Machine, wishes: Wishes) -> Iterator[str]:
    where, facts, job = plan.placement, plan.facts, plan.placement.job
    if not machine.measured:
        yield f"Times on {machine.name} were never measured: they are computed from rates, and ranges are printed."
    if machine.free:
        yield "Planned without a card: name a machine with --profile, or let `doctor --save-profile` look at this one."
    if facts.context < job.context <= reach(facts):
        stretch = job.context / facts.context
        yield f"The context is {stretch:.2g} times the model's window: YaRN reaches it and costs at short range."
    for name, tier in (("vram", "device0"), ("ram", "host"), ("disk", "disk")):
        wish, cap = getattr(wishes, name), where.tiers[tier].cap_bytes
        if wish is not None and wish > cap > 0:
            yield f"--{name} asks for {format_bytes(wish)}, and a process can have {format_bytes(cap)}."
    if wishes.context is None:
        yield f"The context was not asked for: planned for {job.context:,} of {facts.context:,} tokens."
    if not plan.fits:
        return
    if where.on_device + where.in_host < where.num_units:
        part = 1 - (where.on_device + where.in_host) / where.num_units
        yield f"Host memory is short: {part:.0%} of the {plan.footprint.mover} are read from disk."
    if facts.moe is None and where.on_device < where.num_units:
        part = 1 - where.on_device / where.num_units
        yield f"{part:.1%} of the MLP rows lie outside the card, and every token needs all of them."
    if not where.host_document:
        yield "Host memory has no room for a whole context's KV: nothing is restored from there."
    if not where.disk_document:
        yield "The disk has no room for a whole context's KV: nothing is restored from there."
