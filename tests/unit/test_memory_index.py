"""The index in memory, by hand and against a naive model of it."""

from collections.abc import Callable, Iterator

import pytest

from cache_index import holders, memory
from cache_index.errors import SequenceGapError, StaleEpochError, UnknownReplicaError
from cache_index.events import BlocksCleared, BlocksStored, Digest
from cache_index.memory import MemoryIndex
from tests.index_examples import OTHER_TENANT, TENANT, batch, chain, inventory, registration, removed, stored

NAMES = "abcdefgh"


@pytest.fixture
def index() -> Iterator[MemoryIndex]:
    """An index that is intact after every test."""
    index = MemoryIndex()
    yield index
    index.check_invariants()


@pytest.fixture
def sweeps_two_blocks_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "SWEPT_BLOCKS_PER_CALL", 2)


def one_by_one(numbers: range, prefix: str = "block") -> BlocksStored:
    return stored([f"{prefix} {number}" for number in numbers])


def by_value(index: MemoryIndex) -> dict[str, tuple[int, int, dict[bytes, set[bytes]]]]:
    """What an index holds, by replica and tenant, whatever the order."""
    found = {}
    for item in index.inventories():
        blocks: dict[bytes, set[bytes]] = {}
        for part in item.blocks:
            blocks.setdefault(part.tenant, set()).update(part.block_hashes)
        found[item.replica_id] = (item.epoch, item.seq, blocks)
    return found


def test_a_replica_matches_up_to_its_first_missing_block(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 1, stored("abcd")))
    index.replace(inventory("r2", 1, stored("ab")))
    index.replace(inventory("r3", 1, stored("acd")))
    index.replace(inventory("r4", 1, stored("bcd")))
    assert index.match(TENANT, chain("abcde")) == {"r1": 4, "r2": 2, "r3": 1}
    assert index.match(TENANT, chain("xabcd")) == {}
    assert index.match(TENANT, ()) == {}
    assert index.num_blocks == 12


def test_an_index_of_nobody_matches_nothing(index: MemoryIndex) -> None:
    assert index.match(TENANT, chain("abc")) == {}
    assert index.match(TENANT, ()) == {}
    assert index.registrations == {}
    assert index.registration("r1") is None


def test_a_replica_that_holds_nothing_is_known_and_never_matches(index: MemoryIndex) -> None:
    index.register(registration("r1"))
    assert index.registrations == {"r1": registration("r1")}
    assert index.match(TENANT, chain("a")) == {}


def test_events_of_a_batch_apply_in_order(index: MemoryIndex) -> None:
    index.register(registration("r1"))
    index.apply(batch("r1", 1, stored("ab"), removed("b"), stored("bc"), removed("c")))
    assert index.match(TENANT, chain("abc")) == {"r1": 2}
    index.apply(batch("r1", 2, BlocksCleared(), stored("a")))
    assert index.match(TENANT, chain("abc")) == {"r1": 1}
    assert index.num_blocks == 1


def test_removing_or_storing_a_block_twice_changes_nothing(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 1, stored("ab")))
    index.apply(batch("r1", 2, stored("ab"), removed("b"), removed("bx")))
    assert index.match(TENANT, chain("ab")) == {"r1": 1}
    assert index.num_blocks == 1


def test_a_batch_that_was_applied_before_changes_nothing(index: MemoryIndex) -> None:
    index.register(registration("r1"))
    first = batch("r1", 1, stored("a"))
    index.apply(first)
    index.apply(batch("r1", 2, removed("a")))
    index.apply(first)
    index.apply(batch("r1", 0, stored("a")))
    index.apply(batch("r1", -5, stored("a")))
    assert index.match(TENANT, chain("a")) == {}


@pytest.mark.parametrize("seq", [3, 2**70])
def test_a_batch_after_a_gap_is_refused_and_changes_nothing(index: MemoryIndex, seq: int) -> None:
    index.replace(inventory("r1", 1, stored("a")))
    with pytest.raises(SequenceGapError) as caught:
        index.apply(batch("r1", seq, BlocksCleared()))
    assert (caught.value.replica_id, caught.value.expected_seq, caught.value.seq) == ("r1", 2, seq)
    assert index.match(TENANT, chain("a")) == {"r1": 1}
    index.apply(batch("r1", 2, stored("b")))
    assert index.match(TENANT, chain("ab")) == {"r1": 2}


def test_what_an_earlier_epoch_said_is_void_at_once_and_its_late_words_are_refused(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 7, stored("ab"), epoch=3))
    index.register(registration("r1", 5))
    assert index.match(TENANT, chain("ab")) == {}
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
    assert index.match(TENANT, chain("b")) == {"r1": 1}


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
    index.replace(inventory("r1", 9, stored("bd"), stored("e", OTHER_TENANT)))
    assert by_value(index) == {"r1": (1, 9, {TENANT: set(chain("bd")), OTHER_TENANT: set(chain("e"))})}
    index.apply(batch("r1", 10, stored("f")))
    assert index.match(TENANT, chain("fa")) == {"r1": 1}


def test_an_inventory_older_than_what_was_applied_changes_nothing(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 4, stored("a")))
    index.apply(batch("r1", 5, stored("b")))
    index.replace(inventory("r1", 4, stored("x")))
    assert by_value(index) == {"r1": (1, 5, {TENANT: set(chain("ab"))})}


def test_registering_the_same_epoch_again_keeps_what_was_said_in_it(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 2, stored("ab")))
    index.register(registration("r1"))
    assert index.match(TENANT, chain("ab")) == {"r1": 2}
    assert index.registration("r1") == registration("r1")


def test_a_dropped_replica_no_longer_matches_and_others_still_do(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 1, stored("ab")))
    index.replace(inventory("r2", 1, stored("abc")))
    index.drop("r1")
    index.drop("nobody")
    assert index.match(TENANT, chain("abc")) == {"r2": 3}
    assert index.registrations == {"r2": registration("r2")}
    assert index.num_blocks == 3


def test_nothing_of_one_tenant_is_found_under_another(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 1, stored("ab"), stored("a", OTHER_TENANT)))
    assert index.match(TENANT, chain("ab")) == {"r1": 2}
    assert index.match(OTHER_TENANT, chain("ab")) == {"r1": 1}
    index.apply(batch("r1", 2, removed("a")))
    assert index.match(OTHER_TENANT, chain("a")) == {"r1": 1}
    assert index.match(b"nobody's", chain("a")) == {}


def test_a_purge_takes_one_tenant_from_all_replicas_and_its_digest_with_it(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 1, stored("abc"), stored("x", OTHER_TENANT)))
    index.replace(inventory("r2", 1, stored("ab")))
    assert index.num_tenant_blocks(TENANT) == 3
    index.purge(TENANT)
    index.purge(b"nobody's")
    assert index.num_tenant_blocks(TENANT) == 0
    assert index.match(TENANT, chain("ab")) == {}
    assert index.match(OTHER_TENANT, chain("x")) == {"r1": 1}
    assert (index.digest("r1"), index.digest("r2")) == (Digest.of(chain("x")), Digest())
    index.apply(batch("r2", 2, stored("b")))
    assert index.match(TENANT, chain("ba")) == {"r2": 1}


def test_a_digest_is_of_all_that_a_replica_holds_of_every_tenant(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 1, stored("ab"), stored("c", OTHER_TENANT)))
    index.apply(batch("r1", 2, stored("bd"), removed("ax"), removed("d", OTHER_TENANT)))
    assert index.digest("r1") == Digest.of(chain("bcd"))
    index.apply(batch("r1", 3, BlocksCleared()))
    assert index.digest("r1") == Digest()
    for ask in (index.digest, index.seq, index.is_known_in_full):
        with pytest.raises(UnknownReplicaError):
            ask("nobody")


def test_the_sizes_count_what_live_replicas_hold(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 1, stored("abc"), stored("x", OTHER_TENANT)))
    index.replace(inventory("r2", 1, stored("cd")))
    index.replace(inventory("r3", 1, stored("efgh")))
    index.drop("r3")
    index.apply(batch("r1", 2, removed("x", OTHER_TENANT)))
    sizes = index.tenant_sizes()
    assert {tenant: (size.num_blocks, size.num_copies) for tenant, size in sizes.items()} == {TENANT: (4, 5)}
    # At least the hashes themselves, each an object of its own.
    assert sizes[TENANT].memory_bytes > 4 * 16


@pytest.mark.usefixtures("sweeps_two_blocks_per_call")
def test_what_a_departed_replica_held_is_never_a_newcomers(index: MemoryIndex) -> None:
    for name in ("r1", "r2", "r3"):
        index.replace(inventory(name, 1, stored(NAMES)))
    for name in ("r1", "r2", "r3"):
        index.drop(name)
    assert index.match(TENANT, chain(NAMES)) == {}
    for number in range(10):
        index.register(registration(f"new{number}"))
        assert index.match(TENANT, chain(NAMES)) == {}
        index.check_invariants()
    assert index.num_tenant_blocks(TENANT) == 0


@pytest.mark.usefixtures("sweeps_two_blocks_per_call")
@pytest.mark.parametrize("way", ["inventory", "batch", "clear"])
def test_a_replica_that_comes_and_goes_leaves_a_bounded_part_of_what_it_held(index: MemoryIndex, way: str) -> None:
    for life in range(50):
        held = one_by_one(range(20), f"life {life} block")
        if way == "clear":
            index.register(registration("r1"))
            index.apply(batch("r1", life + 1, BlocksCleared(), held))
        elif way == "batch":
            index.register(registration("r1", life))
            index.apply(batch("r1", 1, held, epoch=life))
        else:
            index.replace(inventory("r1", 1, held, epoch=life))
        # Of the lives before, as much again as two of them: a round is begun when it retires, and takes so long.
        assert index._holders._num_kept <= 20 + 40
        assert index._holders._num_bits <= 5
        index.check_invariants()


def test_blocks_that_come_and_go_leave_no_more_behind_than_there_are(index: MemoryIndex) -> None:
    index.register(registration("r1"))
    for number in range(2_000):
        events = [one_by_one(range(number, number + 1))]
        gone = [removed([f"block {number - 100}"])] if number >= 100 else []
        index.apply(batch("r1", number + 1, *events, *gone))
        assert index._holders._num_kept <= 2 * 100 + 2
    assert index.num_blocks == 100


def test_emptied_and_purged_partitions_are_forgotten(index: MemoryIndex) -> None:
    index.register(registration("r1"))
    for number in range(50):
        tenant = b"tenant %d" % number
        index.apply(batch("r1", 2 * number + 1, stored("ab", tenant)))
        if number % 2:
            index.purge(tenant)
            index.apply(batch("r1", 2 * number + 2))
        else:
            index.apply(batch("r1", 2 * number + 2, removed("ab", tenant)))
    assert len(index._holders._partitions) <= 2
    assert index._holders._dropped == []


def test_bits_are_swept_before_there_are_too_many(index: MemoryIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "SWEPT_BLOCKS_PER_CALL", 1)
    monkeypatch.setattr(holders, "SWEPT_BLOCKS_PER_CHANGE", 0)
    monkeypatch.setattr(holders, "RETIRED_BITS_MAX", 4)
    index.replace(inventory("r2", 1, one_by_one(range(500))))
    for seq in range(1, 200):
        index.replace(inventory("r1", seq, stored("ab")))
        index.check_invariants()
        assert index._holders._num_bits <= 8
    assert index.match(TENANT, chain("ab")) == {"r1": 2}


def test_a_hundred_replicas_are_told_apart(index: MemoryIndex) -> None:
    names = [f"block {number}" for number in range(100)]
    for number in range(100):
        index.replace(inventory(f"r{number}", 1, stored(names[: number + 1])))
    assert index.match(TENANT, chain(names)) == {f"r{number}": number + 1 for number in range(100)}


@pytest.fixture
def steps_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "BLOCKS_PER_STEP", 2)


@pytest.mark.usefixtures("steps_of_two")
def test_until_its_last_step_an_inventory_does_not_count_and_what_was_said_before_does(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 1, stored("ab")))
    steps = index.replace_steps(inventory("r1", 2, stored("abc"), stored("de")))
    for _ in steps:
        assert index.match(TENANT, chain("abcde")) == {"r1": 2}
        index.check_invariants()
    assert index.match(TENANT, chain("abcde")) == {"r1": 5}
    assert index.seq("r1") == 2


@pytest.mark.usefixtures("steps_of_two")
def test_a_large_inventory_takes_many_steps_and_many_small_groups_few(index: MemoryIndex) -> None:
    assert len(list(index.replace_steps(inventory("r1", 1, one_by_one(range(20)))))) == 10
    small = [stored([f"{number}"]) for number in range(20)]
    assert len(list(index.replace_steps(inventory("r1", 2, *small)))) == 10


@pytest.mark.usefixtures("steps_of_two")
@pytest.mark.parametrize("meanwhile", ["drop", "epoch", "newer", "abandoned"])
def test_an_inventory_that_was_overtaken_between_its_steps_changes_nothing(index: MemoryIndex, meanwhile: str) -> None:
    index.replace(inventory("r1", 1, stored("a")))
    steps = index.replace_steps(inventory("r1", 2, stored("bcdef")))
    next(steps)
    if meanwhile == "drop":
        index.drop("r1")
    elif meanwhile == "epoch":
        index.register(registration("r1", 2))
    elif meanwhile == "newer":
        index.replace(inventory("r1", 3, stored("a")))
    else:
        steps.close()
    for _ in steps:
        index.check_invariants()
    assert index.match(TENANT, chain("b")) == {}
    assert index.match(TENANT, chain("a")) == ({} if meanwhile in ("drop", "epoch") else {"r1": 1})
    if meanwhile in ("newer", "abandoned"):
        index.replace(inventory("r1", 4, stored("b")))
        assert index.match(TENANT, chain("b")) == {"r1": 1}


def test_used_chains_outlive_a_scan_of_chains_that_nobody_asks_for() -> None:
    index = MemoryIndex(blocks_max=100)
    used = [f"used {number}" for number in range(20)]
    index.register(registration("r1"))
    index.apply(batch("r1", 1, stored(used)))
    for number in range(300):
        assert index.match(TENANT, chain(used)) == {"r1": 20}
        index.apply(batch("r1", 2 + number, one_by_one(range(10), f"scan {number} block")))
        index.check_invariants()
    assert index.num_blocks == 100
    assert index.num_evicted_blocks == 20 + 3_000 - 100


def test_chains_that_nobody_asks_for_give_way_to_a_scan() -> None:
    # The negative control of the above: the same, without a match.
    index = MemoryIndex(blocks_max=100)
    index.register(registration("r1"))
    index.apply(batch("r1", 1, one_by_one(range(20), "unused")))
    for number in range(300):
        index.apply(batch("r1", 2 + number, one_by_one(range(10), f"scan {number} block")))
    assert index.match(TENANT, chain(["unused 0"])) == {}


def test_where_every_block_is_in_use_one_gives_way_within_a_bounded_number_of_them() -> None:
    index = MemoryIndex(blocks_max=1_000)
    names = [f"block {number}" for number in range(1_000)]
    index.replace(inventory("r1", 1, stored(names)))
    index.match(TENANT, chain(names))
    index.apply(batch("r1", 2, stored("a")))
    assert index.num_evicted_blocks == 1
    marks = [held_by & 1 for held_by in index._holders._partitions[TENANT].holders.values()]
    assert marks.count(0) == holders.SECOND_CHANCES_MAX + 1


def test_a_replica_is_known_in_part_until_its_next_inventory_and_others_are_not() -> None:
    index = MemoryIndex(blocks_max=4)
    index.replace(inventory("r1", 1, stored("ab")))
    index.replace(inventory("r2", 1, stored("cd")))
    assert index.is_whole
    index.apply(batch("r2", 2, stored("e")))
    assert (index.is_known_in_full("r1"), index.is_known_in_full("r2")) == (False, True)
    assert not index.is_whole
    # What is not kept is not found, and is nobody's claim.
    assert index.match(TENANT, chain("a")) == {}
    assert index.digest("r1") == Digest.of(chain("b"))
    index.replace(inventory("r1", 2, stored("b")))
    assert index.is_whole
    index.check_invariants()


def test_what_a_store_answered_is_learnt_of_replicas_that_are_known_in_part_only() -> None:
    index = MemoryIndex(blocks_max=4)
    index.replace(inventory("r1", 1, stored("abcd")))
    index.replace(inventory("r2", 1, stored("e")))
    index.learn(TENANT, chain("axy"), {"r1": 1, "r2": 2, "nobody": 3})
    assert index.match(TENANT, chain("ax")) == {"r1": 1}
    index.check_invariants()


def test_an_index_without_a_bound_evicts_nothing_and_leaves_no_marks(index: MemoryIndex) -> None:
    index.replace(inventory("r1", 1, one_by_one(range(3_000))))
    assert index.match(TENANT, chain([f"block {number}" for number in range(3_000)])) == {"r1": 3_000}
    assert index.num_evicted_blocks == 0
    assert index.is_whole
    assert not any(held_by & 1 for held_by in index._holders._partitions[TENANT].holders.values())


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda index: index._holders._partitions[TENANT].holders.update({b"x" * 16: 2}),
        lambda index: index._holders._partitions[TENANT].holders.update({chain("a")[0]: 1 << 40}),
        lambda index: index._holders._partitions[TENANT].holders.update({chain("a")[0]: 0}),
        lambda index: index._holders._partitions[TENANT].ring.append(b"x" * 16),
        lambda index: index._holders._partitions[TENANT].tallies.clear(),
        lambda index: index._holders._partitions.clear(),
        lambda index: index._holders._tallies[index._live_mask].add(1, 0),
        lambda index: index._holders._free.append(index._live_mask),
        lambda index: setattr(index._holders, "_num_kept", 2),
        lambda index: setattr(index._holders, "_blocks_max", 2),
        lambda index: setattr(index._holders, "_admitted", 0),
        lambda index: setattr(index._holders, "_partial", 1 << 40),
        lambda index: setattr(index, "_live_mask", 0),
        lambda index: index._replica_ids.clear(),
        lambda index: index._replicas.update(r2=index._replicas["r1"]),
    ],
)
def test_a_corrupt_index_fails_its_invariants(corrupt: Callable[[MemoryIndex], object]) -> None:
    index = MemoryIndex()
    index.replace(inventory("r1", 1, stored("abc")))
    index.check_invariants()
    corrupt(index)
    with pytest.raises(AssertionError):
        index.check_invariants()
