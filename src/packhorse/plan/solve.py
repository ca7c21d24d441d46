"""Facts and wishes -> a plan: what fits, how fast it will be, and what would fit instead where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from packhorse.core import formats
from packhorse.core.config import KV_CHOICES, check_least
from packhorse.core.errors import UsageError
from packhorse.core.types import PAGE_LEN
from packhorse.core.units import GIB, format_bytes, round_up
from packhorse.facts.known import known_model
from packhorse.facts.machine import Machine, with_caps
from packhorse.facts.model import ModelFacts
from packhorse.facts.packed import packed_matrices
from packhorse.facts.recipes import CHOICES, CONVERTED, Recipe, recipe
from packhorse.facts.steps import MAX_SEQUENCES, step_misfit
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
"""Tokens a second below which something else is worth a word."""
MAX_DRAFT = 16
"""Tokens guessed ahead in a step: a guess so late is hardly ever right."""
RAM_STEPS = tuple(size * GIB for size in (16, 24, 32, 48, 64, 96, 128, 192, 256))
CODECS = ("fp16", "fp8", "k5v4", "k4v4")
RECIPES = ("int8", "balanced", "int5", "int4", "3bit", "2.5bit")
"""From the largest to the smallest; `Xbit` is modelled only."""
OTHER_MODELS = ("qwen3.6-35b-a3b", "qwen3.5-9b", "qwen3.5-4b", "qwen3.5-0.8b")
CENT = GIB // 100
OFFERS = {
    "context": "a shorter context", "sequences": "fewer requests at a time", "kv": "a lower KV codec",
    "recipe": "another recipe", "host_kv": "a part of the KV in host memory", "vram": "more of the card",
    "ram": "more host memory", "disk": "more disk", "model": "another model",
}  # fmt: skip
"""What may be changed to make a wish fit, by option."""


@dataclass(frozen=True)
class Wishes:
    """What a person asks for; None leaves it to the plan. Caps are bytes of the process, hard. vram: of each card.
    host_kv: tokens of each request whose KV stays in host memory. kv `auto` is left to the plan too.

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
        least = dict.fromkeys(("context", "sequences", "vram", "ram"), 1)
        check_least(self, least | dict.fromkeys(("draft", "host_kv", "disk"), 0))
        if self.draft > MAX_DRAFT:
            raise UsageError(f"draft is {self.draft}.", hint=f"draft must be at most {MAX_DRAFT}.")
        if self.host_kv > (self.context or self.host_kv):
            raise UsageError(f"host_kv is {self.host_kv:,}.", hint=f"A request has {self.context:,} tokens.")
        if self.kv is not None and self.kv not in KV_CHOICES:
            hint = f"Choose {', '.join(KV_CHOICES)}."
            raise UsageError(f"The KV codec {self.kv!r} is not known.", hint=hint)
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
    """comfortable, limit, runs: tokens of context at nearly full speed, at most, and at most of what the engine runs.
    times: in the order low, expected, high; empty where it does not fit. unbuilt: what of it the engine cannot run
    yet."""

    facts: ModelFacts
    machine: Machine
    recipe: Recipe
    placement: Placement
    comfortable: int
    limit: int
    runs: int
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

    @property
    def crawls(self) -> bool:
        """Whether it does not fit, or is so slow that something else is worth a word."""
        return not self.times or self.times[EXPECTED].decode_tok_s_end < CRAWL


def reach(facts: ModelFacts) -> int:
    """Tokens that the model's window has, or may have where YaRN stretches it."""
    return facts.context * (MAX_STRETCH if facts.rope.kind == "default" else 1)


def solve(facts: ModelFacts, machine: Machine, wishes: Wishes) -> Plan:
    """The plan of a model on a machine. Where the wishes do not fit the plan says so and what would.

    Raises UsageError for recipes that are not known and codecs that do not suit the model's heads.
    """
    capped = with_caps(machine, vram=wishes.vram, ram=wishes.ram, disk=wishes.disk)
    own = _recipe(facts, machine, wishes)
    kv = own.dtype if machine.card is None and wishes.prefer != "context" else PREFERENCES[wishes.prefer][0]
    kv = kv if wishes.kv in (None, "auto") else wishes.kv
    formats.check_kv_heads(kv, facts.head_dim)
    footprint = Footprint(facts, own, machine.num_cards)
    job = Job(wishes.context or facts.context, wishes.sequences, kv, wishes.draft, wishes.host_kv)
    if wishes.recipe is None and not own.is_packed:
        footprint = _unpacked_or_packed(footprint, capped, wishes, job)
    limit = longest(footprint, capped, job, min(reach(facts), max(facts.context, job.context)))
    comfortable = _comfortable(footprint, capped, job, limit)
    runs = _longest_run(footprint, capped, job, limit) if limit else 0
    if wishes.context is None:
        most = min(comfortable if wishes.prefer == "speed" else limit, runs or limit)
        # Where none fits, what lacks is what a short one lacks, and so is what would help.
        job = replace(job, context=most or min(SHORT, facts.context))
    placement = place(footprint, capped, job)
    times: tuple[Times, ...] = ()
    if placement.fits and job.context <= reach(facts):
        times = tuple(predict(footprint, capped, placement, band) for band in (LOW, EXPECTED, HIGH))
    plan = Plan(
        facts, capped, footprint.recipe, placement, comfortable, limit, runs, times,
        unbuilt=_unbuilt(footprint, capped, placement), footprint=footprint,
    )  # fmt: skip
    offers = tuple(_Offers(plan, machine, wishes)) if plan.crawls or plan.unbuilt else ()
    plan = replace(plan, alternatives=offers)
    return replace(plan, warnings=tuple(_warnings(plan, machine, wishes)))


def _recipe(facts: ModelFacts, machine: Machine, wishes: Wishes) -> Recipe:
    """What was asked for; else on a card what the files hold packed, of a name what is preferred; and no packing."""
    name = wishes.recipe
    if name is None:
        name = _dtype(machine) if machine.card is None or facts.tensors else PREFERENCES[wishes.prefer][1]
        name = "packed" if machine.card is not None and packed_matrices(facts) else name
    if name != "packed":
        return _named(name, machine)
    if not packed_matrices(facts):
        raise UsageError(f"{facts.name} holds no packed weights.", hint=CHOICES)
    return Recipe("packed", _dtype(machine), from_files=True)


def _unpacked_or_packed(footprint: Footprint, machine: Machine, wishes: Wishes, job: Job) -> Footprint:
    """Weights as they are, where these run, else packed: by the files, by a conversion of them or as is preferred."""
    small = "packed" if packed_matrices(footprint.facts) else PREFERENCES[wishes.prefer][1]
    if _convertible(footprint.facts):
        small = "int8-rtn" if small == "balanced" else "int4-rtn"
    packed = replace(footprint, recipe=_recipe(footprint.facts, machine, replace(wishes, recipe=small)))
    found = [packed] if wishes.prefer == "context" else [footprint, packed]
    least = replace(job, context=wishes.context or min(SHORT, footprint.facts.context))
    fitting = [one for one in found if place(one, machine, least).fits]
    return next((one for one in fitting if _runs(one, machine, least)), fitting[0] if fitting else packed)


def _convertible(facts: ModelFacts) -> bool:
    """Whether `packhorse convert` takes the model's files."""
    return bool(facts.tensors) and facts.container == "safetensors" and not facts.stored


def _runs(footprint: Footprint, machine: Machine, job: Job) -> bool:
    """Whether the job fits and the engine runs it."""
    placement = place(footprint, machine, job)
    return placement.fits and not _unbuilt(footprint, machine, placement)


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


def _longest_run(footprint: Footprint, machine: Machine, job: Job, most: int) -> int:
    """The longest of these that the engine runs."""
    return _last(lambda tokens: _runs(footprint, machine, replace(job, context=tokens)), most)


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


class _Offers:
    """Wishes near the one asked for that fit: of each kind the nearest that does not crawl, else the fastest. What the
    engine runs comes first, and is all that is offered beside a plan that lacks nothing else. Where it runs nothing
    that way, several changes at once."""

    def __init__(self, plan: Plan, machine: Machine, wishes: Wishes) -> None:
        self._plan, self._machine, self._wishes = plan, machine, wishes
        self._footprints: dict[tuple[str | None, str], Footprint] = {}
        job, name, host = plan.placement.job, plan.recipe.name, plan.placement.tiers["host"]
        chain = (_dtype(machine), "int8-rtn", "int4-rtn") if _convertible(plan.facts) else RECIPES
        lower = CODECS[CODECS.index(job.kv) + 1 :] if job.kv in CODECS else CODECS[1:]
        self._codecs = [codec for codec in lower if _suits(codec, plan.facts)]
        self._recipes = chain[chain.index(name) + 1 if name in chain else 0 :]
        self._sequences = [job.sequences >> n for n in range(1, job.sequences.bit_length())]
        # An offer is asked for in hundredths of a GiB, and no process gets more than there is.
        most = with_caps(machine, vram=None, ram=None, disk=None).ram_bytes // CENT * CENT
        sizes = RAM_STEPS if machine.assumed else (min(most, round_up(host.total_bytes, CENT)), most)
        least, card = round_up(plan.placement.tiers["device0"].total_bytes, CENT), machine.card
        more = card is not None and wishes.vram is not None and wishes.vram < least < card.usable_bytes
        self._vram = [*([least] if more else []), "auto"] if wishes.vram is not None else []
        self._ram = [size for size in sizes if size > plan.machine.ram_bytes]

    def __iter__(self) -> Iterator[Alternative]:
        yield from sorted(self._all(), key=lambda offer: not offer.built)

    def _all(self) -> Iterator[Alternative]:
        plan, job, wishes = self._plan, self._plan.placement.job, self._wishes
        card = self._machine.card is not None
        recipes: list[dict[str, Any]] = [{"recipe": other} for other in self._recipes]
        # The recipe of another model is named where that model's own may be another.
        by_default = wishes.recipe is None and not plan.recipe.from_files
        kept = by_default and bool(plan.facts.tensors or not card)
        own: list[dict[str, Any]] = [{"recipe": plan.recipe.name}] if kept else [{}]
        preferred = PREFERENCES[wishes.prefer][1]
        small = [{"recipe": preferred}] if plan.recipe.name != preferred else []
        best, *others = ([{"model": other, **how} for how in [*own, *small]] for other in OTHER_MODELS)
        best += [{**one, "context": None} for one in best]
        models = [*best, *chain.from_iterable(others)]
        disk: list[dict[str, Any]] = [{"disk": None}] if "disk" in plan.placement.shortfall else []
        singles: list[list[dict[str, Any]]] = [
            *([{"context": tokens}] for tokens in {plan.runs: 0, plan.limit: 0} if 0 < tokens < job.context),
            [{"kv": codec} for codec in self._codecs]
            + [{"kv": codec, "context": None} for codec in self._codecs[-1:] if plan.unbuilt],
            recipes,
            [{**other, "kv": codec} for other in recipes for codec in self._codecs[-1:]],
            [{"host_kv": job.context * part // 8} for part in range(1, 8) if card],
            [{"vram": size} for size in self._vram],
            [{"sequences": number} for number in self._sequences],
            [{"ram": size} for size in self._ram],
            disk,
            best,
            models[len(best) :],
        ]
        found = [offer for changes in singles if (offer := self._nearest(changes)) is not None]
        yield from found
        if plan.executable:
            return
        # Several at once, of the same model and then of others, where the engine runs no single one.
        formats_exist = [other for other in recipes if recipe(other["recipe"]).has_formats]
        for bases in ([{}, *formats_exist], models):
            alike = [offer for offer in found if ("model" in offer.change) == (bases is models)]
            if not any(offer.built for offer in alike):
                every = (self._offer({**base, **more}) for more in self._changes() for base in bases)
                first = next((offer for offer in every if offer is not None), None)
                built = (offer for offer in chain([first], every) if offer is not None and offer.built)
                offer = next(built, None if alike or plan.fits else first)
                if offer is not None:
                    yield offer

    def _changes(self) -> list[dict[str, Any]]:
        """What may be changed together beside a recipe or a model: memory last, a shorter context before it."""
        parts: dict[str, list[Any]] = {
            "kv": self._codecs[-1:],
            "sequences": self._sequences[-1:],
            "context": [None],
            "disk": [None] if "disk" in self._plan.placement.shortfall else [],
            "ram": self._ram[-1:],
            "vram": self._vram[-1:],
        }
        every: list[dict[str, Any]] = [{}]
        for key, values in parts.items():
            every += [{**one, key: value} for value in values for one in every]
        return every

    def _nearest(self, changes: list[dict[str, Any]]) -> Alternative | None:
        """Of changes of one kind."""
        plan = self._plan
        least = 1.5 * plan.times[EXPECTED].decode_tok_s_end if plan.fits else 0.0
        tried = [self._offer(change) for change in changes]
        found = [offer for offer in tried if offer is not None]
        faster = [offer for offer in found if offer.times.decode_tok_s_end >= least]
        built = [offer for offer in (found if plan.unbuilt else faster) if offer.built]
        # Where it fits and is fast, what the engine runs is all that it lacks.
        found = built or (faster if plan.crawls else [])
        walks = [offer for offer in found if offer.times.decode_tok_s_end >= CRAWL]
        return walks[0] if walks else max(found, key=lambda offer: offer.times.decode_tok_s_end, default=None)

    def _offer(self, change: Mapping[str, Any]) -> Alternative | None:
        """These changes of the wishes, if they fit. context None: the longest that the engine runs, else that fits, if
        not too short; disk None: what the weights take."""
        plan, machine, wishes = self._plan, self._machine, self._wishes
        facts, job, change = plan.facts, plan.placement.job, dict(change)
        if "model" in change:
            facts = known_model(change["model"])
        own = plan.recipe if "recipe" not in change else _named(change["recipe"], machine)
        if "model" in change and own.from_files:
            own = _named(PREFERENCES[wishes.prefer][1], machine)
        made = Footprint(facts, own, machine.num_cards)
        footprint = self._footprints.setdefault((change.get("model"), own.name), made)
        if "model" in change:
            larger = footprint.file_bytes >= plan.footprint.file_bytes
            if not _suits(job.kv, facts) or (larger and footprint.body_params >= plan.footprint.body_params):
                return None
        if "disk" in change:
            change["disk"] = round_up(footprint.file_bytes + (footprint.draft_bytes if job.draft else 0), GIB)
        caps = {name: change.get(name, getattr(wishes, name)) for name in ("vram", "ram", "disk")}
        capped = with_caps(machine, **{name: None if cap == "auto" else cap for name, cap in caps.items()})
        job = replace(job, **{key: change[key] for key in ("kv", "sequences", "host_kv") if key in change})
        if change.get("context", 0) is None:
            most = min(reach(facts), job.context)
            if not place(footprint, capped, replace(job, context=min(SHORT, most))).fits:
                return None
            asked = footprint, capped, job, most
            change["context"] = _longest_run(*asked) or longest(*asked)
        job = replace(job, context=change.get("context", job.context))
        placement = place(footprint, capped, job)
        if not placement.fits or not job.host_kv <= job.context <= reach(facts):
            return None
        built = not _unbuilt(footprint, capped, placement)
        kinds = [OFFERS[key] for key in OFFERS if key in change and change[key] != plan.recipe.name]
        return Alternative(change, ", ".join(kinds), predict(footprint, capped, placement), built)


def _suits(kv: str, facts: ModelFacts) -> bool:
    """Whether a KV codec can hold the model's heads."""
    try:
        formats.check_kv_heads(kv, facts.head_dim)
    except UsageError:
        return False
    return True


def _unbuilt(footprint: Footprint, machine: Machine, placement: Placement) -> tuple[str, ...]:
    """What the engine cannot run yet, by name."""
    job, facts, card = placement.job, footprint.facts, machine.card
    found = []
    if footprint.num_cards > 1:
        found.append(f"{footprint.num_cards} cards")
    if card is not None and card.arch < OLDEST:
        found.append(f"kernels for compute capability {card.arch / 10} (they need {OLDEST / 10})")
    if card is not None and card.arch < BF16_FROM and "bf16" in (footprint.recipe.dtype, job.kv):
        found.append(f"bf16 on compute capability {card.arch / 10} (it needs {BF16_FROM / 10})")
    if card is not None and job.sequences > MAX_SEQUENCES:
        found.append(f"captured steps of {job.sequences} requests ({MAX_SEQUENCES} at most)")
    if not footprint.recipe.has_formats:
        found.append(f"the recipe {footprint.recipe.name}, for which there is no format")
    elif footprint.recipe.is_packed and not footprint.recipe.from_files and facts.tensors:
        how = f" (`packhorse convert` makes {' or '.join(CONVERTED)})" if _convertible(facts) else ""
        if not (how and footprint.recipe.converted):
            found.append(f"the recipe {footprint.recipe.name} of these files{how}")
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
    names = [offer.change["recipe"] for offer in plan.alternatives if "recipe" in offer.change]
    if not machine.num_cards and (plan.recipe.is_packed or any(recipe(name).is_packed for name in names)):
        yield "Packed weights may be slower on a CPU than unpacked ones: their times count bytes alone."
    for name in CONVERTED if _convertible(facts) else ():
        if name in (plan.recipe.name, *names):
            yield f"These files are not {name}: `packhorse convert {facts.path} OUT --recipe {name}` makes it."
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
