"""Answers that take long: kept alive while nothing comes, given up when the client has gone.

    frames --> | first one, or keep_alive s | --> status and headers --> body, with fillers in the gaps
                                client gone, or reading nothing for stall s --> on_close

Until the first frame or filler the status is open, so an error that comes early has its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from packhorse.server.errors import ApiError, to_api_error

JSON_HEADERS = {"content-type": "application/json"}
SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no",
}  # fmt: skip
SSE_FILLER = b": keep-alive\n\n"
JSON_FILLER = b" "
"""Blanks before a document are JSON."""


class BrokenAnswerError(Exception):
    """An answer has failed after its status was sent: the connection is cut, lest anybody take it whole."""


class LongResponse(Response):
    """A response made of frames that come late.

    frames: bytes in order; the first, which may be empty, says that the call is in order: before it nothing
    is sent. An error that they raise becomes an error answer. on_close(gone, error) is called once,
    at the end: gone where the client left first, error where the frames ended in one.
    """

    def __init__(
        self, frames: AsyncGenerator[bytes], *, request_id: str, sse: bool, keep_alive: float, stall: float,
        on_close: Callable[[bool, ApiError | None], None], headers: dict[str, str],
    ) -> None:  # fmt: skip
        self.frames = frames
        self.request_id = request_id
        self.sse = sse
        self.keep_alive = keep_alive
        self.stall = stall
        self.on_close = on_close
        self.status_code = 200
        self.background = None
        self.init_headers({**(SSE_HEADERS if sse else JSON_HEADERS), **headers})
        self._in_order = False
        self._started = False
        self._error: ApiError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop where the client goes."""
        gone = asyncio.ensure_future(_disconnected(receive))
        finished = False
        try:
            finished = await self._pump(scope, receive, send, gone)
        except BrokenAnswerError:
            finished = True  # the client is there: it gets no more
            raise
        finally:
            gone.cancel()
            self.on_close(not finished, self._error)
            await self.frames.aclose()

    async def _pump(self, scope: Scope, receive: Receive, send: Send, gone: asyncio.Future[None]) -> bool:
        """Whether everything was sent."""
        filler = SSE_FILLER if self.sse else JSON_FILLER
        while True:
            step: asyncio.Future[bytes | None] = asyncio.ensure_future(anext(self.frames, None))
            try:
                while not step.done():
                    both: set[asyncio.Future[Any]] = {step, gone}
                    patience = self.keep_alive if self._in_order else None
                    waited, _ = await asyncio.wait(
                        both, timeout=patience, return_when=asyncio.FIRST_COMPLETED
                    )
                    if gone in waited:
                        return False
                    if not waited and not await self._send(send, filler):
                        return False
            finally:
                if not step.done():
                    step.cancel()
                    await asyncio.wait({step})
            try:
                frame = step.result()
            except Exception as error:
                await self._fail(scope, receive, send, error)
                return True
            if frame is None:
                await self._send(send, b"", more=False)
                return True
            self._in_order = True
            if frame and not await self._send(send, frame):
                return False

    async def _fail(self, scope: Scope, receive: Receive, send: Send, error: Exception) -> None:
        problem = self._error = to_api_error(error)
        if problem.code == "internal_error":
            print(f"{self.request_id}:", file=sys.stderr)
            traceback.print_exception(error, file=sys.stderr)
        if not self._started:
            await problem.response(self.request_id)(scope, receive, send)
        elif self.sse:
            await self._send(send, sse_frame(problem.body(self.request_id)))
            await self._send(send, sse_frame("[DONE]"), more=False)
        else:
            await self._send(send, json.dumps(problem.body(self.request_id)).encode())
            raise BrokenAnswerError from error

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> bool:
        """False where the client takes nothing for `stall` seconds."""
        try:
            async with asyncio.timeout(self.stall):
                if not self._started:
                    self._started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": body, "more_body": more})
        except (TimeoutError, OSError):
            return False
        return True


def sse_frame(document: Any) -> bytes:
    """One event: a JSON document, or a text as it is."""
    text = document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def ignored_header(names: list[str]) -> dict[str, str]:
    """The fields that were ignored, as a header: what no header can carry, blanks at its ends too, is a ?."""
    plain = ["".join(c if "!" <= c <= "~" else "?" for c in name)[:64] or "?" for name in names[:32]]
    return {"x-packhorse-ignored": ", ".join(plain)} if plain else {}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
