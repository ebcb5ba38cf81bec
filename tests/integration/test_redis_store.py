"""The store on Redis: what is its own, besides the contract of tests/integration/test_index_store.py."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cache_index.errors import (
    CacheIndexError,
    DriftError,
    SequenceGapError,
    StaleEpochError,
    StoreUnavailableError,
    UnknownReplicaError,
)
from cache_index.events import BlocksCleared, BlocksStored, Digest, Heartbeat
from cache_index.redis_store import RedisStore
from cache_index.redis_store import store as store_module
from cache_index.redis_store.codec import decode_slots
from cache_index.settings import IndexSettings
from cache_index.store import Departure
from tests.index_examples import OTHER_TENANT, TENANT, batch, block, chain, heartbeat, inventory, removed, stored
from tests.index_stores import next_namespace, plain, snapshot
from tests.redis_servers import RedisServer, redis_server

PATIENCE_S = 30.0


@pytest.fixture
async def settings(redis: RedisServer) -> IndexSettings:
    return IndexSettings(redis_url=redis.secret_url, namespace=next_namespace(), lease_s=3_600.0)


@pytest.fixture
async def store(settings: IndexSettings) -> AsyncIterator[RedisStore]:
    store = RedisStore(settings)
    yield store
    await store.close()


@pytest.fixture
def client(redis: RedisServer) -> Iterator[Any]:
    with redis.client() as client:
        yield client


class Keys:
    """The names of one namespace's keys, as REDIS.md has them."""

    def __init__(self, settings: IndexSettings) -> None:
        self.namespace = settings.namespace

    def of(self, name: str) -> str:
        return f"{self.namespace}:{{{self.namespace}}}:{name}"

    def partition(self, tenant: bytes = TENANT) -> str:
        return f"{self.namespace}:{{{tenant.hex()}}}:blocks"


@pytest.fixture
def keys(settings: IndexSettings) -> Keys:
    return Keys(settings)


def bitmaps(client: Any, key: str) -> dict[bytes, int]:
    """Block hash -> bits, as they stand in Redis."""
    return {name: int.from_bytes(bits, "little") for name, bits in client.hgetall(key).items() if len(name) == 16}


def commands_in(client: Any, calls: Callable[[], None] | None = None) -> dict[str, int]:
    """How often each command ran since the last `config_resetstat`."""
    return {name.removeprefix("cmdstat_"): facts["calls"] for name, facts in client.info("commandstats").items()}


# Leases


async def test_within_its_lease_nothing_of_a_silent_replica_counts_and_followers_hear_of_it(
    redis: RedisServer,
) -> None:
    settings = IndexSettings(
        redis_url=redis.secret_url, namespace=next_namespace(), lease_s=0.6, heartbeat_interval_s=0.2
    )
    store, follower = RedisStore(settings), RedisStore(settings)
    loop = asyncio.get_running_loop()
    await store.publish_inventory(inventory("r1", 1, stored("ab")))
    said_s = loop.time()
    cursor = (await follower.read(None, 0.0)).cursor
    assert await follower.match(TENANT, chain("ab")) == {"r1": 2}
    async with asyncio.timeout(PATIENCE_S):
        while await follower.match(TENANT, chain("ab")):  # noqa: ASYNC110  Nothing tells; that is what is tested.
            await asyncio.sleep(0.01)
    assert settings.lease_s - 0.1 <= loop.time() - said_s < settings.lease_s + 0.5
    # That was a reader's own look. The registry hears of it when anybody asks, a waiting follower among them.
    assert (await follower.read(cursor, PATIENCE_S)).items == (Departure("r1", 1),)
    with pytest.raises(UnknownReplicaError):
        await store.heartbeat(heartbeat("r1", 1, "ab"))
    with pytest.raises(UnknownReplicaError):
        await store.publish(batch("r1", 2, stored("c")))
    await store.publish_inventory(inventory("r1", 3, stored("a")))
    assert await follower.match(TENANT, chain("ab")) == {"r1": 1}
    await store.close()
    await follower.close()


async def test_a_lease_lasts_as_long_as_it_is_renewed(redis: RedisServer) -> None:
    settings = IndexSettings(
        redis_url=redis.secret_url, namespace=next_namespace(), lease_s=0.5, heartbeat_interval_s=0.1
    )
    store = RedisStore(settings)
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    for _ in range(10):
        await asyncio.sleep(settings.heartbeat_interval_s)
        await store.heartbeat(heartbeat("r1", 1, "a"))
        assert await store.match(TENANT, chain("a")) == {"r1": 1}
    await store.close()


async def test_a_replica_that_starts_again_under_its_id_has_nothing_of_its_last_life(
    store: RedisStore, client: Any, keys: Keys
) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("abc"), epoch=1))
    await store.publish_inventory(inventory("r1", 1, epoch=2))
    # Its bits are still there. They count for nothing, for the first reader as for any other.
    assert set(bitmaps(client, keys.partition())) == set(chain("abc"))
    other = RedisStore(store._link._settings)
    for reader in (store, other):
        assert await reader.match(TENANT, chain("abc")) == {}
        assert await snapshot(reader) == plain([inventory("r1", 1, epoch=2)])
    with pytest.raises(StaleEpochError):
        await other.publish(batch("r1", 2, stored("a"), epoch=1))
    await other.close()


# What is void, and its clean-up


async def test_an_inventory_voids_the_one_before_without_touching_its_blocks(
    store: RedisStore, client: Any, keys: Keys
) -> None:
    await store.publish_inventory(inventory("r1", 1, stored([str(number) for number in range(5_000)])))
    client.config_resetstat()
    await store.publish_inventory(inventory("r1", 2, stored("a")))
    calls = commands_in(client)
    assert sum(calls.values()) < 60
    assert "hscan" not in calls
    assert await store.match(TENANT, chain("a")) == {"r1": 1}
    assert await store.match(TENANT, [block("0")]) == {}
    assert len(bitmaps(client, keys.partition())) == 5_001


async def test_heartbeats_clean_up_what_is_gone_and_its_slots_are_used_again(
    store: RedisStore, client: Any, keys: Keys
) -> None:
    await store.publish_inventory(inventory("r2", 1, stored("ax")))
    for seq in range(1, 30):
        await store.publish_inventory(inventory("r1", seq, stored("ab"), stored([f"only {seq}"])))
    assert max(bitmaps(client, keys.partition()).values()) >= 1 << 29
    held = ["a", "b", "only 29"]
    for _ in range(3):
        await store.heartbeat(heartbeat("r1", 29, held))
    found = bitmaps(client, keys.partition())
    slots = decode_slots(client.hget(keys.partition(), "slots"))
    assert len(slots) == 2
    assert set(found) == set(chain(held)) | set(chain("x"))
    assert all(bits & ~sum(1 << slot for slot in slots) == 0 for bits in found.values()), "no bit of a gone generation"
    # A newcomer gets one of the slots that are free again, and nothing of who had it.
    await store.publish_inventory(inventory("r3", 1, stored("x")))
    assert len(decode_slots(client.hget(keys.partition(), "slots"))) == 3
    assert bitmaps(client, keys.partition())[block("x")] < 1 << 29
    assert await store.match(TENANT, chain("ab")) == {"r1": 2, "r2": 1}
    assert await store.match(TENANT, chain("xa")) == {"r2": 2, "r3": 1}


async def test_a_partition_that_nobody_holds_anything_in_goes_away(store: RedisStore, client: Any, keys: Keys) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("abc", OTHER_TENANT)))
    await store.publish_inventory(inventory("r1", 2, stored("a")))
    assert client.smembers(keys.of("tenants")) == {TENANT.hex().encode(), OTHER_TENANT.hex().encode()}
    for _ in range(3):
        await store.heartbeat(heartbeat("r1", 2, "a"))
    assert not client.exists(keys.partition(OTHER_TENANT))
    assert client.smembers(keys.of("tenants")) == {TENANT.hex().encode()}


async def test_a_clean_up_is_bounded_for_each_heartbeat_and_goes_on_with_the_next(
    store: RedisStore, client: Any, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_CLEANED_BLOCKS", 1_000)
    names = [str(number) for number in range(6_000)]
    await store.publish_inventory(inventory("r2", 1, stored("a")))
    await store.publish_inventory(inventory("r1", 1, stored(names)))
    await store.publish_inventory(inventory("r1", 2, stored("b")))
    left = [len(bitmaps(client, keys.partition()))]
    while left[-1] > 2:
        await store.heartbeat(heartbeat("r1", 2, "b"))
        left.append(len(bitmaps(client, keys.partition())))
        assert left[-2] - left[-1] <= 2_500, "one step more than the bound, at most"
        assert len(left) < 20
    assert len(left) > 4
    await store.heartbeat(heartbeat("r1", 2, "b"))
    assert len(decode_slots(client.hget(keys.partition(), "slots"))) == 2
    assert client.hget(keys.partition(), "cleaning") is None


async def test_a_clean_up_that_was_given_up_is_taken_over_and_never_clears_a_slot_that_is_used_again(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = IndexSettings(
        redis_url=redis.secret_url, namespace=next_namespace(), lease_s=3_600.0, heartbeat_interval_s=0.05
    )
    monkeypatch.setattr(store_module, "_CLEANED_BLOCKS", 1_000)
    slow, other = RedisStore(settings), RedisStore(settings)
    names = [str(number) for number in range(6_000)]
    await slow.publish_inventory(inventory("r1", 1, stored(names)))
    await slow.publish_inventory(inventory("r1", 2, stored("b")))
    await slow.heartbeat(heartbeat("r1", 2, "b"))
    assert slow._cleanings
    await other.publish_inventory(inventory("r2", 1, stored("a")))
    monkeypatch.setattr(store_module, "_CLEANED_BLOCKS", 100_000)
    # While the first may still be at it the other keeps away; later it begins anew.
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await other.heartbeat(heartbeat("r2", 1, "a"))
            with redis.client() as client:
                slots = decode_slots(client.hget(Keys(settings).partition(), "slots"))
                if len(bitmaps(client, Keys(settings).partition())) == 2 and len(slots) == 2:
                    break
            await asyncio.sleep(0.02)
    # The freed slot is taken, and then the first one wakes up in the middle of its round.
    await other.publish_inventory(inventory("r3", 1, stored(names)))
    await slow.heartbeat(heartbeat("r1", 2, "b"))
    assert await other.match(TENANT, chain(names)) == {"r3": 6_000}
    await other.heartbeat(Heartbeat("r3", 1, 1, Digest.of(chain(names))))
    await slow.close()
    await other.close()


async def test_a_full_partition_is_cleaned_and_can_be_written_again(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_index.redis_store.partitions._SLOTS_MAX", 4)
    seq, num_refused = 0, 0
    for _ in range(12):
        seq += 1
        with contextlib.suppress(StoreUnavailableError):
            await store.publish_inventory(inventory("r1", seq, stored("a")))
            continue
        num_refused += 1
        seq += 1
        await store.publish_inventory(inventory("r1", seq, stored("a")))
    assert num_refused > 0
    assert await store.match(TENANT, chain("a")) == {"r1": 1}


async def test_all_keys_expire_when_nobody_speaks_any_more(store: RedisStore, client: Any, keys: Keys) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    assert 0 < client.ttl(keys.partition()) <= 3_600
    await store.heartbeat(heartbeat("r1", 1, "a"))
    for key in client.keys(f"{keys.namespace}:*"):
        assert 0 < client.ttl(key) <= 24 * 3_600


# What is lost or changed behind its back


def _flush(client: Any, keys: Keys) -> None:
    for key in client.keys(f"{keys.namespace}:*"):
        client.delete(key)


@pytest.mark.parametrize(
    ("lose", "errors"),
    [
        (_flush, (UnknownReplicaError,)),
        (lambda client, keys: client.hdel(keys.of("replicas"), "r1"), (UnknownReplicaError,)),
        (lambda client, keys: client.delete(keys.of("meta")), (None,)),
        (lambda client, keys: client.delete(keys.partition()), (DriftError,)),
        (lambda client, keys: client.hdel(keys.partition(), chain("a")[0]), (DriftError,)),
        (lambda client, keys: client.hset(keys.partition(), chain("z")[0], b"\xff"), (DriftError,)),
        (lambda client, keys: client.hset(keys.partition(), "slots", b"\0" * 8), (DriftError,)),
        (lambda client, keys: client.hdel(keys.partition(), "digests"), (DriftError,)),
        (lambda client, keys: client.delete(keys.of("log")), (None,)),
        (lambda client, keys: client.delete(keys.of("tenants")), (None,)),
    ],
    ids=[
        "everything",
        "a replica's record",
        "meta",
        "a partition",
        "a block",
        "a foreign bit",
        "the slots",
        "the digests",
        "the log",
        "the list of tenants",
    ],
)
async def test_what_is_lost_is_noticed_with_the_next_heartbeat_and_an_inventory_repairs_it(
    store: RedisStore, client: Any, keys: Keys, lose: Callable[[Any, Keys], None], errors: tuple[Any, ...]
) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("abc"), stored("x", OTHER_TENANT)))
    await store.heartbeat(heartbeat("r1", 1, "abcx"))
    cursor = (await store.read(None, 0.0)).cursor
    lose(client, keys)
    if errors == (None,):
        # Nothing of the replica is lost with it, and what was is made anew.
        await store.heartbeat(heartbeat("r1", 1, "abcx"))
    else:
        with pytest.raises(errors):
            await store.heartbeat(heartbeat("r1", 1, "abcx"))
    seq = 2
    with contextlib.suppress(DriftError):
        await store.publish_inventory(inventory("r1", seq, stored("abc"), stored("x", OTHER_TENANT)))
        seq -= 1
    # Where a slot that should be empty was not, the partition goes first, and the second one repairs it.
    seq += 1
    await store.publish_inventory(inventory("r1", seq, stored("abc"), stored("x", OTHER_TENANT)))
    await store.heartbeat(heartbeat("r1", seq, "abcx"))
    assert await store.match(TENANT, chain("abc")) == {"r1": 3}
    assert await store.match(TENANT, chain("z")) == {}
    assert await store.match(OTHER_TENANT, chain("x")) == {"r1": 1}
    expected = plain([inventory("r1", seq, stored("abc"), stored("x", OTHER_TENANT))])
    assert await snapshot(store) == expected
    # A follower that was there before knows the same afterwards, whether it reads the log on or begins anew.
    news = await store.read(cursor, 0.0)
    assert plain([item for item in news.items if not isinstance(item, Heartbeat)])[-1:] == expected


async def test_a_loss_is_noticed_by_a_publish_too(store: RedisStore, client: Any, keys: Keys) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("abc")))
    client.delete(keys.partition())
    with pytest.raises(DriftError):
        await store.publish(batch("r1", 2, stored("d")))
    # It counts for nobody: the batch is not in the log, and the generation holds less than the replica.
    with pytest.raises((DriftError, SequenceGapError)):
        await store.heartbeat(heartbeat("r1", 2, "abcd"))
    await store.publish_inventory(inventory("r1", 3, stored("abcd")))
    assert await store.match(TENANT, chain("abcd")) == {"r1": 4}


async def test_a_server_that_goes_back_in_time_and_on_again_gives_its_followers_a_snapshot(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        settings = IndexSettings(redis_url=server.secret_url, lease_s=3_600.0)
        store = RedisStore(settings)
        await store.publish_inventory(inventory("r1", 1, stored("a")))
        with server.client() as client:
            client.save()
        await store.publish(batch("r1", 2, removed("a")))
        cursor = (await store.read(None, 0.0)).cursor
        server.kill()
        server.start()
        # It has the version before again, under which something else happens now.
        with pytest.raises(CacheIndexError):
            await store.heartbeat(heartbeat("r1", 2, ""))
        with pytest.raises(SequenceGapError):
            await store.heartbeat(heartbeat("r1", 2, ""))
        await store.publish_inventory(inventory("r1", 3, stored("b")))
        await store.publish(batch("r1", 4, stored("c")))
        news = await store.read(cursor, 0.0)
        assert news.cursor.version > cursor.version
        assert news.is_snapshot, "the same version, and another history"
        assert plain(news.items) == plain([inventory("r1", 4, stored("bc"))])
        await store.close()


# Bounds and cost


async def test_the_log_is_bounded_by_blocks_too_and_keeps_its_newest_item(redis: RedisServer) -> None:
    settings = IndexSettings(
        redis_url=redis.secret_url, namespace=next_namespace(), lease_s=3_600.0, log_blocks_max=100
    )
    store = RedisStore(settings)
    keys = Keys(settings)
    with redis.client() as client:
        await store.publish_inventory(inventory("r1", 1, stored([f"first {number}" for number in range(500)])))
        assert client.xlen(keys.of("log")) == 1
        for seq in range(2, 40):
            await store.publish(batch("r1", seq, stored([f"{seq} {number}" for number in range(10)])))
        assert client.xlen(keys.of("log")) == 10
        assert int(client.hget(keys.of("meta"), "log_blocks")) == 100
        cursor = (await store.read(None, 0.0)).cursor
        await store.publish(batch("r1", 40, stored(["one more"])))
        assert (await store.read(cursor, 0.0)).items == (batch("r1", 40, stored(["one more"])),)
    await store.close()


async def test_a_purge_costs_the_same_whatever_other_tenants_hold(store: RedisStore, client: Any) -> None:
    async def cost(num_of_others: int, seq: int) -> dict[str, int]:
        names = [f"{seq} {number}" for number in range(num_of_others)]
        tenants = [secrets.token_bytes(16) for _ in range(10)]
        blocks = (BlocksStored(tenant, chain(names)) for tenant in tenants)
        await store.publish_inventory(inventory("r1", seq, stored("abc"), *blocks))
        client.config_resetstat()
        assert await store.purge(TENANT) == 3
        calls = commands_in(client)
        for noise in ("info", "config|resetstat", "config"):
            calls.pop(noise, None)
        return calls

    await cost(1, 1)  # The server learns the scripts.
    few, many = await cost(1, 2), await cost(500, 3)
    assert few == many
    assert "unlink" in many
    assert sum(many.values()) < 25


async def test_no_command_walks_the_keyspace(store: RedisStore, client: Any) -> None:
    client.config_resetstat()
    await store.publish_inventory(inventory("r1", 1, stored("abc"), stored("x", OTHER_TENANT)))
    await store.publish(batch("r1", 2, stored("d"), BlocksCleared(), stored("ab")))
    await store.heartbeat(heartbeat("r1", 2, "ab"))
    await store.read(None, 0.0)
    await store.stats()
    await store.purge(TENANT)
    await store.deregister("r1", 1)
    used = commands_in(client).keys()
    assert {"hset", "hscan", "xadd"} <= used
    assert not used & {"keys", "scan", "flushall", "flushdb", "randomkey", "dbsize"}


async def test_an_inventory_of_many_blocks_has_the_checksum_of_all_of_them(store: RedisStore) -> None:
    # Sums of some dozens of checksums pass what Lua's numbers hold exactly.
    names = [f"block {number}" for number in range(5_000)]
    await store.publish_inventory(inventory("r1", 1, stored(names)))
    await store.heartbeat(heartbeat("r1", 1, names))
    await store.publish(batch("r1", 2, removed(names[:3_000])))
    await store.heartbeat(heartbeat("r1", 2, names[3_000:]))
