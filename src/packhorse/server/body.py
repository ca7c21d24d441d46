"""Reads the body of a request: bounded in size and time, and JSON that means one thing only."""

from __future__ import annotations

import asyncio
import json
from email import message_from_string
from email.message import Message
from typing import Any

from starlette.requests import ClientDisconnect, Request

from packhorse.core.units import format_bytes
from packhorse.server.errors import ApiError

IN_LOOP_BYTES = 1 << 16
"""Bodies up to this size are parsed in the event loop; it takes a millisecond or two."""


async def read_json(request: Request, limit: int, timeout: float) -> dict[str, Any]:
    """The JSON object of the body.

    Raises ApiError: 415 for another content type, 413 above `limit` bytes, 408 where it takes longer than
    `timeout` seconds, 400 for anything but one well-formed JSON object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        # A web page may send forms and plain text to this address without being asked, but not JSON.
        raise ApiError(
            415, "content_type", f"The content type is {kind!r}; send application/json.", param="content-type"
        )
    body = await read_body(request, limit, timeout)
    if len(body) > IN_LOOP_BYTES:
        return await asyncio.to_thread(parse_json, body)
    return parse_json(body)


async def read_body(request: Request, limit: int, timeout: float) -> bytes:
    """The body as it is. Raises ApiError: 413 above `limit` bytes, 408 after `timeout` seconds."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError as error:
        message = f"The body did not arrive within {timeout:g} s."
        raise ApiError(408, "body_timeout", message, headers={"connection": "close"}) from error
    except ClientDisconnect as error:
        raise ApiError(400, "disconnected", "The client left while it sent the body.") from error
    return b"".join(parts)


def parse_json(body: bytes) -> dict[str, Any]:
    """One JSON object. Raises ApiError for invalid UTF-8, bad syntax, nesting beyond Python's own limit,
    a key given twice, NaN, numbers of thousands of digits, half a surrogate pair, and anything but an object.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_json(f"it is not valid UTF-8 at byte {error.start}") from error
    try:
        document = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError as error:
        raise _not_json("it is nested too deep") from error
    except json.JSONDecodeError as error:
        raise _not_json(f"{error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:  # integers of more digits than Python converts
        raise _not_json("a number has too many digits") from error
    if not isinstance(document, dict):
        raise _not_json("it is not an object")
    if "\\u" in text:
        try:
            # No text encoding can carry half a surrogate pair.
            json.dumps(document, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise _not_json("a string holds half a surrogate pair (\\ud800 to \\udfff)") from error
        except RecursionError as error:
            raise _not_json("it is nested too deep") from error
    return document


def parse_form(body: bytes, content_type: str) -> dict[str, str | tuple[str, bytes]]:
    """The fields of a multipart/form-data body by name; those that are files as their name and bytes.

    Raises ApiError for a body without parts or a part without a name, and for a field given twice.
    """
    head = Message()
    head["content-type"] = content_type
    boundary = str(head.get_param("boundary") or "").encode()
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary)
    if not boundary or len(parts) < 3 or not parts[-1].startswith(b"--"):
        raise ApiError(400, "invalid_form", "The body is no multipart/form-data: a boundary is missing.")
    fields: dict[str, str | tuple[str, bytes]] = {}
    for part in parts[1:-1]:
        headers, _, data = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        about = message_from_string(headers.decode("utf-8", "replace"))
        name = about.get_param("name", header="content-disposition")
        if not isinstance(name, str) or name in fields:
            problem = "has no name" if name is None else f"is given twice: {str(name)[:80]!r}"
            raise ApiError(400, "invalid_form", f"A part of the form {problem}.")
        file = about.get_filename()
        if file is not None:
            fields[name] = (file, data)
        else:
            fields[name] = data.decode("utf-8", "replace")
    return fields


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _not_json(f"the key {twice[:80]!r} is given twice")
    return document


def _constant(name: str) -> None:
    raise _not_json(f"{name} is not JSON")


def _not_json(why: str) -> ApiError:
    return ApiError(400, "invalid_json", f"The body is not a JSON object: {why}.")


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        "body_too_large",
        f"The body is larger than {format_bytes(limit)}. The server's body_limit sets this, and its document_limit "
        "where a document is added.",
        facts={"limit_bytes": limit},
        headers={"connection": "close"},
    )
