"""Telling the index what this replica holds: event batches, heartbeats, and the whole inventory after a loss.

    engine's thread ──push──▶ pending events ──every publish_interval_s──▶ store
                              (bounded)         numbered batch

Whatever goes wrong between replica and store ends the same way: the pending events are dropped and the inventory is
published, as soon as the store can be reached. Requests never wait for any of it.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable

from cache_index.errors import SequenceGapError, StaleEpochError, StoreUnavailableError, UnknownReplicaError
from cache_index.events import BlocksCleared, BlocksStored, Event, EventBatch, Inventory, Registration
from cache_index.settings import IndexSettings
from cache_index.store import IndexStore

__all__ = ["EventPublisher"]

logger = logging.getLogger(__name__)

# Between attempts to reach a store that is away.
_RETRY_S = 0.5


class EventPublisher:
    """Publishes one replica's events for as long as `run` runs.

    take_blocks: called with a function and has to run it on the engine's thread between two steps; what that function
    returns, the pool's inventory, is then what all events pushed so far amount to.
    """

    def __init__(
        self,
        store: IndexStore,
        registration: Registration,
        settings: IndexSettings,
        take_blocks: Callable[[Callable[[], None]], Awaitable[tuple[BlocksStored, ...]]],
    ) -> None:
        self._store = store
        self._registration = registration
        self._settings = settings
        self._take_blocks = take_blocks
        self._seq = 0
        self._needs_inventory = True
        # Events come from the engine's thread; held for a few instructions only.
        self._lock = threading.Lock()
        self._pending: list[Event] = []
        self._num_pending_blocks = 0
        self._overflowed = False
        self._loop = asyncio.get_running_loop()
        self._has_news = asyncio.Event()

    def push(self, events: tuple[Event, ...]) -> None:
        """Take events, from any thread; never blocks. Past `pending_blocks_max` an inventory replaces them."""
        num_blocks = sum(1 if isinstance(event, BlocksCleared) else len(event.block_hashes) for event in events)
        with self._lock:
            was_empty = not self._pending
            if self._num_pending_blocks + num_blocks > self._settings.pending_blocks_max:
                self._overflowed = True
            if not self._overflowed:
                self._pending.extend(events)
                self._num_pending_blocks += num_blocks
        if was_empty:
            try:
                self._loop.call_soon_threadsafe(self._has_news.set)
            except RuntimeError:
                logger.debug("the event loop is closed, so these events are nobody's any more")

    async def run(self) -> None:
        """Publish until cancelled; then sign off."""
        try:
            while True:
                await self._round()
        finally:
            try:
                await self._store.deregister(self._registration.replica_id, self._registration.epoch)
            except StoreUnavailableError as error:
                logger.info("could not sign off, the lease will run out instead: %s", error)

    async def _round(self) -> None:
        try:
            if self._needs_inventory:
                await self._publish_inventory()
            elif not await self._publish_pending():
                await self._store.heartbeat(self._registration.replica_id, self._registration.epoch)
        except (UnknownReplicaError, SequenceGapError) as error:
            logger.info("publishing the whole inventory: %s", error)
            self._needs_inventory = True
            return
        except StaleEpochError:
            # Another process took this replica's id; it speaks for it now, and what is here must not be believed.
            logger.exception("this replica's epoch is over, it stops publishing")
            await asyncio.Event().wait()
        except StoreUnavailableError as error:
            logger.warning("the index store is away, publishing again in %.1f s: %s", _RETRY_S, error)
            self._needs_inventory = True
            await asyncio.sleep(_RETRY_S)
            return
        await self._wait_for_news()

    async def _wait_for_news(self) -> None:
        try:
            await asyncio.wait_for(self._has_news.wait(), self._settings.heartbeat_interval_s)
        except TimeoutError:
            return
        # What follows within the interval travels in the same batch.
        await asyncio.sleep(self._settings.publish_interval_s)

    async def _publish_pending(self) -> bool:
        events, overflowed = self._take_pending()
        if overflowed:
            self._needs_inventory = True
            await self._publish_inventory()
            return True
        if not events:
            return False
        self._seq += 1
        registration = self._registration
        await self._store.publish(EventBatch(registration.replica_id, registration.epoch, self._seq, tuple(events)))
        return True

    async def _publish_inventory(self) -> None:
        # The number is taken before the blocks: events pushed after them get a later one.
        self._seq += 1
        blocks = await self._take_blocks(self._drop_pending)
        await self._store.publish_inventory(Inventory(self._registration, self._seq, blocks))
        self._needs_inventory = False

    def _drop_pending(self) -> None:
        self._take_pending()

    def _take_pending(self) -> tuple[list[Event], bool]:
        with self._lock:
            events, self._pending = self._pending, []
            overflowed, self._overflowed = self._overflowed, False
            self._num_pending_blocks = 0
            self._loop.call_soon_threadsafe(self._has_news.clear)
        return events, overflowed
