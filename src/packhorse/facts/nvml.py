"""NVML: what the NVIDIA driver says of the processes on its cards, where nvidia-ml-py is installed.

No torch, and no CUDA context: asking takes no memory of a card.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def open_nvml() -> tuple[Any, str]:
    """The module pynvml, ready to be asked, or None and why there is none."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return None, f"no NVIDIA driver: {error}"
    return nvml, ""


def processes(nvml: Any, handle: Any) -> Iterator[tuple[int, int | None]]:
    """(process id, bytes of the card or None where the driver does not say) of each process, once."""
    computing = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    drawing = nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
    yield from {process.pid: process.usedGpuMemory for process in (*drawing, *computing)}.items()


def process_bytes(uuid: str) -> int | None:
    """What this process takes of a card by the driver's figure; None where the driver does not say.

    In a container the driver may know the process by another id: then it is the only one, or not known.
    """
    none: dict[int, int | None] = {}
    found = _ask(lambda nvml: dict(processes(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))), none)
    own = found.get(os.getpid())
    return own if own is not None or len(found) != 1 else next(iter(found.values()))


def _ask(question: Callable[[Any], T], unknown: T) -> T:
    """What NVML answers; `unknown` where it is not there or does not say."""
    nvml, _ = open_nvml()
    try:
        return unknown if nvml is None else question(nvml)
    except nvml.NVMLError:
        return unknown


def text(value: bytes | str) -> str:
    """NVML's strings, which older versions give as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def driver_of() -> str:
    """The driver and the newest CUDA it runs, as the end of a sentence; empty where NVML does not say."""

    def told(nvml: Any) -> str:
        name, cuda = text(nvml.nvmlSystemGetDriverVersion()), nvml.nvmlSystemGetCudaDriverVersion()
        return f"; the driver {name} runs CUDA up to {cuda // 1000}.{cuda % 1000 // 10}"

    return _ask(told, "")


def has_display(uuid: str) -> bool:
    """Whether a display is attached to a card; False where the driver does not say."""
    return _ask(
        lambda nvml: bool(nvml.nvmlDeviceGetDisplayActive(nvml.nvmlDeviceGetHandleByUUID(uuid))), False
    )
