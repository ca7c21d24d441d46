"""The command line: exit codes, frozen options, pure standard output, speed of the help, no torch."""

import json
import os
import re
import resource
import subprocess
import sys
import types
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from packhorse import __version__
from packhorse.cli import main as cli
from packhorse.cli.common import as_typed, check_file, check_folder, progress_bar
from packhorse.core.errors import (
    DoesNotFitError,
    NetworkError,
    PackhorseError,
    RefusedError,
    UsageError,
)
from packhorse.core.units import MIB, parse_bytes

OPTIONS = Path(__file__).with_name("cli_options.json")
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": 2,
}  # fmt: skip
HYBRID = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "vision_config": {},
    "text_config": {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "hidden_size": 2048},
}


@pytest.fixture
def model(tmp_path) -> Path:
    """A checkpoint folder with a tokenizer and a template, and one of its tensors."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    save_file(
        {"model.embed_tokens.weight": numpy.zeros((300, 64), numpy.float32)}, folder / "model.safetensors"
    )
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


def command_raising(monkeypatch, error: BaseException) -> None:
    """A command `boom` that fails in the given way."""

    def command(json: bool = False) -> None:
        raise error

    monkeypatch.setitem(sys.modules, "boom", types.SimpleNamespace(command=command))
    monkeypatch.setitem(cli.COMMANDS, "boom", cli.Entry("boom", "Fails."))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PackhorseError("It failed.", hint="Mend it."), 1),
        (UsageError("It failed.", hint="Mend it."), 2),
        (DoesNotFitError("It failed.", asked=9, available=5, unit="tokens", hint="Mend it."), 3),
        (RefusedError("It failed.", hint="Mend it.", path=Path("x")), 4),
        (NetworkError("It failed.", hint="Mend it."), 5),
    ],
)
def test_exit_codes(monkeypatch, capsys, error, code):
    command_raising(monkeypatch, error)
    assert cli.run(["boom"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "Error: It failed.\nMend it.\n"
    assert cli.run(["boom", "--json"]) == code
    captured = capsys.readouterr()
    document = json.loads(captured.out)["error"]
    facts = json.loads(json.dumps(error.facts, default=str))
    assert document == {"kind": error.kind, "reason": "It failed.", "hint": "Mend it.", **facts}
    assert captured.err == "Error: It failed.\nMend it.\n"


def test_interrupt(monkeypatch, capsys):
    command_raising(monkeypatch, KeyboardInterrupt())
    assert cli.run(["boom"]) == 130
    assert capsys.readouterr().out == ""
    assert cli.run(["boom", "--json"]) == 130
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "error": {"kind": "interrupted", "reason": "Interrupted.", "hint": ""}
    }
    assert captured.err == "Interrupted.\n"


def test_faults_of_ours_keep_their_traceback(monkeypatch):
    command_raising(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.run(["boom"])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["--nonsense"], "No such option"),
        (["inspect"], "Missing argument 'MODEL'"),
        (["inspect", "a", "b"], "unexpected extra argument"),
        (["pull", "x", "--cache"], "requires an argument"),
        (["inspect", "no/such"], "hf:no/such"),
    ],
)
def test_wrong_command_lines(capsys, args, words):
    assert cli.run(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert len(captured.err.strip().splitlines()) == 2
    assert cli.run([*args, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "usage"


def test_commands_and_options_are_frozen():
    """Others rely on these names: a change is made here by hand, and said in the closing message."""
    found = {
        name: sorted(option for param in cli.load_command(name).params for option in param.opts)
        for name in cli.COMMANDS
    }
    assert found == json.loads(OPTIONS.read_text())


def test_help(capsys):
    assert cli.run([]) == 0
    alone = capsys.readouterr()
    assert cli.run(["--help"]) == 0
    assert capsys.readouterr().out.strip() == alone.out.strip()
    assert alone.err == ""
    for name, entry in cli.COMMANDS.items():
        assert name in alone.out
        assert cli.run([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert entry.help in text
        assert "--json" in text


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"packhorse {__version__}\n"
    assert cli.run(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"packhorse {__version__}\n")
    assert cli.run(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["packhorse"] == __version__


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **env}
    )


def test_help_is_quick():
    """Processor time, which other work on the machine does not change as it changes the clock."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times = []
    for _ in range(3):
        start = used()
        assert run_python("from packhorse.cli.main import run; run(['--help'])").returncode == 0
        times.append(used() - start)
    assert min(times) < 0.5


@pytest.mark.parametrize(
    "args", [["--help"], ["inspect", "--help"], ["version"], ["inspect", "MODEL", "--json"]]
)
def test_no_torch(model, args):
    args = [str(model) if arg == "MODEL" else arg for arg in args]
    code = (
        f"import sys; from packhorse.cli.main import run; code = run({args!r});"
        "print(code, sorted({'torch', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    assert run_python(code).stderr.endswith("0 []\n")


@pytest.mark.parametrize(
    ("change", "options", "code", "words"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, [], 4, "MambaForCausalLM"),
        ({}, ["--max-tokens", "2048"], 3, "--max-tokens 2,048 leave no room"),
        ({}, ["--context", "4096"], 3, "the model's window is 2,048"),
    ],
)
def test_what_headers_rule_out_is_refused_before_torch(model, change, options, code, words):
    (model / "config.json").write_text(json.dumps(LLAMA | change))
    for args in (["ask", str(model), *options, "Why?"], ["chat", str(model), *options]):
        run = (
            f"import sys; from packhorse.cli.main import run; code = run({args!r});"
            "print(code, sorted({'torch', 'transformers'} & set(sys.modules)), file=sys.stderr)"
        )
        said = run_python(run).stderr
        assert said.endswith(f"{code} []\n") and words in said


def test_reader_that_goes_away():
    code = (
        "import sys; from packhorse.cli.main import COMMANDS, Entry, main; import types;"
        "loud = lambda: [print('x' * 100) for _ in range(100000)];"
        "sys.modules['loud'] = types.SimpleNamespace(command=loud);"
        "COMMANDS['loud'] = Entry('loud', 'Prints.'); sys.argv = ['packhorse', 'loud']; main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_other_exits_stay(monkeypatch):
    command_raising(monkeypatch, SystemExit(7))
    with pytest.raises(SystemExit, match="7"):
        cli.run(["boom"])


def test_errors_name_what_was_typed():
    text = "Give max_tokens at most 9, or top_p. /data/max_tokens/top_p stays, and so does max_tokens_x."
    assert as_typed(text, ["ask", "max_tokens", "top_p"]) == text
    assert as_typed(text, ["ask", "--max-tokens=3", "--seed", "1"]) == (
        "Give --max-tokens at most 9, or top_p. /data/max_tokens/top_p stays, and so does max_tokens_x."
    )


def test_inspect(model, capsys):
    assert cli.run(["inspect", str(model), "--json"]) == 0
    captured = capsys.readouterr()
    facts = json.loads(captured.out)
    assert captured.err == ""
    assert facts["family"] == "llama"
    assert facts["layers"] == {"total": 2, "full_attention": 2, "linear_attention": 0, "moe": 0, "mtp": 0}
    assert facts["heads"] == {"query": 2, "kv": 1, "head_dim": 32, "output_gate": False}
    assert facts["tensor_bytes"] == 300 * 64 * 4 == facts["bytes_by_class"]["embeddings"]
    assert facts["bytes_by_format"] == {"F32": 300 * 64 * 4}
    assert facts["kv_bytes_per_token"] == 2 * 2 * 32 * 2
    assert facts["tokenizer"] == {"tokens": 256, "special_tokens": {}}
    assert facts["chat_template"] == {"present": True, "characters": 25}
    assert cli.run(["inspect", str(model)]) == 0
    text = capsys.readouterr().out
    for words in ("llama (safetensors)", "2: 2 full attention", "75.00 KiB", "256 tokens", "present"):
        assert words in text
    # A path is one word to whoever reads the output.
    assert f"model         {model}\n" in text and f"path          {model}\n" in text


def test_both_names_are_said_where_there_are_two(model, capsys):
    link = model.with_name("other")
    link.symlink_to(model)
    assert cli.run(["inspect", str(link)]) == cli.run(["pull", str(link)]) == 0
    captured = capsys.readouterr()
    assert f"{link} (tiny)\n" in captured.out
    assert f"{link} (tiny): llama" in captured.err
    assert cli.run(["inspect", str(link), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["model"], facts["name"]) == (str(link), "tiny")


def test_inspect_wraps_on_a_terminal(model, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.run(["inspect", str(model)]) == 0
    lines = [re.sub(r"\x1b\[\d+m", "", line) for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) == 60


def test_inspect_hybrid(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    assert cli.run(["inspect", str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["layers"]["linear_attention"] == 30
    assert facts["experts"]["num_experts"] == 256
    # 2 of K and V x 2 heads x 256 x 2 bytes x 10 layers; state: 30 layers of fp32 and of bf16 conv columns.
    assert facts["kv_bytes_per_token"] == 20_480
    assert facts["state_bytes_per_sequence"] == 30 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    assert facts["tokenizer"]["problem"] and facts["chat_template"] == {"present": False}
    assert cli.run(["inspect", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "40: 10 full attention, 30 linear attention, 40 with experts",
        "256, 8 a token, 512 wide, a shared one of 512",
        "16 key and 32 value heads",
        "holds no tokenizer",
        "no weights here",
        "vision part is left out",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", "{", "cannot be read as a tokenizer"),
        ("chat_template.jinja", "{% if %}", "does not compile"),
    ],
)
def test_inspect_says_what_is_broken(model, capsys, file, content, words):
    (model / file).write_text(content)
    assert cli.run(["inspect", str(model)]) == 0
    assert words in " ".join(capsys.readouterr().out.split())


def test_inspect_older_tokenizer_files(model, capsys):
    (model / "tokenizer.json").rename(model / "vocab.json")
    assert cli.run(["inspect", str(model)]) == 0
    assert "older formats" in " ".join(capsys.readouterr().out.split())


def test_refused_model(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{")
    assert cli.run(["inspect", str(tmp_path)]) == 4
    assert cli.run(["pull", str(tmp_path), "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["error"]["kind"] in ("corrupt_file", "refused")


def test_pull(model, capsys):
    assert cli.run(["pull", str(model)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{model}\n"
    assert "tiny: llama, 75.00 KiB of weights." in captured.err
    assert cli.run(["pull", "--json", str(model)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == str(model)
    assert document["tensor_bytes"] == 76_800


def test_offline_and_cache(tmp_path, capsys, cache_dir):
    args = ["pull", "pypi:no-such-model==1.0", "--offline"]
    assert cli.run(args) == 5
    assert "--offline forbids the network" in capsys.readouterr().err
    assert cli.run([*args, "--json", "--cache", str(tmp_path / "other")]) == 5
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "network"
    assert error["folder"].startswith(str(tmp_path / "other"))
    assert not cache_dir.exists() and not (tmp_path / "other").exists()


@pytest.mark.parametrize("text", ["10.4", "1048575", " 4096 ", "0.5"])
def test_a_small_size_without_a_unit_is_refused(text):
    with pytest.raises(UsageError, match=f"no unit.*Write {text.strip()}GiB"):
        parse_bytes(text)


def test_sizes():
    sizes = {
        "0": 0,
        "1048576": MIB,
        "4096B": 4096,
        "10.4GiB": int(10.4 * 1024 * MIB),
        "2GB": 2 * 10**9,
        "1k": 1000,
    }
    assert {text: parse_bytes(text) for text in sizes} == sizes


def test_a_range_is_shown_whole(capsys):
    assert cli.run(["ask", "x", "--max-tokens", "-3", "Why?"]) == 2
    assert "not in [1, 2147483648]" in capsys.readouterr().err


def test_a_file_is_tried_before_the_work(tmp_path):
    there, new, locked = tmp_path / "there", tmp_path / "new", tmp_path / "a" / "b"
    there.write_text("kept")
    for path in (None, there, new, Path(os.devnull)):
        check_file(path)
    assert there.read_text() == "kept" and not new.exists()
    for path in (tmp_path, locked, Path("/proc/x")):
        with pytest.raises(UsageError):
            check_file(path)
    check_folder(locked)
    assert locked.is_dir() and not list(locked.iterdir())
    for path in (there, Path("/proc/x")):
        with pytest.raises(UsageError, match="cannot be written"):
            check_folder(path)


@pytest.mark.parametrize("count", [0, 245_759])
def test_a_bar_fits_a_terminal(monkeypatch, count):
    """Of 80 columns: the label is cut, and the figures are whole."""
    from rich.progress import DownloadColumn, MofNCompleteColumn, TimeRemainingColumn, TransferSpeedColumn

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    label, total = "loading hf:someone/Qwen3.6-35B-A3B-int4-g128 (Qwen3.6-35B-A3B)", 245_760
    for figures, words in (
        ((MofNCompleteColumn(), TimeRemainingColumn()), [f"{count}/245760", "-:--:--"]),
        ((DownloadColumn(True), TransferSpeedColumn()), ["/240.0 KiB", "?"]),
    ):
        bar = progress_bar(*figures)
        bar.add_task(label, total=total, completed=count)
        with bar.console.capture() as shown:
            bar.console.print(bar.get_renderable())
        [line] = shown.get().splitlines()
        assert len(line) <= 80 and line.startswith("loading hf:someone/") and "…" in line
        assert all(word in line for word in words)


def test_progress_bar_is_for_terminals(monkeypatch, capsys):
    from packhorse.cli.common import byte_progress

    with byte_progress("fetching") as progress:
        assert progress is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with byte_progress("fetching"):
        pass
    assert capsys.readouterr().err == ""
    with byte_progress("fetching") as progress:
        progress(10, 100)
        progress(100, 100)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "fetching" in captured.err
