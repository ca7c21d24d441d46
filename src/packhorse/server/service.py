"""One served model: what is loaded, what it is called, and how a call becomes an answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
from starlette.requests import Request
from starlette.responses import Response

from packhorse.core.types import Event
from packhorse.core.units import ceil_div
from packhorse.server.body import read_json
from packhorse.server.config import SAMPLING, ModelConfig, ServerConfig
from packhorse.server.errors import ApiError
from packhorse.server.gate import Call
from packhorse.server.keys import Keyring
from packhorse.server.metrics import Metrics, accounts, page_bytes
from packhorse.server.prompt import Defaults, Prepared, Preparer
from packhorse.server.reply import Delta, Reply
from packhorse.server.schema import ChatRequest, CompletionRequest, TokenizeRequest, validate
from packhorse.server.stream import LongResponse, sse_frame
from packhorse.server.worker import Job, Status, Worker

if TYPE_CHECKING:
    from packhorse.engine.session import Session

PREPARING = 2
"""Prompts rendered and tokenized at once; a long one takes seconds."""


class Service:
    """What the routes call. model: as on the command line; `names` are those it answers to."""

    def __init__(
        self, model: str, config: ServerConfig, model_config: ModelConfig, keyring: Keyring, worker: Worker
    ) -> None:
        self.model = model
        self.config = config
        self.model_config = model_config
        self.keyring = keyring
        self.worker = worker
        self.metrics = Metrics(lambda: worker)
        self.created = int(time.time())
        self._preparer: Preparer | None = None
        self._threads = ThreadPoolExecutor(PREPARING, thread_name_prefix="prepare")

    @property
    def name(self) -> str:
        """What clients call the model."""
        if self.model_config.name is not None:
            return self.model_config.name
        return self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def session(self) -> Session:
        """The loaded model. Raises ApiError while there is none."""
        health = self.worker.health
        if self.worker.session is None or health.status is Status.FAILED:
            code = "loading" if health.status is Status.LOADING else "failed"
            raise ApiError(
                503, code, f"The model is not ready: {health.reason}.", headers={"retry-after": "5"}
            )
        return self.worker.session

    @property
    def preparer(self) -> Preparer:
        """Renders and checks. Raises ApiError while the model is not loaded."""
        session = self.session
        if self._preparer is None:
            generation = session.facts.generation
            own = {k: v for k, v in generation.items() if k in SAMPLING and v is not None}
            if generation.get("do_sample") is False:
                own = {"temperature": 0.0}
            sampling = {**own, **self.model_config.sampling}
            defaults = Defaults(self.model_config.max_tokens, sampling, self.model_config.options)
            self._preparer = Preparer(session, defaults)
        return self._preparer

    def describe(self) -> dict[str, Any]:
        """The model as /v1/models tells it."""
        window = self.session.window
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "packhorse",
            "context_length": window,
            "max_model_len": window,
        }

    def plan(self) -> dict[str, Any]:
        """What was planned beside what is taken, as /plan tells it."""
        session, stats = self.session, self.worker.snapshot.store
        store = session.engine.store
        free = store.capacity // store.page_len if stats is None else stats.pages_free
        return {
            "context": session.window,
            "sequences": self.model_config.engine.sequences,
            "device": self.model_config.engine.device,
            "bytes": accounts(session, free),
            "process_resident_bytes": psutil.Process().memory_info().rss,
        }

    def check_model(self, name: str) -> None:
        """Raises ApiError where it is another model."""
        if name not in (self.name, self.model):
            raise ApiError(
                404,
                "model_not_found",
                f"There is no model {name[:200]!r} here; {self.name!r} is served.",
                param="model",
            )

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked, call, headers = await self._read(request, ChatRequest)
        prepared = await self._prepare(self.preparer.chat, asked, call)
        reply = self._reply(prepared, call, want_logprobs=bool(asked.logprobs))
        return await self._answer(asked, prepared, reply, call, headers)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        asked, call, headers = await self._read(request, CompletionRequest)
        prepared = await self._prepare(self.preparer.completion, asked, call)
        reply = self._reply(
            prepared,
            call,
            want_logprobs=asked.logprobs is not None,
            echo=bool(asked.echo),
            silent=asked.max_tokens == 0,
        )
        return await self._answer(asked, prepared, reply, call, headers)

    async def tokenize(self, request: Request) -> tuple[list[int], dict[str, str]]:
        """POST /v1/tokenize: token ids, and headers."""
        document = await read_json(request, self.config.body_limit, self.config.body_timeout)
        asked, ignored = validate(TokenizeRequest, document)
        if asked.model is not None:
            self.check_model(asked.model)
        preparer = self.preparer
        loop = asyncio.get_running_loop()
        ids = await loop.run_in_executor(self._threads, preparer.tokenize, asked)
        return ids, _ignored_header(ignored)

    async def _read(self, request: Request, kind: type[Any]) -> tuple[Any, Call, dict[str, str]]:
        """The request, its call, and the headers of its answer."""
        call: Call = request.state.call
        document = await read_json(request, self.config.body_limit, self.config.body_timeout)
        asked, call.ignored = validate(kind, document)
        call.model, call.stream = asked.model[:200], bool(asked.stream)
        if self.config.log_contents:
            call.contents = {"request": document}
        self.check_model(asked.model)
        self._check_room(asked.n or 1)
        return asked, call, _ignored_header(call.ignored)

    def _check_room(self, count: int) -> None:
        """Raises ApiError where `count` more requests have no place."""
        capacity = self.session.engine.scheduler.sequences + self.config.queue
        if count > capacity:
            raise ApiError(
                400, "invalid_value", f"{count} answers were asked for, and {capacity} have room.", param="n"
            )
        if self.worker.live + count > capacity:
            wait = self.worker.retry_after(self.session.engine.scheduler.sequences)
            raise ApiError(
                429,
                "queue_full",
                f"{self.worker.live} requests are running or waiting, and {capacity} have room.",
                headers={"retry-after": str(wait)},
            )

    async def _prepare(self, prepare: Any, asked: Any, call: Call) -> Prepared:
        loop = asyncio.get_running_loop()
        prepared: Prepared = await loop.run_in_executor(self._threads, prepare, asked, call.id)
        tenant = "" if call.key is None or self.config.shared_store else call.key.digest.hex()
        store = asked.store is not False
        groups = [[replace(r, tenant=tenant, store=store) for r in group] for group in prepared.groups]
        prepared = replace(prepared, groups=groups)
        self._check_room(sum(len(group) for group in prepared.groups))
        return prepared

    def _reply(self, prepared: Prepared, call: Call, **options: Any) -> Reply:
        return Reply(prepared, self.session.tokenizer, request_id=call.id, model=self.name, **options)

    async def _answer(
        self,
        asked: ChatRequest | CompletionRequest,
        prepared: Prepared,
        reply: Reply,
        call: Call,
        headers: dict[str, str],
    ) -> Response:
        job = Job(prepared.groups, read_on=asked.on_disconnect == "read_on")
        began = time.monotonic()
        await self.worker.submit(job)
        store = self.session.engine.store

        def close(gone: bool, error: ApiError | None) -> None:
            self.worker.leave(job)
            call.code = error.code if error is not None else None
            call.gone, call.usage, call.finish = gone, reply.counts, reply.finishes
            call.first_token_at = reply.first_token_at
            tokens = reply.counts.prompt_len + reply.counts.generated_len
            call.kv_bytes = ceil_div(tokens, store.page_len) * page_bytes(store)

        if asked.stream:
            options = asked.stream_options
            frames = _stream(
                reply,
                job,
                call,
                began,
                usage=bool(options and options.include_usage),
                progress=bool(asked.return_progress),
            )
        else:
            frames = _whole(reply, job, call)
        return LongResponse(
            frames,
            request_id=call.id,
            sse=bool(asked.stream),
            keep_alive=self.config.keep_alive,
            stall=self.config.stall,
            on_close=close,
            headers=headers,
        )


async def _events(reply: Reply, job: Job) -> AsyncIterator[tuple[Event, list[Delta]]]:
    while not reply.done:
        event = await job.events.get()
        yield event, reply.feed(event)


async def _stream(
    reply: Reply, job: Job, call: Call, began: float, *, usage: bool, progress: bool
) -> AsyncIterator[bytes]:
    deltas: list[Delta] = []
    async for event, new in _events(reply, job):
        if progress and not event.token_ids and event.finish is None:
            yield sse_frame(reply.progress_chunk(event, time.monotonic() - began))
        for delta in new:
            yield sse_frame(reply.chunk(delta))
        if call.contents is not None:
            deltas += new
    _keep_contents(reply, deltas, call)
    for chunk in reply.last_chunks(usage):
        yield sse_frame(chunk)
    yield sse_frame("[DONE]")


async def _whole(reply: Reply, job: Job, call: Call) -> AsyncIterator[bytes]:
    deltas = [delta async for _, new in _events(reply, job) for delta in new]
    _keep_contents(reply, deltas, call)
    yield json.dumps(reply.whole(deltas), ensure_ascii=False).encode()


def _keep_contents(reply: Reply, deltas: list[Delta], call: Call) -> None:
    if call.contents is not None:
        call.contents["answer"] = reply.whole(deltas)["choices"]


def _ignored_header(names: list[str]) -> dict[str, str]:
    """The fields that were ignored, as a header; what no header can carry is left out of a name."""
    plain = ["".join(c if c.isascii() and c.isprintable() else "?" for c in name)[:64] for name in names[:32]]
    return {"x-packhorse-ignored": ", ".join(plain)} if plain else {}
