"""What an engine has done and how it stands."""

from dataclasses import dataclass, field

from .kv.block_pool import PoolSize

__all__ = ["EngineStats"]


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
