"""Which unreferenced block goes when space is short.

Only leaves are candidates: a block whose cached children would lose their parent stays until they are gone, so every
cached block can be reached from its chain's root. The pool tells the policy which blocks are leaves; the policy only
orders them.
"""

import heapq
from typing import Protocol

__all__ = ["EvictionPolicy", "LeastRecentlyUsed"]


class EvictionPolicy(Protocol):
    """The order in which leaves are evicted. It knows block ids and times, no tokens and no tensors."""

    def add(self, block_id: int, last_use: int) -> None:
        """The block became an unreferenced leaf; `last_use` is the pool's clock when it was last attached."""

    def discard(self, block_id: int) -> None:
        """The block is referenced again or gained a cached child. Unknown blocks are ignored."""

    def pop(self) -> int | None:
        """The block to evict next, which is a candidate no longer; None when there is none."""

    def __len__(self) -> int: ...


class LeastRecentlyUsed:
    """Evicts the leaf that was attached longest ago; the deeper of two that were attached together comes up first,
    because its parent is no leaf while it exists.

    A heap with lazy deletion: an entry whose time is not the block's current one is skipped. O(log n) amortised.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._last_use: dict[int, int] = {}

    def add(self, block_id: int, last_use: int) -> None:
        if self._last_use.get(block_id) == last_use:
            return
        self._last_use[block_id] = last_use
        heapq.heappush(self._heap, (last_use, block_id))
        # Void entries are bounded: past one per candidate (and a few), the heap is built anew from the candidates.
        if len(self._heap) > 2 * len(self._last_use) + 64:
            self._heap = [(used, block) for block, used in self._last_use.items()]
            heapq.heapify(self._heap)

    def discard(self, block_id: int) -> None:
        self._last_use.pop(block_id, None)

    def pop(self) -> int | None:
        while self._heap:
            last_use, block_id = heapq.heappop(self._heap)
            if self._last_use.get(block_id) == last_use:
                del self._last_use[block_id]
                return block_id
        return None

    def __len__(self) -> int:
        return len(self._last_use)
