"""What a machine is and what of it will hurt: looked up and measured, with what it costs and what to do.

Cards are asked through NVML where its Python package (nvidia-ml-py) is there, and measured through torch where that
sees them: torch is imported for nothing else, and not at all where there is no card.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from packhorse.bench.findings import CERTIFICATES, PROXIES, findings
from packhorse.bench.nvml import cards, looker
from packhorse.bench.origin import version
from packhorse.core.units import GIB, KIB, MIB
from packhorse.facts.hardware import probe, text_of
from packhorse.facts.machine import known_card, probed_profile

BLOCKS = (512 * KIB, 4 * MIB)
"""Reads of the disk store: the smallest and the largest extent."""
MEMORY_BYTES = 64 * MIB
"""Each thread's part of the memory test; larger than a core's share of any cache."""
SETTINGS = ("HF_ENDPOINT", *PROXIES, *map(str.lower, PROXIES), "NO_PROXY", *CERTIFICATES)
"""Environment that decides where downloads go, and whom they trust."""
LOAD_S = 2.0
"""Seconds for which a card is kept busy unless a number is given: long enough for its clocks to rise."""


def memory_rates(max_threads: int) -> dict[int, float]:
    """Bytes a second that 1, 2, 4 .. `max_threads` threads read from memory together, the best of three."""
    counts = sorted({1, max_threads, *(2**n for n in range(1, max_threads.bit_length()))})
    parts = [np.ones(MEMORY_BYTES // 8, np.int64) for _ in range(max_threads)]
    rates = {}
    for count in counts:
        best = 0.0
        with ThreadPoolExecutor(count) as pool:
            for _ in range(3):
                start = time.perf_counter()
                list(pool.map(np.add.reduce, parts[:count]))
                best = max(best, count * MEMORY_BYTES / (time.perf_counter() - start))
        rates[count] = best
    return rates


def disk_rates(folder: Path, num_bytes: int = 256 * MIB) -> dict[str, float]:
    """Bytes a second of a file in `folder`: written and synchronised, then read in each of BLOCKS by four threads,
    past the page cache where the file system allows it (`direct` is 1 there). The file is gone afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"doctor-{os.getpid()}.tmp"
    data = np.random.default_rng(0).integers(0, 256, 4 * MIB, np.uint8).tobytes()
    try:
        start = time.perf_counter()
        with file.open("wb") as out:
            for _ in range(num_bytes // len(data)):
                out.write(data)
            os.fsync(out.fileno())
        rates = {"write": num_bytes / (time.perf_counter() - start)}
        for block in BLOCKS:
            rates[f"read_{block // KIB}k"] = read_rate(file, num_bytes, block)
        handle, direct = _open(file)
        os.close(handle)
        return rates | {"direct": float(direct)}
    finally:
        file.unlink(missing_ok=True)


def read_rate(file: Path, num_bytes: int, block: int) -> float:
    """Bytes a second at which four threads read the first `num_bytes` of a file in blocks, past the page cache where
    the file system allows it."""
    num_bytes = min(num_bytes, file.stat().st_size)
    handle, direct = _open(file)
    if not direct and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(thread: int) -> None:
        with mmap.mmap(-1, block) as buffer:  # page-aligned, as direct reads must be
            for offset in range(thread * block, num_bytes, 4 * block):
                os.preadv(handle, [buffer], offset)

    try:
        start = time.perf_counter()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(read, range(4)))
        return num_bytes / (time.perf_counter() - start)
    finally:
        os.close(handle)


def _open(file: Path) -> tuple[int, bool]:
    """A file to read, and whether reads pass the page cache by."""
    try:
        return os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0)), hasattr(os, "O_DIRECT")
    except OSError:
        return os.open(file, os.O_RDONLY), False


def disk_wear(folder: Path) -> dict[str, Any]:
    """What SMART says of the drive under a folder: `device`, `rotational`, `passed`, `wear_percent` of its rated life,
    `written_bytes`, `temperature_c`, each where it is told; `unknown`: why nothing is."""
    number = folder.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if not block.exists():
        return {"unknown": "the folder lies on no drive that this system shows"}
    if (block / "partition").exists():
        block = block.parent
    while slaves := sorted(block.glob("slaves/*")):  # encrypted or logical volumes
        block = slaves[0].resolve()
    turns = text_of(block / "queue/rotational").strip() == "1"
    found: dict[str, Any] = {"device": block.name, "rotational": turns}
    tool = shutil.which("smartctl")
    if tool is None:
        return found | {"unknown": "smartctl is not installed"}
    try:
        words = [tool, "-j", "-a", f"/dev/{block.name}"]
        run = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
        return found | smart_figures(json.loads(run.stdout))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return found | {"unknown": f"smartctl gives no answer: {error}"}


def smart_figures(told: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of `disk_wear` in smartctl's document."""
    passed, log = told.get("smart_status", {}).get("passed"), told.get("nvme_smart_health_information_log")
    if passed is None:
        messages = [line.get("string", "") for line in told.get("smartctl", {}).get("messages", [])]
        return {"unknown": f"smartctl says nothing of its health: {'; '.join(messages) or 'no reason given'}"}
    found = {"passed": passed, "temperature_c": told.get("temperature", {}).get("current")}
    if not log:
        return found
    return found | {
        "wear_percent": log["percentage_used"],
        "written_bytes": 512_000 * log["data_units_written"],
    }


def measured_cards(found: list[dict[str, Any]], load_s: float) -> tuple[list[dict[str, Any]], str]:
    """The cards with what torch measures of them under `measured` (bench.card.measure_card), and why nothing was
    where nothing was. A card that NVML does not show, but torch does, is added."""
    if not found and not Path("/proc/driver/nvidia").exists() and not Path("/dev/dxg").exists():
        return found, "there is no NVIDIA driver"
    try:
        import torch

        from packhorse.bench.card import card_uuid, measure_card
    except (ImportError, OSError) as error:
        return found, f"torch cannot be used: {error}"
    if not torch.cuda.is_available():
        return found, f"torch {torch.__version__} sees no card"
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        uuid, properties = card_uuid(device), torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        mine = next((card for card in found if card.get("uuid") == uuid), None)
        if mine is None:
            mine = {"uuid": uuid, "name": properties.name, "vram_bytes": total, "free_bytes": free}
            found.append(mine)
        mine["compute_capability"] = 10 * properties.major + properties.minor
        mine["measured"] = measure_card(device, load_s, looker(uuid))
    return found, ""


def card_profile(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`card` and `link` of a profile for these cards: listed rates of a known one, and what was measured in their
    place; empty where nothing is known of the first."""
    known = known_card(found) if found and "pcie_max_generation" in found[0] else {}
    measured = found[0].get("measured", {}) if found else {}
    if "rates" not in measured:
        return known
    first = found[0]
    card = known.get("card") or {
        "name": first["name"], "count": sum(other["name"] == first["name"] for other in found),
        "compute_capability": first["compute_capability"], "vram_mib": first["vram_bytes"] // MIB,
        "usable_gib": first["free_bytes"] / GIB, "tflops": round(measured["load"]["products"] / 1e12, 1),
        "power_w": first.get("power_limit_w") or 0.0,
    }  # fmt: skip
    rates = {name: round(rate / 1e9, 2) for name, rate in measured["rates"].items()}
    return {"card": {**card, "read_gb_s": rates["vram"]}, "link": {"gb_s": rates["copy_in"]}}


def examine(folder: Path, load_s: float = LOAD_S) -> dict[str, Any]:
    """Everything about this machine as a JSON-ready document, with `findings` and a `profile` for `plan`.

    folder: of the cache, whose disk is measured with a file of 256 MiB where there is room for it. load_s: seconds for
    which each card is kept busy.
    """
    hardware, profile = probe(), probed_profile(folder)
    rates = memory_rates(hardware.num_cores)
    # A saved profile outlives this moment: installed memory counts, of which plans leave a part to the system.
    profile |= {"ram_gib": hardware.ram_bytes / GIB, "free": False}
    profile["memory"] = {"gb_s": round(max(rates.values()) / 1e9, 2)}
    disk: dict[str, float] = {}
    folder.mkdir(parents=True, exist_ok=True)
    if profile["disk_gib"] > 1:
        disk = disk_rates(folder)
        profile["drive"] = {"gb_s": round(disk[f"read_{BLOCKS[-1] // KIB}k"] / 1e9, 3)}
    listed, why = cards()
    found, unmeasured = measured_cards(listed, load_s)
    profile |= card_profile(found)
    rates_of = "listed" if unmeasured else "measured by kernels where it has them, else listed"
    profile["sources"] = [
        f"doctor: memory read by all threads, file read in blocks of 4 MiB; a card's rates are {rates_of}"
    ]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    document = {
        "hardware": asdict(hardware),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "installed_ram_bytes": psutil.virtual_memory().total,
        "memory_bytes_s": rates,
        "disk": {"folder": str(folder), "free_bytes": int(profile["disk_gib"] * GIB), "bytes_s": disk,
                 "wear": disk_wear(folder)},
        "locked_memory_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "wsl": "microsoft" in text_of(Path("/proc/version")).lower(),
        "cards": found,
        "no_cards": why,
        "unmeasured": unmeasured,
        "torch": version("torch"),
        "downloads": {name: _shown(os.environ[name]) for name in SETTINGS if name in os.environ},
        "profile": profile,
    }  # fmt: skip
    document["findings"] = [asdict(finding) for finding in findings(document)]
    return document


def _shown(setting: str) -> str:
    """A setting without the name and password that an address may hold."""
    return re.sub(r"(?<=//)[^/@]+@", "", setting)
