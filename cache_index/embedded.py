"""The embedded index store: a memory index, leases, and a bounded log for followers. Plain Python, no Ray.

One event loop owns it. Nothing is kept on disk: a store that restarts is empty, has a new life, and is filled again by
the replicas, which learn of it by UnknownReplicaError.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from .blocks import BlockHash
from .errors import DriftError, SequenceGapError
from .events import EventBatch, Heartbeat, Inventory
from .identity import CacheIdentity
from .log import NewsLog
from .memory import MemoryIndex
from .settings import IndexSettings
from .store import Cursor, Departure, News, NewsItem, Notices, ReplicaStats, StoreStats, TenantPurge, TenantStats

__all__ = ["EmbeddedStore"]

# Tenants whose purge is remembered for replicas that were away; one that misses more of them lost its lease long ago.
PURGES_MAX = 1_000
# Identities that gateways may have at once: each is a model with an adapter and a template.
IDENTITIES_MAX = 64


class EmbeddedStore:
    """An `IndexStore` in this process. `clock` gives seconds and never goes back."""

    def __init__(self, settings: IndexSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = settings.lease_s
        self._clock = clock
        self._index = MemoryIndex()
        self._lease_ends: dict[str, float] = {}
        self._life = secrets.token_hex(8)
        self._log = NewsLog(settings.log_batches_max, settings.log_blocks_max)
        self._changed = asyncio.Event()
        # By tenant, the number of its last purge; by identity, until when it counts. Both oldest first.
        self._purges: dict[bytes, int] = {}
        self._num_purges = 0
        self._identity_ends: dict[CacheIdentity, float] = {}

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

    async def heartbeat(self, heartbeat: Heartbeat) -> Notices:
        self._expire()
        replica_id = heartbeat.replica_id
        self._index.check_epoch(replica_id, heartbeat.epoch)
        seq = self._index.seq(replica_id)
        if heartbeat.seq != seq:
            raise SequenceGapError(replica_id, seq, heartbeat.seq)
        self._renew(replica_id)
        purged = self._purged_since(heartbeat.num_purges_seen)
        # Until it has heard of them it holds what is gone here, which is neither drift nor anybody's news.
        if not purged:
            stored = self._index.digest(replica_id)
            if heartbeat.digest != stored:
                raise DriftError(replica_id, heartbeat.digest.num_blocks, stored.num_blocks)
            self._record(heartbeat)
        return Notices(self._num_purges, purged, self._identities())

    async def deregister(self, replica_id: str, epoch: int) -> None:
        registration = self._index.registration(replica_id)
        if registration is not None and registration.epoch <= epoch:
            self._depart(replica_id)

    async def match(self, tenant: bytes, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        self._expire()
        return self._index.match(tenant, block_hashes)

    async def read(self, cursor: Cursor | None, timeout_s: float) -> News:
        self._expire()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while cursor == self._cursor() and (left_s := end_s - loop.time()) > 0.0:
            await self._wait_for_change(left_s)
            self._expire()
        # Only now, for more may have happened during the wait than the log holds.
        found = self._log.after(cursor.version) if cursor is not None and cursor.life == self._life else None
        if cursor is None or found is None:
            return News(self._cursor(), self._index.inventories(), is_snapshot=True)
        version = cursor.version + len(found)
        return News(Cursor(self._life, version), found, is_snapshot=False, num_behind=self._log.version - version)

    async def announce(self, identity: CacheIdentity) -> None:
        # Taken out first, so that the dictionary's order is that of the announcements.
        self._identity_ends.pop(identity, None)
        self._identity_ends[identity] = self._clock() + self._lease_s
        while len(self._identity_ends) > IDENTITIES_MAX:
            del self._identity_ends[next(iter(self._identity_ends))]

    async def purge(self, tenant: bytes) -> int:
        self._expire()
        num_blocks = self._index.num_tenant_blocks(tenant)
        self._index.purge(tenant)
        self._num_purges += 1
        self._purges.pop(tenant, None)
        self._purges[tenant] = self._num_purges
        while len(self._purges) > PURGES_MAX:
            del self._purges[next(iter(self._purges))]
        self._record(TenantPurge(tenant))
        return num_blocks

    async def describe(self) -> str:
        return "embedded, kept in memory"

    async def stats(self) -> StoreStats:
        self._expire()
        now = self._clock()
        return StoreStats(
            await self.describe(),
            self._log.version,
            self._log.num_items,
            tuple(
                ReplicaStats(
                    registration,
                    self._index.seq(replica_id),
                    self._lease_ends[replica_id] - now,
                    self._index.digest(replica_id).num_blocks,
                )
                for replica_id, registration in self._index.registrations.items()
            ),
            tuple(
                TenantStats(tenant, size.num_blocks, size.num_copies, size.memory_bytes)
                for tenant, size in self._index.tenant_sizes().items()
            ),
        )

    async def close(self) -> None:
        """Nothing to give up: it ends with its process."""

    def check_invariants(self) -> None:
        """Assert that every registered replica has a lease, and nobody else, and that bounds hold; for tests."""
        self._index.check_invariants()
        self._log.check_invariants()
        assert set(self._lease_ends) == set(self._index.registrations)
        assert len(self._purges) <= PURGES_MAX
        assert len(self._identity_ends) <= IDENTITIES_MAX

    def _cursor(self) -> Cursor:
        return Cursor(self._life, self._log.version)

    def _record(self, item: NewsItem) -> None:
        self._log.append(item)
        # Waiters hold the old event, so setting it wakes all of them, once.
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self, timeout_s: float) -> None:
        """Until something is recorded or a lease ends: where all replicas die, nobody else notices."""
        lease_left_s = min(self._lease_ends.values(), default=float("inf")) - self._clock()
        try:
            async with asyncio.timeout(min(timeout_s, lease_left_s)):
                await self._changed.wait()
        except TimeoutError:
            return

    def _purged_since(self, num_purges_seen: int | None) -> tuple[bytes, ...]:
        # None: it was not there to hold what was purged. More than there were: this store is younger than the replica.
        if num_purges_seen is None or num_purges_seen > self._num_purges:
            return ()
        return tuple(tenant for tenant, number in self._purges.items() if number > num_purges_seen)

    def _identities(self) -> tuple[CacheIdentity, ...]:
        now = self._clock()
        self._identity_ends = {identity: end for identity, end in self._identity_ends.items() if end > now}
        return tuple(self._identity_ends)

    def _renew(self, replica_id: str) -> None:
        self._lease_ends[replica_id] = self._clock() + self._lease_s

    def _expire(self) -> None:
        now = self._clock()
        for replica_id in [replica_id for replica_id, end in self._lease_ends.items() if end <= now]:
            self._depart(replica_id)

    def _depart(self, replica_id: str) -> None:
        epoch = self._index.registrations[replica_id].epoch
        del self._lease_ends[replica_id]
        self._index.drop(replica_id)
        self._record(Departure(replica_id, epoch))
