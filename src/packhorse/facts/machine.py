"""Machines to plan for, as data: rates, memory and what was measured of them.

A profile is a JSON file: one of facts/profiles, or one that a user writes. `link`, `memory` and `drive` are a
name in facts/parts.json or a rate: {"gb_s": 12}. Rates are in 1e9 bytes a second in files, bytes a second here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from packhorse.core.errors import CorruptFileError, UsageError
from packhorse.core.units import GIB, MIB, parse_bytes
from packhorse.facts.fields import Fields, read_object
from packhorse.facts.hardware import probe

SYSTEM_BYTES = 2 * GIB
"""Host memory left to the system and a desktop at least; a quarter of it where what is free was looked up."""
DISPLAY_BYTES = 768 * MIB
"""What a desktop takes of a card that a display is attached to."""
_FOLDER = Path(__file__).parent
_PARTS = {"link": "links", "memory": "memories", "drive": "drives"}


@dataclass(frozen=True)
class Card:
    """`count` equal cards. usable_bytes: what one process can have of one, by the driver's figure. read_rate: bytes
    a second. flops: dense fp16 products with fp32 sums, a second, of one card. arch: ten times its compute
    capability."""

    name: str
    count: int
    usable_bytes: int
    read_rate: float
    flops: float
    power_w: float
    arch: int


@dataclass(frozen=True)
class Machine:
    """What a plan is made for. card: None for a machine without one. link_rate: of copies from pinned host memory to
    one card. measured: whether the engine's times on this machine are behind the calibration. free: ram_bytes and
    disk_bytes are what is free now, not what is installed. assumed: a card's profile with a common host around it,
    which says nothing about the memory and disk of a real one."""

    name: str
    card: Card | None
    link_rate: float
    memory_rate: float
    drive_rate: float
    ram_bytes: int
    disk_bytes: int
    cores: int
    measured: bool = False
    free: bool = False
    assumed: bool = False
    native_bf16: bool = False
    sources: tuple[str, ...] = ()

    @property
    def num_cards(self) -> int:
        return 0 if self.card is None else self.card.count


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that come with Packhorse, sorted."""
    return tuple(sorted(file.stem for file in (_FOLDER / "profiles").glob("*.json")))


@cache
def _data(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text())
    return loaded


def calibration() -> dict[str, Any]:
    """Efficiencies and fixed sizes that predictions use, with their date and sources."""
    return _data("calibration")


def read_profile(name: str, parts: Mapping[str, str | None] | None = None) -> Machine:
    """The machine called `name`, or that of a file at that path. parts: names in facts/parts.json that replace its
    link, memory or drive.

    Raises UsageError for unknown names, CorruptFileError for a file with missing or impossible values.
    """
    file = _FOLDER / "profiles" / f"{name.lower()}.json"
    if name.lower() not in profile_names():
        file = Path(name).expanduser()
    if not file.is_file():
        known = ", ".join(profile_names())
        hint = f"Profiles are {known}; docs/plan.md has their form."
        raise UsageError(f"There is no profile and no file {name!r}.", hint=hint)
    try:
        return machine_of(read_object(file), file, parts or {})
    except CorruptFileError as error:
        hint = "Correct the file: docs/plan.md has the form of a profile."
        raise CorruptFileError(error.reason, hint=hint, **error.facts) from None


def this_machine(folder: Path, parts: Mapping[str, str | None] | None = None) -> Machine:
    """The machine this runs on without its cards: cores and memory as they are now, free space at `folder`,
    rates of common parts. A profile that `doctor` saved says more."""
    return machine_of(probed_profile(folder), folder, parts or {})


def probed_profile(folder: Path) -> dict[str, Any]:
    """A profile of this machine, of this moment, in which nothing was measured. folder: where free space counts."""
    hardware = probe()
    while not folder.exists():
        folder = folder.parent
    return {
        "name": "this machine",
        "memory": "ddr4-2ch",
        "drive": "nvme3",
        "ram_gib": hardware.ram_available / GIB,
        "disk_gib": shutil.disk_usage(folder).free / GIB,
        "cores": hardware.num_physical_cores,
        "free": True,
        "native_bf16": hardware.has_native_bf16,
        "sources": ["cores, memory and free space as they were; rates of common parts where none is given"],
    }


def machine_of(
    values: Mapping[str, Any], file: Path, parts: Mapping[str, str | None] = MappingProxyType({})
) -> Machine:
    """The machine of a profile's values; `file` is named where one is missing or impossible. parts: as for
    `read_profile`, which raises the same."""
    given = {key: part for key, part in parts.items() if part is not None}
    top = Fields({**values, **given}, file)
    card = top.table("card")
    return Machine(
        name=top.text("name") or file.stem,
        card=None if card is None else _card(card),
        link_rate=0.0 if card is None else _rate(top, "link"),
        memory_rate=_rate(top, "memory"),
        drive_rate=_rate(top, "drive"),
        ram_bytes=int(top.number("ram_gib", low=0.1, high=1e6) * GIB),
        disk_bytes=int(top.number("disk_gib", high=1e9) * GIB),
        cores=top.integer("cores"),
        measured=top.flag("measured", False),
        free=top.flag("free", False),
        assumed=file.parent == _FOLDER / "profiles",
        native_bf16=top.flag("native_bf16", False),
        sources=tuple(str(line) for line in top.items("sources") or ()),
    )


def _card(fields: Fields) -> Card:
    usable = parse_bytes(f"{fields.number('usable_gib', low=0.1, high=1e4):f}GiB")
    reserve = DISPLAY_BYTES if fields.flag("display", False) else 0
    return Card(
        name=fields.text("name") or "a card",
        count=fields.integer("count", 1, high=16),
        usable_bytes=max(0, min(fields.integer("vram_mib") * MIB, usable) - reserve),
        read_rate=1e9 * fields.number("read_gb_s", low=1.0, high=1e6),
        flops=1e12 * fields.number("tflops", low=0.1, high=1e6),
        power_w=fields.number("power_w", 0.0, high=1e5),
        arch=fields.integer("compute_capability", high=1000),
    )


def _rate(top: Fields, key: str) -> float:
    known, value = _data("parts")[_PARTS[key]], top.get(key)
    if isinstance(value, str):
        if value not in known:
            raise UsageError(f"{key} {value!r} is not known.", hint=f"Known are {', '.join(known)}.")
        return 1e9 * float(known[value]["gb_s"])
    return 1e9 * (top.table(key) or Fields({}, top.file, f"{key}.")).number("gb_s", low=1e-3, high=1e6)


def with_caps(machine: Machine, *, vram: int | None, ram: int | None, disk: int | None) -> Machine:
    """The machine with only what a process may take: host memory without what the system and a desktop need, a
    twentieth of the disk free, and of each at most what is given. What is given of an assumed host is what it has."""
    card = machine.card
    if card is not None and vram is not None:
        card = replace(card, usable_bytes=min(card.usable_bytes, vram))
    reserve = SYSTEM_BYTES // 4 if machine.free else max(SYSTEM_BYTES, machine.ram_bytes // 8)
    room, space = max(0, machine.ram_bytes - reserve), machine.disk_bytes * 19 // 20
    if machine.assumed:
        room, space = room if ram is None else ram, space if disk is None else disk
    return replace(
        machine,
        card=card,
        ram_bytes=room if ram is None else min(room, ram),
        disk_bytes=space if disk is None else min(space, disk),
    )


def known_card(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`card` and `link` of a profile for the cards that a driver names (`name`, `vram_bytes`, `free_bytes`,
    `pcie_max_generation`, `pcie_lanes`), with the listed rates of the first; empty for one of no profile."""
    for first in found[:1]:
        for name in profile_names():
            card = json.loads((_FOLDER / "profiles" / f"{name}.json").read_text())["card"]
            if card["name"] in first["name"] and abs(card["vram_mib"] * MIB / first["vram_bytes"] - 1) < 0.05:
                equal = [other for other in found if other["name"] == first["name"]]
                own = {"count": len(equal), "usable_gib": first["free_bytes"] / GIB, "display": False}
                lanes, generation = first["pcie_lanes"] or 16, first["pcie_max_generation"] or 3
                # Three quarters of what a lane carries, which doubles with each generation.
                return {"card": {**card, **own}, "link": {"gb_s": 0.1875 * lanes * 2 ** (generation - 1)}}
    return {}
