"""The scripts make their own environment: what each installs, and when. pip is played by a log."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# `python -m venv DIR` puts itself there; all else that is asked of it goes into the log.
PYTHON = """#!/bin/sh
if [ "$2" = venv ]; then
    mkdir -p "$3/bin"
    for name in python packhorse ruff mypy; do cp "$0" "$3/bin/$name"; done
else
    echo "$*" >>"$LOG"
fi
"""


@pytest.fixture
def clone(tmp_path) -> Path:
    """A clone with the scripts and what they read."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def run(clone: Path, script: str, *args: str) -> tuple[list[str], str]:
    """What pip was asked to install, and what the script said."""
    log = clone / "log"
    log.write_text("")
    env = {**os.environ, "PYTHON": str(clone / "python"), "LOG": str(log)}
    done = subprocess.run(
        [clone / "scripts" / script, *args], env=env, capture_output=True, text=True, check=True
    )
    asked = [line.split() for line in log.read_text().splitlines()]
    assert done.stdout == ""
    return [words[-1] for words in asked if words[:3] == ["-m", "pip", "install"]], done.stderr


def test_the_demo_needs_nothing_of_the_tests(clone):
    installed, said = run(clone, "demo", "--json")
    assert installed == ["torch", "."]
    assert said == "installing torch, then packhorse into .venv: this may take some minutes\n"
    assert run(clone, "demo") == ([], "")
    # After a demo the tests still get all that they need, and then the demo has it too.
    for script in ("test", "check", "demo"):
        installed, said = run(clone, script)
        assert installed == (["torch", ".[test]"] if script == "test" else [])
        assert ("what its tests need" in said) is (script == "test")


def test_an_environment_is_kept_current(clone):
    run(clone, "test")
    (clone / "constraints.txt").write_text("torch==9.9\n")
    assert run(clone, "demo")[0] == ["torch", "."]
    assert run(clone, "check")[0] == ["torch", ".[test]"]
    shutil.rmtree(clone / ".venv")
    assert run(clone, "check")[0] == ["torch", ".[test]"]
