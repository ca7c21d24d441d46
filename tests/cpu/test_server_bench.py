"""The load generator: what it counts, against a server whose answers and times are known."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from packhorse.bench.serve import Load, Target, percentiles, run_load
from packhorse.cli import main as cli
from packhorse.core.errors import NetworkError, UsageError


class Answers(BaseHTTPRequestHandler):
    """Four pieces, 10 ms apart, after 50 ms. Prompts with the number 3 or 5 fail, each in its own way."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "known"}]}).encode())

    def do_POST(self) -> None:
        document = json.loads(self.rfile.read(int(self.headers["content-length"])))
        number = document["messages"][0]["content"].split()[0]
        if number == "3":
            self._send(429, b"{}")
            return
        self.send_response(200)
        self.end_headers()
        time.sleep(0.05)
        pieces = [{"choices": [{"delta": {"content": "x"}}]}] * 4
        if number == "5":
            pieces = pieces[:1]
        for piece in pieces:
            self._event(json.dumps(piece))
            time.sleep(0.01)
        if number != "5":
            details = {"cached_tokens": 7}
            usage = {"prompt_tokens": 10, "completion_tokens": 4, "prompt_tokens_details": details}
            self._event(json.dumps({"choices": [], "usage": usage}))
            self._event("[DONE]")

    def _event(self, text: str) -> None:
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def test_figures(url):
    load = Load(requests=8, clients=2, prompt_words=3, warmup=0)
    document = run_load(Target(url), load).document
    assert document["model"] == "known"
    assert document["errors"] == {"status 429": 1, "stream without an end": 1}
    assert document["prompt_tokens"] == 60 and document["cached_tokens"] == 42
    assert document["generated_tokens"] == 24
    assert 0.05 <= document["first_token_s"]["min"] <= document["first_token_s"]["p50"] < 0.3
    assert 0.008 <= document["per_token_s"]["p50"] < 0.1
    assert 0.008 <= document["between_pieces_s"]["p50"] < 0.1
    assert document["requests_per_s"] == pytest.approx(6 / document["wall_s"], rel=0.01)


def test_a_rate_spreads_the_requests(url):
    load = Load(requests=6, clients=6, prompt_words=1, rate=20.0, warmup=9)
    result = run_load(Target(url), load)
    sent = sorted(s.sent for s in result.samples)
    assert sent[-1] - sent[0] > 0.1, "six requests at 20 a second do not leave at once"


def test_percentiles():
    figures = percentiles([float(i) for i in range(1, 101)])
    assert (figures["p50"], figures["p90"], figures["p99"], figures["min"], figures["max"]) == (
        50,
        90,
        99,
        1,
        100,
    )
    assert percentiles([])["p50"] is None and percentiles([3.0])["p99"] == 3.0


def test_command(url, capsys, tmp_path):
    report = tmp_path / "bench.json"
    args = ["bench", "serve", "--against", url, "--requests", "1", "--clients", "1", "--prompt-words", "2"]
    assert cli.run([*args, "--json", "--report", str(report)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(report.read_text()) and printed["requests"] == 1
    assert cli.run(args) == 0
    assert "first token" in capsys.readouterr().out
    assert cli.run([*args[:4], "--requests", "6", "--prompt-words", "2"]) == 1
    assert "of 6 requests failed" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_refused_before_a_request(capsys):
    args = ["bench", "serve", "--against", "http://127.0.0.1:9", "--report", "/nonexistent/z.json"]
    assert cli.run(args) == 2
    assert "folder that does not exist" in capsys.readouterr().err


def test_what_is_refused(url):
    with pytest.raises(UsageError, match="requests is 0"):
        Load(requests=0)
    with pytest.raises(UsageError, match="no address"):
        Target("ftp://x")
    with pytest.raises(NetworkError, match="cannot be reached"):
        Target("http://127.0.0.1:9").model()
