"""A router's own copy of the index: follows a store, answers without a network call.

One event loop owns it: the follower applies news between two of the loop's turns, so a match sees one consistent state
without a lock.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from .blocks import BlockHash
from .errors import CacheIndexError, SequenceGapError, StaleEpochError, StoreUnavailableError, UnknownReplicaError
from .events import EventBatch, Inventory
from .memory import MemoryIndex
from .settings import IndexSettings
from .store import Cursor, Departure, IndexStore, News, NewsItem

__all__ = ["IndexMirror"]

logger = logging.getLogger(__name__)

# Between attempts to reach a store that is away; soon after its return the mirror is warm again.
_RETRY_S_MIN, _RETRY_S_MAX = 0.1, 2.0


class IndexMirror:
    """Follows a store for as long as `follow` runs; keeps what it knows while the store is away.

    is_complete: whether a snapshot was applied, so that an absent block means that no replica holds it.
    num_snapshots, num_gaps: snapshots applied and gaps seen since the start.
    """

    def __init__(self, store: IndexStore, settings: IndexSettings) -> None:
        self._store = store
        self._timeout_s = settings.follow_timeout_s
        self._index = MemoryIndex()
        self._cursor: Cursor | None = None
        self.num_snapshots = 0
        self.num_gaps = 0

    @property
    def is_complete(self) -> bool:
        return self.num_snapshots > 0

    @property
    def num_blocks(self) -> int:
        """Blocks over all replicas; a block on two counts twice."""
        return self._index.num_blocks

    @property
    def replica_ids(self) -> frozenset[str]:
        """Replicas that the store knows."""
        return self._index.replica_ids

    def match(self, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """Number of leading blocks of the chain on each replica; those with none are left out. O(blocks)."""
        return self._index.match(block_hashes)

    async def follow(self) -> None:
        """Follow the store until cancelled; an unreachable store is tried again with a growing, bounded pause."""
        pause_s = _RETRY_S_MIN
        while True:
            try:
                self.apply(await self._store.read(self._cursor, self._timeout_s))
                pause_s = _RETRY_S_MIN
            except StoreUnavailableError as error:
                logger.warning("the index mirror goes on with what it knows: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _RETRY_S_MAX)

    def apply(self, news: News) -> None:
        """Apply what was read. A gap makes the next read ask for a snapshot."""
        self._cursor = news.cursor
        if news.is_snapshot:
            self.num_snapshots += 1
            # Nothing that was known before may outlive it, not even what seems newer: a store that lost its data may
            # first hear a late word, and no mirror knows better than its store.
            self._index = MemoryIndex()
        for item in news.items:
            try:
                self._apply_item(item)
            except StaleEpochError:
                continue  # A late word of an earlier life: void, as everything said in that epoch.
            except (SequenceGapError, UnknownReplicaError) as error:
                self._note_gap(error)
                return

    def _apply_item(self, item: NewsItem) -> None:
        match item:
            case EventBatch():
                self._index.apply(item)
            case Inventory():
                self._index.replace(item)
            case Departure(replica_id, epoch):
                registration = self._index.registration(replica_id)
                if registration is not None and registration.epoch <= epoch:
                    self._index.drop(replica_id)

    def _note_gap(self, error: CacheIndexError) -> None:
        self.num_gaps += 1
        self._cursor = None
        logger.warning("the index mirror asks for a snapshot: %s", error)
