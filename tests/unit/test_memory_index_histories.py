"""The index in memory against a naive model, through any history; bounded, it claims nothing that the model lacks."""

import itertools
from collections.abc import Callable, Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cache_index import holders, memory
from cache_index.blocks import BlockHash
from cache_index.errors import SequenceGapError, StaleEpochError, UnknownReplicaError
from cache_index.events import BlocksCleared, BlocksRemoved, BlocksStored, Digest, Event
from cache_index.holders import BlockHolders
from cache_index.memory import MemoryIndex
from tests.index_examples import OTHER_TENANT, TENANT, batch, chain, inventory, registration, removed, stored

NAMES = "abcdefgh"

Held = set[tuple[bytes, BlockHash]]


class NaiveIndex:
    """The index as one would write it without care for speed."""

    def __init__(self) -> None:
        self.replicas: dict[str, tuple[int, int, Held]] = {}

    def register(self, replica_id: str, epoch: int) -> type[Exception] | None:
        current = self.replicas.get(replica_id)
        if current is not None and epoch < current[0]:
            return StaleEpochError
        if current is None or epoch > current[0]:
            self.replicas[replica_id] = (epoch, 0, set())
        return None

    def apply(self, replica_id: str, epoch: int, seq: int, events: list[Event]) -> type[Exception] | None:
        if replica_id not in self.replicas or self.replicas[replica_id][0] < epoch:
            return UnknownReplicaError
        current_epoch, current_seq, held = self.replicas[replica_id]
        if epoch < current_epoch:
            return StaleEpochError
        if seq <= current_seq:
            return None
        if seq > current_seq + 1:
            return SequenceGapError
        for event in events:
            match event:
                case BlocksStored(tenant, block_hashes):
                    held.update((tenant, block_hash) for block_hash in block_hashes)
                case BlocksRemoved(tenant, block_hashes):
                    held.difference_update((tenant, block_hash) for block_hash in block_hashes)
                case BlocksCleared():
                    held.clear()
        self.replicas[replica_id] = (epoch, seq, held)
        return None

    def replace(self, replica_id: str, epoch: int, seq: int, blocks: list[BlocksStored]) -> type[Exception] | None:
        error = self.register(replica_id, epoch)
        if error is None and seq >= self.replicas[replica_id][1]:
            held = {(item.tenant, block_hash) for item in blocks for block_hash in item.block_hashes}
            self.replicas[replica_id] = (epoch, seq, held)
        return error

    def purge(self, tenant: bytes) -> None:
        for _, _, held in self.replicas.values():
            held.difference_update([entry for entry in held if entry[0] == tenant])

    def match(self, tenant: bytes, block_hashes: tuple[BlockHash, ...]) -> dict[str, int]:
        matched = {
            replica_id: len(list(itertools.takewhile(lambda block_hash: (tenant, block_hash) in held, block_hashes)))  # noqa: B023
            for replica_id, (_, _, held) in self.replicas.items()
        }
        return {replica_id: num for replica_id, num in matched.items() if num}


replica_ids = st.sampled_from(["r1", "r2", "r3", "r4"])
epochs = st.integers(1, 4)
block_names = st.lists(st.sampled_from(NAMES), max_size=6)
tenants = st.sampled_from([TENANT, TENANT, OTHER_TENANT])
stored_events = st.builds(stored, block_names, tenants)
events = stored_events | st.builds(removed, block_names, tenants) | st.builds(BlocksCleared)
# Mostly the batch that comes next, sometimes one seen before or one after a gap.
seq_steps = st.sampled_from([1, 1, 1, 1, 0, -2, 2, 9])


class IndexMachine(RuleBasedStateMachine):
    """Does the same to an index and to the naive one; both must answer alike, also in what they refuse."""

    index_class: type[MemoryIndex] = MemoryIndex
    blocks_max: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        # So that what is retired outlives several steps, as it does with millions of blocks, and bounds are reached.
        self.patch.setattr(holders, "SWEPT_BLOCKS_PER_CALL", 1)
        self.patch.setattr(holders, "SWEPT_BLOCKS_PER_CHANGE", 1)
        self.patch.setattr(holders, "RETIRED_BITS_MAX", 6)
        self.patch.setattr(holders, "SECOND_CHANCES_MAX", 2)
        self.patch.setattr(memory, "BLOCKS_PER_STEP", 2)
        self.index = self.index_class(self.blocks_max)
        self.naive = NaiveIndex()
        self.steps: Generator[None, None, None] | None = None
        self.when_done: Callable[[], object] = lambda: None

    def teardown(self) -> None:
        self.patch.undo()

    def expect(self, error: type[Exception] | None, call: Callable[[], None]) -> None:
        if error is None:
            call()
        else:
            with pytest.raises(error):
                call()

    def current(self, replica_id: str) -> tuple[int, int]:
        epoch, seq, _ = self.naive.replicas.get(replica_id, (1, 0, set()))
        return epoch, seq

    @initialize(names=block_names)
    def begin(self, names: list[str]) -> None:
        for replica_id in ("r1", "r2"):
            self.naive.replace(replica_id, 1, 1, [stored(names)])
            self.index.replace(inventory(replica_id, 1, stored(names)))

    @rule(replica_id=replica_ids, epoch=epochs)
    def register(self, replica_id: str, epoch: int) -> None:
        self.expect(
            self.naive.register(replica_id, epoch), lambda: self.index.register(registration(replica_id, epoch))
        )

    @rule(replica_id=replica_ids, step=seq_steps, later=st.sampled_from([0, 0, 0, 0, -1, 1]), said=st.lists(events))
    def apply(self, replica_id: str, step: int, later: int, said: list[Event]) -> None:
        epoch, seq = self.current(replica_id)
        epoch, seq = epoch + later, seq + step
        self.expect(
            self.naive.apply(replica_id, epoch, seq, said),
            lambda: self.index.apply(batch(replica_id, seq, *said, epoch=epoch)),
        )

    @rule(replica_id=replica_ids, step=seq_steps, later=st.sampled_from([0, 0, 1, -1]), held=st.lists(stored_events))
    def replace(self, replica_id: str, step: int, later: int, held: list[BlocksStored]) -> None:
        epoch, seq = self.current(replica_id)
        epoch, seq = epoch + later, seq + step
        self.expect(
            self.naive.replace(replica_id, epoch, seq, held),
            lambda: self.index.replace(inventory(replica_id, seq, *held, epoch=epoch)),
        )

    @rule(replica_id=replica_ids, step=seq_steps, held=st.lists(stored_events))
    def begin_to_replace(self, replica_id: str, step: int, held: list[BlocksStored]) -> None:
        self.finish()
        epoch, seq = self.current(replica_id)
        self.naive.register(replica_id, epoch)
        self.steps = self.index.replace_steps(inventory(replica_id, seq + step, *held, epoch=epoch))

        def done() -> None:
            if replica_id in self.naive.replicas and self.naive.replicas[replica_id][0] == epoch:
                self.naive.replace(replica_id, epoch, seq + step, held)

        self.when_done = done
        self.go_on()

    @rule()
    def go_on(self) -> None:
        if self.steps is not None and next(self.steps, self) is self:
            self.steps = None
            self.when_done()

    @rule()
    def finish(self) -> None:
        while self.steps is not None:
            self.go_on()

    @rule()
    def give_up(self) -> None:
        if self.steps is not None:
            self.steps.close()
            self.steps = None

    @rule(replica_id=replica_ids)
    def drop(self, replica_id: str) -> None:
        self.naive.replicas.pop(replica_id, None)
        self.index.drop(replica_id)

    @rule(tenant=tenants)
    def purge(self, tenant: bytes) -> None:
        # An inventory's first steps would be purged and its last ones not, which no model need have an opinion on.
        self.finish()
        self.naive.purge(tenant)
        self.index.purge(tenant)

    @rule(tenant=tenants, names=st.lists(st.sampled_from(NAMES), max_size=8))
    def match(self, tenant: bytes, names: list[str]) -> None:
        self.compare(self.index.match(tenant, chain(names)), self.naive.match(tenant, chain(names)))

    @rule(tenant=tenants, names=st.lists(st.sampled_from(NAMES), max_size=8))
    def learn(self, tenant: bytes, names: list[str]) -> None:
        self.index.learn(tenant, chain(names), self.naive.match(tenant, chain(names)))

    def compare(self, found: Any, expected: dict[str, int]) -> None:
        """Of what is known in full all is found, and of the rest nothing that is not so."""
        for replica_id in expected.keys() | found.keys():
            num_found, num_expected = found.get(replica_id, 0), expected.get(replica_id, 0)
            assert num_found <= num_expected
            assert num_found == num_expected or not self.index.is_known_in_full(replica_id)

    @invariant()
    def both_know_the_same(self) -> None:
        self.index.check_invariants()
        found = {
            item.replica_id: {(part.tenant, block_hash) for part in item.blocks for block_hash in part.block_hashes}
            for item in self.index.inventories()
        }
        assert found.keys() == self.index.registrations.keys() == self.naive.replicas.keys()
        for replica_id, (epoch, seq, held) in self.naive.replicas.items():
            assert self.index.registrations[replica_id].epoch == epoch
            assert self.index.seq(replica_id) == seq
            assert found[replica_id] <= held
            assert found[replica_id] == held or not self.index.is_known_in_full(replica_id)
            assert self.index.digest(replica_id) == Digest.of(block_hash for _, block_hash in found[replica_id])
        assert self.index.num_blocks == sum(len(held) for held in found.values())
        assert self.index.is_whole == all(map(self.index.is_known_in_full, found))
        # Not where it would leave a mark on every block after every step.
        for tenant, name in itertools.product((TENANT, OTHER_TENANT), NAMES if self.blocks_max is None else ""):
            matched = dict.fromkeys((r for r, held in found.items() if (tenant, chain(name)[0]) in held), 1)
            assert self.index.match(tenant, chain(name)) == matched


class BoundedMachine(IndexMachine):
    """The same with room for half of the blocks that there are."""

    blocks_max = 8

    @invariant()
    def the_bound_holds(self) -> None:
        assert self.index._holders._num_kept <= 8


IndexMachine.TestCase.settings = BoundedMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20)
test_any_history_leaves_the_index_equal_to_the_naive_one = IndexMachine.TestCase
test_any_history_leaves_a_bounded_index_claiming_only_what_is_so = BoundedMachine.TestCase


class WithHolders(MemoryIndex):
    """An index over holders with a planted fault."""

    holders_class: type[BlockHolders]

    def __init__(self, blocks_max: int | None) -> None:
        super().__init__(blocks_max)
        self._holders = self.holders_class(blocks_max)


class GivesBitsOutAtOnce(WithHolders):
    class holders_class(BlockHolders):
        def retire(self, bit: int) -> None:
            super().retire(bit)
            if bit in self._waiting:
                self._waiting.remove(bit)
                self._free.append(bit)


class EndsRoundsEarly(WithHolders):
    class holders_class(BlockHolders):
        def _under_hand(self) -> Any:
            self._round = self._round[:1]
            return super()._under_hand()


class CountsNoPurge(WithHolders):
    class holders_class(BlockHolders):
        def purge(self, tenant: bytes) -> None:
            before = self._tallies
            self._tallies = {bit: type(tally)() for bit, tally in before.items()}
            super().purge(tenant)
            self._tallies = before


class EvictsWithoutCounting(WithHolders):
    class holders_class(BlockHolders):
        def _note_evicted(self, *args: Any) -> None:
            self.num_evicted += 1


class AppliesAcrossGaps(MemoryIndex):
    def apply(self, batch: Any) -> None:
        replica = self._replicas.get(batch.replica_id)
        if replica is not None and replica.registration.epoch == batch.epoch:
            replica.seq = max(replica.seq, batch.seq - 1)
        super().apply(batch)


class CountsInventoriesFromTheirFirstStep(MemoryIndex):
    def replace_steps(self, inventory: Any) -> Any:
        yield from list(super().replace_steps(inventory))


@pytest.mark.parametrize(
    ("machine_class", "index_class"),
    [
        (IndexMachine, GivesBitsOutAtOnce),
        (IndexMachine, EndsRoundsEarly),
        (IndexMachine, CountsNoPurge),
        (IndexMachine, AppliesAcrossGaps),
        (IndexMachine, CountsInventoriesFromTheirFirstStep),
        (BoundedMachine, EvictsWithoutCounting),
    ],
)
def test_a_planted_fault_is_found_by_the_same_histories(
    machine_class: type[IndexMachine], index_class: type[MemoryIndex]
) -> None:
    machine = type("PlantedMachine", (machine_class,), {"index_class": index_class})
    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception)):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=100,
                stateful_step_count=30,
                phases=[Phase.generate],
                database=None,
                derandomize=True,
                print_blob=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
