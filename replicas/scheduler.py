"""Which sequences run in the next step, and how many tokens of each.

Every step has a token budget. Running decodes come first, one token each, then prefill chunks: those already begun,
then the waiting ones in order of arrival. A waiting sequence looks for its cached prefix only when it is admitted, so
that it finds what ran before it.

    waiting ──admit──▶ running ──▶ finished
       ▲                  │
       └─────preempt──────┘   the newest, when the pool has no block left; its full blocks stay cached
"""

from collections import deque
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass

from .errors import PoolExhaustedError
from .kv.block_pool import BlockPool
from .sequence import Sequence, SequenceState

__all__ = ["BlockCopy", "ScheduledSequence", "Scheduler", "Step"]


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence's share of a step: its next `num_tokens` tokens, from position `start`."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's last token, so that its logits give the next one."""
        return self.start + self.num_tokens == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one block's keys and values before the step runs."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one step runs: decodes before prefills, and the copies to make first."""

    scheduled: ReadOnly[ScheduledSequence]
    copies: ReadOnly[BlockCopy]


class Scheduler:
    """Owns the queues and, through the pool, every block that a sequence holds. The engine's thread owns it."""

    def __init__(
        self, pool: BlockPool, *, max_num_batched_tokens: int, max_num_seqs: int, enable_prefix_caching: bool = True
    ) -> None:
        self.pool = pool
        self.max_num_batched_tokens = max_num_batched_tokens
        # A step must be able to run one token of every running sequence, or the last ones would starve.
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.enable_prefix_caching = enable_prefix_caching
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._copies: list[BlockCopy] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. That it can fit into the pool at all is the engine's check."""
        assert sequence.state is SequenceState.WAITING
        self.waiting.append(sequence)

    def schedule(self) -> Step:
        """Choose the next step's work and take the blocks that it writes to; empty only when there is no work."""
        self._copies = []
        budget = self.max_num_batched_tokens
        num_preemptions = self.num_preemptions
        scheduled: list[ScheduledSequence] = []
        for is_decode in (True, False):
            # Over a copy: making room may preempt members of `running`, later ones of this very list included.
            for sequence in list(self.running):
                if (sequence.num_uncomputed == 1) is not is_decode or sequence.state is not SequenceState.RUNNING:
                    continue
                num_tokens = min(sequence.num_uncomputed, budget)
                if num_tokens and self._make_room(sequence, num_tokens, scheduled):
                    scheduled.append(ScheduledSequence(sequence, sequence.num_computed, num_tokens))
                    budget -= num_tokens
        # Who was just preempted must not come back in the same step, to be preempted again in the next.
        may_admit = self.num_preemptions == num_preemptions
        while may_admit and budget and self.waiting and len(self.running) < self.max_num_seqs:
            admitted = self._admit(self.waiting[0], budget)
            if admitted is None:
                break
            self.waiting.popleft()
            scheduled.append(admitted)
            budget -= admitted.num_tokens
        return Step(scheduled, self._copies)

    def commit(self, step: Step) -> None:
        """After the step ran: its tokens are computed, and blocks that became full can be matched."""
        for part in step.scheduled:
            sequence = part.sequence
            sequence.num_computed += part.num_tokens
            if self.enable_prefix_caching:
                self._commit_full_blocks(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence in whatever state it is, and give its blocks back."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        self._release(sequence)
        sequence.state = SequenceState.FINISHED

    def check_invariants(self, pinned: ReadOnly[int] = ()) -> None:
        """Assert that the pool's counts are exactly the running sequences' tables and `pinned`; for tests."""
        self.pool.check_invariants()
        held = [*pinned, *(block_id for sequence in self.running for block_id in sequence.block_table)]
        assert len(set(held)) == self.pool.size().num_used_blocks, "blocks in use are those in a block table"
        assert all(not sequence.block_table for sequence in self.waiting), "who waits holds nothing"
        for sequence in self.running:
            assert sequence.num_computed <= len(sequence.block_table) * self.pool.block_size
            assert sequence.num_computed < sequence.num_tokens, "the last token is never computed before it is fed"

    def _admit(self, sequence: Sequence, budget: int) -> ScheduledSequence | None:
        """Attach the cached prefix and take blocks for the first chunk; None, nothing taken, where they do not fit."""
        block_size = self.pool.block_size
        match = self.pool.match(sequence.chain).block_ids if self.enable_prefix_caching else ()
        if len(match) * block_size < sequence.num_tokens:
            return self._admit_after(sequence, match, None, budget)
        # The whole prompt is cached. Its last token is still computed, for its logits, in a copy of its block.
        admitted = self._admit_after(sequence, match[:-1], match[-1], budget)
        if admitted is None and not self.running:
            # Nothing runs that could make room, so the copy's source is what is missing: compute that block instead.
            admitted = self._admit_after(sequence, match[:-1], None, budget)
        return admitted

    def _admit_after(
        self, sequence: Sequence, shared: tuple[int, ...], copied: int | None, budget: int
    ) -> ScheduledSequence | None:
        """Admit behind the cached blocks `shared` and a copy of the cached block `copied`."""
        block_size = self.pool.block_size
        held = shared if copied is None else (*shared, copied)
        num_cached = min(len(held) * block_size, sequence.num_tokens - 1)
        num_tokens = min(sequence.num_tokens - num_cached, budget)
        # Held before anything is allocated, so that making room can't evict what was just matched.
        self.pool.attach(held)
        own: list[int] = []
        try:
            for _ in range(_num_blocks(num_cached + num_tokens, block_size) - len(shared)):
                own.append(self.pool.allocate())  # noqa: PERF401 - what was taken before a failure is given back
        except PoolExhaustedError:
            self.pool.release(own)
            self.pool.release(held)
            return None
        if copied is not None:
            # Copies run in order and before anything is written, so the source may be evicted and reused from here on.
            self._copies.append(BlockCopy(source=copied, target=own[0]))
            self.pool.release((copied,))
        sequence.block_table = [*shared, *own]
        sequence.num_committed = len(shared)
        sequence.num_computed = num_cached
        sequence.can_commit = True
        if sequence.cached_tokens is None:
            sequence.cached_tokens = num_cached
        sequence.state = SequenceState.RUNNING
        self.running.append(sequence)
        return ScheduledSequence(sequence, num_cached, num_tokens)

    def _make_room(self, sequence: Sequence, num_tokens: int, scheduled: list[ScheduledSequence]) -> bool:
        """Take the blocks for the next `num_tokens`, preempting the newest sequences where necessary.

        False where the sequence itself had to go.
        """
        needed = _num_blocks(sequence.num_computed + num_tokens, self.pool.block_size)
        while len(sequence.block_table) < needed:
            try:
                sequence.block_table.append(self.pool.allocate())
            except PoolExhaustedError:
                newest = self.running[-1]
                self._preempt(newest)
                scheduled[:] = [part for part in scheduled if part.sequence is not newest]
                if newest is sequence:
                    return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.state = SequenceState.WAITING
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = 0
        sequence.num_committed = 0

    def _commit_full_blocks(self, sequence: Sequence) -> None:
        while sequence.can_commit and sequence.num_committed < sequence.num_computed // self.pool.block_size:
            index = sequence.num_committed
            parent_id = sequence.block_table[index - 1] if index else None
            block_id = self.pool.commit(sequence.chain, index, sequence.block_table[index], parent_id)
            if block_id is None:
                sequence.can_commit = False
                return
            sequence.block_table[index] = block_id
            sequence.num_committed += 1


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
