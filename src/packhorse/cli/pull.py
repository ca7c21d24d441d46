"""packhorse pull: a model into the cache."""

from __future__ import annotations

from packhorse.cli.common import (
    CacheOption,
    JsonOption,
    ModelArgument,
    OfflineOption,
    find_model,
    note,
    print_json,
    title,
)
from packhorse.core.units import format_bytes
from packhorse.facts.read import read_model


def command(
    model: ModelArgument, json: JsonOption = False, cache: CacheOption = None, offline: OfflineOption = False
) -> None:
    """Fetches the model, reads its headers, and prints where it is."""
    path = find_model(model, cache, offline, refresh=True)
    facts = read_model(path)
    for text in facts.notes:
        note(text)
    if json:
        found = {"model": model, "path": str(path), "name": facts.name, "family": facts.family}
        print_json(found | {"container": facts.container, "tensor_bytes": facts.file_bytes})
        return
    note(f"{title(model, facts)}: {facts.family}, {format_bytes(facts.file_bytes)} of weights.")
    print(path)
