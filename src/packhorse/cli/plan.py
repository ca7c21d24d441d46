"""packhorse plan: what fits, where it goes and how fast it will be, before a byte is loaded. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packhorse.cli.common import CacheOption, JsonOption, OfflineOption, find_model, option, print_json
from packhorse.core.errors import DoesNotFitError, UsageError
from packhorse.core.units import parse_bytes
from packhorse.facts.known import known_model, known_names
from packhorse.facts.machine import read_profile, this_machine
from packhorse.facts.model import ModelFacts
from packhorse.facts.read import read_model
from packhorse.hub.resolve import default_cache
from packhorse.plan.report import explain, table, to_document
from packhorse.plan.solve import Wishes, solve

MACHINE_FILE = "machine.json"
"""What `doctor --save-profile` writes in the cache folder, and `plan` reads where no profile is named."""


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="As in other commands, or a name like qwen3.6-35b-a3b.")
]
Profile = Annotated[str | None, option("--profile", "NAME|FILE", "The machine. [default: this one]")]
Context = Annotated[int | None, option("--context", "N", "Tokens a request may hold.")]
Sequences = Annotated[int, option("--sequences", "N", "Requests at once.")]
Vram = Annotated[
    str | None, option("--vram", "SIZE", "Of each card. [default: auto, all a process can have]")
]
Ram = Annotated[str | None, option("--ram", "SIZE", "Host memory of the process.")]
Disk = Annotated[str | None, option("--disk", "SIZE", "Disk for weights and documents.")]
Kv = Annotated[str | None, option("--kv", "CODEC", "auto, fp16, bf16, fp8, k5v4 or k4v4.")]
RecipeName = Annotated[str | None, option("--recipe", "NAME", "int4, balanced, int8, bf16 ..., or 2.5bit.")]
Draft = Annotated[int, option("--draft", "N", "Tokens guessed ahead by the model's own head.")]
HostKv = Annotated[int, option("--host-kv", "N", "Tokens of a request whose KV stays in host memory.")]
Prefer = Annotated[str, option("--prefer", "speed|context|quality", "Decides what is not given.")]
Link = Annotated[str | None, option("--link", "NAME", "Such as pcie3-x4.")]
Memory = Annotated[str | None, option("--memory", "NAME", "Such as ddr5-2ch.")]
Drive = Annotated[str | None, option("--drive", "NAME", "Such as nvme4 or sata-ssd.")]
Tariff = Annotated[float | None, option("--tariff", "X", "Price of a kilowatt-hour.")]
Explain = Annotated[bool, option("--explain", None, "Show the arithmetic.")]


def command(
    model: Model, profile: Profile = None, context: Context = None, sequences: Sequences = 1, vram: Vram = None,
    ram: Ram = None, disk: Disk = None, kv: Kv = None, recipe: RecipeName = None, draft: Draft = 0,
    host_kv: HostKv = 0, prefer: Prefer = "speed", link: Link = None, memory: Memory = None, drive: Drive = None,
    tariff: Tariff = None, show_arithmetic: Explain = False, json: JsonOption = False, cache: CacheOption = None,
    offline: OfflineOption = False,
) -> None:  # fmt: skip
    """Prints the plan; exit code 3 where it does not fit, with the document all the same."""
    facts = _facts(model, cache, offline)
    folder = cache or default_cache()
    if profile is None and (folder / MACHINE_FILE).is_file():
        profile = str(folder / MACHINE_FILE)
    parts = {"link": link, "memory": memory, "drive": drive}
    machine = this_machine(folder, parts) if profile is None else read_profile(profile, parts)
    if tariff is not None and not 0 <= tariff < float("inf"):
        raise UsageError(f"tariff is {tariff}.", hint="Give the price of a kilowatt-hour, 0 or more.")
    of_cards = {"--vram": vram, "--link": link, "--host-kv": host_kv, "--tariff": tariff}
    given = [name for name, value in of_cards.items() if value not in (None, 0, "auto")]
    if machine.card is None and given:
        hint = "Name a machine with a card (--profile), or leave them out."
        raise UsageError(f"{machine.name} has no card for {', '.join(given)}.", hint=hint)
    sizes = {"vram": None if vram == "auto" else vram, "ram": ram, "disk": disk}
    caps = {name: None if size is None else parse_bytes(size) for name, size in sizes.items()}
    wishes = Wishes(context, sequences, kv, recipe, draft=draft, host_kv=host_kv, prefer=prefer, **caps)
    plan = solve(facts, machine, wishes)
    if json:
        print_json(to_document(plan, model, tariff))
    else:
        print(table(plan, tariff))
        if show_arithmetic:
            print("\n" + explain(plan))
    if not plan.fits:
        raise typer.Exit(DoesNotFitError.exit_code)


def _facts(model: str, cache: Path | None, offline: bool) -> ModelFacts:
    if model.lower() in known_names() and not Path(model).exists():
        return known_model(model)
    try:
        path = find_model(model, cache, offline)
    except UsageError as error:
        hint = f"{error.hint} Names that are built in: {', '.join(known_names())}."
        raise UsageError(error.reason, hint=hint, **error.facts) from None
    return read_model(path)
