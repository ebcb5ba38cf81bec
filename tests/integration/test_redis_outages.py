"""What an outage of Redis costs a store that is in use, and that nothing is wrong once it is over.

Killed, frozen, full, cut off in mid-command, or a Cluster without one of its nodes. Refusals at the start are in
test_redis_refusals.py.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from redis.crc import key_slot

from cache_index.errors import CacheIndexError, StoreRefusedError, StoreUnavailableError
from cache_index.events import BlocksCleared
from cache_index.redis_store import RedisStore
from cache_index.settings import IndexSettings
from tests.index_examples import OTHER_TENANT, TENANT, batch, chain, heartbeat, inventory, removed, stored
from tests.index_stores import next_namespace, plain, snapshot
from tests.redis_servers import RedisServer, redis_cluster, redis_server
from tests.tcp_proxy import TcpProxy

CALL_TIMEOUT_S = 0.5
# For calls that are to fail by what happens to them, and never by a busy machine.
CALL_TIMEOUT_LONG_S = 10.0
# What a busy machine may add to a bound. Not a measure of speed: without the bound a call would never end.
MARGIN_S = 3.0
PATIENCE_S = 30.0
# Each of a Cluster's nodes serves a third of its slots, in their order.
NUM_NODES, NUM_SLOTS = 3, 16_384


def settings(url: str, **changes: Any) -> IndexSettings:
    values = {"call_timeout_s": CALL_TIMEOUT_S, "lease_s": 3_600.0, "namespace": next_namespace(), **changes}
    return IndexSettings(redis_url=SecretStr(url), **values)


@contextlib.asynccontextmanager
async def opened(index: IndexSettings) -> AsyncIterator[RedisStore]:
    store = RedisStore(index)
    try:
        yield store
    finally:
        await store.close()


def patient(index: IndexSettings) -> IndexSettings:
    return index.model_copy(update={"call_timeout_s": CALL_TIMEOUT_LONG_S})


async def connected(store: RedisStore) -> None:
    """Return once a store is in use, however long that takes on a busy machine."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(StoreUnavailableError):
                await store.describe()
                return


@contextlib.contextmanager
def unavailable_soon() -> Iterator[None]:
    """What is inside fails, in bounded time, with one sentence; and not as if somebody had to change a setting."""
    began_s = time.monotonic()
    with pytest.raises(StoreUnavailableError) as caught:
        yield
    assert time.monotonic() - began_s < CALL_TIMEOUT_S + MARGIN_S
    assert not isinstance(caught.value, StoreRefusedError)
    assert "\n" not in str(caught.value)


# A line that is cut


# In a publish these fall into the connection's greeting, the scripts, the blocks, the log's item, and behind it all.
@pytest.mark.parametrize("is_warm", [False, True], ids=["a new connection", "a connection in use"])
async def test_a_line_cut_anywhere_in_a_publish_leaves_an_index_that_an_inventory_makes_exact(
    redis: RedisServer, is_warm: bool
) -> None:
    with TcpProxy(redis.port) as line:
        url = f"redis://127.0.0.1:{line.port}"
        num_failed, num_cut = 0, 0
        for num_bytes in (0, 1, 17, 90, 250, 700, 1_500, 2_500, 3_500, 4_500, 5_500, 6_500, 7_500, 9_000, 12_000):
            index = settings(url, call_timeout_s=CALL_TIMEOUT_LONG_S)
            direct = index.model_copy(update={"redis_url": redis.secret_url})
            async with opened(direct) as other:
                await other.publish_inventory(inventory("r1", 1, stored("ab"), stored("x", OTHER_TENANT)))
                await other.publish_inventory(inventory("r2", 1, stored("abcd")))
            async with opened(index) as store, opened(direct) as reader:
                if is_warm:
                    await store.heartbeat(heartbeat("r1", 1, "abx"))
                before = line.num_cuts
                line.cut_after(num_bytes)
                news = batch("r1", 2, removed("b"), stored("c"), stored("y", OTHER_TENANT))
                is_done = True
                try:
                    await store.publish(news)
                except StoreUnavailableError:
                    is_done = False
                    num_failed += 1
                num_cut += line.num_cuts - before
                # Whatever became of the batch, r2 has nothing to do with it, and r1 has no block that it never had.
                found = await reader.match(TENANT, chain("abcd"))
                assert found["r2"] == 4
                assert found["r1"] in ((1,) if is_done else (1, 2))
                # Said again it is either done, or refused until there is an inventory; never done twice or by half.
                line.cut_after(10**9)
                with contextlib.suppress(CacheIndexError):
                    await store.publish(news)
                    assert await reader.match(TENANT, chain("acb")) == {"r1": 2, "r2": 3}
                await store.publish_inventory(inventory("r1", 3, stored("ac"), stored("y", OTHER_TENANT)))
                await store.heartbeat(heartbeat("r1", 3, "acy"))
                for asked in (store, reader):
                    assert await asked.match(TENANT, chain("acbd")) == {"r1": 2, "r2": 4}
                    assert await asked.match(TENANT, chain("b")) == {"r2": 1}
                    assert await asked.match(OTHER_TENANT, chain("y")) == {"r1": 1}
                    assert await asked.match(OTHER_TENANT, chain("x")) == {}
                    assert await snapshot(asked) == plain(
                        [
                            inventory("r1", 3, stored("ac"), stored("y", OTHER_TENANT)),
                            inventory("r2", 1, stored("abcd")),
                        ]
                    )
        # Some of the places are within what is sent and some behind it, else this would show nothing.
        assert 0 < num_failed < 15
        assert num_cut >= num_failed


@pytest.mark.parametrize("num_bytes", [2_000, 20_000, 60_000, 100_000, 150_000])
async def test_a_line_cut_within_a_large_inventory_leaves_the_one_before_until_the_next(
    redis: RedisServer, num_bytes: int
) -> None:
    names = [f"block {number}" for number in range(5_000)]
    with TcpProxy(redis.port) as line:
        index = settings(f"redis://127.0.0.1:{line.port}", call_timeout_s=CALL_TIMEOUT_LONG_S)
        direct = index.model_copy(update={"redis_url": redis.secret_url})
        async with opened(index) as store, opened(direct) as reader:
            await store.publish_inventory(inventory("r1", 1, stored("ab")))
            line.cut_after(num_bytes)
            # Each block is named twice, 16 bytes each time: in its partition and in the log.
            with unavailable_soon():
                await store.publish_inventory(inventory("r1", 2, stored(names)))
            assert await reader.match(TENANT, chain("ab")) == {"r1": 2}
            assert await reader.match(TENANT, chain(names)) == {}
            assert await snapshot(reader) == plain([inventory("r1", 1, stored("ab"))])
            await store.publish_inventory(inventory("r1", 3, stored(names[1_000:])))
            await store.heartbeat(heartbeat("r1", 3, names[1_000:]))
            assert await reader.match(TENANT, chain(names[1_000:])) == {"r1": 4_000}
            assert await reader.match(TENANT, chain(names)) == {}
            assert await reader.match(TENANT, chain("ab")) == {}
            assert await snapshot(reader) == plain([inventory("r1", 3, stored(names[1_000:]))])


async def test_a_line_cut_in_a_clear_never_brings_back_what_was_cleared(redis: RedisServer) -> None:
    num_failed = 0
    with TcpProxy(redis.port) as line:
        for num_bytes in (10, 400, 700, 1_000, 1_500, 2_500, 10_000):
            index = settings(f"redis://127.0.0.1:{line.port}", call_timeout_s=CALL_TIMEOUT_LONG_S)
            async with opened(index) as store:
                await store.publish_inventory(inventory("r1", 1, stored("ab")))
                line.cut_after(num_bytes)
                is_done = True
                try:
                    await store.publish(batch("r1", 2, BlocksCleared(), stored("c")))
                except StoreUnavailableError:
                    is_done = False
                    num_failed += 1
                line.cut_after(10**9)
                # By half it is never done: what was, or what is.
                found = await store.match(TENANT, chain("ab")), await store.match(TENANT, chain("c"))
                assert found in ([({}, {"r1": 1})] if is_done else [({"r1": 2}, {}), ({}, {"r1": 1})])
                await store.publish_inventory(inventory("r1", 3, stored("c")))
                assert await store.match(TENANT, chain("ab")) == {}
                assert await snapshot(store) == plain([inventory("r1", 3, stored("c"))])
    assert 0 < num_failed < 7


# Killed, frozen, full


async def test_a_server_that_was_killed_is_used_again_once_it_is_back(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with opened(settings(server.url)) as store:
            await store.publish_inventory(inventory("r1", 1, stored("a")))
            cursor = (await store.read(None, 0.0)).cursor
            waiting = asyncio.create_task(store.read(cursor, PATIENCE_S))
            await blocked_client(server)
            server.kill()
            # A reader that waits hears of it at once, not when its wait is over.
            with unavailable_soon():
                await waiting
            for _ in range(2):
                with unavailable_soon():
                    await store.match(TENANT, chain("a"))
                with unavailable_soon():
                    await store.publish(batch("r1", 2, stored("b")))
            server.start()
            assert await store.match(TENANT, chain("a")) == {}
            assert (await store.read(cursor, PATIENCE_S)).is_snapshot
            await store.publish_inventory(inventory("r1", 3, stored("a")))
            assert await store.match(TENANT, chain("a")) == {"r1": 1}


async def blocked_client(server: RedisServer) -> None:
    """Return once somebody waits in the server."""
    with server.client() as admin:
        async with asyncio.timeout(PATIENCE_S):
            while not admin.info("clients")["blocked_clients"]:  # noqa: ASYNC110  Only the server knows.
                await asyncio.sleep(0.01)


async def test_a_frozen_server_costs_a_bounded_time_and_no_answer_is_mixed_up(tmp_path: Path) -> None:
    """Many calls are given up half-way, before, during and after the freeze; the others get their own answers."""
    num_chains = 40
    chains = [[f"chain {number} block {at}" for at in range(num_chains)] for number in range(num_chains)]
    with redis_server(tmp_path) as server:
        # Some hundred calls wait for one another, on a machine that may be busy.
        timeout_s = 4 * CALL_TIMEOUT_S
        async with opened(settings(server.url, call_timeout_s=timeout_s)) as store:
            # Of each chain the first replica holds one block more than of the one before, and the second one less.
            await store.publish_inventory(
                inventory("r1", 1, *(stored(names[: at + 1]) for at, names in enumerate(chains)))
            )
            await store.publish_inventory(
                inventory("r2", 1, *(stored(names[: num_chains - at]) for at, names in enumerate(chains)))
            )
            num_copies = 2 * sum(range(1, num_chains + 1))

            async def ask(number: int) -> None:
                at = number % num_chains
                if number % 40 == 5:
                    assert (await store.stats()).tenants[0].num_copies == num_copies
                elif number % 40 == 7:
                    assert (await store.describe()).endswith(", standalone")
                else:
                    assert await store.match(TENANT, chain(chains[at])) == {"r1": at + 1, "r2": num_chains - at}

            async def ask_many(num_calls: int = 240) -> list[BaseException | None]:
                loop = asyncio.get_running_loop()
                tasks = [asyncio.create_task(ask(number)) for number in range(num_calls)]
                for number, task in enumerate(tasks):
                    if number % 3 == 0:
                        # Some before they are sent, most on their way.
                        loop.call_later(number * 2e-4, task.cancel)
                return await asyncio.gather(*tasks, return_exceptions=True)

            for _ in range(2):
                outcomes = await ask_many()
                assert {type(outcome) for outcome in outcomes} == {type(None), asyncio.CancelledError}
                server.freeze()
                began_s = time.monotonic()
                outcomes = await ask_many()
                assert time.monotonic() - began_s < timeout_s + MARGIN_S
                assert {type(outcome) for outcome in outcomes} == {StoreUnavailableError, asyncio.CancelledError}
                server.resume()
                outcomes = await ask_many()
                assert {type(outcome) for outcome in outcomes} == {type(None), asyncio.CancelledError}
                assert outcomes.count(None) >= 160, "none that was not given up is lost"


async def test_a_full_server_refuses_news_and_keeps_what_is_known(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, server.client() as admin:
        index = settings(server.url)
        async with opened(index) as store, opened(index) as follower:
            await store.publish_inventory(inventory("r1", 1, stored("ab"), stored("x", OTHER_TENANT)))
            await store.publish_inventory(inventory("r2", 1, stored("a")))
            cursor = (await follower.read(None, 0.0)).cursor
            # Half of the first one's lease goes by.
            admin.zincrby(f"{index.namespace}:{{{index.namespace}}}:leases", -1_800_000, "r1")
            admin.config_set("maxmemory-policy", "noeviction")
            admin.config_set("maxmemory", "1")
            for call in (
                store.publish(batch("r1", 2, stored("c"))),
                store.publish_inventory(inventory("r1", 3, stored("abc"))),
                store.publish_inventory(inventory("r3", 1)),
            ):
                with pytest.raises(StoreUnavailableError) as caught:
                    await call
                assert "out of memory" in str(caught.value)
                assert not isinstance(caught.value, StoreRefusedError), "it may be given more"
            # What is known is still told, to who was there and to who is new.
            assert await follower.match(TENANT, chain("ab")) == {"r1": 2, "r2": 1}
            assert not (await follower.read(cursor, 0.0)).is_snapshot
            expected = [inventory("r1", 1, stored("ab"), stored("x", OTHER_TENANT)), inventory("r2", 1, stored("a"))]
            assert await snapshot(follower) == plain(expected)
            # Leases are renewed, for a replica that is not heard of would be lost with all it holds.
            assert (await lease_left_s(store))["r1"] < 1_900.0
            await store.heartbeat(heartbeat("r1", 1, "abx"))
            assert (await lease_left_s(store))["r1"] > 3_500.0
            # And whoever leaves may leave.
            await store.deregister("r2", 1)
            assert await follower.match(TENANT, chain("ab")) == {"r1": 2}
            admin.config_set("maxmemory", "0")
            await store.publish_inventory(inventory("r1", 4, stored("abc")))
            await store.heartbeat(heartbeat("r1", 4, "abc"))
            assert await follower.match(TENANT, chain("abc")) == {"r1": 3}
            assert await snapshot(follower) == plain([inventory("r1", 4, stored("abc"))])


async def lease_left_s(store: RedisStore) -> dict[str, float]:
    return {replica.registration.replica_id: replica.lease_left_s for replica in (await store.stats()).replicas}


# A Cluster without one of its nodes


def tenant_on(number: int) -> bytes:
    """A tenant whose partition the numbered node serves."""
    return next(tenant for tenant in (bytes([first]) * 16 for first in range(256)) if node_of(tenant.hex()) == number)


def node_of(tag: str) -> int:
    slot: int = key_slot(tag.encode())
    return next(at for at in range(NUM_NODES) if slot < (at + 1) * NUM_SLOTS // NUM_NODES)


@pytest.mark.parametrize("is_frozen", [False, True], ids=["killed", "frozen"])
async def test_a_cluster_without_a_node_fails_in_bounded_time_and_works_again_with_it(
    tmp_path: Path, is_frozen: bool
) -> None:
    with redis_cluster(tmp_path) as cluster:
        index = settings(cluster.url)
        home = node_of(index.namespace)
        lost = (home + 1) % NUM_NODES
        near, far = tenant_on(home), tenant_on(lost)
        for node in cluster.nodes:
            with node.client() as admin:
                # The others go on with their part.
                admin.config_set("cluster-require-full-coverage", "no")
        async with opened(patient(index)) as store:
            await store.publish_inventory(inventory("r1", 1, stored("ab", near), stored("cd", far)))
        async with opened(index) as store:
            await connected(store)
            assert await store.match(far, chain("cd")) == {"r1": 2}
            if is_frozen:
                cluster.nodes[lost].freeze()
            else:
                cluster.nodes[lost].kill()
            for _ in range(3):
                with unavailable_soon():
                    await store.match(far, chain("cd"))
                with unavailable_soon():
                    await store.publish_inventory(inventory("r1", 2, stored("ab", near), stored("cd", far)))
            assert await store.match(near, chain("ab")) == {"r1": 2}
            if is_frozen:
                cluster.nodes[lost].resume()
            else:
                cluster.nodes[lost].start()
            seq = 3
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    with contextlib.suppress(CacheIndexError):
                        await store.publish_inventory(inventory("r1", seq, stored("ab", near), stored("cd", far)))
                        break
                    seq += 1
                    await asyncio.sleep(0.05)
            await store.heartbeat(heartbeat("r1", seq, "abcd"))
            assert await store.match(near, chain("ab")) == {"r1": 2}
            assert await store.match(far, chain("cd")) == {"r1": 2}
            assert await snapshot(store) == plain([inventory("r1", seq, stored("ab", near), stored("cd", far))])


async def test_a_cluster_that_gave_up_fails_in_bounded_time(tmp_path: Path) -> None:
    """Two of three are a majority, so the one left knows nothing for sure and serves nothing."""
    with redis_cluster(tmp_path) as cluster:
        async with opened(settings(cluster.url)) as store:
            await connected(store)
            for node in cluster.nodes[:2]:
                node.kill()
            for _ in range(3):
                with unavailable_soon():
                    await store.publish_inventory(inventory("r1", 2, stored("a")))
