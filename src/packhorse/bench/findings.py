"""What of a machine will hurt, what it costs and what to do: from the document that the doctor makes. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packhorse.core.errors import PackhorseError
from packhorse.core.units import GIB, format_bytes
from packhorse.facts.known import known_model
from packhorse.facts.machine import machine_of
from packhorse.plan.predict import EXPECTED
from packhorse.plan.solve import Wishes, solve

MODEL, CONTEXT = "qwen3.6-35b-a3b", 65_536
"""What costs are told of."""
HOT_C = 83
WORN_PERCENT = 80
CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT")
PROXIES = ("HTTPS_PROXY", "ALL_PROXY")
"""Environment that decides whom downloads trust, and through whom they go; proxies also in small letters."""
LANE_GB_S = 0.1875
"""What kernels read over a lane of the first PCIe generation; each generation doubles it."""


@dataclass(frozen=True)
class Finding:
    """severity: note, warning or error. text: what is the matter and what it costs; advice: what to do about it."""

    severity: str
    text: str
    advice: str


def findings(seen: Mapping[str, Any]) -> Iterator[Finding]:
    """Of a whole document."""
    yield from _host(seen)
    yield from _disk(seen["disk"])
    yield from _downloads(seen["downloads"])
    if not seen["cards"]:
        why = "; ".join(cause for cause in (seen["unmeasured"], seen["no_cards"]) if cause)
        yield Finding("note", f"No card was found: {why}.", "Models run on the CPU.")
    elif seen["unmeasured"]:
        yield Finding("note", f"Cards were not measured: {seen['unmeasured']}.", "Their listed rates count.")
    for index, card in enumerate(seen["cards"]):
        name = f"Card {index} ({card['name']})"
        yield from _software(name, card, seen["torch"] or "")
        yield from _card(name, card, seen["profile"])
        yield from _load(name, card)


def decode_rate(profile: Mapping[str, Any]) -> float | None:
    """Tokens a second that the plan expects of MODEL at the end of CONTEXT on the machine of a profile; None where it
    does not fit, or the profile is not whole."""
    try:
        plan = solve(known_model(MODEL), machine_of(profile, Path("this machine")), Wishes(context=CONTEXT))
    except PackhorseError:
        return None
    return plan.times[EXPECTED].decode_tok_s_end if plan.times else None


def cost(profile: Mapping[str, Any], better: Mapping[str, Any]) -> str:
    """What the difference of two profiles costs, as a sentence; "" where it costs less than a hundredth."""
    rates = decode_rate(profile), decode_rate({**profile, **better})
    if rates[0] is None or rates[1] is None or rates[1] < 1.01 * rates[0]:
        return ""
    return f" It costs {MODEL} over {CONTEXT:,} tokens {rates[1] - rates[0]:.0f} of {rates[1]:.0f} tok/s."


def _host(seen: Mapping[str, Any]) -> Iterator[Finding]:
    hardware = seen["hardware"]
    x86 = not {"bf16", "i8mm", "sve"} & set(hardware["cpu_features"])
    if x86 and "avx2" not in hardware["cpu_features"]:
        yield Finding("error", "The CPU has no AVX2.", "Products on the CPU will crawl; use another machine.")
    if hardware["ram_bytes"] < seen["installed_ram_bytes"]:
        sizes = f"{format_bytes(hardware['ram_bytes'])} of {format_bytes(seen['installed_ram_bytes'])}"
        yield Finding("note", f"A control group allows {sizes}.", "Raise the container's limit to use more.")
    if (seen["numa_nodes"] or 1) > 1:
        text = f"There are {seen['numa_nodes']} memory nodes; reads across them are slower."
        yield Finding("note", text, "Bind the process to the card's node: numactl --cpunodebind --membind.")
    if seen["wsl"]:
        yield Finding(
            "warning", "WSL2 pins about 1 GiB.", "Experts outside the card are slower than on Linux."
        )


def _disk(disk: Mapping[str, Any]) -> Iterator[Finding]:
    wear = disk["wear"]
    if disk["free_bytes"] < 30 * GIB:
        text = f"{format_bytes(disk['free_bytes'])} are free at {disk['folder']}; a 35B model takes 17 GiB."
        yield Finding("warning", text, "Make room, or give another folder with --cache.")
    slowest = min((rate for name, rate in disk["bytes_s"].items() if name.startswith("read")), default=1e9)
    if slowest < 0.4e9:
        turns = " It is a turning disk." if wear.get("rotational") else ""
        text = f"The disk reads {slowest / 1e9:.2f} GB/s: what is kept there comes back slowly.{turns}"
        yield Finding("warning", text, "Put the cache on an SSD.")
    if "unknown" in wear:
        text = f"How worn the disk is was not told: {wear['unknown']}."
        yield Finding("note", text, "Install smartmontools and run the doctor as root to know.")
    elif not wear["passed"]:
        yield Finding("error", f"The drive {wear['device']} fails its own health check.", "Replace it.")
    elif (wear.get("wear_percent") or 0) >= WORN_PERCENT:
        text = f"The drive {wear['device']} has used {wear['wear_percent']} % of its rated life."
        yield Finding("warning", text, "Bound the store with --disk, or put it on another drive.")


def _downloads(settings: Mapping[str, str]) -> Iterator[Finding]:
    """Of what the environment says of them."""
    for name, value in settings.items():
        if name in CERTIFICATES and not Path(value).exists():
            text = f"{name} names {value}, which is not there: downloads fail."
            yield Finding("warning", text, "Correct it, or unset it.")
        elif name == "HF_ENDPOINT":
            yield Finding("note", f"Models come from {value} (HF_ENDPOINT).", "Unset it for the hub itself.")
        elif name.upper() in PROXIES:
            yield Finding("note", f"Downloads go through {value} ({name}).", "NO_PROXY names exceptions.")


def _software(name: str, card: Mapping[str, Any], torch: str) -> Iterator[Finding]:
    build, cuda = torch.partition("+cu")[2], card.get("driver_cuda")
    if build and cuda and float(f"{build[:2]}.{build[2:]}") > float(cuda):
        text = f"{name}: the driver {card['driver']} runs CUDA {cuda}, and torch is {torch}."
        yield Finding("error", text, f"Update the driver, or install torch for CUDA {cuda} or older.")
    if torch.endswith("+cpu"):
        build = f"for CUDA {cuda} or older" if cuda else "for CUDA"
        yield Finding(
            "error", f"{name} is there, and torch is {torch}.", f"Install a torch that was built {build}."
        )
    wrong = card.get("measured", {}).get("graph")
    if wrong:
        text = f"{name} fails the test of a captured graph: {wrong}."
        yield Finding("error", text, "Install packhorse[gpu-cu13] (or -cu12) and a driver that fits torch.")


def _card(name: str, card: Mapping[str, Any], profile: Mapping[str, Any]) -> Iterator[Finding]:
    measured = card.get("measured", {})
    # Links sleep while nothing is copied: their generation counts under load, their lanes always.
    load = measured.get("load", {})
    now = load.get("pcie_generation"), load.get("pcie_lanes") or card.get("pcie_lanes")
    best = card.get("pcie_max_generation"), card.get("pcie_max_lanes")
    full = LANE_GB_S * 2 ** ((best[0] or 3) - 1) * (best[1] or 16)
    costs = cost(profile, {"link": {"gb_s": full}}) if "card" in profile else ""
    if now[1] and best[1] and now[1] < best[1]:
        text = f"{name} has {now[1]} of {best[1]} PCIe lanes.{costs}"
        yield Finding("warning", text, "Use the slot nearest the CPU, without a riser.")
    elif now[0] and best[0] and now[0] < best[0]:
        text = f"{name} runs PCIe {now[0]} of {best[0]} under load.{costs}"
        yield Finding("warning", text, "Set it in the BIOS; risers and chipsets bound it too.")
    elif "rates" in measured and measured["rates"]["host"] < 0.6e9 * full:
        text = f"{name} reads host memory at {measured['rates']['host'] / 1e9:.1f} GB/s; its link carries {full:.0f}."
        yield Finding("warning", text + costs, "Look for a chipset between, a riser, or other traffic.")
    host = measured.get("host")
    if host and host["pinned"] < host["asked"]:
        text = f"{name}: of {format_bytes(host['asked'])} of host memory {format_bytes(host['pinned'])} can be pinned."
        yield Finding(
            "warning", text, "Experts outside the card pass through a small buffer then: raise the limit."
        )
    if card.get("other_processes"):
        taken = card["vram_bytes"] - card["free_bytes"]
        whole = {**profile.get("card", {}), "usable_gib": card["vram_bytes"] * 0.95 / GIB}
        costs = cost(profile, {"card": whole}) if "card" in profile else ""
        text = f"{name} is used by {card['other_processes']} other processes; {format_bytes(taken)} are taken.{costs}"
        yield Finding("warning", text, "End them.")
    limit, usual = card.get("power_limit_w"), card.get("power_default_w")
    if limit and usual and limit < 0.95 * usual:
        text = f"{name} is capped at {limit:.0f} of its usual {usual:.0f} W: prompts are read more slowly."
        yield Finding("note", text, "nvidia-smi -pl sets the cap.")


def _load(name: str, card: Mapping[str, Any]) -> Iterator[Finding]:
    load = card.get("measured", {}).get("load", {})
    hot = max(card.get("temperature_c") or 0, load.get("temperature_c") or 0)
    if hot >= HOT_C:
        yield Finding("warning", f"{name} is {hot} degrees hot.", "It will slow down: cool it.")
    first, last = load.get("clock_mhz_first"), load.get("clock_mhz")
    if first and last and last < 0.9 * first:
        text = f"{name} falls from {first} to {last} MHz within {load['seconds']:.0f} s of load."
        yield Finding("warning", text, "Cool it: prompts are read that much more slowly.")
    reasons = load.get("throttle", card.get("throttle") or [])
    if reasons:
        severity = "note" if reasons == ["the power cap"] else "warning"
        text = f"{name} is held back under load by {' and '.join(reasons)}."
        yield Finding(severity, text, "Usual for the power cap alone; else see to cooling and supply.")
