"""Load on a server that speaks OpenAI's API: rates, times to tokens, errors. Ours or any other.

Requests go out from threads, over plain sockets: nothing beside the standard library is needed.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from packhorse.core.config import check_least
from packhorse.core.errors import NetworkError, PackhorseError, UsageError

WORDS = ("mule", "pass", "valley", "stone", "river", "hut", "snow", "road", "bridge", "rope", "ridge", "wind")


@dataclass(frozen=True)
class Load:
    """What is sent. prompt_words: length of each prompt, about a token a word. rate: requests a second, at
    random times (None: each client sends its next one when the last has ended). shared_words: words that all
    prompts begin with. warmup: requests before counting begins. seed: of prompts and times."""

    requests: int = 64
    clients: int = 4
    prompt_words: int = 256
    shared_words: int = 0
    max_tokens: int = 64
    rate: float | None = None
    warmup: int = 2
    seed: int = 0
    timeout: float = 600.0

    def __post_init__(self) -> None:
        least = dict.fromkeys(("requests", "clients", "prompt_words", "max_tokens"), 1)
        check_least(self, least | {"shared_words": 0, "warmup": 0})
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise UsageError(f"The rate is {self.rate}.", hint="Give requests a second, above 0.")


@dataclass
class Sample:
    """One request. Times in seconds of the monotonic clock: sent, then each piece of the answer."""

    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    done: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Result:
    """What was measured. `document` is all of it as JSON."""

    load: Load
    samples: tuple[Sample, ...]
    wall_s: float
    model: str

    @property
    def document(self) -> dict[str, Any]:
        """Figures by name; times in seconds, percentiles by nearest rank."""
        good = [s for s in self.samples if s.error is None]
        gaps = [b - a for s in good for a, b in zip(s.arrivals, s.arrivals[1:], strict=False)]
        per_token = [
            (s.done - s.arrivals[0]) / (s.completion_tokens - 1)
            for s in good
            if s.arrivals and s.completion_tokens > 1
        ]
        generated = sum(s.completion_tokens for s in good)
        return {
            "model": self.model,
            "load": vars(self.load),
            "requests": len(self.samples),
            "errors": dict(Counter(s.error for s in self.samples if s.error is not None)),
            "wall_s": round(self.wall_s, 4),
            "requests_per_s": round(len(good) / self.wall_s, 4),
            "generated_tokens_per_s": round(generated / self.wall_s, 3),
            "prompt_tokens": sum(s.prompt_tokens for s in good),
            "cached_tokens": sum(s.cached_tokens for s in good),
            "generated_tokens": generated,
            "first_token_s": percentiles([s.arrivals[0] - s.sent for s in good if s.arrivals]),
            "per_token_s": percentiles(per_token),
            "between_pieces_s": percentiles(gaps),
            "request_s": percentiles([s.done - s.sent for s in good]),
        }


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, least, greatest and percentiles by nearest rank; None where there are no values."""
    ordered = sorted(values)

    def rank(share: float) -> float | None:
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 6) if ordered else None

    mean = round(sum(ordered) / len(ordered), 6) if ordered else None
    named = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
    return {"mean": mean, "min": rank(0), **{k: rank(v) for k, v in named.items()}, "max": rank(1)}


class Target:
    """A server. url: with or without /v1 at its end. key: a bearer key."""

    def __init__(self, url: str, key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            hint = "Write it like http://127.0.0.1:8000."
            raise UsageError(f"{url!r} is no address of a server.", hint=hint)
        self.url = url
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"

    def connect(self) -> http.client.HTTPConnection:
        """A connection of its own."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout)

    def model(self) -> str:
        """The first model that the server names. Raises NetworkError, PackhorseError for another answer."""
        connection = self.connect()
        try:
            connection.request("GET", f"{self._base}/v1/models", headers=self._headers)
            answer = connection.getresponse()
            body = answer.read()
        except OSError as error:
            hint = "Is the server running?"
            raise NetworkError(f"{self.url} cannot be reached: {error}.", hint=hint) from error
        finally:
            connection.close()
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise PackhorseError(
                f"{self.url}/v1/models answers {answer.status}: {body[:200].decode('utf-8', 'replace')}",
                hint="Check the address and the key.",
            ) from error

    def chat(self, model: str, prompt: str, max_tokens: int) -> Sample:
        """One streamed chat; an error becomes `Sample.error`, by status or exception."""
        document = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sample = Sample(sent=time.monotonic())
        connection = self.connect()
        try:
            path = f"{self._base}/v1/chat/completions"
            connection.request("POST", path, json.dumps(document), self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                sample.error = f"status {answer.status}"
            else:
                _read_stream(answer, sample)
        except (OSError, http.client.HTTPException, ValueError) as error:
            sample.error = type(error).__name__
        finally:
            connection.close()
        sample.done = time.monotonic()
        return sample


def _read_stream(answer: http.client.HTTPResponse, sample: Sample) -> None:
    ended = False
    for line in answer:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            ended = True
            break
        chunk = json.loads(data)
        if "error" in chunk:
            sample.error = f"error {chunk['error'].get('code') if isinstance(chunk['error'], dict) else ''}"
            return
        usage = chunk.get("usage")
        if usage:
            sample.prompt_tokens = usage.get("prompt_tokens", 0)
            sample.completion_tokens = usage.get("completion_tokens", 0)
            sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        delta = chunk["choices"][0].get("delta", {}) if chunk.get("choices") else {}
        if any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")):
            sample.arrivals.append(time.monotonic())
    if not ended:
        sample.error = "stream without an end"


def run_load(target: Target, load: Load, model: str | None = None) -> Result:
    """Send the load and measure.

    Raises NetworkError where the server cannot be reached at all, and what `Target.model` raises.
    """
    name = model or target.model()
    draw = random.Random(load.seed)
    shared = " ".join(draw.choices(WORDS, k=load.shared_words))
    prompts = [
        f"{shared} {i} {' '.join(draw.choices(WORDS, k=load.prompt_words))}"
        for i in range(load.warmup + load.requests)
    ]
    for prompt in prompts[: load.warmup]:
        target.chat(name, prompt, load.max_tokens)
    due = [0.0] * load.requests
    if load.rate is not None:
        for i in range(1, load.requests):
            due[i] = due[i - 1] + draw.expovariate(load.rate)
    samples: list[Sample] = []
    lock = threading.Lock()
    waiting = iter(list(zip(due, prompts[load.warmup :], strict=True)))
    began = time.monotonic()

    def client() -> None:
        while True:
            with lock:
                job = next(waiting, None)
            if job is None:
                return
            time.sleep(max(0.0, began + job[0] - time.monotonic()))
            sample = target.chat(name, job[1], load.max_tokens)
            with lock:
                samples.append(sample)

    threads = [threading.Thread(target=client) for _ in range(load.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Result(load, tuple(samples), time.monotonic() - began, name)
