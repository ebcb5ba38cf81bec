"""Who is registered, with which generation, and the log that followers read: each step is one script in one slot."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SequenceGapError, StaleEpochError, UnknownReplicaError
from ..events import EventBatch, Heartbeat, Inventory, Registration, num_named
from ..identity import CacheIdentity
from ..settings import IndexSettings
from ..store import Cursor, NewsItem, Notices
from .codec import (
    Record,
    decode_identity,
    decode_item,
    encode_digest,
    encode_epoch,
    encode_events,
    encode_identity,
)
from .keys import FORMAT, Keys, script
from .link import RedisLink

__all__ = ["Head", "Members", "Registered", "Registry"]

# Tenants that were purged, for replicas that were away; and identities that gateways may have at once.
_PURGES_MAX = 1_000
_IDENTITIES_MAX = 64
# A follower reads so many items at once, and hears how many are left.
_ITEMS_PER_READ = 500


@dataclass(frozen=True, slots=True)
class Registered:
    """A replica that counts, its generation, and how long its lease still runs. registration: None until it has one."""

    replica_id: str
    record: Record
    registration: Registration | None
    lease_left_s: float


@dataclass(frozen=True, slots=True)
class Head:
    """Where a snapshot begins: a place in the log, and who counted there."""

    cursor: Cursor
    replicas: tuple[Registered, ...]
    tenants: tuple[bytes, ...]


@dataclass(frozen=True, eq=False)
class Members:
    """Who counts: token of a generation -> its replica. The same object as long as nothing changes."""

    replicas: Mapping[bytes, str]


class Registry:
    """Raises what `RedisLink` does, besides what is named."""

    def __init__(self, link: RedisLink, keys: Keys, settings: IndexSettings) -> None:
        self._link = link
        self._keys = keys
        self._settings = settings
        # A copy of who counts, and its name.
        self._members_name: bytes | None = None
        self._members = Members({})

    async def check_format(self) -> None:
        """Raises StoreRefusedError where another major version of warmroute wrote this namespace. Writes nothing."""
        self._link.check_format(await self._link.command("HGET", self._keys.meta, "format"))

    async def begin(self, replica_id: str, epoch: int, seq: int, token: bytes) -> bool:
        """An inventory is under way. Returns False for one that is older than what is known; raises StaleEpochError."""
        answer = await self._run("begin", replica_id, encode_epoch(epoch), seq, token.hex())
        _raise_refusal(answer, replica_id, epoch, seq)
        return bool(answer[0] == b"ok")

    async def hold(self, replica_id: str, token: bytes) -> None:
        """Renew the lease of a replica whose blocks are still being written; nobody else's."""
        await self._run("hold", replica_id, token.hex())

    async def commit(self, inventory: Inventory, token: bytes) -> None:
        """An inventory's blocks are all written. Raises StaleEpochError or UnknownReplicaError."""
        answer = await self._run(
            "commit",
            inventory.replica_id,
            encode_epoch(inventory.epoch),
            inventory.seq,
            token.hex(),
            encode_identity(inventory.registration.identity),
            encode_events(inventory.blocks),
            sum(num_named(stored) for stored in inventory.blocks),
        )
        _raise_refusal(answer, inventory.replica_id, inventory.epoch, inventory.seq)

    async def batch(self, batch: EventBatch, token: bytes, next_token: bytes) -> None:
        """A batch's blocks are all written. Raises StaleEpochError, UnknownReplicaError or SequenceGapError."""
        answer = await self._run(
            "batch",
            batch.replica_id,
            encode_epoch(batch.epoch),
            batch.seq,
            token.hex(),
            next_token.hex(),
            encode_events(batch.events),
            sum(num_named(event) for event in batch.events),
        )
        _raise_refusal(answer, batch.replica_id, batch.epoch, batch.seq)

    async def heartbeat(self, heartbeat: Heartbeat, *, is_news: bool) -> Notices:
        """Renew a lease. Raises StaleEpochError, UnknownReplicaError or SequenceGapError."""
        seen = "-" if heartbeat.num_purges_seen is None else heartbeat.num_purges_seen
        answer = await self._run(
            "heartbeat",
            heartbeat.replica_id,
            encode_epoch(heartbeat.epoch),
            heartbeat.seq,
            encode_digest(heartbeat.digest),
            seen,
            int(is_news),
        )
        _raise_refusal(answer, heartbeat.replica_id, heartbeat.epoch, heartbeat.seq)
        _, num_purges, purged, identities = answer
        return Notices(
            int(num_purges),
            tuple(bytes.fromhex(tenant.decode()) for tenant in purged),
            tuple(decode_identity(identity) for identity in identities),
        )

    async def deregister(self, replica_id: str, epoch: int) -> None:
        """A replica that is unknown, or has a newer epoch, is left alone."""
        await self._run("deregister", replica_id, encode_epoch(epoch))

    async def announce(self, identity: CacheIdentity) -> None:
        """A gateway's identity; past a bound, those not heard of for longest are forgotten."""
        await self._run("announce", identity.fingerprint().hex(), encode_identity(identity), _IDENTITIES_MAX)

    async def purge(self, tenant: bytes) -> None:
        """Followers and replicas are to hear of a purge."""
        await self._run("purge", tenant.hex(), _PURGES_MAX)

    async def list_tenants(self, tenants: Sequence[bytes]) -> None:
        """These tenants have partitions. Before the first is written, so that none is ever without a name."""
        if tenants:
            await self._link.command("SADD", self._keys.tenants, *(tenant.hex() for tenant in tenants))

    async def unlist_tenant(self, tenant: bytes) -> None:
        """Forget a tenant without a partition; one that got one meanwhile is listed again when it is next compared."""
        await self._link.command("SREM", self._keys.tenants, tenant.hex())

    async def some_tenants(self, num: int) -> tuple[bytes, ...]:
        """Some of the listed tenants, drawn at random."""
        names = await self._link.command("SRANDMEMBER", self._keys.tenants, num)
        return tuple(bytes.fromhex(name.decode()) for name in names)

    async def record(self, replica_id: str, epoch: int) -> Record:
        """What is registered for this epoch. Raises UnknownReplicaError or StaleEpochError."""
        [value] = await self._link.command("HMGET", self._keys.replicas, replica_id)
        found = Record.decode(value) if value is not None else None
        if found is None or found.epoch < epoch or found.token is None:
            raise UnknownReplicaError(replica_id)
        if found.epoch > epoch:
            raise StaleEpochError(replica_id, epoch, found.epoch)
        return found

    async def tokens_in_use(self) -> frozenset[bytes]:
        """Tokens of the generations that count, and of inventories under way."""
        records = [Record.decode(value) for value in await self._link.command("HVALS", self._keys.replicas)]
        return frozenset(token for record in records for token in (record.token, record.pending) if token is not None)

    async def head(self) -> Head:
        """The log's last place, and who counts there."""
        version, nonce, flat, tenants = await self._run("head")
        replicas = []
        for at in range(0, len(flat), 4):
            replica_id, record = flat[at].decode(), Record.decode(flat[at + 1])
            identity = flat[at + 2]
            registration = Registration(replica_id, record.epoch, decode_identity(identity)) if identity else None
            replicas.append(Registered(replica_id, record, registration, int(flat[at + 3]) / 1_000))
        return Head(
            Cursor(nonce.decode(), int(version)),
            tuple(replicas),
            tuple(bytes.fromhex(name.decode()) for name in sorted(tenants)),
        )

    async def tick(self) -> int:
        """Let lapsed leases end now. Returns the log's last version."""
        version, _ = await self._run("tick")
        return int(version)

    @property
    def live(self) -> tuple[str | int, ...]:
        """The command that asks who counts; `members` reads the answer."""
        return ("EVAL", script("live"), 2, self._keys.meta, self._keys.leases)

    async def members(self, answer: tuple[bytes | None, list[bytes]]) -> Members:
        """The replicas with a valid lease, from the answer to `live`.

        They are asked for only when they changed since the last time, for they seldom do.
        """
        name, lapsed = answer
        if name is None or name != self._members_name:
            self._members_name, records = await self._link.run("members", (self._keys.meta, self._keys.replicas))
            pairs = zip(records[::2], records[1::2], strict=True)
            by_token = {Record.decode(record).token: replica_id.decode() for replica_id, record in pairs}
            self._members = Members({token: name for token, name in by_token.items() if token is not None})
        if not lapsed:
            return self._members
        gone = {replica_id.decode() for replica_id in lapsed}
        return Members({token: name for token, name in self._members.replicas.items() if name not in gone})

    async def items_after(self, cursor: Cursor) -> tuple[Cursor, tuple[NewsItem, ...]] | None:
        """Items after a place in the log, and where the last of them is; None where the log has no such place."""
        if not (0 < cursor.version < 2**63 and cursor.life.isdecimal()):
            return None  # Of a store of another kind, or of none.
        start = f"{cursor.version}-{cursor.life}"
        # From the place itself on: it is there only if this is the log that it was read from.
        entries = await self._link.command("XRANGE", self._keys.log, start, "+", "COUNT", _ITEMS_PER_READ + 1)
        if not entries or entries[0][0].decode() != start:
            return None
        items = tuple(item for _, fields in entries[1:] if (item := decode_item(fields)) is not None)
        version, _, nonce = entries[-1][0].decode().partition("-")
        return Cursor(nonce, int(version)), items

    async def wait(self, cursor: Cursor, timeout_s: float) -> None:
        """Wait until something follows a place in the log, at most so long."""
        place = f"{cursor.version}-{cursor.life}"
        wait_ms = max(1, int(1_000 * timeout_s))
        await self._link.command(
            "XREAD", "COUNT", 1, "BLOCK", wait_ms, "STREAMS", self._keys.log, place, wait_s=timeout_s
        )

    async def log_length(self) -> int:
        return int(await self._link.command("XLEN", self._keys.log))

    async def _run(self, name: str, *arguments: str | bytes | int) -> Any:
        settings = self._settings
        nonce = secrets.randbits(48)
        common = (
            str(nonce),
            int(1_000 * settings.lease_s),
            settings.log_batches_max,
            settings.log_blocks_max,
            FORMAT,
        )
        return await self._link.run(name, self._keys.registry, *common, *arguments)


def _raise_refusal(answer: Sequence[Any], replica_id: str, epoch: int, seq: int) -> None:
    match answer[0]:
        case b"stale":
            raise StaleEpochError(replica_id, epoch, int(answer[1]))
        case b"unknown":
            raise UnknownReplicaError(replica_id)
        case b"gap":
            raise SequenceGapError(replica_id, int(answer[1]), seq)
