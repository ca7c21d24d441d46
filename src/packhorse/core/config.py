"""Settings of an engine: frozen, documented by field, read by the command line for its defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packhorse.core.errors import UsageError
from packhorse.core.formats import COMPUTE_DTYPES, KV_FORMATS
from packhorse.core.types import PAGE_LEN
from packhorse.core.units import GIB

KV_CHOICES = ("auto", *(name for name in KV_FORMATS if name != "fp32"))
"""What EngineConfig.kv may be. fp32 is what auto means in fp32, and gains nothing elsewhere."""

WEIGHTS = ("auto", "packed", "unpacked")
_CHOICES = {"dtype": ("auto", *COMPUTE_DTYPES), "kv": KV_CHOICES, "weights": WEIGHTS}
_LEAST = {
    "sequences": 1, "page_len": 1, "snapshot_len": 1, "context": 1, "threads": 1, "kv_tokens": 1, "chunk_len": 1,
    "snapshots": 0, "disk": 0, "ram": 0,
}  # fmt: skip
"""Least values of numbers that are given."""


def check_least(settings: object, least: Mapping[str, int]) -> None:
    """Raises UsageError where a field is given (not None) and below its least value."""
    for name, low in least.items():
        value = getattr(settings, name)
        if value is not None and value < low:
            raise UsageError(f"{name} is {value}.", hint=f"Give at least {low}.")


@dataclass(frozen=True)
class EngineConfig:
    """Every field is a promise: what is not implemented is refused here, never ignored.

    Raises UsageError where values contradict each other.
    """

    context: int | None = None
    """Tokens one request may hold, prompt and answer. None: the model's own window, as far as memory goes."""
    sequences: int = 4
    """Requests worked on at once; more wait."""
    dtype: str = "auto"
    """fp32, bf16, fp16, or auto: fp32 in exact mode; else bf16 where the machine multiplies it natively."""
    kv: str = "auto"
    """How K and V are stored: fp16, bf16, fp8, k5v4, k4v4, or auto: fp8 on a card that computes in 16 bits, else as
    computed."""
    weights: str = "auto"
    """packed: matrices that the files hold in few bits are computed on as they are; unpacked: in the compute type.
    auto: packed on a card; on a CPU, where unpacked weights were faster when measured, only as memory demands."""
    device: str = "cpu"
    """Where the model runs: cpu or cuda[:N]."""
    as_arch: int | None = None
    """75: the card stands in for one of compute capability 7.5 and does without what such a card lacks."""
    vram: int | None = None
    """Bytes of the card's memory that this process may take, by the driver's figure. None: what is free. Routed
    experts that find no room stay in pinned host memory."""
    exact: bool = False
    """Fixed shapes and order of every sum: chunking, batching and reuse change no bit. fp32, slower."""
    threads: int | None = None
    """CPU threads, for the whole process. None: as many as OMP_NUM_THREADS says, else one for each physical core
    this process may use."""
    page_len: int = PAGE_LEN
    """Tokens a KV page holds."""
    chunk_len: int | None = None
    """Prompt tokens a step reads at most, and the absolute grid on which it ends. A multiple of page_len. None: 1,024
    on a CPU; on a card up to 8,192, as far as its speed under `max_decode_gap` and its memory allow."""
    sweep_len: int | None = None
    """Prompt tokens that pass the layers together, a layer after the other (docs/sweep.md); 0: none, chunks pass all
    layers. None: on a card 65,536 where weights are streamed, else two chunks, as far as the window and memory go; on
    a CPU 0."""
    max_decode_gap: float = 0.25
    """Seconds at most between two tokens of an answer while another prompt is read in a sweep."""
    snapshot_len: int = 8192
    """Absolute grid of recurrent-state snapshots. A multiple of page_len."""
    snapshots: int = 16
    """Recurrent-state snapshots kept for reuse (hybrid models only)."""
    kv_tokens: int | None = None
    """Tokens the KV pool holds in all. None: `sequences` x `context`, as far as memory goes."""
    store: Path | None = None
    """Folder in which what was read is kept for later processes. None: nowhere."""
    disk: int = 64 * GIB
    """Bytes that the folder may take."""
    keep_days: float | None = None
    """Days after which what was written there is deleted, pinned or not. None: never."""
    ram: int = 0
    """Bytes of host memory for what has no room in the KV pool any more."""

    def __post_init__(self) -> None:
        check_least(self, _LEAST)
        for name in ("keep_days", "max_decode_gap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} is {value}.", hint="Give a number above 0.")
        if self.sweep_len and self.sweep_len < (self.chunk_len or self.page_len):
            raise UsageError(
                f"sweep_len is {self.sweep_len}, and a chunk has {self.chunk_len or self.page_len} tokens at least.",
                hint="Give at least chunk_len, or 0 for no sweeps.",
            )
        for name in ("chunk_len", "snapshot_len"):
            if (getattr(self, name) or 0) % self.page_len:
                raise UsageError(
                    f"{name} is {getattr(self, name)}, not a multiple of page_len {self.page_len}.",
                    hint="Boundaries must lie on pages.",
                )
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                hint = f"Choose {', '.join(known)}."
                raise UsageError(f"{name} {getattr(self, name)!r} is not known.", hint=hint)
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise UsageError(f"device {self.device!r} is not known.", hint="Choose cpu, cuda or cuda:N.")
        for name, fits in (("dtype", self.dtype in ("auto", "fp32")), ("device", self.device == "cpu")):
            if self.exact and not fits:
                raise UsageError(
                    f"exact mode computes in fp32 on the CPU, and {name} is {getattr(self, name)}.",
                    hint=f"Leave out --{name} or --exact.",
                )
        if self.as_arch not in (None, 75):
            raise UsageError(f"as_arch is {self.as_arch}.", hint="Only 75 can be stood in for.")
        for name in ("as_arch", "vram"):
            if getattr(self, name) is not None and self.device == "cpu":
                hint = f"Give --device cuda too, or leave out --{name.replace('_', '-')}."
                raise UsageError(f"{name} is for a card, and the device is cpu.", hint=hint)
