"""A replica's publisher against a real store that loses its data or goes away: afterwards the store knows the pool."""

import asyncio
import contextlib
import dataclasses
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cache_index.blocks import BlockChain, BlockHash, PromptBlocks
from cache_index.embedded import EmbeddedStore
from cache_index.errors import StoreUnavailableError
from cache_index.events import BlocksStored, Digest, Event, EventBatch, Heartbeat, Inventory
from cache_index.settings import IndexSettings
from cache_index.store import Departure, Notices
from replicas import publisher as publisher_module
from replicas.kv.block_pool import BlockPool
from replicas.publisher import EventPublisher
from tests.index_examples import IDENTITY, OTHER_TENANT, TENANT, chain, inventory, registration, removed, stored

PATIENCE_S = 30.0
SETTINGS = IndexSettings(
    lease_s=3_600.0, heartbeat_interval_s=0.02, publish_interval_s=0.001, log_batches_max=100_000, pending_blocks_max=50
)


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "_RETRY_S", 0.002)


class Line:
    """A real store behind a line that can be cut before or after a call, and that remembers what was said."""

    def __init__(self) -> None:
        self.store = EmbeddedStore(SETTINGS)
        self.is_down = False
        self.said: list[EventBatch | Inventory] = []
        self.num_heartbeats = 0
        self.heard: list[Notices] = []
        self.is_closed = False
        self.faults: Callable[[], str | None] = lambda: "before" if self.is_down else None
        # Set after every call; whoever waits for an effect looks again then.
        self.called = asyncio.Event()

    async def publish(self, batch: EventBatch) -> None:
        await self._call(lambda: self.store.publish(batch), batch)

    async def publish_inventory(self, inventory: Inventory) -> None:
        await self._call(lambda: self.store.publish_inventory(inventory), inventory)

    async def heartbeat(self, heartbeat: Heartbeat) -> Notices:
        self.num_heartbeats += 1
        notices: Notices = await self._call(lambda: self.store.heartbeat(heartbeat))
        self.heard.append(notices)
        return notices

    async def deregister(self, replica_id: str, epoch: int) -> None:
        await self._call(lambda: self.store.deregister(replica_id, epoch))

    async def close(self) -> None:
        self.is_closed = True

    async def match(self, *question: Any) -> Any:
        raise AssertionError("a publisher does not ask")

    read = announce = purge = describe = stats = match

    async def _call(self, call: Callable[[], Any], item: EventBatch | Inventory | None = None) -> Any:
        fault = self.faults()
        try:
            if fault == "before":
                raise StoreUnavailableError("the line is down")
            await asyncio.sleep(0)  # A call to a store somewhere else gives the loop away.
            answer = await call()
            if item is not None:
                self.said.append(item)
            if fault == "after":
                raise StoreUnavailableError("the answer was lost")
            return answer
        finally:
            self.called.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.called.clear()
                await self.called.wait()

    def held(self) -> set[BlockHash]:
        """What the store believes that the replica holds."""
        return {
            block_hash
            for item in self.store._index.inventories()
            for part in item.blocks
            for block_hash in part.block_hashes
        }


class Replica:
    """A real block pool on a thread of its own, as in an engine, and its publisher."""

    def __init__(self, line: Line, *, epoch: int = 1, settings: IndexSettings = SETTINGS) -> None:
        self.pool = BlockPool(num_blocks=40, block_size=2)
        self.thread = ThreadPoolExecutor(1)
        self.publisher = EventPublisher(line, registration("r1", epoch), settings, self)

    async def serve(self, *prompts: list[int]) -> None:
        """Cache prompts, evicting others where necessary, and tell the publisher; in the engine's thread."""
        await asyncio.get_running_loop().run_in_executor(self.thread, self._serve, prompts)

    async def clear(self) -> None:
        def clear() -> None:
            self.pool.clear()
            self._flush()

        await asyncio.get_running_loop().run_in_executor(self.thread, clear)

    def held(self) -> set[BlockHash]:
        return {block_hash for part in self.pool.inventory() for block_hash in part.block_hashes}

    def serve_here(self, *prompts: list[int]) -> None:
        self._serve(prompts)

    def _serve(self, prompts: tuple[list[int], ...], scope: bytes = TENANT) -> None:
        for prompt in prompts:
            blocks = PromptBlocks.build(prompt, block_size=2, root=b"r" * 16, fingerprint=b"f" * 16, scope=scope)
            chain = BlockChain(blocks)
            held = list(self.pool.match(chain).block_ids)
            self.pool.attach(held)
            for index in range(len(held), chain.num_blocks):
                block_id = self.pool.commit(chain, index, self.pool.allocate(), held[-1] if held else None)
                assert block_id is not None
                held.append(block_id)
            self.pool.release(held)
            self._flush()

    def _flush(self) -> None:
        events = self.pool.drain_events()
        if events:
            self.publisher.push(events)

    async def take_blocks(self, before: Callable[[], None]) -> tuple[BlocksStored, ...]:
        def take() -> tuple[BlocksStored, ...]:
            self._flush()
            before()
            return self.pool.inventory()

        return await asyncio.get_running_loop().run_in_executor(self.thread, take)

    async def take_digest(self, before: Callable[[], None]) -> Digest:
        def take() -> Digest:
            self._flush()
            before()
            return self.pool.digest

        return await asyncio.get_running_loop().run_in_executor(self.thread, take)

    async def drop_tenants(self, tenants: Sequence[bytes]) -> None:
        def drop() -> None:
            for tenant in tenants:
                self.pool.purge(tenant)
            self._flush()

        await asyncio.get_running_loop().run_in_executor(self.thread, drop)


class Said:
    """Holdings that are whatever a test says, with no pool behind them."""

    def __init__(
        self, take_blocks: Callable[[Callable[[], None]], Awaitable[tuple[BlocksStored, ...]]], held: str
    ) -> None:
        self.take_blocks = take_blocks
        self._digest = Digest.of(chain(held))

    async def take_digest(self, before: Callable[[], None]) -> Digest:
        before()
        return self._digest

    async def drop_tenants(self, tenants: Sequence[bytes]) -> None:
        raise AssertionError("nothing was purged")


@contextlib.asynccontextmanager
async def publishing(replica: Replica) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(replica.publisher.run())
    yield task
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    replica.thread.shutdown()


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
async def replica(line: Line) -> AsyncIterator[Replica]:
    """A replica that publishes."""
    replica = Replica(line)
    async with publishing(replica):
        await line.until(lambda: bool(line.said))
        yield replica


async def test_a_replica_first_publishes_what_it_already_holds(line: Line) -> None:
    replica = Replica(line)
    await replica.serve([1, 2, 3, 4])
    async with publishing(replica):
        await line.until(lambda: bool(line.said))
    [first, *rest] = line.said
    assert first == Inventory(registration("r1"), 1, replica.pool.inventory())
    # The events of what the inventory held were dropped with it.
    assert rest == []


async def test_what_is_stored_evicted_and_cleared_afterwards_follows_in_numbered_batches(
    line: Line, replica: Replica
) -> None:
    await replica.serve([1, 2, 3, 4])
    await line.until(lambda: line.held() == replica.held() != set())
    for number in range(30):
        await replica.serve([100 + number, 0, number, 1])
    await line.until(lambda: line.held() == replica.held())
    assert len(replica.held()) == 40
    assert replica.pool.num_evicted_blocks == 22
    await replica.clear()
    await replica.serve([5, 6])
    await line.until(lambda: line.held() == replica.held())
    assert len(replica.held()) == 1
    assert [item.seq for item in line.said] == list(range(1, len(line.said) + 1))
    assert [type(item) for item in line.said] == [Inventory] + [EventBatch] * (len(line.said) - 1)


async def test_events_within_the_interval_travel_as_one_batch(line: Line) -> None:
    replica = Replica(line, settings=SETTINGS.model_copy(update={"heartbeat_interval_s": 3_600.0}))
    async with publishing(replica):
        await line.until(lambda: bool(line.said))
        # Without giving the loop back, so the publisher sees them all at once.
        replica.serve_here([1, 2], [3, 4])
        await line.until(lambda: len(line.said) == 2)
    [batch] = line.said[1:]
    assert isinstance(batch, EventBatch)
    assert len(batch.events) == 2


async def test_an_idle_replica_sends_heartbeats_and_nothing_else(line: Line, replica: Replica) -> None:
    await line.until(lambda: line.num_heartbeats >= 3)
    assert line.said == [inventory("r1", 1)]


async def test_a_store_that_lost_its_data_is_filled_again_by_an_idle_replica(line: Line, replica: Replica) -> None:
    await replica.serve([1, 2, 3, 4])
    await line.until(lambda: line.held() == replica.held() != set())
    line.store = EmbeddedStore(SETTINGS)
    await line.until(lambda: line.held() == replica.held())
    assert isinstance(line.said[-1], Inventory)
    await replica.serve([9, 9])
    await line.until(lambda: line.held() == replica.held())
    assert isinstance(line.said[-1], EventBatch)


async def test_a_lapsed_lease_is_renewed_by_an_inventory(line: Line, replica: Replica) -> None:
    await replica.serve([1, 2])
    await line.until(lambda: line.held() == replica.held() != set())
    line.store._depart("r1")
    await replica.serve([3, 4])
    await line.until(lambda: line.held() == replica.held())
    assert any(isinstance(item, Inventory) for item in line.said[2:])


async def test_a_gap_is_filled_by_an_inventory(line: Line, replica: Replica) -> None:
    await replica.serve([1, 2])
    await line.until(lambda: line.held() == replica.held() != set())
    replica.publisher._seq += 5
    await replica.serve([3, 4])
    await line.until(lambda: line.held() == replica.held())
    assert isinstance(line.said[-1], Inventory)


async def test_what_happens_while_the_store_is_away_is_known_after_its_return(line: Line, replica: Replica) -> None:
    await replica.serve([1, 2])
    await line.until(lambda: line.held() == replica.held() != set())
    line.is_down = True
    before = line.held()
    for number in range(30):
        await replica.serve([100 + number, 0, number, 1])
    assert line.held() == before
    line.is_down = False
    await line.until(lambda: line.held() == replica.held())
    # It was away for so long that the events would have been more than are kept.
    assert isinstance(line.said[-1], Inventory)


async def test_an_answer_that_was_lost_applies_nothing_twice(line: Line, replica: Replica) -> None:
    faults = iter(["after"])
    line.faults = lambda: next(faults, None)
    await replica.serve([1, 2])
    await line.until(lambda: line.held() == replica.held() != set() and line.num_heartbeats > 0)
    await replica.serve([3, 4])
    await line.until(lambda: line.held() == replica.held())


@pytest.mark.parametrize(("num_blocks", "overflows"), [(50, False), (51, True)])
async def test_more_pending_blocks_than_are_kept_become_an_inventory(
    line: Line, num_blocks: int, overflows: bool
) -> None:
    pool = (stored("abc"),)

    async def take_blocks(before: Callable[[], None]) -> tuple[BlocksStored, ...]:
        before()
        return pool

    # One heartbeat, after the inventory, and none among the events.
    settings = SETTINGS.model_copy(update={"heartbeat_interval_s": 3_600.0})
    publisher = EventPublisher(line, registration("r1"), settings, Said(take_blocks, "abc"))
    task = asyncio.create_task(publisher.run())
    await line.until(lambda: len(line.heard) == 1)
    events: list[Event] = [stored([f"new {number}"]) for number in range(num_blocks)]
    publisher.push(tuple(events[:20]))
    publisher.push(tuple(events[20:]))
    publisher.push((stored(["one more"]),) if overflows else ())
    assert publisher._num_pending_blocks == len(publisher._pending) == (20 if overflows else 50)
    await line.until(lambda: len(line.said) == 2)
    if overflows:
        assert line.said[1] == Inventory(registration("r1"), 2, pool)
        await line.until(lambda: len(line.heard) == 2)
    else:
        assert line.said[1] == EventBatch("r1", 1, 2, tuple(events))
    # And it goes on with events.
    publisher.push((stored(["later"]),))
    await line.until(lambda: len(line.said) == 3)
    assert line.said[2] == EventBatch("r1", 1, 3, (stored(["later"]),))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class DropsWhatIsPendingTooLate(EventPublisher):
    """Planted: drops the pending events once it has the inventory, not at the moment for which it speaks."""

    async def _publish_inventory(self) -> None:
        self._seq += 1
        blocks = await self._holdings.take_blocks(lambda: None)
        self._drop_pending()
        await self._store.publish_inventory(Inventory(self._registration, self._seq, blocks))
        self._needs_inventory = False


@pytest.mark.parametrize(
    ("publisher_class", "held"), [(EventPublisher, "abc"), (DropsWhatIsPendingTooLate, "a")], ids=["ours", "planted"]
)
async def test_an_event_after_the_inventory_was_taken_is_published_and_one_before_is_not_twice(
    line: Line, publisher_class: type[EventPublisher], held: str
) -> None:
    async def take_blocks(before: Callable[[], None]) -> tuple[BlocksStored, ...]:
        if len(line.said) == 0:
            publisher.push((removed("a"),))  # Before the blocks are taken, which hold it again: it must not follow.
            before()
            publisher.push((stored("b"),))
            await asyncio.to_thread(publisher.push, (stored("c"),))
        return (stored("a"),)

    publisher = publisher_class(line, registration("r1"), SETTINGS, Said(take_blocks, "abc"))
    task = asyncio.create_task(publisher.run())
    await line.until(lambda: line.num_heartbeats >= 2)
    assert line.held() == set(chain(held))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_replica_that_ends_signs_off(line: Line) -> None:
    replica = Replica(line)
    async with publishing(replica):
        await line.until(lambda: bool(line.said))
        assert line.store._index.registrations.keys() == {"r1"}
        cursor = (await line.store.read(None, 0.0)).cursor
    assert line.store._index.registrations.keys() == set()
    assert (await line.store.read(cursor, 0.0)).items == (Departure("r1", 1),)


async def test_a_replica_that_ends_while_the_store_is_away_ends_all_the_same(line: Line) -> None:
    replica = Replica(line)
    async with publishing(replica):
        await line.until(lambda: bool(line.said))
        line.is_down = True
    assert line.store._index.registrations.keys() == {"r1"}


async def test_a_replica_whose_id_another_life_took_falls_silent(line: Line, replica: Replica) -> None:
    await line.store.publish_inventory(inventory("r1", 1, stored("x"), epoch=2))
    said = list(line.said)
    num_heartbeats = line.num_heartbeats
    await line.until(lambda: line.num_heartbeats > num_heartbeats)
    await replica.serve([1, 2])
    async with asyncio.timeout(PATIENCE_S):
        # Some turns of the loop, in which a publisher that still spoke would.
        for _ in range(100):
            await asyncio.sleep(0.001)
    assert line.said == said
    assert line.num_heartbeats == num_heartbeats + 1
    assert (await line.store.read(None, 0.0)).items == (inventory("r1", 1, stored("x"), epoch=2),)


async def test_pushing_from_a_thread_whose_loop_is_closed_harms_nobody(line: Line) -> None:
    def in_a_thread() -> EventPublisher:
        async def make() -> EventPublisher:
            return Replica(line).publisher

        return asyncio.run(make())

    publisher = await asyncio.to_thread(in_a_thread)
    publisher.push((stored("a"),))


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_fails_and_when_the_store_ends_up_with_what_the_pool_holds(line: Line, seed: int) -> None:
    dice = random.Random(seed)
    line.faults = lambda: dice.choice([None, None, None, "before", "after"])
    replica = Replica(line)
    steps = random.Random(seed)

    def step() -> None:
        if steps.random() < 0.02:
            replica.pool.clear()
            replica._flush()
        replica.serve_here([steps.randrange(4) for _ in range(steps.randrange(12))])

    def run_steps() -> None:
        # One by one, so that the publisher gets its turns on the replica's thread in between.
        for _ in range(300):
            replica.thread.submit(step).result()

    async with publishing(replica):
        running = asyncio.create_task(asyncio.to_thread(run_steps))
        for _ in range(3):
            num_said = len(line.said)
            await line.until(lambda: len(line.said) > num_said or running.done())  # noqa: B023  Awaited at once.
            line.store = EmbeddedStore(SETTINGS)
        await running
        line.faults = lambda: None
        await line.until(lambda: line.held() == replica.held())
        await replica.serve([1, 1, 1, 1], [2, 2, 2])
        await line.until(lambda: line.held() == replica.held())
        line.store.check_invariants()


@pytest.mark.parametrize("fault", ["a block is lost", "a block is invented"])
async def test_a_store_that_holds_something_else_is_repaired_with_the_next_heartbeat(
    line: Line, replica: Replica, fault: str
) -> None:
    await replica.serve([1, 2, 3, 4])
    await line.until(lambda: line.held() == replica.held() != set())
    holders, [bit] = line.store._index._holders, line.store._index._replica_ids
    if fault == "a block is lost":
        holders.remove(TENANT, [next(iter(replica.held()))], bit)
    else:
        holders.store(TENANT, chain("x"), bit)
    assert line.held() != replica.held()
    await line.until(lambda: line.held() == replica.held())
    assert (replica.publisher.num_drifts, replica.publisher.num_losses) == (1, 0)
    assert isinstance(line.said[-1], Inventory)


async def test_a_store_that_drifts_again_and_again_is_not_repaired_faster_than_heartbeats(line: Line) -> None:
    async def take_blocks(before: Callable[[], None]) -> tuple[BlocksStored, ...]:
        before()
        return (stored("a"),)

    # It says that it holds another block than its inventory does, so no inventory ever helps.
    publisher = EventPublisher(line, registration("r1"), SETTINGS, Said(take_blocks, "b"))
    task = asyncio.create_task(publisher.run())
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await line.until(lambda: publisher.num_drifts == 5)
    assert loop.time() - began_s >= 3 * SETTINGS.heartbeat_interval_s
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_busy_replica_says_what_it_holds_too(line: Line, replica: Replica) -> None:
    num_heard = len(line.heard)
    number = 0
    while len(line.heard) < num_heard + 3:
        await replica.serve([number, number])
        number += 1
    assert replica.publisher.num_drifts == 0
    assert any(isinstance(item, EventBatch) for item in line.said)


async def test_what_a_store_does_to_a_replica_is_counted(line: Line, replica: Replica) -> None:
    publisher = replica.publisher
    await line.until(lambda: len(line.heard) > 0)
    assert (publisher.num_inventories, publisher.num_losses, publisher.num_drifts) == (1, 0, 0)
    line.store = EmbeddedStore(SETTINGS)
    await line.until(lambda: publisher.num_inventories == 2)
    assert (publisher.num_losses, publisher.num_drifts, publisher.degraded_reason) == (1, 0, None)
    line.is_down = True
    await line.until(lambda: publisher.degraded_reason is not None)
    assert publisher.degraded_reason == "the line is down"
    line.is_down = False
    num_heard = len(line.heard)
    await line.until(lambda: len(line.heard) > num_heard + 1)
    assert publisher.degraded_reason is None


async def test_a_purged_tenant_is_dropped_by_the_replica_and_no_other_is(line: Line, replica: Replica) -> None:
    def serve_other() -> None:
        replica._serve(([7, 8],), OTHER_TENANT)

    await replica.serve([1, 2, 3, 4])
    await asyncio.get_running_loop().run_in_executor(replica.thread, serve_other)
    await line.until(lambda: line.held() == replica.held() and len(replica.held()) == 3 and len(line.heard) > 0)
    assert await line.store.purge(TENANT) == 2
    await line.until(lambda: any(notices.purged == (TENANT,) for notices in line.heard))
    num_heard = len(line.heard)
    await line.until(lambda: len(line.heard) > num_heard)
    assert {part.tenant for part in replica.pool.inventory()} == {OTHER_TENANT}
    assert line.held() == replica.held() != set()
    assert replica.publisher.num_drifts == 0
    # It hears of it once, and what it caches of that tenant afterwards stays.
    await replica.serve([1, 2])
    num_heard = len(line.heard)
    await line.until(lambda: len(line.heard) > num_heard + 2)
    assert len(replica.held()) == 2


@pytest.mark.parametrize("field", ["weights", "config", "dtype", "kv_dtype", "attention", "tokenizer", "block_size"])
async def test_a_replica_says_in_what_a_gateways_identity_differs_and_when_it_no_longer_does(
    line: Line, replica: Replica, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    caplog.set_level(logging.INFO, "replicas.parity")
    await line.store.announce(IDENTITY)
    other = dataclasses.replace(IDENTITY, **{field: 32 if field == "block_size" else "another"})
    await line.store.announce(other)
    await line.until(lambda: replica.publisher.parity.differing == {other: (field,)})
    num_heard = len(line.heard)
    await line.until(lambda: len(line.heard) > num_heard + 2)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [field in record.getMessage() for record in warnings] == [True], "said once, and not of the same identity"
    line.store = EmbeddedStore(SETTINGS)
    await line.until(lambda: replica.publisher.parity.differing == {})
    assert field in caplog.messages[-1]
