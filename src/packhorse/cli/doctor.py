"""packhorse doctor: what this machine is, how fast, and what of it will hurt. Imports torch where there is a card."""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any

import typer

from packhorse.cli import common
from packhorse.cli.common import CacheOption, JsonOption, note, option, print_json
from packhorse.cli.plan import MACHINE_FILE
from packhorse.core.units import format_bytes
from packhorse.hub.resolve import default_cache

SaveOption = Annotated[
    bool, option("--save-profile", None, "Keep what was found as the machine that `plan` plans for.")
]

LoadOption = Annotated[
    float,
    typer.Option("--load", metavar="SECONDS", min=0.0, max=600.0,
                 help="How long cards are kept busy; 20 shows whether clocks hold."),
]  # fmt: skip


def command(
    load: LoadOption = 2.0, save_profile: SaveOption = False, json: JsonOption = False, cache: CacheOption = None
) -> None:  # fmt: skip
    """Prints what was found; exit code 1 where something keeps Packhorse from running well."""
    from packhorse.bench.doctor import examine

    folder = cache or default_cache()
    file = folder / MACHINE_FILE
    common.check_folder(folder)
    common.check_file(file if save_profile else None)
    seen = examine(folder, load)
    if json:
        print_json(seen)
    else:
        _print(seen)
    if save_profile:
        common.write_file(file, json_module.dumps(seen["profile"], indent=1) + "\n")
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
        print(f"         {threads} thread{'s read' if threads > 1 else ' reads'} {rate / 1e9:.1f} GB/s")
    print(f"disk     {format_bytes(disk['free_bytes'])} free at {disk['folder']}")
    for name, rate in disk["bytes_s"].items():
        if name != "direct":
            print(f"         {name.replace('_', ' ')} {rate / 1e9:.2f} GB/s")
    wear = disk["wear"]
    if wear.get("wear_percent") is not None:
        print(f"         {wear['device']} has used {wear['wear_percent']} % of its rated life")
    for card in seen["cards"]:
        _print_card(card)
    for finding in seen["findings"]:
        print(f"{finding['severity']:8} {finding['text']} {finding['advice']}")


def _print_card(card: dict[str, Any]) -> None:
    sizes = f"{format_bytes(card['free_bytes'])} of {format_bytes(card['vram_bytes'])} free"
    driver = f", driver {card['driver']} for CUDA {card['driver_cuda']}" if "driver" in card else ""
    print(f"card     {card['name']}, {sizes}{driver}")
    measured = card.get("measured", {})
    if "rates" not in measured:
        return
    rates, load = {name: f"{rate / 1e9:.1f}" for name, rate in measured["rates"].items()}, measured["load"]
    print(f"         reads of it {rates['vram']} GB/s, of pinned memory {rates['host']}, copies in {rates['copy_in']}, "
          f"out {rates['copy_out']}; a captured graph works; {load['products'] / 1e12:.0f} TFLOP/s")  # fmt: skip
    pinned = measured["host"]
    print(
        f"         {format_bytes(pinned['pinned'])} of {format_bytes(pinned['asked'])} of host memory pinned"
    )
    clocks = f"{load['clock_mhz_first']} -> {load['clock_mhz']}"
    told = {"MHz": clocks, "degrees": load["temperature_c"], "W": load["power_w"],
            "PCIe": f"{load['pcie_generation']} x {load['pcie_lanes']}"}  # fmt: skip
    print(f"         under load: {', '.join(f'{name} {value}' for name, value in told.items())}")
