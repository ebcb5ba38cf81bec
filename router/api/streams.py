"""From a replica's chunks to an answer: whole, or as server-sent events, in the shape of either OpenAI route."""

import logging
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel

from cache_index.messages import FinishReason, GenerationChunk

from ..errors import RouterError
from .errors import ErrorAnswer
from .protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChoice,
    Usage,
)

__all__ = ["AnswerHead", "AnswerShape", "ChatShape", "CompletionShape", "server_sent_events", "whole_answer"]

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every object of one answer carries."""

    model: str
    created_s: int
    system_fingerprint: str
    num_prompt_tokens: int


class AnswerShape(Protocol):
    """How one route writes an answer. An object of it writes one."""

    def __init__(self, head: AnswerHead) -> None: ...

    def whole(self, text: str, finish_reason: FinishReason, usage: Usage) -> BaseModel:
        """The answer in one piece."""
        ...

    def opening(self) -> BaseModel | None:
        """The event before any text, if the route has one."""
        ...

    def piece(self, text: str) -> BaseModel:
        """The event that adds text."""
        ...

    def closing(self, finish_reason: FinishReason) -> BaseModel:
        """The event that says why the text ended."""
        ...

    def accounting(self, usage: Usage) -> BaseModel:
        """The event without a choice that says what was used."""
        ...


class ChatShape:
    """The shape of /v1/chat/completions."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._id = f"chatcmpl-{uuid.uuid4().hex}"

    def whole(self, text: str, finish_reason: FinishReason, usage: Usage) -> ChatCompletion:
        choice = ChatChoice(message=ChatMessage(content=text), finish_reason=finish_reason)
        return ChatCompletion(
            id=self._id,
            created=self._head.created_s,
            model=self._head.model,
            system_fingerprint=self._head.system_fingerprint,
            choices=[choice],
            usage=usage,
        )

    def opening(self) -> ChatChunk:
        return self._chunk(ChatChunkChoice(delta={"role": "assistant", "content": ""}))

    def piece(self, text: str) -> ChatChunk:
        return self._chunk(ChatChunkChoice(delta={"content": text}))

    def closing(self, finish_reason: FinishReason) -> ChatChunk:
        return self._chunk(ChatChunkChoice(delta={}, finish_reason=finish_reason))

    def accounting(self, usage: Usage) -> ChatChunk:
        return self._chunk(usage=usage)

    def _chunk(self, *choices: ChatChunkChoice, usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._head.created_s,
            model=self._head.model,
            system_fingerprint=self._head.system_fingerprint,
            choices=choices,
            usage=usage,
        )


class CompletionShape:
    """The shape of /v1/completions."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._id = f"cmpl-{uuid.uuid4().hex}"

    def whole(self, text: str, finish_reason: FinishReason, usage: Usage) -> Completion:
        return self._completion(CompletionChoice(text=text, finish_reason=finish_reason), usage=usage)

    def opening(self) -> None:
        return None

    def piece(self, text: str) -> Completion:
        return self._completion(CompletionChoice(text=text))

    def closing(self, finish_reason: FinishReason) -> Completion:
        return self._completion(CompletionChoice(text="", finish_reason=finish_reason))

    def accounting(self, usage: Usage) -> Completion:
        return self._completion(usage=usage)

    def _completion(self, *choices: CompletionChoice, usage: Usage | None = None) -> Completion:
        return Completion(
            id=self._id,
            created=self._head.created_s,
            model=self._head.model,
            system_fingerprint=self._head.system_fingerprint,
            choices=choices,
            usage=usage,
        )


async def whole_answer(chunks: AsyncIterable[GenerationChunk], shape: AnswerShape, head: AnswerHead) -> BaseModel:
    """Gather a generation. Raises whatever `chunks` raises: nothing was sent, so the status can still say it."""
    texts: list[str] = []
    num_completion_tokens = 0
    async for chunk in chunks:
        texts.append(chunk.text)
        num_completion_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            usage = _usage(head, num_completion_tokens, chunk)
            return shape.whole("".join(texts), chunk.finish_reason, usage)
    raise AssertionError("a generation ends with a finish reason or an error")


async def server_sent_events(
    chunks: AsyncIterable[GenerationChunk],
    shape: AnswerShape,
    head: AnswerHead,
    *,
    include_usage: bool,
    answer_to: Callable[[Exception], ErrorAnswer],
) -> AsyncIterator[bytes]:
    """A generation as events, each a JSON object; the last is [DONE], or an error's body where the generation failed.

    With `include_usage` every event has a usage, which is null but for the last, as OpenAI has it; without, none has.
    """

    def event(content: BaseModel) -> bytes:
        return b"data: %b\n\n" % content.model_dump_json(exclude=None if include_usage else {"usage"}).encode("utf-8")

    num_completion_tokens = 0
    try:
        opening = shape.opening()
        if opening is not None:
            yield event(opening)
        async for chunk in chunks:
            num_completion_tokens += len(chunk.token_ids)
            if chunk.text:
                yield event(shape.piece(chunk.text))
            if chunk.finish_reason is not None:
                yield event(shape.closing(chunk.finish_reason))
                if include_usage:
                    yield event(shape.accounting(_usage(head, num_completion_tokens, chunk)))
                yield DONE
    except Exception as error:
        # The status has long been sent, so the stream itself has to say it.
        if isinstance(error, RouterError):
            logger.warning("a stream was broken off: %s", error)
        else:
            logger.exception("a stream was broken off")
        yield b"data: %b\n\n" % answer_to(error).to_json()


def _usage(head: AnswerHead, num_completion_tokens: int, last: GenerationChunk) -> Usage:
    return Usage.of(
        prompt_tokens=head.num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        cached_tokens=last.cached_tokens,
    )
