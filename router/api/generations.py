"""One generation on its way through the replicas: how many may run, how long, and what happens when a replica fails.

It knows no HTTP. Whatever a replica does, what comes out is chunks that end with a finish reason, or a RouterError.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator

from cache_index.blocks import PromptBlocks
from cache_index.messages import GenerationChunk, GenerationRequest, ModelCard, Refusal, RefusalCode, SamplingParams

from ..errors import (
    ContextLengthExceededError,
    DeadlineExceededError,
    InvalidRequestError,
    NoReplicaError,
    OverloadedError,
    ReplicaError,
    ReplicaFaultError,
    ReplicaLostError,
    RouterError,
)
from ..settings import GatewaySettings
from .replica_client import ReplicaClient

__all__ = ["Generations", "first_card"]

logger = logging.getLogger(__name__)

Chunks = AsyncGenerator[GenerationChunk, None]

STREAM_END_TIMEOUT_S = 1.0
"""After the last chunk a stream gets so long to end by itself, which spares the replica a pointless cancellation."""


async def first_card(client: ReplicaClient, settings: GatewaySettings) -> ModelCard:
    """Wait for a first replica to say which model it serves.

    Raises NoReplicaError after `startup_timeout_s`.
    """
    try:
        async with asyncio.timeout(settings.startup_timeout_s):
            while True:
                try:
                    async with asyncio.timeout(settings.describe_timeout_s):
                        return await client.describe()
                except (TimeoutError, RouterError) as error:
                    logger.info("no replica is up yet: %s", error or "none answered")
                await asyncio.sleep(settings.describe_interval_s)
    except TimeoutError:
        raise NoReplicaError(f"No replica was up within {settings.startup_timeout_s:g} seconds.") from None


class Generations:
    """The generations of one gateway. One event loop owns it."""

    def __init__(
        self, client: ReplicaClient, settings: GatewaySettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._settings = settings
        self._clock = clock
        self._num_running = 0
        self._last_heard_s = float("-inf")

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Hold one of the `streams_max` places.

        Raises OverloadedError if all are taken: a request that queued here would wait where nobody sees it.
        """
        if self._num_running >= self._settings.streams_max:
            raise self._overloaded(f"All {self._settings.streams_max} streams of this gateway are in use.")
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    async def check_replicas(self) -> None:
        """Return if a replica is known to answer.

        A replica that sent something just now counts, so that full replicas, which answer questions late, do not make
        a busy gateway look dead. Raises NoReplicaError or another RouterError.
        """
        if self._clock() - self._last_heard_s <= self._settings.describe_timeout_s:
            return
        try:
            async with asyncio.timeout(self._settings.describe_timeout_s):
                await self._client.describe()
        except TimeoutError:
            raise NoReplicaError("No replica answers.") from None
        self._last_heard_s = self._clock()

    async def run(self, prompt: PromptBlocks, sampling: SamplingParams, *, request_id: str) -> Chunks:
        """Chunks of one generation; the last, and only the last, has a finish reason.

        A replica that fails before its first chunk is replaced by another, `generation_attempts_max` in all. Closing
        the generator cancels the generation. Raises RouterError: before the first chunk for a refusal, after it for a
        replica that failed midway or a generation that took too long.
        """
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        end_s = started_s + self._settings.request_timeout_s
        first_s = min(end_s, started_s + self._settings.first_token_timeout_s)
        for attempts_left in reversed(range(self._settings.generation_attempts_max)):
            # A replica knows a request by its id, and may still be cleaning up after an earlier attempt.
            request = GenerationRequest(f"{request_id}-{uuid.uuid4().hex}", prompt, sampling)
            begun = False
            try:
                async with contextlib.aclosing(self._attempt(request, first_s, end_s)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except ReplicaError as error:
                if begun or not attempts_left:
                    raise
                logger.warning("request %s: %s; trying another replica", request_id, error)

    async def _attempt(self, request: GenerationRequest, first_s: float, end_s: float) -> Chunks:
        limit_s = first_s
        async with contextlib.aclosing(self._client.generate(request)) as items:
            while True:
                try:
                    # Around each step and not around the loop: a timeout must not reach into the consumer's own code.
                    async with asyncio.timeout_at(limit_s):
                        item = await anext(items)
                except StopAsyncIteration:
                    raise ReplicaLostError("the replica ended its stream before the generation was over") from None
                except TimeoutError:
                    if limit_s < end_s:
                        raise self._overloaded(
                            f"No replica began to answer within {self._settings.first_token_timeout_s:g} seconds."
                        ) from None
                    raise DeadlineExceededError(
                        f"The generation took longer than {self._settings.request_timeout_s:g} seconds."
                    ) from None
                self._last_heard_s = self._clock()
                if isinstance(item, Refusal):
                    raise self._error_of(item)
                limit_s = end_s
                yield item
                if item.finish_reason is not None:
                    with contextlib.suppress(ReplicaError, TimeoutError):
                        async with asyncio.timeout(STREAM_END_TIMEOUT_S):
                            await anext(items, None)
                    return

    def _error_of(self, refusal: Refusal) -> RouterError:
        match refusal.code:
            case RefusalCode.INVALID_REQUEST:
                return InvalidRequestError(refusal.message)
            case RefusalCode.CONTEXT_LENGTH_EXCEEDED:
                return ContextLengthExceededError(refusal.message)
            case RefusalCode.OVERLOADED:
                return self._overloaded(refusal.message)
            case RefusalCode.INTERNAL:
                return ReplicaFaultError(f"replica {refusal.replica_id}: {refusal.message}")

    def _overloaded(self, message: str) -> OverloadedError:
        return OverloadedError(message, retry_after_s=self._settings.overloaded_retry_after_s)
