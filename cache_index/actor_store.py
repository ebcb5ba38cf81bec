"""The embedded store as an actor in the Ray cluster: the default where no Redis is set.

The one file of this package that imports Ray. The actor has a name, so whoever needs it finds or makes it. It belongs
to the process that made it and ends with it; the others then make it anew, empty, and the replicas fill it again. So it
leaves nothing behind in a cluster, and losing it costs only a moment's warmth.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from .blocks import BlockHash
from .embedded import EmbeddedStore
from .errors import CacheIndexError, StoreUnavailableError
from .events import EventBatch, Inventory
from .settings import IndexSettings
from .store import Cursor, News

__all__ = ["ActorStore"]

Result = TypeVar("Result")

_ACTOR_NAME = "warmroute-index"
# Beyond a read's own wait: what a call may take before the store counts as away.
_CALL_TIMEOUT_S = 10.0


class ActorStore:
    """An `IndexStore` whose state is in a named actor. Finds or makes the actor on first use, and after losing it."""

    def __init__(self, settings: IndexSettings) -> None:
        self._settings = settings
        self._actor: Any = None

    async def publish(self, batch: EventBatch) -> None:
        await self._call("publish", batch)

    async def publish_inventory(self, inventory: Inventory) -> None:
        await self._call("publish_inventory", inventory)

    async def heartbeat(self, replica_id: str, epoch: int) -> None:
        await self._call("heartbeat", replica_id, epoch)

    async def deregister(self, replica_id: str, epoch: int) -> None:
        await self._call("deregister", replica_id, epoch)

    async def match(self, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        matched: Mapping[str, int] = await self._call("match", tuple(block_hashes))
        return matched

    async def read(self, cursor: Cursor | None, timeout_s: float) -> News:
        news: News = await self._call("read", cursor, timeout_s, timeout_s=timeout_s + _CALL_TIMEOUT_S)
        return news

    async def _call(self, method: str, *args: Any, timeout_s: float = _CALL_TIMEOUT_S) -> Any:
        try:
            if self._actor is None:
                # Asking the cluster for a name waits for an answer, which must not hold the event loop.
                self._actor = await _bounded(asyncio.to_thread(self._find_or_make), timeout_s)
            return await _bounded(getattr(self._actor, method).remote(*args), timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, CacheIndexError):
                raise error.cause from None
            raise StoreUnavailableError(f"the index store failed: {error.cause!r}") from error
        except TimeoutError as error:
            raise StoreUnavailableError(f"the index store did not answer within {timeout_s:g} s") from error
        except (RayError, ValueError) as error:
            if isinstance(error, RayActorError):
                self._actor = None
            raise StoreUnavailableError(f"the index store can't be reached: {error}") from error

    def _find_or_make(self) -> Any:
        actor_class = ray.remote(EmbeddedStore)
        return actor_class.options(
            name=_ACTOR_NAME,
            namespace=self._settings.namespace,
            get_if_exists=True,
            num_cpus=0,
            # Followers wait inside `read`, so the bound is on followers and callers together.
            max_concurrency=1_000,
        ).remote(self._settings)


async def _bounded(awaitable: Awaitable[Result], timeout_s: float) -> Result:
    return await asyncio.wait_for(awaitable, timeout_s)
