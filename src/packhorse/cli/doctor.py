"""packhorse doctor: what this machine is, how fast, and what of it will hurt. Imports no torch."""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any

import typer

from packhorse.cli.common import CacheOption, JsonOption, note, print_json
from packhorse.cli.plan import MACHINE_FILE
from packhorse.core.units import format_bytes
from packhorse.hub.resolve import default_cache

SaveOption = Annotated[
    bool,
    typer.Option(
        "--save-profile", help="Keep what was found as the machine that `plan` plans for.", show_default=False
    ),
]


def command(save_profile: SaveOption = False, json: JsonOption = False, cache: CacheOption = None) -> None:
    """Prints what was found; exit code 1 where something keeps Packhorse from running well."""
    from packhorse.bench.doctor import examine

    folder = cache or default_cache()
    seen = examine(folder)
    if json:
        print_json(seen)
    else:
        _print(seen)
    if save_profile:
        file = folder / MACHINE_FILE
        file.write_text(json_module.dumps(seen["profile"], indent=1) + "\n")
        note(f"plans are for this machine from now on: {file}")
    if any(finding["severity"] == "error" for finding in seen["findings"]):
        raise typer.Exit(1)


def _print(seen: dict[str, Any]) -> None:
    hardware, disk = seen["hardware"], seen["disk"]
    print(
        f"cores    {hardware['num_physical_cores']}, {' '.join(hardware['cpu_features']) or 'nothing special'}"
    )
    print(f"memory   {format_bytes(hardware['ram_available'])} of {format_bytes(hardware['ram_bytes'])} free")
    for threads, rate in seen["memory_bytes_s"].items():
        print(f"         {threads} threads read {rate / 1e9:.1f} GB/s")
    print(f"disk     {format_bytes(disk['free_bytes'])} free at {disk['folder']}")
    for name, rate in disk["bytes_s"].items():
        if name != "direct":
            print(f"         {name.replace('_', ' ')} {rate / 1e9:.2f} GB/s")
    for card in seen["cards"]:
        print(
            f"card     {card['name']}, {format_bytes(card['free_bytes'])} of {format_bytes(card['vram_bytes'])} free"
        )
    for finding in seen["findings"]:
        print(f"{finding['severity']:8} {finding['text']} {finding['advice']}")
