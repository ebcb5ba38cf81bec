"""What a request is answered with when it is wrong, or when a replica fails: every error has one shape."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from cache_index.messages import GenerationChunk, GenerationRequest, Refusal, RefusalCode
from router.errors import OverloadedError, ReplicaFaultError, ReplicaLostError
from router.settings import GatewaySettings
from tests.unit.api.answers import CHAT, COMPLETION, assert_is_error, chunk, events_of, never, once_then_never


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'{"model": NaN}', b"[" * 60_000, b'{"model": "\\ud800"}'], ids=repr
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_malformed_body_is_a_400(http: httpx.AsyncClient, path: str, body: bytes) -> None:
    error = assert_is_error(await http.post(path, content=body), 400, "invalid_request_error")
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"messages": [{"role": "tool", "content": "42"}]}, "messages"),
    ],
)
async def test_a_parameter_that_is_not_acceptable_is_a_400_that_names_it(
    http: httpx.AsyncClient, replicas: Any, change: dict[str, Any], param: str
) -> None:
    response = await http.post("/v1/chat/completions", json=CHAT | change)
    assert assert_is_error(response, 400, "invalid_request_error")["param"] == param
    assert replicas.requests == []


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"], [10**9], "\ud800"])
async def test_a_prompt_that_is_not_acceptable_is_a_400(http: httpx.AsyncClient, prompt: Any) -> None:
    body = json.dumps(COMPLETION | {"prompt": prompt}).encode()
    assert_is_error(await http.post("/v1/completions", content=body), 400, "invalid_request_error")


async def test_a_prompt_over_the_context_is_a_400_and_a_huge_max_tokens_is_not(http: httpx.AsyncClient) -> None:
    full = await http.post("/v1/completions", json=COMPLETION | {"prompt": [5] * 512, "max_tokens": 2**62})
    assert full.status_code == 200
    over = await http.post("/v1/completions", json=COMPLETION | {"prompt": [5] * 513})
    assert_is_error(over, 400, "context_length_exceeded")


async def test_an_unknown_model_is_a_404(http: httpx.AsyncClient) -> None:
    error = assert_is_error(
        await http.post("/v1/completions", json=COMPLETION | {"model": "x"}), 404, "model_not_found"
    )
    assert error["param"] == "model"
    assert_is_error(await http.get("/v1/models/x"), 404, "model_not_found")


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat/completions/", "/v2/models", "/docs", "/%ff"])
async def test_an_unknown_url_is_a_404_with_the_same_body(http: httpx.AsyncClient, path: str) -> None:
    assert_is_error(await http.post(path, json=CHAT), 404, "unknown_url")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/chat/completions"), ("PUT", "/v1/completions"), ("POST", "/health")]
)
async def test_a_wrong_method_is_a_405_that_says_which_are_right(
    http: httpx.AsyncClient, method: str, path: str
) -> None:
    response = await http.request(method, path)
    assert_is_error(response, 405, "method_not_supported")
    assert response.headers["allow"]


async def test_a_body_over_the_bound_is_a_413_whether_announced_or_not(http: httpx.AsyncClient) -> None:
    async def unannounced() -> AsyncIterator[bytes]:
        for _ in range(65):
            yield b" " * 1024

    assert_is_error(await http.post("/v1/completions", content=b" " * (64 * 1024 + 1)), 413, "request_too_large")
    assert_is_error(await http.post("/v1/completions", content=unannounced()), 413, "request_too_large")
    # At the bound it is read, and found to be empty.
    assert_is_error(await http.post("/v1/completions", content=b" " * 64 * 1024), 400, "invalid_request_error")


async def test_an_error_nobody_foresaw_is_a_500_that_tells_its_id_and_nothing_else(
    http: httpx.AsyncClient, replicas: Any
) -> None:
    async def script(_: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        raise RuntimeError("a secret of the server")
        yield

    replicas.script = script
    response = await http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"})
    error = assert_is_error(response, 500, "internal_error")
    assert "mine-1" in error["message"]
    assert "secret" not in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "answer_code"),
    [
        (RefusalCode.INVALID_REQUEST, 400, "invalid_request_error"),
        (RefusalCode.CONTEXT_LENGTH_EXCEEDED, 400, "context_length_exceeded"),
        (RefusalCode.OVERLOADED, 503, "overloaded"),
        (RefusalCode.INTERNAL, 500, "internal_error"),
    ],
)
async def test_a_refusal_before_the_first_chunk_decides_the_status(
    http: httpx.AsyncClient, replicas: Any, stream: bool, code: RefusalCode, status: int, answer_code: str
) -> None:
    async def script(_: GenerationRequest) -> AsyncIterator[Refusal]:
        yield Refusal("replica-1", code, "because")

    replicas.script = script
    response = await http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert_is_error(response, status, answer_code)
    assert ("retry-after" in response.headers) == (status == 503)


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (Refusal("replica-1", RefusalCode.INTERNAL, "because"), "internal_error"),
        (ReplicaLostError("it is gone"), "unavailable"),
        (RuntimeError("unforeseen"), "internal_error"),
        (None, "unavailable"),
    ],
    ids=["refusal", "lost", "unforeseen", "broken off"],
)
async def test_a_failure_after_the_first_chunk_is_the_streams_last_event(
    http: httpx.AsyncClient, replicas: Any, failure: Any, code: str
) -> None:
    async def script(_: GenerationRequest) -> AsyncIterator[GenerationChunk | Refusal]:
        yield chunk("the")
        if isinstance(failure, Exception):
            raise failure
        if failure is not None:
            yield failure

    replicas.script = script
    response = await http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert response.status_code == 200
    events = events_of(response)
    assert [event["choices"][0]["delta"] for event in events[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "the"},
    ]
    assert events[-1]["error"]["code"] == code
    assert len(replicas.requests) == 1


async def test_the_same_failure_of_a_whole_answer_is_its_status(http: httpx.AsyncClient, replicas: Any) -> None:
    async def script(_: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        yield chunk("the")
        raise ReplicaLostError("it is gone")

    replicas.script = script
    assert_is_error(await http.post("/v1/chat/completions", json=CHAT), 503, "unavailable")


@pytest.mark.parametrize("failure", [ReplicaLostError("gone"), ReplicaFaultError("failed")])
async def test_a_replica_that_fails_before_its_first_chunk_is_replaced(
    http: httpx.AsyncClient, replicas: Any, failure: Exception
) -> None:
    async def script(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        if len(replicas.requests) < 3:
            raise failure
        async for item in replicas.echo(request):
            yield item

    replicas.script = script
    assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert len({request.request_id for request in replicas.requests}) == 3


async def test_only_so_many_replicas_are_tried(http: httpx.AsyncClient, replicas: Any) -> None:
    async def script(_: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        raise ReplicaLostError("gone")
        yield

    replicas.script = script
    assert_is_error(await http.post("/v1/chat/completions", json=CHAT), 503, "unavailable")
    assert len(replicas.requests) == GatewaySettings().generation_attempts_max


async def test_an_overloaded_cluster_is_not_asked_again(http: httpx.AsyncClient, replicas: Any) -> None:
    async def script(_: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        raise OverloadedError("full", retry_after_s=7)
        yield

    replicas.script = script
    response = await http.post("/v1/chat/completions", json=CHAT)
    assert_is_error(response, 503, "overloaded")
    assert response.headers["retry-after"] == "7"
    assert len(replicas.requests) == 1


async def test_a_prompt_that_waits_too_long_for_its_first_token_is_a_503(
    make_api: Callable[..., Awaitable[FastAPI]], replicas: Any
) -> None:
    app = await make_api(first_token_timeout_s=0.05)
    replicas.script = never
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as http:
        assert_is_error(await http.post("/v1/chat/completions", json=CHAT), 503, "overloaded")
    assert len(replicas.cancelled) == 1


async def test_a_generation_that_takes_too_long_ends_and_says_so(
    make_api: Callable[..., Awaitable[FastAPI]], replicas: Any
) -> None:
    app = await make_api(request_timeout_s=0.05)
    replicas.script = once_then_never
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as http:
        assert_is_error(await http.post("/v1/chat/completions", json=CHAT), 504, "timeout")
        events = events_of(await http.post("/v1/chat/completions", json=CHAT | {"stream": True}))
    assert events[-1]["error"]["code"] == "timeout"
    assert len(replicas.cancelled) == 2
