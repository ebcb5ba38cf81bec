"""What the gateway and the router of one process tell each other about the index. Knows no Ray.

Serve makes the router, from JSON that it also shows in its dashboard and its REST API; a password must not travel that
way. So the gateway, in whose process each router of ours lives, is given the index's settings and leaves them here. The
other way round, `/health` learns here how the router's mirror stands.

Router and gateway may run on event loops of different threads, as they do in Serve's default mode. So settings never
change, `/health` reads single values of the mirror, and what has to be counted is noted on the mirror's own loop.
"""

import asyncio
import re

from cache_index.identity import CacheIdentity
from cache_index.mirror import IndexMirror
from cache_index.settings import IndexSettings

from .routing.parity import Mismatch

__all__ = ["LINK", "IndexLink"]

_COUNT_INTERVAL_S = 0.5


class IndexLink:
    """One per process.

    settings: set by the gateway before its first request. identity: under which the gateway hashes prompts, once it
    knows its model. mirror: set by the router when it begins to follow. num_blocks: that the mirror knows, by
    `count_blocks`. mismatches: replicas of another identity.
    """

    def __init__(self) -> None:
        self.settings: IndexSettings | None = None
        self.identity: CacheIdentity | None = None
        self.mirror: IndexMirror | None = None
        self.num_blocks = 0
        self.mismatches: tuple[Mismatch, ...] = ()

    async def count_blocks(self, mirror: IndexMirror) -> None:
        """Note how many blocks the mirror knows, twice a second until cancelled. Runs on the mirror's own loop.

        Counting walks the replicas, which would fail in another thread while one of them comes or goes.
        """
        while True:
            self.num_blocks = mirror.num_blocks
            await asyncio.sleep(_COUNT_INTERVAL_S)

    def health(self) -> dict[str, object]:
        """How the index stands, for `/health`, from any thread: without addresses, for anybody may ask."""
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
            "reason": reason and _without_addresses(reason, settings.shown_url),
            "complete": mirror is not None and mirror.is_complete,
            "blocks": self.num_blocks,
            "replicas_of_another_identity": [
                {"replica": mismatch.replica_id, "differs_in": list(mismatch.fields)} for mismatch in self.mismatches
            ],
        }


def _without_addresses(reason: str, shown_url: str | None) -> str:
    """What is wrong in our own words. Those of a library follow a colon, and name hosts; the log has them."""
    if shown_url is not None:
        # With the word before it, "at" or "of".
        reason = re.sub(rf" \w+ {re.escape(shown_url)}", "", reason)
    return reason.partition(": ")[0]


LINK = IndexLink()
