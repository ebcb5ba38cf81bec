"""The engine without its thread: what one step does, to whom its tokens go, and what happens when it fails.

Everything here runs on one thread, the engine's, so nothing needs a lock. Each step: schedule, copy blocks, run the
model, commit the blocks that became full, sample, hand out chunks.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from cache_index.blocks import BlockChain, BlockHash
from cache_index.events import Event
from cache_index.messages import FinishReason, GenerationChunk, Refusal, RefusalCode

from .completion import OnChunk
from .errors import RequestRefusedError
from .forward.attention import Span
from .forward.runner import ModelRunner
from .kv.block_pool import BlockPool
from .sampling import Sampler, sample
from .scheduler import ScheduledSequence, Scheduler, Step
from .sequence import Sequence
from .stats import EngineStats
from .text_stream import TextStream

__all__ = ["EngineCore", "Job", "SavedPrefix"]

logger = logging.getLogger(__name__)

# A fault that persists is the process's, not a request's: then the replica has to be replaced.
FAILED_STEPS_MAX = 3


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """A prefix that stays cached until it is released: its full blocks, in order. `num_tokens` counts those in them.

    last_hash: the hash of the last block, which tells this prefix from one that later lies in the same blocks.
    """

    block_ids: tuple[int, ...]
    num_tokens: int
    last_hash: BlockHash | None


@dataclass(slots=True, eq=False)
class Job:
    """A request with what the core needs besides its sequence."""

    sequence: Sequence
    sampler: Sampler
    text: TextStream
    on_chunk: OnChunk


class EngineCore:
    """Scheduler, pool and model of one replica, and the requests in them.

    on_removed: called once for each request that leaves, for whatever reason. on_events: told of stored and removed
    blocks; neither may block.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        *,
        replica_id: str,
        pinned_blocks_max: int,
        on_removed: Callable[[], None],
        on_events: Callable[[tuple[Event, ...]], None] | None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.pool: BlockPool = scheduler.pool
        self.stats = EngineStats(pool=self.pool.size())
        self._replica_id = replica_id
        self._pinned_blocks_max = pinned_blocks_max
        self._on_removed = on_removed
        self._on_events = on_events
        self._eos_token_ids = runner.model.eos_token_ids
        self._jobs: dict[str, Job] = {}
        self._pinned: set[SavedPrefix] = set()
        self._num_consecutive_failures = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def is_healthy(self) -> bool:
        """False once steps keep failing."""
        return self._num_consecutive_failures < FAILED_STEPS_MAX

    def add(self, job: Job) -> None:
        """Queue a request; one whose id is in flight already is refused."""
        request_id = job.sequence.request_id
        if request_id in self._jobs:
            self._on_removed()
            self._tell(job, self._refusal(RefusalCode.INVALID_REQUEST, f"request {request_id} is in flight already"))
            return
        self._jobs[request_id] = job
        self.scheduler.add(job.sequence)

    def cancel(self, request_id: str) -> None:
        """Drop a request and give its blocks back; unknown ones are ignored."""
        job = self._jobs.get(request_id)
        if job is not None:
            self._remove(job)
            self._update_stats()

    def refuse_all(self, message: str) -> None:
        """End every request with a refusal."""
        for job in list(self._jobs.values()):
            self._remove(job)
            self._tell(job, self._refusal(RefusalCode.INTERNAL, message))

    def abandon(self, message: str) -> None:
        """Tell every request that it is refused, and touch nothing else: for a fault after which no state is sound."""
        jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            self._on_removed()
            self._tell(job, self._refusal(RefusalCode.INTERNAL, message))

    def step(self) -> None:
        """Run one step. A fault in it refuses every request and clears the cache, and is not raised."""
        try:
            self._step()
            self._num_consecutive_failures = 0
        except Exception as error:
            # Half a step may have been written, so nothing computed so far can be trusted.
            logger.exception("a step failed; its requests are refused and the cache is cleared")
            self._num_consecutive_failures += 1
            self.refuse_all(f"a step of the model failed: {type(error).__name__}")
            for saved in list(self._pinned):
                self.unpin(saved)
            self.pool.clear()
            self.runner.kv.clear()
            self._update_stats(num_failed_steps=self.stats.num_failed_steps + 1)

    def pin(self, chain: BlockChain) -> SavedPrefix:
        """Hold the full blocks of a cached chain.

        Raises RequestRefusedError where they are not all cached, or saved prefixes would hold too much of the pool.
        """
        match = self.pool.match(chain)
        num_pinned = len(set(match.block_ids).union(*(saved.block_ids for saved in self._pinned)))
        if match.num_blocks < chain.num_blocks or num_pinned > self._pinned_blocks_max:
            raise RequestRefusedError(
                RefusalCode.OVERLOADED,
                f"a prefix of {chain.num_blocks} blocks can't be kept: saved prefixes may hold "
                f"{self._pinned_blocks_max} of the pool's {self.pool.num_blocks} blocks",
            )
        self.pool.attach(match.block_ids)
        last_hash = chain.block_hashes[-1] if chain.block_hashes else None
        saved = SavedPrefix(match.block_ids, match.num_blocks * self.pool.block_size, last_hash)
        if saved in self._pinned:
            self.pool.release(match.block_ids)  # One reference holds it, however often it is saved.
        self._pinned.add(saved)
        return saved

    def unpin(self, saved: SavedPrefix) -> None:
        """Give a saved prefix back; one that is not held is ignored."""
        if saved in self._pinned:
            self._pinned.remove(saved)
            self.pool.release(saved.block_ids)

    def flush_events(self) -> None:
        """Hand out what the pool stored and removed."""
        events = self.pool.drain_events()
        if events and self._on_events is not None:
            self._on_events(events)

    def check_invariants(self) -> None:
        """Assert that pool, scheduler and requests agree; for tests."""
        self.scheduler.check_invariants([block_id for saved in self._pinned for block_id in saved.block_ids])
        queued = {sequence.request_id for sequence in (*self.scheduler.running, *self.scheduler.waiting)}
        assert queued == set(self._jobs), "every request is in one queue"

    def _step(self) -> None:
        started_s = time.perf_counter()
        step = self.scheduler.schedule()
        for copy in step.copies:
            self.runner.copy_block(copy.source, copy.target)
        logits = self.runner.run([self._span(part) for part in step.scheduled])
        if bool(logits.isnan().any()):
            # An overflow, in 16-bit floats say. It is in somebody's blocks already, so the whole step is given up.
            raise FloatingPointError("the model computed what is not a number")
        self.scheduler.commit(step)
        jobs = [self._jobs[part.sequence.request_id] for part in step.scheduled if part.samples]
        token_ids = sample(logits, [job.sampler for job in jobs]) if jobs else []
        for job, token_id in zip(jobs, token_ids, strict=True):
            self._append(job, token_id)
        self._count(step, time.perf_counter() - started_s)

    def _span(self, part: ScheduledSequence) -> Span:
        sequence, block_size = part.sequence, self.pool.block_size
        end = part.start + part.num_tokens
        for block_id in sequence.block_table[part.start // block_size : -(-end // block_size)]:
            assert self.pool.is_writable(block_id), "a shared block is never written"
        token_ids = sequence.chain.token_ids[part.start : end]
        return Span(token_ids, part.start, sequence.block_table, wants_logits=part.samples)

    def _append(self, job: Job, token_id: int) -> None:
        sequence = job.sequence
        sequence.chain.append(token_id)
        is_eos = token_id in self._eos_token_ids and not sequence.sampling.ignore_eos
        is_full = sequence.num_output_tokens >= sequence.max_output_tokens
        try:
            text = "" if is_eos else job.text.push(token_id)
            if is_eos or is_full:
                text += job.text.flush()
        except Exception:
            # A decoder's fault on one answer's tokens: what the step computed for the others stands.
            logger.exception("request %s: its text can't be decoded, so it is refused", sequence.request_id)
            self._remove(job)
            self._tell(job, self._refusal(RefusalCode.INTERNAL, "the answer's tokens can't be turned into text"))
            return
        finish_reason = None
        if is_eos or job.text.stopped:
            finish_reason = FinishReason.STOP
        elif is_full:
            finish_reason = FinishReason.LENGTH
        if finish_reason is not None:
            self._remove(job)
        assert sequence.cached_tokens is not None, "it ran, so it was admitted"
        self._tell(job, GenerationChunk(self._replica_id, (token_id,), text, sequence.cached_tokens, finish_reason))

    def _tell(self, job: Job, message: GenerationChunk | Refusal) -> None:
        try:
            job.on_chunk(message)
        except Exception:
            # Its reader is gone, for instance with its event loop; that must not cost the others their step.
            logger.exception("request %s: its reader failed, so it is cancelled", job.sequence.request_id)
            self._remove(job)

    def _remove(self, job: Job) -> None:
        if self._jobs.get(job.sequence.request_id) is job:
            del self._jobs[job.sequence.request_id]
            self.scheduler.finish(job.sequence)
            self._on_removed()

    def _refusal(self, code: RefusalCode, message: str) -> Refusal:
        return Refusal(self._replica_id, code, message)

    def _count(self, step: Step, step_s: float) -> None:
        num_decoded = sum(part.sequence.num_output_tokens > 1 and part.num_tokens == 1 for part in step.scheduled)
        num_prefilled = sum(part.num_tokens for part in step.scheduled) - num_decoded
        old = self.stats
        rate = old.prefill_tokens_per_s
        # Shorter steps measure the overhead of a step rather than the speed of a prefill.
        if num_prefilled >= 64 and not num_decoded:
            measured = num_prefilled / step_s
            rate = measured if rate is None else 0.8 * rate + 0.2 * measured
        admitted = [part.sequence for part in step.scheduled if part.start == part.sequence.cached_tokens]
        self._update_stats(
            num_steps=old.num_steps + 1,
            num_prefilled_tokens=old.num_prefilled_tokens + num_prefilled,
            num_decoded_tokens=old.num_decoded_tokens + num_decoded,
            num_prompt_tokens=old.num_prompt_tokens + sum(sequence.num_prompt_tokens for sequence in admitted),
            num_cached_tokens=old.num_cached_tokens + sum(sequence.cached_tokens or 0 for sequence in admitted),
            prefill_tokens_per_s=rate,
        )

    def _update_stats(self, **changes: float | None) -> None:
        sequences = (*self.scheduler.running, *self.scheduler.waiting)
        # Replaced whole, so that readers on other threads see one consistent state without a lock.
        self.stats = replace(
            self.stats,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_pending_prefill_tokens=sum(s.num_uncomputed for s in sequences if s.num_uncomputed > 1),
            num_preemptions=self.scheduler.num_preemptions,
            num_evicted_blocks=self.pool.num_evicted_blocks,
            pool=self.pool.size(),
            **changes,  # type: ignore[arg-type]
        )
