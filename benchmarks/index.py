"""What the index costs: the mirror in memory beside Ray's own prefix tree, and Redis beside a PING.

    python benchmarks/index.py [--blocks 100000 1000000] [--lookups 2000]

Everything is measured in one run on one machine, side by side, so ratios may be compared and times only roughly. The
traffic is prompts of 64 or 512 blocks of 16 tokens of one tenant; the first half of each is shared by a group of
prompts, and each prompt is held by one to three replicas. Looked up are prompts that were stored, half of them with a
tail of their own. Redis is a server that this program starts on a free port of loopback, and ends.
"""

import argparse
import asyncio
import gc
import random
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis.asyncio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cache_index.blocks import BlockHash
from cache_index.events import BlocksRemoved, BlocksStored, EventBatch, Inventory, Registration
from cache_index.identity import CacheIdentity
from cache_index.memory import MemoryIndex
from cache_index.mirror import IndexMirror
from cache_index.redis_store import RedisStore
from cache_index.settings import IndexSettings
from tests.redis_servers import RedisServer, redis_server

TENANT = b"t" * 16
IDENTITY = CacheIdentity("w", "c", "f", "f", None, "a", "t", None, None, 16)
PROMPTS_PER_GROUP = 16
CHARACTERS_PER_BLOCK = 64  # 16 tokens of four characters, the usual rule of thumb for English.


@dataclass(frozen=True)
class Traffic:
    """Chains that were stored, each with its replicas, and chains to look up."""

    chains: Sequence[tuple[BlockHash, ...]]
    holders: Sequence[Sequence[str]]
    lookups: Sequence[tuple[BlockHash, ...]]

    @classmethod
    def draw(cls, num_blocks: int, chain_blocks: int, num_replicas: int, num_lookups: int) -> "Traffic":
        """num_blocks: different ones. The same arguments give the same traffic."""
        source = random.Random(num_blocks * 1_000 + chain_blocks + num_replicas)
        shared_blocks = chain_blocks // 2
        chains: list[tuple[BlockHash, ...]] = []
        while num_blocks > 0:
            shared = _hashes(source, shared_blocks)
            num_blocks -= shared_blocks
            for _ in range(PROMPTS_PER_GROUP):
                chains.append(shared + _hashes(source, chain_blocks - shared_blocks))
                num_blocks -= chain_blocks - shared_blocks
        replicas = replica_names(num_replicas)
        holders = [source.sample(replicas, source.randint(1, 3)) for _ in chains]
        lookups = []
        for number in range(num_lookups):
            chain = source.choice(chains)
            # Bytes of their own, as those of a prompt that was just hashed: not the very objects that are stored.
            chain = tuple(bytes(bytearray(block_hash)) for block_hash in chain)
            lookups.append(chain if number % 2 else chain[:-4] + _hashes(source, 4))
        return cls(chains, holders, lookups)

    def batches(self) -> Iterator[EventBatch]:
        seqs = dict.fromkeys((name for names in self.holders for name in names), 1)
        for chain, names in zip(self.chains, self.holders, strict=True):
            for name in names:
                seqs[name] += 1
                yield EventBatch(name, 1, seqs[name], (BlocksStored(TENANT, chain),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--lookups", type=int, default=2_000)
    arguments = parser.parse_args()
    compare_with_prefix_tree(arguments.lookups)
    for num_blocks in arguments.blocks:
        measure_mirror(num_blocks, arguments.lookups)
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as server:
        asyncio.run(measure_redis(server, arguments.lookups))
        asyncio.run(measure_load(server, arguments.blocks[-1]))


def measure_mirror(num_blocks: int, num_lookups: int) -> None:
    """The index in memory, by number of replicas and length of the chain."""
    print(f"\nmirror, {num_blocks:,} blocks")
    # Beside it, what looking the hashes up in a plain dict takes by itself: memory far away is most of the time.
    print("  replicas  chain      p50       p99   a dict's p50")
    for num_replicas in (8, 64, 256):
        for chain_blocks in (64, 512):
            traffic = Traffic.draw(num_blocks, chain_blocks, num_replicas, num_lookups)
            index = filled_index(traffic, num_replicas)
            p50_s, p99_s = timed(partial(index.match, TENANT), traffic.lookups)
            plain = dict.fromkeys(block_hash for chain in traffic.chains for block_hash in chain)
            dict_s, _ = timed(lambda chain, get=plain.get: deque(map(get, chain), maxlen=0), traffic.lookups)
            print(
                f"  {num_replicas:8}  {chain_blocks:5}  {p50_s * 1e6:6.1f} us {p99_s * 1e6:6.1f} us "
                f"{dict_s * 1e6:11.1f} us"
            )
    traffic = Traffic.draw(num_blocks, 64, 64, 1)
    batches = list(traffic.batches())
    index = MemoryIndex()
    for name in replica_names(64):
        index.replace(Inventory(Registration(name, 1, IDENTITY), 1, ()))
    start_s = time.perf_counter()
    for batch in batches:
        index.apply(batch)
    took_s = time.perf_counter() - start_s
    num_stored = sum(len(event.block_hashes) for batch in batches for event in batch.events)
    start_s = time.perf_counter()
    for batch in batches[: len(batches) // 4]:
        removed = tuple(BlocksRemoved(TENANT, event.block_hashes) for event in batch.events)
        index.apply(EventBatch(batch.replica_id, 1, index.seq(batch.replica_id) + 1, removed))
    removed_s = time.perf_counter() - start_s
    print(
        f"  applied: {num_stored / took_s:,.0f} stored blocks/s, {num_stored / 4 / removed_s:,.0f} removed blocks/s; "
        f"{memory_bytes(batches) / num_blocks:.0f} bytes/block (and 49 for its hash, which the news bring along)"
    )


def memory_bytes(batches: Sequence[EventBatch]) -> int:
    """What an index of these batches takes, besides the hashes in them."""
    index = MemoryIndex()
    for name in replica_names(64):
        index.replace(Inventory(Registration(name, 1, IDENTITY), 1, ()))
    tracemalloc.start()
    for batch in batches:
        index.apply(batch)
    taken_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken_bytes


def compare_with_prefix_tree(num_lookups: int) -> None:
    """The same prompts in Ray's prefix tree, as text, for that is what it matches."""
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

    num_blocks, num_replicas = 100_000, 64
    print(f"\nmirror beside ray's PrefixTree, {num_blocks:,} blocks, {num_replicas} replicas")
    for chain_blocks in (64, 512):
        traffic = Traffic.draw(num_blocks, chain_blocks, num_replicas, num_lookups)
        index = filled_index(traffic, num_replicas)
        tree = PrefixTree()
        tree.add_tenants(replica_names(num_replicas), 0.0)
        for chain, names in zip(traffic.chains, traffic.holders, strict=True):
            for name in names:
                tree.insert(as_text(chain), name, 0.0)
        ours_s, _ = timed(partial(index.match, TENANT), traffic.lookups)
        texts = [as_text(chain) for chain in traffic.lookups]
        # With the replicas to choose from, as its router asks.
        choice = replica_names(num_replicas)
        theirs_s, _ = timed(partial(_match_in_tree, tree, choice), texts)
        print(
            f"  chain {chain_blocks:3}: ours {ours_s * 1e6:6.1f} us, PrefixTree {theirs_s * 1e6:8.1f} us, "
            f"{theirs_s / ours_s:5.1f} times ours (at p50; at least 10 expected)"
        )


def _match_in_tree(tree: Any, choice: list[str], text: str) -> object:
    return tree.prefix_match(text, choice)


async def measure_redis(server: RedisServer, num_lookups: int) -> None:
    """Whole-chain lookups beside a PING on the same kind of client, and the other layouts that were tried."""
    print("\nRedis: whole-chain lookup, 100,000 blocks, 64 replicas")
    client = redis.asyncio.Redis(port=server.port, protocol=2)
    for chain_blocks in (64, 512):
        with server.client() as admin:
            admin.flushall()
        traffic = Traffic.draw(100_000, chain_blocks, 64, num_lookups)
        store = RedisStore(IndexSettings(redis_url=server.secret_url, lease_s=3_600.0))
        await publish_all(store, traffic, 64)
        await fill_other_layouts(client, traffic)
        chain_script = client.register_script(CHAIN_SCRIPT)
        ways: dict[str, Callable[[Sequence[BlockHash]], Awaitable[object]]] = {
            "PING": lambda _: client.ping(),
            "lookup (one hash per tenant, HMGET)": partial(store.match, TENANT),
            "tried: one key per block, MGET": lambda chain: client.mget([b"k" + name for name in chain]),
            "tried: one hash per block, Lua": partial(_holders_of, chain_script),
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        # In turn, so that a slow moment of the machine meets all of them.
        for chain in traffic.lookups:
            for name, ask in ways.items():
                start_s = time.perf_counter()
                await ask(chain)
                taken[name].append(time.perf_counter() - start_s)
        ping_s = statistics.median(taken["PING"])
        for name, times in taken.items():
            p50_s = statistics.median(times)
            aim = "  (at most 3 expected)" if name.startswith("lookup") and chain_blocks == 64 else ""
            print(f"  chain {chain_blocks:3}: {name:36} p50 {p50_s * 1e6:7.0f} us, {p50_s / ping_s:4.1f} PINGs{aim}")
        await store.close()
    await client.aclose()


def _holders_of(chain_script: Any, chain: Sequence[BlockHash]) -> Awaitable[object]:
    return chain_script([b"h" + name for name in chain])


# What a hash of replica -> epoch per block would take: the replicas of each block of a chain, up to one without any.
CHAIN_SCRIPT = """
local found = {}
for i, key in ipairs(KEYS) do
  local holders = redis.call('HGETALL', key)
  if #holders == 0 then break end
  found[i] = holders
end
return found
"""


async def fill_other_layouts(client: "redis.asyncio.Redis", traffic: Traffic) -> None:
    """One key per block with a bitmap, and one hash per block with its replicas."""
    slots = {name: slot for slot, name in enumerate(replica_names(64))}
    held: dict[BlockHash, list[str]] = {}
    for chain, names in zip(traffic.chains, traffic.holders, strict=True):
        for block_hash in chain:
            held.setdefault(block_hash, []).extend(names)
    pipeline = client.pipeline(transaction=False)
    for number, (block_hash, names) in enumerate(held.items()):
        bits = 0
        for name in names:
            bits |= 1 << slots[name]
        pipeline.set(b"k" + block_hash, bits.to_bytes(8, "little"))
        pipeline.hset(b"h" + block_hash, mapping=dict.fromkeys(names, "1"))
        if number % 2_000 == 0:
            await pipeline.execute()
    await pipeline.execute()


async def measure_load(server: RedisServer, num_blocks: int) -> None:
    """Memory and publishing, and a new router that loads everything while it goes on deciding."""
    with server.client() as admin:
        admin.flushall()
        before_bytes = admin.info("memory")["used_memory"]
    traffic = Traffic.draw(num_blocks, 64, 64, 1_000)
    settings = IndexSettings(
        redis_url=server.secret_url, lease_s=3_600.0, mirror_blocks_max=2 * num_blocks, lookup_timeout_s=1.0
    )
    store = RedisStore(settings)
    start_s = time.perf_counter()
    num_copies = await publish_all(store, traffic, 64)
    took_s = time.perf_counter() - start_s
    with server.client() as admin:
        memory = admin.info("memory")["used_memory"] - before_bytes
        log = admin.memory_usage("warmroute:{warmroute}:log", samples=0)
    print(f"\nRedis: {num_blocks:,} blocks, {num_copies:,} copies on 64 replicas")
    print(
        f"  memory {memory / num_blocks:.0f} bytes/block (under 120 expected), of which {log / num_blocks:.0f} for "
        f"the log; inventories {num_copies / took_s:,.0f} blocks/s"
    )
    start_s = time.perf_counter()
    num_published = 0
    for seq, chain in enumerate(traffic.chains[:500], 2):
        tail = tuple(random.Random(seq).randbytes(16) for _ in chain)
        await store.publish(EventBatch(replica_names(64)[0], 1, seq, (BlocksStored(TENANT, tail),)))
        num_published += len(tail)
    print(f"  batches of 64: {num_published / (time.perf_counter() - start_s):,.0f} blocks/s from one replica")

    mirror = IndexMirror(store, settings)
    following = asyncio.create_task(mirror.follow())
    start_s = last_s = time.perf_counter()
    longest_s, num_decisions = 0.0, 0
    while not mirror.is_complete:
        await mirror.lookup(TENANT, traffic.lookups[num_decisions % len(traffic.lookups)])
        num_decisions += 1
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
        await asyncio.sleep(0.001)
    took_s = time.perf_counter() - start_s
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    print(
        f"  a new router's mirror: {mirror.num_blocks:,} blocks in {took_s:.1f} s; meanwhile {num_decisions:,} "
        f"lookups, the longest wait between two {longest_s * 1e3:.0f} ms, {mirror.num_blind_lookups} of them blind"
    )
    await store.close()


async def publish_all(store: RedisStore, traffic: Traffic, num_replicas: int) -> int:
    """Every replica's inventory. Returns how many blocks they hold together."""
    held: dict[str, dict[BlockHash, None]] = {name: {} for name in replica_names(num_replicas)}
    for chain, names in zip(traffic.chains, traffic.holders, strict=True):
        for name in names:
            held[name].update(dict.fromkeys(chain))
    for name, blocks in held.items():
        stored = BlocksStored(TENANT, tuple(blocks))
        await store.publish_inventory(Inventory(Registration(name, 1, IDENTITY), 1, (stored,)))
    return sum(map(len, held.values()))


def filled_index(traffic: Traffic, num_replicas: int) -> MemoryIndex:
    index = MemoryIndex()
    for name in replica_names(num_replicas):
        index.replace(Inventory(Registration(name, 1, IDENTITY), 1, ()))
    for batch in traffic.batches():
        index.apply(batch)
    return index


def timed(ask: Callable[..., object], questions: Sequence[object]) -> tuple[float, float]:
    """Seconds at p50 and at p99."""
    taken = []
    gc.collect()
    gc.disable()
    try:
        for question in questions:
            start_s = time.perf_counter()
            ask(question)
            taken.append(time.perf_counter() - start_s)
    finally:
        gc.enable()
    taken.sort()
    return taken[len(taken) // 2], taken[len(taken) * 99 // 100]


def replica_names(num_replicas: int) -> list[str]:
    return [f"replica-{number:03}" for number in range(num_replicas)]


def as_text(chain: Sequence[BlockHash]) -> str:
    """A text in which different blocks are different stretches."""
    return "".join((block_hash.hex() * 2)[:CHARACTERS_PER_BLOCK] for block_hash in chain)


def _hashes(source: random.Random, num: int) -> tuple[BlockHash, ...]:
    return tuple(source.randbytes(16) for _ in range(num))


if __name__ == "__main__":
    main()
