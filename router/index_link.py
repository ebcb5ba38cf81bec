"""What the gateway and the router of one process tell each other about the index. Knows no Ray.

Serve makes the router, from JSON that it also shows in its dashboard and its REST API; a password must not travel that
way. So the gateway, in whose process each router of ours lives, is given the index's settings and leaves them here. The
other way round, `/health` learns here how the router's mirror stands.

Settings never change, and what is read of the mirror are plain values; so router and gateway may run on event loops of
different threads, as they do in Serve's default mode.
"""

from cache_index.identity import CacheIdentity
from cache_index.mirror import IndexMirror
from cache_index.settings import IndexSettings

from .routing.parity import Mismatch

__all__ = ["LINK", "IndexLink"]


class IndexLink:
    """One per process.

    settings: set by the gateway before its first request. identity: under which the gateway hashes prompts, once it
    knows its model. mirror: set by the router when it begins to follow. mismatches: replicas of another identity.
    """

    def __init__(self) -> None:
        self.settings: IndexSettings | None = None
        self.identity: CacheIdentity | None = None
        self.mirror: IndexMirror | None = None
        self.mismatches: tuple[Mismatch, ...] = ()

    def health(self) -> dict[str, object]:
        """How the index stands, for `/health`: without addresses, for anybody may ask."""
        settings, mirror = self.settings, self.mirror
        if settings is None:
            return {"state": "none"}
        reason = mirror.degraded_reason if mirror is not None else None
        if reason is not None:
            state = "degraded"
        elif mirror is None or mirror.num_snapshots == 0:
            state = "starting"
        else:
            state = "ok"
        return {
            "store": "embedded" if settings.redis_url is None else "redis",
            "state": state,
            "reason": _without(settings.shown_url, reason),
            "complete": mirror is not None and mirror.is_complete,
            "blocks": mirror.num_blocks if mirror is not None else 0,
            "replicas_of_another_identity": [
                {"replica": mismatch.replica_id, "differs_in": list(mismatch.fields)} for mismatch in self.mismatches
            ],
        }


def _without(address: str | None, reason: str | None) -> str | None:
    return reason if reason is None or address is None else reason.replace(f" at {address}", "")


LINK = IndexLink()
