"""Models known by name: what can be planned, or made up for a benchmark, without a file of theirs.

One JSON file an architecture in facts/models: `names`, `config` (as in the model's own config.json) and the
`source` of its values.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from packhorse.core.errors import UsageError
from packhorse.facts.config_json import config_fields
from packhorse.facts.model import ModelFacts

_FOLDER = Path(__file__).parent / "models"


def known_names() -> tuple[str, ...]:
    """All names, sorted."""
    return tuple(sorted(_entries()))


def known_config(name: str) -> dict[str, Any]:
    """config.json of the model called `name`, in any case; a fresh copy. Raises UsageError for another name."""
    file = _entries().get(name.lower())
    if file is None:
        raise UsageError(f"No model is known as {name!r}.", hint=f"Known are {', '.join(known_names())}.")
    config: dict[str, Any] = json.loads(file.read_text())["config"]
    return config


def known_model(name: str) -> ModelFacts:
    """Facts of the model called `name`, in any case, without tensors (container "config").

    Raises UsageError for a name that is not known.
    """
    config = known_config(name)
    file = _entries()[name.lower()]
    return ModelFacts(name=name.lower(), path=file, container="config", **config_fields(config, file))


@cache
def _entries() -> dict[str, Path]:
    return {name: file for file in _FOLDER.glob("*.json") for name in json.loads(file.read_text())["names"]}
