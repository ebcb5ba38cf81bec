"""The Ray Serve deployment around one engine: a thin asyncio shell.

The one file of this package that imports Ray. Serve makes one instance per replica process.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from ray import serve

from cache_index.events import Event, Registration
from cache_index.messages import GenerationChunk, GenerationRequest, ModelCard, Refusal
from cache_index.metrics import MetricsExport
from cache_index.opening import open_store
from cache_index.settings import IndexSettings

from .engine import Engine
from .errors import RequestRefusedError
from .forward.model import load
from .holdings import EngineHoldings
from .publisher import EventPublisher
from .settings import EngineSettings, ModelSettings

__all__ = ["ReplicaDeployment"]

logger = logging.getLogger(__name__)


class ReplicaDeployment:
    """One model copy. Serve awaits the constructor, so weights load without holding the replica's event loop."""

    async def __init__(  # type: ignore[misc]
        self, model: ModelSettings, engine: EngineSettings, index: IndexSettings
    ) -> None:
        """Raises ModelError where the model can't be served; Serve reports its text in the deployment's status."""
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        loaded = await asyncio.to_thread(load, model, engine)
        self._engine = Engine(loaded, engine, replica_id=self._replica_id, on_events=self._push)
        self._card = ModelCard(
            name=loaded.source.name,
            tokenizer=loaded.source.location,
            revision=loaded.source.revision,
            identity=loaded.identity,
            max_model_len=self._engine.max_model_len,
            created_s=int(time.time()),
        )
        # A restart begins a new epoch, and no clock of one machine goes back by a replica's start.
        registration = Registration(self._replica_id, epoch=time.time_ns(), identity=loaded.identity)
        self._publisher = EventPublisher(open_store(index), registration, index, EngineHoldings(self._engine))
        self._publishing = asyncio.create_task(self._publisher.run())
        self._exporting = asyncio.create_task(_metrics_of(self._publisher).run())

    async def describe(self) -> ModelCard:
        """Which model this replica serves, and what decides its KV values."""
        return self._card

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk | Refusal]:
        """Chunks of one generation as they come, or one refusal. Closing the iterator cancels the request."""
        loop = asyncio.get_running_loop()
        # Not bounded by itself: an answer has at most `max_model_len` tokens, hence so many chunks.
        messages: asyncio.Queue[GenerationChunk | Refusal] = asyncio.Queue()

        def hand_over(message: GenerationChunk | Refusal) -> None:
            loop.call_soon_threadsafe(messages.put_nowait, message)

        try:
            self._engine.submit(request, hand_over)
        except RequestRefusedError as error:
            yield Refusal(self._replica_id, error.code, error.message)
            return
        try:
            while True:
                message = await messages.get()
                yield message
                if isinstance(message, Refusal) or message.finish_reason is not None:
                    return
        finally:
            self._engine.cancel(request.request_id)

    def record_routing_stats(self) -> dict[str, Any]:
        """What routers learn of this replica's load besides what they sent it themselves; Serve asks now and then."""
        stats = self._engine.stats
        return {
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "num_pending_prefill_tokens": stats.num_pending_prefill_tokens,
            "prefill_tokens_per_s": stats.prefill_tokens_per_s,
        }

    def check_health(self) -> None:
        """Raises RuntimeError where Serve has to replace this replica."""
        if not self._engine.is_healthy:
            raise RuntimeError("the engine's steps keep failing, or its thread has ended")
        if self._publishing.done():
            raise RuntimeError("the index publisher has ended") from self._publishing.exception()
        if self._exporting.done():
            raise RuntimeError("the export of metrics has ended") from self._exporting.exception()

    def __del__(self) -> None:
        """Serve calls this before the process ends: stop publishing, refuse what is unfinished."""
        # The constructor may have failed before it made these.
        for task in ("_publishing", "_exporting"):
            if hasattr(self, task):
                getattr(self, task).cancel()
        if hasattr(self, "_engine"):
            self._engine.close()

    def _push(self, events: tuple[Event, ...]) -> None:
        self._publisher.push(events)


def _metrics_of(publisher: EventPublisher) -> MetricsExport:
    metrics = MetricsExport()
    metrics.count(
        "warmroute_index_inventories",
        "Whole inventories that this replica published.",
        lambda: publisher.num_inventories,
    )
    metrics.count(
        "warmroute_index_losses",
        "Times that the index store did not know this replica, or had missed a batch of it.",
        lambda: publisher.num_losses,
    )
    metrics.count(
        "warmroute_index_store_drifts",
        "Times that the index store held something else than this replica.",
        lambda: publisher.num_drifts,
    )
    metrics.gauge(
        "warmroute_index_publisher_degraded",
        "1 while this replica can't reach the index store.",
        lambda: float(publisher.degraded_reason is not None),
    )
    metrics.gauge(
        "warmroute_index_differing_gateways",
        "Identities under which gateways hash prompts and that differ from this replica's.",
        lambda: len(publisher.parity.differing),
    )
    return metrics
