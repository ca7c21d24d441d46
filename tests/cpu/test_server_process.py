"""`packhorse serve` as people run it: start, signals, exit codes, restarts."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

import servers

COMMAND = [sys.executable, "-m", "packhorse.cli.main", "serve"]


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=60, check=False)


def test_from_loading_to_the_end():
    """Health answers while the model loads, SIGTERM ends the process with 0."""
    with servers.process("--context", "2048", ready=False) as live:
        assert live.get("/health").json()["status"] in ("loading", "ready")
        live.wait(lambda: live.get("/health").status_code == 200, 60)
        assert live.chat("hi", max_tokens=3).json()["usage"]["completion_tokens"] == 3
        live.child.send_signal(signal.SIGTERM)
        assert live.child.wait(30) == 0


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--host", "0.0.0.0"], 2, "without asking for a key"),
        (["--port", "99999"], 2, "99999"),
        (["--sequences", "0"], 2, "sequences is 0"),
        (["--context", "100000"], 3, "100,000"),
        (["--config", "/nowhere.toml"], 2, "cannot be read"),
    ],
)
def test_settings_that_are_refused(args, code, words):
    done = run(str(servers.folder()), "--port", "0", *args)
    assert done.returncode == code, done.stderr
    assert words in done.stderr and done.stdout == ""


def test_a_model_that_is_refused(tmp_path):
    done = run(str(tmp_path), "--port", "0")
    assert done.returncode == 4, done.stderr


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run(str(servers.folder()), "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2 and "cannot be listened at" in done.stderr


def test_a_supervisor_starts_a_killed_server_again(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log = tmp_path / "log"
    with log.open("w") as stderr:
        command = [*COMMAND, str(servers.folder()), "--port", str(port), "--threads", "1", "--supervise"]
        supervisor = subprocess.Popen(command, stderr=stderr)
        live = servers.Live(url)

        def ready() -> bool:
            try:
                return live.get("/health").status_code == 200
            except servers.httpx.TransportError:
                return False

        try:
            live.wait(ready, 60)
            [child] = psutil.Process(supervisor.pid).children()
            os.kill(child.pid, signal.SIGKILL)
            live.wait(lambda: not ready(), 10)
            live.wait(ready, 60)
            assert live.chat("hi", max_tokens=2).status_code == 200
            assert "started again" in log.read_text()
            supervisor.send_signal(signal.SIGTERM)
            assert supervisor.wait(30) == 0
            time.sleep(0.1)
            assert not ready(), "the server has ended with its supervisor"
        finally:
            if supervisor.poll() is None:
                for process in psutil.Process(supervisor.pid).children(recursive=True):
                    process.kill()
                supervisor.kill()


def test_the_document_of_json_and_ctrl_c(tmp_path: Path):
    """SIGINT ends the process with 130."""
    out = tmp_path / "out"
    with out.open("w") as stdout:
        command = [
            *COMMAND,
            str(servers.folder()),
            "--port",
            "0",
            "--threads",
            "1",
            "--context",
            "2048",
            "--json",
        ]
        child = subprocess.Popen(command, stdout=stdout)
        try:
            servers.Live("").wait(lambda: out.read_text().strip().endswith("}"), 60)
            document = json.loads(out.read_text())
            assert document["model"] == "tiny" and document["url"].startswith("http://127.0.0.1:")
            live = servers.Live(document["url"])
            live.wait(lambda: live.get("/health").status_code == 200, 60)
            child.send_signal(signal.SIGINT)
            assert child.wait(30) == 130
        finally:
            child.terminate()
            child.wait(30)


@pytest.fixture
def answering(tmp_path):
    """A server with a long stream and a long answer under way, and what the two were told in the end."""
    config = tmp_path / "server.toml"
    config.write_text("[server]\ngrace = 1\nkeep_alive = 0.2\n")
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 7000, "ignore_eos": True, "temperature": 0}
    told: dict[str, str] = {}
    with servers.process("--context", "8192", "--config", str(config), "--name", "tiny") as live:

        def follow(name: str, **more: object) -> None:
            try:
                with httpx.stream(
                    "POST", f"{live.url}/v1/completions", json=body | more, timeout=60
                ) as answer:
                    told[name] = ""
                    for text in answer.iter_text():
                        told[name] += text
            except httpx.HTTPError as error:
                told[name] = told.get(name, "") + f"|{type(error).__name__}"

        threads = [threading.Thread(target=follow, args=("stream",), kwargs={"stream": True})]
        threads.append(threading.Thread(target=follow, args=("whole",)))
        for thread in threads:
            thread.start()
        live.wait(lambda: told.get("stream", "").count("data:") > 3, 30)
        yield live, told, lambda: [thread.join(30) for thread in threads]


def test_answers_that_outlast_the_grace_are_told_so(answering):
    live, told, join = answering
    live.child.send_signal(signal.SIGINT)
    assert live.child.wait(60) == 130
    join()
    assert '"code": "stopped"' in told["stream"] and told["stream"].rstrip().endswith("data: [DONE]")
    # Its status had gone out with the first sign of life: it is cut off.
    assert '"code": "stopped"' in told["whole"] and told["whole"].endswith("RemoteProtocolError")
    live.log.seek(0)
    log = live.log.read().splitlines()
    said = "stopping: 2 answers have 1 s to end, Ctrl-C again ends the process at once"
    after = log[log.index(said) + 1 :]
    assert [json.loads(line)["code"] for line in after if line != "Interrupted."] == ["stopped"] * 2


def test_asked_twice_it_ends_at_once(answering):
    live, _, join = answering
    live.child.send_signal(signal.SIGINT)
    time.sleep(0.2)
    began = time.monotonic()
    live.child.send_signal(signal.SIGINT)
    assert live.child.wait(30) == 130 and time.monotonic() - began < 1
    join()
    live.log.seek(0)
    assert "Traceback" not in live.log.read()
