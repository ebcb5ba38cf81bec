"""Settings of the cache index."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["IndexSettings"]

PositiveSeconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class IndexSettings(BaseModel):
    """How the index store is reached and kept.

    The embedded store, an actor in the Ray cluster, is the only one so far; Redis takes this place in the index issue.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    namespace: str = Field(default="warmroute", min_length=1)
    """Ray namespace of the embedded store; clusters that share a Ray cluster need one each."""
    lease_s: PositiveSeconds = 10.0
    """A replica that was not heard of for so long no longer counts."""
    heartbeat_interval_s: PositiveSeconds = 2.0
    """A lease survives several lost heartbeats."""
    publish_interval_s: PositiveSeconds = 0.02
    """Events of so long a time travel as one batch: far below a request's life, far above one step's."""
    follow_timeout_s: PositiveSeconds = 5.0
    """How long a follower's read waits for news before it asks again."""
    log_batches_max: int = Field(default=10_000, ge=1)
    """Batches that the store keeps for followers; one that lags further behind gets a snapshot."""
    pending_blocks_max: int = Field(default=200_000, ge=1)
    """Events that a replica keeps while the store is away; past it they are dropped and the inventory is published."""

    @model_validator(mode="after")
    def _lease_outlives_heartbeats(self) -> Self:
        if self.lease_s < 2 * self.heartbeat_interval_s:
            raise ValueError("lease_s must be at least twice heartbeat_interval_s, or a live replica's lease runs out")
        return self
