"""GGUF files as ModelFacts."""

from pathlib import Path

from packhorse.core.errors import UnsupportedModelError
from packhorse.facts.model import ModelFacts


def read_gguf(file: Path) -> ModelFacts:
    """Not built yet."""
    raise UnsupportedModelError(f"{file}: GGUF files are not supported.", hint="Give a folder.")
