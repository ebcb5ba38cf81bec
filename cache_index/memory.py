"""The index in memory: which replica holds which blocks of which tenant, and how far a chain matches on each.

Knows replicas, their epochs and the order of what they say; who holds what is kept in `BlockHolders`. It knows nothing
of tokens: a match here is a prediction, which the replica's block pool proves or refutes.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from .blocks import BlockHash
from .errors import SequenceGapError, StaleEpochError, UnknownReplicaError
from .events import BlocksCleared, BlocksRemoved, BlocksStored, Digest, EventBatch, Inventory, Registration
from .holders import BlockHolders
from .partition import Names, PartitionSize

__all__ = ["MemoryIndex"]

# Blocks of an inventory that are stored before others get a turn, about two milliseconds of them.
BLOCKS_PER_STEP = 2_000


@dataclass(slots=True)
class _Replica:
    registration: Registration
    bit: int
    seq: int = 0


class MemoryIndex:
    """Who holds what, for all replicas at once. Not thread-safe: one thread or one event loop owns it.

    A replica that registers a new epoch, clears its cache or publishes an inventory becomes a new holder, so that what
    it said before is void in constant time. Partitioned by tenant: nothing said of one is found under another.

    blocks_max: blocks kept over all tenants, each counted once; past it those are given up that no match used lately,
    and the replicas that hold them are known in part. None keeps everything.
    """

    def __init__(self, blocks_max: int | None = None) -> None:
        self._holders = BlockHolders(blocks_max)
        self._replicas: dict[str, _Replica] = {}
        self._replica_ids: dict[int, str] = {}
        self._names = Names(self._replica_ids)
        # Not all holders are live: what an inventory says counts only when all of it was stored.
        self._live_mask = 0

    @property
    def registrations(self) -> Mapping[str, Registration]:
        """The registered replicas' current epochs, by replica."""
        return {replica_id: replica.registration for replica_id, replica in self._replicas.items()}

    @property
    def num_blocks(self) -> int:
        """Blocks over all registered replicas; a block on two replicas counts twice."""
        return sum(self._holders.digest(replica.bit).num_blocks for replica in self._replicas.values())

    @property
    def num_evicted_blocks(self) -> int:
        """Blocks given up for the bound since the start, each counted once."""
        return self._holders.num_evicted

    @property
    def is_whole(self) -> bool:
        """Whether every registered replica is known in full, so that an absent block means that nobody holds it."""
        return not self._holders.is_partial(self._live_mask)

    def registration(self, replica_id: str) -> Registration | None:
        """What the replica announced of its current epoch, or None if it is not registered."""
        replica = self._replicas.get(replica_id)
        return replica.registration if replica else None

    def seq(self, replica_id: str) -> int:
        """The last batch that was applied. Raises UnknownReplicaError."""
        return self._known(replica_id).seq

    def digest(self, replica_id: str) -> Digest:
        """What the replica holds, over all tenants, as far as it is known. O(1). Raises UnknownReplicaError."""
        return self._holders.digest(self._known(replica_id).bit)

    def is_known_in_full(self, replica_id: str) -> bool:
        """Whether none of the replica's blocks was given up for the bound. Raises UnknownReplicaError."""
        return not self._holders.is_partial(self._known(replica_id).bit)

    def tenant_sizes(self) -> Mapping[bytes, PartitionSize]:
        """How large the partitions are of the tenants of which any replica holds anything. O(blocks)."""
        return self._holders.sizes()

    def num_tenant_blocks(self, tenant: bytes) -> int:
        """Blocks of a tenant that any replica holds, each counted once. O(blocks of the tenant)."""
        return self._holders.num_blocks(tenant)

    def register(self, registration: Registration) -> None:
        """Begin an epoch; whatever the replica said in an earlier one is void at once.

        The same epoch again is a no-op. Raises StaleEpochError for an epoch older than the current one.
        """
        current = self._replicas.get(registration.replica_id)
        if current is not None:
            if registration.epoch < current.registration.epoch:
                raise StaleEpochError(registration.replica_id, registration.epoch, current.registration.epoch)
            if registration.epoch == current.registration.epoch:
                return
        self._put(_Replica(registration, self._holders.admit()))
        self._holders.clean_up()

    def drop(self, replica_id: str) -> None:
        """Forget a replica; nothing of it matches from now on. Unknown replicas are ignored."""
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            self._retire(replica)
            self._holders.clean_up()

    def check_epoch(self, replica_id: str, epoch: int) -> None:
        """Raises UnknownReplicaError or StaleEpochError unless this is the replica's current epoch."""
        self._current(replica_id, epoch)

    def apply(self, batch: EventBatch) -> None:
        """Apply one batch of a registered replica.

        A batch that was applied before is ignored. Raises UnknownReplicaError, StaleEpochError, or SequenceGapError;
        in each case nothing was applied.
        """
        replica = self._current(batch.replica_id, batch.epoch)
        if batch.seq <= replica.seq:
            return
        if batch.seq != replica.seq + 1:
            raise SequenceGapError(batch.replica_id, replica.seq + 1, batch.seq)
        for event in batch.events:
            match event:
                case BlocksStored(tenant, block_hashes):
                    self._holders.store(tenant, block_hashes, replica.bit)
                case BlocksRemoved(tenant, block_hashes):
                    self._holders.remove(tenant, block_hashes, replica.bit)
                case BlocksCleared():
                    replica = self._cleared(replica)
        replica.seq = batch.seq
        self._holders.clean_up()

    def replace(self, inventory: Inventory) -> None:
        """Make the replica's entries equal to its inventory; registers it where necessary.

        An inventory older than what was applied already is ignored. Raises StaleEpochError for one of an older epoch.
        """
        for _ in self.replace_steps(inventory):
            pass

    def replace_steps(self, inventory: Inventory) -> Generator[None, None, None]:
        """`replace` in steps of `BLOCKS_PER_STEP`, between which the index may be used and changed.

        Of what the inventory says nothing counts before the last step, and what the replica said before counts until
        then, unless it was in an earlier epoch.
        """
        self.register(inventory.registration)
        if inventory.seq < self._known(inventory.replica_id).seq:
            return
        replica = _Replica(inventory.registration, self._holders.admit(), inventory.seq)
        is_done, num_in_step = False, 0
        try:
            for stored in inventory.blocks:
                for first in range(0, len(stored.block_hashes), BLOCKS_PER_STEP):
                    some = stored.block_hashes[first : first + BLOCKS_PER_STEP]
                    self._holders.store(stored.tenant, some, replica.bit)
                    num_in_step += len(some)
                    if num_in_step >= BLOCKS_PER_STEP:
                        num_in_step = 0
                        self._holders.clean_up()
                        yield
            current = self._replicas.get(inventory.replica_id)
            # Between the steps it may have left, begun another epoch, or said something newer.
            if current is not None and current.registration.epoch == inventory.epoch and current.seq <= inventory.seq:
                self._put(replica)
                is_done = True
        finally:
            if not is_done:
                self._holders.retire(replica.bit)
            self._holders.clean_up()

    def learn(self, tenant: bytes, block_hashes: Sequence[BlockHash], matched: Mapping[str, int]) -> None:
        """Take in what a store answered about a chain: `matched` leading blocks on each replica.

        Only of replicas known in part: of the others everything is known, and what is newer arrives as a batch.
        """
        for replica_id, num_matched in matched.items():
            replica = self._replicas.get(replica_id)
            if replica is not None and self._holders.is_partial(replica.bit):
                self._holders.store(tenant, block_hashes[:num_matched], replica.bit)
        self._holders.clean_up()

    def purge(self, tenant: bytes) -> None:
        """Drop a tenant's partition. O(replicas): the memory is given back by later calls."""
        self._holders.purge(tenant)
        self._holders.clean_up()

    def inventories(self) -> tuple[Inventory, ...]:
        """What every registered replica holds. O(blocks and copies)."""
        blocks: dict[int, list[BlocksStored]] = {replica.bit: [] for replica in self._replicas.values()}
        for tenant in self._holders.tenants:
            for bit, block_hashes in self._holders.blocks(tenant).items():
                if bit in blocks:
                    blocks[bit].append(BlocksStored(tenant, tuple(block_hashes)))
        return tuple(
            Inventory(replica.registration, replica.seq, tuple(blocks[replica.bit]))
            for replica in self._replicas.values()
        )

    def match(self, tenant: bytes, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """Number of leading blocks of a tenant's chain that each replica holds; replicas that hold none are left out.

        O(blocks + replicas). A replica counts up to its first missing block.
        """
        return self._holders.match(tenant, block_hashes, self._live_mask, self._names)

    def check_invariants(self) -> None:
        """Assert that replicas and holders say the same; for tests, and between no two steps."""
        self._holders.check_invariants()
        assert all(replica_id == replica.registration.replica_id for replica_id, replica in self._replicas.items())
        assert self._replica_ids == {replica.bit: replica_id for replica_id, replica in self._replicas.items()}
        assert self._live_mask == sum(self._replica_ids)

    def _known(self, replica_id: str) -> _Replica:
        replica = self._replicas.get(replica_id)
        if replica is None:
            raise UnknownReplicaError(replica_id)
        return replica

    def _current(self, replica_id: str, epoch: int) -> _Replica:
        replica = self._known(replica_id)
        if replica.registration.epoch < epoch:
            raise UnknownReplicaError(replica_id)
        if replica.registration.epoch > epoch:
            raise StaleEpochError(replica_id, epoch, replica.registration.epoch)
        return replica

    def _cleared(self, replica: _Replica) -> _Replica:
        """The same replica holding nothing."""
        if not self._holders.digest(replica.bit).num_blocks and not self._holders.is_partial(replica.bit):
            return replica
        return self._put(_Replica(replica.registration, self._holders.admit(), replica.seq))

    def _put(self, replica: _Replica) -> _Replica:
        """Let a replica count, in place of what it was before."""
        replica_id = replica.registration.replica_id
        before = self._replicas.get(replica_id)
        if before is not None:
            self._retire(before)
        self._replicas[replica_id] = replica
        self._replica_ids[replica.bit] = replica_id
        self._live_mask |= replica.bit
        return replica

    def _retire(self, replica: _Replica) -> None:
        del self._replica_ids[replica.bit]
        # Its bit may be somebody else's next, so no set of bits with it in is remembered.
        self._names = Names(self._replica_ids)
        self._live_mask ^= replica.bit
        self._holders.retire(replica.bit)
