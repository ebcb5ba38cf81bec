"""Random histories of an index store against a plain model: what it matches, and what a follower of it knows."""

import asyncio
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache_index.embedded import EmbeddedStore
from cache_index.errors import DriftError, SequenceGapError, StaleEpochError, UnknownReplicaError
from cache_index.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Digest,
    Event,
    EventBatch,
    Heartbeat,
    Inventory,
)
from cache_index.mirror import IndexMirror
from cache_index.redis_store import RedisStore
from cache_index.redis_store.codec import decode_slots
from cache_index.settings import IndexSettings
from cache_index.store import IndexStore
from tests.index_examples import chain, registration
from tests.index_stores import next_namespace
from tests.redis_servers import RedisServer

TENANTS = (b"s" * 16, b"t" * 16)
NAMES = "abcdef"
REPLICAS = ("r1", "r2", "r3")
SETTINGS = IndexSettings(lease_s=3_600.0, log_batches_max=8)
# What is checked after every step: some chains that many histories hold parts of.
CHAINS = ("abcdef", "cba", "f")

holdings = st.dictionaries(st.sampled_from(TENANTS), st.sets(st.sampled_from(NAMES), min_size=1))
events = st.lists(
    st.one_of(
        st.builds(BlocksStored, st.sampled_from(TENANTS), st.lists(st.sampled_from(NAMES), max_size=4).map(chain)),
        st.builds(BlocksRemoved, st.sampled_from(TENANTS), st.lists(st.sampled_from(NAMES), max_size=4).map(chain)),
        st.just(BlocksCleared()),
    ),
    max_size=5,
)


class Replica:
    """What one replica has said, in the plainest form."""

    def __init__(self, epoch: int, seq: int) -> None:
        self.epoch = epoch
        self.seq = seq
        self.held: dict[bytes, set[bytes]] = {tenant: set() for tenant in TENANTS}

    def apply(self, said: list[Event]) -> None:
        for event in said:
            match event:
                case BlocksStored(tenant, block_hashes):
                    self.held[tenant] |= set(block_hashes)
                case BlocksRemoved(tenant, block_hashes):
                    self.held[tenant] -= set(block_hashes)
                case BlocksCleared():
                    self.held = {tenant: set() for tenant in TENANTS}

    @property
    def digest(self) -> Digest:
        return sum((Digest.of(blocks) for blocks in self.held.values()), Digest())

    def num_matched(self, tenant: bytes, block_hashes: tuple[bytes, ...]) -> int:
        for number, block_hash in enumerate(block_hashes):
            if block_hash not in self.held[tenant]:
                return number
        return len(block_hashes)


class StoreMachine(RuleBasedStateMachine):
    """Every rule says something to the store and the same to the model."""

    def make_store(self) -> IndexStore:
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.replicas: dict[str, Replica] = {}
        # A replica that was gone comes back with a later epoch, as every new process does.
        self.last_epoch = dict.fromkeys(REPLICAS, 0)
        self.num_purges_seen: dict[str, int | None] = dict.fromkeys(REPLICAS)
        self.store = self.make_store()
        self.mirror = IndexMirror(self.store, SETTINGS)

    def run(self, call: Any) -> Any:
        return self.runner.run(_bounded(call))

    @rule(name=st.sampled_from(REPLICAS), held=holdings, is_new=st.booleans())
    def publish_inventory(self, name: str, held: dict[bytes, set[str]], is_new: bool) -> None:
        current = self.replicas.get(name)
        if current is None or is_new:
            self.last_epoch[name] += 1
            self.num_purges_seen[name] = None
            said = Replica(self.last_epoch[name], 1)
        else:
            said = Replica(current.epoch, current.seq + 1)
        blocks = tuple(BlocksStored(tenant, chain(sorted(names))) for tenant, names in held.items())
        said.apply(list(blocks))
        self.run(self.store.publish_inventory(Inventory(registration(name, said.epoch), said.seq, blocks)))
        self.replicas[name] = said

    @rule(name=st.sampled_from(REPLICAS), said=events)
    def publish(self, name: str, said: list[Event]) -> None:
        replica = self.replicas.get(name)
        if replica is None:
            with pytest.raises(UnknownReplicaError):
                self.run(self.store.publish(EventBatch(name, self.last_epoch[name] + 1, 1, tuple(said))))
            return
        replica.seq += 1
        self.run(self.store.publish(EventBatch(name, replica.epoch, replica.seq, tuple(said))))
        replica.apply(said)

    @rule(name=st.sampled_from(REPLICAS), said=events, away=st.sampled_from([-1, 0, 2, 5]))
    @precondition(lambda self: self.replicas)
    def publish_out_of_order(self, name: str, said: list[Event], away: int) -> None:
        replica = self.replicas.get(name)
        if replica is None:
            return
        batch = EventBatch(name, replica.epoch, replica.seq + away, tuple(said))
        if away <= 0:
            self.run(self.store.publish(batch))  # It was applied before.
            return
        with pytest.raises(SequenceGapError):
            self.run(self.store.publish(batch))

    @rule(name=st.sampled_from(REPLICAS), said=events)
    def speak_from_an_earlier_life(self, name: str, said: list[Event]) -> None:
        replica = self.replicas.get(name)
        if replica is None or replica.epoch < 2:
            return
        old = replica.epoch - 1
        for late in (
            self.store.publish(EventBatch(name, old, 99, tuple(said))),
            self.store.publish_inventory(Inventory(registration(name, old), 99, ())),
            self.store.heartbeat(Heartbeat(name, old, 99, Digest())),
        ):
            with pytest.raises(StaleEpochError):
                self.run(late)
        self.run(self.store.deregister(name, old))

    @rule(name=st.sampled_from(REPLICAS), is_right=st.booleans())
    def heartbeat(self, name: str, is_right: bool) -> None:
        replica = self.replicas.get(name)
        if replica is None:
            return
        digest = replica.digest if is_right else replica.digest + Digest(1, 7)
        said = Heartbeat(name, replica.epoch, replica.seq, digest, self.num_purges_seen[name])
        if is_right:
            notices = self.run(self.store.heartbeat(said))
            self.num_purges_seen[name] = notices.num_purges
        else:
            with pytest.raises(DriftError):
                self.run(self.store.heartbeat(said))

    @rule(tenant=st.sampled_from(TENANTS))
    def purge(self, tenant: bytes) -> None:
        """With what every replica does on hearing of it: it drops its blocks, and says so."""
        self.run(self.store.purge(tenant))
        for name, replica in self.replicas.items():
            seen = self.num_purges_seen[name]
            said = Heartbeat(name, replica.epoch, replica.seq, replica.digest, 0 if seen is None else seen)
            notices = self.run(self.store.heartbeat(said))
            assert tenant in notices.purged
            self.num_purges_seen[name] = notices.num_purges
            dropped: list[Event] = [BlocksRemoved(lost, tuple(replica.held[lost])) for lost in notices.purged]
            replica.seq += 1
            self.run(self.store.publish(EventBatch(name, replica.epoch, replica.seq, tuple(dropped))))
            replica.apply(dropped)

    @rule(name=st.sampled_from(REPLICAS))
    def sign_off(self, name: str) -> None:
        replica = self.replicas.pop(name, None)
        self.run(self.store.deregister(name, replica.epoch if replica else 1))

    @rule()
    def follow_anew(self) -> None:
        self.mirror = IndexMirror(self.store, SETTINGS)

    @invariant()
    def everybody_knows_what_was_said(self) -> None:
        if not hasattr(self, "store"):
            return
        self.run(self._follow())
        assert (self.mirror.num_gaps, self.mirror.num_drifts) == (0, 0)
        assert self.mirror.registrations.keys() == self.replicas.keys()
        for tenant in TENANTS:
            for names in CHAINS:
                block_hashes = chain(names)
                expected = {
                    name: num_matched
                    for name, replica in self.replicas.items()
                    if (num_matched := replica.num_matched(tenant, block_hashes))
                }
                assert self.run(self.store.match(tenant, block_hashes)) == expected
                assert self.mirror.match(tenant, block_hashes) == expected

    async def _follow(self) -> None:
        while True:
            await self.mirror.catch_up(0.0)
            if self.mirror.lag_items == 0:
                return

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.run(self.store.close())
            self.runner.close()


async def _bounded(call: Any) -> Any:
    async with asyncio.timeout(30.0):
        return await call


class EmbeddedMachine(StoreMachine):
    def make_store(self) -> IndexStore:
        return EmbeddedStore(SETTINGS)


class RedisMachine(StoreMachine):
    """Besides, what stands in Redis is what was said, and heartbeats leave nothing of what is gone."""

    server: ClassVar[RedisServer]

    def make_store(self) -> IndexStore:
        self.settings = SETTINGS.model_copy(update={"redis_url": self.server.secret_url, "namespace": next_namespace()})
        return RedisStore(self.settings)

    @rule()
    @precondition(lambda self: self.replicas)
    def clean_up(self) -> None:
        for _ in range(3):
            for name in self.replicas:
                self.heartbeat(name, is_right=True)
        with self.server.client() as client:
            for tenant in TENANTS:
                fields = client.hgetall(f"{self.settings.namespace}:{{{tenant.hex()}}}:blocks")
                slots = decode_slots(fields.get(b"slots"))
                assert len(slots) <= len(self.replicas)
                in_use = sum(1 << slot for slot in slots)
                blocks = {name: int.from_bytes(bits, "little") for name, bits in fields.items() if len(name) == 16}
                assert all(bits & ~in_use == 0 for bits in blocks.values())
                held = [block_hash for replica in self.replicas.values() for block_hash in replica.held[tenant]]
                assert {name: bits.bit_count() for name, bits in blocks.items()} == {
                    block_hash: held.count(block_hash) for block_hash in held
                }

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "settings"):
            with self.server.client() as client:
                for key in client.keys(f"{self.settings.namespace}:*"):
                    client.delete(key)


class DeafToRemovals(EmbeddedStore):
    """Planted: it takes no block away."""

    async def publish(self, batch: EventBatch) -> None:
        kept = tuple(event for event in batch.events if not isinstance(event, BlocksRemoved))
        await super().publish(EventBatch(batch.replica_id, batch.epoch, batch.seq, kept))


class KeepsOldLives(EmbeddedStore):
    """Planted: what a replica said in an earlier epoch counts on."""

    async def publish_inventory(self, inventory: Inventory) -> None:
        known = [item for item in self._index.inventories() if item.replica_id == inventory.replica_id]
        blocks = (*inventory.blocks, *(part for item in known if item.epoch < inventory.epoch for part in item.blocks))
        await super().publish_inventory(Inventory(inventory.registration, inventory.seq, blocks))


class JoinsTenants(EmbeddedStore):
    """Planted: it looks in one partition for everybody."""

    async def match(self, tenant: bytes, block_hashes: Any) -> Any:
        return await super().match(TENANTS[0], block_hashes)


def limits(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )


def test_histories_of_the_embedded_store() -> None:
    run_state_machine_as_test(EmbeddedMachine, settings=limits(100))


@pytest.fixture
def redis_machine(redis: RedisServer) -> Iterator[type[RedisMachine]]:
    RedisMachine.server = redis
    yield RedisMachine
    del RedisMachine.server


def test_histories_of_the_store_on_redis(redis_machine: type[RedisMachine]) -> None:
    run_state_machine_as_test(redis_machine, settings=limits(50))


@pytest.mark.parametrize("store_class", [DeafToRemovals, KeepsOldLives, JoinsTenants])
def test_a_planted_fault_is_found(store_class: type[EmbeddedStore]) -> None:
    class Planted(StoreMachine):
        def make_store(self) -> IndexStore:
            return store_class(SETTINGS)

    with pytest.raises((AssertionError, DriftError)):
        # Without making the history shorter: that it is found is enough.
        run_state_machine_as_test(Planted, settings=settings(limits(200), phases=[Phase.generate], database=None))
