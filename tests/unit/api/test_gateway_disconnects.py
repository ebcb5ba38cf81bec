"""Clients that leave: whatever they wait for, their generation ends and their place is free."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from cache_index.messages import GenerationChunk, GenerationRequest
from tests.unit.api.answers import CHAT, assert_is_error, never, once_then_never


class Connection:
    """One request, driven message by message, as a server drives an application."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self.sent: list[Any] = []
        self.has_sent_body = asyncio.Event()
        self._leaves = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "root_path": ""}
        self.served = asyncio.create_task(app(scope, self._receive, self._send))

    def leave(self) -> None:
        self._leaves.set()

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body":
            self.has_sent_body.set()


async def test_a_client_that_leaves_a_stream_cancels_its_generation(api: FastAPI, replicas: Any) -> None:
    replicas.script = once_then_never
    connection = Connection(api, "/v1/chat/completions", CHAT | {"stream": True})
    await connection.has_sent_body.wait()
    assert replicas.cancelled == []
    connection.leave()
    await connection.served
    assert replicas.cancelled == [replicas.requests[0].request_id]


@pytest.mark.parametrize("script", [never, once_then_never])
async def test_so_does_one_that_waits_for_a_whole_answer(api: FastAPI, replicas: Any, script: Any) -> None:
    begun = asyncio.Event()

    async def begin(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        begun.set()
        async for item in script(request):
            yield item

    replicas.script = begin
    connection = Connection(api, "/v1/chat/completions", CHAT)
    await begun.wait()
    connection.leave()
    await connection.served
    assert replicas.cancelled == [replicas.requests[0].request_id]
    assert connection.sent == []


async def test_a_server_that_cancels_the_request_cancels_the_generation(api: FastAPI, replicas: Any) -> None:
    replicas.script = once_then_never
    connection = Connection(api, "/v1/chat/completions", CHAT | {"stream": True})
    await connection.has_sent_body.wait()
    connection.served.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.served
    assert replicas.cancelled == [replicas.requests[0].request_id]


async def test_a_client_that_stays_cancels_nothing(api: FastAPI, replicas: Any) -> None:
    connection = Connection(api, "/v1/chat/completions", CHAT | {"stream": True})
    await connection.served
    assert replicas.closed.is_set()
    assert replicas.cancelled == []


async def test_one_stream_too_many_is_a_503_until_another_ends(
    make_api: Callable[..., Awaitable[FastAPI]], replicas: Any
) -> None:
    app = await make_api(streams_max=1, overloaded_retry_after_s=3)
    replicas.script = once_then_never
    first = Connection(app, "/v1/chat/completions", CHAT | {"stream": True})
    await first.has_sent_body.wait()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as http:
        refused = await http.post("/v1/chat/completions", json=CHAT)
        assert_is_error(refused, 503, "overloaded")
        assert refused.headers["retry-after"] == "3"
        assert (await http.get("/v1/models")).status_code == 200
        first.leave()
        await first.served
        replicas.script = None
        for _ in range(3):
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
            assert_is_error(await http.post("/v1/chat/completions", content=b"{"), 400, "invalid_request_error")
