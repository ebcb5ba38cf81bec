"""The log of the embedded store: what happened last, for followers that read it at their own pace. Bounded."""

import itertools
from collections import deque

from .events import EventBatch, Inventory, num_named
from .store import NewsItem

__all__ = ["NewsLog"]

# What one read returns: a follower that is far behind gets on by parts, and decides requests between them.
ITEMS_PER_READ_MAX = 500


class NewsLog:
    """The newest items, numbered from 1; `version` is the newest one's number.

    items_max: items that are kept. blocks_max: blocks that they may name in all; the newest item is kept whatever it
    names.
    """

    def __init__(self, items_max: int, blocks_max: int) -> None:
        self._items_max = items_max
        self._blocks_max = blocks_max
        self._items: deque[NewsItem] = deque()
        self._num_blocks = 0
        self.version = 0

    @property
    def num_items(self) -> int:
        return len(self._items)

    def append(self, item: NewsItem) -> None:
        """Add an item, and drop the oldest ones that are too many."""
        self._items.append(item)
        self._num_blocks += _num_blocks(item)
        self.version += 1
        while len(self._items) > self._items_max or (self._num_blocks > self._blocks_max and len(self._items) > 1):
            self._num_blocks -= _num_blocks(self._items.popleft())

    def after(self, version: int) -> tuple[NewsItem, ...] | None:
        """The items that follow `version`, at most `ITEMS_PER_READ_MAX`; None where some of them are gone, or no such
        version was ever reached."""
        num_missed = self.version - version
        if not 0 <= num_missed <= len(self._items):
            return None
        first = len(self._items) - num_missed
        return tuple(itertools.islice(self._items, first, first + ITEMS_PER_READ_MAX))

    def check_invariants(self) -> None:
        """Assert that counts are right and bounds hold; for tests."""
        assert self._num_blocks == sum(map(_num_blocks, self._items))
        assert len(self._items) <= min(self._items_max, self.version)
        assert self._num_blocks <= self._blocks_max or len(self._items) == 1


def _num_blocks(item: NewsItem) -> int:
    match item:
        case EventBatch():
            return sum(num_named(event) for event in item.events)
        case Inventory():
            return sum(len(stored.block_hashes) for stored in item.blocks)
        case _:
            return 0
