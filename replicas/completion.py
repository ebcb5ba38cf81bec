"""Answers for callers that wait: chunk by chunk, or whole."""

import queue
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from cache_index.blocks import PromptBlocks
from cache_index.messages import FinishReason, GenerationChunk, GenerationRequest, Refusal, SamplingParams

from .errors import RequestRefusedError

__all__ = ["ChunkStream", "Completion", "OnChunk", "gather"]

OnChunk = Callable[[GenerationChunk | Refusal], None]


class _TakesRequests(Protocol):
    def submit(self, request: GenerationRequest, on_chunk: OnChunk) -> None: ...

    def cancel(self, request_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer, whole. cached_tokens: prompt tokens that were reused. ttft_s: from submission to the first token."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    cached_tokens: int
    ttft_s: float


class ChunkStream:
    """Chunks of one request, in order, on the caller's thread; the request is queued when this is made."""

    def __init__(self, engine: "_TakesRequests", prompt: PromptBlocks, sampling: SamplingParams) -> None:
        self._engine = engine
        self.request_id = secrets.token_hex(8)
        # Not bounded by itself: an answer has at most `max_model_len` tokens, hence so many chunks.
        self._chunks: queue.SimpleQueue[GenerationChunk | Refusal] = queue.SimpleQueue()
        self.num_prompt_tokens = prompt.num_tokens
        self.submitted_s = time.perf_counter()
        engine.submit(GenerationRequest(self.request_id, prompt, sampling), self._chunks.put)

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
            self._engine.cancel(self.request_id)


def gather(stream: ChunkStream) -> Completion:
    """Wait for a whole answer. Raises RequestRefusedError where the engine refused the request or failed."""
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
