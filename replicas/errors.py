"""Errors of a replica.

ReplicaError
├── ModelError                the model can't be loaded or served; the text is one sentence for the operator
│   ├── ModelNotFoundError    no such folder, file or hub id
│   ├── UnsupportedModelError the model can't run packed over the KV pool
│   └── MemoryBudgetError     weights or KV blocks do not fit
├── PoolExhaustedError        no free or evictable block is left
└── RequestRefusedError       this request can't be served; carries the code that the gateway maps to a status
"""

from cache_index.messages import RefusalCode

__all__ = [
    "MemoryBudgetError",
    "ModelError",
    "ModelNotFoundError",
    "PoolExhaustedError",
    "ReplicaError",
    "RequestRefusedError",
    "UnsupportedModelError",
]


class ReplicaError(Exception):
    """Base of every error that `replicas` raises on purpose."""


class ModelError(ReplicaError):
    """The model can't be loaded or served."""


class ModelNotFoundError(ModelError):
    """There is no such folder, file or hub id."""


class UnsupportedModelError(ModelError):
    """The model can't run packed over the KV pool."""


class MemoryBudgetError(ModelError):
    """The weights or the KV blocks do not fit into the memory they were given."""


class PoolExhaustedError(ReplicaError):
    """Every block of the pool is referenced."""


class RequestRefusedError(ReplicaError):
    """This request can't be served."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
