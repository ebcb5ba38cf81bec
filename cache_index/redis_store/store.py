"""`RedisStore`: the index store's contract on Redis.

    publish              blocks of each tenant ──▶ partition,   then the batch ──▶ registry and log
    publish_inventory    begin ──▶ registry,   blocks of a new generation ──▶ partitions,   commit ──▶ registry and log
    match                one round trip: the chain's bitmaps, and whose lease is valid
    read                 the log, from a place in it; or a snapshot: the log's end first, then all partitions

Partitions and registry may be on different nodes, so nothing is done to both at once. What makes that safe is the
order: blocks first, then what makes them count; in a snapshot the log's place first, then the blocks. What a snapshot
holds too much is said again in the log, where saying it twice changes nothing.
"""

import asyncio
import logging
import secrets
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from ..blocks import BlockHash
from ..errors import CacheIndexError, DriftError, SequenceGapError, StoreUnavailableError
from ..events import BlocksCleared, BlocksRemoved, BlocksStored, Digest, Event, EventBatch, Heartbeat, Inventory
from ..identity import CacheIdentity
from ..memory import BLOCKS_PER_STEP
from ..partition import bits_of
from ..settings import IndexSettings
from ..store import Cursor, News, Notices, ReplicaStats, StoreStats, TenantStats
from .codec import TOKEN_BYTES
from .keys import Keys
from .link import RedisLink
from .partitions import Cleaning, PartitionFullError, Partitions
from .registry import Registry

__all__ = ["RedisStore"]

logger = logging.getLogger(__name__)

# A waiting reader looks for lapsed leases so often, for when all replicas die nobody else does.
_TICK_S = 0.5
# With each heartbeat so many partitions are compared, so many blocks counted one by one, and so many cleaned. So the
# work of self-repair grows with the replicas that share it, and never with the index.
_COMPARED_TENANTS = 128
_COUNTED_BLOCKS = 2_000
_CLEANED_BLOCKS = 20_000
# Partitions looked at for generations that are gone.
_LOOKED_AT_TENANTS = 64
# A partition larger than this is compared by its digests alone: counting it would hold a replica's news back too long.
_COUNTED_BLOCKS_MAX = 200_000


@dataclass(slots=True)
class _Generation:
    """What this process wrote of one replica since its last inventory.

    digests: by tenant, what its blocks there amount to; None where another process wrote the inventory.
    """

    epoch: int
    seq: int
    token: bytes
    digests: dict[bytes, Digest] | None
    # Tenants in the order in which they are to be compared next.
    to_compare: list[bytes] = field(default_factory=list)
    # Blocks that may still be counted; below zero after a large partition, until it is made up for.
    count_credit: int = 0

    @property
    def total(self) -> Digest:
        return sum((self.digests or {}).values(), Digest())


class RedisStore:
    """An `IndexStore` on Redis. One event loop uses it; one process speaks for a replica."""

    def __init__(self, settings: IndexSettings) -> None:
        """Connects with the first call. Raises StoreRefusedError where the URL can't be read."""
        self._keys = Keys(settings.namespace)
        self._link = RedisLink(settings)
        self._registry = Registry(self._link, self._keys, settings)
        self._partitions = Partitions(self._link, self._keys, settings.heartbeat_interval_s)
        # Whoever writes for long shows so often that it is there: as often as its heartbeats, which wait meanwhile.
        self._hold_interval_s = settings.heartbeat_interval_s
        # By replica: one, but for tests and tools.
        self._generations: dict[str, _Generation] = {}
        self._cleanings: deque[Cleaning] = deque()
        self._is_cleaning = False

    async def publish(self, batch: EventBatch) -> None:
        generation = await self._generation(batch.replica_id, batch.epoch)
        if batch.seq <= generation.seq:
            return
        if batch.seq != generation.seq + 1:
            raise SequenceGapError(batch.replica_id, generation.seq + 1, batch.seq)
        is_cleared, changes = _outcome(batch.events)
        # Until all of it is done nobody knows what of it is: after a failure the registry is asked anew.
        del self._generations[batch.replica_id]
        token = generation.token
        if is_cleared:
            # What the replica held before is void at once, like the generation before an inventory.
            generation.token, generation.digests = secrets.token_bytes(TOKEN_BYTES), {}
            if not await self._registry.begin(batch.replica_id, batch.epoch, batch.seq, generation.token):
                return
        await self._mark(batch.replica_id, generation, changes)
        await self._registry.batch(batch, token, generation.token)
        generation.seq = batch.seq
        self._generations[batch.replica_id] = generation

    async def publish_inventory(self, inventory: Inventory) -> None:
        self._generations.pop(inventory.replica_id, None)
        generation = _Generation(inventory.epoch, inventory.seq, secrets.token_bytes(TOKEN_BYTES), {})
        if not await self._registry.begin(inventory.replica_id, inventory.epoch, inventory.seq, generation.token):
            return
        _, changes = _outcome(inventory.blocks)
        await self._mark(inventory.replica_id, generation, changes)
        for tenant, change in changes.items():
            written, found = Digest.of(change.to_set), (generation.digests or {}).get(tenant, Digest())
            if written != found:
                # Its slot, which was nobody's, was not empty.
                await self._give_up(inventory.replica_id, tenant, written, found)
        await self._registry.commit(inventory, generation.token)
        self._generations[inventory.replica_id] = generation

    async def heartbeat(self, heartbeat: Heartbeat) -> Notices:
        generation = await self._generation(heartbeat.replica_id, heartbeat.epoch)
        if generation.digests is None:
            generation.digests = await self._digests(generation.token)
        total = generation.total
        try:
            notices = await self._registry.heartbeat(heartbeat, is_news=total == heartbeat.digest)
        except CacheIndexError:
            self._generations.pop(heartbeat.replica_id, None)
            raise
        if notices.purged:
            # What was written there is gone, or written again since. What is there now is what to go on from.
            for tenant, table in (await self._partitions.tables(notices.purged)).items():
                generation.digests.pop(tenant, None)
                if (left := table.digests.get(generation.token, Digest())).num_blocks:
                    generation.digests[tenant] = left
        elif total != heartbeat.digest:
            raise DriftError(heartbeat.replica_id, heartbeat.digest.num_blocks, total.num_blocks)
        else:
            await self._compare(heartbeat.replica_id, generation)
        await self._clean_up()
        return notices

    async def deregister(self, replica_id: str, epoch: int) -> None:
        self._generations.pop(replica_id, None)
        await self._registry.deregister(replica_id, epoch)

    async def match(self, tenant: bytes, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        found, live = await self._link.commands(self._partitions.lookup(tenant, block_hashes), self._registry.live)
        return self._partitions.matched(found, await self._registry.members(live))

    async def read(self, cursor: Cursor | None, timeout_s: float) -> News:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while cursor is not None:
            version = await self._registry.tick()
            found = await self._registry.items_after(cursor)
            if found is None:
                break
            place, items = found
            left_s = end_s - loop.time()
            if items or left_s <= 0.0:
                return News(place, items, is_snapshot=False, num_behind=max(0, version - place.version))
            await self._registry.wait(cursor, min(left_s, _TICK_S))
        return await self._snapshot()

    async def announce(self, identity: CacheIdentity) -> None:
        await self._registry.announce(identity)

    async def purge(self, tenant: bytes) -> int:
        num_blocks = await self._partitions.drop(tenant)
        await self._registry.purge(tenant)
        return num_blocks

    async def stats(self) -> StoreStats:
        head = await self._registry.head()
        tables = await self._partitions.tables(head.tenants)
        tokens = {replica.record.token for replica in head.replicas}
        held = {token: Digest() for token in tokens if token is not None}
        memory_bytes = await self._partitions.memory_bytes([tenant for tenant, table in tables.items() if table.exists])
        tenants = []
        for tenant, table in tables.items():
            copies = {token: digest for token, digest in table.digests.items() if token in held}
            for token, digest in copies.items():
                held[token] += digest
            num_copies = sum(digest.num_blocks for digest in copies.values())
            if table.exists:
                tenants.append(TenantStats(tenant, table.num_blocks, num_copies, memory_bytes.get(tenant)))
        return StoreStats(
            await self._link.describe(),
            head.cursor.version,
            await self._registry.log_length(),
            tuple(
                ReplicaStats(item.registration, item.record.seq, item.lease_left_s, held[item.record.token].num_blocks)
                for item in head.replicas
                if item.registration is not None and item.record.token is not None
            ),
            tuple(tenants),
        )

    async def describe(self) -> str:
        await self._registry.check_format()
        return await self._link.describe()

    async def close(self) -> None:
        await self._link.close()

    async def _generation(self, replica_id: str, epoch: int) -> _Generation:
        """What is known of a replica's current generation. Raises UnknownReplicaError or StaleEpochError."""
        known = self._generations.get(replica_id)
        if known is None or known.epoch != epoch:
            record = await self._registry.record(replica_id, epoch)
            assert record.token is not None
            known = self._generations[replica_id] = _Generation(record.epoch, record.seq, record.token, None)
        return known

    async def _mark(self, replica_id: str, generation: _Generation, changes: Mapping[bytes, "_Change"]) -> None:
        """Write changes to the partitions. Raises DriftError where one held something else than was written there."""
        digests = generation.digests
        unknown = [tenant for tenant in changes if digests is None or tenant not in digests]
        await self._registry.list_tenants(unknown)
        loop = asyncio.get_running_loop()
        held_s = loop.time()

        async def hold() -> None:
            nonlocal held_s
            if loop.time() - held_s >= self._hold_interval_s:
                await self._registry.hold(replica_id, generation.token)
                held_s = loop.time()

        for tenant, change in changes.items():
            try:
                before, after = await self._partitions.mark(tenant, generation.token, *change, hold)
            except PartitionFullError:
                await self._make_room(tenant)
                raise StoreUnavailableError("a tenant's partition was full of generations that are gone") from None
            if digests is None:
                continue
            expected = digests.get(tenant, Digest())
            if before != expected:
                raise DriftError(replica_id, expected.num_blocks, before.num_blocks)
            if after.num_blocks:
                digests[tenant] = after
            else:
                # Of a tenant that comes and goes nothing is kept.
                digests.pop(tenant, None)

    async def _digests(self, token: bytes) -> dict[bytes, Digest]:
        """What a generation holds by tenant, as the store has it."""
        head = await self._registry.head()
        tables = await self._partitions.tables(head.tenants)
        return {tenant: table.digests[token] for tenant, table in tables.items() if token in table.digests}

    async def _compare(self, replica_id: str, generation: _Generation) -> None:
        """Look whether some of a generation's partitions are still what was written there. Raises DriftError."""
        digests = generation.digests
        assert digests is not None
        if not generation.to_compare:
            generation.to_compare = list(digests)
        tenants = [tenant for tenant in generation.to_compare[:_COMPARED_TENANTS] if tenant in digests]
        del generation.to_compare[:_COMPARED_TENANTS]
        generation.count_credit = min(generation.count_credit + _COUNTED_BLOCKS, _COUNTED_BLOCKS)
        if not tenants:
            return
        tables = await self._partitions.tables(tenants)
        for tenant, table in tables.items():
            if generation.token not in table.slots.values():
                # The partition was lost, or is being written anew by others.
                self._generations.pop(replica_id, None)
                raise DriftError(replica_id, digests[tenant].num_blocks, 0)
            found = table.digests.get(generation.token, Digest())
            if found == digests[tenant] and generation.count_credit > 0 and table.num_blocks <= _COUNTED_BLOCKS_MAX:
                # The digest is kept beside the blocks. That they are there too is seen only by looking at them.
                generation.count_credit -= table.num_blocks
                found = await self._partitions.count(tenant, table, generation.token)
            if found != digests[tenant]:
                await self._give_up(replica_id, tenant, digests[tenant], found)
        await self._partitions.keep(tenants)

    async def _give_up(self, replica_id: str, tenant: bytes, held: Digest, found: Digest) -> NoReturn:
        """Drop a partition whose blocks are not what was written. Raises DriftError.

        What else in it is wrong nobody knows. So it is dropped, whereupon every replica finds its part of it lost, and
        writes that anew.
        """
        self._generations.pop(replica_id, None)
        await self._partitions.drop(tenant)
        raise DriftError(replica_id, held.num_blocks, found.num_blocks)

    async def _clean_up(self) -> None:
        """A bounded part of what generations that are gone left behind."""
        if self._is_cleaning:
            return  # Another replica's heartbeat in this process is at it.
        self._is_cleaning = True
        try:
            await self._clean_some()
        except StoreUnavailableError as error:
            # What the heartbeat is for is done, and what is left waits for the next one.
            logger.debug("a clean-up was put off: %s", error)
        finally:
            self._is_cleaning = False

    async def _clean_some(self) -> None:
        num_left = _CLEANED_BLOCKS
        if not self._cleanings:
            self._cleanings.extend(await self._find_gone())
        while self._cleanings and num_left > 0:
            num_left -= await self._partitions.clean(self._cleanings[0], num_left)
            if self._cleanings[0].is_over:
                self._cleanings.popleft()

    async def _find_gone(self) -> list[Cleaning]:
        """What there is to clean up in some partitions."""
        tenants = await self._registry.some_tenants(_LOOKED_AT_TENANTS)
        # The tables first: whoever is in one has begun by then, so the registry knows it unless it is gone.
        tables = await self._partitions.tables(tenants)
        in_use = await self._registry.tokens_in_use() if tables else frozenset()
        found = []
        for tenant, table in tables.items():
            if not table.exists:
                await self._registry.unlist_tenant(tenant)
            elif (gone := set(table.slots.values()) - in_use) or table.is_being_cleaned:
                # One that is under way elsewhere is left alone; one that was given up is taken over.
                found.append(Cleaning(tenant, sorted(gone)))
        return found

    async def _make_room(self, tenant: bytes) -> None:
        """Free what slots of a partition there are to free, all at once."""
        table = (await self._partitions.tables([tenant]))[tenant]
        in_use = await self._registry.tokens_in_use()
        cleaning = Cleaning(tenant, sorted(set(table.slots.values()) - in_use))
        while not cleaning.is_over:
            await self._partitions.clean(cleaning, _CLEANED_BLOCKS)

    async def _snapshot(self) -> News:
        head = await self._registry.head()
        blocks: dict[bytes, list[BlocksStored]] = {
            replica.record.token: [] for replica in head.replicas if replica.record.token is not None
        }
        for tenant, table in (await self._partitions.tables(head.tenants)).items():
            counting = {1 << slot: token for slot, token in table.slots.items() if token in blocks}
            live = sum(counting)
            if not live:
                continue
            by_bitmap: defaultdict[bytes, list[BlockHash]] = defaultdict(list)
            async for page in self._partitions.pages(tenant):
                for bitmap, block_hashes in page.items():
                    by_bitmap[bitmap] += block_hashes
            held: defaultdict[bytes, list[BlockHash]] = defaultdict(list)
            num_unyielded = 0
            for bitmap, block_hashes in by_bitmap.items():
                for bit in bits_of(int.from_bytes(bitmap, "little") & live):
                    held[counting[bit]] += block_hashes
                num_unyielded += len(block_hashes)
                if num_unyielded >= BLOCKS_PER_STEP:
                    num_unyielded = 0
                    await asyncio.sleep(0)  # Whoever shares this loop decides about requests meanwhile.
            for token, block_hashes in held.items():
                blocks[token].append(BlocksStored(tenant, tuple(block_hashes)))
                await asyncio.sleep(0)
        items = tuple(
            Inventory(replica.registration, replica.record.seq, tuple(blocks[replica.record.token]))
            for replica in head.replicas
            if replica.registration is not None and replica.record.token is not None
        )
        return News(head.cursor, items, is_snapshot=True)


class _Change(NamedTuple):
    """Blocks of one tenant that are held after a batch, and those that are not."""

    to_set: Sequence[BlockHash]
    to_clear: Sequence[BlockHash]


def _outcome(events: Iterable[Event]) -> tuple[bool, dict[bytes, _Change]]:
    """Whether everything was cleared, and what of each tenant is held, or not, after events in order."""
    is_cleared = False
    held: defaultdict[bytes, dict[BlockHash, bool]] = defaultdict(dict)
    for event in events:
        match event:
            case BlocksStored(tenant, block_hashes):
                held[tenant].update(dict.fromkeys(block_hashes, True))
            case BlocksRemoved(tenant, block_hashes):
                held[tenant].update(dict.fromkeys(block_hashes, False))
            case BlocksCleared():
                is_cleared = True
                held.clear()
    return is_cleared, {
        tenant: _Change(
            [block_hash for block_hash, is_held in states.items() if is_held],
            [block_hash for block_hash, is_held in states.items() if not is_held],
        )
        for tenant, states in held.items()
        if states
    }
