"""packhorse chat: question after question over the same documents; what was read is not read again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packhorse.cli import asking, common
from packhorse.cli.common import as_typed, closing, note, print_json, store_fields
from packhorse.core.config import EngineConfig
from packhorse.core.errors import CardLostError, PackhorseError, UsageError
from packhorse.text.documents import Document, compose

if TYPE_CHECKING:
    from packhorse.engine.session import Session

HELP = """\
/document FILE  read a document before the next question
/reset          forget questions, answers and documents
/stats          what the conversation holds and has read
/quit           leave (so does the end of the input)"""


def command(
    model: common.ModelArgument,
    document: asking.DocumentOption = None,
    system: asking.SystemOption = None,
    temperature: asking.TemperatureOption = None,
    top_p: asking.TopPOption = None,
    top_k: asking.TopKOption = None,
    min_p: asking.MinPOption = None,
    seed: asking.SeedOption = None,
    max_tokens: asking.MaxTokensOption = None,
    think: asking.ThinkOption = None,
    context: asking.ContextOption = None,
    threads: asking.ThreadsOption = None,
    dtype: asking.DtypeOption = EngineConfig.dtype,
    kv: asking.KvOption = EngineConfig.kv,
    weights: asking.WeightsOption = EngineConfig.weights,
    device: asking.DeviceOption = EngineConfig.device,
    as_arch: asking.AsArchOption = None,
    exact: asking.ExactOption = False,
    store: common.StoreOption = None,
    disk: common.DiskOption = None,
    keep_days: common.KeepDaysOption = None,
    ram: common.RamOption = None,
    vram: common.VramOption = None,
    chat_template: asking.ChatTemplateOption = None,
    json: common.JsonOption = False,
    cache: common.CacheOption = None,
    offline: common.OfflineOption = False,
) -> None:
    """Reads lines from the terminal, or from a pipe: then the first error ends it.

    With json, answers are not printed as they come, but all turns at the end, as one document.
    """
    given = asking.given_sampling(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_tokens=max_tokens
    )
    config = EngineConfig(
        context=context, sequences=1, dtype=dtype, kv=kv, weights=weights, device=device, exact=exact,
        as_arch=as_arch, threads=threads, **store_fields(store, disk, ram, vram, keep_days),
    )  # fmt: skip
    documents = asking.read_documents(document or [], note)
    session = asking.open_session(
        model, config, note, cache=cache, offline=offline, chat_template=chat_template, think=think,
        max_tokens=max_tokens,
    )  # fmt: skip
    sampling = asking.sampling_fields(given, session.facts.generation, greedy=False)
    asking.warn_of_no_draw(given, sampling, note)
    conversation = Conversation(session, sampling, system, documents, stream=not json)
    with closing(session, note):
        if sys.stdin.isatty():
            note("Ask away; /help lists commands.")
            run(conversation, typed_lines())
        else:
            for line in piped_lines():
                if not conversation.take(line):
                    break
    if json:
        print_json({"model": model, "name": session.facts.name, "turns": conversation.turns})


class Conversation:
    """What was said so far, and the documents that the next question brings in.

    turns: a JSON-ready record of every turn since the start, forgotten ones too.
    """

    def __init__(
        self,
        session: Session,
        sampling: dict[str, Any],
        system: str | None,
        documents: list[Document],
        *,
        stream: bool = True,
    ) -> None:
        self.session = session
        self.sampling = sampling
        self.documents = documents
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, Any]] = list(self._start)
        self.turns: list[dict[str, Any]] = []
        self._stream = stream
        self._held = 0

    def take(self, line: str) -> bool:
        """Answer a question or carry out a command; False where the conversation is over.

        Raises PackhorseError, and KeyboardInterrupt in an answer: then the turn has not happened.
        """
        if not line.strip():
            return True
        if not line.startswith("/"):
            self._ask(line)
            return True
        name, _, argument = line.strip().partition(" ")
        if name == "/quit":
            return False
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: note(HELP),
            "/reset": self._reset,
            "/document": self._add_document,
            "/stats": self._show_stats,
        }
        if name not in commands:
            hint = "/help lists them; a question may begin with a space."
            raise UsageError(f"There is no command {name}.", hint=hint)
        commands[name](argument.strip())
        return True

    def _ask(self, question: str) -> None:
        asked = {"role": "user", "content": compose(self.documents, question).parts}
        with asking.Display(stream=self._stream) as display:
            answer = self.session.answer(
                [*self.messages, asked], label="chat", **display.callbacks, **self.sampling
            )
        self.session.flush()
        answered = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            answered["reasoning_content"] = answer.reasoning
        self.messages += [asked, answered]
        self.documents = []
        self.turns.append({"question": question, **asking.describe_answer(answer)})
        usage = answer.usage
        self._held = usage.prompt_len + usage.generated_len
        asking.warn_of_cut(answer, self.session.window, note)
        if usage.cached_len:
            kept = asking.kept_text(usage.prompt_len, usage.cached_len, "before")
            note(f"Of the prompt's {usage.prompt_len} tokens {kept}")
        note(answer.summary)

    def _reset(self, _: str) -> None:
        self.messages = list(self._start)
        self.documents = []
        self._held = 0
        note("Forgotten.")

    def _add_document(self, argument: str) -> None:
        if not argument:
            raise UsageError("/document names no file.", hint="Write /document FILE.")
        self.documents += asking.read_documents([Path(argument)], note)
        note(f"{self.documents[-1].name} goes with the next question.")

    def _show_stats(self, _: str) -> None:
        read, reused = (
            sum(turn["usage"][n] for turn in self.turns) for n in ("read_tokens", "reused_tokens")
        )
        store = self.session.engine.store.stats
        note(
            f"The conversation holds {self._held} of {self.session.window} tokens. Since the start the "
            f"prompts of {len(self.turns)} turns had {read} tokens: "
            f"{asking.kept_text(read, reused, 'before')} KV pages: "
            f"{store.pages_cached} kept, {store.pages_free} free."
        )
        for kind, count in self.session.engine.store.kv_misfits.items():
            note(f"Values of K and V that their codec stored as {kind}: {count:,}.")


def run(conversation: Conversation, lines: Iterator[str]) -> None:
    """A conversation with a person: an error or Ctrl-C ends the turn and not the conversation, but where
    the card is lost."""
    for line in lines:
        try:
            if not conversation.take(line):
                return
        except CardLostError:
            raise
        except PackhorseError as error:
            note(f"Error: {as_typed(str(error), sys.argv)}")
        except KeyboardInterrupt:
            note("Stopped; this turn is forgotten. /quit leaves.")


def typed_lines() -> Iterator[str]:
    """Lines as a person types them, with the keys of a shell; Ctrl-C at an empty prompt leaves."""
    import readline  # noqa: F401  (input() uses it once it is imported)

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


def piped_lines() -> Iterator[str]:
    """Lines of standard input. Raises UsageError where one is not UTF-8."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            hint = "Convert it with iconv."
            raise UsageError(f"Line {number} of the input is not valid UTF-8.", hint=hint) from error
