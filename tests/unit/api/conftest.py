"""What the API's tests run against: a tiny real tokenizer, and replicas that speak our protocol without a model."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cache_index.identity import CacheIdentity
from cache_index.messages import FinishReason, GenerationChunk, GenerationRequest, ModelCard, Refusal
from router.api.app import build_api
from router.index_link import IndexLink
from router.settings import GatewaySettings
from tests.unit.api.answers import MAX_MODEL_LEN, MODEL

BLOCK_SIZE = 4
SECRET = "a test's secret"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('this model takes no tool results') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _tiny_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", chat_template=chat_template
    )


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    _tiny_tokenizer(CHAT_TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> PreTrainedTokenizerFast:
    """Loaded once, and not to be changed: what the gateway loads for itself, for expected values."""
    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    return loaded


@pytest.fixture(scope="session")
def plain_tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokenizer without a chat template."""
    folder = tmp_path_factory.mktemp("plain_tokenizer")
    _tiny_tokenizer(None).save_pretrained(folder)
    return folder


@pytest.fixture
def make_card(tokenizer_folder: Path) -> Callable[..., ModelCard]:
    def make(folder: Path = tokenizer_folder) -> ModelCard:
        identity = CacheIdentity("w", "c", "float32", "float32", None, "sdpa", "t", "chat", None, BLOCK_SIZE)
        return ModelCard(MODEL, str(folder), None, identity, MAX_MODEL_LEN, created_s=1_700_000_000)

    return make


class ScriptedReplicas:
    """A `ReplicaClient` that repeats the prompt's first tokens, and reuses the blocks it has seen.

    `script`, where set, answers instead. `cancelled` lists the requests that were closed before their end.
    """

    def __init__(self, card: ModelCard, tokenizer: PreTrainedTokenizerFast) -> None:
        self.card = card
        self.tokenizer = tokenizer
        self.script: Callable[[GenerationRequest], AsyncGenerator[Any, None]] | None = None
        self.described: Callable[[], Awaitable[ModelCard]] | None = None
        self.num_described = 0
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self.closed = asyncio.Event()
        self._seen_blocks: set[bytes] = set()

    async def describe(self) -> ModelCard:
        self.num_described += 1
        return await self.described() if self.described else self.card

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk | Refusal, None]:
        self.requests.append(request)
        is_over = False
        try:
            async with contextlib.aclosing((self.script or self.echo)(request)) as items:
                async for item in items:
                    yield item
            is_over = True
        finally:
            if not is_over:
                self.cancelled.append(request.request_id)
            self.closed.set()

    async def echo(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        hits = [block_hash in self._seen_blocks for block_hash in request.prompt.block_hashes]
        cached_tokens = BLOCK_SIZE * (hits.index(False) if False in hits else len(hits))
        self._seen_blocks.update(request.prompt.block_hashes)
        answer = [int(token) for token in request.prompt.token_ids]
        limit = request.sampling.max_tokens or len(answer)
        for position, token in enumerate(answer[:limit], start=1):
            reason = None
            if position == min(limit, len(answer)):
                reason = FinishReason.LENGTH if limit < len(answer) else FinishReason.STOP
            text = self.tokenizer.decode([token], skip_special_tokens=True)
            yield GenerationChunk("replica-1", (token,), text, cached_tokens, reason)


@pytest.fixture
def replicas(make_card: Callable[..., ModelCard], tokenizer: PreTrainedTokenizerFast) -> ScriptedReplicas:
    return ScriptedReplicas(make_card(), tokenizer)


@pytest.fixture
async def make_api(replicas: ScriptedReplicas) -> AsyncIterator[Callable[..., Awaitable[FastAPI]]]:
    """Builds the application over `replicas`, with settings as keywords, and ends it with the test."""
    async with contextlib.AsyncExitStack() as running:

        async def make(**settings: Any) -> FastAPI:
            app = await build_api(replicas, GatewaySettings(**settings), SECRET, IndexLink())
            await running.enter_async_context(app.router.lifespan_context(app))
            return app

        yield make


@pytest.fixture
async def api(make_api: Callable[..., Awaitable[FastAPI]]) -> FastAPI:
    return await make_api(body_bytes_max=64 * 1024)


@pytest.fixture
async def http(api: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=api)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client
