"""packhorse serve: one model behind OpenAI's API."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packhorse.cli import asking, common
from packhorse.cli.common import find_model, note, option, print_json, store_fields
from packhorse.core.errors import UsageError
from packhorse.facts.read import read_model
from packhorse.plan.report import check_planned, read_saved

if TYPE_CHECKING:
    from packhorse.engine.session import Session

HostOption = Annotated[str | None, option("--host", None, "Address to listen at. [default: 127.0.0.1]")]
PortOption = Annotated[int | None, option("--port", None, "0 takes a free one. [default: 8000]")]
KeyOption = Annotated[
    Path | None, option("--api-key-file", "FILE", "Bearer keys; needed for any address but this machine's.")
]
SequencesOption = Annotated[
    int | None, option("--sequences", "N", "Requests worked on at once. [default: 4]")
]
QueueOption = Annotated[int | None, option("--queue", "N", "Requests that may wait. [default: 64]")]
ConfigOption = Annotated[
    Path | None, option("--config", "FILE", "Settings of this host; options given here win.")
]
NameOption = Annotated[
    str | None, option("--name", None, "What clients call the model. [default: its own name]")
]
KvTokensOption = Annotated[
    int | None, option("--kv-tokens", "N", "Tokens that all requests and prefixes hold.")
]
SnapshotsOption = Annotated[
    int | None, option("--snapshots", "N", "Recurrent states kept (hybrid models). [default: 16]")
]
CorsOption = Annotated[
    list[str] | None, option("--cors", "ORIGIN", "Web pages that may call; may be repeated. [default: none]")
]
BodyLimitOption = Annotated[str | None, option("--body-limit", "SIZE", "Largest request. [default: 8MiB]")]
KeepAliveOption = Annotated[
    float | None, option("--keep-alive", "S", "Seconds of silence before a sign of life. [default: 10]")
]
LogContentsOption = Annotated[bool | None, option("--log-contents", None, "Log prompts and answers too.")]
SuperviseOption = Annotated[bool, option("--supervise", None, "Start the server again where it dies.")]
MaxTokensOption = Annotated[
    int | None, option("--max-tokens", "N", "Where a request does not say. [default: 4096]")
]
DtypeOption = Annotated[str | None, option("--dtype", None, "auto, fp32, bf16 or fp16. [default: auto]")]
WeightsOption = Annotated[
    str | None,
    option("--weights", None, "Weights stored in few bits: auto, packed or unpacked. [default: auto]"),
]
KvOption = Annotated[str | None, option("--kv", None, "auto, fp16, bf16, fp8, k5v4 or k4v4. [default: auto]")]
DeviceOption = Annotated[str | None, option("--device", None, "cpu, cuda or cuda:N. [default: cpu]")]
ExactOption = Annotated[
    bool | None, option("--exact", None, "Reuse and chunking change no bit; fp32, slower.")
]
PlanOption = Annotated[Path | None, option("--plan", "FILE", "Run what `packhorse plan --json` wrote.")]


def command(
    model: common.ModelArgument,
    host: HostOption = None,
    port: PortOption = None,
    api_key_file: KeyOption = None,
    sequences: SequencesOption = None,
    queue: QueueOption = None,
    config: ConfigOption = None,
    plan: PlanOption = None,
    name: NameOption = None,
    context: asking.ContextOption = None,
    kv_tokens: KvTokensOption = None,
    snapshots: SnapshotsOption = None,
    max_tokens: MaxTokensOption = None,
    threads: asking.ThreadsOption = None,
    dtype: DtypeOption = None,
    kv: KvOption = None,
    weights: WeightsOption = None,
    device: DeviceOption = None,
    as_arch: asking.AsArchOption = None,
    exact: ExactOption = None,
    store: common.StoreOption = None,
    disk: common.DiskOption = None,
    keep_days: common.KeepDaysOption = None,
    ram: common.RamOption = None,
    vram: common.VramOption = None,
    chat_template: asking.ChatTemplateOption = None,
    cors: CorsOption = None,
    body_limit: BodyLimitOption = None,
    keep_alive: KeepAliveOption = None,
    log_contents: LogContentsOption = None,
    supervise: SuperviseOption = False,
    json: common.JsonOption = False,
    cache: common.CacheOption = None,
    offline: common.OfflineOption = False,
) -> None:
    """What is wrong with settings is said before the port is bound."""
    from packhorse.server.config import load_config

    server_options = {
        "host": host, "port": port, "queue": queue, "cors": cors, "body_limit": body_limit,
        "keep_alive": keep_alive, "log_contents": log_contents,
        "api_key_file": None if api_key_file is None else api_key_file.resolve(),
    }  # fmt: skip
    model_options = {
        "name": name, "context": context, "sequences": sequences, "kv_tokens": kv_tokens, "snapshots": snapshots,
        "max_tokens": max_tokens, "threads": threads, "dtype": dtype, "kv": kv, "weights": weights,
        "device": device, "as_arch": as_arch, "exact": exact, **store_fields(store, disk, ram, vram, keep_days),
        "chat_template": None if chat_template is None else chat_template.resolve(),
    }  # fmt: skip
    planned = None if plan is None else read_plan(plan, model_options)
    model_options |= planned["engine"] if planned is not None else {}
    settings, model_config = load_config(config, model, server_options, model_options)
    from packhorse.server import run

    if supervise:
        args = [arg for arg in sys.argv[1:] if arg != "--supervise"]
        raise typer.Exit(run.supervise([sys.executable, "-m", "packhorse.cli.main", *args], note))

    def open_session(progress: Callable[[int, int], None]) -> Session:
        path = find_model(model, cache, offline)
        if planned is not None:
            check_planned(planned, read_model(path))
        from packhorse.engine.session import Session  # imports torch

        session = Session.open(
            path, model_config.engine, chat_template=model_config.chat_template, progress=progress
        )
        for text in session.notes:
            note(text)
        note(f"ready: context {session.window:,} tokens, requests at once {model_config.engine.sequences}")
        return session

    def listening(url: str, served: str) -> None:
        note(f"listening on {url} for {served}, loading it")
        if json:
            print_json({"url": url, "model": served})

    run.serve(model, settings, model_config, open_session, listening)


def read_plan(file: Path, options: dict[str, Any]) -> dict[str, Any]:
    """A saved plan. Raises UsageError where `options` (None: not given) hold what it decides, and what read_saved
    raises."""
    planned = read_saved(file)
    given = sorted(key for key in planned["engine"] if options.get(key) is not None)
    if given:
        names = ", ".join(f"--{key.replace('_', '-')}" for key in given)
        raise UsageError(f"The plan decides what {names} would.", hint=f"Leave out {names}, or --plan.")
    return planned
