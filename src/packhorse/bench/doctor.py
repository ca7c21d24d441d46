"""What a machine is and what of it will hurt: looked up, and measured where a CPU can measure it. No torch.

Cards are asked through NVML where its Python package (nvidia-ml-py) is there; their rates are not measured here.
"""

from __future__ import annotations

import importlib
import mmap
import os
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from packhorse.core.units import GIB, KIB, MIB, format_bytes
from packhorse.facts.hardware import probe
from packhorse.facts.machine import known_card, probed_profile

BLOCKS = (512 * KIB, 4 * MIB)
"""Reads of the disk store: the smallest and the largest extent."""
MEMORY_BYTES = 64 * MIB
"""Each thread's part of the memory test; larger than a core's share of any cache."""
SETTINGS = ("HF_ENDPOINT", "HTTPS_PROXY", "https_proxy", "NO_PROXY", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
"""Environment that decides where downloads go, and whom they trust."""


@dataclass(frozen=True)
class Finding:
    """severity: note, warning or error. text: what is the matter; advice: what to do about it."""

    severity: str
    text: str
    advice: str


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
        try:
            handle, direct = os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0)), hasattr(os, "O_DIRECT")
        except OSError:
            handle, direct = os.open(file, os.O_RDONLY), False
        try:
            for block in BLOCKS:
                if not direct and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                rates[f"read_{block // KIB}k"] = _read_rate(handle, num_bytes, block)
        finally:
            os.close(handle)
        return rates | {"direct": float(direct)}
    finally:
        file.unlink(missing_ok=True)


def _read_rate(handle: int, num_bytes: int, block: int) -> float:
    def read(thread: int) -> None:
        with mmap.mmap(-1, block) as buffer:  # page-aligned, as direct reads must be
            for offset in range(thread * block, num_bytes, 4 * block):
                os.preadv(handle, [buffer], offset)

    start = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
    return num_bytes / (time.perf_counter() - start)


def cards() -> tuple[list[dict[str, Any]], str]:
    """What NVML says of each card, and why there is nothing where there is nothing."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return [], "nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return [], f"no NVIDIA driver: {error}"
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    cuda, driver = nvml.nvmlSystemGetCudaDriverVersion(), _text(nvml.nvmlSystemGetDriverVersion())
    return [_card(nvml, handle) | {"driver": driver, "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}"}
            for handle in handles], ""  # fmt: skip


def _card(nvml: Any, handle: Any) -> dict[str, Any]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    looked_up = {
        "pcie_generation": lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        "pcie_lanes": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        "pcie_max_generation": lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        "pcie_max_lanes": lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "display": lambda: bool(nvml.nvmlDeviceGetDisplayActive(handle)),
        "other_processes": lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
    }
    found: dict[str, Any] = {"name": _text(nvml.nvmlDeviceGetName(handle))}
    found |= {"vram_bytes": memory.total, "free_bytes": memory.free}
    for name, ask in looked_up.items():
        try:
            found[name] = ask()
        except nvml.NVMLError:  # not every card tells everything
            found[name] = None
    return found


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def examine(folder: Path) -> dict[str, Any]:
    """Everything about this machine as a JSON-ready document, with `findings` and a `profile` for `plan`.

    folder: of the cache, whose disk is measured with a file of 256 MiB where there is room for it.
    """
    hardware, profile = probe(), probed_profile(folder)
    rates = memory_rates(hardware.num_cores)
    # A saved profile outlives this moment: installed memory counts, of which plans leave a part to the system.
    profile |= {"ram_gib": hardware.ram_bytes / GIB, "free": False}
    profile["memory"] = {"gb_s": round(max(rates.values()) / 1e9, 2)}
    disk: dict[str, float] = {}
    if profile["disk_gib"] > 1:
        disk = disk_rates(folder)
        profile["drive"] = {"gb_s": round(disk[f"read_{BLOCKS[-1] // KIB}k"] / 1e9, 3)}
    found, why = cards()
    profile |= known_card(found)
    profile["sources"] = [
        "doctor: memory read by all threads, file read in blocks of 4 MiB; a card's rates are listed"
    ]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    document = {
        "hardware": asdict(hardware),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "installed_ram_bytes": psutil.virtual_memory().total,
        "memory_bytes_s": rates,
        "disk": {"folder": str(folder), "free_bytes": int(profile["disk_gib"] * GIB), "bytes_s": disk},
        "locked_memory_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "wsl": "microsoft" in _file("/proc/version").lower(),
        "cards": found,
        "no_cards": why,
        "torch": _version("torch"),
        "downloads": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "profile": profile,
    }
    document["findings"] = [asdict(finding) for finding in _findings(document)]
    return document


def _file(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _findings(seen: dict[str, Any]) -> Iterator[Finding]:
    hardware, disk = seen["hardware"], seen["disk"]
    x86 = not {"bf16", "i8mm", "sve"} & set(hardware["cpu_features"])
    if x86 and "avx2" not in hardware["cpu_features"]:
        yield Finding("error", "The CPU has no AVX2.", "Products on the CPU will crawl; use another machine.")
    if hardware["ram_bytes"] < seen["installed_ram_bytes"]:
        sizes = f"{format_bytes(hardware['ram_bytes'])} of {format_bytes(seen['installed_ram_bytes'])}"
        yield Finding("note", f"A control group allows {sizes}.", "Raise the container's limit to use more.")
    if (seen["numa_nodes"] or 1) > 1:
        text = f"There are {seen['numa_nodes']} memory nodes; reads across them are slower."
        yield Finding("note", text, "Bind the process to the card's node: numactl --cpunodebind --membind.")
    if disk["free_bytes"] < 30 * GIB:
        text = f"{format_bytes(disk['free_bytes'])} are free at {disk['folder']}; a 35B model takes 17 GiB."
        yield Finding("warning", text, "Make room, or give another folder with --cache.")
    slowest = min((rate for name, rate in disk["bytes_s"].items() if name.startswith("read")), default=1e9)
    if slowest < 0.4e9:
        text = f"The disk reads {slowest / 1e9:.2f} GB/s: what is kept there comes back slowly."
        yield Finding("warning", text, "Put the cache on an SSD.")
    if seen["wsl"]:
        yield Finding(
            "warning", "WSL2 pins about 1 GiB.", "Experts outside the card are slower here than on Linux."
        )
    if not seen["cards"]:
        yield Finding("note", f"No card was found: {seen['no_cards']}.", "Models run on the CPU.")
    for index, card in enumerate(seen["cards"]):
        yield from _card_findings(f"Card {index} ({card['name']})", card, seen["torch"] or "")


def _card_findings(name: str, card: dict[str, Any], torch: str) -> Iterator[Finding]:
    if card["pcie_lanes"] and card["pcie_max_lanes"] and card["pcie_lanes"] < card["pcie_max_lanes"]:
        text = f"{name} has {card['pcie_lanes']} of {card['pcie_max_lanes']} PCIe lanes."
        yield Finding("warning", text, "Use the slot nearest the CPU; compare `plan --link`.")
    if card["other_processes"]:
        yield Finding("warning", f"{name} is used by {card['other_processes']} other processes.", "End them.")
    if (card["temperature_c"] or 0) >= 83:
        yield Finding(
            "warning", f"{name} is {card['temperature_c']} degrees hot.", "It will slow down: cool it."
        )
    build = torch.partition("+cu")[2]
    if build and float(f"{build[:2]}.{build[2:]}") > float(card["driver_cuda"]):
        text = f"{name}: the driver {card['driver']} runs CUDA {card['driver_cuda']}, and torch is {torch}."
        yield Finding(
            "error", text, f"Update the driver, or install torch for CUDA {card['driver_cuda']} or older."
        )
    if torch.endswith("+cpu"):
        yield Finding("error", f"{name} is there, and torch is {torch}.", "Install a CUDA build of torch.")
