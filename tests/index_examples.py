"""Short spellings for what the tests of the index, its mirror and the publisher talk about."""

import hashlib
from collections.abc import Iterable

from cache_index.blocks import BlockHash
from cache_index.events import (
    BlocksRemoved,
    BlocksStored,
    Digest,
    Event,
    EventBatch,
    Heartbeat,
    Inventory,
    Registration,
)
from cache_index.identity import CacheIdentity

# Tenants' keys; the scope of a prompt without a salt is the same bytes.
TENANT = b"s" * 16
OTHER_TENANT = b"t" * 16

IDENTITY = CacheIdentity(
    weights="sha256:0123",
    config="llama",
    dtype="float32",
    kv_dtype="float32",
    quantization=None,
    attention="sdpa",
    tokenizer="sha256:4567",
    chat_template=None,
    adapter=None,
    block_size=16,
)


def block(name: str) -> BlockHash:
    """A block hash, one for each name."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def chain(names: Iterable[str]) -> tuple[BlockHash, ...]:
    """Block hashes, one for each name: `chain("abc")` is three blocks."""
    return tuple(block(name) for name in names)


def stored(names: Iterable[str], tenant: bytes = TENANT) -> BlocksStored:
    return BlocksStored(tenant, chain(names))


def removed(names: Iterable[str], tenant: bytes = TENANT) -> BlocksRemoved:
    return BlocksRemoved(tenant, chain(names))


def registration(replica_id: str, epoch: int = 1) -> Registration:
    return Registration(replica_id, epoch, IDENTITY)


def batch(replica_id: str, seq: int, *events: Event, epoch: int = 1) -> EventBatch:
    return EventBatch(replica_id, epoch, seq, events)


def inventory(replica_id: str, seq: int, *blocks: BlocksStored, epoch: int = 1) -> Inventory:
    return Inventory(registration(replica_id, epoch), seq, blocks)


def heartbeat(
    replica_id: str, seq: int, names: Iterable[str] = (), *, epoch: int = 1, num_purges_seen: int | None = None
) -> Heartbeat:
    """A heartbeat of a replica that holds the named blocks."""
    return Heartbeat(replica_id, epoch, seq, Digest.of(chain(names)), num_purges_seen)
