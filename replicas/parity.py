"""Whether gateways hash prompts for the model state that this replica serves; else they can reuse nothing here."""

import logging
from collections.abc import Sequence

from cache_index.events import Registration
from cache_index.identity import CacheIdentity

__all__ = ["GatewayParity"]

logger = logging.getLogger(__name__)


class GatewayParity:
    """Compares the identities that gateways announce with a replica's own.

    differing: the fields in which each identity that is announced now differs, for those that do. Bounded by what the
    store remembers of gateways.
    """

    def __init__(self, registration: Registration) -> None:
        self._registration = registration
        self.differing: dict[CacheIdentity, tuple[str, ...]] = {}

    def compare(self, announced: Sequence[CacheIdentity]) -> None:
        """Take what gateways announce now. What is new, or over, is logged, once."""
        own = self._registration.identity
        before, self.differing = (
            self.differing,
            {other: own.differing_fields(other) for other in announced if other != own},
        )
        for other, fields in self.differing.items():
            if other not in before:
                logger.warning(
                    "a gateway hashes prompts for another identity than replica %s serves, which differs in %s: "
                    "it can reuse nothing here",
                    self._registration.replica_id,
                    ", ".join(fields),
                )
        for other, fields in before.items():
            if other not in self.differing:
                logger.info(
                    "no gateway hashes prompts for the identity any more that differed in %s", ", ".join(fields)
                )
