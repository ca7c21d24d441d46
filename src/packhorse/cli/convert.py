"""packhorse convert: a 16-bit checkpoint to few bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packhorse.cli import common
from packhorse.cli.common import byte_progress, find_model, note, print_json
from packhorse.core.units import format_bytes
from packhorse.facts.read import read_model


def command(
    source: common.ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)],
    recipe: Annotated[str, common.option("--recipe", "NAME", "int4-rtn or int8-rtn.")] = "int4-rtn",
    json: common.JsonOption = False,
    cache: common.CacheOption = None,
    offline: common.OfflineOption = False,
) -> None:
    """A conversion that was cut goes on where it was."""
    facts = read_model(find_model(source, cache, offline))
    from packhorse.models.convert import convert

    try:
        with byte_progress(f"converting {facts.name}") as progress:
            conversion = convert(facts, out, recipe, progress, note)
    except KeyboardInterrupt:
        note(f"{out} keeps the files that are whole: the same command goes on after them.")
        raise
    if json:
        print_json({"out": str(out), "recipe": recipe, "bytes": conversion.num_bytes,
                    "source_bytes": facts.file_bytes, "kept": list(conversion.kept)})  # fmt: skip
        return
    if conversion.kept:
        note(f"{len(conversion.kept)} matrices stay as they are: their inputs are no multiple of 128")
    print(f"{out}: {format_bytes(conversion.num_bytes)} from {format_bytes(facts.file_bytes)}")
