"""The index in memory: which replica holds which blocks, and how far a chain matches on each.

Every block hash maps to one integer whose bits are the replicas that hold it, so that one dictionary lookup and one AND
per block answer for all replicas at once. It knows nothing of tokens: a match here is a prediction, which the replica's
block pool proves or refutes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .blocks import BlockHash
from .errors import SequenceGapError, StaleEpochError, UnknownReplicaError
from .events import BlocksCleared, BlocksRemoved, BlocksStored, EventBatch, Inventory, Registration

__all__ = ["MemoryIndex"]

# Retired slots are cleaned this many blocks at a time, so that no single small call holds an event loop for long.
CLEANED_BLOCKS_PER_CALL = 2_000


@dataclass(slots=True)
class _Replica:
    registration: Registration
    slot: int
    seq: int = 0
    blocks: dict[BlockHash, bytes] = field(default_factory=dict)  # hash -> scope


class MemoryIndex:
    """Who holds what, for all replicas at once. Not thread-safe: one thread or one event loop owns it.

    A replica occupies a slot, which is a bit number. A replica that leaves or registers a new epoch gives its slot up:
    the slot's bit leaves `_live_mask`, which voids all its entries in constant time, and its entries are cleaned up a
    bounded number at a time before the slot is used again. There are never more of them than there once were live ones.
    """

    def __init__(self) -> None:
        self._holders: dict[BlockHash, int] = {}
        self._replicas: dict[str, _Replica] = {}
        self._replica_ids: dict[int, str] = {}
        self._live_mask = 0
        self._free_slots: list[int] = []
        self._retired: list[_Replica] = []
        self._num_slots = 0

    @property
    def replica_ids(self) -> frozenset[str]:
        """Replicas that are registered here."""
        return frozenset(self._replicas)

    @property
    def num_blocks(self) -> int:
        """Blocks over all registered replicas; a block on two replicas counts twice."""
        return sum(len(replica.blocks) for replica in self._replicas.values())

    def registration(self, replica_id: str) -> Registration | None:
        """What the replica announced of its current epoch, or None if it is not registered."""
        replica = self._replicas.get(replica_id)
        return replica.registration if replica else None

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
            self._retire(current)
        self._clean_up()
        slot = self._free_slots.pop() if self._free_slots else self._new_slot()
        self._replicas[registration.replica_id] = _Replica(registration, slot)
        self._replica_ids[slot] = registration.replica_id
        self._live_mask |= 1 << slot

    def drop(self, replica_id: str) -> None:
        """Forget a replica; nothing of it matches from now on. Unknown replicas are ignored."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            self._retire(replica)
            self._clean_up()

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
        replica.seq = batch.seq
        num_stored = 0
        for event in batch.events:
            match event:
                case BlocksStored(scope, block_hashes):
                    self._store(replica, scope, block_hashes)
                    num_stored += len(block_hashes)
                case BlocksRemoved(_, block_hashes):
                    self._remove(replica, block_hashes)
                case BlocksCleared():
                    self._remove(replica, list(replica.blocks))
        self._clean_up(num_stored)

    def replace(self, inventory: Inventory) -> None:
        """Make the replica's entries equal to its inventory; registers it where necessary.

        An inventory older than what was applied already is ignored. Raises StaleEpochError for one of an older epoch.
        """
        self.register(inventory.registration)
        replica = self._current(inventory.replica_id, inventory.epoch)
        if inventory.seq < replica.seq:
            return
        held = {block_hash: stored.scope for stored in inventory.blocks for block_hash in stored.block_hashes}
        self._remove(replica, [block_hash for block_hash in replica.blocks if block_hash not in held])
        for block_hash, scope in held.items():
            self._store(replica, scope, (block_hash,))
        replica.seq = inventory.seq
        self._clean_up(len(held))

    def inventories(self) -> tuple[Inventory, ...]:
        """What every registered replica holds, blocks in the order in which they were stored."""
        return tuple(
            Inventory(replica.registration, replica.seq, tuple(_group_by_scope(replica.blocks)))
            for replica in self._replicas.values()
        )

    def match(self, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """Number of leading blocks of a chain that each replica holds; replicas that hold none are left out.

        O(len(block_hashes)), whatever the number of replicas. A replica counts up to its first missing block.
        """
        matched: dict[str, int] = {}
        candidates = self._live_mask
        holders = self._holders
        for num_matched, block_hash in enumerate(block_hashes):
            still = candidates & holders.get(block_hash, 0)
            if still != candidates:
                if num_matched:
                    self._note(matched, candidates & ~still, num_matched)
                if not still:
                    return matched
                candidates = still
        if block_hashes:
            self._note(matched, candidates, len(block_hashes))
        return matched

    def check_invariants(self) -> None:
        """Assert that bits, slots and per-replica blocks say the same; for tests."""
        slots = [replica.slot for replica in (*self._replicas.values(), *self._retired)] + self._free_slots
        assert sorted(slots) == list(range(self._num_slots)), (
            "every slot is live, retired or free, and only one of them"
        )
        assert self._live_mask == sum(1 << replica.slot for replica in self._replicas.values())
        assert self._replica_ids == {replica.slot: replica_id for replica_id, replica in self._replicas.items()}
        expected: dict[BlockHash, int] = {}
        for replica in (*self._replicas.values(), *self._retired):
            for block_hash in replica.blocks:
                expected[block_hash] = expected.get(block_hash, 0) | 1 << replica.slot
        assert expected == self._holders, "a block's bits are exactly the replicas that hold it"

    def _current(self, replica_id: str, epoch: int) -> _Replica:
        replica = self._replicas.get(replica_id)
        if replica is None or replica.registration.epoch < epoch:
            raise UnknownReplicaError(replica_id)
        if replica.registration.epoch > epoch:
            raise StaleEpochError(replica_id, epoch, replica.registration.epoch)
        return replica

    def _note(self, matched: dict[str, int], mask: int, num_matched: int) -> None:
        while mask:
            lowest = mask & -mask
            matched[self._replica_ids[lowest.bit_length() - 1]] = num_matched
            mask ^= lowest

    def _store(self, replica: _Replica, scope: bytes, block_hashes: Iterable[BlockHash]) -> None:
        bit = 1 << replica.slot
        for block_hash in block_hashes:
            replica.blocks[block_hash] = scope
            self._holders[block_hash] = self._holders.get(block_hash, 0) | bit

    def _remove(self, replica: _Replica, block_hashes: Iterable[BlockHash]) -> None:
        keep = ~(1 << replica.slot)
        for block_hash in block_hashes:
            if replica.blocks.pop(block_hash, None) is None:
                continue
            left = self._holders[block_hash] & keep
            if left:
                self._holders[block_hash] = left
            else:
                del self._holders[block_hash]

    def _new_slot(self) -> int:
        self._num_slots += 1
        return self._num_slots - 1

    def _retire(self, replica: _Replica) -> None:
        del self._replicas[replica.registration.replica_id]
        del self._replica_ids[replica.slot]
        self._live_mask &= ~(1 << replica.slot)
        self._retired.append(replica)

    def _clean_up(self, num_stored: int = 0) -> None:
        # Never fewer than were just stored: a replica that comes and goes stores all it holds each time, so what is
        # retired stays below the most that was ever live.
        num_left = max(CLEANED_BLOCKS_PER_CALL, num_stored)
        while self._retired and num_left:
            replica = self._retired[-1]
            some = [block_hash for block_hash, _ in zip(replica.blocks, range(num_left), strict=False)]
            self._remove(replica, some)
            num_left -= len(some)
            if not replica.blocks:
                self._retired.pop()
                self._free_slots.append(replica.slot)


def _group_by_scope(blocks: Mapping[BlockHash, bytes]) -> Iterator[BlocksStored]:
    by_scope: dict[bytes, list[BlockHash]] = {}
    for block_hash, scope in blocks.items():
        by_scope.setdefault(scope, []).append(block_hash)
    for scope, block_hashes in by_scope.items():
        yield BlocksStored(scope, tuple(block_hashes))
