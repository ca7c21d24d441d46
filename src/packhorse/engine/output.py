"""From the tokens of one request to the text it is answered with, and why that ends.

    token ids -> detokenizer -> held back: what may yet become a stop string -> text

Tokens and their log-probabilities are final when they come; text may lag behind them, by half a character in
the detokenizer and by the beginning of a stop string here, and catches up at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from packhorse.core.types import FinishReason, SamplingParams, TokenLogprob
from packhorse.text.reasoning import overlap


class Detokenizer(Protocol):
    """Turns the tokens of one text into text, as they come.

    The texts returned by `add`, in order, and by one last `finish` make up the whole text; none of them is
    ever taken back. `add` holds back bytes that are not a whole character yet; `finish` returns what those
    decode to, replacement characters.
    """

    def add(self, token_id: int) -> str: ...
    def finish(self) -> str: ...


@dataclass(frozen=True)
class Piece:
    """What is new: fields of `core.types.Event`. logprobs: one for each token, or none at all."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None


class Output:
    """Assembles the answer of one request. No call follows one that returned a finish.

    - An eos id (unless ignore_eos) or a stop id ends the answer: one more token, no more text.
    - A stop string ends the text before itself. It may begin and end anywhere inside tokens. The first to be
      complete counts, the longest of those that end at the same character; so the text does not depend on
      how it was cut into tokens. The tokens that made up the stop string stay among the answer's tokens.
    - Else max_tokens ends the answer, and all text that was held back is released.
    """

    def __init__(self, params: SamplingParams, eos_ids: tuple[int, ...], detokenizer: Detokenizer) -> None:
        self.num_tokens = 0
        self._max_tokens = params.max_tokens
        self._stop = params.stop
        self._end_ids = frozenset(params.stop_ids if params.ignore_eos else (*params.stop_ids, *eos_ids))
        self._detokenizer = detokenizer
        self._held = ""

    def feed(self, token_id: int, logprob: TokenLogprob | None = None) -> Piece:
        """Take in the next token, and its log-probability where the request asked for it."""
        self.num_tokens += 1
        finish: FinishReason | None
        if token_id in self._end_ids:
            text, finish = self._release()[0], FinishReason.STOP
        else:
            text, finish = self._advance(self._detokenizer.add(token_id))
            if finish is None and self.num_tokens >= self._max_tokens:
                rest, stopped = self._release()
                text, finish = text + rest, stopped or FinishReason.LENGTH
        return Piece((token_id,), text, () if logprob is None else (logprob,), finish)

    def end(self, reason: FinishReason) -> Piece:
        """End the answer from outside, cancelled or failed: what was held back is released."""
        return Piece(text=self._release()[0], finish=reason)

    def _advance(self, new: str) -> tuple[str, FinishReason | None]:
        """The text that is final after `new`, and STOP where a stop string is complete."""
        text = self._held + new
        ends = [(start + len(s), start) for s in self._stop if (start := text.find(s)) >= 0]
        if ends:
            self._held = ""
            return text[: min(ends)[1]], FinishReason.STOP
        final_len = len(text) - max((overlap(text, s) for s in self._stop), default=0)
        self._held = text[final_len:]
        return text[:final_len], None

    def _release(self) -> tuple[str, FinishReason | None]:
        """All that is left of the text; what the detokenizer still held may complete a stop string."""
        text, finish = self._advance(self._detokenizer.finish())
        held, self._held = self._held, ""
        return text + held, finish
