"""The index in memory, by hand and against a naive model of it."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

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

from cache_index import memory
from cache_index.blocks import BlockHash
from cache_index.errors import SequenceGapError, StaleEpochError, UnknownReplicaError
from cache_index.events import BlocksCleared, BlocksRemoved, BlocksStored, Event, Inventory
from cache_index.memory import MemoryIndex
from tests.index_examples import OTHER_SCOPE, SCOPE, batch, chain, inventory, registration, removed, stored

NAMES = "abcdefgh"


@pytest.fixture
def index() -> Iterator[MemoryIndex]:
    """An index that is intact after every test."""
    index = MemoryIndex()
    yield index
    index.check_invariants()


@pytest.fixture
def cleans_two_blocks_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CLEANED_BLOCKS_PER_CALL", 2)


def test_a_replica_matches_up_to_its_first_missing_block(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 1, stored("abcd")))
    index.replace(inventory("r2", 1, stored("ab")))
    index.replace(inventory("r3", 1, stored("acd")))
    index.replace(inventory("r4", 1, stored("bcd")))
    assert index.match(chain("abcde")) == {"r1": 4, "r2": 2, "r3": 1}
    assert index.match(chain("xabcd")) == {}
    assert index.match(()) == {}
    assert index.num_blocks == 12


def test_an_index_of_nobody_matches_nothing(index: MemoryIndex) -> None:
    assert index.match(chain("abc")) == {}
    assert index.match(()) == {}
    assert index.replica_ids == frozenset()
    assert index.registration("r1") is None


def test_a_replica_that_holds_nothing_is_known_and_never_matches(index: MemoryIndex) -> None:
    index.register(registration("r1"))
    assert index.replica_ids == {"r1"}
    assert index.match(chain("a")) == {}


def test_events_of_a_batch_apply_in_order(index: MemoryIndex) -> None:
    index.register(registration("r1"))
    index.apply(batch("r1", 1, stored("ab"), removed("b"), stored("bc"), removed("c")))
    assert index.match(chain("abc")) == {"r1": 2}
    index.apply(batch("r1", 2, BlocksCleared(), stored("a")))
    assert index.match(chain("abc")) == {"r1": 1}
    assert index.num_blocks == 1


def test_removing_or_storing_a_block_twice_changes_nothing(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 1, stored("ab")))
    index.apply(batch("r1", 2, stored("ab"), removed("b"), removed("bx")))
    assert index.match(chain("ab")) == {"r1": 1}
    assert index.num_blocks == 1


def test_a_batch_that_was_applied_before_changes_nothing(index: MemoryIndex) -> None:
    index.register(registration("r1"))
    first = batch("r1", 1, stored("a"))
    index.apply(first)
    index.apply(batch("r1", 2, removed("a")))
    index.apply(first)
    index.apply(batch("r1", 0, stored("a")))
    index.apply(batch("r1", -5, stored("a")))
    assert index.match(chain("a")) == {}


@pytest.mark.parametrize("seq", [3, 2**70])
def test_a_batch_after_a_gap_is_refused_and_changes_nothing(index: MemoryIndex, seq: int) -> None:
    index.replace(inventory("r1", 1, stored("a")))
    with pytest.raises(SequenceGapError) as caught:
        index.apply(batch("r1", seq, BlocksCleared()))
    assert (caught.value.replica_id, caught.value.expected_seq, caught.value.seq) == ("r1", 2, seq)
    assert index.match(chain("a")) == {"r1": 1}
    index.apply(batch("r1", 2, stored("b")))
    assert index.match(chain("ab")) == {"r1": 2}


def test_what_an_earlier_epoch_said_is_void_at_once_and_its_late_words_are_refused(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 7, stored("ab"), epoch=3))
    index.register(registration("r1", 5))
    assert index.match(chain("ab")) == {}
    for late in (
        lambda: index.apply(batch("r1", 8, stored("c"), epoch=3)),
        lambda: index.replace(inventory("r1", 9, stored("c"), epoch=3)),
        lambda: index.register(registration("r1", 3)),
        lambda: index.check_epoch("r1", 3),
    ):
        with pytest.raises(StaleEpochError) as caught:
            late()
        assert (caught.value.epoch, caught.value.current_epoch) == (3, 5)
    index.apply(batch("r1", 1, stored("b"), epoch=5))
    assert index.match(chain("b")) == {"r1": 1}


def test_a_replica_that_is_not_registered_in_this_epoch_is_unknown(index: MemoryIndex) -> None:
    index.register(registration("r1", 3))
    for unknown in (
        lambda: index.apply(batch("r2", 1, stored("a"))),
        lambda: index.apply(batch("r1", 1, stored("a"), epoch=4)),
        lambda: index.check_epoch("r1", 4),
        lambda: index.check_epoch("r2", 1),
    ):
        with pytest.raises(UnknownReplicaError):
            unknown()
    index.check_epoch("r1", 3)
    assert index.num_blocks == 0


def test_an_inventory_is_all_that_a_replica_holds(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 4, stored("abc")))
    index.replace(inventory("r1", 9, stored("bd"), stored("e", OTHER_SCOPE)))
    assert index.inventories() == (inventory("r1", 9, stored("bd"), stored("e", OTHER_SCOPE)),)
    index.apply(batch("r1", 10, stored("f")))
    assert index.match(chain("fa")) == {"r1": 1}


def test_an_inventory_older_than_what_was_applied_changes_nothing(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 4, stored("a")))
    index.apply(batch("r1", 5, stored("b")))
    index.replace(inventory("r1", 4, stored("x")))
    assert index.inventories() == (inventory("r1", 5, stored("ab")),)


def test_registering_the_same_epoch_again_keeps_what_was_said_in_it(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 2, stored("ab")))
    index.register(registration("r1"))
    assert index.match(chain("ab")) == {"r1": 2}
    assert index.registration("r1") == registration("r1")


def test_a_dropped_replica_no_longer_matches_and_others_still_do(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 1, stored("ab")))
    index.replace(inventory("r2", 1, stored("abc")))
    index.drop("r1")
    index.drop("nobody")
    assert index.match(chain("abc")) == {"r2": 3}
    assert index.replica_ids == {"r2"}
    assert index.num_blocks == 3


@pytest.mark.usefixtures("cleans_two_blocks_per_call")
def test_a_slot_is_used_again_only_when_nothing_of_its_last_replica_is_left(index: MemoryIndex) -> None:
    for name in ("r1", "r2", "r3"):
        index.replace(inventory(name, 1, stored(NAMES)))
    for name in ("r1", "r2", "r3"):
        index.drop(name)
    assert [len(replica.blocks) for replica in index._retired] == [6, 6, 6]
    assert index.match(chain(NAMES)) == {}
    for number in range(3):
        # Newcomers must not inherit what the departed held.
        index.register(registration(f"new{number}"))
        assert index.match(chain(NAMES)) == {}
        index.check_invariants()
    for seq in range(1, 7):
        index.apply(batch("new0", seq))
    assert (index._retired, index._holders, index._num_slots) == ([], {}, 5)
    for number in range(3, 6):
        index.replace(inventory(f"new{number}", 1, stored("a")))
    assert index._num_slots == 6
    assert index.match(chain("a")) == {"new3": 1, "new4": 1, "new5": 1}


@pytest.mark.usefixtures("cleans_two_blocks_per_call")
@pytest.mark.parametrize("by_batch", [False, True])
def test_a_replica_that_comes_and_goes_leaves_no_more_behind_than_it_held(index: MemoryIndex, by_batch: bool) -> None:
    for life in range(50):
        held = stored([f"life {life} block {number}" for number in range(20)])
        index.replace(inventory("r1", 1, *([] if by_batch else [held]), epoch=life))
        if by_batch:
            index.apply(batch("r1", 2, held, epoch=life))
        assert len(index._holders) <= 40
        assert index._num_slots <= 2
        index.drop("r1")
    assert len(index._holders) == 18


def test_a_hundred_replicas_are_told_apart(index: MemoryIndex) -> None:
    names = [f"block {number}" for number in range(100)]
    for number in range(100):
        index.replace(inventory(f"r{number}", 1, stored(names[: number + 1])))
    assert index.match(chain(names)) == {f"r{number}": number + 1 for number in range(100)}


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda index: index._holders.update({b"x" * 16: 1}),
        lambda index: index._holders.popitem(),
        lambda index: index._free_slots.append(0),
        lambda index: setattr(index, "_live_mask", 0),
        lambda index: setattr(index, "_num_slots", 5),
        lambda index: index._replicas["r1"].blocks.popitem(),
        lambda index: index._retired.append(index._replicas.pop("r1")),
        lambda index: index._replica_ids.clear(),
    ],
)
def test_a_corrupt_index_fails_its_invariants(corrupt: Callable[[MemoryIndex], object]) -> None:
    index = MemoryIndex()
    index.replace(inventory("r1", 1, stored("abc")))
    index.check_invariants()
    corrupt(index)
    with pytest.raises(AssertionError):
        index.check_invariants()


class NaiveIndex:
    """The index as one would write it without care for speed."""

    def __init__(self) -> None:
        self.replicas: dict[str, tuple[int, int, dict[BlockHash, bytes]]] = {}

    def register(self, replica_id: str, epoch: int) -> type[Exception] | None:
        current = self.replicas.get(replica_id)
        if current is not None and epoch < current[0]:
            return StaleEpochError
        if current is None or epoch > current[0]:
            self.replicas[replica_id] = (epoch, 0, {})
        return None

    def apply(self, replica_id: str, epoch: int, seq: int, events: list[Event]) -> type[Exception] | None:
        if replica_id not in self.replicas or self.replicas[replica_id][0] < epoch:
            return UnknownReplicaError
        current_epoch, current_seq, blocks = self.replicas[replica_id]
        if epoch < current_epoch:
            return StaleEpochError
        if seq <= current_seq:
            return None
        if seq > current_seq + 1:
            return SequenceGapError
        for event in events:
            match event:
                case BlocksStored(scope, block_hashes):
                    blocks.update(dict.fromkeys(block_hashes, scope))
                case BlocksRemoved(_, block_hashes):
                    for block_hash in block_hashes:
                        blocks.pop(block_hash, None)
                case BlocksCleared():
                    blocks.clear()
        self.replicas[replica_id] = (epoch, seq, blocks)
        return None

    def replace(self, replica_id: str, epoch: int, seq: int, blocks: list[BlocksStored]) -> type[Exception] | None:
        error = self.register(replica_id, epoch)
        if error is None and seq >= self.replicas[replica_id][1]:
            held = {block_hash: item.scope for item in blocks for block_hash in item.block_hashes}
            self.replicas[replica_id] = (epoch, seq, held)
        return error

    def match(self, block_hashes: tuple[BlockHash, ...]) -> dict[str, int]:
        matched = {
            replica_id: len(list(itertools.takewhile(blocks.__contains__, block_hashes)))
            for replica_id, (_, _, blocks) in self.replicas.items()
        }
        return {replica_id: num for replica_id, num in matched.items() if num}


replica_ids = st.sampled_from(["r1", "r2", "r3", "r4"])
epochs = st.integers(1, 4)
block_names = st.lists(st.sampled_from(NAMES), max_size=6)
scopes = st.sampled_from([SCOPE, OTHER_SCOPE])
stored_events = st.builds(stored, block_names, scopes)
events = stored_events | st.builds(removed, block_names, scopes) | st.builds(BlocksCleared)
# Mostly the batch that comes next, sometimes one seen before or one after a gap.
seq_steps = st.sampled_from([1, 1, 1, 1, 0, -2, 2, 9])


class IndexMachine(RuleBasedStateMachine):
    """Does the same to an index and to the naive one; both must answer alike, also in what they refuse."""

    index_class: type[MemoryIndex] = MemoryIndex

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        # So that retired slots outlive several steps, as they do with millions of blocks.
        self.patch.setattr(memory, "CLEANED_BLOCKS_PER_CALL", 1)
        self.index = self.index_class()
        self.naive = NaiveIndex()

    def teardown(self) -> None:
        self.patch.undo()

    def expect(self, error: type[Exception] | None, call: Callable[[], None]) -> None:
        if error is None:
            call()
        else:
            with pytest.raises(error):
                call()

    def current(self, replica_id: str) -> tuple[int, int]:
        epoch, seq, _ = self.naive.replicas.get(replica_id, (1, 0, {}))
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

    @precondition(lambda self: self.naive.replicas)
    @rule(replica_id=replica_ids)
    def drop(self, replica_id: str) -> None:
        self.naive.replicas.pop(replica_id, None)
        self.index.drop(replica_id)

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=8))
    def match(self, names: list[str]) -> None:
        assert self.index.match(chain(names)) == self.naive.match(chain(names))

    @invariant()
    def both_know_the_same(self) -> None:
        self.index.check_invariants()
        assert {item.replica_id: by_value(item) for item in self.index.inventories()} == self.naive.replicas
        assert self.index.replica_ids == set(self.naive.replicas)
        assert self.index.num_blocks == sum(len(blocks) for _, _, blocks in self.naive.replicas.values())
        for name in NAMES:
            assert self.index.match(chain(name)) == self.naive.match(chain(name))


def by_value(item: Inventory) -> tuple[int, int, dict[BlockHash, bytes]]:
    return item.epoch, item.seq, {block_hash: part.scope for part in item.blocks for block_hash in part.block_hashes}


IndexMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20)
test_any_history_leaves_the_index_equal_to_the_naive_one = IndexMachine.TestCase


class ReusesSlotsAtOnce(MemoryIndex):
    def _retire(self, replica: Any) -> None:
        super()._retire(replica)
        self._free_slots.append(self._retired.pop().slot)


class AppliesAcrossGaps(MemoryIndex):
    def apply(self, batch: Any) -> None:
        replica = self._replicas.get(batch.replica_id)
        if replica is not None and replica.registration.epoch == batch.epoch:
            replica.seq = max(replica.seq, batch.seq - 1)
        super().apply(batch)


class KeepsBitsOfTheRetired(MemoryIndex):
    def _retire(self, replica: Any) -> None:
        replica.blocks.clear()
        super()._retire(replica)


@pytest.mark.parametrize("index_class", [ReusesSlotsAtOnce, AppliesAcrossGaps, KeepsBitsOfTheRetired])
def test_a_planted_fault_is_found_by_the_same_histories(index_class: type[MemoryIndex]) -> None:
    machine = type("PlantedMachine", (IndexMachine,), {"index_class": index_class})
    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception)):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=60,
                stateful_step_count=30,
                phases=[Phase.generate],
                database=None,
                derandomize=True,
                print_blob=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
