"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code", ...}}` and the right status."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from packhorse.core.errors import (
    CancelledRequestError,
    CardLostError,
    DocumentError,
    PackhorseError,
    PromptTooLongError,
    TokenizerError,
    UsageError,
)
from packhorse.server.worker import StoppedError

TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
"""Of errors by status; others are invalid_request_error, and from 500 on server_error."""


@dataclass(eq=False)
class ApiError(Exception):
    """An answer that is an error. param: the field at fault. facts: further keys of the error object."""

    status: int
    code: str
    message: str
    _: KW_ONLY
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def body(self, request_id: str) -> dict[str, Any]:
        """The JSON document."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        error = {
            "message": self.message,
            "type": TYPES.get(self.status, default),
            "param": self.param,
            "code": self.code,
            "request_id": request_id,
            **self.facts,
        }
        return {"error": error}

    def response(self, request_id: str) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(request_id), self.status, headers=self.headers)


def bad_field(name: str, reason: str, hint: str = "", code: str = "invalid_value") -> ApiError:
    """400 for one field of the request."""
    return ApiError(400, code, f"{reason} {hint}".strip(), param=name)


def too_long(error: PromptTooLongError, param: str, hint: str) -> ApiError:
    """400 for a field that makes the prompt longer than the window."""
    # Clients look for the first words: they shorten the prompt and try again.
    message = f"This model's maximum context length is {error.available} tokens. {error} {hint}".strip()
    counts = {"asked": error.asked, "available": error.available, "unit": error.unit}
    return ApiError(400, "context_length_exceeded", message, param=param, facts=counts)


def to_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error. Texts of our own errors are for users; those of others stay in the
    log, under the request's id."""
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        return ApiError(error.status_code, code, str(error.detail), headers=dict(error.headers or {}))
    if isinstance(error, PromptTooLongError):
        told = "left out" in message
        hint = "" if told else 'A chat may send truncation: "auto" to leave out old turns.'
        return too_long(error, "messages", hint)
    if isinstance(error, StoppedError | CancelledRequestError | CardLostError):
        return ApiError(503, error.kind, message, headers={"retry-after": "5"})
    if isinstance(error, UsageError):
        name = error.facts.get("field")
        return ApiError(400, error.kind, message, param=name if isinstance(name, str) else None)
    if isinstance(error, TokenizerError):
        # The template was stopped over these messages: the caller's text, or the template, is at fault.
        return ApiError(400, error.kind, message, param="messages")
    if isinstance(error, DocumentError):
        return ApiError(400, error.kind, message, param="file")
    if isinstance(error, PackhorseError):
        status = 400 if error.exit_code == 3 else 500
        return ApiError(status, error.kind, message)
    return ApiError(500, "internal_error", "A fault of the server; its log has more under this request's id.")
