"""One model on this machine, ready for questions: messages in, an answer with its figures out.

name -> files -> facts, tokenizer, chat template -> engine
messages -> text -> tokens and marks -> engine -> thought and answer
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packhorse.core.config import EngineConfig
from packhorse.core.errors import CardLostError, InvalidRequestError, UsageError
from packhorse.core.protocols import Steering
from packhorse.core.types import Event, FinishReason, Request, SamplingParams, Usage
from packhorse.engine import documents
from packhorse.engine.card import CardMemory
from packhorse.engine.engine import Engine
from packhorse.engine.load import load_engine
from packhorse.facts.model import ModelFacts
from packhorse.facts.read import read_model
from packhorse.hub.resolve import resolve
from packhorse.plan.size import Sizes
from packhorse.store.documents import StoredDocument
from packhorse.text.documents import Document, Prompt
from packhorse.text.reasoning import Think, ThoughtSplitter, may_think, opens_thought, thinking_options
from packhorse.text.template import ChatTemplate, Message, mark_positions
from packhorse.text.tokenizer import Detokenizer, Tokenizer, text_marks

MAX_TOKENS = 512
"""Tokens an answer may have unless a number is given, as far as the window goes."""
MAX_THINKING_TOKENS = 4096
"""The same where the model may think first."""


@dataclass(frozen=True)
class Answer:
    """What a model answered, and what it took.

    text: the answer alone. reasoning: what the model thought before, if it does. first_token_s: seconds from
    the question to the first generated token, thoughts included. read_s: the part of it in which the engine
    read the prompt; the rest is rendering and tokenizing. tokens_per_s: generated tokens after the first,
    over their time; 0 where there is only one.
    """

    text: str
    reasoning: str
    usage: Usage
    finish: FinishReason
    first_token_s: float
    read_s: float
    tokens_per_s: float

    @property
    def summary(self) -> str:
        """The figures as one line."""
        return (
            f"read {self.usage.prompt_len} tokens, reused {self.usage.cached_len}, "
            f"first token {self.first_token_s:.2f} s, {self.tokens_per_s:.1f} tok/s"
        )

    @property
    def counts(self) -> dict[str, int]:
        """Token counts by name. reused_tokens are among the read_tokens of the prompt."""
        return {
            "read_tokens": self.usage.prompt_len,
            "reused_tokens": self.usage.cached_len,
            "generated_tokens": self.usage.generated_len,
        }

    @property
    def timings(self) -> dict[str, float]:
        """Times and speed by name."""
        return {
            "first_token_s": round(self.first_token_s, 6),
            "read_s": round(self.read_s, 6),
            "tokens_per_s": round(self.tokens_per_s, 3),
        }


class Session:
    """A loaded model that answers one question at a time and keeps what it has read. Not thread-safe.

    window: tokens that prompt and answer may have together. notes: what was decided at the start, for people.
    """

    def __init__(
        self, facts: ModelFacts, tokenizer: Tokenizer, template: ChatTemplate | None, engine: Engine, *,
        options: dict[str, Any] | None = None, notes: Sequence[str] = (), sizes: Sizes | None = None,
        card: CardMemory | None = None,
    ) -> None:  # fmt: skip
        """Joins parts that are made already; `open` makes them. template: None continues plain text.
        options: go to every rendering of the template. sizes: what was planned before loading. card: its memory,
        None on a CPU."""
        self.facts = facts
        self.tokenizer = tokenizer
        self.template = template
        self.engine = engine
        self.notes = tuple(notes)
        self.sizes = sizes
        self.card = card
        self._options = options or {}
        self._num_answers = 0

    @classmethod
    def open(
        cls, model: str | Path | ModelFacts, config: EngineConfig | None = None, *,
        chat_template: Path | None = None, raw: bool = False, think: Think | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Session:  # fmt: skip
        """Find a model (forms as in `hub.resolve`, or facts already read), check its text part, then load its
        weights.

        config: None takes the defaults for one request at a time. Its `threads` are torch's, for the whole
        process; where other work keeps the machine busy, fewer than the default may be many times faster:
        `EngineConfig(sequences=1, threads=1)`. raw: continue text as it is, without a chat template. think:
        None leaves it to the template. progress(done, total) counts loaded tensors.

        Raises what `resolve`, `read_model`, `Tokenizer.load`, `ChatTemplate.load`, `thinking_options` and
        `load_engine` raise.
        """
        if raw and (chat_template is not None or think is not None):
            raise UsageError(
                "A chat template or a way to think was asked for together with raw text, which has neither.",
                hint="Leave out --raw, or --chat-template and --think.",
            )
        fetch_notes: list[str] = []
        if isinstance(model, ModelFacts):
            facts = model
        else:
            facts = read_model(resolve(str(model), note=fetch_notes.append))
        tokenizer = Tokenizer.load(facts)
        template = None if raw else ChatTemplate.load(facts, tokenizer, chat_template)
        options = {} if template is None or think is None else thinking_options(template, think)
        if template is not None:
            ends = (*facts.eos_ids, *turn_end_ids(template, tokenizer))
            facts = replace(facts, eos_ids=tuple(dict.fromkeys(ends)))
        loaded = load_engine(
            facts, config or EngineConfig(sequences=1), lambda: Detokenizer(tokenizer), progress
        )
        notes = (*fetch_notes, *loaded.notes)
        found: dict[str, Any] = {
            "options": options,
            "notes": notes,
            "sizes": loaded.sizes,
            "card": loaded.card,
        }
        return cls(facts, tokenizer, template, loaded.engine, **found)

    @property
    def window(self) -> int:
        """Tokens one prompt and its answer may have."""
        return self.engine.window

    def keep_document(self, document: Document) -> Future[StoredDocument]:
        """Have a document that an answer has just read kept by name; needs a disk store. One that is there keeps its
        pin and expiry. See documents.keep."""
        reading = documents.read_as_prompt(document, self.tokenizer, self.template, self._options)
        return documents.keep(self.engine, document, reading, renew=False)

    def flush(self) -> None:
        """Wait until what is to be kept for later processes is on disk."""
        self.engine.flush()

    def close(self) -> str:
        """`flush`, and let go of the store: nothing can be asked afterwards. What went wrong with keeping, if
        anything did."""
        return self.engine.close()

    def answer(
        self,
        prompt: str | Prompt | Sequence[Message],
        *,
        on_text: Callable[[str], None] | None = None,
        on_thought: Callable[[str], None] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        steering: Steering | None = None,
        label: str = "",
        **sampling: Any,
    ) -> Answer:
        """Answer one prompt: a question, documents with a question (`compose`), or the messages of a chat.

        on_text and on_thought get the text as it comes; on_progress(read, all) counts prompt tokens, reused
        ones included, after each step until the prompt is read. steering, label: as in Request. sampling: fields
        of SamplingParams. Without max_tokens it is what the window leaves, at most MAX_TOKENS
        (MAX_THINKING_TOKENS where the model may think).

        Where this raises, an interrupt or an error of a callback included, the request has given back all it
        held. Raises InvalidRequestError and PromptTooLongError before anything is computed, ComputeError, and
        CardLostError, after which nothing can be asked.
        """
        asked = time.perf_counter()
        token_ids, marks = self._encode(prompt)
        tail = self.tokenizer.decode(token_ids[-16:], skip_special=False)
        if "max_tokens" not in sampling:
            thinks = self.template is not None and may_think(tail, self.template)
            most = MAX_THINKING_TOKENS if thinks else MAX_TOKENS
            # At least 1, so that a prompt without room is refused by the engine, with its numbers.
            sampling["max_tokens"] = max(1, min(most, self.window - len(token_ids)))
        self._num_answers += 1
        request = Request(
            str(self._num_answers), tuple(token_ids), SamplingParams(**sampling), marks, steering, label=label
        )
        splitter = None
        if self.template is not None:
            splitter = ThoughtSplitter(inside=opens_thought(tail))
        output = _Output(splitter, on_text, on_thought)
        reading, times = time.perf_counter(), list[float]()
        self.engine.add(request)
        try:
            last = self._run(times, output, on_progress)
        except CardLostError:  # which takes nothing back any more
            raise
        except BaseException:
            self.engine.cancel(request.id)
            raise
        if last.error is not None:
            raise last.error
        assert last.finish is not None
        more = last.usage.generated_len - 1
        return Answer(
            text=output.text,
            reasoning=output.thought.strip(),
            usage=last.usage,
            finish=last.finish,
            first_token_s=times[0] - asked,
            read_s=times[0] - reading,
            tokens_per_s=more / (times[-1] - times[0]) if more else 0.0,
        )

    def _run(
        self, times: list[float], output: _Output, on_progress: Callable[[int, int], None] | None
    ) -> Event:
        """Step until the only request ends; its last event. times: gets the moment of each token."""
        while True:
            with interrupt_after():
                events = self.engine.step()
            for event in events:
                if event.token_ids:
                    times.append(time.perf_counter())
                if on_progress is not None and event.usage.generated_len <= 1:
                    on_progress(event.read_len, event.usage.prompt_len)
                output.add(event.text)
                if event.finish is not None:
                    output.finish()
                    return event

    def _encode(self, prompt: str | Prompt | Sequence[Message]) -> tuple[list[int], tuple[int, ...]]:
        """Token ids and marks."""
        if isinstance(prompt, str):
            prompt = Prompt(prompt, (len(prompt),))
        if isinstance(prompt, Prompt):
            if not prompt.text.strip():
                raise InvalidRequestError("The prompt is empty.", hint="Ask something.")
            if self.template is None:
                return text_marks(self.tokenizer, prompt.text, prompt.ends)
            prompt = [{"role": "user", "content": prompt.parts}]
        if self.template is None:
            raise InvalidRequestError(
                "Messages need a chat template, and this session continues raw text.",
                hint="Give one text, or open the session without raw.",
            )
        return mark_positions(self.template, self.tokenizer, prompt, **self._options)


def turn_end_ids(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special token that the template puts after an answer (<|im_end|>, <|eot_id|>, ...), if it does.

    Some checkpoints do not name it as an eos token, and then their answers would run on.
    """
    said = "Yes."
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
    try:
        text = template.render(chat, add_generation_prompt=False)
    except InvalidRequestError:
        return ()
    _, found, after = text.rpartition(said)
    ids = tokenizer.encode(after, special=False)[:1] if found else []
    return tuple(token_id for token_id in ids if tokenizer.is_special(token_id))


@contextmanager
def interrupt_after() -> Iterator[None]:
    """Ctrl-C in the block is raised at its end, so that a step is done whole or not at all.

    A second one ends the process there and then. Handlers other than Python's own stay in force.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed = False

    def remember(*_: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt


class _Output:
    """Collects text as it comes, thought apart from answer, and passes it on."""

    def __init__(
        self,
        splitter: ThoughtSplitter | None,
        on_text: Callable[[str], None] | None,
        on_thought: Callable[[str], None] | None,
    ) -> None:
        self.text = ""
        self.thought = ""
        self._splitter = splitter
        self._on_text = on_text
        self._on_thought = on_thought

    def add(self, text: str) -> None:
        if self._splitter is None:
            self._take("", text)
        elif text:
            self._take(*self._splitter.feed(text))

    def finish(self) -> None:
        if self._splitter is not None:
            self._take(*self._splitter.finish())

    def _take(self, thought: str, answer: str) -> None:
        self.thought += thought
        self.text += answer
        if thought and self._on_thought is not None:
            self._on_thought(thought)
        if answer and self._on_text is not None:
            self._on_text(answer)
