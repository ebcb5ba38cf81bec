"""What an engine's block pool holds, asked and changed from an event loop while the engine's thread goes on.

Everything here runs on the engine's thread between two steps, so it sees the pool at one moment.
"""

import asyncio
from collections.abc import Callable, Sequence

from cache_index.events import BlocksStored, Digest

from .core import EngineCore
from .engine import Engine

__all__ = ["EngineHoldings"]


class EngineHoldings:
    """The `Holdings` of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def take_blocks(self, before: Callable[[], None]) -> tuple[BlocksStored, ...]:
        def take(core: EngineCore) -> tuple[BlocksStored, ...]:
            # Events of blocks that are about to be counted are handed over first; `before` sees them all.
            core.flush_events()
            before()
            return core.pool.inventory()

        return await asyncio.to_thread(self._engine.call, take)

    async def take_digest(self, before: Callable[[], None]) -> Digest:
        def take(core: EngineCore) -> Digest:
            core.flush_events()
            before()
            return core.pool.digest

        return await asyncio.to_thread(self._engine.call, take)

    async def drop_tenants(self, tenants: Sequence[bytes]) -> None:
        def drop(core: EngineCore) -> None:
            for tenant in tenants:
                core.pool.purge(tenant)

        await asyncio.to_thread(self._engine.call, drop)
