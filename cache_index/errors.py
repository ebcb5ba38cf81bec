"""Errors of the cache index.

CacheIndexError
├── StaleEpochError        a batch of an earlier life of a replica
├── SequenceGapError       a batch is missing before this one
├── UnknownReplicaError    the store does not know this replica (never registered, lapsed, or the store lost its data)
└── StoreUnavailableError  the store can't be reached in time
"""

__all__ = [
    "CacheIndexError",
    "SequenceGapError",
    "StaleEpochError",
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


class StoreUnavailableError(CacheIndexError):
    """The store did not answer in time; the caller goes on without it and tries again later."""
