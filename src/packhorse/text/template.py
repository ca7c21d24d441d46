"""Chat templates: messages to the one text that the model was trained on.

Templates come with models, from people we do not know: they run in Jinja's immutable sandbox. How long they
may loop is bounded, and so is each text and list that they build (before it is built: text/bounds.py), and
the sum of these. Helpers and settings are those that transformers gives them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor
import markupsafe
from jinja2.exceptions import SecurityError

from packhorse.core.errors import InvalidRequestError, TokenizerError
from packhorse.facts.model import ModelFacts
from packhorse.text import bounds
from packhorse.text.tokenizer import Tokenizer, text_marks

MAX_LOOP_STEPS = 100_000
"""Rounds of all loops and calls of macros in one rendering: a chat of thousands of turns needs a tenth."""
EXTRA_CHARS = 1_000_000
"""Characters that a rendering may hold beside four times those of its messages and tools."""
REBUILDS = 200
"""Times that bound is what all texts of one rendering may hold together, those thrown away included: a
template that adds turn after turn to one text copies it at each turn."""
MARKED_TURNS = 16
"""Last turns whose ends are marked: earlier ones were marked when they were last. Each costs a rendering."""

MEDIA_PARTS = ("image", "image_url", "input_image", "video", "video_url", "audio", "input_audio", "file")
MAX_DATE_FORMAT = 1000
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

_PROBE = "Which number follows 48213?"
"""A question that a template has to write."""

Message = Mapping[str, Any]


class ChatTemplate:
    """One compiled template. Thread-safe; a rendering takes milliseconds and holds a lock."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compiles `source`. special_tokens: bos_token, eos_token and so on, as text, by those names.

        Raises TokenizerError where it does not compile.
        """
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self._lock = threading.Lock()
        self._environment = _BoundedEnvironment()
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            why = "is nested too deep to compile"
            if isinstance(error, jinja2.TemplateSyntaxError):
                why = f"does not compile: {error.message} (line {error.lineno})"
            hint = "Give a working one with --chat-template FILE."
            raise TokenizerError(f"The chat template {why}.", hint=hint) from error

    @classmethod
    def load(cls, facts: ModelFacts, tokenizer: Tokenizer, file: Path | None = None) -> ChatTemplate:
        """The template in `file`, else the model's own.

        Raises TokenizerError where neither exists, it does not compile, or that of the file leaves out what is asked.
        """
        if file is not None:
            try:
                template = cls(file.read_text(encoding="utf-8-sig"), tokenizer.special_tokens)
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerError(
                    f"The chat template {file} cannot be read: {error}.",
                    hint="Give a Jinja template as a UTF-8 text file.",
                    path=str(file),
                ) from error
            # One that wants another chat says so when it gets one.
            with contextlib.suppress(InvalidRequestError):
                if _PROBE not in template.render([{"role": "user", "content": _PROBE}]):
                    raise TokenizerError(
                        f"The chat template {file} writes a prompt without the question.",
                        hint="Give a Jinja template that writes the content of `messages`.",
                        path=str(file),
                    )
            return template
        if facts.chat_template is None:
            hint = "Give one with --chat-template FILE, or continue plain text with `packhorse ask --raw`."
            raise TokenizerError(f"{facts.name} comes without a chat template.", hint=hint, model=facts.name)
        return cls(facts.chat_template, tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        reasoning_effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a chat. `variables` go to the template by name; so do the named options that are set.

        Content is a string or a list of parts of type text, which are joined. Raises InvalidRequestError for
        messages of another shape, images, and whatever the template itself rejects (with its words), and
        TokenizerError for a template that loops, grows or reaches out of its sandbox.
        """
        plain = [_plain_message(message) for message in _checked(messages)]
        options = {"enable_thinking": enable_thinking, "reasoning_effort": reasoning_effort}
        known = {key: value for key, value in options.items() if value is not None}
        values = {**self.special_tokens, **known, **variables}
        given = sum(len(json.dumps(value, default=str, ensure_ascii=False)) for value in (plain, tools))
        with self._lock:
            self._environment.start(max_chars=4 * given + EXTRA_CHARS)
            try:
                return self._template.render(
                    messages=plain,
                    tools=None if tools is None else [dict(tool) for tool in tools],
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **values,
                )
            except (SecurityError, RecursionError, OverflowError, MemoryError) as error:
                raise TokenizerError(
                    f"The chat template was stopped: {str(error).rstrip('.') or type(error).__name__}.",
                    hint="It asks for more than a template needs. Give another with --chat-template FILE.",
                ) from error
            except Exception as error:
                # raise_exception is the template's own refusal; the rest is it tripping over these messages.
                raise InvalidRequestError(
                    f"The chat template rejects these messages: {error}",
                    hint="Change the messages, or give another template with --chat-template FILE.",
                ) from error


def mark_positions(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message], **options: Any
) -> tuple[list[int], tuple[int, ...]]:
    """Token ids of a rendered chat, and the positions where a snapshot is worth keeping.

    Those are the ends of the first turn, of the last MARKED_TURNS turns, and of each content part: places up
    to which a later chat may be the same. `options` are those of `ChatTemplate.render`. Positions are in
    (0, len(ids)], ascending; where a token straddles an end, the position before it counts.

    A turn's end counts only where the template writes the history up to it in the same way (some rewrite it,
    some raise on a part of it): a mark less, never a wrong one. Raises what `render` raises.
    """
    text = template.render(messages, **options)
    ends: set[int] = set()
    before = 0
    first_marked = len(messages) - MARKED_TURNS
    for index in range(len(messages)):
        ends.update(_part_ends(messages[index], text, before))
        if index != 0 and index < first_marked:
            continue
        try:
            history = template.render(messages[: index + 1], **{**options, "add_generation_prompt": False})
        except InvalidRequestError:
            continue
        if text.startswith(history):
            before = len(history)
            ends.add(before)
    return text_marks(tokenizer, text, ends, special=False)


def _part_ends(message: Message, text: str, start: int) -> list[int]:
    """Character positions in `text` where the parts of a message's content end, found by the content itself.

    The last part's end is where the turn's end mark follows, so it is one too. Templates may trim content.
    """
    parts = message.get("content")
    if isinstance(parts, str) or not parts:
        return []
    pieces = [part["text"] for part in parts]
    content = "".join(pieces)
    trimmed = content.strip()
    at = text.find(trimmed, start)
    if not trimmed or at < 0:
        return []
    cut = len(content) - len(content.lstrip())
    ends, total = [], 0
    for piece in pieces:
        total += len(piece)
        ends.append(at + min(max(total - cut, 0), len(trimmed)))
    return ends


def _checked(messages: Sequence[Message]) -> Sequence[Message]:
    if not messages:
        raise InvalidRequestError("There are no messages.", hint="Give at least one, such as a user's.")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            hint = "Each message has a role and a content."
            raise InvalidRequestError(f"Message {index} has no role.", hint=hint, index=index)
    return messages


def _plain_message(message: Message) -> dict[str, Any]:
    """A message of plain values: no keys without a value, content as one string, reasoning under each name
    that templates read it by."""
    plain = {key: value for key, value in message.items() if value is not None}
    if "content" in plain:
        plain["content"] = _content_text(plain["content"])
    reasoning = next((plain[name] for name in REASONING_FIELDS if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _content_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        hint = "Content is a string or a list of parts such as {'type': 'text', 'text': ...}."
        raise InvalidRequestError(f"A message's content is of type {type(content).__name__}.", hint=hint)
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in MEDIA_PARTS:
            raise InvalidRequestError(
                f"{kind.removeprefix('input_').removesuffix('_url')} input is not supported: the model's "
                "vision part is not loaded.",
                hint="Send text parts only.",
                part=kind,
            )
        if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f"A content part is of type {kind!r} or without text.",
                hint="Parts look like {'type': 'text', 'text': ...}.",
                part=kind,
            )
    return "".join(part["text"] for part in content)


class _Bounds(jinja2.visitor.NodeTransformer):
    """Rewrites a parsed template so that each loop round and macro call is counted, and `~` is bounded."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> Any:  # noqa: N802
        self.generic_visit(node)
        return _call("bounded_concat", node.nodes, node.lineno)

    def _refused(self, node: Any) -> Any:
        raise jinja2.TemplateAssertionError("other templates cannot be included", node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refused  # noqa: N815

    def _counted(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(_call("count_step", [], node.lineno), lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _counted  # noqa: N815


def _call(name: str, args: list[jinja2.nodes.Expr], lineno: int) -> jinja2.nodes.Call:
    function = jinja2.nodes.EnvironmentAttribute(name, lineno=lineno)
    return jinja2.nodes.Call(function, args, [], None, None, lineno=lineno)


class _BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with the helpers that templates expect and with bounds on steps and sizes.

    `start` sets the bounds of one rendering.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            finalize=self._written,
        )
        # Nothing is built before `start`: what Jinja would compute when it compiles is left to the rendering.
        self.steps_left = 0
        self.max_chars = 0
        self.chars_left = 0
        self.filters["tojson"] = _tojson
        self.filters["join"] = _join
        self.filters.pop("urlize")  # each link grows by its arguments, and chats need no HTML
        for name, function in list(self.filters.items()):
            self.filters[name] = self._bounded_filter(name, function)
        self.globals.pop("lipsum")
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            dict=_make_dict,
            namespace=_Namespace,
        )

    def start(self, max_chars: int) -> None:
        """Begins a rendering that may build strings and lists of `max_chars` at most."""
        self.steps_left = MAX_LOOP_STEPS
        self.max_chars = max_chars
        self.chars_left = REBUILDS * max_chars

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        bounded: jinja2.nodes.Template = _Bounds().visit(super()._parse(source, name, filename))
        return bounded

    def count_step(self) -> str:
        """Called by the template at each loop round and macro call."""
        self.steps_left -= 1
        if self.steps_left < 0:
            raise SecurityError(f"it loops more than {MAX_LOOP_STEPS} times")
        return ""

    def concat(self, parts: Any) -> str:
        """How Jinja joins what a template or a macro writes; stops at the bound."""
        pieces, total = [], 0
        for part in parts:
            total += len(part)
            self._check(total)
            pieces.append(part)
        return "".join(pieces)

    def bounded_concat(self, *parts: Any) -> str:
        """What `~` does."""
        text: str = self._built(self.concat(str(self._written(part)) for part in parts))
        return text

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """What +, *, ** and % do, refused where the result would be beyond all bounds."""
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
                    self._check(len(value) * times)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            self._check(bits)
        if operator == "%" and isinstance(left, str | bytes):
            self._check(bounds.percent_size(left, right, self.max_chars))
        return self._built(super().call_binop(context, operator, left, right))

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """What calls do: methods of texts and numbers are refused where they would build too much."""
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str | bytes):
            if name in bounds.METHOD_SIZES:
                __self._check(bounds.METHOD_SIZES[name](owner, *args, **kwargs))
            elif name == "join":
                args = tuple(__self._joinable(owner, arg) for arg in args)
        elif name == "to_bytes" and isinstance(owner, int):
            __self._check(max((arg for arg in (*args, *kwargs.values()) if isinstance(arg, int)), default=0))
        return __self._built(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format, with its widths and the sum of its fields bounded."""
        wrapped: Any = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, by_map = value.__self__, value.__name__ == "format_map"
        escaping = isinstance(text, markupsafe.Markup)

        @functools.wraps(wrapped)
        def format_bounded(*args: Any, **kwargs: Any) -> str:
            formatter: Any = _EscapeFormatter(self, escape=text.escape) if escaping else _Formatter(self)
            # Refuses with Python's words what is called with other arguments than these.
            given, named = ((), args[0]) if by_map and len(args) == 1 and not kwargs else (args, kwargs)
            return type(text)(formatter.vformat(text, given, named))

        return format_bounded

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0
        estimate = bounds.FILTER_SIZES.get(name)

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            given = args[first:]
            if name in bounds.TEXT_FILTERS:
                for value in (*given, *kwargs.values()):
                    if isinstance(value, list | tuple | dict):
                        self._check(bounds.text_size(value, self.max_chars))
            if estimate is not None:
                self._check(estimate(*given, **kwargs))
            elif name == "format" and given:
                values = kwargs or given[1:]
                self._check(bounds.percent_size(str(given[0]), values, self.max_chars))
            result = function(*args, **kwargs)
            return self._counted(result) if isinstance(result, Iterator) else self._built(result)

        return bounded

    def _joinable(self, separator: str | bytes, items: Any) -> Any:
        """The items to join, as a list of bounded size."""
        values = list(items)
        self._check(sum(bounds.shallow_size(item) + len(separator) for item in values))
        return values

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        """What a filter yields one by one; all of it together is bounded, whoever gathers it."""
        total = 0
        for item in items:
            total += bounds.shallow_size(item)
            self._check(total)
            yield item

    def _written(self, value: Any) -> Any:
        """What `{{ }}` writes, before it is made a text."""
        if isinstance(value, list | tuple | dict):
            self._check(bounds.text_size(value, self.max_chars))
        return value

    def _built(self, value: Any) -> Any:
        """A value that an operation has made, counted."""
        if isinstance(value, str | bytes | list | tuple):
            self._check(len(value))
            self.chars_left -= len(value)
            if self.chars_left < 0:
                raise SecurityError(
                    f"it builds texts of more than {REBUILDS * self.max_chars} characters in all"
                )
        return value

    def _check(self, size: int) -> None:
        if size > self.max_chars:
            raise SecurityError(f"it builds more than {self.max_chars} characters out of these messages")


class _Formatter(jinja2.sandbox.SandboxedFormatter):
    """str.format for one text; stops where its fields hold more than the environment lets it build."""

    def __init__(self, env: _BoundedEnvironment, **kwargs: Any) -> None:
        super().__init__(env, **kwargs)
        self.bounding = env
        self.total = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        env = self.bounding
        size = bounds.text_size(value, env.max_chars) if isinstance(value, str | list | tuple | dict) else 0
        self.total += size + bounds.width_of(format_spec)
        env._check(self.total)
        return super().format_field(value, format_spec)


class _EscapeFormatter(_Formatter, jinja2.sandbox.SandboxedEscapeFormatter):
    """The same for texts marked as HTML."""


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks, for training, what the assistant wrote; rendering just writes its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class _Namespace(jinja2.utils.Namespace):
    """A namespace that takes no underscored names: Python looks some of those up on its own account."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_underscored(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscored(name)
        super().__setitem__(name, value)


def _refuse_underscored(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"it sets the attribute {name} of a namespace")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > MAX_DATE_FORMAT:
        raise SecurityError(f"it formats a date by more than {MAX_DATE_FORMAT} characters")
    return datetime.now().strftime(format)


@jinja2.pass_environment
def _join(env: _BoundedEnvironment, items: Any, d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's join (which escapes nothing here), its result bounded before it is built."""
    if attribute is not None:
        items = map(jinja2.filters.make_attrgetter(env, attribute), items)
    separator = str(d)
    return separator.join(env._joinable(separator, (str(env._written(item)) for item in items)))


@jinja2.pass_environment
def _tojson(
    env: _BoundedEnvironment,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where Jinja's own filter would escape HTML."""
    step = len(indent) if isinstance(indent, str) else indent or 0
    between = 2 if separators is None else sum(map(len, separators))
    env._check(bounds.text_size(value, env.max_chars, step, between))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
