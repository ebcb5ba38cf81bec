"""The store compared with what live replicas say: agreement, drift, silence, and who comes and goes meanwhile."""

import asyncio

import pytest

from cache_index.checking import ReplicaCheck, check
from cache_index.embedded import EmbeddedStore
from cache_index.errors import StoreUnavailableError
from cache_index.settings import IndexSettings
from cache_index.store import Cursor, News
from tests.index_examples import batch, heartbeat, inventory, stored

PATIENT = IndexSettings(lease_s=3_600.0, heartbeat_interval_s=600.0)
HASTY = IndexSettings(lease_s=3_600.0, heartbeat_interval_s=0.02)


class WatchedStore(EmbeddedStore):
    """A store that says when somebody read it."""

    def __init__(self) -> None:
        super().__init__(PATIENT)
        self.was_read = asyncio.Event()

    async def read(self, cursor: Cursor | None, timeout_s: float) -> News:
        self.was_read.set()
        return await super().read(cursor, timeout_s)


@pytest.fixture
async def store() -> WatchedStore:
    store = WatchedStore()
    await store.publish_inventory(inventory("r2", 1, stored("a")))
    await store.publish_inventory(inventory("r1", 1, stored("ab")))
    return store


async def test_a_check_ends_as_soon_as_every_replica_was_heard(store: WatchedStore) -> None:
    checking = asyncio.create_task(check(store, PATIENT))
    await store.was_read.wait()
    await store.heartbeat(heartbeat("r1", 1, "ab"))
    await store.publish(batch("r2", 2, stored("b")))
    await store.heartbeat(heartbeat("r2", 2, "ab"))
    async with asyncio.timeout(30.0):
        assert await checking == (ReplicaCheck("r1", 2, 2, True), ReplicaCheck("r2", 2, 2, True))


async def test_an_empty_store_is_checked_at_once() -> None:
    assert await check(EmbeddedStore(PATIENT), PATIENT) == ()


async def test_a_replica_that_is_silent_is_neither_right_nor_wrong(store: WatchedStore) -> None:
    checking = asyncio.create_task(check(store, HASTY))
    await store.was_read.wait()
    await store.heartbeat(heartbeat("r1", 1, "ab"))
    assert await checking == (ReplicaCheck("r1", 2, 2, True), ReplicaCheck("r2", 1, None, None))


async def test_drift_is_found_and_how_much_each_holds(store: WatchedStore) -> None:
    checking = asyncio.create_task(check(store, PATIENT))
    await store.was_read.wait()
    await store.heartbeat(heartbeat("r2", 1, "a"))
    # A store that lost blocks, and does not know it, passes the heartbeat on.
    store._record(heartbeat("r1", 1, "abc"))
    async with asyncio.timeout(30.0):
        assert await checking == (ReplicaCheck("r1", 2, 3, False), ReplicaCheck("r2", 1, 1, True))


async def test_who_leaves_meanwhile_is_left_out_and_who_comes_is_included(store: WatchedStore) -> None:
    checking = asyncio.create_task(check(store, PATIENT))
    await store.was_read.wait()
    await store.heartbeat(heartbeat("r1", 1, "ab"))
    await store.publish_inventory(inventory("r3", 1, stored("c")))
    await store.deregister("r2", 1)
    await store.heartbeat(heartbeat("r3", 1, "c"))
    async with asyncio.timeout(30.0):
        assert await checking == (ReplicaCheck("r1", 2, 2, True), ReplicaCheck("r3", 1, 1, True))


async def test_a_store_that_can_not_be_reached_is_the_callers_to_know() -> None:
    class GoneStore(EmbeddedStore):
        async def read(self, cursor: Cursor | None, timeout_s: float) -> News:
            raise StoreUnavailableError("gone")

    with pytest.raises(StoreUnavailableError):
        await check(GoneStore(PATIENT), PATIENT)
