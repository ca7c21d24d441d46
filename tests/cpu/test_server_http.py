"""A live server under clients that break off, flood, stall and lie; and under an engine that fails."""

import asyncio
import json
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
import torch

import servers
from packhorse.core.config import EngineConfig
from packhorse.core.errors import CardLostError, ComputeError, RefusedError, UsageError
from packhorse.engine.engine import Engine
from packhorse.engine.schedule import Step
from packhorse.engine.session import Session
from packhorse.server.config import ModelConfig, ServerConfig, load_config
from packhorse.server.keys import Keyring
from packhorse.server.run import serve

KEYS = '[alice]\nkey = "alice-alice-alice"\nconcurrent = 1\n[bob]\nkey = "bob-bob-bob-bob-bob"\n'
ENGINE = EngineConfig(context=4096, sequences=2, threads=1, dtype="fp32", chunk_len=64)


@pytest.fixture(scope="module")
def live():
    config = ServerConfig(port=0, queue=3, body_limit=1 << 20, keep_alive=0.2)
    with servers.scripted(config=config, engine=ENGINE) as server:
        yield server


@pytest.fixture(autouse=True)
def _reset(request):
    yield
    if "live" in request.fixturenames:
        server = request.getfixturevalue("live")
        server.runner.pace, server.runner.fail = 0.0, None
        server.wait_idle()


def error_of(answer: httpx.Response) -> dict:
    error = answer.json()["error"]
    assert error["request_id"] == answer.headers["x-request-id"]
    assert error["message"] and error["type"] and error["code"]
    return error


HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    "Content-Length: {}\r\n\r\n"
)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def body(**fields) -> dict:
    return {"model": "tiny", "messages": [user("[[ok]]")], "temperature": 0} | fields


BAD = [
    (b"", 400, "invalid_json"),
    (b"{", 400, "invalid_json"),
    (b"[]", 400, "invalid_json"),
    (b"\xff\xfe{}", 400, "invalid_json"),
    (b'{"model": "\xc3"}', 400, "invalid_json"),
    (b'{"model": "tiny", "model": "tiny"}', 400, "invalid_json"),
    (b'{"a": NaN}', 400, "invalid_json"),
    (b'{"a": -Infinity}', 400, "invalid_json"),
    (b'{"seed": ' + b"9" * 5000 + b"}", 400, "invalid_json"),
    (b'{"model": "\\ud800"}', 400, "invalid_json"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400, "invalid_json"),
    (b"[" * 200_000, 400, "invalid_json"),
    (b'{"prompt": "' + b"x" * (10 << 20) + b'"}', 413, "body_too_large"),
]


@pytest.mark.parametrize(("data", "status", "code"), BAD, ids=range(len(BAD)))
def test_bodies_that_are_no_json_object(live, data, status, code):
    answer = httpx.post(
        live.url + "/v1/chat/completions", content=data, headers={"content-type": "application/json"}
    )
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)


FIELDS = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "no role"}]}, "messages.0.role"),
    ({"messages": [{"role": "critic", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "0"}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 2**70}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 6}, "n"),
    ({"n": True}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "web"}]}, "tools.0.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"thinking_budget": 3}, "thinking_budget"),
    ({"chat_template_kwargs": {"unknown_switch": 1}}, "chat_template_kwargs.unknown_switch"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    # Known from other servers, and not built.
    ({"functions": []}, "functions"),
    ({"mirostat": 2}, "mirostat"),
    ({"guided_json": {}}, "guided_json"),
]


@pytest.mark.parametrize(("change", "param"), FIELDS, ids=lambda v: str(v)[:40])
def test_bad_fields_are_named(live, change, param):
    answer = live.post("/v1/chat/completions", body(**change))
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"].startswith(param)


def test_ignored_fields_are_listed(live):
    answer = live.post("/v1/chat/completions", body(user="me", metadata={"a": "b"}, frobnicate=1, mirostat=0))
    assert answer.status_code == 200
    assert answer.headers["x-packhorse-ignored"] == "frobnicate, metadata, mirostat, user"
    assert "x-packhorse-ignored" not in live.post("/v1/chat/completions", body()).headers
    # Without a store nothing is kept for later, whatever is asked.
    assert live.post("/v1/chat/completions", body(store=True)).headers["x-packhorse-ignored"] == "store"
    assert "x-packhorse-ignored" not in live.post("/v1/chat/completions", body(store=False)).headers
    for name, told in ((" ", "?"), ("", "?"), ("a b\r\n", "a?b??"), ("\u00e9\x7f", "??")):
        answer = live.post("/v1/tokenize", {"prompt": "mule", name: None})
        assert (answer.status_code, answer.headers["x-packhorse-ignored"]) == (200, told)


def test_ways_that_lead_nowhere(live):
    assert error_of(live.get("/v1/nothing"))["code"] == "not_found"
    assert error_of(live.get("/v1/chat/completions"))["code"] == "method_not_allowed"
    answer = httpx.post(live.url + "/v1/chat/completions", content=json.dumps(body()))
    assert (answer.status_code, error_of(answer)["code"]) == (415, "content_type")
    for host, status in (
        ("evil.example", 403),
        ("127.0.0.1.evil.example:80", 403),
        ("", 403),
        ("[::1]:80", 200),
    ):
        answer = live.get("/v1/models", headers={"host": host})
        assert answer.status_code == status, host
        assert status == 200 or error_of(answer)["code"] == "host"
    assert "access-control-allow-origin" not in live.get("/v1/models", headers={"origin": "http://x"}).headers


def test_tokenize(live):
    answer = live.post("/v1/tokenize", {"prompt": "mule", "model": "tiny"}).json()
    assert answer["count"] == 4 == len(answer["tokens"]) and answer["max_model_len"] == 4096
    chat = live.post("/v1/tokenize", {"messages": body()["messages"]}).json()
    used = live.post("/v1/chat/completions", body()).json()["usage"]["prompt_tokens"]
    assert chat["count"] == used
    assert live.post("/v1/tokenize", {}).status_code == 400


def test_progress_of_a_long_prompt_and_signs_of_life(live):
    """Five steps of 64 tokens, each slower than the sign-of-life interval."""
    live.runner.pace = 0.3
    prompt = [{"role": "user", "content": "[[ok]]" + "p" * 270}]
    events = live.stream("/v1/chat/completions", {"messages": prompt, "return_progress": True})
    steps = [e["prompt_progress"] for e in events if isinstance(e, dict) and "prompt_progress" in e]
    assert [s["processed"] for s in steps] == sorted({s["processed"] for s in steps}) and len(steps) >= 4
    assert all(s["total"] > 270 and s["cache"] == 0 and s["time_left_ms"] > 0 for s in steps)
    assert steps[1]["time_ms"] > steps[0]["time_ms"] >= 250
    assert events.count(": keep-alive") >= 4, "a sign of life in each gap"
    assert events[-1] == "[DONE]"
    plain = live.stream("/v1/chat/completions", {"messages": prompt})
    assert not any("prompt_progress" in e for e in plain if isinstance(e, dict))


def test_signs_of_life_while_others_are_computed(live):
    """A step takes longer than the interval of the signs, and the call comes in its midst."""
    live.runner.pace = 1.2
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(live.chat, "[[a]]")
        live.wait(lambda: snapshot(live).running == 1)
        time.sleep(0.2)
        events = live.stream("/v1/chat/completions", body())
        live.runner.pace = 0.0
        assert first.result().status_code == 200
    assert events[:3] == [": keep-alive"] * 3


def test_signs_of_life_before_a_whole_answer(live):
    live.runner.pace = 0.3
    with httpx.stream("POST", live.url + "/v1/chat/completions", json=body(), timeout=30) as answer:
        parts = list(answer.iter_raw())
    assert parts[0].strip() == b"" and len(parts) > 2
    assert json.loads(b"".join(parts))["choices"][0]["message"]["content"] == "ok"


def raw_request(live, document: dict, *, cut: int | None = None) -> socket.socket:
    data = json.dumps(document).encode()
    head = HEAD.format(len(data))
    connection = socket.create_connection(("127.0.0.1", int(live.url.rsplit(":", 1)[1])), timeout=10)
    connection.sendall((head.encode() + data)[:cut])
    return connection


def snapshot(live):
    return live.service.worker.snapshot


def held(live) -> tuple[int, int]:
    """Open files of the process and tasks of the event loop."""
    return psutil.Process(live.pid).num_fds(), len(asyncio.all_tasks(live.service.worker._loop))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["head", "body", "queued", "reading", "decoding", "between"])
def test_a_client_that_goes_leaves_nothing_behind(live, stage, stream):
    """Gone at every stage: within a step nothing of the request runs, waits or holds pages."""
    endless = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 2000, "stream": stream}
    before, held_before = live.service.worker._engine.store.stats.opened, held(live)
    live.runner.pace = 0.05
    blockers = []
    if stage == "queued":
        blockers = [raw_request(live, body(**endless)) for _ in range(2)]
        live.wait(lambda: snapshot(live).running == 2)
    long = [{"role": "user", "content": f"{stream} {time.time()}" + "r" * 1500}]
    document = body(**(endless | ({"messages": long} if stage == "reading" else {})))
    cut = {"head": 30, "body": -5}.get(stage)
    connection = raw_request(live, document, cut=cut)
    if stage == "queued":
        live.wait(lambda: snapshot(live).waiting == 1)
    elif stage == "reading":
        live.wait(lambda: snapshot(live).running == 1)
    elif stage in ("decoding", "between"):
        live.wait(lambda: any(s.generated for s in live.service.worker._engine.scheduler.running))
    if stage == "between" and stream:
        connection.recv(100)
    connection.close()
    left = len(blockers)
    live.wait(lambda: live.service.worker.live == left, 5)
    live.wait(lambda: (snapshot(live).running, snapshot(live).waiting) == (left, 0), 5)
    for blocker in blockers:
        blocker.close()
    live.wait_idle()
    live.wait(lambda: all(now <= then for now, then in zip(held(live), held_before, strict=True)))
    opened = live.service.worker._engine.store.stats.opened - before
    assert opened == (0 if cut else 2 if stage == "queued" else 1)


def test_while_a_prompt_is_prepared(live, monkeypatch):
    """Its status stays open however long that takes, and a client that goes meanwhile asks for nothing."""
    go, prepare = threading.Event(), live.service.preparer.chat
    monkeypatch.setattr(live.service.preparer, "chat", lambda *args: go.wait(10) and prepare(*args))
    opened = live.service.worker._engine.store.stats.opened
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(live.chat, "x" * 5000)
        left = raw_request(live, body())
        time.sleep(0.5)
        left.close()
        live.wait(lambda: live.records()[-1].get("disconnected"))
        go.set()
        assert long.result().status_code == 400, "signs of life are due every 0.2 s"
    live.wait_idle()
    assert live.service.worker._engine.store.stats.opened == opened


def test_reading_on_after_the_client_has_gone(live):
    """Asked to, the server reads the prompt to its end and stops there; the next call finds it read."""
    live.runner.pace = 0.02
    text = f"{time.time()}" + "s" * 900 + "[[ok]]"
    document = body(messages=[{"role": "user", "content": text}], on_disconnect="read_on", max_tokens=2000)
    connection = raw_request(live, document)
    live.wait(lambda: snapshot(live).running == 1)
    connection.close()
    live.wait(lambda: snapshot(live).running == 0)
    live.wait_idle()
    usage = live.chat(text).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 850


def test_a_full_queue_answers_429(live):
    live.runner.pace = 0.05
    held = [
        raw_request(live, body(messages=[{"role": "user", "content": "x"}], max_tokens=500)) for _ in range(5)
    ]
    live.wait(lambda: live.service.worker.live == 5)
    answer = live.chat("one too many")
    assert answer.status_code == 429 and error_of(answer)["code"] == "queue_full"
    assert int(answer.headers["retry-after"]) >= 1
    for connection in held:
        connection.close()
    live.wait_idle()
    assert live.chat("[[again]]").status_code == 200


def test_slow_clients_are_given_up():
    """A head or a body that trickles in ends within its time, and so does a client that never says a word."""
    config = ServerConfig(port=0, body_timeout=1.0, header_timeout=1.0)
    with servers.scripted(config=config, engine=ENGINE) as live:
        port = int(live.url.rsplit(":", 1)[1])
        silent = socket.create_connection(("127.0.0.1", port), timeout=10)
        head = socket.create_connection(("127.0.0.1", port), timeout=10)
        data = raw_request(live, body(), cut=-5)
        began = time.monotonic()
        deadline = began + 8
        ended = {}
        while len(ended) < 3 and time.monotonic() < deadline:
            for name, connection in (("silent", silent), ("head", head), ("data", data)):
                if name in ended:
                    continue
                connection.settimeout(0.1)
                try:
                    if name != "silent":
                        connection.send(b"G" if name == "head" else b" ")
                    received = connection.recv(4096)
                    if not received or b"408" in received:
                        ended[name] = received
                except TimeoutError:
                    continue
                except OSError:
                    ended[name] = b""
        assert set(ended) == {"silent", "head", "data"}
        assert b"408" in ended["data"]
        for connection in (silent, head, data):
            connection.close()


def test_five_hundred_connections(live):
    """All are accepted and answered, by a place or by 429, and no handle stays open."""
    process = psutil.Process(live.pid)
    live.chat("[[warm]]")
    live.wait(lambda: live.service.worker.live == 0)
    before = held(live)
    threads = process.num_threads()

    data = json.dumps(body(max_tokens=2)).encode()
    request = HEAD.format(len(data)).encode() + data
    port = int(live.url.rsplit(":", 1)[1])

    async def flood() -> list[int]:
        async with asyncio.timeout(60):
            connections = await asyncio.gather(
                *(asyncio.open_connection("127.0.0.1", port) for _ in range(500))
            )
            for _, writer in connections:
                writer.write(request)
            lines = await asyncio.gather(*(reader.readline() for reader, _ in connections))
            for _, writer in connections:
                writer.close()
        return [int(line.split()[1]) for line in lines]

    statuses = asyncio.run(flood())
    assert set(statuses) == {200, 429} and statuses.count(200) >= 5
    live.wait_idle()
    live.wait(lambda: all(now <= then for now, then in zip(held(live), before, strict=True)))
    assert process.num_threads() <= threads + 16
    assert live.chat("[[ok]]").status_code == 200


def test_a_step_that_fails_ends_the_request_at_fault_alone(live, monkeypatch):
    """It gets 500 with an id as often as it is sent, others that run and wait are answered, and health says
    what happened."""
    monkeypatch.setattr(live.service, "config", replace(live.service.config, keep_alive=10.0))
    live.runner.pace = 0.05
    together, go = [], threading.Event()

    def fail(step):
        for work in step.spans:
            text = servers.TOKENIZER.decode(list(work.sequence.request.token_ids))
            if "doomed" in text and len(work.sequence.generated) >= 3 and go.is_set():
                together.append(len(step.spans))
                live.runner.pace = 0.0
                raise RuntimeError("CUDA error: out of memory")

    live.runner.fail = fail
    answer = "fine. " * 25
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(live.stream, "/v1/chat/completions", {**body(messages=[user(f"[[{answer}]]")])})
        live.wait(lambda: snapshot(live).running == 1)
        doomed = pool.submit(live.chat, "doomed", max_tokens=300)
        live.wait(lambda: snapshot(live).running == 2)
        waiting = pool.submit(live.chat, "[[so is this]]")
        live.wait(lambda: snapshot(live).waiting == 1)
        go.set()
        failed = doomed.result()
    assert failed.status_code == 500 and error_of(failed)["code"] == "step_failed"
    assert "out of memory" in error_of(failed)["message"]
    events = running.result()
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events[:-1]) == answer
    assert waiting.result().json()["choices"][0]["message"]["content"] == "so is this"
    assert together == [2, 1], "the step of both failed, then that of the one alone"
    assert [live.chat("doomed", max_tokens=9).status_code for _ in range(4)] == [500] * 4
    assert live.chat("[[well]]").json()["choices"][0]["message"]["content"] == "well"
    health = live.get("/health")
    assert health.status_code == 200 and health.json()["status"] == "degraded"
    assert "6 steps failed and ended 5 requests" in health.json()["reason"]
    live.wait_idle()
    metrics = live.get("/metrics").text
    assert 'packhorse_errors_total{code="step_failed"}' in metrics
    assert "packhorse_failed_steps_total 6.0" in metrics


def test_an_answer_that_fails_late_is_cut_off(live):
    """A sign of life has sent status 200: the connection breaks, so that no client takes the error for an
    answer."""
    live.runner.pace = 0.1

    def fail(step):
        if step.sampled and len(step.sampled[0].generated) == 5:
            raise RuntimeError("late")

    live.runner.fail = fail
    long = body(messages=[{"role": "user", "content": "x"}], max_tokens=50)
    with httpx.stream("POST", live.url + "/v1/chat/completions", json=long, timeout=30) as answer:
        assert answer.status_code == 200
        received = b""
        with pytest.raises(httpx.RemoteProtocolError):
            for part in answer.iter_raw():
                received += part
    error = json.loads(received)["error"]
    assert error["code"] == "step_failed"
    live.wait(lambda: live.records()[-1]["id"] == error["request_id"])
    told = live.records()[-1]
    assert told["code"] == "step_failed" and "disconnected" not in told


def test_nan_logits_fail_one_request(live, monkeypatch):
    monkeypatch.setattr(live.service, "config", replace(live.service.config, keep_alive=10.0))
    original = live.runner.run

    def run(step, views):
        logits = original(step, views)
        rows = [i for i, s in enumerate(w for w in step.spans if w.samples) if s.sequence.prompt_len > 200]
        logits[rows] = float("nan")
        return logits

    live.runner.run = run
    try:
        with ThreadPoolExecutor(2) as pool:
            good = pool.submit(live.chat, "[[fine]]")
            bad = pool.submit(live.chat, "x" * 300)
            assert good.result().json()["choices"][0]["message"]["content"] == "fine"
            assert bad.result().status_code == 500 and error_of(bad.result())["code"] == ComputeError.kind
    finally:
        del live.runner.run


def test_a_fault_of_ours_is_a_500_without_its_insides(live, monkeypatch):
    monkeypatch.setattr(live.service, "describe", lambda: 1 / 0)
    answer = live.get("/v1/models")
    assert answer.status_code == 500 and error_of(answer)["code"] == "internal_error"
    assert "ZeroDivision" not in answer.text


def test_the_log_tells_lengths_and_no_contents(live, monkeypatch):
    usage = live.chat("[[secret]] words").json()["usage"]
    live.chat("hm", temperature=-1)
    live.wait(lambda: live.records()[-1]["status"] == 400)
    told, refused = live.records()[-2:]
    assert (
        told["prompt_tokens"] == usage["prompt_tokens"]
        and told["generated_tokens"] == usage["completion_tokens"]
    )
    assert told["status"] == 200 and told["finish"] == ["stop"] and told["device_kv_bytes"] > 0
    assert 0 < told["first_token_s"] <= told["total_s"] and told["id"].startswith("req-")
    assert refused["code"] == "greater_than_equal"
    assert "secret" not in json.dumps(told)
    monkeypatch.setattr(live.service, "config", replace(live.service.config, log_contents=True))
    live.chat("[[secret]] words")
    live.wait(lambda: "contents" in live.records()[-1])
    contents = live.records()[-1]["contents"]
    assert contents["answer"][0]["message"]["content"] == "secret" and contents["request"]["model"] == "tiny"


def test_metrics_count(live):
    def value(name: str) -> float:
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in live.get("/metrics").text.splitlines()
            if line.startswith(name)
        )

    before = value("packhorse_generated_tokens_total"), value("packhorse_prompt_tokens_total")
    usage = live.chat("[[five!]]").json()["usage"]
    live.wait(lambda: value("packhorse_generated_tokens_total") > before[0])
    assert value("packhorse_generated_tokens_total") - before[0] == usage["completion_tokens"]
    assert value("packhorse_prompt_tokens_total") - before[1] == usage["prompt_tokens"]
    assert value('packhorse_bytes{consumer="pages",kind="allocated"') > 0
    assert value('packhorse_health{status="ready"}') + value('packhorse_health{status="degraded"}') == 1
    lines = [line for line in live.get("/metrics").text.splitlines() if line and not line.startswith("#")]
    assert all(line.startswith("packhorse_") for line in lines)


def test_while_the_model_loads():
    go = threading.Event()
    with servers.scripted(engine=ENGINE, opening=lambda: go.wait(30)) as server:
        health = server.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "loading"
        early = server.chat("[[x]]")
        assert early.status_code == 503 and error_of(early)["code"] == "loading"
        assert int(early.headers["retry-after"]) > 0
        assert server.get("/metrics").status_code == 200
        go.set()
        server.wait(lambda: server.get("/health").status_code == 200, 30)
        assert server.chat("[[x]]").json()["choices"][0]["message"]["content"] == "x"


def test_a_model_that_cannot_be_loaded():
    def refuse():
        raise RefusedError("It is broken.")

    with servers.scripted(engine=ENGINE, opening=refuse) as server:
        server.wait(lambda: server.service.worker.health.status == "failed")
        assert "It is broken" in server.get("/health").json()["reason"]
        assert server.chat("x").status_code == 503


def test_an_engine_that_only_fails_is_given_up():
    """Not even a prompt of one token can be computed: failed, all calls answered, and nothing more is taken."""
    with servers.scripted(engine=ENGINE) as server:
        server.runner.fail = lambda step: 1 / 0
        assert server.chat("x", n=3).status_code == 503
        server.wait(lambda: server.service.worker.health.status == "failed")
        assert server.get("/health").status_code == 503
        assert "so does a prompt of one token" in server.get("/health").json()["reason"]
        assert server.chat("x").status_code == 503
        assert server.service.worker.live == 0


def lose_card(engine: Engine, monkeypatch) -> None:
    """From the next step on it is as if the model's card had gone in the middle of it."""

    def gone(*_: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    def fail(step: Step) -> None:
        monkeypatch.setattr(torch.cuda, "synchronize", gone)
        monkeypatch.setattr(engine.runner.model, "device", "cuda:0")
        monkeypatch.setattr(engine.store, "rewind", gone)
        monkeypatch.setattr(engine, "flush", gone)
        gone()

    engine.runner.fail = fail


def test_a_card_that_has_gone(monkeypatch):
    """All requests end with its error at once, whatever else fails then; nothing more is taken."""
    with servers.scripted(engine=ENGINE) as server:
        server.runner.pace = 0.1
        with ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(server.chat, "x", max_tokens=100) for _ in range(3)]
            server.wait(lambda: snapshot(server).running == 2 and snapshot(server).waiting == 1)
            lose_card(server.service.session.engine, monkeypatch)
            for answer in answers:
                assert answer.result().status_code == 503
                assert error_of(answer.result())["code"] == "card_lost"
                assert "unspecified launch failure" in error_of(answer.result())["message"]
        health = server.get("/health")
        assert health.status_code == 503 and "does not answer any more" in health.json()["reason"]
        assert server.chat("x").status_code == 503 and server.service.worker.live == 0


def test_the_process_ends_when_its_card_has_gone(monkeypatch):
    """`serve` raises the error, whose exit code the command has, also where what was to be kept cannot be."""
    urls, statuses = [], []

    def open_session(progress):
        session = Session.open(servers.folder(), ENGINE, progress=progress)
        session.engine.runner = servers.ScriptedRunner(session.engine.runner.model)
        lose_card(session.engine, monkeypatch)
        return session

    def ask(url: str, name: str) -> None:
        live = servers.Live(url)
        live.wait(lambda: live.get("/health").status_code == 200)
        statuses.append(live.chat("x").status_code)

    def listening(url: str, name: str) -> None:
        urls.append(threading.Thread(target=ask, args=(url, name)))
        urls[0].start()

    arguments = (
        str(servers.folder()),
        ServerConfig(port=0),
        ModelConfig(engine=ENGINE),
        open_session,
        listening,
    )
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(CardLostError) as caught:
            pool.submit(serve, *arguments).result(60)
        urls[0].join()
    assert statuses == [503] and caught.value.exit_code == 1


def test_keys(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    file.chmod(0o600)
    with servers.scripted(engine=ENGINE, keyring=Keyring.load(file)) as server:

        def headers(key):
            return {"authorization": f"Bearer {key}"}

        alice, bob = headers("alice-alice-alice"), headers("bob-bob-bob-bob-bob")
        for wrong in ({}, headers("bob"), {"authorization": "Basic bob-bob-bob-bob-bob"}):
            answer = server.get("/v1/models", headers=wrong)
            assert answer.status_code == 401 and error_of(answer)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert server.get("/metrics").status_code == 401
        assert server.get("/health").status_code == 200
        assert server.get("/v1/models", headers=alice).status_code == 200
        server.runner.pace = 0.05
        url = "/v1/chat/completions"
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(server.post, url, body(), headers=alice)
            server.wait(lambda: server.service.worker.live == 1)
            second = server.post(url, body(), headers=alice)
            assert second.status_code == 429 and error_of(second)["code"] == "key_concurrency"
            assert server.post(url, body(), headers=bob).status_code == 200
            assert first.result().status_code == 200
        assert server.post(url, body(), headers=alice).status_code == 200


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (KEYS, 0o644, "open to other users"),
        ("", 0o600, "holds no key"),
        ('[a]\nkey = "short"', 0o600, "5 characters.*16"),
        ('[a]\nkey = "aaaaaaaaaaaaaaaa"\n[b]\nkey = "aaaaaaaaaaaaaaaa"', 0o600, "same key"),
        ('[a]\nkey = "aaaaaaaaaaaaaaaa"\nextra = 1', 0o600, r"\[a\]"),
        ('[a]\nkey = "aaaaaaaaaaaaaaaa"\nconcurrent = 0', 0o600, "concurrent is 0"),
        ("[a", 0o600, "cannot be read"),
    ],
)
def test_key_files_that_are_refused(tmp_path, text, mode, words):
    file = tmp_path / "keys.toml"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(UsageError, match=words):
        Keyring.load(file)
    assert stat.S_IMODE(file.stat().st_mode) == mode


def test_other_addresses_need_keys():
    with pytest.raises(UsageError, match=r"0\.0\.0\.0.*without asking"):
        ServerConfig(host="0.0.0.0")
    ServerConfig(host="0.0.0.0", api_key_file=Path("keys.toml"))


def test_configuration_file(tmp_path):
    file = tmp_path / "host.toml"
    file.write_text(
        '[server]\nport = 9000\nbody_limit = "2MiB"\ncors = ["http://a.b"]\ngrace = 2\n'
        '[engine]\nsequences = 3\ncontext = 1024\nram = "1GiB"\nkeep_days = 3\nstore = "kept"\n'
        '[models."m"]\nname = "short"\ncontext = 2048\n'
        'sampling = {temperature = 0.5}\nchat_template = "t.jinja"\n'
        '[models."other"]\ncontext = "not looked at"\n'
    )
    server, model = load_config(file, "m", {"port": 9001, "queue": None}, {"sequences": 5, "dtype": None})
    assert (server.port, server.body_limit, server.queue) == (9001, 2 << 20, 64)
    assert (model.engine.sequences, model.engine.context, model.name) == (5, 2048, "short")
    assert (
        model.engine.ram == 1 << 30
        and model.engine.keep_days == 3
        and model.engine.store == tmp_path / "kept"
    )
    assert server.cors == ("http://a.b",) and server.grace == 2
    assert model.sampling == {"temperature": 0.5} and model.chat_template == tmp_path / "t.jinja"
    assert load_config(None, "m", {}, {})[1] == ModelConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[sever]", "sever"),
        ("[server]\nprot = 1", "prot"),
        ("[engine]\nfoo = 1", "foo"),
        ('[models."m"]\nfoo = 1', "foo"),
        ("[server]\nport = 70000", "70000"),
        ("[engine]\nsequences = 0", "sequences is 0"),
        ('[engine]\nsequences = "4"', "sequences is '4': Input should be a valid integer"),
        ('[engine]\ncontext = "big"', "context is 'big': Input should be a valid integer"),
        ("[engine]\nexact = 1", "exact is 1: Input should be a valid boolean"),
        ("[engine]\nstore = 5", "store is 5"),
        ('[engine]\nram = "much"', "much"),
        ('[server]\ncors = "http://a.b"', "cors is 'http://a.b'"),
        ("[server]\napi_key_file = 3", "api_key_file is 3"),
        ('[models."m"]\nchat_template = 7', "chat_template is 7"),
        ('[models."m"]\nsampling = {temperature = -1}', "temperature is -1"),
        ('[models."m"]\nsampling = {heat = 1}', "unknown setting"),
        ("models = 3", "not a section"),
        ("[", "cannot be read"),
    ],
)
def test_configurations_that_are_refused(tmp_path, text, words):
    file = tmp_path / "host.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=words):
        load_config(file, "m", {}, {})
