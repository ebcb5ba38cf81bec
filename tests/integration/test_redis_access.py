"""Who may do what in Redis: the ACL examples of cache_index/REDIS.md, applied as they stand there."""

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis as redis_py
from pydantic import SecretStr

from cache_index.errors import StoreRefusedError
from cache_index.events import BlocksCleared
from cache_index.redis_store import RedisStore
from cache_index.settings import IndexSettings
from tests.index_examples import IDENTITY, OTHER_TENANT, TENANT, batch, chain, heartbeat, inventory, removed, stored
from tests.index_stores import plain, snapshot
from tests.redis_servers import RedisCluster, RedisServer, redis_server

DOCUMENT = Path(__file__).resolve().parents[2] / "cache_index" / "REDIS.md"


def example(user: str) -> list[str]:
    """The words of the document's ACL command for a user."""
    [command] = re.findall(rf"^(ACL SETUSER {user} .*)$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    return str(command).split()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server of its own, whose default user may do nothing."""
    with redis_server(tmp_path_factory.mktemp("redis-acl")) as server:
        with server.client() as admin:
            admin.execute_command("ACL", "SETUSER", "admin", "on", ">admin", "~*", "&*", "+@all")
            admin.execute_command(*example("warmroute"))
            admin.execute_command("ACL", "SETUSER", "default", "off")
        yield server


def settings(server: RedisServer) -> IndexSettings:
    return IndexSettings(
        redis_url=server.secret_url,
        redis_username="warmroute",
        redis_password=SecretStr("a-long-password"),
        lease_s=3_600.0,
    )


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[RedisStore]:
    with server.client(username="admin", password="admin") as admin:
        admin.flushall()
    store = RedisStore(settings(server))
    yield store
    await store.close()


async def use_all_of(store: RedisStore) -> None:
    """Everything that gateways, replicas and the command line ask of a store."""
    assert "Redis" in await store.describe()
    await store.publish_inventory(inventory("r1", 1, stored("abc"), stored("x", OTHER_TENANT)))
    await store.publish_inventory(inventory("r1", 2, stored("ab"), stored("x", OTHER_TENANT)))
    await store.publish(batch("r1", 3, stored("d"), removed("b"), removed("x", OTHER_TENANT)))
    await store.announce(IDENTITY)
    cursor = (await store.read(None, 0.0)).cursor
    # What the older inventory left is cleaned up here.
    notices = await store.heartbeat(heartbeat("r1", 3, "ad"))
    assert notices.identities == (IDENTITY,)
    assert await store.match(TENANT, chain("ab")) == {"r1": 1}
    assert len((await store.read(cursor, 1.0)).items) == 1
    assert (await store.read(cursor, 0.01)).items
    stats = await store.stats()
    assert all(tenant.memory_bytes is not None for tenant in stats.tenants)
    assert await store.purge(TENANT) == 2
    await store.publish_inventory(inventory("r1", 4, stored("ab")))
    await store.publish(batch("r1", 5, BlocksCleared(), stored("a")))
    assert await snapshot(store) == plain([inventory("r1", 5, stored("a"))])
    await store.deregister("r1", 1)


async def test_the_documented_user_may_do_all_that_warmroute_does(store: RedisStore) -> None:
    await use_all_of(store)


async def test_the_documented_user_suffices_in_a_cluster(redis_nodes: RedisCluster) -> None:
    [more] = re.findall(r"In a Cluster also `([^`]*)`", DOCUMENT.read_text(encoding="utf-8"))
    for node in redis_nodes.nodes:
        with node.client() as admin:
            admin.execute_command(*example("warmroute"), *more.split())
    store = RedisStore(
        IndexSettings(
            redis_url=redis_nodes.secret_url,
            redis_username="warmroute",
            redis_password=SecretStr("a-long-password"),
            lease_s=3_600.0,
        )
    )
    await use_all_of(store)
    await store.close()


@pytest.mark.parametrize("word", ["+hset", "+xadd", "+evalsha", "+zrangebyscore", "+hscan", "+pexpire", "+info"])
async def test_without_one_of_its_commands_the_user_is_refused(
    server: RedisServer, store: RedisStore, word: str
) -> None:
    # Or the example would grant more than is needed, and the test above would prove little.
    words = example("warmroute")
    assert word in words
    with server.client(username="admin", password="admin") as admin:
        admin.execute_command(*words, word.replace("+", "-"))
        try:
            with pytest.raises(StoreRefusedError) as caught:
                await use_all_of(store)
        finally:
            admin.execute_command(*words)
    assert "lets this user do too little" in str(caught.value)
    assert "a-long-password" not in str(caught.value)


async def test_a_client_of_one_tenant_sees_its_own_partition_and_nothing_else(
    server: RedisServer, store: RedisStore
) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("ab"), stored("c", OTHER_TENANT)))
    with server.client(username="admin", password="admin") as admin:
        admin.execute_command(*(word.replace("TENANT", TENANT.hex()) for word in example("one-tenant")))
    own, other = (f"warmroute:{{{tenant.hex()}}}:blocks" for tenant in (TENANT, OTHER_TENANT))
    with server.client(username="one-tenant", password="another-password") as client:
        assert client.hmget(own, [*chain("ab"), *chain("c")]) == [b"\x01", b"\x01", None]
        assert client.hlen(own) == 4
        for words in (
            ("HGET", other, chain("c")[0]),
            ("HLEN", other),
            ("HSCAN", other, 0),
            ("HGET", "warmroute:{warmroute}:replicas", "r1"),
            ("HGET", "warmroute:{warmroute}:meta", "version"),
            ("SMEMBERS", "warmroute:{warmroute}:tenants"),
            ("XRANGE", "warmroute:{warmroute}:log", "-", "+"),
            ("HSET", own, chain("a")[0], b"\xff"),
            ("HDEL", own, chain("a")[0]),
            ("UNLINK", own),
            ("EVAL", "return redis.call('HGET', KEYS[1], 'slots')", 1, other),
            ("KEYS", "*"),
            ("SCAN", 0),
            ("FLUSHALL",),
            ("CONFIG", "GET", "*"),
            ("ACL", "LIST"),
        ):
            with pytest.raises(redis_py.exceptions.NoPermissionError):
                client.execute_command(*words)


async def test_every_key_is_in_the_document(server: RedisServer, store: RedisStore) -> None:
    await use_all_of(store)
    await store.publish_inventory(inventory("r1", 6, stored("a")))
    with server.client(username="admin", password="admin") as admin:
        keys = {key.decode() for key in admin.keys("*")}
        kinds = {key: admin.type(key).decode() for key in keys}
        expiring = {key for key in keys if admin.pttl(key) > 0}
    text = DOCUMENT.read_text(encoding="utf-8")
    assert len(keys) >= 9
    for key in keys:
        name = key.replace(TENANT.hex(), "<tenant>").replace(OTHER_TENANT.hex(), "<tenant>")
        assert f"`{name}`" in text or f"…:{name.rpartition(':')[2]}`" in text, f"{key} is not in the document"
    assert kinds["warmroute:{warmroute}:log"] == "stream"
    # All but what came after the heartbeat, which sets the time.
    assert {key for key in keys if key.endswith(":blocks")} <= expiring
    assert {"warmroute:{warmroute}:meta", "warmroute:{warmroute}:log"} <= expiring
