"""From the engine's events to answers in OpenAI's shape, whole or in pieces."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from packhorse.core.errors import PackhorseError
from packhorse.core.types import Event, FinishReason, TokenLogprob, Usage
from packhorse.server.prompt import Prepared
from packhorse.text import tools as tool_text
from packhorse.text.cite import check_quotes
from packhorse.text.reasoning import ThoughtSplitter
from packhorse.text.tokenizer import Tokenizer
from packhorse.text.tools import ToolCall, ToolCallSplitter

FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True)
class Delta:
    """What is new of one choice. logprobs: in the shape of the endpoint. finish: the last of the choice."""

    index: int
    body: dict[str, Any]
    logprobs: dict[str, Any] | None = None
    finish: str | None = None


@dataclass
class _Choice:
    """One answer while it comes. scores: of its tokens, those of an echoed prompt before them; its first token
    has none. text_len: characters that the scores of completions stand for."""

    index: int
    group: int
    thoughts: ThoughtSplitter | None
    calls: ToolCallSplitter | None
    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    scores: list[TokenLogprob | None] = field(default_factory=list)
    text_len: int = 0
    begun: bool = False
    finish: str | None = None
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))


class Reply:
    """The answers of one call. `feed` takes the events in order; `done` when each choice has its finish.

    echo: completions repeat the prompt. silent: nothing generated is shown (a completion of 0 tokens).
    """

    def __init__(
        self, prepared: Prepared, tokenizer: Tokenizer, *, request_id: str, model: str,
        want_logprobs: bool = False, echo: bool = False, silent: bool = False,
    ) -> None:  # fmt: skip
        self.prepared = prepared
        self.id = request_id
        self.model = model
        self.created = int(time.time())
        self.first_token_at: float | None = None
        self._tokenizer = tokenizer
        self._want_logprobs = want_logprobs
        self._echo = echo
        self._silent = silent
        self._prompt_scores: list[list[TokenLogprob]] = [[] for _ in prepared.groups]
        self._choices: dict[str, _Choice] = {}
        for group, requests in enumerate(prepared.groups):
            for request in requests:
                self._choices[request.id] = self._new_choice(len(self._choices), group)

    def _new_choice(self, index: int, group: int) -> _Choice:
        if not self.prepared.is_chat:
            return _Choice(index, group, None, None)
        tools = self.prepared.tools
        interrupt = tool_text.OPEN if tools else None
        thoughts = ThoughtSplitter(inside=self.prepared.inside, interrupt=interrupt)
        return _Choice(index, group, thoughts, ToolCallSplitter(tools) if tools else None)

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish is not None for choice in self._choices.values())

    @property
    def finishes(self) -> list[str | None]:
        """Why each choice ended, None for those that have not."""
        return [choice.finish for choice in self._choices.values()]

    @property
    def counts(self) -> Usage:
        """Tokens so far; a prompt that several choices share counts once."""
        heads = [self._choices[group[0].id].usage for group in self.prepared.groups]
        prompt_len = sum(len(group[0].token_ids) for group in self.prepared.groups)
        generated = 0 if self._silent else sum(c.usage.generated_len for c in self._choices.values())
        return Usage(prompt_len, sum(u.cached_len for u in heads), generated)

    @property
    def usage(self) -> dict[str, Any]:
        """The counts as a usage object."""
        counts = self.counts
        return {
            "prompt_tokens": counts.prompt_len,
            "completion_tokens": counts.generated_len,
            "total_tokens": counts.prompt_len + counts.generated_len,
            "prompt_tokens_details": {"cached_tokens": counts.cached_len},
        }

    def feed(self, event: Event) -> list[Delta]:
        """What is new. Raises the event's error: the call has failed then."""
        choice = self._choices[event.request_id]
        if event.usage.prompt_len:
            choice.usage = event.usage
        self._prompt_scores[choice.group] += event.prompt_logprobs
        if event.finish in (FinishReason.ERROR, FinishReason.CANCELLED):
            raise event.error or PackhorseError("The request ended without an answer.")
        if event.token_ids and self.first_token_at is None:
            self.first_token_at = time.monotonic()
        deltas: list[Delta] = []
        if event.token_ids or event.finish is not None:
            make = self._chat_deltas if self.prepared.is_chat else self._text_deltas
            deltas = list(make(choice, event))
        if event.finish is not None:
            choice.finish = "tool_calls" if choice.tool_calls else FINISH[event.finish]
            deltas.append(Delta(choice.index, {}, finish=choice.finish))
        return deltas

    def _chat_deltas(self, choice: _Choice, event: Event) -> Iterator[Delta]:
        assert choice.thoughts is not None
        splits = [choice.thoughts.feed(event.text)] if event.text else []
        if event.finish is not None:
            splits.append(choice.thoughts.finish())
        bodies: list[dict[str, Any]] = []
        for thought, answer in splits:
            if thought:
                choice.reasoning += thought
                bodies.append({"reasoning_content": thought})
            if choice.calls is None:
                bodies += self._parts(choice, [answer] if answer else [])
            elif answer:
                bodies += self._parts(choice, choice.calls.feed(answer))
        if event.finish is not None and choice.calls is not None:
            bodies += self._parts(choice, choice.calls.finish())
        choice.scores += event.logprobs
        logprobs = self._chat_logprobs(event.logprobs)
        if not choice.begun:
            choice.begun = True
            bodies = [{"role": "assistant", "content": ""}, *bodies]
        if logprobs is not None and not bodies:
            bodies = [{}]
        for place, body in enumerate(bodies):
            # Log-probabilities go with the last piece: text may lag behind its tokens.
            yield Delta(choice.index, body, logprobs if place == len(bodies) - 1 else None)

    def _parts(self, choice: _Choice, parts: Sequence[str | ToolCall]) -> list[dict[str, Any]]:
        bodies: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, str):
                choice.text += part
                bodies.append({"content": part})
                continue
            call = {
                "id": f"call_{self.id.removeprefix('req-')}_{choice.index}_{len(choice.tool_calls)}",
                "type": "function",
                "function": {"name": part.name, "arguments": part.arguments},
            }
            bodies.append({"tool_calls": [{"index": len(choice.tool_calls), **call}]})
            choice.tool_calls.append(call)
        return bodies

    def _chat_logprobs(self, scores: Sequence[TokenLogprob | None]) -> dict[str, Any] | None:
        if not self._want_logprobs or not scores:
            return None
        return {"content": [self._chat_score(score) for score in scores if score], "refusal": None}

    def _chat_score(self, score: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token_id, logprob) for token_id, logprob in score.top]
        return {**self._token(score.token_id, score.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": logprob}

    def _text_deltas(self, choice: _Choice, event: Event) -> Iterator[Delta]:
        text, scores = "", list[TokenLogprob | None]()
        if self._echo and not choice.begun:
            text = self.prepared.texts[choice.group]
            if self._want_logprobs:
                scores = [None, *self._prompt_scores[choice.group]]
        choice.begun = True
        if not self._silent:
            text += event.text
            scores += event.logprobs
        choice.text += text
        if text or scores:
            logprobs = self._text_logprobs(choice, scores, choice.text_len)
            choice.scores += scores
            choice.text_len += sum(map(len, logprobs["tokens"])) if logprobs else 0
            yield Delta(choice.index, {"text": text}, logprobs)

    def _text_logprobs(
        self, choice: _Choice, scores: Sequence[TokenLogprob | None], offset: int
    ) -> dict[str, Any] | None:
        if not scores:
            return None
        first = self.prepared.groups[choice.group][0].token_ids[0]
        piece = self._tokenizer.id_to_piece
        tokens = [piece(first if score is None else score.token_id) for score in scores]
        return {
            "tokens": tokens,
            "token_logprobs": [None if score is None else score.logprob for score in scores],
            "top_logprobs": [
                {piece(i): p for i, p in score.top} or None if score else None for score in scores
            ],
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)),
        }

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """A delta as a chunk of a stream."""
        content = {"delta": delta.body} if self.prepared.is_chat else {"text": "", **delta.body}
        choice = {"index": delta.index, **content, "logprobs": delta.logprobs, "finish_reason": delta.finish}
        return {**self._head(stream=True), "choices": [choice]}

    def progress_chunk(self, event: Event, waited_s: float) -> dict[str, Any]:
        """How far the prompt has been read: the shape of llama.cpp's prompt_progress, and the time left."""
        read = max(event.read_len - event.usage.cached_len, 0)
        to_come = event.usage.prompt_len - event.read_len
        left = {"time_left_ms": round(waited_s * to_come / read * 1000) if read else None}
        delta = Delta(self._choices[event.request_id].index, {})
        return {**self.chunk(delta), "prompt_progress": progress(event, waited_s) | left}

    def last_chunks(self, include_usage: bool) -> list[dict[str, Any]]:
        """What follows the last delta: the counts where they were asked for, and the report."""
        chunks = []
        if report := self._report():
            chunks.append({**self._head(stream=True), "choices": [], "packhorse": report})
        if include_usage:
            chunks.append({**self._head(stream=True), "choices": [], "usage": self.usage})
        return chunks

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        make = self._whole_chat if self.prepared.is_chat else self._whole_text
        choices = [{"index": c.index, **make(c), "finish_reason": c.finish} for c in self._choices.values()]
        body = {**self._head(stream=False), "choices": choices, "usage": self.usage}
        if report := self._report():
            body["packhorse"] = report
        return body

    def _report(self) -> dict[str, Any]:
        """What was done with the messages, and the quotes of the answers."""
        report = dict(self.prepared.report)
        if self.prepared.cited:
            report["citations"] = [
                {"choice": choice.index, **asdict(citation)}
                for choice in self._choices.values()
                for citation in check_quotes(choice.text, self.prepared.cited)
            ]
        return report

    def _whole_chat(self, choice: _Choice) -> dict[str, Any]:
        content = choice.text if choice.text or not choice.tool_calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.tool_calls:
            message["tool_calls"] = choice.tool_calls
        return {"message": message, "logprobs": self._chat_logprobs(choice.scores)}

    def _whole_text(self, choice: _Choice) -> dict[str, Any]:
        return {"text": choice.text, "logprobs": self._text_logprobs(choice, choice.scores, 0)}

    def _head(self, *, stream: bool) -> dict[str, Any]:
        kind = "chat.completion" if self.prepared.is_chat else "text_completion"
        if self.prepared.is_chat and stream:
            kind += ".chunk"
        prefix = "chatcmpl-" if self.prepared.is_chat else "cmpl-"
        name = prefix + self.id.removeprefix("req-")
        return {"id": name, "object": kind, "created": self.created, "model": self.model}


def progress(event: Event, seconds: float) -> dict[str, Any]:
    """How far a prompt has been read after so many seconds."""
    counts = {"total": event.usage.prompt_len, "cache": event.usage.cached_len, "processed": event.read_len}
    return counts | {"time_ms": round(seconds * 1000)}
