"""The messages between a gateway and a replica.

`router` and `replicas` never import each other: what one asks and the other answers is declared here, below both.

    gateway ── GenerationRequest ──▶ replica
    gateway ◀── GenerationChunk … GenerationChunk(finish_reason) ── replica
    gateway ◀── Refusal ── replica            (instead of the first chunk, or at last where a begun stream fails)
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from .blocks import PromptBlocks
from .identity import CacheIdentity

__all__ = [
    "FinishReason",
    "GenerationChunk",
    "GenerationRequest",
    "ModelCard",
    "Refusal",
    "RefusalCode",
    "SamplingParams",
]

STOP_CHARACTERS_MAX = 1_000
"""Of one stop string: the end of the text is compared with all its beginnings after every token."""
STOP_STRINGS_MAX = 16
"""More than OpenAI's 4; each one is searched in the text after every token, so there is a bound."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop. All of it acts after the logits, so none of it is cache identity.

    max_tokens: None for as many as the context allows. temperature: 0 is greedy. top_k: None for all tokens.
    seed: None draws a fresh one. stop: the text ends before the first of these. ignore_eos: go on after end of text.
    Raises ValueError, naming the parameter, for a value outside its range.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 2.0):
            raise ValueError(f"temperature must be between 0 and 2, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit into 64 bits, got {self.seed}")
        if len(self.stop) > STOP_STRINGS_MAX or not all(self.stop):
            raise ValueError(f"stop must be at most {STOP_STRINGS_MAX} strings, none of them empty")
        if any(len(stop) > STOP_CHARACTERS_MAX for stop in self.stop):
            raise ValueError(f"stop must be strings of at most {STOP_CHARACTERS_MAX} characters")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue. `request_id` is unique among the requests in flight on a replica."""

    request_id: str
    prompt: PromptBlocks
    sampling: SamplingParams


class FinishReason(StrEnum):
    """Why a generation ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """What one step added to a generation.

    token_ids: the new tokens, in order; tokens whose text is withheld are among them. text: the new text, which may
    be empty while a character or a possible stop string is incomplete. cached_tokens: prompt tokens that this replica
    reused, a count; the same in every chunk. finish_reason: set in the last chunk only.
    """

    replica_id: str
    token_ids: tuple[int, ...]
    text: str
    cached_tokens: int
    finish_reason: FinishReason | None = None


class RefusalCode(StrEnum):
    """Why a replica did not serve a request; the gateway's one table maps each to an HTTP status."""

    INVALID_REQUEST = "invalid_request_error"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    OVERLOADED = "overloaded"
    INTERNAL = "internal_error"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that the replica could not serve. A value, no exception, so that every transport carries it whole."""

    replica_id: str
    code: RefusalCode
    message: str


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a gateway has to know of the model that its replicas serve.

    name: what clients call it. tokenizer: folder or hub id, and `revision` of it, from which the gateway loads the same
    tokenizer and chat template. identity: what the root of every hash chain is made from. max_model_len: the longest
    prompt in tokens, and the bound on prompt and answer together (DESIGN section 4, context limit).
    """

    name: str
    tokenizer: str
    revision: str | None
    identity: CacheIdentity
    max_model_len: int
    created_s: int

    @property
    def block_size(self) -> int:
        return self.identity.block_size
