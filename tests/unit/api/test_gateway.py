"""What a request is answered with when all goes well, and the routes beside generation."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from cache_index.embedded import EmbeddedStore
from cache_index.mirror import IndexMirror
from cache_index.settings import IndexSettings
from router.api.app import build_api
from router.errors import NoReplicaError
from router.index_link import IndexLink
from router.settings import GatewaySettings
from tests.unit.api.answers import CHAT, COMPLETION, MODEL, assert_is_error


async def test_a_chat_completion_has_openais_shape(http: httpx.AsyncClient, replicas: Any) -> None:
    response = await http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 6})
    body = response.json()
    prompt = replicas.requests[0].prompt
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": replicas.tokenizer.decode(prompt.token_ids[:6].tolist(), skip_special_tokens=True),
        "refusal": None,
    }
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": prompt.num_tokens,
        "completion_tokens": 6,
        "total_tokens": prompt.num_tokens + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_completion_has_openais_shape_and_default_length(http: httpx.AsyncClient) -> None:
    body = (await http.post("/v1/completions", json=COMPLETION | {"prompt": "lazy dog " * 20})).json()
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"].startswith("lazy dog")
    assert body["usage"]["completion_tokens"] == 16


async def test_cached_tokens_are_what_the_replica_says(http: httpx.AsyncClient) -> None:
    answers = [await http.post("/v1/chat/completions", json=CHAT) for _ in range(2)]
    reused = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert reused[0] == 0
    assert reused[1] > 0
    assert [answer.headers["x-warmroute-cached-tokens"] for answer in answers] == [str(count) for count in reused]
    assert {answer.headers["x-warmroute-replica"] for answer in answers} == {"replica-1"}


async def test_a_cache_salt_splits_the_cache_and_a_key_does_not(http: httpx.AsyncClient) -> None:
    async def cached(salt: str | None, key: str) -> int:
        body = CHAT | {"cache_salt": salt}
        answer = await http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
        return int(answer.headers["x-warmroute-cached-tokens"])

    assert await cached(None, "one key") == 0
    assert await cached("salt", "one key") == 0
    assert await cached(None, "another key") > 0
    assert await cached("salt", "another key") > 0


async def test_the_replica_is_asked_for_what_the_client_asked_for(http: httpx.AsyncClient, replicas: Any) -> None:
    await http.post("/v1/chat/completions", json=CHAT | {"temperature": 0, "seed": 4, "max_completion_tokens": 3})
    sampling = replicas.requests[0].sampling
    assert (sampling.temperature, sampling.seed, sampling.max_tokens) == (0.0, 4, 3)


async def test_the_default_length_of_an_answer_is_a_setting(
    make_api: Callable[..., Awaitable[FastAPI]], replicas: Any
) -> None:
    app = await make_api(default_max_tokens=2)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as http:
        await http.post("/v1/chat/completions", json=CHAT)
        await http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 5})
    assert [request.sampling.max_tokens for request in replicas.requests] == [2, 5]


async def test_a_short_token_is_taken_as_request_id_and_made_unique_for_the_replica(
    http: httpx.AsyncClient, replicas: Any
) -> None:
    for _ in range(2):
        response = await http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "trace_1.a"})
        assert response.headers["x-request-id"] == "trace_1.a"
    first, second = [request.request_id for request in replicas.requests]
    assert first != second
    assert first.startswith("trace_1.a-")


@pytest.mark.parametrize("sent", ["", "a b", "a" * 65, "a/../b", "é".encode()])
async def test_any_other_request_id_is_replaced(http: httpx.AsyncClient, sent: Any) -> None:
    response = await http.get("/v1/models", headers={"x-request-id": sent})
    assert len(response.headers["x-request-id"]) == 32


async def test_errors_carry_the_request_id_too(http: httpx.AsyncClient) -> None:
    assert (await http.get("/nowhere", headers={"x-request-id": "t1"})).headers["x-request-id"] == "t1"


async def test_the_id_is_left_to_a_server_that_sends_it_itself(replicas: Any) -> None:
    app = await build_api(replicas, GatewaySettings(), "s", IndexLink(), echo_request_id=False)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as http:
        assert "x-request-id" not in (await http.get("/v1/models")).headers


async def test_models_are_listed_and_found_by_an_id_with_a_slash(http: httpx.AsyncClient) -> None:
    expected = {
        "id": MODEL,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "warmroute",
        "max_model_len": 512,
    }
    assert (await http.get("/v1/models")).json() == {"object": "list", "data": [expected]}
    assert (await http.get(f"/v1/models/{MODEL}")).json() == expected
    assert (await http.get("/v1/models/acme%2Ftiny")).json() == expected


async def test_health_follows_the_replicas(http: httpx.AsyncClient, replicas: Any) -> None:
    healthy = await http.get("/health")
    assert (healthy.status_code, healthy.json()["model"]) == (200, MODEL)

    async def no_answer() -> Any:
        raise NoReplicaError("No replica answers.")

    replicas.described = no_answer
    # One that answered just now still counts.
    assert (await http.get("/health")).status_code == 200


async def test_an_index_that_is_away_is_told_and_is_no_failure(replicas: Any) -> None:
    link, settings = IndexLink(), IndexSettings()
    app = await build_api(replicas, GatewaySettings(), "s", link)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as http:

        async def index() -> Any:
            answer = await http.get("/health")
            assert (answer.status_code, answer.json()["status"]) == (200, "ok")
            return answer.json()["index"]

        assert await index() == {"state": "none"}
        link.settings = settings
        link.mirror = mirror = IndexMirror(EmbeddedStore(settings), settings)
        assert (await index())["state"] == "starting"
        await mirror.catch_up(0.0)
        assert (await index())["state"] == "ok"
        mirror.degraded_reason = "the index store did not answer within 2 s"
        degraded = await index()
        assert (degraded["state"], degraded["reason"]) == ("degraded", mirror.degraded_reason)


async def test_the_router_is_told_under_which_identity_prompts_are_hashed(replicas: Any) -> None:
    link = IndexLink()
    await build_api(replicas, GatewaySettings(), "s", link)
    assert link.identity == replicas.card.identity


async def test_health_is_a_503_while_no_replica_answers(
    make_api: Callable[..., Awaitable[FastAPI]], replicas: Any
) -> None:
    app = await make_api(describe_timeout_s=0.05)

    async def no_answer() -> Any:
        await asyncio.Event().wait()

    replicas.described = no_answer
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as http:
        assert_is_error(await http.get("/health"), 503, "unavailable")
        replicas.described = None
        assert (await http.get("/health")).status_code == 200


async def test_a_replica_that_generates_is_not_asked_how_it_is(http: httpx.AsyncClient, replicas: Any) -> None:
    await http.post("/v1/chat/completions", json=CHAT)
    num_described = replicas.num_described
    assert (await http.get("/health")).status_code == 200
    assert replicas.num_described == num_described


async def test_the_gateway_waits_for_a_first_replica(replicas: Any) -> None:
    async def later() -> Any:
        if replicas.num_described < 3:
            raise NoReplicaError("not yet")
        return replicas.card

    replicas.described = later
    await build_api(replicas, GatewaySettings(describe_interval_s=0.001), "s", IndexLink())
    assert replicas.num_described == 3


async def test_it_waits_only_so_long(replicas: Any) -> None:
    async def no_answer() -> Any:
        await asyncio.Event().wait()

    replicas.described = no_answer
    with pytest.raises(NoReplicaError, match="within"):
        await build_api(replicas, GatewaySettings(startup_timeout_s=0.05, describe_timeout_s=0.01), "s", IndexLink())
