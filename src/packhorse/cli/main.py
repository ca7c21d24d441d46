"""The command's frame: which commands there are, and what becomes of errors.

A command is one line in COMMANDS. Its module is imported when it is used, so that `packhorse --help` is quick
and imports no torch.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from packhorse import __version__
from packhorse.cli.common import as_typed
from packhorse.core.errors import PackhorseError, UsageError

INTERRUPTED = 130
BROKEN_PIPE = 141
"""What shells show for a command that SIGPIPE ended."""


class Entry(NamedTuple):
    """Where a command lives: a module with a function `command`, and its line in the help."""

    module: str
    help: str


COMMANDS: dict[str, Entry] = {
    "pull": Entry("packhorse.cli.pull", "Fetch a model into the cache, or bring it up to date."),
    "inspect": Entry("packhorse.cli.inspect", "Show what a model is, without loading it."),
    "plan": Entry("packhorse.cli.plan", "Say what fits a machine and how fast it will be."),
    "convert": Entry("packhorse.cli.convert", "Pack a 16-bit checkpoint into 4 or 8 bits."),
    "ask": Entry("packhorse.cli.ask", "Ask one question about documents."),
    "chat": Entry("packhorse.cli.chat", "Ask question after question; what was read is not read again."),
    "demo": Entry("packhorse.cli.demo", "Watch a small model read a document once and answer two questions."),
    "serve": Entry("packhorse.cli.serve", "Serve a model through OpenAI's API."),
    "bench": Entry("packhorse.cli.bench", "Measure a model here, or a server under load; make up weights."),
    "verify": Entry("packhorse.cli.verify", "Measure whether a model finds what it has read."),
    "cache": Entry("packhorse.cli.cache", "Show, pin, check and delete what a store holds."),
    "doctor": Entry("packhorse.cli.doctor", "Look at this machine: how fast it is and what will hurt."),
    "version": Entry("packhorse.cli.version", "Print the versions of packhorse and what it runs on."),
}

# Typer carries Click inside it in some versions and uses the package in others: its classes in both.
_ClickUsageError: type[Any] = typer.BadParameter.__bases__[0]
_ClickError: type[Any] = _ClickUsageError.__bases__[0]


class _Commands(TyperGroup):
    """The table as a group: the help shows its lines, and only running a command imports its module."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = COMMANDS.get(cmd_name)
        return None if entry is None else TyperCommand(cmd_name, help=entry.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(str(name)), rest


def load_command(name: str) -> Any:
    """The command as its module defines it, ready to run; imports that module."""
    entry = COMMANDS[name]
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, help=entry.help)(importlib.import_module(entry.module).command)
    return typer.main.get_command(single)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"packhorse {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="packhorse",
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help texts hold brackets of their own
    help="Ask questions about very long documents, on the computer you have.",
)


@app.callback(invoke_without_command=True)
def _packhorse(
    ctx: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def run(args: Sequence[str]) -> int:
    """Runs the command line `args` and returns its exit code; errors are printed, never raised.

    Faults of ours are the exception: they keep their traceback.
    """
    try:
        code = typer.main.get_command(app)(args=list(args), prog_name="packhorse", standalone_mode=False)
        if code == INTERRUPTED:  # some versions of Typer have made an exit code of it
            raise KeyboardInterrupt
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except PackhorseError as error:
        _report(error, args)
        return error.exit_code
    except _ClickError as error:
        context = getattr(error, "ctx", None)
        usage = f"See `{context.command_path} --help`." if context is not None else "See `packhorse --help`."
        reason = error.format_message().replace("Value error, ", "")  # pydantic's words
        _report(UsageError(reason, hint=usage), args)
        return UsageError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("Interrupted.", file=sys.stderr)
        if "--json" in args and args[0] != "serve":  # which has printed its document: so it is meant to end
            print(json.dumps({"error": {"kind": "interrupted", "reason": "Interrupted.", "hint": ""}}))
        return INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        # The reader has gone (`| head`). Typer makes a SystemExit of it.
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        # Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _report(error: PackhorseError, args: Sequence[str]) -> None:
    """The error on standard error, and as a document on standard output where JSON was asked for."""
    reason, hint = as_typed(error.reason, args), as_typed(error.hint, args)
    print(f"Error: {reason}", file=sys.stderr)
    if hint:
        print(hint, file=sys.stderr)
    if "--json" in args:
        document = {"kind": error.kind, "reason": reason, "hint": hint, **error.facts}
        print(json.dumps({"error": document}, default=str, ensure_ascii=False), flush=True)


def main() -> None:
    """Entry point of the `packhorse` command."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
