"""What a replica tells the index: sequenced batches of block events.

    replica "r1", epoch 7:   batch 1 ──▶ batch 2 ──▶ batch 3 ──▶ …
                             stored      stored      removed
                                         removed     cleared

A batch's events apply in order. Batches of one epoch are numbered from 1 without gaps, so a reader that sees a jump
knows that it missed something and asks for a snapshot. An epoch is one life of a replica's cache: a higher one makes
everything that was said in a lower one void.
"""

from dataclasses import dataclass

from .blocks import BlockHash
from .identity import CacheIdentity

__all__ = ["BlocksCleared", "BlocksRemoved", "BlocksStored", "Event", "EventBatch", "Inventory", "Registration"]


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that became full and can be matched, in chain order, all in one scope."""

    scope: bytes
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that were evicted, all in one scope."""

    scope: bytes
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """The replica dropped its whole cache, in every scope."""


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
