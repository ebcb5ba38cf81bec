"""What tests of index stores share: settings, names, and a form in which news compare."""

import itertools
import os
from collections.abc import Iterable
from typing import Any

from cache_index.events import Inventory
from cache_index.settings import IndexSettings
from cache_index.store import IndexStore, NewsItem

LOG_BATCHES_MAX = 4
ACTOR_SETTINGS = IndexSettings(namespace="contract", lease_s=3_600.0, log_batches_max=LOG_BATCHES_MAX)

_namespaces = itertools.count()


def next_namespace() -> str:
    """A namespace that no other test uses."""
    return f"test-{os.getpid()}-{next(_namespaces)}"


def plain(items: Iterable[NewsItem]) -> list[Any]:
    """Items that compare whatever the order and grouping of an inventory's blocks."""
    found: list[Any] = []
    for item in items:
        if isinstance(item, Inventory):
            blocks: dict[bytes, set[bytes]] = {}
            for part in item.blocks:
                blocks.setdefault(part.tenant, set()).update(part.block_hashes)
            found.append((item.registration, item.seq, blocks))
        else:
            found.append(item)
    return found


async def snapshot(store: IndexStore) -> list[Any]:
    """All there is, by replica, in the form of `plain`."""
    news = await store.read(None, 0.0)
    assert news.is_snapshot
    return sorted(plain(news.items), key=lambda item: item[0].replica_id)
