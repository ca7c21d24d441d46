"""What this process may use of the machine: cores, memory, instructions. Without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

# Instructions that decide which type products are fast in (x86, then Arm).
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "bf16", "i8mm", "sve")


@dataclass(frozen=True)
class HardwareFacts:
    """num_cores: logical processors this process may keep busy, by affinity and cgroup quota.
    num_physical_cores: of these, counted without their hyper-threads. ram_bytes: installed, or the cgroup's
    limit if that is less. ram_available: what can be allocated without swapping or being killed; page cache
    counts as neither used nor, beyond a cgroup's limit, as free."""

    num_cores: int
    num_physical_cores: int
    ram_bytes: int
    ram_available: int
    cpu_features: tuple[str, ...] = ()

    @property
    def has_native_bf16(self) -> bool:
        """Whether the CPU multiplies bf16 without widening it first."""
        return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(self.cpu_features))


def probe(root: Path = Path("/")) -> HardwareFacts:
    """Looks at this machine now. `root` stands for / where /proc and /sys are read."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    num_cores = len(allowed) if allowed is not None else os.cpu_count() or 1
    quota = _cpu_quota(root)
    num_physical = _physical_cores(root, allowed) or psutil.cpu_count(logical=False) or num_cores
    whole = num_cores if quota is None else max(1, min(num_cores, int(quota)))
    memory = psutil.virtual_memory()
    limits = list(_memory_limits(root))
    return HardwareFacts(
        num_cores=whole,
        num_physical_cores=min(whole, num_physical),
        ram_bytes=min([memory.total, *(limit for limit, _ in limits)]),
        ram_available=max(0, min([memory.available, *(limit - used for limit, used in limits)])),
        cpu_features=_cpu_features(root),
    )


def text_of(path: Path) -> str:
    """What a file of the system says; "" where it is not there."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _cgroups(root: Path, controller: str) -> list[Path]:
    """Folders of this process's control groups for a controller ("": version 2), the innermost first."""
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            base = root / "sys/fs/cgroup" / controller
            inner = base / path.lstrip("/")
            # Inside a container the path may belong to the host: what does not exist reads as nothing.
            return [inner, *(parent for parent in inner.parents if parent.is_relative_to(base))]
    return []


def _cpu_quota(root: Path) -> float | None:
    """Processors' worth of time the control groups allow, or None without a limit."""
    pairs = [text_of(group / "cpu.max").split() for group in _cgroups(root, "")]
    for group in _cgroups(root, "cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        pairs.append([text_of(group / name).strip() for name in names])
    quotas = [
        int(pair[0]) / int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0].isdigit() and pair[1]
    ]
    return min(quotas, default=None)


def _memory_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, used) of every control group with a limit; used without the page cache it could drop."""
    files = [(group, "memory.max", "memory.current", "file", "shmem") for group in _cgroups(root, "")]
    old = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
    files += [(group, *old) for group in _cgroups(root, "memory")]
    found = []
    for group, limit_name, usage_name, cache_name, shared_name in files:
        limit, usage = text_of(group / limit_name).strip(), text_of(group / usage_name).strip()
        if limit.isdigit() and usage.isdigit():
            rows = (line.split() for line in text_of(group / "memory.stat").splitlines())
            stat = {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}
            cache = stat.get(cache_name, 0) - stat.get(shared_name, 0)
            found.append((int(limit), max(0, int(usage) - max(0, cache))))
    return found


def _physical_cores(root: Path, allowed: list[int] | None) -> int:
    """Different cores among the allowed processors; 0 where the system does not say."""
    names = {
        text_of(root / f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list") for n in allowed or ()
    }
    return len(names - {""})


def _cpu_features(root: Path) -> tuple[str, ...]:
    for line in text_of(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return tuple(name for name in _FEATURES if name in value.split())
    return ()
