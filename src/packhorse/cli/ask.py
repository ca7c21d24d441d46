"""packhorse ask: one question about documents, one answer."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packhorse.cli import asking, common
from packhorse.cli.common import check_file, closing, note, option, print_json, store_fields, write_file
from packhorse.core.config import EngineConfig
from packhorse.core.errors import UsageError
from packhorse.text.cite import CITE_REQUEST, check_quotes
from packhorse.text.documents import Document, Prompt, compose

if TYPE_CHECKING:
    from packhorse.engine.session import Answer, Session

QuestionArgument = Annotated[
    str, typer.Argument(metavar="QUESTION", help="What to ask; - reads it from standard input.")
]
TemperatureOption = Annotated[
    float | None,
    option(
        "--temperature",
        "X",
        "0: the likeliest token each time. [default: 0; with --top-p, --top-k or --min-p the model's own]",
    ),
]
RawOption = Annotated[bool, option("--raw", None, "Continue the text without a chat template (base models).")]
CiteOption = Annotated[
    bool,
    option("--cite", None, "Ask for quotes; each is looked for in the documents, and its pages are said."),
]
StatsOption = Annotated[Path | None, option("--stats", "FILE", "Write the figures of the last line as JSON.")]


def command(
    model: common.ModelArgument,
    question: QuestionArgument,
    document: asking.DocumentOption = None,
    system: asking.SystemOption = None,
    temperature: TemperatureOption = None,
    top_p: asking.TopPOption = None,
    top_k: asking.TopKOption = None,
    min_p: asking.MinPOption = None,
    seed: asking.SeedOption = None,
    max_tokens: asking.MaxTokensOption = None,
    think: asking.ThinkOption = None,
    context: asking.ContextOption = None,
    threads: asking.ThreadsOption = None,
    dtype: asking.DtypeOption = EngineConfig.dtype,
    kv: asking.KvOption = EngineConfig.kv,
    weights: asking.WeightsOption = EngineConfig.weights,
    device: asking.DeviceOption = EngineConfig.device,
    as_arch: asking.AsArchOption = None,
    exact: asking.ExactOption = False,
    store: common.StoreOption = None,
    disk: common.DiskOption = None,
    keep_days: common.KeepDaysOption = None,
    ram: common.RamOption = None,
    vram: common.VramOption = None,
    chat_template: asking.ChatTemplateOption = None,
    raw: RawOption = False,
    cite: CiteOption = False,
    stats: StatsOption = None,
    json: common.JsonOption = False,
    cache: common.CacheOption = None,
    offline: common.OfflineOption = False,
) -> None:
    """What is wrong with options and documents is said before the model is loaded."""
    asked = read_question(question)
    given = asking.given_sampling(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_tokens=max_tokens
    )
    config = EngineConfig(
        context=context, sequences=1, dtype=dtype, kv=kv, weights=weights, device=device, exact=exact,
        as_arch=as_arch, threads=threads, **store_fields(store, disk, ram, vram, keep_days),
    )  # fmt: skip
    check_options(system, document, stats, raw=raw, cite=cite)
    notes: list[str] = []

    def say(text: str) -> None:
        notes.append(text)
        note(text)

    documents = asking.read_documents(document or [], say)
    session = asking.open_session(
        model, config, say, cache=cache, offline=offline, chat_template=chat_template, raw=raw, think=think,
        max_tokens=max_tokens,
    )  # fmt: skip
    sampling = asking.sampling_fields(given, session.facts.generation, greedy=True)
    asking.warn_of_no_draw(given, sampling, say)
    messages = messages_of(compose(documents, asked + CITE_REQUEST * cite), system)
    label = ", ".join(d.name for d in documents) or "ask"
    with closing(session, say):
        with asking.Display(stream=not json) as display:
            answer = session.answer(messages, label=label, **display.callbacks, **sampling)
        asking.warn_of_cut(answer, session.window, say)
        if store is not None and system is None and len(documents) == 1:
            keep(session, documents[0], say)
    citations = say_quotes(answer.text, documents, say) if cite else {}
    if json:
        print_json(describe(model, session.facts.name, answer, documents, notes) | citations)
    write_file(stats, jsonlib.dumps({**answer.counts, **answer.timings}) + "\n")
    sys.stdout.flush()
    print(answer.summary, file=sys.stderr)


def check_options(
    system: str | None, document: Sequence[Path] | None, stats: Path | None, *, raw: bool, cite: bool
) -> None:
    """Raises UsageError for options that contradict each other."""
    if raw and system is not None:
        raise UsageError("--system needs a chat, and --raw has none.", hint="Leave out one of them.")
    if cite and not document:
        raise UsageError("--cite quotes documents, and there is none.", hint="Give --document FILE.")
    check_file(stats)


def say_quotes(answer: str, documents: Sequence[Document], say: Callable[[str], None]) -> dict[str, Any]:
    """Note on which pages the quotes of an answer stand; the same as a part of a JSON document. say: gets word of an
    answer without any."""
    citations = check_quotes(answer, documents)
    if not citations:
        say("The answer has no quotes: nothing of it was checked.")
    for citation in citations:
        note(asking.printable(str(citation)))
    return {"citations": [asdict(citation) for citation in citations]}


def keep(session: Session, document: Document, say: Callable[[str], None]) -> None:
    """Wait until what was read is kept, a document by name too, as POST /v1/documents does; `say` gets what went
    wrong with that."""
    kept = session.keep_document(document)
    session.flush()
    if (error := kept.exception()) is not None:
        say(f"Warning: {document.name} is not kept as a document: {error}")


def read_question(text: str) -> str:
    """The question, from standard input where it is `-`. Raises UsageError where it is empty or no text."""
    try:
        question = sys.stdin.buffer.read().decode("utf-8") if text == "-" else text
        question.encode("utf-8")  # arguments hold bytes that are no text as lone surrogates
    except UnicodeError as error:
        raise UsageError("The question is not valid UTF-8.", hint="Write it in UTF-8.") from error
    if not question.strip():
        raise UsageError("The question is empty.", hint='Ask something: ask MODEL --document FILE "What?"')
    return question


def messages_of(prompt: Prompt, system: str | None) -> Prompt | list[dict[str, Any]]:
    """What `Session.answer` takes: the prompt, after the system message if there is one."""
    if system is None:
        return prompt
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt.parts}]


def describe(
    model: str, name: str, answer: Answer, documents: Sequence[Document], notes: Sequence[str]
) -> dict[str, Any]:
    """The JSON document of an answer."""
    return {
        "model": model,
        "name": name,
        **asking.describe_answer(answer),
        "documents": [
            {"name": d.name, "pages": len(d.pages), "empty_pages": list(d.empty_pages)} for d in documents
        ],
        "notes": list(notes),
    }
