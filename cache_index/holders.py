"""Which blocks are held by whom, tenant by tenant, as the bits of one integer per block.

    tenant ──▶ partition    holders  block hash ──▶ 0b…01101   a bit per holder, the lowest the used mark
                            ring     block hashes in order of arrival
                            tallies  bit ──▶ what its holder has in this partition

Neighbours in a chain are mostly held by the same, and then share one integer: it is made once for a run of them, and a
match looks at it once.

A holder is a bit that `admit` gave out. One that is retired counts no more at once, in constant time; what it left
behind is taken away by a hand that goes round the rings, some blocks with each call, before its bit is given out again.
The same hand evicts where there is a bound: a block that a match used since the hand last came by is kept once more
(CLOCK, Corbató 1968), so chains in use outlive a scan of others that nobody asks for.

It knows nothing of replicas, epochs or batches.
"""

import sys
from collections.abc import Iterable, Sequence

from .blocks import BlockHash
from .events import Digest, block_checksum
from .partition import USED, Names, Partition, PartitionSize, Tally, bits_of

__all__ = ["BlockHolders"]

# The hand passes so many blocks with each change while anything retired is left, about half a millisecond of them.
SWEPT_BLOCKS_PER_CALL = 2_000
# And so many for each block that was removed, or that was stored while anything retired is left. In steady use, where
# as many are removed as are stored, blocks without a holder then stay below those with one in number.
SWEPT_BLOCKS_PER_CHANGE = 2
# Fewer retired bits wait for the hand without making anybody wait; a bit costs an eighth of a byte per block.
RETIRED_BITS_MAX = 64
# The hand passes over so many used blocks before it takes one nevertheless: else storing one block might mean a whole
# round, which is half a second where two million blocks are in use.
SECOND_CHANCES_MAX = 64


class BlockHolders:
    """Who holds what. Not thread-safe: one thread or one event loop owns it.

    blocks_max: blocks kept over all tenants, each counted once; None for no bound.
    num_evicted: blocks given up for the bound since the start.
    """

    def __init__(self, blocks_max: int | None = None) -> None:
        self._blocks_max = sys.maxsize if blocks_max is None else blocks_max
        # Where nothing is ever evicted nobody asks what was used, and a match need not say it.
        self._used = USED if blocks_max is not None else 0
        self._partitions: dict[bytes, Partition] = {}
        self._num_kept = 0
        self._tallies: dict[int, Tally] = {}
        self._admitted = 0
        self._partial = 0
        self.num_evicted = 0
        # Bits that nobody has. A retired one waits until a round begins, and is free when that round ends.
        self._num_bits = 0
        self._free: list[int] = []
        self._waiting: list[int] = []
        self._leaving: list[int] = []
        # Partitions that the hand has still to go through in this round, the current one last.
        self._round: list[Partition] = []
        self._dropped: list[dict[BlockHash, int]] = []
        self._emptied: list[Partition] = []
        self._num_due = 0

    def admit(self) -> int:
        """A bit for somebody who holds nothing yet; no block has it. Amortized O(1) with the sweeps of other calls."""
        if not self._free:
            while len(self._waiting) + len(self._leaving) >= max(RETIRED_BITS_MAX, len(self._tallies)):
                self._sweep(SWEPT_BLOCKS_PER_CALL)
        if self._free:
            bit = self._free.pop()
        else:
            self._num_bits += 1
            bit = USED << self._num_bits
        self._tallies[bit] = Tally()
        self._admitted |= bit
        return bit

    def retire(self, bit: int) -> None:
        """Void all that a holder has. O(1)."""
        tally = self._tallies.pop(bit)
        self._admitted ^= bit
        self._partial &= ~bit
        # Of somebody who holds nothing there is nothing to take away.
        (self._waiting if tally.num_blocks else self._free).append(bit)

    def store(self, tenant: bytes, block_hashes: Sequence[BlockHash], bit: int) -> None:
        """A holder has these blocks of a tenant; what it had already changes nothing."""
        partition = self._partitions.get(tenant)
        if partition is None:
            if not block_hashes:
                return
            partition = self._partitions[tenant] = Partition(tenant)
        holders, ring = partition.holders, partition.ring
        stored: list[BlockHash] = []
        before, after = 0, bit
        for block_hash in block_hashes:
            held_by = holders.get(block_hash)
            if held_by is None:
                if self._num_kept >= self._blocks_max:
                    self._evict()
                ring.append(block_hash)
                self._num_kept += 1
                held_by = 0
            elif held_by & bit:
                continue
            if held_by is not before:
                before, after = held_by, held_by | bit
            holders[block_hash] = after
            stored.append(block_hash)
        if self._has_retired:
            self._num_due += SWEPT_BLOCKS_PER_CHANGE * len(stored)
        # Only now: those of them that were evicted meanwhile have been taken off already, and the sum is the same.
        self._count(partition, bit, Digest.of(stored))

    def remove(self, tenant: bytes, block_hashes: Iterable[BlockHash], bit: int) -> None:
        """A holder no longer has these blocks of a tenant; what it did not have changes nothing."""
        partition = self._partitions.get(tenant)
        if partition is None:
            return
        holders = partition.holders
        removed: list[BlockHash] = []
        before, after = bit, 0
        for block_hash in block_hashes:
            held_by = holders.get(block_hash, 0)
            if held_by & bit:
                if held_by is not before:
                    before, after = held_by, held_by ^ bit
                # A block that nobody holds any more stays until the hand comes, so that it has one place in the ring.
                holders[block_hash] = after
                removed.append(block_hash)
        self._num_due += SWEPT_BLOCKS_PER_CHANGE * len(removed)
        self._count(partition, bit, Digest() - Digest.of(removed))

    def purge(self, tenant: bytes) -> None:
        """Drop a tenant's partition, of all holders. O(holders); the memory is given back by later calls, in parts."""
        partition = self._partitions.pop(tenant, None)
        if partition is None:
            return
        for bit, tally in partition.tallies.items():
            if bit & self._admitted:
                self._tallies[bit].add(-tally.num_blocks, -tally.checksum)
        self._num_kept -= len(partition.holders)
        self._dropped.append(partition.holders)
        # The hand may be in it, and finds that it is through.
        partition.holders, partition.ring, partition.tallies = {}, [], {}
        partition.num_kept = partition.num_passed = 0

    def match(self, tenant: bytes, block_hashes: Sequence[BlockHash], candidates: int, names: Names) -> dict[str, int]:
        """Number of leading blocks of a chain that each candidate holds, by its name; those with none are left out.

        candidates: their bits; names: of each bit. A candidate counts up to its first missing block. O(blocks +
        candidates): one lookup and one AND per block answer for all candidates at once.
        """
        partition = self._partitions.get(tenant)
        return {} if partition is None else partition.match(block_hashes, candidates, names, self._used)

    def digest(self, bit: int) -> Digest:
        """What a holder has, over all tenants. O(1)."""
        return self._tallies[bit].digest

    def is_partial(self, bits: int) -> bool:
        """Whether blocks of any of these holders were evicted since it was admitted."""
        return bool(self._partial & bits)

    def blocks(self, tenant: bytes) -> dict[int, list[BlockHash]]:
        """What each holder has of a tenant, by bit. O(blocks and copies)."""
        partition = self._partitions.get(tenant)
        return {} if partition is None else partition.blocks(self._admitted)

    def num_blocks(self, tenant: bytes) -> int:
        """Blocks of a tenant that anybody holds, each counted once. O(blocks)."""
        partition = self._partitions.get(tenant)
        return 0 if partition is None else partition.num_blocks(self._admitted)

    def sizes(self) -> dict[bytes, PartitionSize]:
        """How large the partitions are in which anybody holds anything. O(blocks)."""
        sizes = {tenant: partition.size(self._admitted) for tenant, partition in self._partitions.items()}
        return {tenant: size for tenant, size in sizes.items() if size.num_copies}

    @property
    def tenants(self) -> tuple[bytes, ...]:
        """Tenants that have a partition, if only one that the hand has not emptied yet."""
        return tuple(self._partitions)

    def clean_up(self) -> None:
        """Take away some of what nobody holds any more, in proportion to the changes since the last call."""
        num_left, self._num_due = self._num_due, 0
        if self._has_retired:
            num_left += SWEPT_BLOCKS_PER_CALL
        self._sweep(num_left)
        for partition in self._emptied:
            if not partition.holders and self._partitions.get(partition.tenant) is partition:
                del self._partitions[partition.tenant]
        self._emptied.clear()

    def check_invariants(self) -> None:
        """Assert that bits, rings, digests and counts say the same, and that bounds hold; for tests."""
        known = [*self._tallies, *self._free, *self._waiting, *self._leaving]
        assert sorted(known) == [USED << number for number in range(1, self._num_bits + 1)], "each bit is in one place"
        assert self._admitted == sum(self._tallies)
        assert self._partial & ~self._admitted == 0
        possible = self._used | sum(known) - sum(self._free)
        assert self._num_kept == sum(len(partition.holders) for partition in self._partitions.values())
        assert self._num_kept <= self._blocks_max
        totals = dict.fromkeys(self._tallies, Digest())
        for tenant, partition in self._partitions.items():
            assert tenant == partition.tenant
            ring = partition.ring[: partition.num_kept] + partition.ring[partition.num_passed :]
            assert sorted(ring) == sorted(partition.holders), "each block is in the ring once"
            for bit in self._tallies:
                held = Digest.of(block_hash for block_hash, held_by in partition.holders.items() if held_by & bit)
                assert partition.tallies.get(bit, Tally()).digest == held, "what is counted is what is held"
                totals[bit] += held
            assert all(held_by & ~possible == 0 for held_by in partition.holders.values()), "a free bit is nobody's"
        assert totals == {bit: tally.digest for bit, tally in self._tallies.items()}

    @property
    def _has_retired(self) -> bool:
        return bool(self._waiting or self._leaving or self._dropped)

    def _count(self, partition: Partition, bit: int, change: Digest) -> None:
        partition.tallies.setdefault(bit, Tally()).add(change.num_blocks, change.checksum)
        self._tallies[bit].add(change.num_blocks, change.checksum)

    def _sweep(self, num_left: int) -> None:
        """Let the hand pass so many blocks, keeping those that anybody holds, and their marks."""
        while self._dropped and num_left > 0:
            holders = self._dropped[-1]
            for _ in range(min(num_left, len(holders))):
                holders.popitem()
                num_left -= 1
            if not holders:
                self._dropped.pop()
        kept_bits = self._admitted | USED
        while num_left > 0:
            partition = self._under_hand()
            if partition is None:
                return
            holders, first = partition.holders, partition.num_passed
            last = min(first + num_left, len(partition.ring))
            # An empty partition costs something too, or a round of very many would be for free.
            num_left -= max(1, last - first)
            before = after = 0
            is_held = is_changed = False
            for block_hash in partition.ring[first:last]:
                held_by = holders[block_hash]
                if held_by is not before:
                    before, after = held_by, held_by & kept_bits
                    is_held, is_changed = after > USED, after != held_by
                if is_held:
                    if is_changed:
                        holders[block_hash] = after
                    partition.keep(block_hash)
                else:
                    del holders[block_hash]
                    self._num_kept -= 1
            partition.num_passed = last
            self._go_on(partition)

    def _evict(self) -> None:
        """Give up one block, or more that nobody holds anyway."""
        num_chances = SECOND_CHANCES_MAX
        while self._num_kept >= self._blocks_max:
            partition = self._under_hand()
            assert partition is not None, "what is full has a partition"
            if partition.num_passed < len(partition.ring):
                block_hash = partition.ring[partition.num_passed]
                partition.num_passed += 1
                held_by = partition.holders[block_hash]
                held_by, is_used = held_by & self._admitted, held_by & USED
                if held_by and is_used and num_chances:
                    num_chances -= 1
                    partition.holders[block_hash] = held_by
                    partition.keep(block_hash)
                else:
                    del partition.holders[block_hash]
                    self._num_kept -= 1
                    if held_by:
                        self._note_evicted(partition, block_hash, held_by)
            self._go_on(partition)

    def _note_evicted(self, partition: Partition, block_hash: BlockHash, held_by: int) -> None:
        self.num_evicted += 1
        self._partial |= held_by
        checksum = block_checksum(block_hash)
        for bit in bits_of(held_by):
            partition.tallies.setdefault(bit, Tally()).add(-1, -checksum)
            self._tallies[bit].add(-1, -checksum)

    def _under_hand(self) -> Partition | None:
        """Where the hand is, in a new round if need be; None where there is nothing to go round."""
        if not self._round:
            self._free += self._leaving
            # Only what was retired before a round begins is gone when it ends.
            self._leaving, self._waiting = self._waiting, []
            # The oldest last, which is where the hand begins.
            self._round = list(reversed(self._partitions.values()))
            if not self._round:
                self._free += self._leaving
                self._leaving = []
                return None
        return self._round[-1]

    def _go_on(self, partition: Partition) -> None:
        """Leave a partition that the hand is through with."""
        if partition.num_passed < len(partition.ring):
            return
        del partition.ring[partition.num_kept :]
        partition.num_kept = partition.num_passed = 0
        partition.tallies = {bit: tally for bit, tally in partition.tallies.items() if bit & self._admitted}
        if not partition.holders:
            # Not dropped here: blocks may just be stored in it.
            self._emptied.append(partition)
        self._round.pop()
