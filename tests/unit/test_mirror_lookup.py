"""What a mirror does where it does not know everything: it asks the store, but never waits long, nor in vain twice."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from cache_index.blocks import BlockHash
from cache_index.embedded import EmbeddedStore
from cache_index.errors import StoreUnavailableError
from cache_index.mirror import IndexMirror, Lookup
from cache_index.settings import IndexSettings
from cache_index.store import Cursor, News
from tests.index_examples import TENANT, batch, chain, inventory, removed, stored

SETTINGS = IndexSettings(lease_s=3_600.0, mirror_blocks_max=4, lookup_timeout_s=0.05)


class WatchedStore(EmbeddedStore):
    """A store that counts lookups, and fails or delays them where a test says so."""

    def __init__(self) -> None:
        super().__init__(SETTINGS)
        self.num_matches = 0
        self.error: Exception | None = None
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def match(self, tenant: bytes, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        self.num_matches += 1
        if self.error is not None:
            raise self.error
        found = await super().match(tenant, block_hashes)
        self.asked.set()
        await self.may_answer.wait()
        return found

    async def read(self, cursor: Cursor | None, timeout_s: float) -> News:
        if self.error is not None:
            raise self.error
        return await super().read(cursor, timeout_s)


@pytest.fixture
async def store() -> WatchedStore:
    """A store of two replicas, of which a mirror with room for four blocks can't keep everything."""
    store = WatchedStore()
    await store.publish_inventory(inventory("r1", 1, stored("abcdef")))
    await store.publish_inventory(inventory("r2", 1, stored("a")))
    return store


@pytest.fixture
async def mirror(store: WatchedStore) -> IndexMirror:
    mirror = IndexMirror(store, SETTINGS)
    await mirror.catch_up(0.0)
    assert mirror.num_evicted_blocks == 3
    assert not mirror.is_complete
    return mirror


async def test_what_was_evicted_is_asked_of_the_store_and_then_known(store: WatchedStore, mirror: IndexMirror) -> None:
    assert mirror.match(TENANT, chain("bc")) == {}
    assert await mirror.lookup(TENANT, chain("bc")) == Lookup({"r1": 2}, None)
    assert mirror.match(TENANT, chain("bc")) == {"r1": 2}
    assert await mirror.lookup(TENANT, chain("bc")) == Lookup({"r1": 2}, None)
    assert store.num_matches == 1
    assert (mirror.num_lookups, mirror.num_read_throughs, mirror.num_blind_lookups) == (2, 1, 0)
    mirror._index.check_invariants()


async def test_a_complete_mirror_asks_nobody(store: WatchedStore) -> None:
    mirror = IndexMirror(store, SETTINGS.model_copy(update={"mirror_blocks_max": 6}))
    await mirror.catch_up(0.0)
    assert mirror.is_complete
    assert await mirror.lookup(TENANT, chain("abx")) == Lookup({"r1": 2, "r2": 1}, None)
    assert await mirror.lookup(TENANT, ()) == Lookup({}, None)
    assert (store.num_matches, mirror.num_lookups, mirror.num_read_throughs) == (0, 2, 0)


async def test_a_mirror_is_complete_again_after_the_inventory_of_whoever_it_knew_in_part(
    store: WatchedStore, mirror: IndexMirror
) -> None:
    await store.publish_inventory(inventory("r1", 2, stored("ab")))
    await mirror.catch_up(0.0)
    assert mirror.is_complete
    assert await mirror.lookup(TENANT, chain("abx")) == Lookup({"r1": 2, "r2": 1}, None)
    assert store.num_matches == 0


async def test_a_fresh_mirror_asks_the_store_and_learns_nothing_of_replicas_it_does_not_know(
    store: WatchedStore,
) -> None:
    mirror = IndexMirror(store, SETTINGS)
    assert await mirror.lookup(TENANT, chain("ab")) == Lookup({"r1": 2, "r2": 1}, None)
    assert mirror.match(TENANT, chain("ab")) == {}
    assert mirror.registrations == {}


async def test_a_lookup_of_a_fresh_mirror_without_a_store_is_blind(store: WatchedStore) -> None:
    mirror = IndexMirror(store, SETTINGS)
    store.error = StoreUnavailableError("gone")
    with pytest.raises(StoreUnavailableError):
        await mirror.catch_up(0.0)
    assert await mirror.lookup(TENANT, chain("ab")) == Lookup({}, "no index yet")
    assert (store.num_matches, mirror.num_blind_lookups) == (0, 1)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(StoreUnavailableError("gone"), "the index store is away"), (RuntimeError("a fault"), "the lookup failed")],
)
async def test_after_a_failed_lookup_none_is_made_until_the_follower_succeeds(
    store: WatchedStore, mirror: IndexMirror, error: Exception, reason: str
) -> None:
    store.error = error
    assert mirror.match(TENANT, chain("e")) == {"r1": 1}
    assert await mirror.lookup(TENANT, chain("ex")) == Lookup({"r1": 1}, reason)
    assert mirror.degraded_reason is not None
    for _ in range(3):
        assert await mirror.lookup(TENANT, chain("ex")) == Lookup({"r1": 1}, "the index store is away")
    # What is all here needs no store.
    assert await mirror.lookup(TENANT, chain("e")) == Lookup({"r1": 1}, None)
    assert (store.num_matches, mirror.num_read_throughs, mirror.num_blind_lookups) == (1, 1, 4)
    store.error = None
    await mirror.catch_up(0.0)
    assert mirror.degraded_reason is None
    assert await mirror.lookup(TENANT, chain("ex")) == Lookup({"r1": 1}, None)
    assert store.num_matches == 2


async def test_a_lookup_that_takes_too_long_is_answered_with_what_is_known(
    store: WatchedStore, mirror: IndexMirror
) -> None:
    store.may_answer.clear()
    assert await mirror.lookup(TENANT, chain("ebc")) == Lookup({"r1": 1}, "the lookup timed out")
    assert mirror.degraded_reason == "a lookup took more than 0.05 s"
    assert await mirror.lookup(TENANT, chain("ebc")) == Lookup({"r1": 1}, "the index store is away")
    assert store.num_matches == 1


async def test_an_answer_that_was_overtaken_by_news_is_not_learnt(store: WatchedStore) -> None:
    mirror = IndexMirror(store, SETTINGS.model_copy(update={"lookup_timeout_s": 30.0}))
    await mirror.catch_up(0.0)
    store.may_answer.clear()
    lookup = asyncio.create_task(mirror.lookup(TENANT, chain("bc")))
    await store.asked.wait()
    await store.publish(batch("r1", 2, removed("c")))
    await mirror.catch_up(0.0)
    store.may_answer.set()
    assert await lookup == Lookup({"r1": 2}, None)
    assert mirror.match(TENANT, chain("c")) == {}
    # The next one is no older than what was applied.
    assert await mirror.lookup(TENANT, chain("bc")) == Lookup({"r1": 1}, None)
    assert mirror.match(TENANT, chain("b")) == {"r1": 1}


async def test_who_gives_up_a_lookup_cancels_it(store: WatchedStore, mirror: IndexMirror) -> None:
    store.may_answer.clear()
    lookup = asyncio.create_task(mirror.lookup(TENANT, chain("bc")))
    await store.asked.wait()
    lookup.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lookup
    assert mirror.degraded_reason is None


class LearnsWhateverItHears(IndexMirror):
    """A mirror without the guard against answers that news overtook."""

    @property
    def _num_applied(self) -> int:
        return 0

    @_num_applied.setter
    def _num_applied(self, value: int) -> None:
        pass


async def test_without_the_guard_an_overtaken_answer_would_bring_back_what_news_removed(store: WatchedStore) -> None:
    mirror = LearnsWhateverItHears(store, SETTINGS.model_copy(update={"lookup_timeout_s": 30.0}))
    await mirror.catch_up(0.0)
    store.may_answer.clear()
    lookup = asyncio.create_task(mirror.lookup(TENANT, chain("bc")))
    await store.asked.wait()
    await store.publish(batch("r1", 2, removed("c")))
    await mirror.catch_up(0.0)
    store.may_answer.set()
    await lookup
    assert mirror.match(TENANT, chain("c")) == {"r1": 1}
