"""The embedded store as an actor in the Ray cluster: the default where no Redis is set.

One of two files of this package that import Ray. The actor has a name, so whoever needs it finds or makes it. It
belongs to the process that made it and ends with it; the others then make it anew, empty, and the replicas fill it
again. So it leaves nothing behind in a cluster, and losing it costs only a moment's warmth.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from .blocks import BlockHash
from .embedded import EmbeddedStore
from .errors import CacheIndexError, StoreUnavailableError
from .events import EventBatch, Heartbeat, Inventory
from .identity import CacheIdentity
from .settings import IndexSettings
from .store import Cursor, News, Notices, StoreStats

__all__ = ["ActorStore"]

Result = TypeVar("Result")

_ACTOR_NAME = "warmroute-index"
# Beyond a call's own time: what the first answer may take of an actor whose process is only starting.
_START_TIMEOUT_S = 10.0


class ActorStore:
    """An `IndexStore` whose state is in a named actor. Finds or makes the actor on first use, and after losing it.

    may_create: False only finds it, for somebody who would take it away with them when they go; then a cluster without
    one is a StoreUnavailableError.
    """

    def __init__(self, settings: IndexSettings, may_create: bool = True) -> None:
        self._settings = settings
        self._may_create = may_create
        self._actor: Any = None
        self._has_answered = False

    async def publish(self, batch: EventBatch) -> None:
        await self._call("publish", batch)

    async def publish_inventory(self, inventory: Inventory) -> None:
        await self._call("publish_inventory", inventory)

    async def heartbeat(self, heartbeat: Heartbeat) -> Notices:
        notices: Notices = await self._call("heartbeat", heartbeat)
        return notices

    async def deregister(self, replica_id: str, epoch: int) -> None:
        await self._call("deregister", replica_id, epoch)

    async def match(self, tenant: bytes, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        matched: Mapping[str, int] = await self._call("match", tenant, tuple(block_hashes))
        return matched

    async def read(self, cursor: Cursor | None, timeout_s: float) -> News:
        news: News = await self._call("read", cursor, timeout_s, wait_s=max(0.0, timeout_s))
        return news

    async def announce(self, identity: CacheIdentity) -> None:
        await self._call("announce", identity)

    async def purge(self, tenant: bytes) -> int:
        num_blocks: int = await self._call("purge", tenant)
        return num_blocks

    async def describe(self) -> str:
        description: str = await self._call("describe")
        return description

    async def stats(self) -> StoreStats:
        stats: StoreStats = await self._call("stats")
        return stats

    async def close(self) -> None:
        """Let go of the actor, which ends with its last handle where this was the process that made it."""
        self._actor = None

    async def _call(self, method: str, *args: Any, wait_s: float = 0.0) -> Any:
        timeout_s = wait_s + self._settings.call_timeout_s + (0.0 if self._has_answered else _START_TIMEOUT_S)
        try:
            if self._actor is None:
                # Asking the cluster for a name waits for an answer, which must not hold the event loop.
                self._actor = await _bounded(asyncio.to_thread(self._find_or_make), timeout_s)
            answer = await _bounded(getattr(self._actor, method).remote(*args), timeout_s)
            self._has_answered = True
            return answer
        except RayTaskError as error:
            self._has_answered = True
            if isinstance(error.cause, CacheIndexError):
                raise error.cause from None
            raise StoreUnavailableError(f"the index store failed: {error.cause!r}") from error
        except TimeoutError as error:
            raise StoreUnavailableError(f"the index store did not answer within {timeout_s:g} s") from error
        except (RayError, ValueError) as error:
            if isinstance(error, RayActorError):
                self._actor, self._has_answered = None, False
            raise StoreUnavailableError(f"the index store can't be reached: {error}") from error

    def _find_or_make(self) -> Any:
        namespace = self._settings.namespace
        if not self._may_create:
            try:
                return ray.get_actor(_ACTOR_NAME, namespace=namespace)
            except ValueError as error:
                raise StoreUnavailableError(
                    f"no index store runs in this Ray cluster under the namespace {namespace!r}"
                ) from error
        actor_class = ray.remote(EmbeddedStore)
        return actor_class.options(
            name=_ACTOR_NAME,
            namespace=namespace,
            get_if_exists=True,
            num_cpus=0,
            # Followers wait inside `read`, so the bound is on followers and callers together.
            max_concurrency=1_000,
        ).remote(self._settings)


async def _bounded(awaitable: Awaitable[Result], timeout_s: float) -> Result:
    # Not `wait_for`, which before Python 3.12 forgets a cancellation that comes together with the answer.
    async with asyncio.timeout(timeout_s):
        return await awaitable
