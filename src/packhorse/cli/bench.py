"""packhorse bench: measurements. `bench serve` puts load on any server that speaks OpenAI's API; `bench offline` times
a model on this machine, `bench compare` tells two such runs apart; `bench synth` makes up weights to measure with."""

from __future__ import annotations

import json as jsonlib
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from packhorse.bench.serve import Load, Target, run_load
from packhorse.cli import bench_offline as offline
from packhorse.cli.common import (
    JsonOption,
    byte_progress,
    check_file,
    given_names,
    note,
    option,
    print_json,
    write_file,
)
from packhorse.core.errors import UsageError
from packhorse.core.units import format_bytes


class What(StrEnum):
    """What is measured."""

    SERVE = "serve"
    SYNTH = "synth"
    OFFLINE = "offline"
    COMPARE = "compare"


def _argument(name: str, text: str) -> Any:
    return typer.Argument(metavar=name, help=text)


WhatArgument = Annotated[
    What, _argument("WHAT", "serve: load on a server. offline: a model. compare: two runs. synth: weights.")
]
First = Annotated[str | None, _argument("[TARGET]", "offline: the model. synth: the folder. compare: a run.")]
Second = Annotated[str | None, _argument("[AFTER]", "compare: the later run; TARGET is the earlier one.")]
Against = Annotated[str | None, option("--against", "URL", "serve: the server's address.")]
Like = Annotated[str | None, option("--like", "NAME", "synth: the model to take the shapes of.")]
RecipeName = Annotated[str, option("--recipe", "NAME", "synth: int4, int8, balanced or a type.")]
Router = Annotated[str, option("--router", None, "synth: experts wanted alike (uniform) or not (zipf).")]
Layers = Annotated[int | None, option("--layers", "N", "synth: the first N layers. [default: all]")]
ModelName = Annotated[str | None, option("--model", None, "serve: [default: the first that it names]")]
ApiKey = Annotated[str | None, option("--api-key", None, "serve: a bearer key; else OPENAI_API_KEY.")]
Requests = Annotated[int, option("--requests", None, "serve: requests in all.")]
Clients = Annotated[int, option("--clients", None, "serve: requests at once, at most.")]
Rate = Annotated[float | None, option("--rate", None, "serve: a second. [default: as fast as they end]")]
PromptWords = Annotated[int, option("--prompt-words", None, "serve: words of a prompt, about as in tokens.")]
SharedWords = Annotated[int, option("--shared-words", None, "serve: words that all prompts begin with.")]
MaxTokens = Annotated[int, option("--max-tokens", None, "serve: tokens of an answer.")]
Seed = Annotated[int, option("--seed", None, "Of all that is drawn.")]
Report = Annotated[Path | None, option("--report", "FILE", "Write the figures as JSON.")]


_TAKEN = {
    What.SERVE: "against model api_key requests clients rate prompt_words shared_words max_tokens seed report",
    What.SYNTH: "target like recipe router layers seed",
    What.OFFLINE: "target contexts sequences decode warmup vram kv dtype weights device as_arch threads fill_kv "
    "own_tokens tails beside history seed report",
    What.COMPARE: "target after history",
}
"""Parameters of each kind beside `json`."""


def check_given(context: typer.Context, what: What) -> None:
    """Raises UsageError for what was given and would be ignored."""
    taken = {"what", "json", *_TAKEN[what].split()}
    given = given_names(context)
    stray = sorted(f"--{name.replace('_', '-')}" for name in given - taken - {"target", "after"})
    stray += ["a second target"] * ("after" in given - taken) + ["a target"] * ("target" in given - taken)
    if stray:
        raise UsageError(f"bench {what} takes no {', '.join(stray)}.", hint="See packhorse bench --help.")


def command(
    context: typer.Context, what: WhatArgument, target: First = None, after: Second = None,
    against: Against = None, like: Like = None, recipe: RecipeName = "int4", router: Router = "uniform",
    layers: Layers = None, model: ModelName = None, api_key: ApiKey = None, requests: Requests = Load.requests,
    clients: Clients = Load.clients, rate: Rate = None,
    prompt_words: PromptWords = Load.prompt_words, shared_words: SharedWords = Load.shared_words,
    max_tokens: MaxTokens = Load.max_tokens, contexts: offline.Contexts = "4096",
    sequences: offline.Sequences = "1", decode: offline.Decode = 64, warmup: offline.Warmup = 8,
    vram: offline.Vram = None, kv: offline.Kv = "auto", dtype: offline.Dtype = "auto",
    weights: offline.Weights = "auto", device: offline.Device = "cpu", as_arch: offline.AsArch = None,
    threads: offline.Threads = None, fill_kv: offline.FillKv = False, own_tokens: offline.OwnTokens = False,
    tails: offline.Tails = None, beside: offline.Beside = False,
    history: offline.History = None, seed: Seed = Load.seed, report: Report = None, json: JsonOption = False,
) -> None:  # fmt: skip
    """Exit code 1 where a request failed: the figures are printed all the same."""
    check_given(context, what)
    if what is What.SYNTH:
        _synth(target, like, recipe, router=router, layers=layers, seed=seed, json=json)
    elif what is What.COMPARE:
        offline.run_compare(target, after, history, json)
    elif what is What.OFFLINE:
        settings = {
            "contexts": contexts, "sequences": sequences, "vram": vram, "decode": decode, "warmup": warmup,
            "fill_kv": fill_kv, "own_tokens": own_tokens, "tails": tails, "beside": beside, "seed": seed,
        }  # fmt: skip
        config = {"kv": kv, "dtype": dtype, "weights": weights, "device": device, "as_arch": as_arch}
        offline.run_offline(target, settings, config | {"threads": threads}, history, report, json)
    else:
        if against is None:
            raise UsageError("bench serve needs --against URL.", hint="See packhorse bench --help.")
        load = Load(
            requests=requests, clients=clients, prompt_words=prompt_words, shared_words=shared_words,
            max_tokens=max_tokens, rate=rate, seed=seed,
        )  # fmt: skip
        check_file(report)
        _serve(against, load, model, api_key, report, json)


def _serve(
    against: str, load: Load, model: str | None, api_key: str | None, report: Path | None, json: bool
) -> None:
    server = Target(against, api_key or os.environ.get("OPENAI_API_KEY"), load.timeout)
    document = {"server": against, **run_load(server, load, model).document}
    if json:
        print_json(document)
    else:
        print(table(document))
    write_file(report, jsonlib.dumps(document, indent=1) + "\n")
    if document["errors"]:
        failed = sum(document["errors"].values())
        kinds = ", ".join(f"{kind} x{count}" for kind, count in document["errors"].items())
        note(f"{failed} of {document['requests']} requests failed: {kinds}.")
        raise typer.Exit(1)
    note(f"{document['requests']} requests in {document['wall_s']:.1f} s, no error")


def _synth(target: str | None, like: str | None, recipe: str, *, json: bool, **options: Any) -> None:
    if target is None or like is None:
        raise UsageError("bench synth takes a folder and --like NAME.", hint="See packhorse bench --help.")
    from packhorse.bench.synth import synthesize

    with byte_progress(f"writing {like}") as progress:
        size = synthesize(Path(target), like, recipe, progress=progress, **options)
    if json:
        print_json({"out": target, "like": like, "recipe": recipe, "bytes": size, **options})
    else:
        print(f"{target}: {format_bytes(size)} like {like} in {recipe}")


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
