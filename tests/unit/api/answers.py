"""Requests, chunks and readers of answers that the tests of the application share."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from cache_index.messages import FinishReason, GenerationChunk, GenerationRequest

MODEL = "acme/tiny"
MAX_MODEL_LEN = 512
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
CHAT = {"model": MODEL, "messages": MESSAGES}
COMPLETION = {"model": MODEL, "prompt": "the quick brown fox"}


def chunk(text: str, reason: FinishReason | None = None) -> GenerationChunk:
    return GenerationChunk("replica-1", (5,), text, 3, reason)


def assert_is_error(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Every error of every route has this one shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["message"]
    return error


def events_of(response: httpx.Response) -> list[Any]:
    """The stream's events, parsed; [DONE] stays text."""
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") for event in events)
    contents = [event.removeprefix("data: ") for event in events]
    return [content if content == "[DONE]" else json.loads(content) for content in contents]


async def never(_: GenerationRequest) -> AsyncIterator[GenerationChunk]:
    """A replica that is never done with the prompt."""
    await asyncio.Event().wait()
    yield chunk("")


async def once_then_never(_: GenerationRequest) -> AsyncIterator[GenerationChunk]:
    """A replica that begins and then hangs."""
    yield chunk("the")
    await asyncio.Event().wait()
