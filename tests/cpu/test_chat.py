"""packhorse chat: turns over one session, its commands, what people and pipes get to see."""

import builtins
import json
import sys
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper

import pytest

from chats import PLAIN, THINKING, byte_tokenizer, make_folder, plain_prompt, script, shared_folder
from packhorse.cli import main as cli
from packhorse.cli.chat import Conversation, run
from packhorse.core.config import EngineConfig
from packhorse.core.errors import CardLostError, DocumentError, PromptTooLongError, UsageError
from packhorse.engine.engine import Engine
from packhorse.engine.session import Session

OPTIONS = ("--threads", "1", "--dtype", "fp32", "--context", "1024")
ANSWER = "There are nine mules in the hut."


def chat(monkeypatch, said: str | bytes, *args: object, family: str = "qwen3", template: str = PLAIN) -> int:
    data = said.encode() if isinstance(said, str) else said
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(data)))
    return cli.run(["chat", str(shared_folder(family, template)), *OPTIONS, *map(str, args)])


def figures(text: str) -> list[tuple[int, int]]:
    """Read and reused tokens of each line of figures."""
    lines = [line.replace(",", "").split() for line in text.splitlines() if line.startswith("read ")]
    return [(int(words[1]), int(words[4])) for words in lines]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_second_turn_reads_only_what_is_new(monkeypatch, capsys, tmp_path, family):
    script(monkeypatch, f"{ANSWER}<|im_end|>")
    (tmp_path / "hut.txt").write_text("The hut has nine mules. " * 12)
    said = "How many mules?\n\nAre you sure?\n"
    assert chat(monkeypatch, said, "--document", tmp_path / "hut.txt", family=family) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{ANSWER}\n{ANSWER}\n"
    first, second = figures(captured.err)
    assert first[1] == 0
    new = plain_prompt(("user", "Are you sure?"))
    assert second[0] == first[0] + len(byte_tokenizer().encode(f"{ANSWER}<|im_end|>\n{new}").ids)
    said = f"Of the prompt's {second[0]} tokens {second[1]} were kept from before, {second[0] - second[1]} were read."
    assert said in captured.err.splitlines() and captured.err.count("were kept") == 1
    # All of the first turn but what lies behind the last page boundary, its answer included.
    assert second[1] == (first[0] + len(ANSWER) + 1) // 64 * 64 > first[1]


def test_history_and_reset(monkeypatch, capsys, tmp_path):
    script(monkeypatch, f"{ANSWER}<|im_end|>")
    (tmp_path / "a hut.txt").write_text("Nine mules.")
    said = f"Hello\n/document {tmp_path}/a hut.txt\nHow many?\n/reset\nHello\n/quit\nnever asked\n"
    assert chat(monkeypatch, said, "--system", "Be brief.", "--json") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert [turn["question"] for turn in found["turns"]] == ["Hello", "How many?", "Hello"]
    assert [turn["answer"] for turn in found["turns"]] == [ANSWER] * 3
    asked = "Document a hut.txt:\n\nNine mules.\n\nAnswer this question from the document above: How many?"
    start = (("system", "Be brief."), ("user", "Hello"))
    longer = (*start, ("assistant", ANSWER), ("user", asked))
    lengths = [len(byte_tokenizer().encode(plain_prompt(*turns)).ids) for turns in (start, longer, start)]
    assert [turn["usage"]["read_tokens"] for turn in found["turns"]] == lengths
    assert [read for read, _ in figures(captured.err)] == lengths
    assert "a hut.txt goes with the next question." in captured.err


def test_thoughts_are_not_printed_and_leave_the_history(monkeypatch, capsys):
    script(monkeypatch, "hm\n</think>\n\nNine.<|im_end|>")
    assert chat(monkeypatch, "How many?\nSure?\n", template=THINKING) == 0
    captured = capsys.readouterr()
    assert captured.out == "Nine.\nNine.\n"
    turns = (("user", "How many?"), ("assistant", "Nine."), ("user", "Sure?"))
    prompt = plain_prompt(*turns) + "<think>\n"
    assert figures(captured.err)[1][0] == len(byte_tokenizer().encode(prompt).ids)


def test_stats_and_help(monkeypatch, capsys):
    script(monkeypatch, f"{ANSWER}<|im_end|>")
    assert chat(monkeypatch, "/help\nHello\nHello again\n/stats\n") == 0
    error = capsys.readouterr().err
    assert "/document FILE  read a document" in error
    (first, second), reused = [read for read, _ in figures(error)], figures(error)[1][1]
    held = second + len(ANSWER) + 1
    assert (
        f"holds {held} of 1024 tokens. Since the start the prompts of 2 turns had {first + second} tokens: "
        f"{reused} were kept from before, {first + second - reused} were read. KV pages: {held // 64} kept"
    ) in error


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        ("Hello\n/nonsense\nHello\n", 2, "no command /nonsense"),
        ("Hello\n/document\nHello\n", 2, "names no file"),
        ("Hello\n/document /no/such\nHello\n", 4, "/no/such cannot be read"),
        ("Hello\n" + "x" * 2000 + "\nHello\n", 3, "the window holds 1,024"),
        (b"Hello\n\xff\nHello\n", 2, "Line 2 of the input is not valid UTF-8"),
    ],
)
def test_an_error_ends_a_piped_chat(monkeypatch, capsys, said, code, words):
    script(monkeypatch, "Nine.<|im_end|>")
    assert chat(monkeypatch, said) == code
    captured = capsys.readouterr()
    assert captured.out == "Nine.\n"
    assert words in captured.err


def test_bad_options(monkeypatch, capsys):
    for args, code in (("--temperature nan", 2), ("--max-tokens 0", 2), ("--context 9999", 3)):
        assert chat(monkeypatch, "Hello\n", *args.split()) == code
        assert capsys.readouterr().out == ""


def open_conversation(sampling: dict | None = None) -> Conversation:
    session = Session.open(
        shared_folder("qwen3", PLAIN), EngineConfig(sequences=1, threads=1, context=1024, dtype="fp32")
    )
    return Conversation(session, sampling or {}, None, [])


def test_a_failed_turn_has_not_happened(monkeypatch, capsys, tmp_path):
    conversation = open_conversation()
    script(monkeypatch, f"{ANSWER}<|im_end|>")
    (tmp_path / "a.txt").write_text("Nine mules.")
    conversation.take(f"/document {tmp_path}/a.txt")
    with pytest.raises(PromptTooLongError):
        conversation.take("x" * 2000)
    for line, error in (("/document /no/such", DocumentError), ("/what", UsageError)):
        with pytest.raises(error):
            conversation.take(line)
    assert not conversation.messages and not conversation.turns
    assert conversation.take("How many?")
    assert "Nine mules." in conversation.messages[0]["content"][0]["text"]
    assert conversation.messages[1] == {"role": "assistant", "content": ANSWER}
    assert capsys.readouterr().out == f"{ANSWER}\n"


def test_people_go_on_after_errors_and_ctrl_c(monkeypatch, capsys):
    conversation = open_conversation({"max_tokens": 200})
    script(monkeypatch, f"{ANSWER}<|im_end|>")
    step, presses = conversation.session.engine.step, [KeyboardInterrupt]

    def pressed() -> list:
        if presses and conversation.turns:
            raise presses.pop()
        return step()

    conversation.session.engine.step = pressed
    run(conversation, iter(["/what", "Hello", "Stop here", "Hello again", "/quit", "never asked"]))
    captured = capsys.readouterr()
    assert captured.out == f"{ANSWER}\n{ANSWER}\n"
    assert "Error: There is no command /what" in captured.err
    assert "this turn is forgotten" in captured.err
    assert [m["content"][0]["text"] for m in conversation.messages[::2]] == ["Hello", "Hello again"]
    assert conversation.session.engine.store.stats.open_sequences == 0


@pytest.mark.parametrize(("end", "code"), [(EOFError, 0), (KeyboardInterrupt, 130)])
def test_typed_chat(monkeypatch, capsys, end, code):
    script(monkeypatch, "Nine.<|im_end|>")
    typed: Iterator[str] = iter(["Hello"])

    def type_line(prompt: str) -> str:
        for line in typed:
            return line
        raise end

    monkeypatch.setattr(builtins, "input", type_line)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert cli.run(["chat", str(shared_folder("qwen3", PLAIN)), *OPTIONS]) == code
    captured = capsys.readouterr()
    assert captured.out.startswith("Nine.\n")
    assert "/help lists commands" in captured.err


def test_the_models_own_sampling(monkeypatch, capsys, tmp_path):
    """generation_config.json says how to draw; an option goes before it."""
    folder = make_folder(tmp_path / "m", "qwen3")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 1.5}))

    def said(*args: str) -> str:
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"Hello\n")))
        assert cli.run(["chat", str(folder), *OPTIONS, "--max-tokens", "24", "--seed", "1", *args]) == 0
        return capsys.readouterr().out

    assert said() == said("--temperature", "1.5") != said("--temperature", "0")


@pytest.mark.parametrize("typed", [False, True])
def test_a_lost_card_ends_the_conversation(monkeypatch, capsys, typed):
    """With its own error: nothing is taken off the card any more."""

    def lost(*_: object) -> None:
        raise CardLostError("cuda:0 does not answer any more.")

    monkeypatch.setattr(Engine, "step", lost)
    monkeypatch.setattr(Engine, "close", lambda _: pytest.fail("what is to be kept lies on the card"))
    monkeypatch.setattr(builtins, "input", lambda _: "Hello")
    data = TextIOWrapper(BytesIO(b"Hello\nHello again\n"))
    monkeypatch.setattr(data, "isatty", lambda: typed, raising=False)
    monkeypatch.setattr(sys, "stdin", data)
    assert cli.run(["chat", str(shared_folder("qwen3", PLAIN)), *OPTIONS]) == 1
    assert capsys.readouterr().err.count("does not answer any more") == 1
