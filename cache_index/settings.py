"""Settings of the cache index."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

__all__ = ["REDIS_SCHEMES", "IndexSettings"]

PositiveSeconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]

REDIS_SCHEMES = (
    "redis",
    "rediss",
    "unix",
    "redis+sentinel",
    "rediss+sentinel",
    "redis+cluster",
    "rediss+cluster",
)


class IndexSettings(BaseModel):
    """How the index store is reached and kept."""

    # A URL or a password that is refused is not repeated in the error.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    redis_url: SecretStr | None = None
    """Redis 6.2 or newer; None keeps the index in an actor of the Ray cluster.

    redis://[user:password@]host[:port][/db], unix://path, redis+sentinel://host:port[,host:port…]/name[/db], or
    redis+cluster://host:port[,host:port…]; `rediss` instead of `redis` for TLS.
    """
    redis_username: str | None = None
    """ACL user, where the URL names none."""
    redis_password: SecretStr | None = None
    """Password, where the URL has none; kept apart so that the URL may be shown."""
    redis_sentinel_password: SecretStr | None = None
    """Password of the Sentinels, where they ask for one."""
    redis_ca_file: Path | None = None
    """Certificate authorities, PEM, by which Redis's certificate is checked; None for the system's."""
    namespace: str = Field(default="warmroute", pattern=r"^[A-Za-z0-9_.-]+$", max_length=64)
    """What keys in Redis begin with, or the embedded store's Ray namespace; who shares either needs their own."""
    lease_s: PositiveSeconds = 10.0
    """A replica that was not heard of for so long no longer counts."""
    heartbeat_interval_s: PositiveSeconds = 2.0
    """A lease survives several lost heartbeats. Each carries a digest, so drift is found within one interval."""
    publish_interval_s: PositiveSeconds = 0.02
    """Events of so long a time travel as one batch: far below a request's life, far above one step's."""
    follow_timeout_s: PositiveSeconds = 5.0
    """How long a follower's read waits for news before it asks again."""
    call_timeout_s: PositiveSeconds = 2.0
    """What a call to the store may take, a read's own wait aside, before the store counts as away."""
    lookup_timeout_s: PositiveSeconds = 0.05
    """What a routing decision waits for the store where the router's own mirror is not complete."""
    log_batches_max: int = Field(default=10_000, ge=1)
    """Batches that the store keeps for followers; one that lags further behind gets a snapshot."""
    log_blocks_max: int = Field(default=500_000, ge=1)
    """Blocks that those batches may name in all, at 16 bytes each; the newest batch is kept whatever its size."""
    mirror_blocks_max: int = Field(default=2_000_000, ge=1)
    """Blocks that a router's mirror keeps, some 0.12 KB each; past it, those not used lately are asked of the store."""
    pending_blocks_max: int = Field(default=200_000, ge=1)
    """Events that a replica keeps while the store is away; past it they are dropped and the inventory is published."""

    @field_validator("redis_url")
    @classmethod
    def _scheme_is_known(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            scheme, separator, _ = url.get_secret_value().partition("://")
            if not separator or scheme not in REDIS_SCHEMES:
                raise ValueError(f"a Redis URL begins with one of {', '.join(REDIS_SCHEMES)}, and ://")
            if "?" in url.get_secret_value():
                raise ValueError("a Redis URL takes no options after a question mark; in a password, write %3F for it")
        return url

    @model_validator(mode="after")
    def _lease_outlives_heartbeats(self) -> Self:
        if self.lease_s < 2 * self.heartbeat_interval_s:
            raise ValueError("lease_s must be at least twice heartbeat_interval_s, or a live replica's lease runs out")
        return self

    @property
    def shown_url(self) -> str | None:
        """The Redis URL without user and password, for messages and logs."""
        if self.redis_url is None:
            return None
        scheme, _, rest = self.redis_url.get_secret_value().partition("://")
        # Up to the last @, so that nothing of a password that has one, or a slash, is left.
        return f"{scheme}://{rest.rpartition('@')[2]}"
