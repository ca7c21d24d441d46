"""Where a measurement comes from: machine, versions, commit and command. No torch."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import packhorse
from packhorse.bench.nvml import cards
from packhorse.facts.hardware import probe

LIBRARIES = ("torch", "cuda-core", "cuda-bindings", "numpy")


def origin(command: Sequence[str]) -> dict[str, Any]:
    """`time`, `command`, `commit`, `versions` and `hardware`, for the document of a benchmark."""
    found = [{name: card[name] for name in ("name", "vram_bytes", "driver")} for card in cards()[0]]
    versions = {"packhorse": packhorse.__version__, "python": platform.python_version()}
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": list(command),
        "commit": commit(),
        "versions": versions | {name: version(name) for name in LIBRARIES},
        "hardware": asdict(probe()) | {"cards": found},
    }


def version(package: str) -> str | None:
    """Of an installed package; None for another."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Of the working tree that this code lies in, with a + where it was changed; None where there is none."""
    git, folder = shutil.which("git"), Path(packhorse.__file__).parents[2]
    if git is None or not (folder / ".git").exists():
        return None

    def ask(*words: str) -> str:
        result = subprocess.run([git, "-C", str(folder), *words], capture_output=True, text=True, check=False)
        return result.stdout.strip()

    return ask("rev-parse", "--short=12", "HEAD") + ("+" if ask("status", "--porcelain", "-uno") else "")
