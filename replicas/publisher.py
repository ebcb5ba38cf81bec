"""Telling the index what this replica holds: event batches, heartbeats with a digest, the whole inventory after a loss.

    engine's thread ──push──▶ pending events ──every publish_interval_s──▶ store
                              (bounded)         numbered batch             │
                              digest ───every heartbeat_interval_s───────▶ │
                              tenants to drop, gateways' identities ◀──────┘

Whatever goes wrong between replica and store ends the same way: the pending events are dropped and the inventory is
published, as soon as the store can be reached. Requests never wait for any of it.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from cache_index.errors import (
    DriftError,
    SequenceGapError,
    StaleEpochError,
    StoreUnavailableError,
    UnknownReplicaError,
)
from cache_index.events import (
    BlocksStored,
    Digest,
    Event,
    EventBatch,
    Heartbeat,
    Inventory,
    Registration,
    num_named,
)
from cache_index.settings import IndexSettings
from cache_index.store import IndexStore, Notices

from .parity import GatewayParity

__all__ = ["EventPublisher", "Holdings"]

logger = logging.getLogger(__name__)

# Between attempts to reach a store that is away.
_RETRY_S = 0.5


class Holdings(Protocol):
    """What a replica holds. Each method runs on the engine's thread between two steps, and calls `before` first there.

    By then every event that the result takes account of has been pushed, and none after it.
    """

    async def take_blocks(self, before: Callable[[], None]) -> tuple[BlocksStored, ...]:
        """All cached blocks, by tenant."""

    async def take_digest(self, before: Callable[[], None]) -> Digest:
        """What is cached."""

    async def drop_tenants(self, tenants: Sequence[bytes]) -> None:
        """Drop all blocks of these tenants; the events of it are pushed as any others."""


class EventPublisher:
    """Publishes one replica's events for as long as `run` runs.

    num_inventories: published since the start. num_losses: of them, because the store did not know this replica or
    missed a batch. num_drifts: because it held something else. degraded_reason: why the store is away, None while it
    answers. parity: how gateways' identities compare with this replica's.
    """

    def __init__(
        self, store: IndexStore, registration: Registration, settings: IndexSettings, holdings: Holdings
    ) -> None:
        self._store = store
        self._registration = registration
        self._settings = settings
        self._holdings = holdings
        self._seq = 0
        self._needs_inventory = True
        self._num_purges_seen: int | None = None
        self._has_just_drifted = False
        # Events come from the engine's thread; held for a few instructions only.
        self._lock = threading.Lock()
        self._pending: list[Event] = []
        self._num_pending_blocks = 0
        self._overflowed = False
        self._loop = asyncio.get_running_loop()
        self._next_heartbeat_s = 0.0
        self._has_news = asyncio.Event()
        self.num_inventories = 0
        self.num_losses = 0
        self.num_drifts = 0
        self.degraded_reason: str | None = None
        self.parity = GatewayParity(registration)

    def push(self, events: tuple[Event, ...]) -> None:
        """Take events, from any thread; never blocks. Past `pending_blocks_max` an inventory replaces them."""
        # A clear names none and takes room all the same.
        num_blocks = sum(max(1, num_named(event)) for event in events)
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
            await self._store.close()

    async def _round(self) -> None:
        try:
            if self._needs_inventory:
                await self._publish_inventory()
            elif self._loop.time() >= self._next_heartbeat_s:
                await self._heartbeat()
            else:
                await self._publish_pending(*self._take_pending())
        except (UnknownReplicaError, SequenceGapError) as error:
            logger.info("publishing the whole inventory: %s", error)
            self._needs_inventory = True
            self.num_losses += 1
            return
        except DriftError as error:
            await self._note_drift(error)
            return
        except StaleEpochError:
            # Another process took this replica's id; it speaks for it now, and what is here must not be believed.
            logger.exception("this replica's epoch is over, it stops publishing")
            await asyncio.Event().wait()
        except StoreUnavailableError as error:
            if self.degraded_reason is None:
                logger.warning("the index store is away, publishing again when it is back: %s", error)
            self.degraded_reason = str(error)
            self._needs_inventory = True
            await asyncio.sleep(_RETRY_S)
            return
        if self.degraded_reason is not None:
            logger.info("the index store is back")
            self.degraded_reason = None
        await self._wait_for_news()

    async def _wait_for_news(self) -> None:
        left_s = self._next_heartbeat_s - self._loop.time()
        if left_s <= 0.0:
            return
        try:
            # Not `wait_for`, which before Python 3.12 forgets a cancellation that comes together with the event.
            async with asyncio.timeout(left_s):
                await self._has_news.wait()
        except TimeoutError:
            return
        # What follows within the interval travels in the same batch.
        await asyncio.sleep(self._settings.publish_interval_s)

    async def _publish_pending(self, events: list[Event], overflowed: bool) -> None:
        if overflowed:
            self._needs_inventory = True
            await self._publish_inventory()
        elif events:
            self._seq += 1
            registration = self._registration
            await self._store.publish(EventBatch(registration.replica_id, registration.epoch, self._seq, tuple(events)))

    async def _publish_inventory(self) -> None:
        # The number is taken before the blocks: events pushed after them get a later one.
        self._seq += 1
        blocks = await self._holdings.take_blocks(self._drop_pending)
        await self._store.publish_inventory(Inventory(self._registration, self._seq, blocks))
        self._needs_inventory = False
        self.num_inventories += 1
        # At once, so that a store that took the inventory wrongly is known soon.
        self._next_heartbeat_s = 0.0

    async def _heartbeat(self) -> None:
        """Publish what there is and say what it amounts to: both as of one moment of the engine's thread."""
        taken: list[tuple[list[Event], bool]] = []
        digest = await self._holdings.take_digest(lambda: taken.append(self._take_pending()))
        [(events, overflowed)] = taken
        await self._publish_pending(events, overflowed)
        if overflowed:
            return  # The inventory is of a later moment than the digest.
        registration = self._registration
        notices = await self._store.heartbeat(
            Heartbeat(registration.replica_id, registration.epoch, self._seq, digest, self._num_purges_seen)
        )
        # From here on, not from when it was due: a store that is slow is not asked more often for it.
        self._next_heartbeat_s = self._loop.time() + self._settings.heartbeat_interval_s
        self._has_just_drifted = False
        await self._heed(notices)

    async def _heed(self, notices: Notices) -> None:
        self.parity.compare(notices.identities)
        if notices.purged:
            await self._holdings.drop_tenants(notices.purged)
        # Only now: a replica that fails halfway hears of it again.
        self._num_purges_seen = notices.num_purges

    async def _note_drift(self, error: DriftError) -> None:
        self.num_drifts += 1
        self._needs_inventory = True
        logger.warning("publishing the whole inventory: %s", error)
        if self._has_just_drifted:
            # The last inventory did not help. The next is as much work for everybody, so it is no more frequent than
            # heartbeats, which a lease outlives.
            await asyncio.sleep(self._settings.heartbeat_interval_s)
        self._has_just_drifted = True

    def _drop_pending(self) -> None:
        self._take_pending()

    def _take_pending(self) -> tuple[list[Event], bool]:
        with self._lock:
            events, self._pending = self._pending, []
            overflowed, self._overflowed = self._overflowed, False
            self._num_pending_blocks = 0
            self._loop.call_soon_threadsafe(self._has_news.clear)
        return events, overflowed
