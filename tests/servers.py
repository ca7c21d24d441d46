"""Live servers over tiny models for tests: real ones in their own process, scripted ones in this one.

The scripted model answers with what stands between [[ and ]] in the prompt's last such pair, then ends its
turn; without one it answers as its weights say. Its prompts are read by the real engine all the same.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import oracle
from packhorse.core.config import EngineConfig
from packhorse.engine.runner import Runner
from packhorse.engine.schedule import Step
from packhorse.engine.session import Session
from packhorse.server.app import make_app
from packhorse.server.config import ModelConfig, ServerConfig
from packhorse.server.keys import Keyring
from packhorse.server.run import Server, bind, server_settings
from packhorse.server.service import Service
from packhorse.server.worker import Worker

VOCAB = 320
END = "<|im_end|>"
NAME = "tiny"
# After the manner of Qwen3.5's: thoughts, tools in XML, a system message only at the beginning.
TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>\\nCall as <tool_call>\\n<function=NAME>...<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must come first.') }}{% endif %}
    {%- if m.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('Unexpected role.') }}{% endif %}
    {{- '<|im_start|>' ~ m.role ~ '\\n' }}
    {%- if m.reasoning_content and preserve_thinking %}{{ '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' }}{% endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}
        {%- for key, value in call.function.arguments.items() %}
            {{- '<parameter=' ~ key ~ '>\\n' ~ value ~ '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is true %}
        {{- ('(' ~ reasoning_effort ~ ')' if reasoning_effort else '') ~ '<think>\\n' }}
    {%- else %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""  # noqa: E501


def _byte_tokenizer() -> Tokenizer:
    """A token a byte, 256 <|im_start|>, 257 <|im_end|>, and marks of thoughts and calls, which are text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", END)]
    )
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in marks])
    return tokenizer


TOKENIZER = _byte_tokenizer()


@cache
def folder(family: str = "qwen3_5", template: str = TEMPLATE, context: int = 8192) -> Path:
    """A checkpoint folder, one a process; nobody may change it."""
    path = Path(tempfile.mkdtemp(prefix="packhorse-server-")) / NAME
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    model = oracle.make_model(
        family, vocab_size=VOCAB, eos_token_id=257, bos_token_id=None, max_position_embeddings=context
    )
    with torch.no_grad():
        # Its own answers are printable ASCII and never end: what ends them is what a test asks for.
        model.lm_head.weight[94:] = 0
    oracle.save(model, path)
    TOKENIZER.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(template)
    return path


class ScriptedRunner(Runner):
    """Writes the script of each prompt. fail: called before each step, may raise. pace: seconds a step."""

    fail: Callable[[Step], None] | None = None
    pace: float = 0.0

    def run(self, step: Step, views: list) -> torch.Tensor:
        logits = super().run(step, views).clone()
        if self.pace:
            time.sleep(self.pace)
        if self.fail is not None:
            self.fail(step)
        sampled = [s for s in step.spans if s.samples]
        for row, span in zip(logits, sampled, strict=True):
            script = self._script(span.sequence.request.token_ids)
            if script is not None:
                done = len(span.sequence.generated)
                row[script[done] if done < len(script) else 257] += 1000.0
        return logits

    def _script(self, token_ids: tuple[int, ...]) -> list[int] | None:
        found = re.findall(
            r"\[\[(.*?)\]\]", TOKENIZER.decode(list(token_ids), skip_special_tokens=False), re.DOTALL
        )
        return TOKENIZER.encode(found[-1]).ids if found else None


class Live:
    """A server that runs. url: without a slash at its end."""

    def __init__(
        self, url: str, service: Service | None = None, log: Any = None, pid: int | None = None
    ) -> None:
        self.url = url
        self.service = service
        self.log = log
        self.pid = pid or os.getpid()
        self.child: Any = None

    @property
    def runner(self) -> ScriptedRunner:
        return self.service.session.engine.runner  # type: ignore[union-attr, return-value]

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **options)

    def post(self, path: str, document: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=document, timeout=60, **options)

    def chat(self, text: str, **fields: Any) -> httpx.Response:
        messages = fields.pop("messages", [{"role": "user", "content": text}])
        # Greedy: a drawn answer without a script may end by itself.
        greedy = {"model": NAME, "messages": messages, "temperature": 0}
        return self.post("/v1/chat/completions", greedy | fields)

    def stream(self, path: str, document: dict[str, Any]) -> list[Any]:
        """The events of a stream; comments as strings that begin with a colon."""
        events: list[Any] = []
        url = self.url + path
        with httpx.stream(
            "POST", url, json={"model": NAME, "stream": True, **document}, timeout=60
        ) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    events.append(data if data == "[DONE]" else json.loads(data))
                elif line:
                    events.append(line)
        return events

    def pages(self, state: str) -> float:
        """Pages of the device that are free, used or cached."""
        found = re.search(
            rf'packhorse_pages{{state="{state}",tier="device"}} (\S+)', self.get("/metrics").text
        )
        return float(found[1])  # type: ignore[index]

    def records(self) -> list[dict[str, Any]]:
        """The request log so far (scripted servers)."""
        return [json.loads(line) for line in self.log.getvalue().splitlines() if line.startswith("{")]

    def wait(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Until a condition holds; fails where it does not within some seconds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come about in time"
            time.sleep(0.01)

    def wait_idle(self) -> None:
        """Until nothing runs or waits, and all memory of requests is free."""

        def idle() -> bool:
            now = self.service.worker.snapshot  # type: ignore[union-attr]
            return not (now.running or now.waiting or self.service.worker.live) and now.store.pages_used == 0

        self.wait(idle)


@contextmanager
def scripted(
    *,
    config: ServerConfig | None = None,
    engine: EngineConfig | None = None,
    keyring: Keyring | None = None,
    model: ModelConfig | None = None,
    path: Path | None = None,
    opening: Callable[[], None] | None = None,
) -> Iterator[Live]:
    """A server in a thread of this process, over the scripted model. opening: called before the model is
    loaded; where it is given nobody waits for the end of loading."""
    config = config or ServerConfig(port=0)
    engine = engine or EngineConfig(context=4096, sequences=4, threads=1, exact=True)
    listener = bind(config)

    def open_session(progress: Callable[[int, int], None]) -> Session:
        if opening is not None:
            opening()
        session = Session.open(path or folder(), engine, progress=progress)
        session.engine.runner = ScriptedRunner(session.engine.runner.model)
        return session

    worker = Worker(open_session, lambda error: None)
    model = model or ModelConfig(engine=engine)
    service = Service(str(path or folder()), config, model, keyring or Keyring([]), worker)
    log = io.StringIO()
    server = Server(server_settings(make_app(service, log=log), config), worker, config.grace)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    live = Live(f"http://127.0.0.1:{listener.getsockname()[1]}", service, log)
    try:
        if opening is None:
            live.wait(lambda: worker.health.status != "loading", 60)
            assert worker.health.status == "ready", worker.health.reason
        yield live
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


@contextmanager
def process(*options: str, path: Path | None = None, ready: bool = True) -> Iterator[Live]:
    """`packhorse serve` as a process of its own."""
    command = [sys.executable, "-m", "packhorse.cli.main", "serve", str(path or folder())]
    command += ["--port", "0", "--threads", "1", *options]
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(command, stderr=log, stdout=subprocess.DEVNULL)
        try:
            live = Live(_url(child, log), log=log, pid=child.pid)
            live.child = child
            if ready:
                live.wait(lambda: live.get("/health").status_code == 200, 60)
            yield live
        finally:
            child.terminate()
            child.wait(30)


def _url(child: subprocess.Popen, log: Any) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        # Reading through another handle leaves the child's place in the file alone.
        text = os.pread(log.fileno(), 1 << 20, 0).decode()
        found = re.search(r"listening on (http://\S+)", text)
        if found:
            return found[1]
        assert child.poll() is None, text
        time.sleep(0.02)
    raise AssertionError("the server did not say where it listens")


WORK_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/tokenize")
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection"
)


def draw_requests(*options: str, timeout: float) -> list[int]:
    """Run schemathesis with these options; the statuses of what it sent to work paths. Fails where it finds
    anything, where the server logs a traceback, or where it is not healthy afterwards."""
    settings = ("--context", "512", "--max-tokens", "4", "--keep-alive", "2")
    with process(*settings) as live, tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "schemathesis.cli", "run", live.url + "/openapi.json"]
        command += ["--checks", CHECKS, "--phases", "examples,coverage,fuzzing"]
        command += [
            "--request-timeout",
            "30",
            "--suppress-health-check",
            "all",
            "--warnings",
            "off",
            *options,
        ]
        done = subprocess.run(
            command, cwd=scratch, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert live.get("/health").json() == {"status": "ready", "reason": None}
        text = os.pread(live.log.fileno(), 1 << 28, 0).decode()
        assert "Traceback" not in text, text[text.index("Traceback") :][:4000]
        records = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return [r["status"] for r in records if r["path"] in WORK_PATHS and r["method"] == "POST"]
