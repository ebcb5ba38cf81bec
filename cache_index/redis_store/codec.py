"""What is in the values: log items, records of replicas, tables of slots. Bytes in, values out; no connection.

Nothing here trusts what it reads further than its form: who can write to Redis can mislead the router's predictions,
and nothing else, for replicas prove every match.
"""

import dataclasses
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..blocks import BlockHash
from ..events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Digest,
    Event,
    EventBatch,
    Heartbeat,
    Inventory,
    Registration,
)
from ..identity import DIGEST_BYTES, CacheIdentity
from ..store import Departure, NewsItem, TenantPurge

__all__ = [
    "TOKEN_BYTES",
    "Record",
    "decode_digests",
    "decode_events",
    "decode_identity",
    "decode_item",
    "decode_slots",
    "encode_digest",
    "encode_epoch",
    "encode_events",
    "encode_identity",
    "is_being_cleaned",
]

# A generation's name: drawn at random for each inventory, so that no two, of whatever replica and life, have one.
TOKEN_BYTES = 8
_FREE, _CONDEMNED = b"\0" * TOKEN_BYTES, b"\xff" * TOKEN_BYTES

_EVENT_HEAD = struct.Struct("<c16sI")  # kind, tenant, number of blocks
_DIGEST = struct.Struct("<I6s")
_DIGEST_IN_LOG = struct.Struct("<QQ")
_NO_TENANT = b"\0" * DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Record:
    """What the registry says of a replica. token: the generation that counts, None before its first inventory."""

    epoch: int
    seq: int
    token: bytes | None
    pending: bytes | None

    @classmethod
    def decode(cls, value: bytes) -> "Record":
        epoch, seq, token, pending = value.split(b" ")
        return cls(int(epoch), int(seq), _token(token), _token(pending))


def _token(text: bytes) -> bytes | None:
    return None if text == b"-" else bytes.fromhex(text.decode())


def encode_epoch(epoch: int) -> str:
    """20 digits, so that epochs compare as text: they pass what Redis's Lua can count exactly."""
    return f"{epoch:020d}"


def encode_identity(identity: CacheIdentity) -> str:
    return json.dumps(dataclasses.asdict(identity), sort_keys=True)


def decode_identity(text: bytes) -> CacheIdentity:
    return CacheIdentity(**json.loads(text))


def encode_events(events: Iterable[Event]) -> bytes:
    """Events one behind the other: kind, tenant, number of blocks, hashes of 16 bytes."""
    parts: list[bytes] = []
    for event in events:
        match event:
            case BlocksStored(tenant, block_hashes):
                parts += (_EVENT_HEAD.pack(b"+", tenant, len(block_hashes)), *block_hashes)
            case BlocksRemoved(tenant, block_hashes):
                parts += (_EVENT_HEAD.pack(b"-", tenant, len(block_hashes)), *block_hashes)
            case BlocksCleared():
                parts.append(_EVENT_HEAD.pack(b"0", _NO_TENANT, 0))
    return b"".join(parts)


def decode_events(encoded: bytes) -> tuple[Event, ...]:
    events: list[Event] = []
    at = 0
    while at < len(encoded):
        kind, tenant, num_blocks = _EVENT_HEAD.unpack_from(encoded, at)
        at += _EVENT_HEAD.size
        end = at + num_blocks * DIGEST_BYTES
        block_hashes: tuple[BlockHash, ...] = tuple(
            encoded[start : start + DIGEST_BYTES] for start in range(at, end, DIGEST_BYTES)
        )
        at = end
        if kind == b"0":
            events.append(BlocksCleared())
        else:
            events.append((BlocksStored if kind == b"+" else BlocksRemoved)(tenant, block_hashes))
    return tuple(events)


def encode_digest(digest: Digest) -> bytes:
    return _DIGEST_IN_LOG.pack(digest.num_blocks, digest.checksum)


def decode_item(fields: Mapping[bytes, bytes]) -> NewsItem | None:
    """An item of the log; None for the entry with which it begins."""
    kind = fields[b"k"]
    if kind == b"o":
        return None
    if kind == b"p":
        return TenantPurge(bytes.fromhex(fields[b"t"].decode()))
    replica_id, epoch = fields[b"r"].decode(), int(fields[b"e"])
    if kind == b"d":
        return Departure(replica_id, epoch)
    seq = int(fields[b"s"])
    if kind == b"h":
        return Heartbeat(replica_id, epoch, seq, Digest(*_DIGEST_IN_LOG.unpack(fields[b"d"])))
    if kind == b"b":
        return EventBatch(replica_id, epoch, seq, decode_events(fields[b"b"]))
    if kind == b"i":
        registration = Registration(replica_id, epoch, decode_identity(fields[b"i"]))
        blocks = (event for event in decode_events(fields[b"b"]) if isinstance(event, BlocksStored))
        return Inventory(registration, seq, tuple(blocks))
    raise ValueError(f"unknown kind of log item {kind!r}")


def decode_slots(table: bytes | None) -> dict[int, bytes]:
    """Slot -> token of each generation in a partition."""
    tokens = (table or b"")[: len(table or b"") // TOKEN_BYTES * TOKEN_BYTES]
    entries = (tokens[at : at + TOKEN_BYTES] for at in range(0, len(tokens), TOKEN_BYTES))
    return {slot: token for slot, token in enumerate(entries) if token not in (_FREE, _CONDEMNED)}


def is_being_cleaned(table: bytes | None) -> bool:
    """Whether slots of a partition are condemned: a clean-up is under way, or was given up."""
    return table is not None and any(
        table[at : at + TOKEN_BYTES] == _CONDEMNED for at in range(0, len(table), TOKEN_BYTES)
    )


def decode_digests(slots: Mapping[int, bytes], table: bytes | None) -> dict[bytes, Digest]:
    """Token -> digest of what its generation holds in a partition."""
    digests: dict[bytes, Digest] = {}
    for slot, token in slots.items():
        at = slot * _DIGEST.size
        if table is None or at + _DIGEST.size > len(table):
            continue
        num_blocks, checksum = _DIGEST.unpack_from(table, at)
        digests[token] = Digest(num_blocks, int.from_bytes(checksum, "little"))
    return digests
