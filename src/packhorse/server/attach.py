"""Documents inside messages: OpenAI's `file` parts and Anthropic's `document` parts become text.

{"type": "file", "file": {"file_id": "doc-..."} | {"filename": ..., "file_data": base64 or a data: URL}}
{"type": "document", "title": ..., "source": {"type": "file", "file_id": ...} | {"type": "text" | "base64", ...}}
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from packhorse.core.errors import DocumentError
from packhorse.server.errors import ApiError, bad_field
from packhorse.text.documents import Document, document_text, parse_document, parse_text

Find = Callable[[str], Document]
"""The caller's document of an id. Raises ApiError where there is none."""

KINDS = ("file", "input_file", "document")
_FIELD = "messages.content"


def attach(
    messages: Sequence[Mapping[str, Any]], find: Find
) -> tuple[list[dict[str, Any]], list[Document], bool]:
    """The messages with text in place of their documents; the documents; whether one of them asks for citations.

    Raises ApiError for parts of another shape, files that cannot be read, and what `find` raises.
    """
    documents: list[Document] = []
    cite = False
    made = []
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list):
            made.append(dict(message))
            continue
        parts: list[Any] = []
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") not in KINDS:
                parts.append(part)
                continue
            document = _document(part, find)
            documents.append(document)
            wish = part.get("citations")
            cite |= isinstance(wish, Mapping) and wish.get("enabled") is True
            parts.append({"type": "text", "text": document_text(document)})
        made.append({**message, "content": parts})
    return made, documents, cite


def decode_file(name: str, data: str) -> Document:
    """The document in base64, alone or in a data: URL. Raises ApiError."""
    head, comma, rest = data.partition(",")
    if comma and not (head.startswith("data:") and head.endswith(";base64")):
        raise bad_field("file_data", "file_data is no base64.", "Send base64, or data:TYPE;base64,...")
    try:
        content = base64.b64decode(rest if comma else data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_field("file_data", f"file_data is no base64: {error}.") from error
    return read_upload(name, content)


def read_upload(name: str, data: bytes, parse: Callable[[str, bytes], Document] = parse_document) -> Document:
    """The document that a caller's file is. Raises ApiError where it cannot be read."""
    try:
        return parse(_plain_name(name), data)
    except DocumentError as error:
        raise ApiError(400, error.kind, str(error), param="file") from error


def text_document(name: str, text: str) -> Document:
    """A document of text, whatever its name ends with. Raises ApiError where it is empty or no text."""
    return replace(read_upload(name, text.encode(), parse_text), name=_plain_name(name))


def _plain_name(name: str) -> str:
    """A name for one line of a prompt."""
    return "".join(c for c in name if c.isprintable())[:200].strip() or "document"


def _document(part: Mapping[str, Any], find: Find) -> Document:
    if part["type"] == "document":
        source = part.get("source")
        _check(part, {"type", "title", "source", "citations", "cache_control"})
        title = _string(part, "title") or "document"
        kind = source.get("type") if isinstance(source, Mapping) else None
        if not isinstance(source, Mapping) or kind not in ("file", "text", "base64"):
            raise bad_field(_FIELD, f"A document's source is of type {kind!r}.", "Send file, text or base64.")
        if kind == "text":
            return text_document(title, _needed(source, "data"))
        if kind == "base64":
            return decode_file(title, _needed(source, "data"))
        return find(_needed(source, "file_id"))
    file = part.get("file") if part["type"] == "file" else part
    if not isinstance(file, Mapping):
        raise bad_field(
            _FIELD, "A part of type file has no file.", "Give file_id, or filename and file_data."
        )
    _check(file, {"type", "file_id", "filename", "file_data"})
    name = _string(file, "file_id")
    if name is not None:
        return find(name)
    return decode_file(_string(file, "filename") or "document", _needed(file, "file_data"))


def _check(part: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(key for key, value in part.items() if key not in known and value is not None)
    if unknown:
        reason = f"{unknown[0]!r} of a document is not supported."
        raise bad_field(_FIELD, reason, "Leave it out.", code="unsupported_field")


def _string(part: Mapping[str, Any], name: str) -> str | None:
    value = part.get(name)
    if value is not None and not isinstance(value, str):
        raise bad_field(_FIELD, f"{name} of a document is no text.")
    return value


def _needed(part: Mapping[str, Any], name: str) -> str:
    value = _string(part, name)
    if not value:
        raise bad_field(_FIELD, f"{name} of a document is missing.")
    return value
