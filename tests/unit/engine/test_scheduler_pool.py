"""Scheduler and block pool under random arrivals, cancellations and clears, without tensors.

A fake forward pass writes, for every token, what it depends on: its own id, its position and its predecessors. So a
wrong block, position or copy shows as a wrong value, and every invariant is checked after every step.
"""

import hashlib
import itertools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_index.blocks import BlockChain, PromptBlocks
from cache_index.events import BlocksCleared, BlocksRemoved, BlocksStored, Digest
from cache_index.identity import chain_root
from cache_index.messages import SamplingParams
from replicas.errors import PoolExhaustedError
from replicas.kv.block_pool import BlockPool
from replicas.scheduler import Scheduler, Step
from replicas.sequence import Sequence, SequenceState

BLOCK_SIZE = 4
NUM_BLOCKS = 14
MAX_LEN = NUM_BLOCKS * BLOCK_SIZE
TENANTS = (b"tenant one......", b"tenant two......")
# The first tenant has a scope of its own besides, split off by a salt.
SCOPES = (*TENANTS, TENANTS[0] + b"salt............")


def prompt_of(token_ids: list[int], scope: bytes = SCOPES[0]) -> PromptBlocks:
    fingerprint = b"f" * 16
    root = chain_root(fingerprint, scope)
    return PromptBlocks.build(token_ids, block_size=BLOCK_SIZE, root=root, fingerprint=fingerprint, scope=scope)


def sequence_of(request_id: str, prompt: PromptBlocks, max_output_tokens: int) -> Sequence:
    return Sequence(request_id, BlockChain(prompt), SamplingParams(), prompt.num_tokens, max_output_tokens)


def value_of(chain: BlockChain, position: int) -> bytes:
    """What a right forward pass writes for a token: it depends on the scope and on every token up to it."""
    return hashlib.sha256(chain.root + chain.token_ids[: position + 1].tobytes()).digest()


class Memory:
    """The pool's slots; checks before it writes that what the token attends to is what it should be."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], bytes] = {}

    def run(self, step: Step, pool: BlockPool) -> None:
        for copy in step.copies:
            for offset in range(BLOCK_SIZE):
                self.slots[copy.target, offset] = self.slots.get((copy.source, offset), b"never written")
        for part in step.scheduled:
            chain, table = part.sequence.chain, part.sequence.block_table
            for position in range(part.start, part.start + part.num_tokens):
                assert pool.is_writable(table[position // BLOCK_SIZE]), "a shared block is never written"
                self.slots[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = value_of(chain, position)
            for position in range(part.start + part.num_tokens):
                slot = (table[position // BLOCK_SIZE], position % BLOCK_SIZE)
                assert self.slots[slot] == value_of(chain, position), "every token sees its own prefix and no other"


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals with shared prefixes in two scopes, cancellations, steps and clears over a tiny pool."""

    @initialize(budget=st.integers(3, 40), max_num_seqs=st.integers(1, 5))
    def start(self, budget: int, max_num_seqs: int) -> None:
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.scheduler = Scheduler(self.pool, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
        self.memory = Memory()
        self.ids = itertools.count()
        self.published: dict[bytes, bytes] = {}
        self.max_num_seqs = max_num_seqs

    @rule(
        parts=st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=4),
        extra=st.lists(st.integers(0, 2), max_size=6),
        num_output_tokens=st.integers(1, 12),
        scope=st.sampled_from(SCOPES),
    )
    def arrive(self, parts: list[int], extra: list[int], num_output_tokens: int, scope: bytes) -> None:
        token_ids = [token for part in parts for token in [part] * BLOCK_SIZE] + extra
        if len(token_ids) + num_output_tokens <= MAX_LEN:
            self.scheduler.add(sequence_of(str(next(self.ids)), prompt_of(token_ids, scope), num_output_tokens))

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.has_work)
    def cancel(self, data: st.DataObject) -> None:
        alive = [*self.scheduler.running, *self.scheduler.waiting]
        self.scheduler.finish(data.draw(st.sampled_from(alive)))

    @rule(token=st.integers(0, 2))
    @precondition(lambda self: self.scheduler.has_work)
    def step(self, token: int) -> None:
        step = self.scheduler.schedule()
        assert step.scheduled, "while there is work, every step does some of it"
        assert sum(part.num_tokens for part in step.scheduled) <= self.scheduler.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.max_num_seqs
        self.memory.run(step, self.pool)
        self.scheduler.commit(step)
        for part in step.scheduled:
            sequence = part.sequence
            if part.samples:
                sequence.chain.append(token)
                if sequence.num_output_tokens >= sequence.max_output_tokens:
                    self.scheduler.finish(sequence)

    @rule()
    def clear(self) -> None:
        self.pool.clear()

    @rule(tenant=st.sampled_from(TENANTS))
    def purge(self, tenant: bytes) -> None:
        cached = [block_hash for block_hash, owner in self._inventory().items() if owner == tenant]
        others = {block_hash: owner for block_hash, owner in self._inventory().items() if owner != tenant}
        assert self.pool.purge(tenant) == len(cached)
        assert self._inventory() == others
        assert self.pool.digest == Digest.of(others)

    def _inventory(self) -> dict[bytes, bytes]:
        return {block_hash: stored.tenant for stored in self.pool.inventory() for block_hash in stored.block_hashes}

    @invariant()
    def everything_agrees(self) -> None:
        self.scheduler.check_invariants()
        for event in self.pool.drain_events():
            match event:
                case BlocksStored(tenant, hashes):
                    self.published.update(dict.fromkeys(hashes, tenant))
                case BlocksRemoved(tenant, hashes):
                    for block_hash in hashes:
                        assert self.published.pop(block_hash) == tenant
                case BlocksCleared():
                    self.published.clear()
        assert self.published == self._inventory(), "who follows the events knows the inventory"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2_000):
            if not self.scheduler.has_work:
                break
            self.step(0)
        assert not self.scheduler.has_work, "everything that was accepted ends"
        assert self.pool.size().num_used_blocks == 0, "no block leaks"


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def run_to_end(scheduler: Scheduler, sequence: Sequence) -> None:
    scheduler.add(sequence)
    while sequence.state is not SequenceState.FINISHED:
        step = scheduler.schedule()
        scheduler.commit(step)
        if step.scheduled[0].samples:
            sequence.chain.append(9)
            if sequence.num_output_tokens >= sequence.max_output_tokens:
                scheduler.finish(sequence)


def make_scheduler(num_blocks: int = NUM_BLOCKS) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, BLOCK_SIZE), max_num_batched_tokens=64, max_num_seqs=8)


def test_only_full_blocks_are_shared() -> None:
    scheduler = make_scheduler()
    run_to_end(scheduler, sequence_of("a", prompt_of([1] * 7), 1))
    longer = BlockChain(prompt_of([1] * 20))
    assert scheduler.pool.match(longer).num_blocks == 1


def test_an_evicted_block_is_not_matched_and_the_deepest_goes_first() -> None:
    scheduler = make_scheduler(num_blocks=4)
    run_to_end(scheduler, sequence_of("a", prompt_of([1] * 16), 1))
    chain = BlockChain(prompt_of([1] * 16))
    assert scheduler.pool.match(chain).num_blocks == 4
    scheduler.pool.allocate()
    assert scheduler.pool.match(chain).num_blocks == 3, "a block with a cached child stays"
    assert scheduler.pool.num_evicted_blocks == 1


def test_the_least_recently_used_prefix_is_evicted() -> None:
    scheduler = make_scheduler(num_blocks=4)
    old, new = prompt_of([1] * 8), prompt_of([2] * 8)
    run_to_end(scheduler, sequence_of("a", old, 1))
    run_to_end(scheduler, sequence_of("b", new, 1))
    pool = scheduler.pool
    match = pool.match(BlockChain(old)).block_ids
    pool.attach(match)
    pool.release(match)
    pool.allocate()
    assert (pool.match(BlockChain(old)).num_blocks, pool.match(BlockChain(new)).num_blocks) == (2, 1)


def test_a_referenced_block_is_never_evicted_and_a_full_pool_says_so() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    pool.allocate()
    pool.allocate()
    with pytest.raises(PoolExhaustedError):
        pool.allocate()


def test_an_equal_block_that_two_sequences_computed_is_kept_once() -> None:
    scheduler = make_scheduler()
    twins = [sequence_of(name, prompt_of([1] * 8 + [5]), 2) for name in "ab"]
    for twin in twins:
        scheduler.add(twin)
    step = scheduler.schedule()
    assert [part.start for part in step.scheduled] == [0, 0], "neither can reuse what is not computed yet"
    scheduler.commit(step)
    assert twins[0].block_table[:2] == twins[1].block_table[:2]
    assert twins[0].block_table[2] != twins[1].block_table[2]
    scheduler.pool.check_invariants()


def test_releasing_a_block_more_often_than_it_was_taken_is_our_own_mistake() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    block_id = pool.allocate()
    pool.release([block_id])
    with pytest.raises(AssertionError, match="more often"):
        pool.release([block_id])


def test_a_whole_prompt_hit_in_a_full_pool_computes_its_last_block_instead_of_copying_it() -> None:
    scheduler = make_scheduler(num_blocks=4)
    prompt = prompt_of([1] * 16)
    run_to_end(scheduler, sequence_of("a", prompt, 1))
    again = sequence_of("b", prompt, 1)
    scheduler.add(again)
    step = scheduler.schedule()
    assert not step.copies
    assert [(part.start, part.num_tokens) for part in step.scheduled] == [(12, 4)]
    assert again.cached_tokens == 12
