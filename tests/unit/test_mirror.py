"""The mirror follows a real store through whatever happens to either, and ends up knowing what the store knows."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cache_index import log, memory
from cache_index.blocks import BlockHash
from cache_index.embedded import EmbeddedStore
from cache_index.errors import CacheIndexError, StoreUnavailableError
from cache_index.events import BlocksCleared, BlocksStored, Digest, Event, Heartbeat
from cache_index.mirror import IndexMirror
from cache_index.settings import IndexSettings
from cache_index.store import Cursor, Departure, News, TenantPurge
from tests.index_examples import TENANT, batch, chain, heartbeat, inventory, registration, removed, stored

PATIENCE_S = 30.0
NAMES = "abcdef"
SETTINGS = IndexSettings(lease_s=3_600.0, log_batches_max=4)


class FaultyLine:
    """A store behind a line that can be cut: the real store, or StoreUnavailableError while the line is down."""

    def __init__(self, store: EmbeddedStore) -> None:
        self.store = store
        self.is_down = False
        self.reads: list[Cursor | None] = []

    async def read(self, cursor: Cursor | None, timeout_s: float) -> News:
        self.reads.append(cursor)
        if self.is_down:
            raise StoreUnavailableError("the line is down")
        news = await self.store.read(cursor, timeout_s)
        if self.is_down:
            raise StoreUnavailableError("the line went down")
        return news

    async def match(self, tenant: bytes, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        if self.is_down:
            raise StoreUnavailableError("the line is down")
        return await self.store.match(tenant, block_hashes)

    async def publish(self, *args: Any) -> Any:
        raise AssertionError("a mirror only reads")

    publish_inventory = heartbeat = deregister = announce = purge = stats = close = publish


def knowledge(index: EmbeddedStore | IndexMirror) -> dict[str, dict[str, int]]:
    """What an index answers for every single block."""
    lookup = index._index if isinstance(index, EmbeddedStore) else index
    return {name: dict(lookup.match(TENANT, chain(name))) for name in NAMES}


async def until(condition: Callable[[], bool]) -> None:
    """Give the loop to the others until something is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  A mirror tells nobody that it has news, so there is no event.
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def following(mirror: IndexMirror) -> AsyncIterator[None]:
    task = asyncio.create_task(mirror.follow())
    yield
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.fixture
def store() -> EmbeddedStore:
    return EmbeddedStore(SETTINGS)


@pytest.fixture
def line(store: EmbeddedStore) -> FaultyLine:
    return FaultyLine(store)


@pytest.fixture
async def mirror(line: FaultyLine) -> AsyncIterator[IndexMirror]:
    """A mirror that follows."""
    mirror = IndexMirror(line, SETTINGS)
    async with following(mirror):
        yield mirror


@pytest.fixture
def pauses_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that somebody asked for; none of them takes any time."""
    pauses_s: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(delay_s: float) -> None:
        if delay_s:
            pauses_s.append(delay_s)
        await real_sleep(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return pauses_s


async def test_a_mirror_is_complete_once_it_has_a_snapshot(store: EmbeddedStore) -> None:
    mirror = IndexMirror(store, SETTINGS)
    assert not mirror.is_complete
    assert mirror.match(TENANT, chain("a")) == {}
    await mirror.apply(await store.read(None, 0.0))
    assert mirror.is_complete
    assert mirror.match(TENANT, chain("a")) == {}


async def test_a_mirror_begins_with_a_snapshot_and_goes_on_with_what_happens(
    store: EmbeddedStore, mirror: IndexMirror
) -> None:
    await store.publish_inventory(inventory("r1", 5, stored("ab")))
    await until(lambda: mirror.match(TENANT, chain("abc")) == {"r1": 2})
    assert mirror.is_complete
    await store.publish(batch("r1", 6, stored("c"), removed("a")))
    await store.publish_inventory(inventory("r2", 1, stored("a")))
    await until(lambda: set(mirror.registrations) == {"r1", "r2"})
    assert knowledge(mirror) == knowledge(store)
    assert mirror.num_blocks == 3
    assert (mirror.num_snapshots, mirror.num_gaps) == (1, 0)


async def test_a_departed_replica_leaves_the_mirror_at_once(store: EmbeddedStore, mirror: IndexMirror) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    await store.publish_inventory(inventory("r2", 1, stored("a")))
    await until(lambda: mirror.match(TENANT, chain("a")) == {"r1": 1, "r2": 1})
    await store.deregister("r1", 1)
    await until(lambda: mirror.match(TENANT, chain("a")) == {"r2": 1})
    assert mirror.num_snapshots == 1


async def test_a_replica_of_a_new_epoch_is_not_taken_for_its_earlier_life(
    store: EmbeddedStore, mirror: IndexMirror
) -> None:
    await store.publish_inventory(inventory("r1", 9, stored("ab"), epoch=1))
    await until(lambda: mirror.match(TENANT, chain("ab")) == {"r1": 2})
    await store.publish_inventory(inventory("r1", 1, stored("a"), epoch=2))
    await until(lambda: mirror.match(TENANT, chain("ab")) == {"r1": 1})
    await store.publish(batch("r1", 2, stored("b"), epoch=2))
    await until(lambda: mirror.match(TENANT, chain("ab")) == {"r1": 2})
    assert (mirror.num_snapshots, mirror.num_gaps) == (1, 0)


async def test_a_mirror_that_lags_behind_the_log_gets_a_snapshot(store: EmbeddedStore, mirror: IndexMirror) -> None:
    await store.publish_inventory(inventory("r1", 1))
    await store.publish_inventory(inventory("r2", 1, stored("f")))
    await until(lambda: set(mirror.registrations) == {"r1", "r2"})
    # Without giving the loop back: the mirror can't keep up. The departure is among what the log no longer has.
    await store.deregister("r2", 1)
    for number in range(5):
        await store.publish(batch("r1", 2 + number, stored(NAMES[number])))
    await until(lambda: mirror.match(TENANT, chain("abcde")) == {"r1": 5})
    assert set(mirror.registrations) == {"r1"}
    assert mirror.num_snapshots == 2


@pytest.mark.parametrize("said", [batch("r1", 4, stored("c")), batch("nobody", 1, stored("c"))])
async def test_after_a_gap_a_mirror_asks_for_a_snapshot(store: EmbeddedStore, said: Any) -> None:
    mirror = IndexMirror(store, SETTINGS)
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    news = await store.read(None, 0.0)
    await mirror.apply(news)
    await mirror.apply(News(news.cursor, (said, batch("r1", 2, stored("f"))), is_snapshot=False))
    assert mirror.num_gaps == 1
    # It goes on with what it knew, and takes nothing of what follows the gap.
    assert mirror.match(TENANT, chain("a")) == {"r1": 1}
    assert mirror.match(TENANT, chain("f")) == {}
    async with following(mirror):
        await until(lambda: mirror.num_snapshots == 2)
    assert knowledge(mirror) == knowledge(store)


async def test_a_late_word_of_an_earlier_epoch_is_void_and_no_gap(store: EmbeddedStore) -> None:
    mirror = IndexMirror(store, SETTINGS)
    await store.publish_inventory(inventory("r1", 1, stored("a"), epoch=3))
    news = await store.read(None, 0.0)
    await mirror.apply(news)
    late = (
        batch("r1", 9, stored("b"), epoch=2),
        inventory("r1", 9, stored("c"), epoch=2),
        Departure("r1", 2),
        batch("r1", 2, stored("d"), epoch=3),
    )
    await mirror.apply(News(news.cursor, late, is_snapshot=False))
    assert mirror.match(TENANT, chain("ad")) == {"r1": 2}
    assert mirror.match(TENANT, chain("b")) == mirror.match(TENANT, chain("c")) == {}
    assert mirror.num_gaps == 0


async def test_a_departure_voids_earlier_epochs_too(store: EmbeddedStore) -> None:
    mirror = IndexMirror(store, SETTINGS)
    await store.publish_inventory(inventory("r1", 1, stored("a"), epoch=3))
    news = await store.read(None, 0.0)
    await mirror.apply(news)
    await mirror.apply(News(news.cursor, (Departure("nobody", 9), Departure("r1", 4)), is_snapshot=False))
    assert mirror.registrations == {}


async def test_while_the_store_is_away_a_mirror_keeps_what_it_knows_and_asks_with_growing_bounded_pauses(
    store: EmbeddedStore, line: FaultyLine, mirror: IndexMirror, pauses_s: list[float]
) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    await until(lambda: mirror.match(TENANT, chain("a")) == {"r1": 1})
    line.is_down = True
    await store.publish(batch("r1", 2, stored("b")))
    await until(lambda: len(pauses_s) >= 7)
    assert pauses_s[:7] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert mirror.match(TENANT, chain("ab")) == {"r1": 1}
    assert mirror.is_complete
    assert mirror.degraded_reason == "the line is down"
    line.is_down = False
    await until(lambda: mirror.match(TENANT, chain("ab")) == {"r1": 2})
    assert mirror.degraded_reason is None
    # It went on from where it was, and the next trouble begins with a short pause again.
    assert mirror.num_snapshots == 1
    num_pauses = len(pauses_s)
    line.is_down = True
    await store.publish(batch("r1", 3, stored("c")))
    await until(lambda: len(pauses_s) > num_pauses)
    assert pauses_s[num_pauses] == 0.1


async def test_a_store_that_was_never_there_leaves_a_mirror_incomplete_until_it_comes(
    store: EmbeddedStore, line: FaultyLine, pauses_s: list[float]
) -> None:
    mirror = IndexMirror(line, SETTINGS)
    line.is_down = True
    async with following(mirror):
        await until(lambda: len(pauses_s) >= 3)
        assert not mirror.is_complete
        line.is_down = False
        await store.publish_inventory(inventory("r1", 1, stored("a")))
        await until(lambda: mirror.match(TENANT, chain("a")) == {"r1": 1})
    assert mirror.is_complete


async def test_a_store_that_lost_its_data_empties_the_mirror_until_replicas_publish_again(
    line: FaultyLine, mirror: IndexMirror, pauses_s: list[float]
) -> None:
    await line.store.publish_inventory(inventory("r1", 8, stored("ab")))
    await line.store.publish_inventory(inventory("r2", 1, stored("a")))
    await until(lambda: mirror.match(TENANT, chain("ab")) == {"r1": 2, "r2": 1})
    line.is_down = True
    await line.store.deregister("r2", 1)  # Wakes the mirror, which finds the line down.
    await until(lambda: len(pauses_s) >= 1)
    line.store = EmbeddedStore(SETTINGS)
    line.is_down = False
    await until(lambda: mirror.num_snapshots == 2)
    assert mirror.registrations == {}
    await line.store.publish_inventory(inventory("r1", 9, stored("b")))
    await until(lambda: set(mirror.registrations) == {"r1"})
    assert knowledge(mirror) == knowledge(line.store)


@pytest.mark.parametrize(
    "again", [inventory("r1", 2, stored("b")), inventory("r1", 9, stored("b"), epoch=1)], ids=["seq", "epoch"]
)
async def test_a_snapshot_counts_even_where_the_mirror_knew_something_newer(store: EmbeddedStore, again: Any) -> None:
    # A late inventory may be the first that a store hears in a new life, and no reader knows better than its store.
    mirror = IndexMirror(store, SETTINGS)
    await store.publish_inventory(inventory("r1", 5, stored("a"), epoch=2 if again.epoch == 1 else 1))
    await mirror.apply(await store.read(None, 0.0))
    reborn = EmbeddedStore(SETTINGS)
    await reborn.publish_inventory(again)
    await mirror.apply(await reborn.read(mirror._cursor, 0.0))
    assert knowledge(mirror) == knowledge(reborn)
    await reborn.publish(batch("r1", again.seq + 1, stored("c"), epoch=again.epoch))
    await mirror.apply(await reborn.read(mirror._cursor, 0.0))
    assert knowledge(mirror) == knowledge(reborn)
    assert mirror.num_gaps == 0


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_heartbeat_that_agrees_is_noted_and_nothing_else_happens(store: EmbeddedStore) -> None:
    mirror = IndexMirror(store, SETTINGS)
    await store.publish_inventory(inventory("r1", 1, stored("ab")))
    await mirror.catch_up(0.0)
    assert mirror.comparisons == {}
    await store.heartbeat(heartbeat("r1", 1, "ab"))
    await mirror.catch_up(0.0)
    comparison = mirror.comparisons["r1"]
    assert comparison.agrees
    assert comparison.said == comparison.known == Digest.of(chain("ab"))
    assert (mirror.num_drifts, mirror.num_snapshots) == (0, 1)
    # An inventory is said anew, and was compared with nothing.
    await store.publish_inventory(inventory("r1", 2, stored("ab")))
    await mirror.catch_up(0.0)
    assert mirror.comparisons == {}


@pytest.mark.parametrize("said", [heartbeat("r1", 1, "ac"), heartbeat("r1", 4, "ab")], ids=["blocks", "batch"])
async def test_a_drifted_mirror_reads_a_snapshot_at_most_once_in_an_interval(store: EmbeddedStore, said: Any) -> None:
    clock = Clock()
    mirror = IndexMirror(store, SETTINGS, clock)
    await store.publish_inventory(inventory("r1", 1, stored("ab")))
    await mirror.catch_up(0.0)
    for number, num_snapshots in enumerate([2, 2, 3]):
        await mirror.apply(News(store._cursor(), (said, TenantPurge(b"t")), is_snapshot=False))
        assert mirror.num_drifts == number + 1
        assert mirror.comparisons["r1"].said == said.digest
        await mirror.catch_up(0.0)
        assert mirror.num_snapshots == num_snapshots
        clock.now_s += 0.6 * SETTINGS.heartbeat_interval_s
    assert mirror.num_gaps == 0


async def test_what_drifted_is_right_again_after_the_snapshot(store: EmbeddedStore) -> None:
    mirror = IndexMirror(store, SETTINGS)
    await store.publish_inventory(inventory("r1", 1, stored("ab")))
    await mirror.catch_up(0.0)
    mirror._index.purge(TENANT)  # As if the mirror had misheard.
    await store.heartbeat(heartbeat("r1", 1, "ab"))
    await mirror.catch_up(0.0)
    assert mirror.match(TENANT, chain("ab")) == {}
    await mirror.catch_up(0.0)
    assert mirror.match(TENANT, chain("ab")) == {"r1": 2}
    assert (mirror.num_drifts, mirror.num_snapshots) == (1, 2)


async def test_a_late_heartbeat_is_not_compared_and_one_of_nobody_is_a_gap(store: EmbeddedStore) -> None:
    mirror = IndexMirror(store, SETTINGS)
    await store.publish_inventory(inventory("r1", 3, stored("ab"), epoch=2))
    await mirror.catch_up(0.0)
    late = (heartbeat("r1", 2, "x", epoch=2), heartbeat("r1", 3, "x", epoch=1))
    await mirror.apply(News(store._cursor(), late, is_snapshot=False))
    assert (mirror.num_drifts, mirror.num_gaps, mirror.comparisons) == (0, 0, {})
    await mirror.apply(News(store._cursor(), (heartbeat("r2", 1),), is_snapshot=False))
    assert (mirror.num_drifts, mirror.num_gaps) == (0, 1)


async def test_a_purged_tenant_leaves_the_mirror(store: EmbeddedStore, mirror: IndexMirror) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("ab"), stored("a", b"t" * 16)))
    await until(lambda: mirror.num_blocks == 3)
    await store.purge(TENANT)
    await until(lambda: mirror.num_blocks == 1)
    assert mirror.match(b"t" * 16, chain("a")) == {"r1": 1}
    assert mirror.registrations == {"r1": registration("r1")}


async def test_decisions_go_on_with_what_was_known_while_a_snapshot_is_applied(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "BLOCKS_PER_STEP", 10)
    mirror = IndexMirror(store, SETTINGS)
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    await mirror.catch_up(0.0)
    names = [f"block {number}" for number in range(1_000)]
    await store.publish_inventory(inventory("r1", 2, stored(names)))
    applying = asyncio.create_task(mirror.apply(await store.read(None, 0.0)))
    num_decisions = 0
    while not applying.done():
        assert mirror.match(TENANT, chain("a")) == {"r1": 1}
        assert mirror.match(TENANT, chain(names)) == {}
        num_decisions += 1
        await asyncio.sleep(0)
    assert num_decisions >= 100
    assert mirror.match(TENANT, chain(names)) == {"r1": 1_000}
    assert mirror.match(TENANT, chain("a")) == {}


async def test_who_stops_a_mirror_halfway_through_news_makes_it_begin_with_a_snapshot(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "BLOCKS_PER_STEP", 1)
    mirror = IndexMirror(store, SETTINGS)
    await store.publish_inventory(inventory("r1", 1, stored("abcdef")))
    applying = asyncio.create_task(mirror.catch_up(0.0))
    for _ in range(3):
        await asyncio.sleep(0)
    applying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await applying
    assert mirror.num_snapshots == 0
    await mirror.catch_up(0.0)
    assert knowledge(mirror) == knowledge(store)
    mirror._index.check_invariants()


async def test_a_mirror_says_how_far_behind_it_is_and_since_when_the_store_is_silent(
    line: FaultyLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "ITEMS_PER_READ_MAX", 1)
    clock = Clock()
    mirror = IndexMirror(line, SETTINGS, clock)
    await mirror.catch_up(0.0)
    for name in ("r1", "r2", "r3"):
        await line.store.publish_inventory(inventory(name, 1))
    clock.now_s = 5.0
    assert (mirror.lag_items, mirror.silence_s) == (0, 5.0)
    await mirror.catch_up(0.0)
    assert (mirror.lag_items, mirror.silence_s) == (2, 0.0)
    line.is_down = True
    clock.now_s = 12.0
    with pytest.raises(StoreUnavailableError):
        await mirror.catch_up(0.0)
    assert mirror.silence_s == 7.0
    assert mirror.degraded_reason == "the line is down"


block_names = st.lists(st.sampled_from(NAMES), max_size=4)
events = st.builds(stored, block_names) | st.builds(removed, block_names) | st.builds(BlocksCleared)
replica_ids = st.sampled_from(["r1", "r2", "r3"])


class FollowingMachine(RuleBasedStateMachine):
    """Replicas say anything to a store that ends leases and is born again; two mirrors read it whenever they like."""

    mirror_class: type[IndexMirror] = IndexMirror

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.now_s = 0.0
        self.store = self.new_store()
        self.mirrors = [self.mirror_class(self.store, SETTINGS) for _ in range(2)]
        self.last: dict[str, tuple[int, int]] = {}

    def new_store(self) -> EmbeddedStore:
        return EmbeddedStore(IndexSettings(lease_s=10.0, log_batches_max=4), clock=lambda: self.now_s)

    def teardown(self) -> None:
        self.runner.close()

    def tell(self, call: Coroutine[Any, Any, object]) -> None:
        with contextlib.suppress(CacheIndexError):
            self.runner.run(call)

    @rule(replica_id=replica_ids, said=st.lists(events, max_size=3), step=st.sampled_from([1, 1, 1, 1, 0, 2]))
    def publish(self, replica_id: str, said: list[Event], step: int) -> None:
        epoch, seq = self.last.get(replica_id, (1, 0))
        self.last[replica_id] = (epoch, max(seq, seq + step))
        self.tell(self.store.publish(batch(replica_id, seq + step, *said, epoch=epoch)))

    @rule(
        replica_id=replica_ids,
        held=st.lists(st.builds(stored, block_names), max_size=2),
        step=st.sampled_from([1, 1, 1, -1, 5]),
        later=st.sampled_from([0, 0, 1, -1]),
    )
    def publish_inventory(self, replica_id: str, held: list[BlocksStored], step: int, later: int) -> None:
        epoch, seq = self.last.get(replica_id, (1, 0))
        self.last[replica_id] = (max(epoch, epoch + later), max(seq, seq + step))
        self.tell(self.store.publish_inventory(inventory(replica_id, seq + step, *held, epoch=epoch + later)))

    @rule(replica_id=replica_ids)
    def deregister(self, replica_id: str) -> None:
        self.tell(self.store.deregister(replica_id, self.last.get(replica_id, (1, 0))[0]))

    @rule(replica_id=replica_ids, num_purges_seen=st.sampled_from([None, 0, 1]))
    def heartbeat(self, replica_id: str, num_purges_seen: int | None) -> None:
        epoch, seq = self.last.get(replica_id, (1, 0))
        held = self.store._index.digest(replica_id) if replica_id in self.store._index.registrations else Digest()
        self.tell(self.store.heartbeat(Heartbeat(replica_id, epoch, seq, held, num_purges_seen)))

    @rule()
    def purge(self) -> None:
        self.tell(self.store.purge(TENANT))

    @rule(seconds=st.sampled_from([1.0, 2.0, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(dice=st.integers(1, 3))
    def lose_everything(self, dice: int) -> None:
        # Not often, or hardly anything but snapshots would be read.
        if dice == 1:
            self.store = self.new_store()

    @rule(mirror=st.sampled_from([0, 1]))
    def read(self, mirror: int) -> None:
        self.catch_up(self.mirrors[mirror])

    @rule()
    def read_both(self) -> None:
        for mirror in self.mirrors:
            self.catch_up(mirror)

    def catch_up(self, mirror: IndexMirror) -> None:
        self.runner.run(mirror.apply(self.runner.run(self.store.read(mirror._cursor, 0.0))))
        assert mirror._cursor == self.store._cursor()
        assert knowledge(mirror) == knowledge(self.store)
        assert mirror.registrations == self.store._index.registrations
        assert mirror.num_blocks == self.store._index.num_blocks
        # The log has all that a mirror needs, in order: a gap or a drift would be the store's fault.
        assert (mirror.num_gaps, mirror.num_drifts) == (0, 0)

    @invariant()
    def all_are_intact(self) -> None:
        self.store.check_invariants()
        for mirror in self.mirrors:
            mirror._index.check_invariants()


FollowingMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=20)
test_a_mirror_that_has_read_knows_what_the_store_knows = FollowingMachine.TestCase


class IgnoresDepartures(IndexMirror):
    async def _apply_item(self, index: Any, item: Any) -> bool:
        return False if isinstance(item, Departure) else await super()._apply_item(index, item)


class IgnoresPurges(IndexMirror):
    async def _apply_item(self, index: Any, item: Any) -> bool:
        return False if isinstance(item, TenantPurge) else await super()._apply_item(index, item)


class AddsSnapshotsToWhatItKnows(IndexMirror):
    async def apply(self, news: News) -> None:
        await super().apply(News(news.cursor, news.items, is_snapshot=False))


@pytest.mark.parametrize("mirror_class", [IgnoresDepartures, IgnoresPurges, AddsSnapshotsToWhatItKnows])
def test_a_planted_fault_is_found_by_the_same_histories(mirror_class: type[IndexMirror]) -> None:
    machine = type("PlantedMachine", (FollowingMachine,), {"mirror_class": mirror_class})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=300,
                stateful_step_count=30,
                phases=[Phase.generate],
                database=None,
                derandomize=True,
                print_blob=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
