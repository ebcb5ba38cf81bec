"""The tenants' partitions: writing a generation's blocks, looking chains up, comparing, cleaning up.

A generation is what one inventory began: a replica's blocks from there on. It has a random token and, in each partition
where it holds something, a slot, which is a bit number. A newer inventory is a new generation, so what the old one said
is void at once, whatever it was, and its bits are taken out later, some at a time.
"""

import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ..blocks import BlockHash
from ..errors import StoreRefusedError
from ..events import Digest
from ..identity import DIGEST_BYTES
from ..partition import bits_of
from .codec import TOKEN_BYTES, decode_digests, decode_slots, is_being_cleaned
from .keys import Keys
from .link import RedisLink
from .registry import Members

__all__ = ["Cleaning", "PartitionFullError", "PartitionTable", "Partitions"]

# Of a million generations that a fleet may begin in an hour, those not yet cleaned up; a bitmap is an eighth of this.
_SLOTS_MAX = 2_048
# One call holds Redis for some 2 ms with so many; others wait meanwhile.
_MARKED_PER_CALL = 2_000
_CLEANED_PER_CALL = 1_000
_SCANNED_PER_CALL = 2_000
_TABLES_PER_CALL = 128
# What a partition holds besides blocks, whose names are longer; lua/partition.lua describes them.
_TABLE_FIELDS = ("slots", "digests", "cleaning")
# A partition that nobody wrote or compared for so long belongs to replicas that are gone.
_KEEP_MS = 60 * 60 * 1_000


class PartitionFullError(Exception):
    """A partition has no slot left, so it has to be cleaned up first. Never leaves this package."""


@dataclass(frozen=True, slots=True)
class PartitionTable:
    """Which generation has which slot in a partition, and what each holds there.

    num_blocks: that are named there, also those of generations that are gone and not cleaned up yet. is_being_cleaned:
    whether a clean-up is under way, or was given up.
    """

    slots: Mapping[int, bytes]
    digests: Mapping[bytes, Digest]
    num_blocks: int
    exists: bool
    is_being_cleaned: bool


@dataclass(slots=True)
class Cleaning:
    """A clean-up of one partition after generations that are gone, and how far it is."""

    tenant: bytes
    gone: Sequence[bytes]
    cleaner: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES))
    cursor: bytes = b"0"
    has_begun: bool = False

    @property
    def is_over(self) -> bool:
        return self.has_begun and int(self.cursor) == 0


class Partitions:
    """One hash per tenant. Raises what `RedisLink` does."""

    def __init__(self, link: RedisLink, keys: Keys, heartbeat_interval_s: float) -> None:
        self._link = link
        self._keys = keys
        # A clean-up goes on with each heartbeat. One that was not heard of for several was given up.
        self._cleaner_silent_ms = int(1_000 * 3 * heartbeat_interval_s)

    async def mark(
        self,
        tenant: bytes,
        token: bytes,
        to_set: Sequence[BlockHash],
        to_clear: Sequence[BlockHash],
        between: Callable[[], Awaitable[None]],
    ) -> tuple[Digest, Digest]:
        """Blocks that a generation holds from here on, and those that it no longer holds.

        between: awaited after each bounded part of them.
        Returns what it held in this partition before, and after. Raises PartitionFullError.
        """
        key = self._keys.partition(tenant)
        first: Digest | None = None
        digest = Digest()
        # What is removed goes first, so that a full Redis gets room before it is asked for more.
        for number, hashes in [*((0, part) for part in _parts(to_clear)), *((1, part) for part in _parts(to_set))]:
            blobs = (b"", hashes) if number == 0 else (hashes, b"")
            answer = await self._link.run("mark", (key,), token, _KEEP_MS, _SLOTS_MAX, *blobs)
            if len(answer) == 1:
                raise PartitionFullError
            first = first or Digest(int(answer[0]), int(answer[1]))
            digest = Digest(int(answer[2]), int(answer[3]))
            await between()
        return first or digest, digest

    def lookup(self, tenant: bytes, block_hashes: Sequence[BlockHash]) -> tuple[str | bytes | int, ...]:
        """The command that looks a chain up; `matched` reads the answer."""
        return ("HMGET", self._keys.partition(tenant), "slots", *block_hashes)

    @staticmethod
    def matched(answer: list[bytes | None], members: Members) -> Mapping[str, int]:
        """Number of leading blocks of the chain on each replica that counts; those with none are left out."""
        replicas, candidates = _seats(answer[0], members)
        matched: dict[str, int] = {}

        def note(mask: int, num_matched: int) -> None:
            for bit in bits_of(mask):
                matched[replicas[bit]] = num_matched

        for num_matched, bitmap in enumerate(answer[1:]):
            still = candidates & int.from_bytes(bitmap or b"", "little")
            if still != candidates:
                if num_matched:
                    note(candidates & ~still, num_matched)
                candidates = still
                if not still:
                    return matched
        if len(answer) > 1:
            note(candidates, len(answer) - 1)
        return matched

    async def tables(self, tenants: Sequence[bytes]) -> dict[bytes, PartitionTable]:
        """The tables of these tenants' partitions; a tenant without one has an empty table."""
        tables: dict[bytes, PartitionTable] = {}
        for part in _parts_of(tenants, _TABLES_PER_CALL):
            keys = [self._keys.partition(tenant) for tenant in part]
            answers = await self._link.commands(
                *(command for key in keys for command in (("HMGET", key, *_TABLE_FIELDS), ("HLEN", key)))
            )
            for tenant, fields, num_fields in zip(part, answers[::2], answers[1::2], strict=True):
                tables[tenant] = _table(fields, num_fields)
        return tables

    async def pages(self, tenant: bytes) -> AsyncIterator[dict[bytes, list[BlockHash]]]:
        """Bitmap -> blocks that have it, page by page.

        A block that comes or goes meanwhile may be missing, or come again in another page.
        """
        cursor = b"0"
        while True:
            cursor, page = await self._link.command(
                "HSCAN", self._keys.partition(tenant), cursor, "COUNT", _SCANNED_PER_CALL
            )
            # Few bitmaps stand for many blocks, so each need be taken apart only once.
            by_bitmap: defaultdict[bytes, list[BlockHash]] = defaultdict(list)
            for name, bitmap in page.items():
                if len(name) == DIGEST_BYTES:
                    by_bitmap[bitmap].append(name)
            yield by_bitmap
            if int(cursor) == 0:
                return

    async def count(self, tenant: bytes, table: PartitionTable, token: bytes) -> Digest:
        """What a generation holds in a partition, block by block, whatever the digests there say."""
        held: set[BlockHash] = set()
        masks = [1 << slot for slot, owner in table.slots.items() if owner == token]
        async for page in self.pages(tenant):
            for bitmap, block_hashes in page.items():
                if any(int.from_bytes(bitmap, "little") & mask for mask in masks):
                    held.update(block_hashes)
        return Digest.of(held)

    async def keep(self, tenants: Sequence[bytes]) -> None:
        """These partitions are in use: they are kept, and listed, also where their entry in the list was lost."""
        for part in _parts_of(tenants, _TABLES_PER_CALL):
            names = [tenant.hex() for tenant in part]
            are_listed, *_ = await self._link.commands(
                ("SMISMEMBER", self._keys.tenants, *names),
                *(("PEXPIRE", self._keys.partition(tenant), _KEEP_MS) for tenant in part),
            )
            # Asked first, for a Redis that is full refuses to add even what is there.
            missing = [name for name, is_listed in zip(names, are_listed, strict=True) if not is_listed]
            if missing:
                await self._link.command("SADD", self._keys.tenants, *missing)

    async def drop(self, tenant: bytes) -> int:
        """Drop a partition at a cost that does not depend on its size. Returns how many blocks it named."""
        key = self._keys.partition(tenant)
        fields, num_fields, _ = await self._link.commands(
            ("HMGET", key, *_TABLE_FIELDS), ("HLEN", key), ("UNLINK", key)
        )
        return _table(fields, num_fields).num_blocks

    async def memory_bytes(self, tenants: Sequence[bytes]) -> dict[bytes, int]:
        """Redis's own estimates, from samples; none where this user may not ask for them."""
        found: dict[bytes, int] = {}
        for part in _parts_of(tenants, _TABLES_PER_CALL):
            keys = [self._keys.partition(tenant) for tenant in part]
            try:
                answers = await self._link.commands(*(("MEMORY", "USAGE", key, "SAMPLES", 100) for key in keys))
            except StoreRefusedError:
                return {}
            found |= {tenant: int(size) for tenant, size in zip(part, answers, strict=True) if size is not None}
        return found

    async def clean(self, cleaning: Cleaning, num_blocks_max: int) -> int:
        """Go on with a clean-up until it is over, or so many blocks were looked at. Returns how many were."""
        num_seen = 0
        while not cleaning.is_over and num_seen < num_blocks_max:
            cleaning.cursor, num_cleaned = await self._link.run(
                "clean",
                (self._keys.partition(cleaning.tenant),),
                cleaning.cleaner,
                cleaning.cursor,
                _CLEANED_PER_CALL,
                self._cleaner_silent_ms,
                b"".join(cleaning.gone),
            )
            cleaning.has_begun = True
            num_seen += num_cleaned
        return num_seen


@lru_cache(maxsize=1_024)
def _seats(table: bytes | None, members: Members) -> tuple[Mapping[int, str], int]:
    """Bit -> replica that counts, and their bits together. Both change seldom, and are needed with every lookup."""
    slots = decode_slots(table)
    replicas = {1 << slot: members.replicas[token] for slot, token in slots.items() if token in members.replicas}
    return replicas, sum(replicas)


def _parts(block_hashes: Sequence[BlockHash]) -> Iterator[bytes]:
    for part in _parts_of(block_hashes, _MARKED_PER_CALL):
        yield b"".join(part)


def _parts_of(values: Sequence[bytes], size: int) -> Iterator[Sequence[bytes]]:
    for first in range(0, len(values), size):
        yield values[first : first + size]


def _table(fields: Sequence[bytes | None], num_fields: int) -> PartitionTable:
    slots = decode_slots(fields[0])
    num_blocks = int(num_fields) - sum(field is not None for field in fields)
    return PartitionTable(
        slots,
        decode_digests(slots, fields[1]),
        num_blocks,
        exists=num_fields > 0,
        is_being_cleaned=is_being_cleaned(fields[0]),
    )
