"""One tenant's part of an index: who holds each block, and how far a chain matches."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from .blocks import BlockHash
from .events import Digest

__all__ = ["USED", "Names", "Partition", "PartitionSize", "Tally", "bits_of"]

# Sets of holders whose names are kept at hand, some 100 bytes each and 8 for each name.
_MASKS_MAX = 4_096

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


class Names:
    """Whose each bit is, and who they are together that a set of bits stands for.

    Few sets are asked for over and over, and taking one apart takes longer than all else in a match. Bounded.
    """

    def __init__(self, by_bit: Mapping[int, str]) -> None:
        self._by_bit = by_bit
        self._by_mask: dict[int, tuple[str, ...]] = {}

    def of(self, mask: int) -> tuple[str, ...]:
        """The names of the bits that are set."""
        names = self._by_mask.get(mask)
        if names is None:
            names = tuple(self._by_bit[bit] for bit in bits_of(mask))
            if len(self._by_mask) >= _MASKS_MAX:
                self._by_mask.clear()
            self._by_mask[mask] = names
        return names


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

    def match(self, block_hashes: Sequence[BlockHash], candidates: int, names: Names, used: int) -> dict[str, int]:
        """As `BlockHolders.match`. used: the mark to leave on the blocks that matched, or 0 for none."""
        matched: dict[str, int] = {}
        is_all_used = True
        num_matched = 0
        # Mostly the holders are the very same integer as the block before's, so they are looked at in runs.
        for held_by, run in groupby(map(self.holders.get, block_hashes)):
            if held_by is None:
                break
            lost = candidates & ~held_by
            if lost:
                candidates ^= lost
                if num_matched:
                    matched.update(dict.fromkeys(names.of(lost), num_matched))
                if not candidates:
                    break
            is_all_used &= held_by & used == used
            num_matched += len(list(run))
        if candidates and num_matched:
            matched.update(dict.fromkeys(names.of(candidates), num_matched))
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


def bits_of(mask: int) -> Iterator[int]:
    """The bits that are set, each as an integer of its own, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest
        mask ^= lowest
