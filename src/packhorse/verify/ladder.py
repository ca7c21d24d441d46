"""Rungs up to the window: length, memory, first token, speed and whether the fact was found."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from typing import Any

import torch

from packhorse.core.errors import UsageError
from packhorse.verify.recall import ANSWER_ROOM, Asker

FIRST_RUNG = 1024


def rungs(window: int) -> tuple[int, ...]:
    """Prompt lengths from FIRST_RUNG in doublings, and the longest that the window holds. Raises UsageError where
    it holds none."""
    longest = window - ANSWER_ROOM
    if longest <= 0:
        raise UsageError(
            f"The window has {window:,} tokens, and an answer may need {ANSWER_ROOM}: no rung is left.",
            hint=f"Give --context {FIRST_RUNG + ANSWER_ROOM} or more.",
        )
    lengths = []
    length = FIRST_RUNG
    while length < longest:
        lengths.append(length)
        length *= 2
    return (*lengths, longest)


def peak_bytes(device: str) -> int:
    """The most bytes taken so far: resident ones of the process, or torch's on a card."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_allocated(device)


def climb(
    asker: Asker,
    lengths: Sequence[int],
    task: str = "multi_key",
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """A row for each length. peak_bytes: the most so far, of the process's resident size or, on a card, of
    what torch holds there."""
    rows = []
    for length in lengths:
        trial = {"task": task, "language": "en", "length": length, "depth": 0.5, "seed": length}
        record = asker.ask(asker.sample(trial))
        row = {
            "length": length,
            "peak_bytes": peak_bytes(asker.session.engine.runner.model.device),
            **{name: record[name] for name in ("first_token_s", "tokens_per_s", "right", "answer")},
        }
        rows.append(row)
        if on_row is not None:
            on_row(row)
    return rows
