"""The engine: a step loop on a thread of its own, usable without Ray.

    with Engine.load("HuggingFaceTB/SmolLM2-135M-Instruct") as engine:
        saved = engine.save_prefix(long_document)
        [answer] = engine.generate([long_document + question], SamplingParams(max_tokens=64, temperature=0))
        answer.text, answer.cached_tokens

Callers on any thread put commands into an inbox; only the engine's thread touches scheduler, pool, tensors and model, so
none of them needs a lock. Every step: schedule, copy blocks, run the model, commit full blocks, sample, hand out chunks.
"""

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

import torch

from cache_index.blocks import BlockChain, HashFunction, PromptBlocks
from cache_index.events import Event
from cache_index.identity import DIGEST_BYTES, chain_root
from cache_index.messages import (
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    Refusal,
    RefusalCode,
    SamplingParams,
)

from .errors import MemoryBudgetError, ReplicaError, RequestRefusedError
from .forward.attention import Span
from .forward.model import LoadedModel, kv_memory_bytes, load
from .forward.runner import ModelRunner
from .kv.block_pool import BlockPool, PoolSize
from .kv.tensors import num_blocks_for
from .sampling import Sampler, sample
from .scheduler import ScheduledSequence, Scheduler, Step
from .sequence import Sequence as EngineSequence
from .settings import EngineSettings, ModelSettings
from .text_stream import TextStream

__all__ = ["Completion", "Engine", "EngineStats", "SavedPrefix"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Prompt = str | Sequence[int] | PromptBlocks
OnChunk = Callable[[GenerationChunk | Refusal], None]

# A fault that persists is the process's, not a request's: then the replica has to be replaced.
FAILED_STEPS_MAX = 3
# The fewest tokens that a model is worth serving with, unless its own context is shorter.
CONTEXT_TOKENS_MIN = 256


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer, whole. cached_tokens: prompt tokens that were reused. ttft_s: from submission to the first token."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    cached_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the start, and the state after the last step."""

    num_running: int = 0
    num_waiting: int = 0
    num_pending_prefill_tokens: int = 0
    num_steps: int = 0
    num_prefilled_tokens: int = 0
    num_decoded_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_evicted_blocks: int = 0
    num_failed_steps: int = 0
    prefill_tokens_per_s: float | None = None
    pool: PoolSize = field(default_factory=lambda: PoolSize(0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """A prefix that stays cached until it is released: its full blocks, in order. `num_tokens` counts those in them."""

    block_ids: tuple[int, ...]
    num_tokens: int


@dataclass(slots=True)
class _Job:
    """A submitted request with what only the engine's thread needs of it."""

    sequence: EngineSequence
    sampler: Sampler
    text: TextStream
    on_chunk: OnChunk


class Engine:
    """Runs requests on one model copy. Public methods may be called from any thread; none waits for a step unless it
    returns a result. Not fork-safe.
    """

    def __init__(
        self,
        model: LoadedModel,
        settings: EngineSettings | None = None,
        *,
        num_blocks: int | None = None,
        replica_id: str = "local",
        on_events: Callable[[tuple[Event, ...]], None] | None = None,
        runner: Callable[[LoadedModel, int, int], ModelRunner] = ModelRunner,
        digest: HashFunction | None = None,
    ) -> None:
        """num_blocks: size of the pool in blocks instead of a memory budget. on_events: told of stored and removed
        blocks after each step, on the engine's thread; it must not block. runner, digest: for tests that watch logits
        or need colliding hashes.

        Raises MemoryBudgetError where the pool holds too few tokens to serve the model with.
        """
        self.settings = settings or EngineSettings()
        self.model = model
        self.replica_id = replica_id
        block_size = self.settings.block_size
        if self.settings.num_threads is not None:
            torch.set_num_threads(self.settings.num_threads)
        if num_blocks is None:
            num_blocks = num_blocks_for(kv_memory_bytes(self.settings, model.device), block_size, model.layout)
            self._check_pool_is_useful(num_blocks)
        self._pool = BlockPool(num_blocks, block_size)
        self._pinned_blocks_max = int(num_blocks * self.settings.pinned_share_max)
        # A sequence that fits into what pins leave free can always run, if need be alone.
        self.max_model_len = min(model.max_model_len, (num_blocks - self._pinned_blocks_max) * block_size)
        self._runner = runner(model, num_blocks, block_size)
        self._scheduler = Scheduler(
            self._pool,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            max_num_seqs=self.settings.max_num_seqs,
            enable_prefix_caching=self.settings.enable_prefix_caching,
        )
        self._on_events = on_events
        self._digest = digest
        self._local_scope = secrets.token_bytes(DIGEST_BYTES)
        self._fingerprint = model.identity.fingerprint()
        self._jobs: dict[EngineSequence, _Job] = {}
        self._by_request_id: dict[str, EngineSequence] = {}
        self._pinned: dict[SavedPrefix, None] = {}
        self._stats = EngineStats(pool=self._pool.size())
        self._num_consecutive_failures = 0

        # Guards the inbox, and the counts that bound it. Held for a few instructions only, never during a step.
        self._inbox_lock = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._num_unfinished = 0
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="warmroute-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, model: str | None = None, settings: EngineSettings | None = None) -> Self:
        """An engine for a hub id, a local folder or a GGUF file; None is the default model. Raises ModelError."""
        settings = settings or EngineSettings()
        return cls(load(ModelSettings(model=model), settings), settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def stats(self) -> EngineStats:
        """Counts and state as of the last step; takes no lock."""
        return self._stats

    @property
    def is_healthy(self) -> bool:
        """False once the thread has ended or steps keep failing; then the replica has to be replaced."""
        return self._thread.is_alive() and self._num_consecutive_failures < FAILED_STEPS_MAX

    def prompt(self, prompt: Prompt) -> PromptBlocks:
        """Text or token ids as blocks in this engine's own scope; blocks come back as they are.

        Text is tokenized with the tokenizer's default special tokens. A prompt that was hashed for another identity or
        block size is hashed again: it may match nothing, but it is answered right.
        """
        block_size = self.settings.block_size
        if isinstance(prompt, PromptBlocks):
            if prompt.fingerprint == self._fingerprint and prompt.block_size == block_size:
                return prompt
            root = chain_root(self._fingerprint, prompt.scope)
            return prompt.rebased(fingerprint=self._fingerprint, root=root, block_size=block_size)
        token_ids = self.model.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        return PromptBlocks.build(
            token_ids,
            block_size=block_size,
            root=chain_root(self._fingerprint, self._local_scope),
            fingerprint=self._fingerprint,
            scope=self._local_scope,
            digest=self._digest,
        )

    def submit(self, request: GenerationRequest, on_chunk: OnChunk) -> None:
        """Queue a request. `on_chunk` gets its chunks on the engine's thread and must not block.

        Raises RequestRefusedError where it can't be served: empty, too long, a token id outside the vocabulary, or too
        many requests waiting.
        """
        prompt = self.prompt(request.prompt)
        self._check(prompt)
        room = self.max_model_len - prompt.num_tokens + 1
        sampling = request.sampling
        sequence = EngineSequence(
            request_id=request.request_id,
            chain=BlockChain(prompt, self._digest),
            sampling=sampling,
            num_prompt_tokens=prompt.num_tokens,
            max_output_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
        )
        text = TextStream(self.model.tokenizer.backend_tokenizer, prompt.token_ids[-16:].tolist(), sampling.stop)
        job = _Job(sequence, Sampler(sampling, self.model.device), text, on_chunk)
        with self._inbox_lock:
            self._check_open()
            if self._num_unfinished >= self.settings.max_num_seqs + self.settings.max_num_waiting:
                raise RequestRefusedError(
                    RefusalCode.OVERLOADED, f"{self._num_unfinished} requests are running or waiting here already"
                )
            self._num_unfinished += 1
            self._inbox.append(lambda: self._add(job))
            self._inbox_lock.notify()

    def cancel(self, request_id: str) -> None:
        """Stop a request and free its blocks before the next step; unknown or finished requests are ignored."""
        with self._inbox_lock:
            if not self._closed:
                self._inbox.append(lambda: self._cancel(request_id))
                self._inbox_lock.notify()

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams | None = None) -> list[Completion]:
        """Answer prompts, all at once, and wait. Raises RequestRefusedError if one of them can't be served."""
        streams = [self.stream(prompt, sampling) for prompt in prompts]
        return [_gather(stream) for stream in streams]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> "ChunkStream":
        """Answer one prompt chunk by chunk. Leaving the iteration early cancels the request."""
        return ChunkStream(self, self.prompt(prompt), sampling or SamplingParams())

    def save_prefix(self, prefix: Prompt) -> SavedPrefix:
        """Compute a prefix where necessary and keep its full blocks cached until `release_prefix`.

        Raises RequestRefusedError where it can't be served, or where saved prefixes would hold more of the pool than
        `pinned_share_max`.
        """
        prompt = self.prompt(prefix)
        if not self.settings.enable_prefix_caching:
            raise RequestRefusedError(RefusalCode.INVALID_REQUEST, "prefix caching is off")
        self.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
        return self.call(lambda: self._pin(prompt))

    def release_prefix(self, saved: SavedPrefix) -> None:
        """Let a saved prefix age like any other. Releasing it again changes nothing."""
        self.call(lambda: self._unpin(saved))

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the engine's thread between two steps, and return its result.

        For what must see a consistent state; keep it short.
        """
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._inbox_lock:
            self._check_open()
            self._inbox.append(run)
            self._inbox_lock.notify()
        return future.result()

    @property
    def pool(self) -> BlockPool:
        """The pool, for functions run by `call`."""
        return self._pool

    @property
    def runner(self) -> ModelRunner:
        """The runner, for functions run by `call`."""
        return self._runner

    def flush_events(self) -> None:
        """Hand out pool events now; for functions run by `call`."""
        events = self._pool.drain_events()
        if events and self._on_events is not None:
            self._on_events(events)

    def check_invariants(self) -> None:
        """Assert that pool, scheduler and jobs agree; for tests."""

        def check() -> None:
            pinned = [block_id for saved in self._pinned for block_id in saved.block_ids]
            self._scheduler.check_invariants(pinned)
            assert (
                len(self._jobs)
                == len(self._by_request_id)
                == len(self._scheduler.running) + len(self._scheduler.waiting)
            )

        self.call(check)

    def close(self) -> None:
        """Refuse what is unfinished, end the thread and free the tensors. Closing again changes nothing."""
        with self._inbox_lock:
            self._closed = True
            self._inbox_lock.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- on the engine's thread ---

    def _loop(self) -> None:
        while True:
            with self._inbox_lock:
                while not (self._inbox or self._closed or self._scheduler.has_work):
                    self._inbox_lock.wait()
                commands, self._inbox = self._inbox, []
                closed = self._closed
            for command in commands:
                command()
            if closed:
                self._refuse_all("the replica is shutting down")
                return
            if self._scheduler.has_work:
                self._guarded_step()
            self.flush_events()

    def _guarded_step(self) -> None:
        try:
            self._step()
            self._num_consecutive_failures = 0
        except Exception as error:
            # Half a step may have been written, so nothing computed so far can be trusted.
            logger.exception("a step failed; its requests are refused and the cache is cleared")
            self._num_consecutive_failures += 1
            self._update_stats(num_failed_steps=1)
            self._refuse_all(f"a step of the model failed: {type(error).__name__}")
            self._pinned.clear()
            self._pool.clear()

    def _step(self) -> None:
        started_s = time.perf_counter()
        step = self._scheduler.schedule()
        for copy in step.copies:
            self._runner.copy_block(copy.source, copy.target)
        logits = self._runner.run([self._span(part) for part in step.scheduled])
        self._scheduler.commit(step)
        jobs = [self._jobs[part.sequence] for part in step.scheduled if part.samples]
        token_ids = sample(logits, [job.sampler for job in jobs]) if jobs else []
        for job, token_id in zip(jobs, token_ids, strict=True):
            self._append(job, token_id)
        self._count(step, time.perf_counter() - started_s)

    def _span(self, part: ScheduledSequence) -> Span:
        sequence = part.sequence
        token_ids = sequence.chain.token_ids[part.start : part.start + part.num_tokens]
        if __debug__:
            block_size = self._pool.block_size
            for block in range(part.start // block_size, (part.start + part.num_tokens - 1) // block_size + 1):
                assert self._pool.is_writable(sequence.block_table[block]), "a shared block is never written"
        return Span(token_ids, part.start, sequence.block_table, wants_logits=part.samples)

    def _append(self, job: _Job, token_id: int) -> None:
        sequence = job.sequence
        sequence.chain.append(token_id)
        is_eos = token_id in self.model.eos_token_ids and not sequence.sampling.ignore_eos
        text = "" if is_eos else job.text.push(token_id)
        if is_eos or job.text.stopped:
            sequence.finish_reason = FinishReason.STOP
        elif sequence.num_output_tokens >= sequence.max_output_tokens:
            sequence.finish_reason = FinishReason.LENGTH
        if sequence.finish_reason is not None:
            text += job.text.flush()
            if job.text.stopped:
                sequence.finish_reason = FinishReason.STOP
            self._remove(sequence)
        assert sequence.cached_tokens is not None
        chunk = GenerationChunk(
            self.replica_id,
            (token_id,),
            text,
            min(sequence.cached_tokens, sequence.num_prompt_tokens),
            sequence.finish_reason,
        )
        self._tell(job, chunk)

    def _tell(self, job: _Job, message: GenerationChunk | Refusal) -> None:
        try:
            job.on_chunk(message)
        except Exception:
            # Its reader is gone, for instance with its event loop; that must not cost the others their step.
            logger.exception("request %s: its reader failed, so it is cancelled", job.sequence.request_id)
            self._remove(job.sequence)

    def _add(self, job: _Job) -> None:
        if job.sequence.request_id in self._by_request_id:
            with self._inbox_lock:
                self._num_unfinished -= 1
            self._tell(job, self._refusal(RefusalCode.INVALID_REQUEST, "this request id is in flight already"))
            return
        self._jobs[job.sequence] = job
        self._by_request_id[job.sequence.request_id] = job.sequence
        self._scheduler.add(job.sequence)

    def _cancel(self, request_id: str) -> None:
        sequence = self._by_request_id.get(request_id)
        if sequence is not None:
            self._remove(sequence)
            self._update_stats()

    def _remove(self, sequence: EngineSequence) -> None:
        if self._jobs.pop(sequence, None) is None:
            return
        del self._by_request_id[sequence.request_id]
        self._scheduler.finish(sequence)
        with self._inbox_lock:
            self._num_unfinished -= 1

    def _refuse_all(self, message: str) -> None:
        for job in list(self._jobs.values()):
            self._remove(job.sequence)
            self._tell(job, self._refusal(RefusalCode.INTERNAL, message))

    def _refusal(self, code: RefusalCode, message: str) -> Refusal:
        return Refusal(self.replica_id, code, message)

    def _pin(self, prompt: PromptBlocks) -> SavedPrefix:
        match = self._pool.match(BlockChain(prompt, self._digest))
        num_pinned = len({block_id for saved in self._pinned for block_id in saved.block_ids} | set(match.block_ids))
        if match.num_blocks < prompt.num_blocks or num_pinned > self._pinned_blocks_max:
            raise RequestRefusedError(
                RefusalCode.OVERLOADED,
                f"a prefix of {prompt.num_blocks} blocks can't be kept: saved prefixes may hold "
                f"{self._pinned_blocks_max} of the pool's {self._pool.num_blocks} blocks",
            )
        self._pool.attach(match.block_ids)
        saved = SavedPrefix(match.block_ids, match.num_blocks * self._pool.block_size)
        self._pinned[saved] = None
        return saved

    def _unpin(self, saved: SavedPrefix) -> None:
        if saved in self._pinned:
            del self._pinned[saved]
            self._pool.release(saved.block_ids)

    def _count(self, step: Step, step_s: float) -> None:
        num_decoded = sum(part.num_tokens == 1 and part.samples for part in step.scheduled)
        num_prefilled = sum(part.num_tokens for part in step.scheduled) - num_decoded
        rate = self._stats.prefill_tokens_per_s
        if num_prefilled >= self._pool.block_size and not num_decoded:
            measured = num_prefilled / step_s
            rate = measured if rate is None else 0.8 * rate + 0.2 * measured
        first = [part.sequence for part in step.scheduled if part.start == (part.sequence.cached_tokens or 0)]
        self._update_stats(
            num_steps=1,
            num_prefilled_tokens=num_prefilled,
            num_decoded_tokens=num_decoded,
            num_prompt_tokens=sum(sequence.num_prompt_tokens for sequence in first),
            num_cached_tokens=sum(sequence.cached_tokens or 0 for sequence in first),
            prefill_tokens_per_s=rate,
        )

    def _update_stats(
        self,
        *,
        num_steps: int = 0,
        num_prefilled_tokens: int = 0,
        num_decoded_tokens: int = 0,
        num_prompt_tokens: int = 0,
        num_cached_tokens: int = 0,
        num_failed_steps: int = 0,
        prefill_tokens_per_s: float | None = None,
    ) -> None:
        old = self._stats
        sequences = (*self._scheduler.running, *self._scheduler.waiting)
        self._stats = EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_pending_prefill_tokens=sum(s.num_uncomputed for s in sequences if s.num_uncomputed > 1),
            num_steps=old.num_steps + num_steps,
            num_prefilled_tokens=old.num_prefilled_tokens + num_prefilled_tokens,
            num_decoded_tokens=old.num_decoded_tokens + num_decoded_tokens,
            num_prompt_tokens=old.num_prompt_tokens + num_prompt_tokens,
            num_cached_tokens=old.num_cached_tokens + num_cached_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_evicted_blocks=self._pool.num_evicted_blocks,
            num_failed_steps=old.num_failed_steps + num_failed_steps,
            prefill_tokens_per_s=prefill_tokens_per_s or old.prefill_tokens_per_s,
            pool=self._pool.size(),
        )

    # --- on the caller's thread ---

    def _check(self, prompt: PromptBlocks) -> None:
        if not prompt.num_tokens:
            raise RequestRefusedError(RefusalCode.INVALID_REQUEST, "the prompt is empty")
        if prompt.num_tokens > self.max_model_len:
            raise RequestRefusedError(
                RefusalCode.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt has {prompt.num_tokens} tokens, the context {self.max_model_len}",
            )
        if int(prompt.token_ids.max()) >= self.model.vocab_size:
            raise RequestRefusedError(
                RefusalCode.INVALID_REQUEST, f"a token id is outside the vocabulary of {self.model.vocab_size}"
            )

    def _check_open(self) -> None:
        if self._closed or not self._thread.is_alive():
            raise ReplicaError("the engine is closed")

    def _check_pool_is_useful(self, num_blocks: int) -> None:
        num_tokens = num_blocks * self.settings.block_size
        needed = min(self.model.max_model_len, CONTEXT_TOKENS_MIN)
        if num_tokens < needed:
            raise MemoryBudgetError(
                f"the KV budget holds {num_tokens} tokens of {self.model.source.name}, at least {needed} are needed: "
                f"raise engine.kv_memory_bytes to {needed * self.model.layout.bytes_per_token:,} or more"
            )


class ChunkStream:
    """Chunks of one request, in order, on the caller's thread; the request is queued when this is made."""

    def __init__(self, engine: Engine, prompt: PromptBlocks, sampling: SamplingParams) -> None:
        self._engine = engine
        self._request_id = secrets.token_hex(8)
        # Not bounded by itself: an answer has at most `max_model_len` tokens, hence so many chunks.
        self._chunks: queue.SimpleQueue[GenerationChunk | Refusal] = queue.SimpleQueue()
        self.num_prompt_tokens = prompt.num_tokens
        self.submitted_s = time.perf_counter()
        engine.submit(GenerationRequest(self._request_id, prompt, sampling), self._chunks.put)

    def __iter__(self) -> Iterator[GenerationChunk]:
        try:
            while True:
                message = self._chunks.get()
                if isinstance(message, Refusal):
                    raise RequestRefusedError(message.code, message.message)
                yield message
                if message.finish_reason is not None:
                    return
        finally:
            self._engine.cancel(self._request_id)


def _gather(stream: ChunkStream) -> Completion:
    chunks: list[GenerationChunk] = []
    ttft_s = 0.0
    for chunk in stream:
        if not chunks:
            ttft_s = time.perf_counter() - stream.submitted_s
        chunks.append(chunk)
    last = chunks[-1]
    assert last.finish_reason is not None
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        finish_reason=last.finish_reason,
        num_prompt_tokens=stream.num_prompt_tokens,
        cached_tokens=last.cached_tokens,
        ttft_s=ttft_s,
    )
