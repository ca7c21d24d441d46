"""Sessions: from messages to an answer, with reuse, thoughts, defaults and interrupts."""

import dataclasses
import os
import signal

import pytest

from chats import (
    EOS,
    PLAIN,
    THINKING,
    byte_tokenizer,
    greedy_text,
    make_folder,
    plain_prompt,
    script,
    shared_folder,
)
from packhorse.core.config import EngineConfig
from packhorse.core.errors import (
    CardLostError,
    ComputeError,
    InvalidRequestError,
    PackhorseError,
    TokenizerError,
    UsageError,
)
from packhorse.core.types import FinishReason, Request
from packhorse.engine.session import MAX_THINKING_TOKENS, MAX_TOKENS, Session, interrupt_after
from packhorse.facts.read import read_model
from packhorse.text.documents import Document, Page, compose
from packhorse.text.reasoning import Think
from packhorse.text.template import ChatTemplate
from packhorse.text.tokenizer import Tokenizer

FAMILIES = ("qwen3", "qwen3_5")
CONFIG = EngineConfig(sequences=1, threads=1, context=2048, dtype="fp32")


def document(name: str, length: int) -> Document:
    text = "".join(f"{name} has mule {i}. " for i in range(length // 16))
    return Document(name, text, (Page(1, 0, len(text)),))


def open_tiny(family: str = "qwen3", template: str = PLAIN, **options) -> Session:
    return Session.open(shared_folder(family, template), CONFIG, **options)


def asked(session: Session, monkeypatch) -> list:
    """The requests that the session's engine gets from now on."""
    requests = []
    add = session.engine.add
    monkeypatch.setattr(session.engine, "add", lambda request: requests.append(request) or add(request))
    return requests


@pytest.mark.parametrize("family", FAMILIES)
def test_answer_is_what_transformers_says(family):
    session = open_tiny(family)
    prompt = plain_prompt(("user", "How many mules?"))
    pieces: list[str] = []
    answer = session.answer("How many mules?", on_text=pieces.append, max_tokens=24)
    assert answer.text == greedy_text(family, prompt, 24) == "".join(pieces)
    assert answer.finish is FinishReason.LENGTH
    assert (answer.usage.prompt_len, answer.usage.generated_len) == (
        len(byte_tokenizer().encode(prompt).ids),
        24,
    )
    assert 0 < answer.read_s <= answer.first_token_s
    assert answer.tokens_per_s > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_second_question_reads_only_itself(family):
    """At most 127 tokens before the question are read again, and the answer is that of a fresh session."""
    session = open_tiny(family)
    documents = [document("Alpha", 700), document("Beta", 500)]
    session.answer(compose(documents, "How many?"), max_tokens=4)
    progress: list[tuple[int, int]] = []
    prompt = compose(documents, "Which is the first?")
    second = session.answer(prompt, on_progress=lambda *done: progress.append(done), max_tokens=16)
    question_len = len(prompt.text) - prompt.ends[-2] + len("<|im_end|>\n<|im_start|>assistant\n")
    assert second.usage.cached_len >= second.usage.prompt_len - question_len - 127
    assert progress[0][0] > second.usage.cached_len
    assert progress[-1] == (second.usage.prompt_len, second.usage.prompt_len)
    assert open_tiny(family).answer(prompt, max_tokens=16).text == second.text
    # Another second document: the first is not read again.
    third = session.answer(compose([documents[0], document("Gamma", 500)], "How many?"), max_tokens=4)
    assert third.usage.cached_len >= 700 - 127


@pytest.mark.parametrize("family", FAMILIES)
def test_second_turn_reads_only_what_is_new(family):
    session = open_tiny(family)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many mules? " * 30}]
    first = session.answer(chat, max_tokens=40)
    chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Why?"}]
    second = session.answer(chat, max_tokens=12)
    # The answer is made of stray bytes here, so its text does not lead back to its tokens.
    assert second.usage.cached_len >= first.usage.prompt_len - 127
    assert open_tiny(family).answer(chat, max_tokens=12).text == second.text


def test_documents_come_first_and_the_question_last(monkeypatch):
    session = open_tiny()
    requests = asked(session, monkeypatch)
    documents = [document("Alpha", 100), document("Beta", 100)]
    session.answer(compose(documents, "Why?"), max_tokens=1)
    ids, marks = requests[0].token_ids, requests[0].marks
    text = byte_tokenizer().decode(ids, skip_special_tokens=False)
    assert text.count("<|im_start|>user") == 1
    places = [text.index(word) for word in ("Alpha has", "Beta has", "Why?", "<|im_start|>assistant")]
    assert places == sorted(places)
    for mark, read in zip(marks, documents, strict=False):
        assert byte_tokenizer().decode(ids[:mark]).rstrip().endswith(read.text.rstrip())


def test_raw_text():
    session = Session.open(shared_folder("qwen3"), CONFIG, raw=True)
    assert session.answer("The hut", max_tokens=20).text == greedy_text("qwen3", "The hut", 20)
    assert session.answer("A", max_tokens=5).usage.prompt_len == 1
    with pytest.raises(InvalidRequestError, match="raw text"):
        session.answer([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("options", [{"think": Think.ON}, {"chat_template": "x.jinja"}])
def test_raw_text_has_no_template(options):
    with pytest.raises(UsageError, match="raw text"):
        Session.open("nowhere", CONFIG, raw=True, **options)


@pytest.mark.parametrize("prompt", ["", " \n", compose([], "  ")])
def test_empty_prompt(prompt):
    with pytest.raises(InvalidRequestError, match="empty"):
        open_tiny().answer(prompt)


def test_thought_is_apart_from_the_answer(monkeypatch):
    session = open_tiny(template=THINKING)
    script(monkeypatch, "seven,\nno, nine\n</think>\n\nNine mules.<|im_end|>")
    thought: list[str] = []
    text: list[str] = []
    answer = session.answer("How many?", on_text=text.append, on_thought=thought.append)
    assert (answer.reasoning, answer.text) == ("seven,\nno, nine", "Nine mules.")
    assert ("".join(thought), "".join(text)) == ("seven,\nno, nine", "Nine mules.")
    assert answer.finish is FinishReason.STOP


@pytest.mark.parametrize(
    ("think", "end"),
    [
        (None, "assistant\n<think>\n"),
        (Think.ON, "assistant\n<think>\n"),
        (Think.LOW, "assistant\n(low)<think>\n"),
        (Think.OFF, "assistant\n<think>\n\n</think>\n\n"),
    ],
)
def test_think(monkeypatch, think, end):
    session = open_tiny(template=THINKING, think=think)
    requests = asked(session, monkeypatch)
    script(monkeypatch, "Nine.<|im_end|>")
    answer = session.answer("How many?")
    assert byte_tokenizer().decode(requests[0].token_ids, skip_special_tokens=False).endswith(end)
    off = think is Think.OFF
    assert (answer.text, answer.reasoning) == (("Nine.", "") if off else ("", "Nine."))


def test_think_that_the_template_does_not_know():
    with pytest.raises(UsageError, match="no such switch"):
        open_tiny(think=Think.ON)


@pytest.mark.parametrize(("template", "most"), [(PLAIN, MAX_TOKENS), (THINKING, MAX_THINKING_TOKENS)])
def test_max_tokens_by_default(monkeypatch, template, most):
    config = EngineConfig(sequences=1, threads=1, dtype="fp32")
    session = Session.open(shared_folder("qwen3", template), config)
    requests = []

    def refuse(request: Request) -> None:
        requests.append(request)
        raise PackhorseError("seen")

    monkeypatch.setattr(session.engine, "add", refuse)
    # Near the end of the window it is what is left; without room the engine gets to refuse.
    for question in ("How many?", "x" * (session.window - 100), "x" * session.window):
        with pytest.raises(PackhorseError, match="seen"):
            session.answer(question)
    left = session.window - len(requests[1].token_ids)
    assert 0 < left < 100
    assert [request.sampling.max_tokens for request in requests] == [most, left, 1]


def test_the_turn_end_ends_an_answer(monkeypatch):
    """The config names another eos token."""
    session = open_tiny()
    assert session.facts.eos_ids == (EOS, byte_tokenizer().token_to_id("<|im_end|>"))
    script(monkeypatch, "Nine.<|im_end|>\n<|im_start|>user\nWhy?")
    assert session.answer("How many?").text == "Nine."


def test_templates_without_a_turn_end(tmp_path):
    for template in ("{{ messages[0].content }}", "{{ raise_exception('no') if messages | length > 1 }}x"):
        folder = make_folder(tmp_path / str(len(template)), "qwen3", template)
        assert Session.open(folder, CONFIG).facts.eos_ids == (EOS,)


def test_missing_template(tmp_path):
    folder = make_folder(tmp_path / "m", "qwen3", template=None)
    with pytest.raises(TokenizerError, match=r"--chat-template FILE.*--raw"):
        Session.open(folder, CONFIG)
    own = tmp_path / "own.jinja"
    own.write_text(PLAIN)
    assert isinstance(Session.open(folder, CONFIG, chat_template=own).template, ChatTemplate)
    assert Session.open(folder, CONFIG, raw=True).template is None


def test_refusals_come_before_the_weights(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "m", "qwen3")
    wide = byte_tokenizer()
    wide.add_tokens([f"<extra{i}>" for i in range(100)])
    wide.save(str(folder / "tokenizer.json"))
    monkeypatch.setattr("packhorse.engine.session.load_engine", lambda *_: pytest.fail("loaded"))
    with pytest.raises(TokenizerError, match="wrong tokenizer for the vocabulary"):
        Session.open(folder, CONFIG)


def test_facts_that_are_read_already():
    facts = read_model(shared_folder("qwen3"))
    session = Session.open(facts, CONFIG)
    assert session.facts == dataclasses.replace(facts, eos_ids=session.facts.eos_ids)


def nothing_is_held(session: Session) -> bool:
    stats = session.engine.store.stats
    return not session.engine.has_work and stats.open_sequences == 0 and stats.pages_used == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("callback", ["on_text", "on_progress"])
def test_an_interrupt_gives_everything_back(error, callback):
    session = open_tiny("qwen3_5")
    calls = []

    def stop(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise error

    prompt = compose([document("Alpha", 1200)], "How many?")
    with pytest.raises(error):
        session.answer(prompt, max_tokens=50, **{callback: stop})
    assert nothing_is_held(session)
    again = session.answer(prompt, max_tokens=8)
    assert again.usage.cached_len > 0
    assert again.text == open_tiny("qwen3_5").answer(prompt, max_tokens=8).text


def test_a_card_that_is_lost_is_asked_for_nothing(monkeypatch):
    session = open_tiny("qwen3_5")

    def lost(*_: object) -> None:
        raise CardLostError("cuda:0 does not answer any more.")

    monkeypatch.setattr(session.engine, "step", lost)
    monkeypatch.setattr(session.engine, "cancel", lambda _: pytest.fail("what it held lies on the card"))
    with pytest.raises(CardLostError):
        session.answer("How many?")


def test_ctrl_c_waits_for_the_step():
    """The step it comes in is completed: what is kept for later is whole."""
    # A run in the background begins with the signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    session = open_tiny("qwen3_5")
    step, completed = session.engine.step, []

    def interrupted() -> list:
        os.kill(os.getpid(), signal.SIGINT)
        events = step()
        completed.append(events)
        return events

    session.engine.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        session.answer("How many?", max_tokens=50)
    assert len(completed) == 1
    assert nothing_is_held(session)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_handlers_stay():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        with interrupt_after():
            os.kill(os.getpid(), signal.SIGINT)
            assert seen == [1]
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_of_the_model_is_raised():
    session = open_tiny()
    run = session.engine.runner.run
    session.engine.runner.run = lambda *a: run(*a) * float("nan")
    with pytest.raises(ComputeError, match="non-finite"):
        session.answer("How many?")
    assert nothing_is_held(session)


def test_exact_mode():
    config = EngineConfig(sequences=1, threads=1, context=1024, exact=True)
    session = Session.open(shared_folder("qwen3_5"), config)
    prompts = [compose([document("Alpha", 500)], q) for q in ("How many?", "Which?")]
    got = [session.answer(prompt, max_tokens=6) for prompt in prompts]
    assert got[1].usage.cached_len > 0
    assert got[1].text == greedy_text("qwen3_5", plain_prompt(("user", prompts[1].text)), 6)


def test_tokenizers_agree():
    """The helpers of these tests and the code under test see the same tokens."""
    session = open_tiny()
    prompt = plain_prompt(("user", "Größe 漢字"))
    assert isinstance(session.tokenizer, Tokenizer)
    assert session.tokenizer.encode(prompt, special=False) == byte_tokenizer().encode(prompt).ids
