"""One HTTP request: its id, its bounded body, and whether its client is still there. Knows nothing of models."""

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import Coroutine

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import BodyTooLargeError
from .errors import answer_to

__all__ = ["RequestBoundary", "read_body", "request_id_of", "while_connected"]

logger = logging.getLogger(__name__)

# What is repeated in headers, logs and Ray's own records: a short token, or the client's is not taken.
_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


class RequestBoundary:
    """ASGI middleware around the whole application: every request has an id, and every fault an answer.

    echo_request_id: send the id back as `x-request-id`; off where the server in front does that itself, because a
    header that comes twice reads as "id, id".
    """

    def __init__(self, app: ASGIApp, echo_request_id: bool) -> None:
        self._app = app
        self._echo_request_id = echo_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        request_id = sent if _SANE_REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                if self._echo_request_id:
                    MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            logger.debug("request %s: the client left", request_id)
        except Exception as error:
            logger.exception("request %s failed", request_id)
            if has_started:
                raise
            await answer_to(error, request_id).to_response()(scope, receive, send_with_id)


def request_id_of(scope: Scope) -> str:
    """The id that `RequestBoundary` gave the request."""
    request_id: str = scope["state"]["request_id"]
    return request_id


async def read_body(request: Request, *, bytes_max: int) -> bytes:
    """The whole body. Raises BodyTooLargeError as soon as it is known to be longer than `bytes_max`."""
    too_large = BodyTooLargeError(f"The request body is larger than {bytes_max} bytes, the most that is read here.")
    announced = request.headers.get("content-length", "")
    # Of a length that is no number, or that is a lie, the server in front or the count below takes care.
    if announced.isdecimal() and len(announced) < 20 and int(announced) > bytes_max:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > bytes_max:
            raise too_large
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Run `work`; cancel it when the client leaves, and raise ClientDisconnect once it has cleaned up.

    The request's body must have been read: from then on the only news a client can send is that it left.
    Raises whatever `work` raises.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        await working
    finally:
        # Also where this task is itself cancelled, which is how some servers say that the client left.
        for task in (working, watching):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
