"""Whether replicas serve the model state that the gateway hashes prompts for; else nothing is reused there."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache_index.errors import StoreUnavailableError
from cache_index.events import Registration
from cache_index.identity import CacheIdentity
from cache_index.store import IndexStore

if TYPE_CHECKING:
    from ..index_link import IndexLink

__all__ = ["Fingerprints", "Mismatch", "mismatches", "watch_parity"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A replica whose identity differs from the gateway's, and in which fields."""

    replica_id: str
    epoch: int
    fields: tuple[str, ...]


class Fingerprints:
    """Fingerprints of replicas' identities, each computed once: a decision has no time for it. Bounded by replicas."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Registration, bytes]] = {}

    def of(self, registration: Registration) -> bytes:
        """16 bytes, the fingerprint of a replica's identity."""
        known = self._known.get(registration.replica_id)
        if known is None or known[0] is not registration:
            known = self._known[registration.replica_id] = (registration, registration.identity.fingerprint())
        return known[1]

    def keep_only(self, replica_ids: set[str]) -> None:
        """Forget replicas that are gone."""
        for replica_id in self._known.keys() - replica_ids:
            del self._known[replica_id]


def mismatches(identity: CacheIdentity, registrations: Iterable[Registration]) -> tuple[Mismatch, ...]:
    """The replicas that serve another identity, by id."""
    found = (
        Mismatch(registration.replica_id, registration.epoch, identity.differing_fields(registration.identity))
        for registration in registrations
        if registration.identity != identity
    )
    return tuple(sorted(found, key=lambda mismatch: mismatch.replica_id))


async def watch_parity(link: "IndexLink", store: IndexStore, interval_s: float) -> None:
    """Announce the gateway's identity and compare it with every replica's, until cancelled.

    What differs is logged once. The store may be away: then the announcement waits for the next time.
    """
    while True:
        if link.identity is not None:
            try:
                await store.announce(link.identity)
            except StoreUnavailableError as error:
                logger.debug("the gateway's identity could not be announced: %s", error)
            registrations: Mapping[str, Registration] = link.mirror.registrations if link.mirror is not None else {}
            before, link.mismatches = link.mismatches, mismatches(link.identity, registrations.values())
            for mismatch in link.mismatches:
                if mismatch not in before:
                    logger.warning(
                        "replica %s serves another identity than this gateway hashes prompts for, which differs in %s: "
                        "nothing is reused there",
                        mismatch.replica_id,
                        ", ".join(mismatch.fields),
                    )
        await asyncio.sleep(interval_s)
