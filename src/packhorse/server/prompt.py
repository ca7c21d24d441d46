"""From a request's fields to the engine's requests: messages rendered, options checked, limits kept.

messages -> roles folded -> template -> tokens -> too long? refused, or old turns left out and reported
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from packhorse.core.errors import InvalidRequestError, PromptTooLongError, UsageError
from packhorse.core.types import Request, SamplingParams
from packhorse.engine.documents import Reading, read_as_prompt
from packhorse.server.attach import Find, attach
from packhorse.server.config import ModelConfig
from packhorse.server.errors import ApiError, bad_field
from packhorse.server.guide import Grammars, Guide, call_grammar, json_grammar
from packhorse.server.schema import ChatRequest, CompletionRequest, Message, TokenizeRequest
from packhorse.text import tools as tool_text
from packhorse.text.cite import CITE_REQUEST
from packhorse.text.documents import Document
from packhorse.text.reasoning import Think, opens_thought, thinking_options
from packhorse.text.template import ChatTemplate, mark_positions
from packhorse.text.tokenizer import text_marks
from packhorse.text.tools import tool_format
from packhorse.text.volatile import HEAD_CHARS, find_volatile

if TYPE_CHECKING:
    from packhorse.engine.session import Session

SYSTEM_ROLES = ("system", "developer")
MESSAGE_FIELDS = ("role", "content", "reasoning_content", "reasoning", "name", "tool_call_id")
FIXED_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "reasoning_effort"}
NO_TEMPLATE = "This model has no chat template: use /v1/completions, or serve it with --chat-template FILE."


@dataclass(frozen=True)
class Prepared:
    """What the engine is to do, and what whoever answers must know.

    groups: requests that share a prompt, first in each the one that reads it. inside: answers start inside a
    thought. tools: to be found in the answers. report: what was done with the messages. cited: documents that
    the answers are to quote.
    """

    groups: list[list[Request]]
    texts: tuple[str, ...] = ()
    inside: bool = False
    is_chat: bool = True
    tools: tuple[Mapping[str, Any], ...] = ()
    report: dict[str, Any] = field(default_factory=dict)
    cited: tuple[Document, ...] = ()


class Preparer:
    """Prepares the requests of one session. Thread-safe; to be called outside the event loop."""

    def __init__(self, session: Session, defaults: ModelConfig) -> None:
        facts = session.facts
        self.session = session
        self.defaults = defaults
        self.tokenizer = session.tokenizer
        self.grammars = Grammars(session.tokenizer, facts.vocab_size, facts.eos_ids)
        self.window = session.window

    def of(self, owner: str | None) -> Preparer:
        """The same for prompts of `owner`: see `Tokenizer.of`."""
        found = copy(self)
        found.tokenizer = self.tokenizer.of(owner)
        return found

    def chat(self, asked: ChatRequest, request_id: str, find: Find) -> Prepared:
        """find: the caller's documents. Raises ApiError and InvalidRequestError, naming a field, and
        PromptTooLongError."""
        template = self._template()
        options = self._options(asked, template)
        tools = self._tools(asked)
        if tools:
            tool_format(template)
            options["tools"] = tools
        wanted = asked.max_completion_tokens or asked.max_tokens
        if asked.max_tokens == 0:
            raise bad_field("max_tokens", "max_tokens is 0.", "A chat answer needs at least 1.")
        plain, documents, cite = attach([plain_message(m) for m in asked.messages], find)
        cited = tuple(documents) if asked.citations or cite else ()
        if asked.citations and not documents:
            raise bad_field(
                "citations", "citations: true needs a document.", "Give one as a part of a message."
            )
        if cited:
            ask_for_quotes(plain)
        try:
            messages, folded = fold(template, plain, options)
            ids, marks = self._encode(template, messages, options)
        except InvalidRequestError as error:
            raise bad_field("messages", error.reason, error.hint) from error
        report: dict[str, Any] = {"folded_messages": folded} if folded else {}
        if asked.truncation == "auto" and len(ids) + (wanted or 1) > self.window:
            report["truncation"], ids, marks = self._shorten(template, plain, options, wanted or 1, len(ids))
        if volatile := find_volatile(self.tokenizer.decode(ids[:HEAD_CHARS], skip_special=False)):
            report["volatile"] = [asdict(line) for line in volatile]
        inside = opens_thought(self.tokenizer.decode(ids[-16:], skip_special=False))
        ends = (tool_text.CLOSE,) if tools and asked.parallel_tool_calls is False else ()
        params = self._sampling(asked, len(ids), wanted, asked.top_logprobs if asked.logprobs else None, ends)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise bad_field("top_logprobs", "top_logprobs needs logprobs: true.")
        guide = self._guide_maker(asked, template, tools, inside)
        names = ", ".join(document.name for document in documents)
        group = self._group(request_id, ids, marks, params, asked.n or 1, guide, label=names)
        return Prepared([group], inside=inside, tools=tuple(tools), report=report, cited=cited)

    def document(self, document: Document, request_id: str, tenant: str) -> tuple[Request, Reading]:
        """The request that reads a document, and no more. Raises what the template raises, PromptTooLongError."""
        reading = read_as_prompt(document, self.tokenizer, self.session.template, self.defaults.options)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        name, ids, marks = f"{request_id}-document", reading.token_ids, reading.marks
        request = Request(name, ids, params, marks, tenant=tenant, label=document.name)
        self.session.engine.check(request)
        return request, reading

    def completion(self, asked: CompletionRequest, request_id: str) -> Prepared:
        """Raises ApiError and InvalidRequestError, naming a field, and PromptTooLongError."""
        groups, texts = [], []
        for index, prompt in enumerate(prompts_of(asked)):
            if isinstance(prompt, str):
                ids, marks = text_marks(self.tokenizer, prompt, (len(prompt),))
            else:
                ids, marks = list(prompt), (len(prompt),)
            if not ids:
                raise bad_field("prompt", "The prompt is empty.", "Give at least one token.")
            wanted = asked.max_tokens
            if wanted == 0 and not asked.echo:
                raise bad_field(
                    "max_tokens", "max_tokens is 0.", "Without echo at least 1 token is generated."
                )
            params = self._sampling(
                asked, len(ids), max(wanted, 1) if wanted is not None else None, asked.logprobs
            )
            scored = asked.logprobs if asked.echo else None
            name = f"{request_id}.{index}"
            groups.append(self._group(name, ids, marks, params, asked.n or 1, None, scored))
            texts.append(
                prompt if isinstance(prompt, str) else self.tokenizer.decode(ids, skip_special=False)
            )
        return Prepared(groups, texts=tuple(texts), is_chat=False)

    def tokenize(self, asked: TokenizeRequest, find: Find) -> list[int]:
        """Token ids of a text or a chat. find: see `chat`."""
        if (asked.prompt is None) == (asked.messages is None):
            raise bad_field("prompt", "Give one of prompt and messages.")
        if asked.prompt is not None:
            return self.tokenizer.encode(asked.prompt, special=asked.add_special_tokens is not False)
        template = self._template()
        options: dict[str, Any] = dict(self.defaults.options)
        if asked.tools:
            options["tools"] = [tool.model_dump(exclude_none=True) for tool in asked.tools]
        plain, _, _ = attach([plain_message(m) for m in asked.messages or ()], find)
        messages, _ = fold(template, plain, options)
        return self.tokenizer.encode(template.render(messages, **options), special=False)

    def _template(self) -> ChatTemplate:
        if self.session.template is None:
            raise ApiError(400, "no_chat_template", NO_TEMPLATE)
        return self.session.template

    def _encode(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> tuple[list[int], tuple[int, ...]]:
        ids, marks = mark_positions(template, self.tokenizer, messages, **options)
        if not ids:
            raise bad_field("messages", "The chat template makes an empty prompt of these messages.")
        return ids, marks

    def _options(self, asked: ChatRequest, template: ChatTemplate) -> dict[str, Any]:
        """Variables of the template; each that was asked for is one that the template reads."""
        options = dict(self.defaults.options)
        effort = asked.reasoning_effort
        think = asked.enable_thinking if effort != "none" else False
        if think is not None:
            try:
                options.update(thinking_options(template, Think.ON if think else Think.OFF))
            except UsageError as error:
                does = "does not think" if think else "always thinks"
                name = "reasoning_effort" if effort == "none" else "enable_thinking"
                raise bad_field(name, f"This model {does}, and has no switch for it.") from error
        given = {
            f"chat_template_kwargs.{name}": value
            for name, value in (asked.chat_template_kwargs or {}).items()
        }
        given |= {"reasoning_effort": effort if effort != "none" else None}
        given |= {"preserve_thinking": asked.preserve_thinking}
        for field_name, value in given.items():
            name = field_name.removeprefix("chat_template_kwargs.")
            fixed = name != field_name and name in FIXED_VARIABLES
            if name == field_name and value is None:
                continue
            if fixed or name not in template.source:
                raise bad_field(
                    field_name, f"The model's chat template does not read {name}.", "Leave it out."
                )
            options[name] = value
        return options

    def _tools(self, asked: ChatRequest) -> list[dict[str, Any]]:
        """The tools that the answer may use, as the template wants them."""
        choice = asked.tool_choice
        if not asked.tools:
            if choice not in (None, "none", "auto"):
                raise bad_field("tool_choice", "tool_choice asks for a call, and there are no tools.")
            return []
        if choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in asked.tools]

    def _sampling(
        self,
        asked: ChatRequest | CompletionRequest,
        prompt_len: int,
        max_tokens: int | None,
        logprobs: int | None,
        ends: tuple[str, ...] = (),
    ) -> SamplingParams:
        """ends: stop strings beside those of the request."""
        if max_tokens is None:
            # At least 1, so that a prompt without room is refused by the engine, with both numbers.
            max_tokens = max(1, min(self.defaults.max_tokens, self.window - prompt_len))
        given = {
            name: value
            for name in (
                "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
                "repetition_penalty", "seed", "ignore_eos",
            )
            if (value := getattr(asked, name)) is not None
        }  # fmt: skip
        if given.get("top_k") == -1:
            given["top_k"] = 0
        stop = asked.stop
        fields = {"temperature": 1.0, **self.defaults.sampling, **given}
        fields["stop"] = ((stop,) if isinstance(stop, str) else tuple(stop or ())) + ends
        fields["stop_ids"] = tuple(asked.stop_token_ids or ())
        fields["logit_bias"] = _biases(asked.logit_bias or {})
        if isinstance(asked, ChatRequest) and asked.logprobs and logprobs is None:
            logprobs = 0
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **fields)

    def _shorten(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any],
        wanted: int, before: int,
    ) -> tuple[dict[str, Any], list[int], tuple[int, ...]]:  # fmt: skip
        """Leave out the oldest turns until the rest and `wanted` tokens fit: a report, token ids and marks.

        System messages and everything from the last user message on stay. Raises PromptTooLongError where
        those alone are too long.
        """
        turns, trial = turns_of(messages), self.of(None)
        low, high, shortest = 1, len(turns) - 1, before
        best: tuple[int, list[int], tuple[int, ...]] | None = None
        while low <= high:
            drop = (low + high) // 2
            left_out = {index for turn in turns[:drop] for index in turn}
            rest = [m for index, m in enumerate(messages) if index not in left_out]
            ids, marks = trial._encode(template, fold(template, rest, options)[0], options)
            shortest = min(shortest, len(ids))
            if len(ids) + wanted <= self.window:
                best, high = (drop, ids, marks), drop - 1
            else:
                low = drop + 1
        if best is None:
            raise PromptTooLongError(
                f"System messages and the last user turn, which are never left out, have {shortest:,} of the "
                f"prompt's {before:,} tokens, and max_tokens is {wanted:,}.",
                asked=shortest + wanted,
                available=self.window,
                unit="tokens",
                hint="Shorten them.",
            )
        drop, ids, marks = best
        indices = sorted(index for turn in turns[:drop] for index in turn)
        report = {
            "left_out_messages": indices,
            "left_out_tokens": before - len(ids),
            "prompt_tokens_before": before,
            "prompt_tokens": len(ids),
        }
        return report, ids, marks

    def _guide_maker(
        self, asked: ChatRequest, template: ChatTemplate, tools: Sequence[Mapping[str, Any]], inside: bool
    ) -> Any:
        """A function that makes a fresh Guide for each answer; None where nothing is to be steered."""
        if asked.thinking_budget is not None and not inside:
            raise bad_field(
                "thinking_budget",
                "The answer does not start with a thought.",
                "Leave it out, or turn thinking on.",
            )
        matcher, trigger = None, None
        form = asked.response_format
        calls = [tool["function"] for tool in tools]
        named = asked.tool_choice if not isinstance(asked.tool_choice, str) else None
        if named is not None:
            calls = [call for call in calls if call["name"] == named.function.name]
            if not calls:
                raise bad_field("tool_choice", f"There is no tool named {named.function.name!r}.")
        forced = bool(tools) and (named is not None or asked.tool_choice == "required")
        strict = [call for call in calls if call.get("strict")]
        if form is not None and form.type != "text":
            if forced or strict:
                raise bad_field(
                    "response_format", "A schema for the answer and tool calls with one do not go together."
                )
            matcher = self.grammars.matcher(json_grammar(schema_of(asked)), "response_format")
        elif forced or strict:
            if strict and not forced:
                trigger = tool_text.OPEN
            grammar = call_grammar(
                tool_format(template), calls, opened=trigger is not None, tokenizer=self.tokenizer
            )
            matcher = self.grammars.matcher(grammar, "tools")
        budget = asked.thinking_budget
        if matcher is None and budget is None:
            return None
        return lambda: Guide(
            self.grammars,
            inside=inside,
            matcher=None if matcher is None else matcher.deep_copy(),
            trigger=trigger,
            budget=budget,
        )

    def _group(
        self, name: str, ids: Sequence[int], marks: tuple[int, ...], params: SamplingParams, count: int,
        guide: Any, scored: int | None = None, label: str = "",
    ) -> list[Request]:  # fmt: skip
        """`count` requests with one prompt; answer i of a seeded request has the seed plus i."""
        group = []
        for index in range(count):
            fields = vars(params) | ({"seed": params.seed + index} if params.seed is not None else {})
            group.append(
                Request(
                    id=f"{name}-{index}",
                    token_ids=tuple(ids),
                    sampling=SamplingParams(**fields),
                    marks=marks,
                    steering=None if guide is None else guide(),
                    prompt_logprobs=scored if index == 0 else None,
                    label=label,
                )
            )
        self.session.engine.check(group[0])
        return group


def fold(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[int]]:
    """Messages that the template takes, and the indices of those that were folded into another.

    Developer messages are system messages. Where the template rejects system messages that come late, each
    becomes the beginning of the next user message (of the last one, where none follows).
    """
    plain = [{**m, "role": "system"} if m["role"] == "developer" else dict(m) for m in messages]
    late = [i for i, m in enumerate(plain) if m["role"] == "system" and i > 0]
    if not late:
        return plain, []
    try:
        template.render(plain, **options)
        return plain, []
    except InvalidRequestError:
        if not any(m["role"] == "user" for m in plain):
            raise
    folded = [dict(m) for m in plain]
    for index in late:
        after = [i for i in range(index, len(folded)) if folded[i]["role"] == "user"]
        before = [i for i in range(index) if folded[i]["role"] == "user"]
        target = folded[after[0] if after else before[-1]]
        parts = target["content"] if isinstance(target["content"], list) else [_text(target["content"] or "")]
        own = plain[index]["content"]
        own_parts = own if isinstance(own, list) else [_text(own or "")]
        own_parts = [*own_parts, _text("\n\n")]
        target["content"] = [*own_parts, *parts] if after else [*parts, _text("\n\n"), *own_parts[:-1]]
    return [m for i, m in enumerate(folded) if i not in late], late


def ask_for_quotes(messages: list[dict[str, Any]]) -> None:
    """Have the last user message ask for quotes."""
    for message in reversed(messages):
        if message["role"] == "user":
            content = message["content"]
            parts = content if isinstance(content, list) else [_text(content)]
            message["content"] = [*parts, _text(CITE_REQUEST)]
            return


def turns_of(messages: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Indices of messages in turns: each begins with a user message. System messages belong to none."""
    turns: list[list[int]] = []
    for index, message in enumerate(messages):
        if message["role"] in SYSTEM_ROLES:
            continue
        if message["role"] == "user" or not turns:
            turns.append([])
        turns[-1].append(index)
    return turns


def schema_of(asked: ChatRequest) -> Mapping[str, Any]:
    """The JSON schema of the answer."""
    form = asked.response_format
    assert form is not None
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None:
        raise bad_field("response_format.json_schema", "The type json_schema needs a json_schema.")
    return form.json_schema.schema_


def prompts_of(asked: CompletionRequest) -> Sequence[str | list[int]]:
    """One prompt or several, each a text or token ids."""
    prompt: Any = asked.prompt
    single = isinstance(prompt, str) or isinstance(prompt[0], int)
    return [prompt] if single else prompt


def plain_message(message: Message) -> dict[str, Any]:
    """A message as templates want it: known fields, arguments of calls as objects, content always there."""
    given = message.model_dump(exclude_none=True)
    if given.get("function_call"):
        raise bad_field("messages.function_call", "function_call is not supported.", "Use tool_calls.")
    plain = {name: given[name] for name in MESSAGE_FIELDS if name in given}
    plain.setdefault("content", "")
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if (
        not isinstance(function, Mapping)
        or not isinstance(function.get("name"), str)
        or not isinstance(arguments, dict)
    ):
        raise bad_field(
            "messages.tool_calls",
            "A tool call needs a function with a name and arguments, a JSON object as text.",
        )
    return {
        "type": "function",
        "id": call.get("id"),
        "function": {"name": function["name"], "arguments": arguments},
    }


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _biases(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    biases = []
    for key, value in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise bad_field("logit_bias", f"logit_bias names {key[:40]!r}, which is no token id.")
        biases.append((int(key), float(value)))
    return tuple(biases)
