"""The block pool: reference counts, proved matches, copy on write, eviction. Bookkeeping only, no tensors.

    state of a block      reference_count   in the hash map   next
    free                  0                 no                allocate
    private               1                 no                commit (when full), release
    cached, in use        ≥ 1               yes               release
    cached, idle          0                 yes               attach, or eviction once it is a leaf

Who owns which tokens of a sequence of 40 tokens with block_size 16, of which 32 were cached:

    |─ block 7, shared ─|─ block 3, shared ─|─ block 9, private ─|
    0                  16                  32        40          48
                                            ▲ the sequence writes only from here on

The hash finds, the tokens prove: a block is shared only after its parent, its tokens and its extras were compared with
the prompt's. A block's parent is a block of the pool (or a chain's root), so comparing it proves the whole prefix.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cache_index.blocks import NO_EXTRAS, BlockChain, BlockHash
from cache_index.events import BlocksCleared, BlocksRemoved, BlocksStored, Digest, Event, block_checksum
from cache_index.identity import tenant_of

from ..errors import PoolExhaustedError
from .eviction import EvictionPolicy, LeastRecentlyUsed

__all__ = ["BlockPool", "PoolSize", "PrefixMatch"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Longest cached prefix of a chain: block ids in order. Holds no references."""

    block_ids: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Blocks of the pool by state; the three add up to `num_blocks`."""

    num_blocks: int
    num_free_blocks: int
    num_idle_blocks: int
    num_used_blocks: int


@dataclass(slots=True)
class _Block:
    block_id: int
    reference_count: int = 0
    num_children: int = 0
    last_use: int = 0
    # Set while the block is cached:
    block_hash: BlockHash | None = None
    parent: "_Block | None" = None
    root: bytes = b""
    tenant: bytes = b""
    tokens: bytes = b""
    extras: bytes = NO_EXTRAS


class BlockPool:
    """Owns every block of one replica. Not thread-safe: the engine's thread owns it."""

    def __init__(self, num_blocks: int, block_size: int, policy: EvictionPolicy | None = None) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, got {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks = [_Block(block_id) for block_id in range(num_blocks)]
        # Popped from the end, so the lowest ids go first and neighbours tend to lie side by side in memory.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[BlockHash, _Block] = {}
        # The same by tenant, so that dropping one costs nothing for the others. Only tenants that have any.
        self._by_tenant: dict[bytes, dict[BlockHash, _Block]] = {}
        self._digest = Digest()
        self._leaves: EvictionPolicy = policy if policy is not None else LeastRecentlyUsed()
        self._num_idle = 0
        self._clock = 0
        self._events: list[Event] = []
        self._run: tuple[type[BlocksStored] | type[BlocksRemoved], bytes, list[BlockHash]] | None = None
        self.num_evicted_blocks = 0
        self.num_refuted_hits = 0

    @property
    def digest(self) -> Digest:
        """What is cached, as the index compares it. O(1)."""
        return self._digest

    def size(self) -> PoolSize:
        """Blocks by state."""
        num_free = len(self._free)
        return PoolSize(self.num_blocks, num_free, self._num_idle, self.num_blocks - num_free - self._num_idle)

    def match(self, chain: BlockChain) -> PrefixMatch:
        """Longest cached prefix of `chain` in this pool, in full blocks; takes no references. O(blocks).

        A hash hit whose tokens, extras or parent differ counts as a miss and is logged.
        """
        block_ids: list[int] = []
        parent: _Block | None = None
        for index, block_hash in enumerate(chain.block_hashes):
            block = self._cached.get(block_hash)
            if block is None:
                break
            if not self._is_same(block, chain, index, parent):
                self.num_refuted_hits += 1
                logger.warning("block hash %s was found, but its content differs; counted as a miss", block_hash.hex())
                break
            block_ids.append(block.block_id)
            parent = block
        return PrefixMatch(tuple(block_ids))

    def attach(self, block_ids: Sequence[int]) -> None:
        """Take a reference to each of these cached blocks."""
        self._clock += 1
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.block_hash is not None, f"block {block_id} is not cached, so it can't be shared"
            if block.reference_count == 0:
                self._num_idle -= 1
                self._leaves.discard(block_id)
            block.reference_count += 1
            block.last_use = self._clock

    def allocate(self) -> int:
        """A private block with one reference, evicting an idle one where none is free.

        Raises PoolExhaustedError where every block is referenced.
        """
        block = self._blocks[self._free.pop()] if self._free else self._evict()
        block.reference_count = 1
        self._clock += 1
        block.last_use = self._clock
        return block.block_id

    def release(self, block_ids: Sequence[int]) -> None:
        """Give one reference to each block back: private blocks become free, cached ones idle."""
        # The deepest first, so that a block is a leaf by the time its parent is looked at.
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.reference_count > 0, f"block {block_id} is released more often than it was taken"
            block.reference_count -= 1
            if block.reference_count:
                continue
            if block.block_hash is None:
                self._free.append(block_id)
            else:
                self._num_idle += 1
                if block.num_children == 0:
                    self._leaves.add(block_id, block.last_use)

    def commit(self, chain: BlockChain, index: int, block_id: int, parent_id: int | None) -> int | None:
        """Make the full private block `block_id`, which holds block `index` of `chain`, matchable.

        parent_id: the cached block before it, on which the caller holds a reference; None for the first block.
        Returns the block that the caller holds afterwards: `block_id`, or an equal block that was cached before, in
        which case the reference moves there and `block_id` becomes free. None where another content already occupies
        the hash, or the cache was cleared under the parent: the block stays private, and nothing that follows it can
        be committed.
        """
        block = self._blocks[block_id]
        assert block.reference_count == 1 and block.block_hash is None, f"block {block_id} is not private"
        parent = self._blocks[parent_id] if parent_id is not None else None
        assert (parent is None) == (index == 0), "only the first block has no parent"
        assert parent is None or parent.reference_count > 0, "the caller holds the parent"
        if parent is not None and parent.block_hash is None:
            return None  # The cache was cleared since the parent was committed.
        block_hash = chain.block_hashes[index]
        existing = self._cached.get(block_hash)
        if existing is not None:
            if not self._is_same(existing, chain, index, parent):
                self.num_refuted_hits += 1
                logger.warning("block hash %s is taken by another content; not cached", block_hash.hex())
                return None
            self.attach((existing.block_id,))
            self.release((block_id,))
            return existing.block_id
        block.block_hash = block_hash
        block.parent = parent
        block.root = chain.root
        block.tenant = tenant_of(chain.scope)
        block.tokens = chain.block_tokens(index)
        block.extras = chain.block_extras(index)
        if parent is not None:
            parent.num_children += 1
        self._cached[block_hash] = block
        self._by_tenant.setdefault(block.tenant, {})[block_hash] = block
        self._digest += Digest(1, block_checksum(block_hash))
        self._note(BlocksStored, block.tenant, block_hash)
        return block_id

    def is_writable(self, block_id: int) -> bool:
        """Whether a sequence that holds the block may write into it: a shared block is never written."""
        block = self._blocks[block_id]
        return block.reference_count == 1 and block.block_hash is None

    def clear(self) -> None:
        """Drop every idle block from the cache, and make those in use unmatchable; they become free on release."""
        self._forget(self._cached.values())
        self._cached.clear()
        self._by_tenant.clear()
        self._digest = Digest()
        self._end_run()
        self._events.append(BlocksCleared())

    def purge(self, tenant: bytes) -> int:
        """Do the same with one tenant's blocks only, at a cost that depends on them alone. Returns how many there were.

        tenant: 16 bytes, its key. A block's parent is of the same chain, hence of the same tenant, so what is left is
        whole.
        """
        blocks = self._by_tenant.pop(tenant, {})
        self._forget(blocks.values())
        for block_hash in blocks:
            del self._cached[block_hash]
            self._note(BlocksRemoved, tenant, block_hash)
        self._digest -= Digest.of(blocks)
        return len(blocks)

    def inventory(self) -> tuple[BlocksStored, ...]:
        """Every cached block, by tenant."""
        return tuple(BlocksStored(tenant, tuple(blocks)) for tenant, blocks in self._by_tenant.items())

    def drain_events(self) -> tuple[Event, ...]:
        """What was stored and removed since the last call, in order; the caller publishes it."""
        self._end_run()
        events = tuple(self._events)
        self._events.clear()
        return events

    def check_invariants(self) -> None:
        """Assert that states, counts, the hash map and the leaves agree; for tests."""
        idle = [b for b in self._blocks if b.block_hash is not None and b.reference_count == 0]
        assert len(idle) == self._num_idle, "the count of idle blocks is theirs"
        assert len(set(self._free)) == len(self._free), "no block is free twice"
        for block_id in self._free:
            block = self._blocks[block_id]
            assert block.reference_count == 0 and block.block_hash is None, "a free block is neither held nor cached"
        assert all(self._cached[h].block_hash == h for h in self._cached), "map and blocks agree"
        assert len(self._cached) == sum(b.block_hash is not None for b in self._blocks)
        assert all(self._by_tenant.values()), "no tenant is kept that has no blocks"
        assert self._cached == {h: block for blocks in self._by_tenant.values() for h, block in blocks.items()}
        assert all(block.tenant == tenant for tenant, blocks in self._by_tenant.items() for block in blocks.values())
        assert self._digest == Digest.of(self._cached), "the digest is of what is cached"
        for block in self._blocks:
            children = [b for b in self._blocks if b.parent is block]
            assert len(children) == block.num_children, "a block knows how many children it has"
            assert block.parent is None or block.parent.block_hash is not None, "a parent stays while it has children"
            if block.reference_count and block.parent is not None:
                assert block.parent.reference_count, "who holds a block holds its parent"
        assert len(self._leaves) == sum(b.num_children == 0 for b in idle), "exactly the idle leaves can be evicted"

    def _is_same(self, block: _Block, chain: BlockChain, index: int, parent: _Block | None) -> bool:
        return (
            block.parent is parent
            and block.root == chain.root
            and block.tokens == chain.block_tokens(index)
            and block.extras == chain.block_extras(index)
        )

    def _evict(self) -> _Block:
        block_id = self._leaves.pop()
        if block_id is None:
            raise PoolExhaustedError(f"all {self.num_blocks} blocks are in use")
        block = self._blocks[block_id]
        assert block.reference_count == 0 and block.num_children == 0 and block.block_hash is not None
        self.num_evicted_blocks += 1
        self._num_idle -= 1
        self._remove(block.block_hash, block.tenant)
        parent = block.parent
        self._reset(block)
        if parent is not None:
            parent.num_children -= 1
            if parent.num_children == 0 and parent.reference_count == 0:
                self._leaves.add(parent.block_id, parent.last_use)
        return block

    def _remove(self, block_hash: BlockHash, tenant: bytes) -> None:
        del self._cached[block_hash]
        blocks = self._by_tenant[tenant]
        del blocks[block_hash]
        if not blocks:
            del self._by_tenant[tenant]
        self._digest -= Digest(1, block_checksum(block_hash))
        self._note(BlocksRemoved, tenant, block_hash)

    def _forget(self, blocks: Iterable[_Block]) -> None:
        """Make cached blocks free or, where they are in use, private to who holds them."""
        for block in blocks:
            if block.reference_count == 0:
                self._leaves.discard(block.block_id)
                self._free.append(block.block_id)
                self._num_idle -= 1
            self._reset(block)

    def _reset(self, block: _Block) -> None:
        block.block_hash = None
        block.parent = None
        block.num_children = 0
        block.root = block.tenant = block.tokens = b""
        block.extras = NO_EXTRAS

    def _note(self, kind: type[BlocksStored] | type[BlocksRemoved], tenant: bytes, block_hash: BlockHash) -> None:
        # Runs of one kind of one tenant become one event, which keeps batches short.
        if self._run is not None and self._run[:2] == (kind, tenant):
            self._run[2].append(block_hash)
        else:
            self._end_run()
            self._run = (kind, tenant, [block_hash])

    def _end_run(self) -> None:
        if self._run is not None:
            kind, tenant, block_hashes = self._run
            self._events.append(kind(tenant, tuple(block_hashes)))
            self._run = None
