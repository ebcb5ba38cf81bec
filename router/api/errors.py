"""The one table from errors to HTTP, and OpenAI's error body.

`type` is OpenAI's word for a class of errors; `code` says which one (DESIGN section 10). Every route answers every
error with this body: an unknown URL, a wrong method and a fault of ours too.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..errors import (
    BodyTooLargeError,
    ContextLengthExceededError,
    DeadlineExceededError,
    InvalidRequestError,
    ModelNotFoundError,
    NoReplicaError,
    OverloadedError,
    ReplicaLostError,
    RequestError,
)

__all__ = ["ErrorAnswer", "answer_to", "answer_to_http"]


@dataclass(frozen=True, slots=True)
class _Row:
    status: int
    type: str
    code: str


_INTERNAL = _Row(500, "server_error", "internal_error")

_TABLE: Mapping[type[Exception], _Row] = {
    InvalidRequestError: _Row(400, "invalid_request_error", "invalid_request_error"),
    ContextLengthExceededError: _Row(400, "invalid_request_error", "context_length_exceeded"),
    ModelNotFoundError: _Row(404, "invalid_request_error", "model_not_found"),
    BodyTooLargeError: _Row(413, "invalid_request_error", "request_too_large"),
    OverloadedError: _Row(503, "server_error", "overloaded"),
    NoReplicaError: _Row(503, "server_error", "unavailable"),
    ReplicaLostError: _Row(503, "server_error", "unavailable"),
    DeadlineExceededError: _Row(504, "server_error", "timeout"),
}
"""A class that is not here, ReplicaFaultError and every error that nobody foresaw among them, is a fault of ours."""

_HTTP_TABLE: Mapping[int, _Row] = {
    404: _Row(404, "invalid_request_error", "unknown_url"),
    405: _Row(405, "invalid_request_error", "method_not_supported"),
}


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error as a client sees it."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """OpenAI's error object. ASCII, for a message may repeat what can't be encoded otherwise."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode("ascii")

    def to_response(self) -> Response:
        return Response(self.to_json(), self.status, headers=dict(self.headers), media_type="application/json")


def answer_to(error: Exception, request_id: str) -> ErrorAnswer:
    """The answer to an error of ours. What a fault says is for the log: its client is told only the request's id."""
    row = next((_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE), _INTERNAL)
    message = str(error)
    if row is _INTERNAL:
        message = f"The server had an error while processing your request. Its id is {request_id}."
    return ErrorAnswer(
        row.status,
        row.type,
        row.code,
        message,
        error.param if isinstance(error, RequestError) else None,
        {"retry-after": str(error.retry_after_s)} if isinstance(error, OverloadedError) else {},
    )


def answer_to_http(error: HTTPException, method: str, path: str) -> ErrorAnswer:
    """The answer to an error that the web framework found: no such route, or not with this method."""
    row = _HTTP_TABLE.get(error.status_code)
    match error.status_code:
        case 404:
            message = f"Invalid URL ({method} {path})"
        case 405:
            message = f"Not allowed to {method} on {path}. Perhaps you meant to use a different HTTP method?"
        case _:
            message = str(error.detail)
    row = row or _Row(error.status_code, "invalid_request_error", "invalid_request_error")
    return ErrorAnswer(row.status, row.type, row.code, message, headers=dict(error.headers or {}))
