"""The demo's second act: a model made for it reads a long generated document and finds facts in it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import packhorse
from packhorse.cli import asking
from packhorse.cli.common import note
from packhorse.core.config import EngineConfig
from packhorse.core.errors import PackhorseError
from packhorse.text.documents import Prompt

FOLDER = Path(packhorse.__file__).parents[2] / "assets" / "recall-hybrid"
LENGTH = 16_384
NUM_FACTS = 5
FACT = r"The special number for ([a-z ]+) is (\d{6})\."
ROOM = 64
"""Tokens for an answer."""


def find_facts(threads: int | None, show: Callable[[str], None]) -> dict[str, Any] | None:
    """Ask for NUM_FACTS facts of one document of LENGTH tokens; what came of it, for JSON. None where the model
    is not there, which is said: it comes with the repository, not with the package.

    Raises PackhorseError where a fact is not found.
    """
    if not FOLDER.is_dir():
        note(f"The second act is left out: its model comes with the repository, and {FOLDER} is not there.")
        return None
    from packhorse.verify.recall import Asker  # imports torch

    config = EngineConfig(context=LENGTH + 2 * ROOM, sequences=1, threads=threads)
    session = asking.open_session(str(FOLDER), config, note, cache=None, offline=True)
    trial = {"task": "multi_key", "language": "en", "length": LENGTH, "depth": 0.5, "seed": 0}
    document = Asker(session).sample(trial).chat[0]["content"].rpartition("\n\n")[0] + "\n\n"
    facts = re.findall(FACT, document)
    asked = [facts[i * (len(facts) - 1) // (NUM_FACTS - 1)] for i in range(NUM_FACTS)]
    show(
        f"\n[bold]{FOLDER.name}[/], a model of 6 million parameters made for this, reads {LENGTH:,} tokens that "
        f"hold {len(facts)} numbers, and is asked for {NUM_FACTS} of them."
    )
    answers = []
    for key, value in asked:
        question = f"What is the special number for {key}?"
        prompt = Prompt(document + question, (len(document), len(document) + len(question)))
        answer = session.answer(prompt, max_tokens=ROOM)
        found = value in answer.text
        show(f"[bold cyan]{question}[/] {answer.text} [{'green]right' if found else 'red]wrong'}[/]")
        note(answer.summary)
        answers.append({"question": question, "right": found, **asking.describe_answer(answer)})
    num_right = sum(answer["right"] for answer in answers)
    show(f"{num_right} of {NUM_FACTS} facts were found.")
    if num_right < NUM_FACTS:
        hint = "This is a fault in Packhorse: please report it."
        raise PackhorseError(f"{NUM_FACTS - num_right} of {NUM_FACTS} facts were not found.", hint=hint)
    return {"name": FOLDER.name, "length": LENGTH, "answers": answers}
