"""What the NVIDIA driver says of cards and of who uses them, through NVML (nvidia-ml-py), where that is installed.

No torch, and no CUDA context: asking takes no memory of a card.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from packhorse.facts.nvml import open_nvml, processes, text

THROTTLE = {
    0x4: "the power cap",
    0x8: "a hardware slowdown",
    0x20: "its temperature",
    0x40: "its temperature (hardware)",
    0x80: "the power supply's brake",
}
"""Why clocks are below what was asked for, by NVML's bits; idling and settings of the user's own are left out."""


def cards() -> tuple[list[dict[str, Any]], str]:
    """What NVML says of each card, and why there is nothing where there is nothing."""
    nvml, why = open_nvml()
    if nvml is None:
        return [], why
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    cuda, driver = nvml.nvmlSystemGetCudaDriverVersion(), text(nvml.nvmlSystemGetDriverVersion())
    return [_card(nvml, handle) | {"driver": driver, "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}"}
            for handle in handles], ""  # fmt: skip


def _card(nvml: Any, handle: Any) -> dict[str, Any]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    looked_up: dict[str, Callable[[], Any]] = {
        "uuid": lambda: text(nvml.nvmlDeviceGetUUID(handle)),
        "pcie_max_generation": lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        "pcie_max_lanes": lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
        "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "power_default_w": lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000,
        "display": lambda: bool(nvml.nvmlDeviceGetDisplayActive(handle)),
        "other_processes": lambda: sum(pid != os.getpid() for pid, _ in processes(nvml, handle)),
    }
    found = {
        "name": text(nvml.nvmlDeviceGetName(handle)),
        "vram_bytes": memory.total,
        "free_bytes": memory.free,
    }
    return found | _ask(nvml, looked_up) | state(nvml, handle)


def state(nvml: Any, handle: Any) -> dict[str, Any]:
    """What of a card changes from moment to moment; None for what it does not tell."""
    looked_up: dict[str, Callable[[], Any]] = {
        "pcie_generation": lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        "pcie_lanes": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        "clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "throttle": lambda: throttle_reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
    }
    return _ask(nvml, looked_up)


def looker(uuid: str) -> Callable[[], dict[str, Any]]:
    """What asks for `state` of the card of that name again and again; nothing is told where NVML is not there."""
    nvml, _ = open_nvml()
    if nvml is None:
        return dict
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    return lambda: state(nvml, handle)


def _ask(nvml: Any, looked_up: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, ask in looked_up.items():
        try:
            found[name] = ask()
        except nvml.NVMLError:  # not every card tells everything
            found[name] = None
    return found


def throttle_reasons(bits: int) -> list[str]:
    """What holds clocks down, in words."""
    return [name for bit, name in THROTTLE.items() if bits & bit]
