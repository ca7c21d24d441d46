"""Documents of the API: read into the store once, and then named by an id.

POST file or text -> text -> prompt -> the engine reads it, with progress -> pages on disk -> the document's row
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from packhorse.core.errors import PackhorseError, PromptTooLongError
from packhorse.core.types import FinishReason, Usage
from packhorse.engine import documents as kept
from packhorse.engine.documents import Reading
from packhorse.server.attach import Find, decode_file, read_upload, text_document
from packhorse.server.body import parse_form, read_body, read_json
from packhorse.server.errors import ApiError, bad_field, too_long
from packhorse.server.gate import Call
from packhorse.server.reply import progress
from packhorse.server.schema import DocumentRequest, validate
from packhorse.server.stream import sse_frame
from packhorse.server.worker import Job, StoppedError
from packhorse.store.documents import StoredDocument
from packhorse.text.documents import Document

if TYPE_CHECKING:
    from packhorse.server.service import Service
    from packhorse.store.durable import DurableStore
    from packhorse.store.lower import LowerTiers

T = TypeVar("T")

FORM = "multipart/form-data"
EXPIRY_S = 60.0
"""Between two looks at what is too old."""
_FLAGS = {"true": True, "false": False}


class Documents:
    """What the routes of documents call. A document is its owner's: to another key it does not exist."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def finder(self, call: Call) -> Find:
        """Finds documents of whoever calls, for messages that name them."""
        tenant = self.service.tenant(call)
        return lambda name: kept.as_text(self._find(tenant, name))

    async def ingest(self, request: Request) -> Response:
        """POST /v1/documents: answers when the document is on disk; as a stream, with progress before."""
        call: Call = request.state.call
        _ = self.lower  # said before a body is read
        asked, data, ignored = await self._read(request)
        document = await self.service.prepare(_document_of, asked, data)
        self.service.check_room(1)
        ingest = _Ingest(self, asked, document, call)
        return self.service.respond(call.id, ingest.frames(), ingest.close, bool(asked.stream), ignored)

    async def listing(self, call: Call) -> dict[str, Any]:
        """GET /v1/documents."""
        tenant, lower = self.service.tenant(call), self.lower
        found = await self.service.prepare(kept.listed, self.disk, lower.model, tenant)
        return {"object": "list", "data": [await self.describe(stored, tenant) for stored in found]}

    async def show(self, call: Call, name: str) -> dict[str, Any]:
        """GET /v1/documents/{id}: with the page map."""
        tenant = self.service.tenant(call)
        stored = await self.service.prepare(self._find, tenant, name)
        pages = [{"page": number, "start": start, "end": end} for number, start, end in stored.pages]
        return {**await self.describe(stored, tenant), "page_map": pages}

    async def delete(self, call: Call, name: str) -> dict[str, Any]:
        """DELETE /v1/documents/{id}: the document, what was asked about it, and what of that no other needs."""
        stored = await self.service.prepare(self._find, self.service.tenant(call), name)
        self.service.preparer_for(call).tokenizer.forget()
        freed = await self._write(lambda disk: disk.remove(stored.prefix))
        return {"id": name, "object": "document.deleted", "deleted": True, "freed_bytes": freed}

    async def expire_for_ever(self) -> None:
        """Now and then delete what is too old: an idle server writes nothing, and still forgets in time."""
        while True:
            await asyncio.sleep(EXPIRY_S)
            with suppress(ApiError, StoppedError):  # no model, or no store
                await self._write(lambda disk: disk.expire())

    async def _write(self, function: Callable[[DurableStore], T]) -> T:
        """What a function gives that changes the store."""
        lower, disk = self.lower, self.disk
        future = await self.service.worker.call(lambda _: lower.after_writing(lambda: function(disk)))
        return await asyncio.wrap_future(future)

    async def describe(self, stored: StoredDocument, tenant: str) -> dict[str, Any]:
        """A document as the API tells it."""
        held = await self.service.worker.call(lambda engine: kept.tier_bytes(engine, stored, tenant))
        pages = stored.pages
        return {
            "id": stored.id,
            "object": "document",
            "name": stored.prefix.label,
            "created_at": int(stored.prefix.created),
            "expires_at": None if stored.expires is None else int(stored.expires),
            "tokens": len(stored.prefix.tokens) // 4,
            "pages": len(pages),
            "empty_pages": [number for number, start, end in pages if start == end],
            "pinned": bool(stored.prefix.pinned),
            "bytes": held,
        }

    @property
    def lower(self) -> LowerTiers:
        """The tiers that hold documents. Raises ApiError where there is no disk store."""
        lower = self.service.session.engine.store.lower
        if lower is None or lower.disk is None:
            raise ApiError(
                400, "no_store", "This server keeps no documents: it was started without --store DIR."
            )
        return lower

    @property
    def disk(self) -> DurableStore:
        """Their disk store."""
        disk = self.lower.disk
        assert disk is not None
        return disk

    def _find(self, tenant: str, name: str) -> StoredDocument:
        found = kept.find(self.disk, self.lower.model, tenant, name)
        if found is None:
            raise ApiError(
                404, "document_not_found", f"There is no document {name[:80]!r} of yours.", param="file_id"
            )
        return found

    async def _read(self, request: Request) -> tuple[DocumentRequest, bytes | None, list[str]]:
        """The fields, the file of a form, and the fields that are ignored."""
        config = self.service.config
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != FORM:
            document = await read_json(request, config.document_limit, config.body_timeout)
            data = None
        else:
            origin = request.headers.get("origin")
            if origin is not None and origin not in config.cors:
                # A web page may send forms to this address without being asked.
                raise ApiError(403, "origin", f"Pages from {origin[:80]!r} may not send forms. See --cors.")
            fields = parse_form(await read_body(request, config.document_limit, config.body_timeout), kind)
            document, data = _from_form(fields)
        if document.get("store") is False:
            hint = "Send it in a message of a chat, with store: false there."
            raise bad_field("store", "A document is read here to be kept, and store is false.", hint)
        asked, ignored = validate(DocumentRequest, document)
        if asked.model is not None:
            self.service.check_model(asked.model)
        return asked, data, ignored


class _Ingest:
    """One document from its text to its row in the store."""

    def __init__(self, documents: Documents, asked: DocumentRequest, document: Document, call: Call) -> None:
        self.documents = documents
        self.service = documents.service
        self.asked = asked
        self.document = document
        self.call = call
        self.job: Job | None = None
        self.usage: Usage | None = None

    async def frames(self) -> AsyncGenerator[bytes]:
        """Raises what preparing, queueing and computing raise."""
        service, tenant = self.service, self.service.tenant(self.call)
        try:
            request, reading = await service.prepare(
                service.preparer_for(self.call).document, self.document, self.call.id, tenant
            )
        except PromptTooLongError as error:
            raise too_long(error, "file", "Or split the document.") from error
        await service.worker.call(lambda engine: kept.check_room(engine, self.document, reading, tenant))
        job = Job([[request]])
        began = time.monotonic()
        yield b""
        await service.worker.submit(job)
        self.job = job
        while True:
            event = await job.events.get()
            self.usage = event.usage
            if event.finish in (FinishReason.ERROR, FinishReason.CANCELLED):
                raise event.error or PackhorseError("The document was not read to its end.")
            if event.finish is not None:
                break
            if self.asked.stream:
                seconds = time.monotonic() - began
                yield sse_frame({"object": "document.progress", **progress(event, seconds)})
        stored = await self._keep(reading, tenant)
        told = await self.documents.describe(stored, tenant)
        if self.asked.stream:
            yield sse_frame(told)
            yield sse_frame("[DONE]")
        else:
            yield json.dumps(told, ensure_ascii=False).encode()

    async def _keep(self, reading: Reading, tenant: str) -> StoredDocument:
        """The document, when it and its pages are on disk."""
        asked = self.asked
        future = await self.service.worker.call(
            lambda engine: kept.keep(
                engine,
                self.document,
                reading,
                tenant=tenant,
                pinned=bool(asked.pin),
                lifetime=None if asked.expires_after is None else float(asked.expires_after.seconds),
            )
        )
        return await asyncio.wrap_future(future)

    def close(self, gone: bool, error: ApiError | None) -> None:
        """The call has ended: see LongResponse.on_close."""
        self.call.code, self.call.gone = error.code if error is not None else None, gone
        if self.job is not None:
            self.service.worker.leave(self.job)
            self.call.usage = self.usage


def _document_of(asked: DocumentRequest, data: bytes | None) -> Document:
    """Raises ApiError where there is not one document, or it cannot be read."""
    given = [data is not None, asked.text is not None, asked.file_data is not None]
    if sum(given) != 1:
        raise bad_field(
            "file", f"{sum(given)} documents were given.", "Give one of text, file_data or a file."
        )
    name = asked.name or "document"
    if data is not None:
        return read_upload(name, data)
    if asked.text is not None:
        return text_document(name, asked.text)
    return decode_file(name, asked.file_data or "")


def _from_form(fields: Mapping[str, str | tuple[str, bytes]]) -> tuple[dict[str, Any], bytes | None]:
    """The fields of a form as JSON would have them, and its file. OpenAI's purpose says nothing here."""
    document: dict[str, Any] = {}
    data = None
    for name, value in fields.items():
        if isinstance(value, tuple):
            if name != "file":
                raise bad_field(name, f"{name} is a file.", "The file of a form is its field file.")
            document.setdefault("name", value[0])
            data = value[1]
        elif name.startswith("expires_after["):
            key = name.removeprefix("expires_after[").removesuffix("]")
            plain = int(value) if value.isascii() and value.isdigit() and len(value) < 12 else value
            document.setdefault("expires_after", {})[key] = plain
        elif name == "name":
            document["name"] = value
        else:
            document[name] = _FLAGS.get(value, value)
    return document, data
