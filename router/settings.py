"""Settings of the gateway and of routing."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["GatewaySettings", "RoutingSettings"]

PositiveSeconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class GatewaySettings(BaseModel):
    """Bounds of one gateway process, and the defaults that it fills in for its clients."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    body_bytes_max: int = Field(default=8 * 2**20, ge=1_024, le=2**30)
    """A longer request body is refused with 413 before it is read to its end."""
    streams_max: int = Field(default=256, ge=1, le=100_000)
    """Generations that may run at once; one more is refused with 503, for it would only queue unseen."""
    overloaded_retry_after_s: int = Field(default=1, ge=1, le=3_600)
    """What `Retry-After` says with such a 503; whole seconds, as RFC 9110 has it."""
    first_token_timeout_s: PositiveSeconds = 120.0
    """How long a prompt may wait and be prefilled before the client is told that the replicas are full."""
    request_timeout_s: PositiveSeconds = 1_800.0
    """How long a generation may take in all, so that none is held for ever."""
    generation_attempts_max: int = Field(default=3, ge=1, le=16)
    """Replicas that one request may be sent to; another is tried only while nothing has reached the client."""
    startup_timeout_s: PositiveSeconds = 600.0
    """How long the gateway waits for a first replica to say which model it serves; weights load in this time."""
    describe_timeout_s: PositiveSeconds = 5.0
    """How long one replica may take to say so, at start-up and for `/health`."""
    describe_interval_s: PositiveSeconds = 0.5
    """Pause between two such questions while no replica is up."""
    tokenizer_threads: int = Field(default=2, ge=1, le=64)
    """Threads that render and tokenize; the tokenizer releases Python's lock, so they run beside the event loop."""
    default_max_tokens: int | None = Field(default=None, ge=1)
    """Length of a chat answer whose request names none; None is as much as the context allows."""
    open_tenant: str = Field(default="default", min_length=1, max_length=256)
    """The one tenant of the open mode, in which no key is asked for."""


class RoutingSettings(BaseModel):
    """The cost model by which a replica is chosen: wait + (1 + price) * work, in seconds (DESIGN section 8)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    price_base: Price = 2.0
    """What a second of work costs besides itself while nothing is queued."""
    price_per_queued: Price = 4.0
    """What is added per queued request and replica: all of them wait for that work too."""
    tie_tolerance_per_queued: Share = 0.05
    """Share of the least cost within which others count as equal, per queued request and replica beyond the first."""
    tie_tolerance_max: Share = 0.20
    """Bound of that tolerance."""
    prefill_tokens_per_s_initial: float = Field(default=500.0, gt=0, allow_inf_nan=False)
    """Prefill rate that a replica is credited with until it has measured its own."""
