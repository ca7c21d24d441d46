"""What the commands that answer share: their options, opening the model, showing an answer as it comes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

from packhorse.cli.common import find_model, option, progress_bar, title
from packhorse.core.config import EngineConfig
from packhorse.core.types import FinishReason, SamplingParams
from packhorse.facts.read import read_model
from packhorse.plan.size import check_window
from packhorse.text.documents import Document, page_list, read_document
from packhorse.text.reasoning import Think

if TYPE_CHECKING:
    from rich.progress import Progress

    from packhorse.engine.session import Answer, Session

DocumentOption = Annotated[
    list[Path] | None,
    option("--document", "FILE", "A .txt, .md or .pdf file to read first; may be repeated."),
]
SystemOption = Annotated[str | None, option("--system", "TEXT", "The system message.")]
TemperatureOption = Annotated[
    float | None,
    option(
        "--temperature",
        "X",
        "0 takes the likeliest token each time. [default: the model's own, 0 without one]",
    ),
]
TopPOption = Annotated[
    float | None, option("--top-p", "X", "Draw from the likeliest tokens up to this share.")
]
TopKOption = Annotated[int | None, option("--top-k", "N", "Draw from this many tokens; 0: all.")]
MinPOption = Annotated[
    float | None, option("--min-p", "X", "Drop tokens below this share of the likeliest one's.")
]
SeedOption = Annotated[int | None, option("--seed", "N", "The same draw each time. [default: a new one]")]
MaxTokensOption = Annotated[
    int | None,
    option(
        "--max-tokens",
        "N",
        "Tokens of an answer at most. [default: what the window leaves, at most 512, or "
        "4096 where the model may think]",
    ),
]
ContextOption = Annotated[
    int | None,
    option(
        "--context",
        "N",
        "Tokens of prompt and answer together. [default: the model's window, as far as memory goes]",
    ),
]
ThreadsOption = Annotated[
    int | None, option("--threads", "N", "CPU threads. [default: OMP_NUM_THREADS, else physical cores]")
]
DtypeOption = Annotated[str, option("--dtype", None, "What to compute in: auto, fp32, bf16 or fp16.")]
KvOption = Annotated[
    str, option("--kv", None, "How K and V are stored: auto, fp16, bf16, fp8, k5v4 or k4v4.")
]
WeightsOption = Annotated[
    str, option("--weights", None, "Weights stored in few bits: auto, packed (as they are) or unpacked.")
]
DeviceOption = Annotated[str, option("--device", None, "cpu, cuda or cuda:N.")]
AsArchOption = Annotated[
    int | None,
    option("--as-arch", "75", "Treat the card as a Turing one (7.5), to try what such a card does."),
]
ExactOption = Annotated[bool, option("--exact", None, "Reuse and chunking change no bit; fp32, slower.")]
ThinkOption = Annotated[
    Think | None, option("--think", None, "Whether a model that can think does. [default: its template's]")
]
ChatTemplateOption = Annotated[
    Path | None, option("--chat-template", "FILE", "A Jinja template in place of the model's own.")
]

SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def given_sampling(**options: Any) -> dict[str, Any]:
    """The options that were given, by the field names of SamplingParams, which checks their values."""
    given = {name: value for name, value in options.items() if value is not None}
    SamplingParams(**given)
    return given


def sampling_fields(
    given: Mapping[str, Any], generation: Mapping[str, Any], *, greedy: bool
) -> dict[str, Any]:
    """The fields of SamplingParams for a model, whose generation_config.json says `generation`.

    At temperature 0, or with `greedy` and no option of SAMPLING, only what is given counts and nothing is
    drawn. Else what is not given is the model's own; where it names no temperature either, that is 1 with
    such an option and 0 without.
    """
    asked = any(name in given for name in SAMPLING)
    if given.get("temperature") == 0 or (greedy and not asked):
        return dict(given)
    own = {name: value for name, value in generation.items() if name != "do_sample"}
    if generation.get("do_sample") is False:
        own = {}
    return {**({"temperature": 1.0} if asked else {}), **own, **given}


def read_documents(paths: Sequence[Path], say: Callable[[str], None]) -> list[Document]:
    """The documents; `say` gets a warning for each that has pages without text."""
    documents = [read_document(path) for path in paths]
    for document in documents:
        if document.empty_pages:
            say(
                f"Warning: {document.name} has no text on page {page_list(document.empty_pages)} of "
                f"{len(document.pages)}: what is there is not read."
            )
    return documents


def open_session(
    model: str, config: EngineConfig, say: Callable[[str], None], *, cache: Path | None, offline: bool,
    chat_template: Path | None = None, raw: bool = False, think: Think | None = None,
    max_tokens: int | None = None,
) -> Session:  # fmt: skip
    """`Session.open` with progress bars; `say` gets its notes.

    What the headers rule out, for answers of `max_tokens` too, is refused before torch is imported.
    """
    facts = read_model(find_model(model, cache, offline))
    check_window(facts, config, max_tokens)
    from packhorse.engine.session import Session  # imports torch

    with _count_progress(f"loading {title(model, facts)}") as progress:
        session = Session.open(
            facts, config, chat_template=chat_template, raw=raw, think=think, progress=progress
        )
    for text in session.notes:
        say(text)
    return session


def warn_of_no_draw(
    given: Mapping[str, Any], sampling: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    """Says which of the options that were given do nothing, because nothing is drawn."""
    idle = [f"--{name.replace('_', '-')}" for name in ("top_p", "top_k", "min_p", "seed") if name in given]
    if idle and not sampling.get("temperature"):
        say(f"At temperature 0 nothing is drawn: {', '.join(idle)} changes nothing.")


def warn_of_cut(answer: Answer, window: int, say: Callable[[str], None]) -> None:
    """Says that an answer, or the thought before it, was cut, and what would let it end."""
    if answer.finish is FinishReason.LENGTH:
        cut = "The answer was cut" if answer.text else "The model was still thinking"
        full = answer.usage.prompt_len + answer.usage.generated_len >= window
        way = f"the window of {window} tokens is full" if full else "a larger --max-tokens lets it end"
        say(f"{cut} after {answer.usage.generated_len} tokens: {way}.")


def kept_text(prompt_len: int, cached_len: int, before: str) -> str:
    """How many of a prompt's tokens were kept from `before`, and how many were read anew."""
    return f"{cached_len} were kept from {before}, {prompt_len - cached_len} were read."


def describe_answer(answer: Answer) -> dict[str, Any]:
    """An answer as a part of a JSON document."""
    return {
        "answer": answer.text,
        "reasoning": answer.reasoning,
        "finish": answer.finish,
        "usage": answer.counts,
        "timings": answer.timings,
    }


class Display:
    """Shows one answer while it comes; a context, so that the terminal is left in order.

    On standard output the answer and a line end, if `stream`. On standard error, only where it is a terminal,
    a bar while the prompt is read, and the thought, dimmed.
    """

    def __init__(self, *, stream: bool = True) -> None:
        self._stream = stream
        self._on_terminal = sys.stderr.isatty()
        self._bar: Progress | None = None
        self._last = ""
        self._thinking = False

    @property
    def callbacks(self) -> dict[str, Any]:
        """The arguments of `Session.answer`."""
        return {"on_text": self._text, "on_thought": self._thought, "on_progress": self._progress}

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_bar()
        self._end_thought()
        unfinished = bool(self._last) and not self._last.endswith("\n")
        # What broke the pipe would only break again.
        if self._stream and (unfinished or kind is None) and kind is not BrokenPipeError:
            if not self._last.endswith("\n"):
                print()
            sys.stdout.flush()

    def _progress(self, read: int, total: int) -> None:
        if not self._on_terminal:
            return
        if read >= total:
            self._close_bar()
        elif self._bar is None:
            self._bar = _bar()
            self._bar.add_task("reading", total=total, completed=read)
            self._bar.start()
        else:
            self._bar.update(self._bar.task_ids[0], completed=read)

    def _text(self, text: str) -> None:
        self._end_thought()
        if self._stream:
            self._last = text
            sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()

    def _thought(self, text: str) -> None:
        if self._on_terminal:
            self._thinking = True
            sys.stderr.write(f"\x1b[2m{printable(text)}\x1b[0m")
            sys.stderr.flush()

    def _end_thought(self) -> None:
        if self._thinking:
            self._thinking = False
            print(file=sys.stderr)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def printable(text: str) -> str:
    """`text` without control characters: documents and models must not steer a terminal."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))


@contextmanager
def _count_progress(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of counts on standard error while the block runs; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with _bar() as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _bar() -> Progress:
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    return progress_bar(MofNCompleteColumn(), TimeRemainingColumn())
