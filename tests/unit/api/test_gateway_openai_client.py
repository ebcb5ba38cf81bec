"""OpenAI's own client reads every answer of ours."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from cache_index.messages import GenerationChunk, GenerationRequest
from router.errors import ReplicaLostError
from tests.unit.api.answers import MESSAGES, MODEL, chunk


@pytest.fixture
async def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="any", http_client=http, max_retries=0)


async def test_openais_client_reads_answers_streams_and_models(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6)  # type: ignore[arg-type]
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 6
    follow_up = [*MESSAGES, chat.choices[0].message.model_dump(), {"role": "user", "content": "and then?"}]
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=follow_up,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [event async for event in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens
    completion = await client.completions.create(model=MODEL, prompt="the lazy dog", max_tokens=2)
    assert completion.choices[0].finish_reason == "length"
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_openais_client_raises_its_own_class_for_each_error(client: openai.AsyncOpenAI, replicas: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="x", prompt="a")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model=MODEL, prompt="a", temperature=9)
    assert (bad.value.type, bad.value.param) == ("invalid_request_error", "temperature")

    async def script(_: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        yield chunk("the")
        raise ReplicaLostError("it is gone")

    replicas.script = script
    stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="it is gone"):
        _ = [event async for event in stream]
