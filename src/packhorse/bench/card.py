"""What a card and its link do in this run: rates of plain kernels and copies, as ceilings for everything else; whether
captured graphs work; what becomes of clocks and link under load."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from packhorse.core.errors import DoesNotFitError
from packhorse.core.units import GIB, MIB
from packhorse.facts.hardware import probe
from packhorse.kernels.cuda.launch import launch
from packhorse.kernels.cuda.nvrtc import Variant
from packhorse.store.arena import PinnedArena

READ = Variant("cuda/read.cu", "read_all")
READ_THREADS = 512
HOST_BYTES = 256 * MIB
"""Pinned for the link's rates: what every system grants."""
PINNED_BYTES = 4 * GIB
"""Tried to pin, or a quarter of the memory that is free: WSL2 grants less, and experts outside a card want more."""
VRAM_BYTES = GIB
"""Read for the memory's rate: many times any card's cache."""
LOAD_SIZE = 4096
"""Rows and columns of the products that load a card."""
LOOK_S = 0.1
"""Of work between two looks at a loaded card."""
WARM = 5
"""Looks until clocks have risen."""


def graph_seconds(work: Callable[[], object], rounds: int = 7) -> float:
    """Median seconds of one replay of `work`, captured in a graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(2):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / 1e3


def read(data: Tensor, blocks: int, sink: Tensor) -> None:
    """Enqueue a kernel of so many blocks that reads every byte of `data`, on the card of `sink` int32 [1]."""
    launch(READ, (blocks,), READ_THREADS, data, data.numel() // 16, sink, device=sink.device)


def link_rates(device: torch.device) -> dict[str, float]:
    """Bytes a second that a card reads of its own memory (`vram`) and by kernels of pinned host memory (`host`), and
    that copies take each way (`copy_in`, `copy_out`). Memory that was taken is given back."""
    with torch.cuda.device(device):
        rates = _link_rates(device)
        torch.cuda.empty_cache()
    return rates


def _link_rates(device: torch.device) -> dict[str, float]:
    free, _ = torch.cuda.mem_get_info(device)
    own = torch.ones(min(VRAM_BYTES, free // 4) // MIB * MIB, dtype=torch.uint8, device=device)
    num = min(own.numel(), HOST_BYTES)
    host, part = torch.ones(num, dtype=torch.uint8, pin_memory=True), own[:num]
    sink = torch.zeros(1, dtype=torch.int32, device=device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    works: dict[str, tuple[int, list[Callable[[], object]]]] = {
        "vram": (own.numel(), [partial(read, own, n * sms, sink) for n in (2, 4)]),
        "host": (num, [partial(read, host, n, sink) for n in (80, sms)]),
        "copy_in": (num, [partial(part.copy_, host, non_blocking=True)]),
        "copy_out": (num, [partial(host.copy_, part, non_blocking=True)]),
    }
    return {name: size / min(map(graph_seconds, each)) for name, (size, each) in works.items()}


def product_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Operations a second of a dense product of two random square matrices, the best of five."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def self_test(device: torch.device) -> str:
    """What is wrong with graphs on this card: "" where one of torch's kernels and one of ours, captured together, gives
    at each replay what its inputs then are worth."""
    try:
        with torch.cuda.device(device):
            x, y = (torch.zeros(1 << 16, device=device) for _ in range(2))
            sink = torch.zeros(1, dtype=torch.int32, device=device)

            def work() -> None:
                read(x.view(torch.uint8), 8, sink)
                torch.add(x, 1, out=y)

            work()
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
            for value in (1.0, 2.0, 3.0):
                x.fill_(value)
                graph.replay()
                if not bool((y == value + 1).all()):
                    return "a replay gave other values than its kernels one by one"
    except Exception as error:  # the driver, the compiler or torch: the doctor reports whatever it is
        return f"{type(error).__name__}: {error}"
    return ""


def under_load(device: torch.device, seconds: float, look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Dense products for so long, and what `look` (bench.nvml.state) sees meanwhile: operations a second
    (`products`), `clock_mhz_first` once it has risen, every `throttle` reason, and `clock_mhz`, `temperature_c` and
    `power_w` at the end; then copies, and the `pcie_generation` and `pcie_lanes` during them."""
    with torch.cuda.device(device):
        a, b = (torch.randn(LOAD_SIZE, LOAD_SIZE, device=device).half() for _ in range(2))
        out = torch.empty_like(a)
        batch = max(1, int(LOOK_S / graph_seconds(partial(torch.mm, a, b, out=out))))
        states: list[dict[str, Any]] = []
        began = time.perf_counter()
        while not states or time.perf_counter() - began < seconds:
            for _ in range(batch):
                torch.mm(a, b, out=out)
            states.append(look())
            torch.cuda.synchronize(device)
        elapsed = time.perf_counter() - began
        host = torch.ones(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
        part = torch.empty(HOST_BYTES, dtype=torch.uint8, device=device)
        for _ in range(8):
            part.copy_(host, non_blocking=True)
        link = look()
        torch.cuda.synchronize(device)
    found: dict[str, Any] = {"seconds": elapsed, "products": 2 * LOAD_SIZE**3 * batch * len(states) / elapsed}
    found |= {name: states[-1].get(name) for name in ("clock_mhz", "temperature_c", "power_w")}
    found |= {name: link.get(name) for name in ("pcie_generation", "pcie_lanes")}
    throttle = sorted({reason for state in states for reason in state.get("throttle") or ()})
    return found | {
        "clock_mhz_first": states[min(WARM, len(states) - 1)].get("clock_mhz"),
        "throttle": throttle,
    }


def pinned_bytes(device: torch.device, most: int) -> dict[str, int]:
    """Host memory that was to be pinned for a card (`asked`), and of it what the system pinned (`pinned`), which is
    given back."""
    asked = min(most, probe().ram_available // 4) // MIB * MIB
    try:
        with torch.cuda.device(device):
            PinnedArena(asked).close()
    except DoesNotFitError as error:
        return {"asked": asked, "pinned": int(error.available)}
    return {"asked": asked, "pinned": asked}


def measure_card(device: torch.device, load_s: float, look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`rates` (of link_rates), `host` (of pinned_bytes), `graph` (of self_test) and `load` (of under_load) of a card;
    only `graph` where that says that our kernels do not run."""
    wrong = self_test(device)
    if wrong:
        return {"graph": wrong}
    found = {"graph": "", "rates": link_rates(device), "host": pinned_bytes(device, PINNED_BYTES)}
    found["load"] = under_load(device, load_s, look)
    torch.cuda.empty_cache()
    return found


def card_uuid(device: torch.device) -> str:
    """The name by which NVML knows torch's card."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
