"""Rungs up to the window: length, memory, first token, speed and whether the fact was found."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from packhorse.core.errors import UsageError
from packhorse.verify.recall import ANSWER_ROOM, Asker

FIRST_RUNG = 1024


def rungs(window: int, room: int = ANSWER_ROOM) -> tuple[int, ...]:
    """Prompt lengths from FIRST_RUNG in doublings, and the longest that the window holds beside `room` tokens. Raises
    UsageError where it holds none."""
    longest = window - room
    if longest <= 0:
        reason = f"The window has {window:,} tokens, and an answer may need {room:,}: no rung is left."
        raise UsageError(reason, hint=f"Give --context {FIRST_RUNG + room} or more.")
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


def climb(asker: Asker, lengths: Sequence[int], task: str = "multi_key") -> Iterator[dict[str, Any]]:
    """A row for each length, as it is measured. peak_bytes: the most so far, of the process's resident size or, on a
    card, of what torch holds there."""
    for length in lengths:
        trial = {"task": task, "language": "en", "length": length, "depth": 0.5, "seed": length}
        record = asker.ask(asker.sample(trial))
        yield {
            "length": length, "peak_bytes": peak_bytes(asker.session.engine.runner.model.device),
            **{name: record[name] for name in ("first_token_s", "tokens_per_s", "right", "unfinished", "answer")},
        }  # fmt: skip
