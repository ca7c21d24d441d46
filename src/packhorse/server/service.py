"""One served model: what is loaded, what it is called, and how a call becomes an answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
from starlette.requests import Request
from starlette.responses import Response

from packhorse.core.units import ceil_div
from packhorse.server.body import read_json
from packhorse.server.config import SAMPLING, ModelConfig, ServerConfig
from packhorse.server.documents import Documents
from packhorse.server.errors import ApiError
from packhorse.server.gate import Call
from packhorse.server.keys import Keyring
from packhorse.server.metrics import Metrics, accounts, page_bytes
from packhorse.server.prompt import Prepared, Preparer
from packhorse.server.reply import Reply
from packhorse.server.schema import ChatRequest, CompletionRequest, TokenizeRequest, validate
from packhorse.server.stream import LongResponse, ignored_header, sse_frame
from packhorse.server.worker import Job, Status, Worker

if TYPE_CHECKING:
    from packhorse.engine.session import Session

T = TypeVar("T")
Prepare = Callable[[Any, str], Prepared]

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
        self.documents = Documents(self)
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
            self._preparer = Preparer(session, replace(self.model_config, sampling=sampling))
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
        session, snapshot = self.session, self.worker.snapshot
        stats, store = snapshot.store, session.engine.store
        free = store.capacity // store.page_len if stats is None else stats.pages_free
        return {
            "context": session.window,
            "sequences": self.model_config.engine.sequences,
            "device": self.model_config.engine.device,
            "bytes": accounts(session, free, snapshot.card_bytes),
            "process_resident_bytes": psutil.Process().memory_info().rss,
        }

    def preparer_for(self, call: Call, store: bool | None = True) -> Preparer:
        """One that goes on from prompts of this caller alone, or (store is False) from none and remembers none."""
        return self.preparer.of(None if store is False else self.tenant(call))

    def tenant(self, call: Call) -> str:
        """Whose chains and documents a call may go on from."""
        key = call.key
        return "" if key is None or self.config.shared_store else key.digest.hex()

    def check_model(self, name: str) -> None:
        """Raises ApiError where it is another model."""
        if name not in (self.name, self.model):
            message = f"There is no model {name[:200]!r} here; {self.name!r} is served."
            raise ApiError(404, "model_not_found", message, param="model")

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked, call = await self._read(request, ChatRequest)
        preparer, find = self.preparer_for(call, asked.store), self.documents.finder(call)

        def prepare(asked: ChatRequest, request_id: str) -> Prepared:
            return preparer.chat(asked, request_id, find)

        return self._answer(asked, call, prepare, want_logprobs=bool(asked.logprobs))

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        asked, call = await self._read(request, CompletionRequest)
        return self._answer(
            asked, call, self.preparer_for(call, asked.store).completion, want_logprobs=asked.logprobs is not None,
            echo=bool(asked.echo), silent=asked.max_tokens == 0,
        )  # fmt: skip

    async def tokenize(self, request: Request) -> tuple[list[int], dict[str, str]]:
        """POST /v1/tokenize: token ids, and headers."""
        document = await read_json(request, self.config.body_limit, self.config.body_timeout)
        asked, ignored = validate(TokenizeRequest, document)
        if asked.model is not None:
            self.check_model(asked.model)
        find = self.documents.finder(request.state.call)
        return await self.prepare(self.preparer.tokenize, asked, find), ignored_header(ignored)

    async def prepare(self, prepare: Callable[..., T], *args: Any) -> T:
        """Call it in a thread: a long prompt takes seconds to render and to encode."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, prepare, *args)

    async def _read(self, request: Request, kind: type[Any]) -> tuple[Any, Call]:
        call: Call = request.state.call
        document = await read_json(request, self.config.body_limit, self.config.body_timeout)
        if document.get("model") is None:
            message = f"The model is missing; {self.name!r} is served."
            raise ApiError(400, "missing", message, param="model")
        asked, ignored = validate(kind, document)
        if asked.store and self.session.engine.store.lower is None:
            ignored.append("store")  # it asks for what only --store does
        call.more = {"model": asked.model[:200], "stream": bool(asked.stream), "ignored": ignored or None}
        if self.config.log_contents:
            call.more["contents"] = {"request": document}
        self.check_model(asked.model)
        self.check_room(asked.n or 1)
        return asked, call

    def check_room(self, count: int) -> None:
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

    def _answer(
        self, asked: ChatRequest | CompletionRequest, call: Call, prepare: Prepare, **options: bool
    ) -> Response:
        answer = _Answer(self, asked, call)
        frames, ignored = answer.frames(prepare, options), call.more["ignored"] or []
        return self.respond(call.id, frames, answer.close, bool(asked.stream), ignored)

    def respond(
        self,
        request_id: str,
        frames: AsyncGenerator[bytes],
        on_close: Callable[[bool, ApiError | None], None],
        sse: bool,
        ignored: list[str],
    ) -> LongResponse:
        """See LongResponse. ignored: fields of the request."""
        config, headers = self.config, ignored_header(ignored)
        how: dict[str, Any] = {"sse": sse, "keep_alive": config.keep_alive, "stall": config.stall}
        return LongResponse(frames, request_id=request_id, on_close=on_close, headers=headers, **how)


class _Answer:
    """One call from its fields to the last frame of its answer."""

    def __init__(self, service: Service, asked: ChatRequest | CompletionRequest, call: Call) -> None:
        self.service = service
        self.asked = asked
        self.call = call
        self.job: Job | None = None
        self.reply: Reply | None = None

    async def frames(self, prepare: Prepare, options: Mapping[str, bool]) -> AsyncGenerator[bytes]:
        """Raises what preparing, queueing and computing raise. options: those of Reply."""
        asked, service = self.asked, self.service
        prepared = await service.prepare(prepare, asked, self.call.id)
        service.check_room(sum(len(group) for group in prepared.groups))
        for line in prepared.report.get("volatile", ()):
            service.metrics.volatile.labels(line["kind"]).inc()
        tenant = service.tenant(self.call)
        store = asked.store is not False
        groups = [[replace(r, tenant=tenant, store=store) for r in group] for group in prepared.groups]
        job = Job(groups, read_on=asked.on_disconnect == "read_on")
        reply = Reply(
            prepared, service.session.tokenizer, request_id=self.call.id, model=service.name, **options
        )
        began = time.monotonic()
        yield b""
        await service.worker.submit(job)
        self.job, self.reply = job, reply
        while not reply.done:
            event = await job.events.get()
            deltas = reply.feed(event)
            if not asked.stream:
                continue
            if asked.return_progress and not event.token_ids and event.finish is None:
                yield sse_frame(reply.progress_chunk(event, time.monotonic() - began))
            for delta in deltas:
                yield sse_frame(reply.chunk(delta))
        whole = reply.whole()
        if "contents" in self.call.more:
            self.call.more["contents"]["answer"] = whole["choices"]
        if not asked.stream:
            yield json.dumps(whole, ensure_ascii=False).encode()
            return
        usage = asked.stream_options is not None and asked.stream_options.include_usage
        for chunk in reply.last_chunks(bool(usage)):
            yield sse_frame(chunk)
        yield sse_frame("[DONE]")

    def close(self, gone: bool, error: ApiError | None) -> None:
        """The call has ended: see LongResponse.on_close."""
        call, reply = self.call, self.reply
        call.code, call.gone = error.code if error is not None else None, gone
        if self.job is None or reply is None:
            return  # nothing was accepted
        self.service.worker.leave(self.job)
        call.usage, call.first_token_at = reply.counts, reply.first_token_at
        store = self.service.session.engine.store
        pages = ceil_div(call.usage.prompt_len + call.usage.generated_len, store.page_len)
        call.more |= {"finish": reply.finishes, "device_kv_bytes": pages * page_bytes(store)}
