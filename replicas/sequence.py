"""One request inside the engine: its tokens, its blocks, and how far it is computed."""

from dataclasses import dataclass, field
from enum import Enum, auto

from cache_index.blocks import BlockChain
from cache_index.messages import FinishReason, SamplingParams

__all__ = ["Sequence", "SequenceState"]


class SequenceState(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and the answer so far.

    num_computed: tokens whose keys and values are in the sequence's blocks. It is also the next position: positions
    belong to the sequence and continue after a cached prefix, they are never counted globally.
    num_committed: full blocks that are cached in the pool; the sequence holds a reference to each.
    cached_tokens: prompt tokens that were reused when it was first admitted; None before that.
    """

    request_id: str
    chain: BlockChain
    sampling: SamplingParams
    num_prompt_tokens: int
    max_output_tokens: int
    state: SequenceState = SequenceState.WAITING
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_committed: int = 0
    can_commit: bool = True
    cached_tokens: int | None = None
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and answer tokens so far."""
        return len(self.chain)

    @property
    def num_output_tokens(self) -> int:
        """Answer tokens so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys and values are still to be computed; 1 while decoding."""
        return self.num_tokens - self.num_computed
