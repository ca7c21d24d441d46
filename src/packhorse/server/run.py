"""Binds the port, runs the server until it is told to stop, and starts it again where that was asked for."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from packhorse.core.errors import PackhorseError, UsageError
from packhorse.server.app import make_app
from packhorse.server.config import ModelConfig, ServerConfig
from packhorse.server.keys import Keyring
from packhorse.server.service import Service
from packhorse.server.worker import Worker

if TYPE_CHECKING:
    from packhorse.engine.session import Session

LAST_WORDS_S = 30.0
"""After `grace` what still runs is ended with an error; so long at most it takes until that is said: a step."""
FAST_DEATH_S = 30.0
MAX_FAST_DEATHS = 5
MAX_PAUSE_S = 30.0


def serve(
    model: str,
    config: ServerConfig,
    model_config: ModelConfig,
    open_session: Callable[[Callable[[int, int], None]], Session],
    listening: Callable[[str, str], None],
) -> None:
    """Serve until SIGTERM, or SIGINT, which is raised at the end. listening(url, name): the port is bound.

    Raises UsageError where the port cannot be bound or the keys cannot be read, what `open_session` raises,
    and the error of an engine that has ended.
    """
    keyring = Keyring.load(config.api_key_file) if config.api_key_file is not None else Keyring([])
    listener = bind(config)
    raise_file_limit()
    ended: list[BaseException] = []

    def on_end(error: BaseException | None) -> None:
        if error is not None:
            ended.append(error)
            # Answers that have just failed get a moment to be sent.
            asyncio.get_running_loop().call_later(0.5, setattr, server, "should_exit", True)

    worker = Worker(open_session, on_end)
    service = Service(model, config, model_config, keyring, worker)
    server = Server(server_settings(make_app(service), config), worker, config.grace)
    host, port = listener.getsockname()[:2]
    listening(f"http://{f'[{host}]' if ':' in host else host}:{port}", service.name)
    server.run(sockets=[listener])
    if server.interrupted:
        raise KeyboardInterrupt
    if ended:
        error = ended[0]
        if isinstance(error, PackhorseError):
            raise error
        hint = "The log above has more."
        raise PackhorseError(f"The engine ended: {type(error).__name__}: {error}.", hint=hint)


class Server(uvicorn.Server):
    """uvicorn's server, which would end the process with the signal that stopped it, and cut answers off."""

    interrupted = False

    def __init__(self, settings: uvicorn.Config, worker: Worker, grace: float) -> None:
        super().__init__(settings)
        self._worker = worker
        self._grace = grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for what runs, and say so; after `grace` its end is an error that its client is told."""
        if live := self._worker.live:
            have = f"{live} answers have" if live > 1 else "1 answer has"
            again = ", Ctrl-C again ends the process at once" if self.interrupted else ""
            print(f"stopping: {have} {self._grace:g} s to end{again}", file=sys.stderr, flush=True)
        asyncio.get_running_loop().call_later(self._grace, self._worker.end)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.interrupted and sig == signal.SIGINT:
            # Asked twice: at once. A thread that computes would not let the interpreter end in order.
            os._exit(130)
        self.interrupted = self.interrupted or sig == signal.SIGINT
        super().handle_exit(sig, frame)


def server_settings(app: Any, config: ServerConfig) -> uvicorn.Config:
    """Settings of the HTTP server."""
    # Cutting off what fails after its status is our way to tell the client, and the call's own line says why.
    cut = "ASGI callable returned without completing response."
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.getMessage() != cut)
    return uvicorn.Config(
        app,
        http=_protocol(config.header_timeout),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=round(config.grace + LAST_WORDS_S),
    )


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises UsageError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"{config.host}:{config.port} cannot be listened at: {error.strerror or error}.",
            hint="Choose another --port (0 takes a free one) or --host.",
        ) from error
    listener.setblocking(False)
    return listener


def raise_file_limit() -> None:
    """Allow as many open files as the system lets this process have: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16) if hard > 0 else 1 << 16, hard))


def _protocol(header_timeout: float) -> type[H11Protocol]:
    """uvicorn's HTTP protocol, and a bound on the time that the head of a request may take."""

    class Protocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """Between connection or first byte and the end of the headers the clock runs."""
            answering = self.cycle is not None and not self.cycle.response_complete
            between = self.cycle is not None and self.conn.their_state is h11.IDLE
            if answering or (between and not self.conn.trailing_data[0]):
                self._unwatch()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(header_timeout, self.transport.close)

        def _unwatch(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Protocol


def supervise(command: Sequence[str], say: Callable[[str], None]) -> int:
    """Run a command, and again whenever it dies of itself; returns its last exit code.

    An end that was asked for (0, 130, SIGTERM to us) and one that would only repeat (usage, a model that does
    not fit or is refused, no network) are final. So are five deaths in a row within 30 s of their start.
    """
    stop = False
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _: object) -> None:
        nonlocal stop
        stop = True
        if child is not None:
            child.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, pass_on)
    fast_deaths = 0
    while True:
        began = time.monotonic()
        child = subprocess.Popen(list(command))
        code = child.wait()
        if stop or code in (0, 2, 3, 4, 5, 130):
            return code if code >= 0 else 128 - code
        fast_deaths = fast_deaths + 1 if time.monotonic() - began < FAST_DEATH_S else 0
        if fast_deaths >= MAX_FAST_DEATHS:
            say(f"the server ended with {code} for the {fast_deaths}th time in a row: given up")
            return 1
        pause = min(MAX_PAUSE_S, 2.0**fast_deaths)
        say(f"the server ended with {code}; it is started again in {pause:g} s")
        time.sleep(pause)
        if stop:
            return 1
