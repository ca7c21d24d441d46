"""Requests, events and the small value types that every package speaks. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from packhorse.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from packhorse.core.protocols import Steering

PAGE_LEN = 64
"""Tokens a page holds unless a setting says otherwise."""

TAIL_LEN = 2048
"""Prompt tokens that are read chunk by chunk though longer prompts are swept."""

EXACT_ROWS = 64
"""Rows that exact mode computes together: a token at position p is row p % EXACT_ROWS of a bucket that holds
only its own sequence, filled up with padding, and a pass is one bucket. So no shape, and with it no order of
a sum and no vector tail, depends on what else is in the step."""


class LayerKind(StrEnum):
    """What mixes tokens in a layer."""

    FULL = "full_attention"
    LINEAR = "linear_attention"


class FinishReason(StrEnum):
    """Why a request ended. STOP: eos, stop id or stop string; LENGTH: max_tokens or the window."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn. Temperature 0 is greedy.

    temperature: >= 0. top_p in (0, 1]; top_k >= 0 (0: off); min_p in [0, 1].
    presence and frequency penalties in [-2, 2], over generated tokens; repetition_penalty > 0 (1: off),
    over prompt and generated tokens. seed: None draws one. stop: strings that end the text and are not
    part of it. stop_ids: ids beside the model's own eos ids. ignore_eos: go on through eos.
    logprobs: None for none, else how many alternatives (0-20) beside the chosen token; they are of the
    raw fp32 logits, before penalties and temperature. logit_bias: (token id, bias in [-100, 100]), added
    after the penalties.

    Raises InvalidRequestError where a value is out of range or not a number.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        ranges: list[tuple[str, float, float, float]] = [
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_p", self.top_p, 1e-6, 1.0),
            ("top_k", self.top_k, 0, 2**31),
            ("min_p", self.min_p, 0.0, 1.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ("repetition_penalty", self.repetition_penalty, 1e-3, 100.0),
            ("max_tokens", self.max_tokens, 1, 2**31),
            ("logprobs", 0 if self.logprobs is None else self.logprobs, 0, 20),
            *(("logit_bias", bias, -100.0, 100.0) for _, bias in self.logit_bias),
        ]
        for name, value, low, high in ranges:
            if not math.isfinite(value) or not low <= value <= high:
                raise InvalidRequestError(
                    f"{name} is {value}, which is not in [{low:.10g}, {high:.10g}].",
                    hint=f"Give {name} a number in that range.",
                    field=name,
                    value=value,
                )
        if any(not s for s in self.stop):
            raise InvalidRequestError("An empty stop string stops everything.", hint="Leave it out.")


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    id: unique among live requests. token_ids: the prompt, at least one token. marks: token positions after
    which a snapshot is wanted (ends of documents, of the system turn, of turns), in (0, len(token_ids)]. tenant:
    what is read is kept for requests of the same tenant alone. store: False keeps nothing of it. label: a name for
    people of what is kept on disk; what is short and has none is written there when a second prompt begins with it.
    """

    id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    marks: tuple[int, ...] = ()
    steering: Steering | None = field(default=None, compare=False)
    prompt_logprobs: int | None = None
    tenant: str = ""
    store: bool = True
    label: str = ""

    def __post_init__(self) -> None:
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= 20:
            raise InvalidRequestError(
                f"prompt_logprobs is {self.prompt_logprobs}, which is not in [0, 20].",
                hint="Give a number in that range.",
                field="prompt_logprobs",
                value=self.prompt_logprobs,
            )


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token under the raw fp32 logits, and the best alternatives (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts of a request: `cached_len` of the prompt's `prompt_len` tokens were not read again."""

    prompt_len: int
    cached_len: int
    generated_len: int


@dataclass(frozen=True)
class Event:
    """What one step did for one request: prompt progress, new text, or the end.

    token_ids and text: what is new and final (text held back for a stop string or a half character is not
    there yet). read_len: prompt tokens processed or reused so far; one that has passed half of the layers counts
    half. prompt_logprobs: where asked for, of all tokens of the prompt in order, with the event of the answer's
    first token; a prompt's first has none.
    finish: set on the last event; with ERROR or a refusal `error` says why.
    """

    request_id: str
    usage: Usage
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    read_len: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence inside a step.

    Rows `row .. row + length` of the step's activations are the tokens at positions
    `position .. position + length` of the sequence in slot `slot`.
    """

    slot: int
    row: int
    position: int
    length: int

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.position + self.length
