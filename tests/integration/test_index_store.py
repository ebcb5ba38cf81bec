"""The contract of an index store: one suite for every store. The actor's runs on a real Ray cluster of this machine."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import ray

from cache_index.actor_store import ActorStore
from cache_index.embedded import EmbeddedStore
from cache_index.errors import SequenceGapError, StaleEpochError, StoreUnavailableError, UnknownReplicaError
from cache_index.events import BlocksCleared
from cache_index.settings import IndexSettings
from cache_index.store import Cursor, Departure, IndexStore, News
from tests.index_examples import OTHER_SCOPE, batch, chain, inventory, removed, stored

LOG_BATCHES_MAX = 4
# Leases that outlive any test; those that end are tested with a clock of their own, in tests/unit.
SETTINGS = IndexSettings(namespace="contract", lease_s=3_600.0, log_batches_max=LOG_BATCHES_MAX)
# Long enough for the busiest machine; nothing waits for it unless it fails.
PATIENCE_S = 30.0


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            namespace="tests",
        )
        # The actor ends with its last handle, and its name may be found for a moment longer: without this one a test
        # could meet the actor of the test before it, dying.
        keeper = ActorStore(SETTINGS)
        keeper._actor = keeper._find_or_make()
        yield
        ray.shutdown()


@pytest.fixture(params=["embedded", "actor"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[IndexStore]:
    """A store without replicas. The actor is one for all tests, for each is a process; so each test cleans up."""
    if request.param == "embedded":
        store: IndexStore = EmbeddedStore(SETTINGS)
    else:
        request.getfixturevalue("ray_cluster")
        store = ActorStore(SETTINGS)
    yield store
    for item in (await store.read(None, 0.0)).items:
        await store.deregister(item.replica_id, item.epoch)
    if isinstance(store, EmbeddedStore):
        store.check_invariants()


async def head(store: IndexStore) -> Cursor:
    return (await store.read(None, 0.0)).cursor


async def test_the_first_inventory_registers_a_replica_even_an_empty_one(store: IndexStore) -> None:
    with pytest.raises(UnknownReplicaError) as caught:
        await store.heartbeat("r1", 1)
    assert caught.value.replica_id == "r1"
    await store.publish_inventory(inventory("r1", 1))
    await store.heartbeat("r1", 1)
    assert await store.match(chain("a")) == {}
    assert (await store.read(None, 0.0)).items == (inventory("r1", 1),)


async def test_a_chain_matches_on_each_replica_up_to_its_first_missing_block(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("ab"), stored("c", OTHER_SCOPE)))
    await store.publish_inventory(inventory("r2", 1))
    await store.publish(batch("r2", 2, stored("a"), stored("c")))
    assert await store.match(chain("abcd")) == {"r1": 3, "r2": 1}
    assert await store.match(list(chain("b"))) == {"r1": 1}
    assert await store.match(chain("x")) == {}
    assert await store.match(()) == {}


async def test_events_apply_in_order_within_and_between_batches(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    await store.publish(batch("r1", 2, stored("bc"), removed("c"), stored("d")))
    assert await store.match(chain("abc")) == {"r1": 2}
    await store.publish(batch("r1", 3, BlocksCleared(), stored("b")))
    assert await store.match(chain("ab")) == {}
    assert await store.match(chain("b")) == {"r1": 1}


async def test_a_batch_that_was_applied_before_changes_nothing(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1))
    await store.publish(batch("r1", 2, stored("a")))
    await store.publish(batch("r1", 3, removed("a")))
    await store.publish(batch("r1", 2, stored("a")))
    assert await store.match(chain("a")) == {}
    assert (await store.read(None, 0.0)).items == (inventory("r1", 3),)


async def test_a_batch_after_a_gap_is_refused_until_an_inventory_fills_it(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    with pytest.raises(SequenceGapError) as caught:
        await store.publish(batch("r1", 3, stored("b")))
    assert (caught.value.replica_id, caught.value.expected_seq, caught.value.seq) == ("r1", 2, 3)
    assert await store.match(chain("ab")) == {"r1": 1}
    await store.publish_inventory(inventory("r1", 4, stored("abc")))
    await store.publish(batch("r1", 5, stored("d")))
    assert await store.match(chain("abcd")) == {"r1": 4}


async def test_a_batch_of_a_replica_that_never_published_an_inventory_is_refused(store: IndexStore) -> None:
    with pytest.raises(UnknownReplicaError):
        await store.publish(batch("r1", 1, stored("a")))
    await store.publish_inventory(inventory("r1", 1))
    with pytest.raises(UnknownReplicaError):
        await store.publish(batch("r1", 1, stored("a"), epoch=2))
    with pytest.raises(UnknownReplicaError):
        await store.heartbeat("r1", 2)
    assert await store.match(chain("a")) == {}


async def test_a_newer_epoch_voids_what_was_said_before_and_refuses_its_late_words(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 8, stored("ab"), epoch=1))
    await store.publish_inventory(inventory("r1", 1, stored("b"), epoch=2))
    assert await store.match(chain("ab")) == {}
    for late in (
        store.publish(batch("r1", 9, stored("a"), epoch=1)),
        store.publish_inventory(inventory("r1", 9, stored("a"), epoch=1)),
        store.heartbeat("r1", 1),
    ):
        with pytest.raises(StaleEpochError) as caught:
            await late
        assert (caught.value.replica_id, caught.value.epoch, caught.value.current_epoch) == ("r1", 1, 2)
    assert (await store.read(None, 0.0)).items == (inventory("r1", 1, stored("b"), epoch=2),)


async def test_an_inventory_replaces_what_is_known_and_an_older_one_does_not(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 3, stored("abc")))
    await store.publish_inventory(inventory("r1", 5, stored("bd")))
    await store.publish_inventory(inventory("r1", 4, stored("x")))
    assert (await store.read(None, 0.0)).items == (inventory("r1", 5, stored("bd")),)


async def test_a_replica_signs_off_for_itself_and_for_no_later_epoch(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a"), epoch=2))
    await store.publish_inventory(inventory("r2", 1, stored("a")))
    await store.deregister("nobody", 1)
    await store.deregister("r1", 1)
    assert await store.match(chain("a")) == {"r1": 1, "r2": 1}
    await store.deregister("r1", 2)
    await store.deregister("r1", 2)
    assert await store.match(chain("a")) == {"r2": 1}
    with pytest.raises(UnknownReplicaError):
        await store.heartbeat("r1", 2)
    await store.publish_inventory(inventory("r1", 1, stored("a"), epoch=3))
    assert await store.match(chain("a")) == {"r1": 1, "r2": 1}


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


async def test_a_heartbeat_and_a_refused_batch_are_no_news(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1))
    cursor = await head(store)
    await store.heartbeat("r1", 1)
    with pytest.raises(SequenceGapError):
        await store.publish(batch("r1", 9, stored("a")))
    assert await store.read(cursor, 0.0) == News(cursor, (), is_snapshot=False)


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
    assert news == News(cursor, (inventory("r1", 1, stored("a")),), is_snapshot=True)


async def test_a_cursor_of_another_life_gets_a_snapshot_without_waiting(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    cursor = await head(store)
    news = await store.read(Cursor("another life", cursor.version), PATIENCE_S)
    assert news == News(cursor, (inventory("r1", 1, stored("a")),), is_snapshot=True)


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
        assert (news.items, news.is_snapshot) == ((inventory("r1", 1 + num_behind, everything),), True)
    assert news.cursor == await head(store)


async def test_a_snapshot_holds_every_replica_with_its_scopes(store: IndexStore) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("ab"), stored("c", OTHER_SCOPE)))
    await store.publish(batch("r1", 2, stored("d", OTHER_SCOPE), removed("a")))
    await store.publish_inventory(inventory("r2", 7, stored("x")))
    news = await store.read(None, PATIENCE_S)
    assert news.is_snapshot
    assert sorted(news.items, key=lambda item: item.replica_id) == [
        inventory("r1", 2, stored("b"), stored("cd", OTHER_SCOPE)),
        inventory("r2", 7, stored("x")),
    ]


_namespaces = itertools.count()


@pytest.fixture
def own_settings(ray_cluster: None) -> IndexSettings:
    """Settings of a store that no other test uses."""
    return SETTINGS.model_copy(update={"namespace": f"own-{next(_namespaces)}"})


async def test_whoever_names_the_same_namespace_shares_one_actor(own_settings: IndexSettings) -> None:
    one, other, stranger = ActorStore(own_settings), ActorStore(own_settings), ActorStore(SETTINGS)
    # At once, so that both try to make it.
    await asyncio.gather(one.publish_inventory(inventory("r1", 1, stored("a"))), other.match(()))
    assert await other.match(chain("a")) == {"r1": 1}
    assert await stranger.match(chain("a")) == {}


async def retried(call: Callable[[], Awaitable[None]]) -> None:
    """Call until the store is there: an actor's name may outlive it for a moment, of which Ray tells nobody."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await call()
            except StoreUnavailableError:
                await asyncio.sleep(0.02)


async def test_a_lost_actor_is_made_anew_with_a_new_life_and_nothing_in_it(own_settings: IndexSettings) -> None:
    store, follower = ActorStore(own_settings), ActorStore(own_settings)
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    cursor = await head(follower)
    waiting = asyncio.create_task(follower.read(cursor, PATIENCE_S))
    await asyncio.sleep(0)
    ray.kill(ray.get_actor("warmroute-index", namespace=own_settings.namespace))
    with pytest.raises(StoreUnavailableError):
        await waiting
    with pytest.raises(StoreUnavailableError):
        await store.heartbeat("r1", 1)
    with pytest.raises(UnknownReplicaError):
        await retried(lambda: store.heartbeat("r1", 1))
    news = await follower.read(cursor, PATIENCE_S)
    assert (news.items, news.is_snapshot) == ((), True)
    assert news.cursor.life != cursor.life
    await store.publish_inventory(inventory("r1", 2, stored("a")))
    assert await follower.match(chain("a")) == {"r1": 1}
