"""Answers that must have a form: JSON schemas, tool calls that must come, thoughts that must end.

    thought (free, maybe bounded) -> answer under a grammar, or free until a call begins -> ...

Grammars are llguidance's. They fail closed: a grammar that cannot be kept is refused before anything is
computed, and an answer that leaves its grammar ends with an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import llguidance
import numpy as np
import torch
from torch import Tensor

from packhorse.core.errors import ComputeError, InvalidRequestError
from packhorse.text import reasoning, tools
from packhorse.text.tokenizer import Detokenizer, Tokenizer
from packhorse.text.tools import ToolFormat

# One way to write each value: free whitespace would let a small model write blanks for ever.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LEAD = "LEAD: /[ \\n]{1,4}/\n"
_TAIL_LEN = 32


class Grammars:
    """Makes guides for one model. Thread-safe; making one takes milliseconds to a second."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._lock = Lock()
        self._backend: llguidance.LLTokenizer | None = None

    def matcher(self, grammar: str, field: str) -> llguidance.LLMatcher:
        """A matcher of a grammar in llguidance's Lark form.

        Raises InvalidRequestError, naming `field`, where it cannot be kept exactly.
        """
        with self._lock:
            if self._backend is None:
                text = self.tokenizer.backend.to_str()
                eos = self._eos_ids or None
                self._backend = llguidance.LLTokenizer(text, n_vocab=self.vocab_size, eos_token=eos)
        made = llguidance.LLMatcher(
            self._backend, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0
        )
        problem = made.get_error() or "; ".join(made.get_grammar_warnings())
        if problem:
            raise InvalidRequestError(
                f"The schema cannot be kept: {problem.splitlines()[0][:500]}",
                hint="Simplify it, or leave it out.",
                field=field,
            )
        return made

    def encode(self, text: str) -> list[int]:
        """Token ids of a text inside an answer."""
        return self.tokenizer.encode(text, special=False)


def json_grammar(schema: Mapping[str, Any]) -> str:
    """A JSON value that a schema allows, after at most a few blanks."""
    return f"start: LEAD? value\n{_LEAD}value: %json {_json(schema)}\n"


def call_grammar(
    form: ToolFormat, functions: Sequence[Mapping[str, Any]], *, opened: bool, tokenizer: Tokenizer
) -> str:
    """One call of one of `functions`. opened: the mark of its beginning has been written already."""
    first, last = (_mark(mark, tokenizer) for mark in (tools.OPEN, tools.CLOSE))
    lines = [f'start: {"" if opened else f"LEAD? {first} "}"\\n" call "\\n" {last}\n']
    lines += ["" if opened else _LEAD]
    lines += ["call: " + " | ".join(f"call_{i}" for i in range(len(functions))) + "\n"]
    for index, function in enumerate(functions):
        make = _xml_call if form is ToolFormat.XML else _hermes_call
        lines += make(index, function["name"], function.get("parameters") or {})
    return "".join(lines)


def _mark(mark: str, tokenizer: Tokenizer) -> str:
    """A mark as a terminal. llguidance takes every token of the form <...> for one that text never spells."""
    return mark if tokenizer.token_to_id(mark) is not None else json.dumps(mark)


def _hermes_call(index: int, name: str, parameters: Mapping[str, Any]) -> list[str]:
    schema = {"type": "object", **(parameters or {"properties": {}, "additionalProperties": False})}
    head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
    return [f'call_{index}: {head} args_{index} "}}"\n', f"args_{index}: %json {_json(schema)}\n"]


def _xml_call(index: int, name: str, parameters: Mapping[str, Any]) -> list[str]:
    properties = parameters.get("properties") or {}
    required = set(parameters.get("required") or ())
    parts, rules = [], []
    for number, (key, schema) in enumerate(properties.items()):
        rule = f"p_{index}_{number}"
        parts.append(rule if key in required else f"{rule}?")
        head = json.dumps(f"<parameter={key}>\n")
        if (
            isinstance(schema, Mapping)
            and schema.get("type") == "string"
            and not schema.keys() & {"enum", "const"}
        ):
            rules.append(f"{rule}: {head} {rule}_text\n")
            rules.append(f'{rule}_text[suffix="\\n</parameter>\\n"]: /(?s:.*)/\n')
            continue
        values = {k: parameters[k] for k in ("$defs", "definitions") if k in parameters}
        plain = schema.get("enum") if isinstance(schema, Mapping) else None
        if plain and all(isinstance(value, str) for value in plain):
            rules.append(f"{rule}: {head} ({' | '.join(json.dumps(v) for v in plain)}) {_PARAMETER_END}\n")
        else:
            inner = _json({**values, **schema} if isinstance(schema, Mapping) else schema)
            rules.append(f"{rule}: {head} {rule}_value {_PARAMETER_END}\n{rule}_value: %json {inner}\n")
    head = json.dumps(f"<function={name}>\n")
    return [f'call_{index}: {head} {" ".join(parts)} "</function>"\n', *rules]


_PARAMETER_END = '"\\n</parameter>\\n"'


def _json(schema: Any) -> str:
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": _SPACING}
    return json.dumps(schema)


class Guide:
    """The `Steering` of one answer (core.protocols).

    matcher: the grammar of the answer, or with `trigger` of what follows that text wherever it comes.
    inside: the answer starts inside a thought, in which the grammar does not hold. budget: tokens that the
    thought may have; then it is closed for the model.
    """

    def __init__(
        self,
        grammars: Grammars,
        *,
        inside: bool,
        matcher: llguidance.LLMatcher | None = None,
        trigger: str | None = None,
        budget: int | None = None,
    ) -> None:
        self.num_thought = 0
        self._grammars = grammars
        self._matcher = matcher
        self._trigger = trigger
        self._thinking = inside
        self._budget = budget
        self._forced: list[int] = []
        self._active = matcher is not None and trigger is None
        self._tail = ""
        self._decode = Detokenizer(grammars.tokenizer, skip_special=False)
        self._close_if_spent()

    def steer(self, scores: Tensor) -> Tensor:
        """See Steering."""
        if self._forced:
            allowed = torch.zeros(scores.shape[0], dtype=torch.bool)
            allowed[self._forced[0]] = True
        elif self._thinking or not self._active:
            return scores
        else:
            allowed = self._allowed(scores.shape[0])
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)

    def advance(self, token_id: int) -> None:
        """See Steering."""
        if self._thinking:
            self._think(token_id)
        elif self._active:
            self._follow(token_id)
        elif self._trigger is not None and self._ends_with(token_id, self._trigger):
            self._active = True

    def _think(self, token_id: int) -> None:
        self.num_thought += 1
        if self._forced:
            self._forced.pop(0)
            self._thinking = bool(self._forced)
        elif self._ends_with(token_id, reasoning.CLOSE):
            self._thinking = False
        else:
            self._close_if_spent()

    def _close_if_spent(self) -> None:
        if self._thinking and self._budget is not None and self.num_thought >= self._budget:
            self._forced = self._grammars.encode(f"\n{reasoning.CLOSE}\n\n")

    def _ends_with(self, token_id: int, mark: str) -> bool:
        """Whether a mark is complete with this token."""
        self._tail = (self._tail + self._decode.add(token_id))[-_TAIL_LEN:]
        found = self._tail.rfind(mark)
        if found < 0:
            return False
        self._tail = ""
        return True

    def _follow(self, token_id: int) -> None:
        assert self._matcher is not None
        if not self._matcher.consume_token(token_id):
            # The token was one that the mask allowed, so this is a fault, not the model's doing.
            raise _left_grammar(self._matcher.get_error())
        if self._trigger is not None and self._matcher.is_stopped():
            self._active = False
            self._matcher.reset()

    def _allowed(self, vocab_size: int) -> Tensor:
        """The tokens that the grammar allows next, bool [V]."""
        assert self._matcher is not None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise _left_grammar(self._matcher.get_error())
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[:vocab_size].astype(np.bool_))
        if not allowed.any():
            raise _left_grammar("no token may follow")
        return allowed


def _left_grammar(why: str) -> ComputeError:
    return ComputeError(
        f"The answer cannot go on within its schema: {why[:300]}",
        hint="Simplify the schema, or leave it out.",
    )
