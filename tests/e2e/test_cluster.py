"""The whole path over HTTP: the official client, prefix-aware routing, exact reuse, errors, and leaving early."""

import asyncio
import contextlib
import json
import random
import socket
import string
import time
import urllib.request
from typing import Any

import openai
import pytest

from tests.http_cluster import MODEL, Cluster
from tests.tiny_models import LONG_CONTEXT

BLOCK_SIZE = 16
NUM_PLACES = 2 * 8


def words(count: int, seed: int) -> str:
    """Text of `count` letters; a letter is about a token of the tiny model."""
    chosen = random.Random(seed)
    return "".join(chosen.choice(string.ascii_uppercase) for _ in range(count))


@pytest.fixture
def client(cluster: Cluster) -> Any:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_cluster_says_where_it_is_and_how_to_ask_it(cluster: Cluster) -> None:
    text = "\n".join(cluster.lines)
    assert cluster.url in text
    assert "curl" in text
    assert "dashboard" in text.lower()


def test_health_and_models_name_the_model(cluster: Cluster, client: openai.OpenAI) -> None:
    status, health = cluster.get("/health")
    assert (status, health["model"]) == (200, MODEL)
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_the_official_client_chats_whole_and_streamed_with_the_same_text(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": words(40, seed=1)},
        {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "sea"}]},
    ]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage is not None
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens // BLOCK_SIZE * BLOCK_SIZE


def test_the_official_client_completes_and_gets_its_own_errors(client: openai.OpenAI) -> None:
    completion = client.completions.create(model=MODEL, prompt=words(30, seed=2), max_tokens=5, temperature=0)
    assert completion.usage is not None
    assert 1 <= completion.usage.completion_tokens <= 5
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="another", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=MODEL, prompt=[5] * (LONG_CONTEXT + 1))
    assert too_long.value.code == "context_length_exceeded"


def test_requests_that_share_a_prefix_go_to_one_replica_and_say_what_they_reused(cluster: Cluster) -> None:
    prefix = [10 + index % 200 for index in range(6 * BLOCK_SIZE)]
    cold_text, cold = cluster.complete([*prefix, 1, 2, 3])
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    for _ in range(6):
        warm_text, warm = cluster.complete([*prefix, 1, 2, 3])
        assert warm["prompt_tokens_details"]["cached_tokens"] == 6 * BLOCK_SIZE
        assert warm_text == cold_text
    for own in range(6):
        _, usage = cluster.complete(prefix + [20 + own] * 5)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 6 * BLOCK_SIZE


def test_prompts_that_share_nothing_use_both_replicas(cluster: Cluster) -> None:
    replicas = set()
    for seed in range(16):
        body = json.dumps({"model": MODEL, "prompt": words(80, 100 + seed), "max_tokens": 1}).encode()
        replicas.add(_header(cluster, "/v1/completions", body, "x-warmroute-replica"))
    assert len(replicas) == 2


def _header(cluster: Cluster, path: str, body: bytes, name: str) -> str | None:
    request = urllib.request.Request(cluster.url + path, data=body, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        value: str | None = response.headers[name]
        return value


def test_a_cache_salt_shares_with_itself_only(cluster: Cluster) -> None:
    prompt = [30 + index % 150 for index in range(5 * BLOCK_SIZE)] + [7]
    text, _ = cluster.complete(prompt)
    salted_text, salted = cluster.complete(prompt, cache_salt="one")
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0
    assert salted_text == text
    _, again = cluster.complete(prompt, cache_salt="one")
    assert again["prompt_tokens_details"]["cached_tokens"] == 5 * BLOCK_SIZE


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/chat/completions", b"{", 400, "invalid_request_error"),
        ("/v1/chat/completions", b"\xff\xfe", 400, "invalid_request_error"),
        ("/v1/chat/completions", {"model": MODEL, "messages": []}, 400, "invalid_request_error"),
        ("/v1/chat/completions", {"model": MODEL, "messages": "hi"}, 400, "invalid_request_error"),
        ("/v1/completions", {"model": MODEL, "prompt": ""}, 400, "invalid_request_error"),
        ("/v1/completions", {"model": MODEL, "prompt": []}, 400, "invalid_request_error"),
        ("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": -1}, 400, "invalid_request_error"),
        ("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 2**70}, 400, "invalid_request_error"),
        ("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": "5"}, 400, "invalid_request_error"),
        ("/v1/completions", {"model": MODEL, "prompt": "x", "temperatur": 1}, 400, "invalid_request_error"),
        ("/v1/completions", {"model": MODEL, "prompt": [2**31]}, 400, "invalid_request_error"),
        ("/v1/completions", {"model": MODEL, "prompt": [5] * (LONG_CONTEXT + 1)}, 400, "context_length_exceeded"),
        ("/v1/completions", {"model": "other", "prompt": "x"}, 404, "model_not_found"),
    ],
)
def test_bad_input_gets_its_status_and_an_openai_error(
    cluster: Cluster, path: str, body: Any, status: int, code: str
) -> None:
    got, answer = cluster.post(path, body)
    assert (got, answer["error"]["code"]) == (status, code), answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_a_huge_max_tokens_is_bounded_by_the_context(cluster: Cluster) -> None:
    _, usage = cluster.complete([5] * (LONG_CONTEXT - 3), max_tokens=2**40)
    assert usage["completion_tokens"] == 4


def test_clients_that_leave_free_their_places(cluster: Cluster) -> None:
    """Streams far longer than this test are opened until a replica is full; once they hang up, it takes requests."""
    host, port = cluster.url.removeprefix("http://").split(":")
    endless = {"model": MODEL, "max_tokens": LONG_CONTEXT, "stream": True, "ignore_eos": True, "temperature": 0}
    connections: list[socket.socket] = []
    refused: list[int] | None = None
    for index in range(64):
        body = json.dumps({**endless, "prompt": [index + 10] * 20}).encode()
        connection = socket.create_connection((host, int(port)), timeout=60)
        connections.append(connection)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        # A stream that waits for its turn has no status yet; whoever is refused has one at once.
        connection.settimeout(2.0 if index < NUM_PLACES else 60.0)
        with contextlib.suppress(TimeoutError):
            status = connection.recv(16)
            if status.startswith(b"HTTP/1.1 503"):
                refused = [index + 10] * 20
                break
            assert status.startswith(b"HTTP/1.1 200")
    assert refused is not None, "the replicas have fewer places than streams were opened"
    assert cluster.post("/v1/completions", {**endless, "prompt": refused, "stream": False})[0] == 503
    for connection in connections:
        connection.close()
    deadline_s = time.monotonic() + 20
    while (
        status_code := cluster.post("/v1/completions", {"model": MODEL, "prompt": refused, "max_tokens": 1})[0]
    ) != 200:
        assert status_code == 503
        assert time.monotonic() < deadline_s, "the engines still work for clients that are gone"
        time.sleep(0.1)  # Over HTTP there is no event for a place that becomes free.


def test_many_streams_at_once_all_end_right(cluster: Cluster) -> None:
    prefix = [40 + index % 100 for index in range(4 * BLOCK_SIZE)]
    prompts = [[*prefix, 200 + index] for index in range(12)]
    expected = [cluster.complete(prompt, max_tokens=16)[0] for prompt in prompts]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:

            async def ask(prompt: list[int]) -> str:
                stream = await client.completions.create(
                    model=MODEL,
                    prompt=prompt,
                    max_tokens=16,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

            return await asyncio.gather(*[ask(prompt) for prompt in prompts])

    assert asyncio.run(ask_all()) == expected
