"""The contract of an index store: the one truth that replicas publish to and that routers' mirrors follow.

    replica ──publish, heartbeat──▶ store ──read──▶ mirror in each router

Every store passes the same contract suite. The embedded one (`actor_store`) is an actor in the Ray cluster; the Redis
store of the index issue will stand beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .blocks import BlockHash
from .events import EventBatch, Inventory

__all__ = ["Cursor", "Departure", "IndexStore", "News", "NewsItem"]


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in one life of a store's log. A store that lost its data has a new `life`, which voids old cursors."""

    life: str
    version: int


@dataclass(frozen=True, slots=True)
class Departure:
    """A replica that signed off, or whose lease ran out; nothing of it or of an earlier epoch counts any more."""

    replica_id: str
    epoch: int


NewsItem = EventBatch | Inventory | Departure


@dataclass(frozen=True, slots=True)
class News:
    """What a follower reads: the items after its cursor in order or, where `is_snapshot`, all there is.

    A snapshot replaces everything that the follower knows; its items are inventories.
    """

    cursor: Cursor
    items: tuple[NewsItem, ...]
    is_snapshot: bool


class IndexStore(Protocol):
    """Where replicas say what they hold. Every method raises StoreUnavailableError when the store can't be reached."""

    async def publish(self, batch: EventBatch) -> None:
        """Apply a batch and renew the lease. A batch that was applied before changes nothing.

        Raises UnknownReplicaError, StaleEpochError or SequenceGapError; after the first and last of them the replica
        publishes its inventory.
        """

    async def publish_inventory(self, inventory: Inventory) -> None:
        """Replace what is known of a replica, and renew its lease.

        The first inventory of an epoch, which may be empty, registers it: what the replica said in earlier epochs is
        void at once. Raises StaleEpochError for an epoch older than the current one.
        """

    async def heartbeat(self, replica_id: str, epoch: int) -> None:
        """Renew a lease. Raises UnknownReplicaError or StaleEpochError."""

    async def deregister(self, replica_id: str, epoch: int) -> None:
        """Sign off; a replica that is unknown, or has a newer epoch, is left alone."""

    async def match(self, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """Number of leading blocks of the chain on each replica with a valid lease; those with none are left out."""

    async def read(self, cursor: Cursor | None, timeout_s: float) -> News:
        """What happened after `cursor`, waiting up to `timeout_s` for something to happen.

        A snapshot without waiting where `cursor` is None, of another life, or further back than the log goes.
        """
