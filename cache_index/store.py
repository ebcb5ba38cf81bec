"""The contract of an index store: the one truth that replicas publish to and that routers' mirrors follow.

    replica ──publish, heartbeat──▶ store ──read, match──▶ mirror in each router ──announce──▶ store
            ◀──────notices────────

Two stores pass the same contract suite: on Redis (`redis_store`), and embedded, an actor in the Ray cluster
(`actor_store`). Both are partitioned by tenant: nothing said of one tenant is found under another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .blocks import BlockHash
from .events import EventBatch, Heartbeat, Inventory, Registration
from .identity import CacheIdentity

__all__ = [
    "Cursor",
    "Departure",
    "IndexStore",
    "News",
    "NewsItem",
    "Notices",
    "ReplicaStats",
    "StoreStats",
    "TenantPurge",
    "TenantStats",
]


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a store's log. `life` tells it from the same version after the store lost data, or some of it."""

    life: str
    version: int


@dataclass(frozen=True, slots=True)
class Departure:
    """A replica that signed off, or whose lease ran out; nothing of it or of an earlier epoch counts any more."""

    replica_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class TenantPurge:
    """All entries of a tenant were dropped, on every replica."""

    tenant: bytes


NewsItem = EventBatch | Inventory | Heartbeat | Departure | TenantPurge


@dataclass(frozen=True, slots=True)
class News:
    """What a follower reads: the items after its cursor in order or, where `is_snapshot`, all there is.

    A snapshot replaces everything that the follower knows; its items are inventories. num_behind: items that the log
    holds after these, for a read is bounded.
    """

    cursor: Cursor
    items: tuple[NewsItem, ...]
    is_snapshot: bool
    num_behind: int = 0


@dataclass(frozen=True, slots=True)
class Notices:
    """What a store has to say to a replica.

    purged: tenants of which the replica has to drop all blocks, purged since the heartbeat's `num_purges_seen`.
    num_purges: what to say in the next heartbeat. identities: those under which gateways hash prompts, each once.
    """

    num_purges: int = 0
    purged: tuple[bytes, ...] = ()
    identities: tuple[CacheIdentity, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """A registered replica. lease_left_s: until it no longer counts. num_blocks: what the store says that it holds."""

    registration: Registration
    seq: int
    lease_left_s: float
    num_blocks: int


@dataclass(frozen=True, slots=True)
class TenantStats:
    """A tenant's partition. num_blocks: each counted once; num_copies: each as often as replicas hold it.

    memory_bytes: of the partition in the store, None where it can't tell.
    """

    tenant: bytes
    num_blocks: int
    num_copies: int
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store is and holds. description: its kind and version. log_items: kept for followers."""

    description: str
    version: int
    log_items: int
    replicas: tuple[ReplicaStats, ...]
    tenants: tuple[TenantStats, ...]


class IndexStore(Protocol):
    """Where replicas say what they hold. Every method raises StoreUnavailableError when the store can't be reached.

    A tenant is named by its key, 16 bytes (`identity.tenant_key`).
    """

    async def publish(self, batch: EventBatch) -> None:
        """Apply a batch and renew the lease. A batch that was applied before changes nothing.

        Raises UnknownReplicaError, StaleEpochError, SequenceGapError or DriftError; after all but StaleEpochError the
        replica publishes its inventory.
        """

    async def publish_inventory(self, inventory: Inventory) -> None:
        """Replace what is known of a replica, and renew its lease.

        The first inventory of an epoch, which may be empty, registers it: what the replica said in earlier epochs is
        void at once. Raises StaleEpochError for an epoch older than the current one.
        """

    async def heartbeat(self, heartbeat: Heartbeat) -> Notices:
        """Renew a lease, compare digests, and hear what there is to know.

        Raises UnknownReplicaError, StaleEpochError, SequenceGapError where the store is at another batch, or DriftError
        where it holds something else than the replica; in that case the lease was renewed. A replica with purges still
        to hear of is told of them first, and compared the next time.
        """

    async def deregister(self, replica_id: str, epoch: int) -> None:
        """Sign off; a replica that is unknown, or has a newer epoch, is left alone."""

    async def match(self, tenant: bytes, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """Number of leading blocks of a tenant's chain on each replica with a valid lease, where there are any."""

    async def read(self, cursor: Cursor | None, timeout_s: float) -> News:
        """What happened after `cursor`, waiting up to `timeout_s` for something to happen.

        A snapshot without waiting where `cursor` is None, of another life, or further back than the log goes.
        """

    async def announce(self, identity: CacheIdentity) -> None:
        """A gateway hashes prompts under this identity. Forgotten after a lease, so it has to be said again."""

    async def purge(self, tenant: bytes) -> int:
        """Drop a tenant's entries, and have every replica drop its blocks. Returns how many blocks the index knew of.

        The cost depends on that tenant alone.
        """

    async def describe(self) -> str:
        """Kind and version of the store. Connects and checks that it can be used, and changes nothing.

        Raises StoreRefusedError where it can't, and no time will help.
        """

    async def stats(self) -> StoreStats:
        """What the store holds, by replica and by tenant; for people, not for a request's path."""

    async def close(self) -> None:
        """Give up connections. Nothing else may be called afterwards."""
