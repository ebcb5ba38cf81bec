"""Whether the index store that the settings name can be used, asked before anything relies on it."""

import asyncio
import logging

from cache_index.errors import StoreRefusedError, StoreUnavailableError
from cache_index.opening import open_store
from cache_index.settings import IndexSettings

from .errors import SettingsError, StartError

__all__ = ["refuse_wrong_index", "require_index"]

logger = logging.getLogger(__name__)


def require_index(settings: IndexSettings) -> str:
    """Connect to Redis once, where the settings name one, and say where the index is.

    Raises StartError, one sentence without a secret, where Redis can't be used or doesn't answer in `call_timeout_s`.
    """
    try:
        return _describe(settings)
    except StoreUnavailableError as error:
        raise StartError(str(error)) from error


def refuse_wrong_index(settings: IndexSettings) -> None:
    """The same for an application that Ray Serve builds, which comes up while Redis is away and finds it later.

    Raises SettingsError where no time will help: a wrong address, password or server.
    """
    try:
        _describe(settings)
    except StoreRefusedError as error:
        raise SettingsError(str(error), key="index.redis_url") from error
    except StoreUnavailableError as error:
        logger.warning("%s; the application starts without the index and uses it once it is there", error)


def _describe(settings: IndexSettings) -> str:
    # The actor is made by whoever needs it first, so there is nothing yet to be asked.
    if settings.redis_url is None:
        return "an actor in the Ray cluster"
    return f"{asyncio.run(_ask(settings))}, at {settings.shown_url}"


async def _ask(settings: IndexSettings) -> str:
    store = open_store(settings)
    try:
        return await store.describe()
    finally:
        await store.close()
