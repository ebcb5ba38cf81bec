"""The engine: a step loop on a thread of its own, usable without Ray.

    with Engine.load("HuggingFaceTB/SmolLM2-135M-Instruct") as engine:
        saved = engine.save_prefix(long_document)
        [answer] = engine.generate([long_document + question], SamplingParams(max_tokens=64, temperature=0))
        answer.text, answer.cached_tokens

Callers on any thread put commands into an inbox; only the engine's thread touches the core (scheduler, pool, tensors
and model). Between two steps it takes what the inbox holds.
"""

import contextlib
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self, TypeVar

import torch

from cache_index.blocks import BlockChain, HashFunction, PromptBlocks
from cache_index.events import Event
from cache_index.identity import DIGEST_BYTES, chain_root
from cache_index.messages import GenerationRequest, RefusalCode, SamplingParams

from . import sequence
from .completion import ChunkStream, Completion, OnChunk, gather
from .core import EngineCore, Job, SavedPrefix
from .errors import ReplicaError, RequestRefusedError
from .forward.model import LoadedModel, load, num_pool_blocks
from .forward.runner import ModelRunner
from .kv.block_pool import BlockPool
from .sampling import Sampler
from .scheduler import Scheduler
from .settings import EngineSettings, ModelSettings
from .stats import EngineStats
from .text_stream import CONTEXT_TOKENS, TextStream

__all__ = ["Engine"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Prompt = str | Sequence[int] | PromptBlocks


class Engine:
    """Runs requests on one model copy. Every method may be called from any thread but the engine's own."""

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
        block_size = self.settings.block_size
        if self.settings.num_threads is not None:
            torch.set_num_threads(self.settings.num_threads)
        if num_blocks is None:
            num_blocks = num_pool_blocks(self.settings, model)
        pinned_blocks_max = int(num_blocks * self.settings.pinned_share_max)
        # A sequence that fits into what pins leave free can always run, if need be alone.
        self.max_model_len = min(model.max_model_len, (num_blocks - pinned_blocks_max) * block_size)
        self._digest = digest
        self._local_scope = secrets.token_bytes(DIGEST_BYTES)
        self._fingerprint = model.identity.fingerprint()
        scheduler = Scheduler(
            BlockPool(num_blocks, block_size),
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            max_num_seqs=self.settings.max_num_seqs,
            enable_prefix_caching=self.settings.enable_prefix_caching,
        )
        self._core = EngineCore(
            runner(model, num_blocks, block_size),
            scheduler,
            replica_id=replica_id,
            pinned_blocks_max=pinned_blocks_max,
            on_removed=self._note_removed,
            on_events=on_events,
        )
        # Guards the inbox and the count that bounds it. Held for a few instructions only, never during a step.
        self._inbox_changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._num_unfinished = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="warmroute-engine", daemon=True)
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
        return self._core.stats

    @property
    def is_healthy(self) -> bool:
        """False once the thread has ended or steps keep failing; then the replica has to be replaced."""
        return self._thread.is_alive() and self._core.is_healthy

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
        job = self._job(request, on_chunk)
        with self._inbox_changed:
            self._check_open()
            if self._num_unfinished >= self.settings.max_num_seqs + self.settings.max_num_waiting:
                raise RequestRefusedError(
                    RefusalCode.OVERLOADED, f"{self._num_unfinished} requests are running or waiting here already"
                )
            self._num_unfinished += 1
            self._send(lambda: self._core.add(job))

    def cancel(self, request_id: str) -> None:
        """Stop a request and free its blocks before the next step; unknown or finished requests are ignored."""
        with self._inbox_changed:
            if not self._closed:
                self._send(lambda: self._core.cancel(request_id))

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams | None = None) -> list[Completion]:
        """Answer prompts, all at once, and wait.

        Raises RequestRefusedError if one of them can't be served; then none of the others goes on.
        """
        streams: list[ChunkStream] = []
        try:
            for prompt in prompts:
                streams.append(self.stream(prompt, sampling))  # noqa: PERF401 - what was begun before a failure is ended
            return [gather(stream) for stream in streams]
        except BaseException:
            for stream in streams:
                self.cancel(stream.request_id)
            raise

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> ChunkStream:
        """Answer one prompt chunk by chunk. Leaving the iteration early cancels the request."""
        return ChunkStream(self, self.prompt(prompt), sampling or SamplingParams())

    def save_prefix(self, prefix: Prompt) -> SavedPrefix:
        """Compute a prefix where necessary and keep its full blocks cached until `release_prefix`.

        Raises RequestRefusedError where it can't be served, where saved prefixes would hold more of the pool than
        `pinned_share_max`, or where prefix caching is off.
        """
        if not self.settings.enable_prefix_caching:
            raise RequestRefusedError(RefusalCode.INVALID_REQUEST, "prefix caching is off, so no prefix can be saved")
        prompt = self.prompt(prefix)
        self.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
        return self.call(lambda core: core.pin(BlockChain(prompt, self._digest)))

    def release_prefix(self, saved: SavedPrefix) -> None:
        """Let a saved prefix age like any other. Releasing it again changes nothing."""
        self.call(lambda core: core.unpin(saved))

    def call(self, function: Callable[[EngineCore], Result]) -> Result:
        """Run a function on the engine's thread between two steps, and wait for its result.

        For what must see one consistent state; keep it short.
        """
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(function(self._core))
            except BaseException as error:
                future.set_exception(error)

        with self._inbox_changed:
            self._check_open()
            self._send(run)
        return future.result()

    def close(self) -> None:
        """Refuse what is unfinished and end the thread. Closing again changes nothing."""
        with self._inbox_changed:
            self._closed = True
            self._inbox_changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException:
            # Whoever waits must be told, or it waits for ever. That the thread has ended is `is_healthy`'s to say.
            logger.exception("the engine's thread failed and ends; every request is refused")
            with self._inbox_changed:
                self._closed = True
            while self._inbox:
                with contextlib.suppress(Exception):
                    self._inbox.popleft()()
            self._core.abandon("the replica's engine has failed")

    def _loop(self) -> None:
        closed = False
        while not closed:
            with self._inbox_changed:
                while not (self._inbox or self._closed or self._core.has_work):
                    self._inbox_changed.wait()
                num_commands = len(self._inbox)
                closed = self._closed
            for _ in range(num_commands):  # What comes in meanwhile is for the next round.
                self._inbox.popleft()()
            if closed:
                self._core.refuse_all("the replica is shutting down")
            elif self._core.has_work:
                self._core.step()
            self._core.flush_events()

    def _send(self, command: Callable[[], None]) -> None:
        # Bounded: one entry per unfinished request, one per cancellation of one, and one per waiting caller of `call`.
        self._inbox.append(command)
        self._inbox_changed.notify()

    def _note_removed(self) -> None:
        with self._inbox_changed:
            self._num_unfinished -= 1

    def _job(self, request: GenerationRequest, on_chunk: OnChunk) -> Job:
        prompt, sampling = self.prompt(request.prompt), request.sampling
        self._check(prompt)
        # The last token that the context allows is returned but never fed back, hence the one more.
        room = self.max_model_len - prompt.num_tokens + 1
        return Job(
            sequence.Sequence(
                request_id=request.request_id,
                chain=BlockChain(prompt, self._digest),
                sampling=sampling,
                num_prompt_tokens=prompt.num_tokens,
                max_output_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
            ),
            Sampler(sampling, self.model.device),
            TextStream(
                self.model.tokenizer.backend_tokenizer, prompt.token_ids[-CONTEXT_TOKENS:].tolist(), sampling.stop
            ),
            on_chunk,
        )

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
