"""Errors of the cache index.

CacheIndexError
├── StaleEpochError        a batch of an earlier life of a replica
├── SequenceGapError       a batch is missing before this one
├── UnknownReplicaError    the store does not know this replica (never registered, lapsed, or the store lost its data)
├── DriftError             the store holds something else than the replica
└── StoreUnavailableError  the store can't be reached in time
    └── StoreRefusedError  nor will it be before somebody changes a setting: a wrong address, password, or server
"""

__all__ = [
    "CacheIndexError",
    "DriftError",
    "SequenceGapError",
    "StaleEpochError",
    "StoreRefusedError",
    "StoreUnavailableError",
    "UnknownReplicaError",
]


class CacheIndexError(Exception):
    """Base of every error that `cache_index` raises on purpose."""


class StaleEpochError(CacheIndexError):
    """The replica has since registered with a newer epoch, so this batch describes a cache that is gone."""

    def __init__(self, replica_id: str, epoch: int, current_epoch: int) -> None:
        super().__init__(f"replica {replica_id}: epoch {epoch} is over, the current one is {current_epoch}")
        self.replica_id = replica_id
        self.epoch = epoch
        self.current_epoch = current_epoch

    def __reduce__(self) -> tuple[type["StaleEpochError"], tuple[str, int, int]]:
        return type(self), (self.replica_id, self.epoch, self.current_epoch)


class SequenceGapError(CacheIndexError):
    """A batch did not follow its predecessor; the sender has to publish its whole inventory."""

    def __init__(self, replica_id: str, expected_seq: int, seq: int) -> None:
        super().__init__(f"replica {replica_id}: expected batch {expected_seq}, got {seq}")
        self.replica_id = replica_id
        self.expected_seq = expected_seq
        self.seq = seq

    def __reduce__(self) -> tuple[type["SequenceGapError"], tuple[str, int, int]]:
        return type(self), (self.replica_id, self.expected_seq, self.seq)


class UnknownReplicaError(CacheIndexError):
    """The store has no registration of this replica; it has to register again and publish its inventory."""

    def __init__(self, replica_id: str) -> None:
        super().__init__(f"replica {replica_id} is not registered")
        self.replica_id = replica_id

    def __reduce__(self) -> tuple[type["UnknownReplicaError"], tuple[str]]:
        return type(self), (self.replica_id,)


class DriftError(CacheIndexError):
    """The store's entries for a replica are not what the replica holds; it has to publish its whole inventory."""

    def __init__(self, replica_id: str, num_blocks_held: int, num_blocks_stored: int) -> None:
        super().__init__(
            f"replica {replica_id} holds {num_blocks_held} blocks and the store has {num_blocks_stored}"
            + (", others" if num_blocks_held == num_blocks_stored else "")
        )
        self.replica_id = replica_id
        self.num_blocks_held = num_blocks_held
        self.num_blocks_stored = num_blocks_stored

    def __reduce__(self) -> tuple[type["DriftError"], tuple[str, int, int]]:
        return type(self), (self.replica_id, self.num_blocks_held, self.num_blocks_stored)


class StoreUnavailableError(CacheIndexError):
    """The store did not answer in time; the caller goes on without it and tries again later."""


class StoreRefusedError(StoreUnavailableError):
    """The store can't be used as it is set up, and trying again will not help: a wrong address, password or server."""
