"""A plan as a document, as a table with a bar for each tier, and as arithmetic line by line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from packhorse.core.errors import CorruptFileError, DoesNotFitError, UsageError
from packhorse.core.types import PAGE_LEN
from packhorse.core.units import format_bytes
from packhorse.facts.fields import read_object
from packhorse.facts.machine import calibration
from packhorse.facts.model import ModelFacts
from packhorse.facts.weights import expected_params
from packhorse.plan import account
from packhorse.plan.place import Tier
from packhorse.plan.predict import (
    EXPECTED,
    HIGH,
    LOW,
    Speed,
    Times,
    dense_bytes,
    prefill_bytes,
    prefill_flops,
    prefill_parts,
    touched_share,
)
from packhorse.plan.solve import Alternative, Plan, reach

VERSION = 1
"""Of the document: raised where a field changes its meaning or goes."""
BAR = 40
_MARKS = "#=+*%@o-~x&$"


def to_document(plan: Plan, model: str, tariff: float | None = None) -> dict[str, Any]:
    """The plan as JSON, fields as in docs/plan.md. model: as it was asked for. tariff: money a kilowatt-hour."""
    where, facts, machine = plan.placement, plan.facts, plan.machine
    job = where.job
    return {
        "version": VERSION,
        "model": {"asked": model, "name": facts.name, "family": facts.family, "window": facts.context}
        | {"parameters": sum(expected_params(facts).values())}
        | {"weight_bytes": sum(plan.footprint.classes.values())},
        "machine": {"name": machine.name, "card": None if machine.card is None else machine.card.name},
        "recipe": plan.recipe.name,
        "sequences": job.sequences,
        "draft": job.draft,
        "host_kv": job.host_kv,
        "fits": plan.fits,
        "executable": plan.executable,
        "not_executable": list(plan.unbuilt),
        "shortfall_bytes": dict(where.shortfall),
        "tiers": {name: _tier(tier) for name, tier in where.tiers.items()},
        "experts": _experts(plan),
        "kv": {"codec": job.kv, "bytes_per_token": account.kv_token_bytes(facts, job.kv)},
        "context": {"planned": job.context, "comfortable": plan.comfortable, "limit": plan.limit}
        | {"runs": plan.runs, "reach": reach(facts)},
        "sweep_tokens": where.sweep_len,
        "engine": _engine(plan),
        "predict": _predict(plan),
        "cost": _cost(plan, tariff),
        "alternatives": [_alternative(offer) for offer in plan.alternatives],
        "warnings": list(plan.warnings),
        "calibration": calibration()["date"],
        "sources": list(machine.sources),
    }


def _tier(tier: Tier) -> dict[str, Any]:
    return {"cap_bytes": tier.cap_bytes, "total_bytes": tier.total_bytes, "items": dict(tier.items)}


_FIELDS = (
    "context", "sequences", "kv_tokens", "snapshots", "dtype", "kv", "weights", "device", "vram", "ram", "chunk_len",
    "sweep_len",
)  # fmt: skip


def _experts(plan: Plan) -> dict[str, int]:
    """Of a model with routed experts: places for them on cards, and how many are there between prompts."""
    where, sizes = plan.placement, plan.placement.sizes
    if plan.facts.moe is None:
        return {"slots": 0, "held": 0, "total": 0}
    slots = None if sizes is None else sizes.expert_slots
    return {"slots": slots or where.on_device, "held": where.on_device, "total": where.num_units}


def _engine(plan: Plan) -> dict[str, Any] | None:
    """Fields of EngineConfig that run the plan; None where the engine cannot. What is not said is the engine's own."""
    if not plan.executable:
        return None
    return {name: value for name in _FIELDS if (value := getattr(plan.placement.config, name))}


def read_saved(file: Path) -> dict[str, Any]:
    """A document of `to_document` that was kept in a file, to be run.

    Raises CorruptFileError for another kind of file, DoesNotFitError where the plan does not fit, UsageError where
    the engine cannot run it, with what it lacks.
    """
    document: dict[str, Any] = {}
    with suppress(CorruptFileError):
        document = read_object(file)
    if document.get("version") != VERSION or not {"engine", "fits", "model"} <= set(document):
        hint = "Write one: packhorse plan MODEL --json > FILE."
        raise CorruptFileError(f"{file} is no plan of version {VERSION}.", hint=hint)
    if not document["fits"]:
        asked = sum(tier["total_bytes"] for tier in document["tiers"].values())
        short = sum(document["shortfall_bytes"].values())
        raise DoesNotFitError(
            f"The plan {file} does not fit: {format_bytes(short)} are missing, or its context is out of reach.",
            asked=asked, available=asked - short, hint=_way_out(document),
        )  # fmt: skip
    if document["engine"] is None:
        raise UsageError(
            f"The engine cannot run the plan {file} yet: {'; '.join(document['not_executable'])}.",
            hint=_way_out(document),
        )
    return document


def _way_out(document: Mapping[str, Any]) -> str:
    """What to plan with instead of a saved plan."""
    ways = [offer["change"] for offer in document["alternatives"] if offer["executable"]]
    if not ways:
        return "Plan for one card or none, with a recipe and a context that it runs."
    return f"Plan again with {_options(ways[0])}, which it runs."


def _options(change: Mapping[str, Any]) -> str:
    """What an offer changes, as it is asked for."""
    sizes = {key: format_bytes(value).replace(" ", "") for key, value in change.items()
             if key in ("ram", "disk", "vram") and value != "auto"}  # fmt: skip
    given = {**change, **sizes}
    return " ".join(f"--{key.replace('_', '-')} {value}" for key, value in given.items()).replace(
        "--model ", ""
    )


def check_planned(document: Mapping[str, Any], facts: ModelFacts) -> None:
    """Raises UsageError where a plan was made for a model of another kind or size, or in other formats."""
    planned, engine = document["model"], document["engine"]
    packed, on_cpu = engine["weights"] == "packed", engine["device"] == "cpu"
    size = account.weight_bytes(facts, engine["dtype"], packed=packed, cpu=on_cpu)
    found = {"family": facts.family, "parameters": sum(expected_params(facts).values()), "weight_bytes": size}
    for name, value in found.items():
        if planned.get(name) != value:
            raise UsageError(
                f"The plan is for {planned.get('name')} with {name} {planned.get(name)}; {facts.name} has {value}.",
                hint=f"Plan for this model, or serve files in the plan's recipe, {document['recipe']}.",
            )


def _predict(plan: Plan) -> dict[str, Any]:
    """Expected figures by name, null where the plan does not fit, and how far they may lie off."""
    names = Times.__dataclass_fields__
    if not plan.times:
        return dict.fromkeys(names) | {"low": None, "high": None, "measured": plan.machine.measured}
    low, high = plan.times[LOW].rounded(), plan.times[HIGH].rounded()
    return plan.times[EXPECTED].rounded() | {"low": low, "high": high, "measured": plan.machine.measured}


def _cost(plan: Plan, tariff: float | None) -> dict[str, float] | None:
    """Energy of the cards alone at their power limit, for a million generated tokens at the context's end."""
    card = plan.machine.card
    if not plan.times or card is None or not card.power_w:
        return None
    hours = 1e6 / plan.times[EXPECTED].decode_tok_s_total / 3600
    energy = {"watt_hours_per_million_tokens": round(card.power_w * card.count * hours, 1)}
    if tariff is not None:
        energy["price_per_million_tokens"] = round(card.power_w * card.count * hours / 1000 * tariff, 4)
    return energy


def _alternative(offer: Alternative) -> dict[str, Any]:
    return {"change": dict(offer.change), "why": offer.why, "fits": True, "executable": offer.built,
            "predict": offer.times.rounded()}  # fmt: skip


def table(plan: Plan, tariff: float | None = None) -> str:
    """The plan for people."""
    return "\n".join(_lines(plan, tariff))


def _lines(plan: Plan, tariff: float | None) -> Iterator[str]:
    where, job = plan.placement, plan.placement.job
    users = f" x {job.sequences}" if job.sequences > 1 else ""
    short = [f"{format_bytes(size)} short in {name}" for name, size in where.shortfall.items()]
    if job.context > reach(plan.facts):
        short.append(f"the model reaches {reach(plan.facts):,} tokens at most")
    verdict = "fits" if plan.executable else "the engine cannot run it"
    verdict = f"DOES NOT FIT: {', '.join(short)}" if short else verdict
    name = f"{plan.facts.name} on {plan.machine.name}"
    yield f"{name}: {job.context:,} tokens{users}, {plan.recipe.name}, KV {job.kv}: {verdict}"
    if plan.unbuilt:
        yield "modelled, not executable: " + "; ".join(plan.unbuilt)
    yield ""
    for name, tier in where.tiers.items():
        if tier.cap_bytes or tier.items:
            yield from _tier_lines(name, tier)
    if plan.facts.moe is not None and where.num_units:
        share = where.on_device / where.num_units
        yield f"experts on the card   {where.on_device:,} of {where.num_units:,} ({share:.0%})"
    runs = f"; the engine runs {plan.runs:,}" if plan.runs < plan.limit else ""
    yield f"context               {plan.comfortable:,} at nearly full speed, {plan.limit:,} at most{runs}"
    yield ""
    yield from _time_lines(plan)
    cost = _cost(plan, tariff)
    if cost is not None:
        yield (
            "  ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in cost.items())
            + " (cards alone)"
        )
    for offer in plan.alternatives:
        better = "runs instead" if offer.built and plan.unbuilt else "faster"
        yield f"{better if plan.fits else 'fits instead'}: {_offer_line(offer)}"
    yield from (f"! {text}" for text in plan.warnings)


def _tier_lines(name: str, tier: Tier) -> Iterator[str]:
    """A bar of the tier, filled by its largest users, and what its marks stand for."""
    cap = max(tier.cap_bytes, tier.total_bytes, 1)
    items = sorted(tier.items.items(), key=lambda item: -item[1])
    bar, done = "", 0
    for mark, (_, size) in zip(_MARKS, items, strict=False):
        done += size
        bar += mark * (round(BAR * done / cap) - len(bar))
    yield f"{name:8}[{bar[:BAR]:<{BAR}}] {format_bytes(tier.total_bytes)} of {format_bytes(tier.cap_bytes)}"
    for index, (item, size) in enumerate(items):
        mark = _MARKS[index] if index < len(_MARKS) else " "
        yield f"        {mark} {item.replace('_', ' '):20} {format_bytes(size):>11}"


_LABELS = {
    "cold_first_token_s": ("first token, cold", "s"),
    "warm_ram_first_token_s": ("first token, KV in RAM", "s"),
    "warm_disk_first_token_s": ("first token, KV on disk", "s"),
    "tail_64_s": ("64-token follow-up", "s"),
    "decode_tok_s_start": ("decode, start", "tok/s"),
    "decode_tok_s_end": ("decode, end of context", "tok/s"),
    "decode_tok_s_total": ("decode, all together", "tok/s"),
    "queue_wait_s": ("wait behind the others", "s"),
    "load_s": ("loading", "s"),
}


def _time_lines(plan: Plan) -> Iterator[str]:
    if not plan.times:
        return
    low, expected, high = (times.rounded() for times in plan.times)
    for name, (label, unit) in _LABELS.items():
        alone = plan.placement.job.sequences == 1 and name in ("decode_tok_s_total", "queue_wait_s")
        if expected[name] is None or alone:
            continue
        figures = [expected[name]] if plan.machine.measured else sorted((low[name] or 0.0, high[name] or 0.0))
        texts = [_took(value) if unit == "s" else f"{_short(value)} {unit}" for value in figures]
        text = " to ".join(dict.fromkeys(texts))
        text = text.replace(f" {unit} to", " to") if text.endswith(f" {unit}") else text
        yield f"{label:26}{text}{'' if plan.machine.measured else ' (never measured)'}"


def _took(seconds: float | None) -> str:
    """A time: no digits that nobody means, minutes from ten on, and hours."""
    hours, minutes = divmod(round((seconds or 0.0) / 60), 60)
    if not hours and minutes < 10:
        return f"{_short(seconds)} s" if seconds and seconds >= 0.1 else "under 0.1 s"
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min"


def _short(value: float | None) -> str:
    """Three digits, without an exponent."""
    return f"{float(f'{value or 0.0:.3g}'):,g}"


def _offer_line(offer: Alternative) -> str:
    change = _options(offer.change)
    speed, cold = offer.times.decode_tok_s_end, offer.times.cold_first_token_s
    built = "" if offer.built else ", modelled"
    return f"{change} ({offer.why}): {_short(speed)} tok/s, first token {_took(cold)} cold{built}"


def explain(plan: Plan) -> str:
    """The arithmetic behind the expected figures, a line for each step."""
    return "\n".join(_arithmetic(plan))


def _arithmetic(plan: Plan) -> Iterator[str]:
    where, facts, footprint = plan.placement, plan.facts, plan.footprint
    job, speed = where.job, Speed.of(plan.machine, EXPECTED)
    per_token = account.kv_token_bytes(facts, job.kv)
    heads = f"{facts.num_full_layers} layers x 2 x {facts.num_kv_heads} heads x {facts.head_dim}"
    yield f"KV: {heads} values in {job.kv} = {per_token:,} B a token"
    pages = account.kv_bytes(facts, job.kv, job.context, PAGE_LEN)
    yield f"    x {job.context:,} tokens in pages of {PAGE_LEN} = {pages:,} B a sequence"
    yield f"state: {footprint.snapshot_bytes:,} B a sequence, and as much a snapshot"
    for kind, size in footprint.classes.items():
        yield f"weights, {kind}: {size:,} B"
    yield f"a token reads {dense_bytes(footprint):,} B of weights that do not move, {2 * footprint.snapshot_bytes:,} B"
    yield f"    of state, at {speed.dense / 1e9:.4g} GB/s, and, at the end, {job.context * per_token:,} B of KV, at"
    yield f"    {speed.kv_rate(job.kv) / 1e9:.4g} GB/s"
    if where.num_units:
        touched = touched_share(facts, 1) * where.num_units
        inside = where.on_device / where.num_units
        unit = footprint.unit_bytes
        missed = touched * (1 - inside) * unit
        yield f"    it touches {touched:.4g} of {where.num_units:,} units ({footprint.mover}) of {unit:,} B;"
        yield f"    {inside:.1%} of these are on the card"
        if missed:
            yield f"    {missed:,.0f} B come at {speed.link / 1e9:.4g} GB/s: {missed / speed.link * 1e3:.3g} ms"
    yield f"a cold prompt takes {prefill_flops(footprint, 0, job.context) / 1e15:,.4g}e15 operations:"
    rates = {"products": speed.products, "experts": speed.expert_products, "attention": speed.attention}
    for name, flops in prefill_parts(footprint, 0, job.context).items():
        rate = rates.get(name, speed.delta)
        if flops:
            yield f"    {name} {flops / 1e15:,.3g}e15 at {rate / 1e12:.3g} TFLOP/s: {flops / rate:.3g} s"
    moved = prefill_bytes(footprint, where, speed, job.context) if footprint.num_cards else {}
    for name, total in moved.items():
        took, at = total / speed.dense, f"{speed.dense / 1e9:.4g} GB/s"
        yield f"    {name} in chunks of {where.chunk_len:,} tokens: {total:.3g} B at {at}: {took:.3g} s"
    left = (where.num_units - where.kept) * footprint.unit_bytes
    if left:
        once = left / speed.copies
        yield f"    {where.num_sweeps} sweeps of {where.sweep_len:,} tokens stream {left:,} B each:"
        yield f"    {once:.3g} s a sweep, behind that"
    kept = job.context * per_token + footprint.snapshot_bytes
    yield f"KV and state of the whole context: {kept:,} B, from RAM at {speed.copies / 1e9:.4g} GB/s and from disk at"
    yield f"    {speed.drive / 1e9:.4g} GB/s"
    shares = [f"{name} {entry['values'][EXPECTED]}" for name, entry in calibration()["fractions"].items()]
    yield f"parts of listed rates, as of {calibration()['date']}: {', '.join(shares)}"
