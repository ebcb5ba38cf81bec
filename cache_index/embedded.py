"""The embedded index store: a memory index, leases, and a bounded log for followers. Plain Python, no Ray.

One event loop owns it. Nothing is kept on disk: a store that restarts is empty, has a new life, and is filled again by
the replicas, which learn of it by UnknownReplicaError.
"""

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from .blocks import BlockHash
from .errors import UnknownReplicaError
from .events import EventBatch, Inventory
from .memory import MemoryIndex
from .settings import IndexSettings
from .store import Cursor, Departure, News, NewsItem

__all__ = ["EmbeddedStore"]


class EmbeddedStore:
    """An `IndexStore` in this process. `clock` gives seconds and never goes back."""

    def __init__(self, settings: IndexSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = settings.lease_s
        self._clock = clock
        self._index = MemoryIndex()
        self._lease_ends: dict[str, float] = {}
        self._life = secrets.token_hex(8)
        # The log holds items `_version - len(_log) + 1 … _version`; a reader further behind gets a snapshot.
        self._log: deque[NewsItem] = deque(maxlen=settings.log_batches_max)
        self._version = 0
        self._changed = asyncio.Event()

    async def publish(self, batch: EventBatch) -> None:
        self._expire()
        self._index.apply(batch)
        self._renew(batch.replica_id)
        self._record(batch)

    async def publish_inventory(self, inventory: Inventory) -> None:
        self._expire()
        self._index.replace(inventory)
        self._renew(inventory.replica_id)
        self._record(inventory)

    async def heartbeat(self, replica_id: str, epoch: int) -> None:
        self._expire()
        self._index.check_epoch(replica_id, epoch)
        self._renew(replica_id)

    async def deregister(self, replica_id: str, epoch: int) -> None:
        registration = self._index.registration(replica_id)
        if registration is not None and registration.epoch <= epoch:
            self._depart(replica_id)

    async def match(self, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        self._expire()
        return self._index.match(block_hashes)

    async def read(self, cursor: Cursor | None, timeout_s: float) -> News:
        self._expire()
        if cursor == self._cursor():
            try:
                await asyncio.wait_for(self._changed.wait(), timeout_s)
            except TimeoutError:
                self._expire()
        # Only now, for more may have happened during the wait than the log holds.
        num_missed = self._version - cursor.version if cursor is not None and cursor.life == self._life else None
        if num_missed is None or not 0 <= num_missed <= len(self._log):
            return News(self._cursor(), self._index.inventories(), is_snapshot=True)
        items = tuple(itertools.islice(self._log, len(self._log) - num_missed, None))
        return News(self._cursor(), items, is_snapshot=False)

    def check_invariants(self) -> None:
        """Assert that every registered replica has a lease, and nobody else; for tests."""
        self._index.check_invariants()
        assert set(self._lease_ends) == self._index.replica_ids

    def _cursor(self) -> Cursor:
        return Cursor(self._life, self._version)

    def _record(self, item: NewsItem) -> None:
        self._log.append(item)
        self._version += 1
        # Waiters hold the old event, so setting it wakes all of them, once.
        self._changed.set()
        self._changed = asyncio.Event()

    def _renew(self, replica_id: str) -> None:
        self._lease_ends[replica_id] = self._clock() + self._lease_s

    def _expire(self) -> None:
        now = self._clock()
        for replica_id in [replica_id for replica_id, end in self._lease_ends.items() if end <= now]:
            self._depart(replica_id)

    def _depart(self, replica_id: str) -> None:
        registration = self._index.registration(replica_id)
        if registration is None:
            raise UnknownReplicaError(replica_id)
        del self._lease_ends[replica_id]
        self._index.drop(replica_id)
        self._record(Departure(replica_id, registration.epoch))
