"""Streamed answers, event by event."""

from collections.abc import AsyncIterator
from typing import Any

import httpx

from cache_index.messages import FinishReason, GenerationChunk, GenerationRequest
from tests.unit.api.answers import CHAT, COMPLETION, chunk, events_of


async def test_a_chat_stream_says_role_text_reason_and_done_in_this_order(http: httpx.AsyncClient) -> None:
    body = CHAT | {"stream": True, "max_tokens": 6}
    whole = await http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 6})
    response = await http.post("/v1/chat/completions", json=body)
    *events, done = events_of(response)
    assert done == "[DONE]"
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert int(response.headers["x-warmroute-cached-tokens"]) > 0
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(choice["delta"]["content"] for choice in choices[1:-1])
    assert text == whole.json()["choices"][0]["message"]["content"]
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


async def test_usage_comes_in_an_event_of_its_own_where_it_is_asked_for(http: httpx.AsyncClient, replicas: Any) -> None:
    body = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}
    for path, required in (("chat/completions", CHAT), ("completions", COMPLETION)):
        *events, usage, _ = events_of(await http.post(f"/v1/{path}", json=required | body))
        assert all(event["usage"] is None for event in events)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 3
        assert usage["usage"]["prompt_tokens"] == replicas.requests[-1].prompt.num_tokens


async def test_a_completion_stream_adds_text_and_ends_with_the_reason(http: httpx.AsyncClient) -> None:
    *events, done = events_of(await http.post("/v1/completions", json=COMPLETION | {"stream": True, "max_tokens": 3}))
    assert done == "[DONE]"
    assert {event["object"] for event in events} == {"text_completion"}
    assert [event["choices"][0]["finish_reason"] for event in events][-2:] == [None, "length"]


async def test_a_step_without_text_is_counted_and_sends_no_event(http: httpx.AsyncClient, replicas: Any) -> None:
    async def script(_: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        yield chunk("")
        yield chunk("é")
        yield chunk("", FinishReason.STOP)

    replicas.script = script
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    events = events_of(await http.post("/v1/chat/completions", json=body))
    assert [event["choices"][0]["delta"] for event in events[:-2]] == [
        {"role": "assistant", "content": ""},
        {"content": "é"},
        {},
    ]
    assert events[-2]["usage"]["completion_tokens"] == 3
