"""The contract of an index store: one suite for every store.

The actor's runs on a real Ray cluster of this machine; those on Redis on a real server, and on a real Cluster.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest

from cache_index.actor_store import ActorStore
from cache_index.embedded import EmbeddedStore
from cache_index.errors import DriftError, SequenceGapError, StaleEpochError, UnknownReplicaError
from cache_index.events import BlocksCleared, Inventory
from cache_index.redis_store import RedisStore
from cache_index.settings import IndexSettings
from cache_index.store import Cursor, Departure, IndexStore, News, Notices, TenantPurge
from tests.index_examples import (
    IDENTITY,
    OTHER_TENANT,
    TENANT,
    batch,
    chain,
    heartbeat,
    inventory,
    registration,
    removed,
    stored,
)
from tests.index_stores import ACTOR_SETTINGS, LOG_BATCHES_MAX, next_namespace, plain, snapshot

# Long enough for the busiest machine; nothing waits for it unless it fails.
PATIENCE_S = 30.0
# Leases that outlive any test; those that end are tested elsewhere, with a clock of their own, or short.
SETTINGS = IndexSettings(lease_s=3_600.0, log_batches_max=LOG_BATCHES_MAX)


@pytest.fixture(params=["embedded", "actor", "redis", "redis cluster"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[IndexStore]:
    """A store without replicas. The actor is one for all tests, for each is a process; so each test cleans up."""
    if request.param == "embedded":
        store: IndexStore = EmbeddedStore(SETTINGS)
    elif request.param == "actor":
        request.getfixturevalue("ray_cluster")
        store = ActorStore(ACTOR_SETTINGS)
    else:
        server = request.getfixturevalue("redis" if request.param == "redis" else "redis_nodes")
        store = RedisStore(SETTINGS.model_copy(update={"redis_url": server.secret_url, "namespace": next_namespace()}))
    yield store
    for item in (await store.read(None, 0.0)).items:
        assert isinstance(item, Inventory)
        await store.deregister(item.replica_id, item.epoch)
    if isinstance(store, EmbeddedStore):
        store.check_invariants()
    await store.close()


async def head(store: IndexStore) -> Cursor:
    return (await store.read(None, 0.0)).cursor


async def test_the_first_inventory_registers_a_replica_even_an_empty_one(store: IndexStore) -> None:
    with pytest.raises(UnknownReplicaError) as caught:
        await store.heartbeat(heartbeat("r1", 1, epoch=1))
    assert caught.value.replica_id == "r1"
    await store.publish_inventory(inventory("r1", 1))
    await store.heartbeat(heartbeat("r1", 1, epoch=1))
    assert await store.match(TENANT, chain("a")) == {}
    assert await snapshot(store) == plain([inventory("r1", 1)])


async def test_a_chain_matches_on_each_replica_up_to_its_first_missing_block(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("ab"), stored("c")))
    await store.publish_inventory(inventory("r2", 1))
    await store.publish(batch("r2", 2, stored("a"), stored("c")))
    assert await store.match(TENANT, chain("abcd")) == {"r1": 3, "r2": 1}
    assert await store.match(TENANT, list(chain("b"))) == {"r1": 1}
    assert await store.match(TENANT, chain("x")) == {}
    assert await store.match(TENANT, ()) == {}


async def test_events_apply_in_order_within_and_between_batches(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    await store.publish(batch("r1", 2, stored("bc"), removed("c"), stored("d")))
    assert await store.match(TENANT, chain("abc")) == {"r1": 2}
    await store.publish(batch("r1", 3, BlocksCleared(), stored("b")))
    assert await store.match(TENANT, chain("ab")) == {}
    assert await store.match(TENANT, chain("b")) == {"r1": 1}


async def test_a_batch_that_was_applied_before_changes_nothing(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1))
    await store.publish(batch("r1", 2, stored("a")))
    await store.publish(batch("r1", 3, removed("a")))
    await store.publish(batch("r1", 2, stored("a")))
    assert await store.match(TENANT, chain("a")) == {}
    assert await snapshot(store) == plain([inventory("r1", 3)])


async def test_a_batch_after_a_gap_is_refused_until_an_inventory_fills_it(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    with pytest.raises(SequenceGapError) as caught:
        await store.publish(batch("r1", 3, stored("b")))
    assert (caught.value.replica_id, caught.value.expected_seq, caught.value.seq) == ("r1", 2, 3)
    assert await store.match(TENANT, chain("ab")) == {"r1": 1}
    await store.publish_inventory(inventory("r1", 4, stored("abc")))
    await store.publish(batch("r1", 5, stored("d")))
    assert await store.match(TENANT, chain("abcd")) == {"r1": 4}


async def test_a_batch_of_a_replica_that_never_published_an_inventory_is_refused(store: IndexStore) -> None:
    with pytest.raises(UnknownReplicaError):
        await store.publish(batch("r1", 1, stored("a")))
    await store.publish_inventory(inventory("r1", 1))
    with pytest.raises(UnknownReplicaError):
        await store.publish(batch("r1", 1, stored("a"), epoch=2))
    with pytest.raises(UnknownReplicaError):
        await store.heartbeat(heartbeat("r1", 1, epoch=2))
    assert await store.match(TENANT, chain("a")) == {}


async def test_a_newer_epoch_voids_what_was_said_before_and_refuses_its_late_words(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 8, stored("ab"), epoch=1))
    await store.publish_inventory(inventory("r1", 1, stored("b"), epoch=2))
    assert await store.match(TENANT, chain("ab")) == {}
    for late in (
        store.publish(batch("r1", 9, stored("a"), epoch=1)),
        store.publish_inventory(inventory("r1", 9, stored("a"), epoch=1)),
        store.heartbeat(heartbeat("r1", 1, epoch=1)),
    ):
        with pytest.raises(StaleEpochError) as caught:
            await late
        assert (caught.value.replica_id, caught.value.epoch, caught.value.current_epoch) == ("r1", 1, 2)
    assert await snapshot(store) == plain([inventory("r1", 1, stored("b"), epoch=2)])


async def test_an_inventory_replaces_what_is_known_and_an_older_one_does_not(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 3, stored("abc")))
    await store.publish_inventory(inventory("r1", 5, stored("bd")))
    await store.publish_inventory(inventory("r1", 4, stored("x")))
    assert await snapshot(store) == plain([inventory("r1", 5, stored("bd"))])


async def test_a_replica_signs_off_for_itself_and_for_no_later_epoch(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a"), epoch=2))
    await store.publish_inventory(inventory("r2", 1, stored("a")))
    await store.deregister("nobody", 1)
    await store.deregister("r1", 1)
    assert await store.match(TENANT, chain("a")) == {"r1": 1, "r2": 1}
    await store.deregister("r1", 2)
    await store.deregister("r1", 2)
    assert await store.match(TENANT, chain("a")) == {"r2": 1}
    with pytest.raises(UnknownReplicaError):
        await store.heartbeat(heartbeat("r1", 1, epoch=2))
    await store.publish_inventory(inventory("r1", 1, stored("a"), epoch=3))
    assert await store.match(TENANT, chain("a")) == {"r1": 1, "r2": 1}


async def test_a_follower_reads_what_happened_after_its_cursor_in_order(store: IndexStore) -> None:
    cursor = await head(store)
    said = (
        inventory("r1", 1, stored("a")),
        batch("r1", 2, stored("b"), removed("a"), BlocksCleared()),
        inventory("r2", 1),
    )
    await store.publish_inventory(said[0])
    await store.publish(said[1])
    await store.publish_inventory(said[2])
    await store.deregister("r1", 1)
    news = await store.read(cursor, PATIENCE_S)
    assert news.items == (*said, Departure("r1", 1))
    assert not news.is_snapshot
    assert (await store.read(news.cursor, 0.0)).items == ()


async def test_a_cursor_in_the_middle_gives_only_what_follows_it(store: IndexStore) -> None:
    cursors = [await head(store)]
    said = [inventory("r1", 1), batch("r1", 2, stored("a")), batch("r1", 3, stored("b"))]
    await store.publish_inventory(said[0])
    cursors.append(await head(store))
    await store.publish(said[1])
    await store.publish(said[2])
    assert (await store.read(cursors[0], 0.0)).items == tuple(said)
    assert (await store.read(cursors[1], 0.0)).items == tuple(said[1:])


async def test_a_heartbeat_is_news_and_a_refused_batch_is_not(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("ab")))
    cursor = await head(store)
    said = heartbeat("r1", 1, "ab")
    await store.heartbeat(said)
    with pytest.raises(SequenceGapError):
        await store.publish(batch("r1", 9, stored("a")))
    assert (await store.read(cursor, 0.0)).items == (said,)


async def test_waiting_followers_are_all_woken_by_the_next_news(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1))
    cursor = await head(store)
    readers = [asyncio.create_task(store.read(cursor, PATIENCE_S)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(reader.done() for reader in readers)
    said = batch("r1", 2, stored("a"))
    await store.publish(said)
    news = await asyncio.gather(*readers)
    assert {item.items for item in news} == {(said,)}
    # And woken again, by what comes after.
    reader = asyncio.create_task(store.read(news[0].cursor, PATIENCE_S))
    await asyncio.sleep(0)
    await store.deregister("r1", 1)
    assert (await reader).items == (Departure("r1", 1),)


async def test_a_follower_that_gave_up_waiting_harms_no_other(store: IndexStore) -> None:
    cursor = await head(store)
    gone, patient = (asyncio.create_task(store.read(cursor, PATIENCE_S)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    await store.publish_inventory(inventory("r1", 1))
    assert (await patient).items == (inventory("r1", 1),)


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 0.01])
async def test_a_read_without_news_ends_after_its_wait_at_the_same_place(store: IndexStore, timeout_s: float) -> None:
    await store.publish_inventory(inventory("r1", 1))
    cursor = await head(store)
    assert await store.read(cursor, timeout_s) == News(cursor, (), is_snapshot=False)


@pytest.mark.parametrize("away", [-(2**70), -1, 1, 2**70])
async def test_a_cursor_outside_of_the_log_gets_a_snapshot_without_waiting(store: IndexStore, away: int) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    cursor = await head(store)
    # Behind the oldest of the log, or ahead of its newest.
    version = cursor.version + away if away > 0 else cursor.version - LOG_BATCHES_MAX + away
    news = await store.read(Cursor(cursor.life, version), PATIENCE_S)
    assert (news.cursor, plain(news.items), news.is_snapshot) == (
        cursor,
        plain([inventory("r1", 1, stored("a"))]),
        True,
    )


async def test_a_cursor_of_another_life_gets_a_snapshot_without_waiting(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    cursor = await head(store)
    news = await store.read(Cursor("another life", cursor.version), PATIENCE_S)
    assert (news.cursor, plain(news.items), news.is_snapshot) == (
        cursor,
        plain([inventory("r1", 1, stored("a"))]),
        True,
    )


@pytest.mark.parametrize("num_behind", [LOG_BATCHES_MAX, LOG_BATCHES_MAX + 1])
async def test_a_follower_further_behind_than_the_log_goes_gets_a_snapshot(store: IndexStore, num_behind: int) -> None:
    await store.publish_inventory(inventory("r1", 1))
    cursor = await head(store)
    said = [batch("r1", 2 + number, stored([f"block {number}"])) for number in range(num_behind)]
    for item in said:
        await store.publish(item)
    news = await store.read(cursor, PATIENCE_S)
    if num_behind <= LOG_BATCHES_MAX:
        assert (news.items, news.is_snapshot) == (tuple(said), False)
    else:
        everything = stored([f"block {number}" for number in range(num_behind)])
        assert (plain(news.items), news.is_snapshot) == (plain([inventory("r1", 1 + num_behind, everything)]), True)
    assert news.cursor == await head(store)


async def test_a_snapshot_holds_every_replica_by_tenant(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("ab"), stored("c", OTHER_TENANT)))
    await store.publish(batch("r1", 2, stored("d", OTHER_TENANT), removed("a")))
    await store.publish_inventory(inventory("r2", 7, stored("x")))
    assert await snapshot(store) == plain(
        [inventory("r1", 2, stored("b"), stored("cd", OTHER_TENANT)), inventory("r2", 7, stored("x"))]
    )


async def test_nothing_of_one_tenant_is_found_under_another(store: IndexStore) -> None:
    # Not even where the hashes are the same, which they never are: each tenant's chains have a root of their own.
    await store.publish_inventory(inventory("r1", 1, stored("ab"), stored("a", OTHER_TENANT)))
    assert await store.match(TENANT, chain("ab")) == {"r1": 2}
    assert await store.match(OTHER_TENANT, chain("ab")) == {"r1": 1}
    await store.publish(batch("r1", 2, removed("a")))
    assert await store.match(TENANT, chain("ab")) == {}
    assert await store.match(OTHER_TENANT, chain("ab")) == {"r1": 1}
    assert await store.match(b"u" * 16, chain("ab")) == {}


async def test_a_clear_is_of_every_tenant_and_of_one_replica(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("ab"), stored("c", OTHER_TENANT)))
    await store.publish_inventory(inventory("r2", 1, stored("ab")))
    await store.publish(batch("r1", 2, stored("x"), BlocksCleared(), stored("a")))
    assert await store.match(TENANT, chain("ab")) == {"r1": 1, "r2": 2}
    assert await store.match(TENANT, chain("x")) == {}
    assert await store.match(OTHER_TENANT, chain("c")) == {}
    await store.heartbeat(heartbeat("r1", 2, "a"))
    await store.publish(batch("r1", 3, stored("b")))
    assert await store.match(TENANT, chain("ab")) == {"r1": 2, "r2": 2}


async def test_a_store_that_holds_something_else_than_the_replica_says_so_until_an_inventory(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("ab")))
    await store.publish(batch("r1", 2, stored("c", OTHER_TENANT), removed("a")))
    await store.heartbeat(heartbeat("r1", 2, "bc"))
    for held in ("b", "bcd", "bd"):
        with pytest.raises(DriftError) as caught:
            await store.heartbeat(heartbeat("r1", 2, held))
        assert (caught.value.replica_id, caught.value.num_blocks_held, caught.value.num_blocks_stored) == (
            "r1",
            len(held),
            2,
        )
    await store.publish_inventory(inventory("r1", 3, stored("bd")))
    await store.heartbeat(heartbeat("r1", 3, "bd"))


async def test_a_heartbeat_after_another_batch_than_the_stores_is_a_gap(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    for seq in (0, 2):
        with pytest.raises(SequenceGapError):
            await store.heartbeat(heartbeat("r1", seq, "a"))
    await store.heartbeat(heartbeat("r1", 1, "a"))


async def test_a_purge_takes_one_tenant_and_every_replica_hears_of_it_until_it_says_so(store: IndexStore) -> None:
    for name in ("r1", "r2"):
        await store.publish_inventory(inventory(name, 1, stored("ab"), stored("c", OTHER_TENANT)))
    before = await store.heartbeat(heartbeat("r1", 1, "abc"))
    assert before.purged == ()
    cursor = await head(store)
    assert await store.purge(TENANT) == 2
    assert (await store.read(cursor, PATIENCE_S)).items == (TenantPurge(TENANT),)
    assert await store.match(TENANT, chain("ab")) == {}
    assert await store.match(OTHER_TENANT, chain("c")) == {"r1": 1, "r2": 1}
    cursor = await head(store)
    # It still holds what was purged, and is no drift, nor anybody's news, until it has heard of it.
    told = await store.heartbeat(heartbeat("r1", 1, "abc", num_purges_seen=before.num_purges))
    assert told.purged == (TENANT,)
    assert (await store.read(cursor, 0.0)).items == ()
    await store.publish(batch("r1", 2, removed("ab")))
    after = await store.heartbeat(heartbeat("r1", 2, "c", num_purges_seen=told.num_purges))
    assert after == Notices(told.num_purges)
    assert await store.purge(TENANT) == 0


async def test_a_process_that_is_new_hears_of_no_old_purge(store: IndexStore) -> None:
    await store.purge(TENANT)
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    fresh = await store.heartbeat(heartbeat("r1", 1, "a"))
    assert fresh.purged == ()
    # Nor one that remembers more purges than there were: this store lost its data.
    seen = await store.heartbeat(heartbeat("r1", 1, "a", num_purges_seen=fresh.num_purges + 7))
    assert seen == Notices(fresh.num_purges)


async def test_replicas_hear_under_which_identities_gateways_hash(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1))
    other = dataclasses.replace(IDENTITY, chat_template="sha256:89ab", adapter="")
    for identity in (IDENTITY, other, IDENTITY):
        await store.announce(identity)
    notices = await store.heartbeat(heartbeat("r1", 1))
    assert len(notices.identities) == 2
    assert set(notices.identities) == {IDENTITY, other}


async def test_the_stats_count_by_replica_and_by_tenant(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 4, stored("ab"), stored("c", OTHER_TENANT)))
    await store.publish_inventory(inventory("r2", 1, stored("bd")))
    await store.publish(batch("r2", 2, removed("d")))
    stats = await store.stats()
    by_replica = {item.registration.replica_id: item for item in stats.replicas}
    assert {name: (item.num_blocks, item.seq) for name, item in by_replica.items()} == {"r1": (3, 4), "r2": (1, 2)}
    assert by_replica["r1"].registration == registration("r1")
    assert all(0.0 < item.lease_left_s <= SETTINGS.lease_s for item in stats.replicas)
    assert {item.tenant: (item.num_blocks, item.num_copies) for item in stats.tenants if item.num_copies} == {
        TENANT: (2, 3),
        OTHER_TENANT: (1, 1),
    }
    assert stats.version == (await head(store)).version
    assert stats.description == await store.describe() != ""
