"""What only the embedded store has: leases by a clock that the test moves, and a log whose bound is reached in a wait.

The contract that it shares with other stores is in tests/integration/test_index_store.py.
"""

import asyncio
import dataclasses
from collections.abc import Callable

import pytest

from cache_index import embedded, log
from cache_index.embedded import EmbeddedStore
from cache_index.errors import DriftError, SequenceGapError, UnknownReplicaError
from cache_index.events import BlocksCleared
from cache_index.settings import IndexSettings
from cache_index.store import Cursor, Departure, News, Notices, TenantPurge
from tests.index_examples import IDENTITY, OTHER_TENANT, TENANT, batch, chain, heartbeat, inventory, removed, stored

PATIENCE_S = 30.0


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> EmbeddedStore:
    return EmbeddedStore(IndexSettings(lease_s=10.0, log_batches_max=4), clock)


async def test_a_lease_ends_after_its_time_and_not_before(store: EmbeddedStore, clock: Clock) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    clock.now_s += 9.999
    assert await store.match(TENANT, chain("a")) == {"r1": 1}
    clock.now_s += 0.001
    assert await store.match(TENANT, chain("a")) == {}
    store.check_invariants()


@pytest.mark.parametrize("word", ["heartbeat", "batch", "a batch again", "inventory"])
async def test_every_word_of_a_replica_renews_its_lease(store: EmbeddedStore, clock: Clock, word: str) -> None:
    await store.publish_inventory(inventory("r1", 1))
    await store.publish(batch("r1", 2, stored("a")))
    for round_number in range(3):
        clock.now_s += 9.0
        match word:
            case "heartbeat":
                await store.heartbeat(heartbeat("r1", 2, "a"))
            case "batch":
                await store.publish(batch("r1", 3 + round_number))
            case "a batch again":
                await store.publish(batch("r1", 2, stored("a")))
            case "inventory":
                await store.publish_inventory(inventory("r1", 3 + round_number, stored("a")))
    assert await store.match(TENANT, chain("a")) == {"r1": 1}
    clock.now_s += 10.0
    assert await store.match(TENANT, chain("a")) == {}


async def test_reading_and_matching_renew_no_lease(store: EmbeddedStore, clock: Clock) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    clock.now_s += 9.0
    await store.read(None, 0.0)
    await store.match(TENANT, chain("a"))
    clock.now_s += 1.0
    assert (await store.read(None, 0.0)).items == ()


@pytest.mark.parametrize("word", ["heartbeat", "batch"])
async def test_a_replica_whose_lease_ended_has_to_publish_its_inventory(
    store: EmbeddedStore, clock: Clock, word: str
) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    clock.now_s += 10.0
    with pytest.raises(UnknownReplicaError):
        await (
            store.heartbeat(heartbeat("r1", 1, "a"))
            if word == "heartbeat"
            else store.publish(batch("r1", 2, stored("b")))
        )
    await store.publish_inventory(inventory("r1", 3, stored("ab")))
    assert await store.match(TENANT, chain("ab")) == {"r1": 2}
    store.check_invariants()


async def test_only_the_lease_that_ended_takes_its_replica_away(store: EmbeddedStore, clock: Clock) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    clock.now_s += 5.0
    await store.publish_inventory(inventory("r2", 1, stored("a"), epoch=7))
    cursor = (await store.read(None, 0.0)).cursor
    clock.now_s += 5.0
    await store.heartbeat(heartbeat("r2", 1, "a", epoch=7))
    assert await store.match(TENANT, chain("a")) == {"r2": 1}
    # The departure was noticed first, by the heartbeat.
    assert (await store.read(cursor, 0.0)).items == (Departure("r1", 1), heartbeat("r2", 1, "a", epoch=7))


async def test_a_waiting_follower_learns_of_an_ended_lease_when_it_ends(clock: Clock) -> None:
    # By a real clock, for it is the waiting that has to end in time. Nobody else speaks to the store.
    store = EmbeddedStore(IndexSettings(lease_s=0.05, heartbeat_interval_s=0.02))
    await store.publish_inventory(inventory("r1", 1))
    cursor = (await store.read(None, 0.0)).cursor
    async with asyncio.timeout(PATIENCE_S):
        news = await store.read(cursor, 100 * PATIENCE_S)
    assert news.items == (Departure("r1", 1),)


async def test_a_wait_that_outlives_a_renewed_lease_goes_on_until_its_own_end(
    store: EmbeddedStore, clock: Clock
) -> None:
    await store.publish_inventory(inventory("r1", 1))
    cursor = (await store.read(None, 0.0)).cursor
    clock.now_s += 9.99  # So the lease seems to end within the wait, but this clock stands still.
    assert await store.read(cursor, 0.05) == News(cursor, (), is_snapshot=False)


async def test_a_clock_that_jumps_far_ends_every_lease_once(store: EmbeddedStore, clock: Clock) -> None:
    for name in ("r1", "r2", "r3"):
        await store.publish_inventory(inventory(name, 1, stored("a")))
    cursor = (await store.read(None, 0.0)).cursor
    clock.now_s += 1e9
    departed = (await store.read(cursor, 0.0)).items
    assert departed == (Departure("r1", 1), Departure("r2", 1), Departure("r3", 1))
    await store.deregister("r1", 1)
    assert (await store.read(None, 0.0)).items == ()


@pytest.mark.parametrize(("num_batches", "is_snapshot"), [(1, False), (4, False), (5, True), (9, True)])
async def test_a_waiting_follower_that_more_passed_by_than_the_log_holds_gets_a_snapshot(
    store: EmbeddedStore, num_batches: int, is_snapshot: bool
) -> None:
    await store.publish_inventory(inventory("r1", 1))
    cursor = (await store.read(None, 0.0)).cursor
    reader = asyncio.create_task(store.read(cursor, PATIENCE_S))
    await asyncio.sleep(0)
    said = [batch("r1", 2 + number, stored([f"block {number}"])) for number in range(num_batches)]
    for item in said:
        await store.publish(item)  # Never gives the loop back, so the reader runs only after all of them.
    news = await reader
    everything = inventory("r1", 1 + num_batches, stored([f"block {number}" for number in range(num_batches)]))
    assert news.is_snapshot == is_snapshot
    assert news.items == ((everything,) if is_snapshot else tuple(said))


async def test_news_between_a_read_and_the_next_are_not_lost(store: EmbeddedStore) -> None:
    await store.publish_inventory(inventory("r1", 1))
    cursor = (await store.read(None, 0.0)).cursor
    reader = asyncio.create_task(store.read(cursor, PATIENCE_S))
    await asyncio.sleep(0)
    await store.publish(batch("r1", 2, stored("a")))
    news = await reader
    await store.publish(batch("r1", 3, stored("b")))  # While nobody waits.
    assert (await store.read(news.cursor, PATIENCE_S)).items == (batch("r1", 3, stored("b")),)


async def test_the_log_is_bounded(store: EmbeddedStore) -> None:
    await store.publish_inventory(inventory("r1", 1))
    for seq in range(2, 100):
        await store.publish(batch("r1", seq, stored("a")))
    store.check_invariants()
    assert (await store.stats()).log_items == 4


async def test_two_stores_have_two_lives() -> None:
    one, other = (EmbeddedStore(IndexSettings()) for _ in range(2))
    await other.publish_inventory(inventory("r1", 1))
    await one.publish_inventory(inventory("r1", 1))
    cursor = (await one.read(None, 0.0)).cursor
    news = await other.read(cursor, PATIENCE_S)
    assert news.is_snapshot
    assert news.cursor.life != cursor.life


async def test_the_log_is_bounded_in_blocks_too_and_keeps_the_newest_whatever_its_size(clock: Clock) -> None:
    store = EmbeddedStore(IndexSettings(log_blocks_max=5), clock)
    await store.publish_inventory(inventory("r1", 1, stored("abc")))
    await store.publish(batch("r1", 2, stored("d"), BlocksCleared(), removed("e")))
    assert (await store.stats()).log_items == 2
    cursor = (await store.read(None, 0.0)).cursor
    await store.publish(batch("r1", 3, stored("f")))
    assert (await store.stats()).log_items == 2
    assert (await store.read(cursor, 0.0)).items == (batch("r1", 3, stored("f")),)
    cursor = (await store.read(None, 0.0)).cursor
    large = batch("r1", 4, stored("abcdefgh"))
    await store.publish(large)
    assert (await store.stats()).log_items == 1
    assert (await store.read(cursor, 0.0)).items == (large,)
    store.check_invariants()


async def test_a_read_is_bounded_and_says_how_much_is_left(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(log, "ITEMS_PER_READ_MAX", 3)
    store = EmbeddedStore(IndexSettings(), clock)
    await store.publish_inventory(inventory("r1", 0))
    cursor: Cursor | None = (await store.read(None, 0.0)).cursor
    said = [batch("r1", 1 + number, stored("a")) for number in range(7)]
    for item in said:
        await store.publish(item)
    read, lags = [], []
    for _ in range(3):
        news = await store.read(cursor, 0.0)
        cursor = news.cursor
        read += news.items
        lags.append(news.num_behind)
    assert read == said
    assert lags == [4, 1, 0]


async def test_a_lease_is_renewed_by_a_heartbeat_that_tells_of_drift_and_by_none_after_a_gap(
    store: EmbeddedStore, clock: Clock
) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    clock.now_s += 9.0
    with pytest.raises(DriftError):
        await store.heartbeat(heartbeat("r1", 1, "b"))
    clock.now_s += 9.0
    with pytest.raises(SequenceGapError):
        await store.heartbeat(heartbeat("r1", 2, "a"))
    assert await store.match(TENANT, chain("a")) == {"r1": 1}
    clock.now_s += 1.0
    assert await store.match(TENANT, chain("a")) == {}


async def test_a_heartbeat_that_tells_of_drift_is_nobodys_news(store: EmbeddedStore) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    cursor = (await store.read(None, 0.0)).cursor
    with pytest.raises(DriftError):
        await store.heartbeat(heartbeat("r1", 1, "b"))
    assert (await store.read(cursor, 0.0)).items == ()


async def test_only_so_many_purges_are_remembered_each_tenant_once(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "PURGES_MAX", 3)
    await store.publish_inventory(inventory("r1", 1))
    for number in (0, 1, 2, 1, 3):
        await store.purge(b"tenant %d" % number)
        store.check_invariants()
    told = await store.heartbeat(heartbeat("r1", 1, num_purges_seen=0))
    assert told == Notices(5, (b"tenant 2", b"tenant 1", b"tenant 3"))
    assert (await store.heartbeat(heartbeat("r1", 1, num_purges_seen=4))).purged == (b"tenant 3",)


async def test_a_purge_counts_each_block_once_and_nothing_of_ended_leases(store: EmbeddedStore, clock: Clock) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("abc"), stored("x", OTHER_TENANT)))
    clock.now_s += 5.0
    await store.publish_inventory(inventory("r2", 1, stored("ab")))
    await store.publish_inventory(inventory("r3", 1, stored("b")))
    cursor = (await store.read(None, 0.0)).cursor
    clock.now_s += 5.0
    assert await store.purge(TENANT) == 2
    assert (await store.read(cursor, 0.0)).items == (Departure("r1", 1), TenantPurge(TENANT))


async def test_an_identity_is_told_until_a_lease_after_it_was_last_announced(
    store: EmbeddedStore, clock: Clock
) -> None:
    other = dataclasses.replace(IDENTITY, weights="sha256:other")
    for identity in (IDENTITY, other):
        await store.announce(identity)
    clock.now_s += 6.0
    await store.announce(IDENTITY)
    await store.publish_inventory(inventory("r1", 1))
    assert set((await store.heartbeat(heartbeat("r1", 1))).identities) == {IDENTITY, other}
    clock.now_s += 4.0
    assert (await store.heartbeat(heartbeat("r1", 1))).identities == (IDENTITY,)
    clock.now_s += 6.0
    assert (await store.heartbeat(heartbeat("r1", 1))).identities == ()


async def test_only_so_many_identities_are_remembered(store: EmbeddedStore) -> None:
    identities = [dataclasses.replace(IDENTITY, weights=f"{number}") for number in range(embedded.IDENTITIES_MAX + 2)]
    for identity in (*identities[:2], identities[0], *identities[2:]):
        await store.announce(identity)
    await store.publish_inventory(inventory("r1", 1))
    told = (await store.heartbeat(heartbeat("r1", 1))).identities
    assert set(told) == set(identities[2:])


async def test_the_stats_say_how_long_leases_last_and_how_much_memory_tenants_take(
    store: EmbeddedStore, clock: Clock
) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("ab")))
    clock.now_s += 3.0
    await store.publish_inventory(inventory("r2", 1, stored("b")))
    stats = await store.stats()
    assert [item.lease_left_s for item in stats.replicas] == [7.0, 10.0]
    [tenant] = stats.tenants
    assert tenant.memory_bytes is not None and tenant.memory_bytes > 2 * 16
    clock.now_s += 7.0
    assert [item.registration.replica_id for item in (await store.stats()).replicas] == ["r2"]
    await store.close()


async def test_a_lease_of_nobody_fails_the_invariants(store: EmbeddedStore) -> None:
    await store.publish_inventory(inventory("r1", 1))
    store.check_invariants()
    store._lease_ends["ghost"] = 1e9
    with pytest.raises(AssertionError):
        store.check_invariants()


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda store: setattr(store._log, "_num_blocks", 0),
        lambda store: setattr(store._log, "_items_max", 1),
        lambda store: setattr(store._log, "_blocks_max", 1),
        lambda store: setattr(store._log, "version", 1),
        lambda store: store._purges.update((b"%d" % number, number) for number in range(embedded.PURGES_MAX + 1)),
    ],
)
async def test_a_corrupt_store_fails_its_invariants(
    store: EmbeddedStore, corrupt: Callable[[EmbeddedStore], object]
) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("ab")))
    await store.publish(batch("r1", 2, stored("c")))
    store.check_invariants()
    corrupt(store)
    with pytest.raises(AssertionError):
        store.check_invariants()
