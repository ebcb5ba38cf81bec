"""What only the embedded store has: leases by a clock that the test moves, and a log whose bound is reached in a wait.

The contract that it shares with other stores is in tests/integration/test_index_store.py.
"""

import asyncio

import pytest

from cache_index.embedded import EmbeddedStore
from cache_index.errors import UnknownReplicaError
from cache_index.settings import IndexSettings
from cache_index.store import Departure
from tests.index_examples import batch, chain, inventory, stored

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
    assert await store.match(chain("a")) == {"r1": 1}
    clock.now_s += 0.001
    assert await store.match(chain("a")) == {}
    store.check_invariants()


@pytest.mark.parametrize("word", ["heartbeat", "batch", "a batch again", "inventory"])
async def test_every_word_of_a_replica_renews_its_lease(store: EmbeddedStore, clock: Clock, word: str) -> None:
    await store.publish_inventory(inventory("r1", 1))
    await store.publish(batch("r1", 2, stored("a")))
    for round_number in range(3):
        clock.now_s += 9.0
        match word:
            case "heartbeat":
                await store.heartbeat("r1", 1)
            case "batch":
                await store.publish(batch("r1", 3 + round_number))
            case "a batch again":
                await store.publish(batch("r1", 2, stored("a")))
            case "inventory":
                await store.publish_inventory(inventory("r1", 3 + round_number, stored("a")))
    assert await store.match(chain("a")) == {"r1": 1}
    clock.now_s += 10.0
    assert await store.match(chain("a")) == {}


async def test_reading_and_matching_renew_no_lease(store: EmbeddedStore, clock: Clock) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    clock.now_s += 9.0
    await store.read(None, 0.0)
    await store.match(chain("a"))
    clock.now_s += 1.0
    assert (await store.read(None, 0.0)).items == ()


@pytest.mark.parametrize("word", ["heartbeat", "batch"])
async def test_a_replica_whose_lease_ended_has_to_publish_its_inventory(
    store: EmbeddedStore, clock: Clock, word: str
) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    clock.now_s += 10.0
    with pytest.raises(UnknownReplicaError):
        await (store.heartbeat("r1", 1) if word == "heartbeat" else store.publish(batch("r1", 2, stored("b"))))
    await store.publish_inventory(inventory("r1", 3, stored("ab")))
    assert await store.match(chain("ab")) == {"r1": 2}
    store.check_invariants()


async def test_only_the_lease_that_ended_takes_its_replica_away(store: EmbeddedStore, clock: Clock) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    clock.now_s += 5.0
    await store.publish_inventory(inventory("r2", 1, stored("a"), epoch=7))
    cursor = (await store.read(None, 0.0)).cursor
    clock.now_s += 5.0
    await store.heartbeat("r2", 7)
    assert await store.match(chain("a")) == {"r2": 1}
    assert (await store.read(cursor, 0.0)).items == (Departure("r1", 1),)


async def test_a_follower_learns_of_an_ended_lease_by_its_own_waiting(store: EmbeddedStore, clock: Clock) -> None:
    await store.publish_inventory(inventory("r1", 1))
    cursor = (await store.read(None, 0.0)).cursor
    reader = asyncio.create_task(store.read(cursor, 0.01))
    await asyncio.sleep(0)
    # Nobody else speaks to the store, so only the end of the wait can notice.
    clock.now_s += 10.0
    assert (await reader).items == (Departure("r1", 1),)


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
    assert len(store._log) == 4


async def test_two_stores_have_two_lives() -> None:
    one, other = (EmbeddedStore(IndexSettings()) for _ in range(2))
    await other.publish_inventory(inventory("r1", 1))
    await one.publish_inventory(inventory("r1", 1))
    cursor = (await one.read(None, 0.0)).cursor
    news = await other.read(cursor, PATIENCE_S)
    assert news.is_snapshot
    assert news.cursor.life != cursor.life


async def test_a_lease_of_nobody_fails_the_invariants(store: EmbeddedStore) -> None:
    await store.publish_inventory(inventory("r1", 1))
    store.check_invariants()
    store._lease_ends["ghost"] = 0.0
    with pytest.raises(AssertionError):
        store.check_invariants()
