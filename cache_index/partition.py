"""One tenant's part of an index: who holds each block, and how far a chain matches."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .blocks import BlockHash
from .events import Digest

__all__ = ["USED", "Partition", "PartitionSize", "Tally", "bits_of"]

USED = 1
"""The lowest bit of a block's integer: a match used it since the hand last came by. The others are its holders."""


@dataclass(frozen=True, slots=True)
class PartitionSize:
    """num_blocks: each counted once; num_copies: each as often as it is held; memory_bytes: of all that is kept."""

    num_blocks: int
    num_copies: int
    memory_bytes: int


@dataclass(slots=True)
class Tally:
    """A digest that changes with every block. While blocks are being stored it may be short of those."""

    num_blocks: int = 0
    checksum: int = 0

    def add(self, num_blocks: int, checksum: int) -> None:
        self.num_blocks += num_blocks
        self.checksum += checksum

    @property
    def digest(self) -> Digest:
        # Adding to a digest takes the sum modulo what a digest's checksum is kept modulo.
        return Digest() + Digest(self.num_blocks, self.checksum)


@dataclass(slots=True, eq=False)
class Partition:
    """One tenant's blocks. Those before `num_kept` and from `num_passed` on are in the ring; between them is a gap that
    the hand leaves behind and closes when it is through."""

    tenant: bytes
    holders: dict[BlockHash, int] = field(default_factory=dict)
    ring: list[BlockHash] = field(default_factory=list)
    tallies: dict[int, Tally] = field(default_factory=dict)
    num_kept: int = 0
    num_passed: int = 0

    def keep(self, block_hash: BlockHash) -> None:
        """Leave the block that was just passed in the ring."""
        self.ring[self.num_kept] = block_hash
        self.num_kept += 1

    def match(
        self, block_hashes: Sequence[BlockHash], candidates: int, names: Mapping[int, str], used: int
    ) -> dict[str, int]:
        """As `BlockHolders.match`. used: the mark to leave on the blocks that matched, or 0 for none."""
        matched: dict[str, int] = {}
        is_all_used = True
        num_matched = 0
        # No block's bits are negative.
        held_before = -1
        for held_by in map(self.holders.get, block_hashes):
            # Mostly the very same integer as the block before, about which all is known.
            if held_by is not held_before:
                if held_by is None:
                    break
                held_before = held_by
                lost = candidates & ~held_by
                if lost:
                    candidates ^= lost
                    if num_matched:
                        _note(matched, names, lost, num_matched)
                    if not candidates:
                        break
                is_all_used &= held_by & used == used
            num_matched += 1
        if candidates and num_matched:
            _note(matched, names, candidates, num_matched)
        if not is_all_used:
            self._mark(block_hashes[:num_matched], used)
        return matched

    def blocks(self, admitted: int) -> dict[int, list[BlockHash]]:
        """What each of the admitted holders has, by bit. O(blocks and copies)."""
        by_holders: dict[int, list[BlockHash]] = {}
        for block_hash, held_by in self.holders.items():
            by_holders.setdefault(held_by & admitted, []).append(block_hash)
        held: dict[int, list[BlockHash]] = {}
        for mask, block_hashes in by_holders.items():
            for bit in bits_of(mask):
                held.setdefault(bit, []).extend(block_hashes)
        return held

    def num_blocks(self, admitted: int) -> int:
        """Blocks that any of the admitted holders has, each counted once. O(blocks)."""
        return sum(1 for held_by in self.holders.values() if held_by & admitted)

    def size(self, admitted: int) -> PartitionSize:
        """How large it is. O(blocks)."""
        num_copies = sum(tally.num_blocks for bit, tally in self.tallies.items() if bit & admitted)
        memory_bytes = sys.getsizeof(self.holders) + sys.getsizeof(self.ring) + sum(map(sys.getsizeof, self.holders))
        # Neighbours share their integer, which takes memory once.
        memory_bytes += sum(map(sys.getsizeof, {id(held_by): held_by for held_by in self.holders.values()}.values()))
        return PartitionSize(self.num_blocks(admitted), num_copies, memory_bytes)

    def _mark(self, block_hashes: Sequence[BlockHash], used: int) -> None:
        before, after = 0, used
        for block_hash in block_hashes:
            held_by = self.holders[block_hash]
            if held_by is not before:
                before, after = held_by, held_by | used
            self.holders[block_hash] = after


def _note(matched: dict[str, int], names: Mapping[int, str], mask: int, num_matched: int) -> None:
    for bit in (mask,) if mask in names else bits_of(mask):
        matched[names[bit]] = num_matched


def bits_of(mask: int) -> Iterator[int]:
    """The bits that are set, each as an integer of its own, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest
        mask ^= lowest
