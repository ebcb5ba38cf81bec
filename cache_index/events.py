"""What a replica tells the index: sequenced batches of block events, and now and then what they amount to.

    replica "r1", epoch 7:   batch 1 ──▶ batch 2 ──▶ heartbeat (digest after 2) ──▶ batch 3 ──▶ …
                             stored      stored                                     removed
                                         removed                                    cleared

A batch's events apply in order. Batches of one epoch are numbered from 1 without gaps, so a reader that sees a jump
knows that it missed something and asks for a snapshot. An epoch is one life of a replica's cache: a higher one makes
everything that was said in a lower one void. A heartbeat carries a digest of what the replica holds, so whoever
followed it can tell whether it knows the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .blocks import BlockHash
from .identity import CacheIdentity

__all__ = [
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "Digest",
    "Event",
    "EventBatch",
    "Heartbeat",
    "Inventory",
    "Registration",
    "block_checksum",
    "num_named",
]

# 48 bits, because the sum of two such numbers is still exact in the doubles that Redis's Lua computes with.
CHECKSUM_BYTES = 6
_CHECKSUM_MASK = 2 ** (8 * CHECKSUM_BYTES) - 1


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that became full and can be matched, in chain order, all of one tenant.

    tenant: 16 bytes, the tenant's key (`identity.tenant_key`), which names its partition of the index.
    """

    tenant: bytes
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that were evicted, all of one tenant."""

    tenant: bytes
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """The replica dropped its whole cache, of every tenant."""


Event = BlocksStored | BlocksRemoved | BlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of one replica, in order. `seq` counts from 1 within the epoch."""

    replica_id: str
    epoch: int
    seq: int
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Registration:
    """One life of a replica's cache; every inventory carries it."""

    replica_id: str
    epoch: int
    identity: CacheIdentity


@dataclass(frozen=True, slots=True)
class Inventory:
    """All blocks that a replica holds after batch `seq` of `epoch`: what a reader with a gap starts again from."""

    registration: Registration
    seq: int
    blocks: tuple[BlocksStored, ...]

    @property
    def replica_id(self) -> str:
        return self.registration.replica_id

    @property
    def epoch(self) -> int:
        return self.registration.epoch


@dataclass(frozen=True, slots=True)
class Digest:
    """How many blocks a set holds, and a checksum over which; equal sets have equal digests, in any order.

    The checksum adds up the blocks' own, modulo 2**48, so digests of disjoint sets add up too. It finds faults; against
    somebody who looks for two sets with one digest it is no proof.
    """

    num_blocks: int = 0
    checksum: int = 0

    @classmethod
    def of(cls, block_hashes: Iterable[BlockHash]) -> "Digest":
        """The digest of a set of blocks, each of 16 bytes and named once."""
        joined = b"".join(block_hashes)
        # Each block's first 8 bytes; the two that are not its own fall away. So does what a sum of 64 bits can't hold,
        # for it is a multiple of 2**48.
        checksums = np.frombuffer(joined, "<u8")[::2] & _CHECKSUM_MASK
        return cls(len(checksums), int(checksums.sum(dtype=np.uint64)) & _CHECKSUM_MASK)

    def __add__(self, other: "Digest") -> "Digest":
        """The digest of two disjoint sets together."""
        return Digest(self.num_blocks + other.num_blocks, (self.checksum + other.checksum) & _CHECKSUM_MASK)

    def __sub__(self, other: "Digest") -> "Digest":
        """The digest of what is left of a set without a part of it."""
        return Digest(self.num_blocks - other.num_blocks, (self.checksum - other.checksum) & _CHECKSUM_MASK)


def num_named(event: Event) -> int:
    """How many blocks an event names."""
    return 0 if isinstance(event, BlocksCleared) else len(event.block_hashes)


def block_checksum(block_hash: BlockHash) -> int:
    """A block's own part of a digest's checksum: the first 6 bytes of its hash, little-endian."""
    return int.from_bytes(block_hash[:CHECKSUM_BYTES], "little")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A replica is alive, and `digest` is what it holds after batch `seq` of `epoch`.

    num_purges_seen: the last answer's `Notices.num_purges`; None in the first heartbeat of a process.
    """

    replica_id: str
    epoch: int
    seq: int
    digest: Digest
    num_purges_seen: int | None = None
