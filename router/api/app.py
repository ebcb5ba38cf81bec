"""The FastAPI application: its routes, and what each does with a request. Knows no Ray."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cache_index.blocks import PromptBlocks
from cache_index.messages import GenerationChunk, ModelCard, SamplingParams

from ..errors import ModelNotFoundError, RouterError
from ..index_link import IndexLink
from ..settings import GatewaySettings
from .errors import answer_to, answer_to_http
from .generations import Generations, first_card
from .parsing import parse_body
from .prompts import Prompts
from .protocol import (
    COMPLETION_TOKENS_DEFAULT,
    ChatCompletionBody,
    CompletionBody,
    GenerationBody,
    ModelList,
    ModelObject,
)
from .replica_client import ReplicaClient
from .requests import RequestBoundary, read_body, request_id_of, while_connected
from .streams import AnswerHead, AnswerShape, ChatShape, CompletionShape, server_sent_events, whole_answer
from .tenants import OpenTenants

__all__ = ["build_api"]

BodyT = TypeVar("BodyT", bound=GenerationBody)


async def build_api(
    client: ReplicaClient, settings: GatewaySettings, secret: str, index: IndexLink, *, echo_request_id: bool = True
) -> FastAPI:
    """The gateway's application, once a first replica has said which model it serves.

    secret: the server's secret, from which every tenant's scope is derived; the same in all gateways of a cluster.
    index: told under which identity prompts are hashed, and asked how the index stands.
    echo_request_id: send `x-request-id` back; off where the server in front does.
    Raises NoReplicaError if no replica comes up in time, and ValueError for an empty secret.
    """
    card = await first_card(client, settings)
    index.identity = card.identity
    prompts = await asyncio.to_thread(Prompts.load, card, secret, num_threads=settings.tokenizer_threads)
    generations = Generations(client, settings)
    tenants = OpenTenants(settings.open_tenant)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        prompts.close()

    # Without the pages that FastAPI would generate: they would show routes that take no parameters.
    app = FastAPI(
        title="warmroute", lifespan=lifespan, openapi_url=None, redirect_slashes=False, exception_handlers=_HANDLERS
    )
    app.add_middleware(RequestBoundary, echo_request_id=echo_request_id)
    _add_model_routes(app, card, generations, index)

    async def chat(body: ChatCompletionBody, tenant: str) -> PromptBlocks:
        return await prompts.chat(body.messages, tenant=tenant, cache_salt=body.cache_salt)

    async def completion(body: CompletionBody, tenant: str) -> PromptBlocks:
        return await prompts.completion(body.prompt, tenant=tenant, cache_salt=body.cache_salt)

    serving = _Serving(card, settings, tenants, generations)
    for path, endpoint in (
        ("chat/completions", _Endpoint(serving, ChatCompletionBody, chat, ChatShape, settings.default_max_tokens)),
        ("completions", _Endpoint(serving, CompletionBody, completion, CompletionShape, COMPLETION_TOKENS_DEFAULT)),
    ):
        app.router.routes.append(Route(f"/v1/{path}", endpoint, methods=["POST"]))
    return app


@dataclass(frozen=True, slots=True)
class _Serving:
    """What every generation route needs."""

    card: ModelCard
    settings: GatewaySettings
    tenants: OpenTenants
    generations: Generations


@dataclass(frozen=True, slots=True)
class _Endpoint(Generic[BodyT]):
    """A route that generates, as a plain ASGI application.

    Plain, because then one lexical scope holds the request from its first byte to its last: the place among the
    streams, the generation on the replica and the watch over the client all end where this block ends, however it ends.
    """

    serving: _Serving
    body_type: type[BodyT]
    tokenize: Callable[[BodyT, str], Awaitable[PromptBlocks]]
    shape_type: type[AnswerShape]
    default_max_tokens: int | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        tenant = self.serving.tenants.tenant_of(request.headers.get("authorization"))
        with self.serving.generations.place():
            body_bytes = await read_body(request, bytes_max=self.serving.settings.body_bytes_max)
            body = parse_body(body_bytes, self.body_type)
            if body.model != self.serving.card.name:
                raise ModelNotFoundError(body.model[:100])
            sampling = body.sampling(default_max_tokens=self.default_max_tokens)
            await while_connected(receive, self._answer(body, sampling, tenant, scope, receive, send))

    async def _answer(
        self, body: BodyT, sampling: SamplingParams, tenant: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        request_id = request_id_of(scope)
        card = self.serving.card
        prompt = await self.tokenize(body, tenant)
        head = AnswerHead(
            model=card.name,
            created_s=int(time.time()),
            system_fingerprint=f"fp_{prompt.fingerprint.hex()[:12]}",
            num_prompt_tokens=prompt.num_tokens,
        )
        shape = self.shape_type(head)
        running = self.serving.generations.run(prompt, sampling, request_id=request_id)
        async with contextlib.aclosing(running) as chunks:
            # The status depends on how the generation begins, so nothing is sent before its first chunk is here.
            first = await anext(chunks)
            headers = {
                "x-warmroute-replica": first.replica_id,
                "x-warmroute-cached-tokens": str(first.cached_tokens),
            }
            all_chunks = _from_first(first, chunks)
            if not body.stream:
                answer = await whole_answer(all_chunks, shape, head)
                response = Response(answer.model_dump_json(), headers=headers, media_type="application/json")
                await response(scope, receive, send)
                return
            events = server_sent_events(
                all_chunks,
                shape,
                head,
                include_usage=body.include_usage,
                answer_to=partial(answer_to, request_id=request_id),
            )
            await _send_events(events, headers, send)


async def _from_first(
    first: GenerationChunk, rest: AsyncGenerator[GenerationChunk, None]
) -> AsyncGenerator[GenerationChunk, None]:
    yield first
    async for chunk in rest:
        yield chunk


async def _send_events(events: AsyncIterator[bytes], headers: dict[str, str], send: Send) -> None:
    # X-Accel-Buffering is nginx's: without it, an ingress in front may hold events back.
    headers = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        **headers,
    }
    raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw_headers})
    async for event in events:
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _add_model_routes(app: FastAPI, card: ModelCard, generations: Generations, index: IndexLink) -> None:
    model = ModelObject(id=card.name, created=card.created_s, max_model_len=card.max_model_len)

    @app.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=[model])

    # Hub ids have a slash in them, hence a path.
    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> ModelObject:
        if model_id != model.id:
            raise ModelNotFoundError(model_id[:100])
        return model

    @app.get("/health")
    async def health() -> dict[str, object]:
        await generations.check_replicas()
        # An index that is away costs warmth and no request, so it is told and is no failure.
        return {"status": "ok", "model": card.name, "max_model_len": card.max_model_len, "index": index.health()}


async def _on_router_error(request: Request, error: Exception) -> Response:
    return answer_to(error, request_id_of(request.scope)).to_response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return answer_to_http(error, request.method, request.url.path[:100]).to_response()


_HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    RouterError: _on_router_error,
    HTTPException: _on_http_error,
}
