"""A router's own copy of the index: follows a store and answers without a network call, unless something is missing.

    store ──read──▶ follower ──▶ MemoryIndex (bounded) ◀── match, lookup
      ◀──────────── match, where the mirror is not complete ──────┘

One event loop owns it. News are applied between two of the loop's turns, large ones in several, so a match sees one
consistent state without a lock.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .blocks import BlockHash
from .errors import CacheIndexError, SequenceGapError, StaleEpochError, StoreUnavailableError, UnknownReplicaError
from .events import Digest, EventBatch, Heartbeat, Inventory, Registration, num_named
from .memory import BLOCKS_PER_STEP, MemoryIndex
from .settings import IndexSettings
from .store import Cursor, Departure, IndexStore, News, NewsItem, TenantPurge

__all__ = ["DigestComparison", "IndexMirror", "Lookup"]

logger = logging.getLogger(__name__)

# Between attempts to reach a store that is away; soon after its return the mirror is warm again.
_RETRY_S_MIN, _RETRY_S_MAX = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class Lookup:
    """matched: leading blocks of the chain on each replica. blind_reason: why more may be held than that, else None."""

    matched: Mapping[str, int]
    blind_reason: str | None


@dataclass(frozen=True, slots=True)
class DigestComparison:
    """What a replica said that it holds, and what a mirror that had followed it so far knew of it."""

    said: Digest
    known: Digest

    @property
    def agrees(self) -> bool:
        return self.said == self.known


class IndexMirror:
    """Follows a store for as long as `follow` runs; keeps what it knows while the store is away.

    num_snapshots: snapshots applied. num_gaps: batches that were missing. num_drifts: heartbeats that told of something
    else than what is known here. num_lookups; of them num_read_throughs asked the store, and num_blind_lookups were
    answered without knowing whether there is more. lag_items: what the store's log held beyond the last read.
    degraded_reason: why the store is away, None while it answers. comparisons: the last one by replica, of those that
    are known in full.
    """

    def __init__(self, store: IndexStore, settings: IndexSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._index = MemoryIndex(settings.mirror_blocks_max)
        self._cursor: Cursor | None = None
        self._answered_s = clock()
        self._drift_snapshot_s: float | None = None
        self._num_applied = 0
        self._num_evicted_before = 0
        self.num_snapshots = 0
        self.num_gaps = 0
        self.num_drifts = 0
        self.num_lookups = 0
        self.num_read_throughs = 0
        self.num_blind_lookups = 0
        self.lag_items = 0
        self.degraded_reason: str | None = None
        self.comparisons: dict[str, DigestComparison] = {}

    @property
    def is_complete(self) -> bool:
        """Whether an absent block means that no replica holds it: there was a snapshot, and nothing is evicted."""
        return self.num_snapshots > 0 and self._index.is_whole

    @property
    def num_blocks(self) -> int:
        """Blocks over all replicas; a block on two counts twice."""
        return self._index.num_blocks

    @property
    def num_evicted_blocks(self) -> int:
        """Blocks given up for `mirror_blocks_max` since the start."""
        return self._num_evicted_before + self._index.num_evicted_blocks

    @property
    def registrations(self) -> Mapping[str, Registration]:
        """The replicas that the store knows."""
        return self._index.registrations

    def registration(self, replica_id: str) -> Registration | None:
        """What the store knows of a replica's current epoch, or None."""
        return self._index.registration(replica_id)

    @property
    def silence_s(self) -> float:
        """Since the store last answered, or since the mirror was made."""
        return self._clock() - self._answered_s

    def num_blocks_of(self, replica_id: str) -> int:
        """Blocks that the replica is known to hold. Raises UnknownReplicaError."""
        return self._index.digest(replica_id).num_blocks

    def match(self, tenant: bytes, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """Number of leading blocks of a tenant's chain on each replica, as far as is known here. O(blocks)."""
        return self._index.match(tenant, block_hashes)

    async def lookup(self, tenant: bytes, block_hashes: Sequence[BlockHash]) -> Lookup:
        """`match`, with one call to the store where something may be missing here. Raises nothing but CancelledError.

        No call is made where the mirror is complete, where the whole chain matched, or while the store is away. One
        takes at most `lookup_timeout_s`; after a failure none is made until the follower has heard of the store again,
        or each request would wait that long for nothing.
        """
        self.num_lookups += 1
        matched = self._index.match(tenant, block_hashes)
        if self.is_complete or max(matched.values(), default=0) == len(block_hashes):
            return Lookup(matched, None)
        if self.degraded_reason is not None:
            return self._blind(matched, "the index store is away" if self.num_snapshots else "no index yet")
        num_applied = self._num_applied
        self.num_read_throughs += 1
        try:
            async with asyncio.timeout(self._settings.lookup_timeout_s):
                found = await self._store.match(tenant, block_hashes)
        except TimeoutError:
            self._degrade(f"a lookup took more than {self._settings.lookup_timeout_s:g} s")
            return self._blind(matched, "the lookup timed out")
        except StoreUnavailableError as error:
            self._degrade(str(error))
            return self._blind(matched, "the index store is away")
        except Exception as error:
            # Not even a fault of a store's own may cost a request.
            logger.exception("a lookup failed")
            self._degrade(repr(error))
            return self._blind(matched, "the lookup failed")
        self._answered_s = self._clock()
        # Where news were applied meanwhile the answer may be older than they are, and would bring back what they
        # removed. Where it is newer than what was applied, the news on their way say the same again.
        if self._num_applied == num_applied:
            self._index.learn(tenant, block_hashes, found)
        return Lookup(found, None)

    async def follow(self) -> None:
        """Follow the store until cancelled; an unreachable store is tried again with a growing, bounded pause."""
        pause_s = _RETRY_S_MIN
        while True:
            try:
                await self.catch_up(self._settings.follow_timeout_s)
                pause_s = _RETRY_S_MIN
            except StoreUnavailableError:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _RETRY_S_MAX)

    async def catch_up(self, timeout_s: float) -> None:
        """Read once, waiting up to `timeout_s` for news, and apply them. Raises StoreUnavailableError."""
        try:
            news = await self._store.read(self._cursor, timeout_s)
        except StoreUnavailableError as error:
            self._degrade(str(error))
            raise
        self._answered_s = self._clock()
        self.degraded_reason = None
        await self.apply(news)

    async def apply(self, news: News) -> None:
        """Apply what was read. A gap or drift makes the next read ask for a snapshot.

        A snapshot counts only when all of it was applied. Until then what was known before does, so memory for both is
        needed meanwhile.
        """
        # Whoever cancels this halfway leaves a mirror that begins anew.
        self._cursor = None
        # Nothing that was known before may outlive a snapshot, not even what seems newer: a store that lost its data
        # may first hear a late word, and no mirror knows better than its store.
        index = MemoryIndex(self._settings.mirror_blocks_max) if news.is_snapshot else self._index
        num_unyielded, is_drifted = 0, False
        for item in news.items:
            try:
                is_drifted |= await self._apply_item(index, item)
            except StaleEpochError:
                continue  # A late word of an earlier life: void, as everything said in that epoch.
            except (SequenceGapError, UnknownReplicaError) as error:
                self._note_gap(error)
                return
            finally:
                self._num_applied += 1
            num_unyielded += _num_blocks(item)
            if num_unyielded >= BLOCKS_PER_STEP:
                num_unyielded = 0
                await asyncio.sleep(0)
        if news.is_snapshot:
            self._put(index)
        self.lag_items = news.num_behind
        if not is_drifted:
            self._cursor = news.cursor

    def _put(self, index: MemoryIndex) -> None:
        """Know what a snapshot says instead of what was known."""
        before, self._index = self._index, index
        self._num_evicted_before += before.num_evicted_blocks
        self.num_snapshots += 1
        # An empty one too is news to a lookup that was sent before.
        self._num_applied += 1
        for replica_id in tuple(self.comparisons):
            if index.registration(replica_id) != before.registration(replica_id):
                del self.comparisons[replica_id]

    async def _apply_item(self, index: MemoryIndex, item: NewsItem) -> bool:
        """Apply one item; returns whether it told of drift for which a snapshot is to be read."""
        match item:
            case EventBatch():
                index.apply(item)
            case Inventory():
                for _ in index.replace_steps(item):
                    await asyncio.sleep(0)
                self.comparisons.pop(item.replica_id, None)
            case Heartbeat():
                return self._differs(index, item)
            case TenantPurge(tenant):
                index.purge(tenant)
            case Departure(replica_id, epoch):
                registration = index.registration(replica_id)
                if registration is not None and registration.epoch <= epoch:
                    index.drop(replica_id)
                    self.comparisons.pop(replica_id, None)
        return False

    def _differs(self, index: MemoryIndex, heartbeat: Heartbeat) -> bool:
        """Compare a heartbeat with what is known; returns whether a snapshot is to be read."""
        replica_id = heartbeat.replica_id
        index.check_epoch(replica_id, heartbeat.epoch)
        seq = index.seq(replica_id)
        # A late word, or of a replica of which the rest is in the store only.
        if heartbeat.seq < seq or not index.is_known_in_full(replica_id):
            return False
        comparison = DigestComparison(heartbeat.digest, index.digest(replica_id))
        self.comparisons[replica_id] = comparison
        if heartbeat.seq == seq and comparison.agrees:
            return False
        self.num_drifts += 1
        logger.warning(
            "the index mirror has drifted from replica %s: after batch %d it knows %s, and after batch %d there are %s",
            replica_id,
            seq,
            comparison.known,
            heartbeat.seq,
            comparison.said,
        )
        # Where the store itself has drifted a snapshot does not help, so it is not read over and over.
        now = self._clock()
        if self._drift_snapshot_s is not None and now - self._drift_snapshot_s < self._settings.heartbeat_interval_s:
            return False
        self._drift_snapshot_s = now
        return True

    def _note_gap(self, error: CacheIndexError) -> None:
        self.num_gaps += 1
        logger.warning("the index mirror asks for a snapshot: %s", error)

    def _degrade(self, reason: str) -> None:
        if self.degraded_reason is None:
            logger.warning("the index mirror goes on with what it knows: %s", reason)
        self.degraded_reason = reason

    def _blind(self, matched: Mapping[str, int], reason: str) -> Lookup:
        self.num_blind_lookups += 1
        return Lookup(matched, reason)


def _num_blocks(item: NewsItem) -> int:
    """Blocks that are applied in one go: an inventory's are not."""
    if not isinstance(item, EventBatch):
        return 0
    return sum(num_named(event) for event in item.events)
