"""Opens the index store that the settings name: Redis where they have a URL, else the actor in the Ray cluster."""

from .settings import IndexSettings
from .store import IndexStore

__all__ = ["open_store"]


def open_store(settings: IndexSettings) -> IndexStore:
    """A store, not yet connected: the first call connects, and so does each call after a loss.

    Raises StoreRefusedError where the URL can't be read.
    """
    if settings.redis_url is not None:
        from .redis_store import RedisStore

        return RedisStore(settings)
    # Here, not above: it imports Ray, of which a store on Redis has no need.
    from .actor_store import ActorStore

    return ActorStore(settings)
