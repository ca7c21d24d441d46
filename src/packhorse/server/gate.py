"""What every call passes first and last: an id, a key, limits, the log, and the last net under errors."""

from __future__ import annotations

import json
import sys
import time
import traceback
import uuid
from dataclasses import dataclass, field
from typing import Any, TextIO

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from packhorse.core.types import Usage
from packhorse.server.config import LOOPBACK, ServerConfig
from packhorse.server.errors import ApiError, to_api_error
from packhorse.server.keys import Key, Keyring
from packhorse.server.metrics import Metrics
from packhorse.server.stream import BrokenAnswerError

OPEN_PATHS = {"/health"}
WORK_PATHS = {"/v1/chat/completions", "/v1/completions", "/v1/documents"}
DOCUMENT_PATH = "/v1/documents/"


@dataclass(eq=False)
class Call:
    """One HTTP call, as the log will tell it. first_token_at: of the monotonic clock. more: further entries."""

    id: str
    method: str
    path: str
    started: float = field(default_factory=time.monotonic)
    key: Key | None = None
    status: int | None = None
    code: str | None = None
    usage: Usage | None = None
    first_token_at: float | None = None
    gone: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The line of the log: lengths, times and bytes; contents only where the server was told to."""
        now = time.monotonic()
        first = None if self.first_token_at is None else round(self.first_token_at - self.started, 4)
        usage = self.usage
        entries = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "id": self.id,
            "key": self.key.name if self.key else None,
            "method": self.method,
            "path": self.path[:200],
            "status": self.status,
            "code": self.code,
            "prompt_tokens": usage.prompt_len if usage else None,
            "cached_tokens": usage.cached_len if usage else None,
            "generated_tokens": usage.generated_len if usage else None,
            "first_token_s": first,
            "total_s": round(now - self.started, 4),
            "disconnected": self.gone or None,
            **self.more,
        }
        return {name: value for name, value in entries.items() if value is not None}


class Gate:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        keyring: Keyring,
        metrics: Metrics,
        log: TextIO | None = None,
    ) -> None:
        self.app = app
        self.config = config
        self.keyring = keyring
        self.metrics = metrics
        self.log = log or sys.stderr

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":  # its lifespan: web sockets are off
            await self.app(scope, receive, send)
            return
        call = Call(f"req-{uuid.uuid4().hex[:24]}", scope["method"], scope["path"])
        scope.setdefault("state", {})["call"] = call
        entered: Key | None = None

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = call.id
            await send(message)

        try:
            entered = self._enter(Headers(scope=scope), call)
            await self.app(scope, receive, send_with_id)
        except BrokenAnswerError:
            pass  # returning with an unfinished body makes the server cut the connection
        except Exception as error:
            await self._answer_error(error, call, scope, receive, send_with_id)
        finally:
            if entered is not None:
                entered.active -= 1
            self._count(call)

    def _enter(self, headers: Headers, call: Call) -> Key | None:
        """Raises ApiError where the call may not go on; the key whose place was taken, if any."""
        if not self.keyring.keys:
            # Without keys only this machine may call, and no web page on it by way of another name.
            host = headers.get("host", "").lower()
            name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
            if self.config.host in LOOPBACK and name not in LOOPBACK:
                raise ApiError(
                    403, "host", f"The host {name[:80]!r} is not this machine, and the server has no keys."
                )
            return None
        if call.path in OPEN_PATHS or call.method == "OPTIONS":
            return None
        key = self.keyring.find(headers.get("authorization", ""))
        if key is None:
            problem = "is not known" if headers.get("authorization") else "is missing"
            raise ApiError(
                401, "invalid_api_key", f"The bearer key {problem}.", headers={"www-authenticate": "Bearer"}
            )
        call.key = key
        if call.path not in WORK_PATHS or call.method == "GET":
            return None
        if key.concurrent is not None and key.active >= key.concurrent:
            raise ApiError(
                429,
                "key_concurrency",
                f"{key.active} requests of the key {key.name!r} are running, and {key.concurrent} may.",
                headers={"retry-after": "1"},
            )
        key.active += 1
        return key

    async def _answer_error(
        self, error: Exception, call: Call, scope: Scope, receive: Receive, send: Send
    ) -> None:
        problem = to_api_error(error)
        call.code = problem.code
        if not isinstance(error, ApiError):
            print(f"{call.id}:", file=self.log)
            traceback.print_exception(error, file=self.log)
        if call.status is None:
            await problem.response(call.id)(scope, receive, send)

    def _count(self, call: Call) -> None:
        path = call.path if call.status != 404 else "other"
        if path.startswith(DOCUMENT_PATH):
            path = DOCUMENT_PATH + "{id}"
        self.metrics.requests.labels(path, str(call.status or 0)).inc()
        if call.code is not None:
            self.metrics.errors.labels(call.code).inc()
        if call.gone:
            self.metrics.gone.inc()
        if call.usage is not None:
            first = None if call.first_token_at is None else call.first_token_at - call.started
            self.metrics.count_answer(call.usage, first, time.monotonic() - call.started)
        if call.path not in ("/health", "/metrics"):
            # Escaped: a line break of any kind in a path must not begin a line of the log.
            print(json.dumps(call.record()), file=self.log, flush=True)
