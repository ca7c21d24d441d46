"""packhorse bench: measurements. `bench serve` puts load on any server that speaks OpenAI's API; `bench synth` makes
up the weights of a model to measure with."""

from __future__ import annotations

import json as jsonlib
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from packhorse.bench.serve import Load, Target, run_load
from packhorse.cli.common import JsonOption, byte_progress, note, print_json
from packhorse.core.errors import UsageError
from packhorse.core.units import format_bytes


class What(StrEnum):
    """What is measured."""

    SERVE = "serve"
    SYNTH = "synth"


def command(
    what: Annotated[
        What, typer.Argument(metavar="WHAT", help="serve: load on a server. synth: random packed weights.")
    ],
    out: Annotated[Path | None, typer.Argument(metavar="[OUT]", help="synth: the folder to write.")] = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="URL", help="serve: the server's address.")
    ] = None,
    like: Annotated[
        str | None, typer.Option("--like", metavar="NAME", help="synth: the model to take the shapes of.")
    ] = None,
    recipe: Annotated[str, typer.Option("--recipe", metavar="NAME", help="synth: int4 or int8.")] = "int4",
    router: Annotated[
        str, typer.Option("--router", help="synth: experts wanted alike (uniform) or not (zipf).")
    ] = "uniform",
    layers: Annotated[
        int | None, typer.Option("--layers", metavar="N", help="synth: the first N layers. [default: all]")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="[default: the first that it names]")] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="A bearer key; else that in OPENAI_API_KEY.")
    ] = None,
    requests: Annotated[int, typer.Option("--requests", help="Requests in all.")] = Load.requests,
    clients: Annotated[int, typer.Option("--clients", help="Requests at once, at most.")] = Load.clients,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Requests a second. [default: as fast as they end]")
    ] = None,
    prompt_words: Annotated[
        int, typer.Option("--prompt-words", help="Words of a prompt, about as many tokens.")
    ] = Load.prompt_words,
    shared_words: Annotated[
        int, typer.Option("--shared-words", help="Words that all prompts begin with.")
    ] = Load.shared_words,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of an answer.")] = Load.max_tokens,
    seed: Annotated[int, typer.Option("--seed", help="Of all that is drawn.")] = Load.seed,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the figures as JSON.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Exit code 1 where a request failed: the figures are printed all the same."""
    if what is What.SYNTH:
        _synth(out, like, recipe, router=router, layers=layers, seed=seed, json=json)
        return
    if against is None or out is not None:
        raise UsageError("bench serve takes --against URL and no folder.", hint="See packhorse bench --help.")
    load = Load(
        requests=requests,
        clients=clients,
        prompt_words=prompt_words,
        shared_words=shared_words,
        max_tokens=max_tokens,
        rate=rate,
        seed=seed,
    )
    target = Target(against, api_key or os.environ.get("OPENAI_API_KEY"), load.timeout)
    document = {"server": against, **run_load(target, load, model).document}
    if report is not None:
        report.write_text(jsonlib.dumps(document, indent=1) + "\n")
    if json:
        print_json(document)
    else:
        print(table(document))
    if document["errors"]:
        failed = sum(document["errors"].values())
        kinds = ", ".join(f"{kind} x{count}" for kind, count in document["errors"].items())
        note(f"{failed} of {document['requests']} requests failed: {kinds}.")
        raise typer.Exit(1)
    note(f"{document['requests']} requests in {document['wall_s']:.1f} s, no error")


def _synth(out: Path | None, like: str | None, recipe: str, *, json: bool, **options: Any) -> None:
    if out is None or like is None:
        raise UsageError("bench synth takes a folder and --like NAME.", hint="See packhorse bench --help.")
    from packhorse.bench.synth import synthesize

    with byte_progress(f"writing {like}") as progress:
        size = synthesize(out, like, recipe, progress=progress, **options)
    if json:
        print_json({"out": str(out), "like": like, "recipe": recipe, "bytes": size, **options})
    else:
        print(f"{out}: {format_bytes(size)} like {like} in {recipe}")


def table(document: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [
        f"model                 {document['model']}",
        f"requests/s            {document['requests_per_s']:.2f}",
        f"generated tokens/s    {document['generated_tokens_per_s']:.1f}",
        f"prompt tokens         {document['prompt_tokens']} ({document['cached_tokens']} reused)",
        "",
        f"{'seconds':<18}" + "".join(f"{name:>10}" for name in ("p50", "p90", "p95", "p99", "max")),
    ]
    for key in ("first_token_s", "per_token_s", "between_pieces_s", "request_s"):
        cells = [document[key][name] for name in ("p50", "p90", "p95", "p99", "max")]
        row = "".join(f"{'-':>10}" if cell is None else f"{cell:>10.4f}" for cell in cells)
        lines.append(f"{key.removesuffix('_s').replace('_', ' '):<18}{row}")
    return "\n".join(lines)
