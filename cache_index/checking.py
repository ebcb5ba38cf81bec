"""Whether the store knows of every replica what that replica itself says that it holds."""

import asyncio
import sys
from dataclasses import dataclass

from .mirror import IndexMirror
from .settings import IndexSettings
from .store import IndexStore

__all__ = ["ReplicaCheck", "check"]

# A replica says within one interval what it holds. Another is for one that was just publishing, the rest for the way.
_HEARTBEAT_INTERVALS = 2.5


@dataclass(frozen=True, slots=True)
class ReplicaCheck:
    """One registered replica. num_blocks_stored: what the store has of it. num_blocks_held: what it last said.

    num_blocks_held and agrees are None where it was silent, for then nobody knows.
    """

    replica_id: str
    num_blocks_stored: int
    num_blocks_held: int | None
    agrees: bool | None


async def check(store: IndexStore, settings: IndexSettings) -> tuple[ReplicaCheck, ...]:
    """Compare the store with what its replicas say, in order of their ids; takes up to 2.5 heartbeat intervals.

    Replicas that leave meanwhile are left out, and those that come are included. Raises StoreUnavailableError.
    """
    # Without a bound, for what is evicted can't be compared; in no router, where nobody waits for it.
    mirror = IndexMirror(store, settings.model_copy(update={"mirror_blocks_max": sys.maxsize}))
    loop = asyncio.get_running_loop()
    end_s = loop.time() + _HEARTBEAT_INTERVALS * settings.heartbeat_interval_s
    await mirror.catch_up(0.0)
    while (mirror.registrations.keys() - mirror.comparisons.keys()) and (left_s := end_s - loop.time()) > 0.0:
        await mirror.catch_up(min(left_s, settings.follow_timeout_s))
    return tuple(_result(mirror, replica_id) for replica_id in sorted(mirror.registrations))


def _result(mirror: IndexMirror, replica_id: str) -> ReplicaCheck:
    comparison = mirror.comparisons.get(replica_id)
    if comparison is None:
        return ReplicaCheck(replica_id, mirror.num_blocks_of(replica_id), None, None)
    return ReplicaCheck(replica_id, comparison.known.num_blocks, comparison.said.num_blocks, comparison.agrees)
