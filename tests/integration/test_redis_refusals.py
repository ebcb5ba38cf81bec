"""A Redis that can't be used is refused in one clear sentence, in bounded time, and without its password."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from cache_index.errors import StoreRefusedError, StoreUnavailableError
from cache_index.opening import open_store
from cache_index.redis_store import RedisStore
from cache_index.redis_store.link import RedisLink
from cache_index.settings import IndexSettings
from tests.index_examples import inventory, stored
from tests.index_stores import next_namespace
from tests.redis_servers import RedisCluster, RedisServer, redis_server

PASSWORD = "pa55word-of-redis"
CALL_TIMEOUT_S = 0.5


def settings(url: str, **changes: Any) -> IndexSettings:
    return IndexSettings(redis_url=SecretStr(url), call_timeout_s=CALL_TIMEOUT_S, namespace=next_namespace(), **changes)


async def refusal(index: IndexSettings) -> StoreUnavailableError:
    """What the first call raises; one sentence, soon, that keeps the secret."""
    store = RedisStore(index)
    began_s = time.monotonic()
    with pytest.raises(StoreUnavailableError) as caught:
        await store.describe()
    assert time.monotonic() - began_s < CALL_TIMEOUT_S + 2.0
    await store.close()
    text = str(caught.value)
    assert "\n" not in text
    assert PASSWORD not in text
    assert str(index.shown_url) in text
    return caught.value


class Port:
    """A port of loopback that says the same to everybody who asks."""

    def __init__(self, answer: bytes | None) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for line in self._held:
            line.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = self._listener.accept()
                if self._answer is None:
                    self._held.append(line)
                    continue
                with line, contextlib.suppress(OSError):
                    line.recv(4_096)
                    line.sendall(self._answer)


@contextlib.contextmanager
def port(answer: bytes | None) -> Iterator[str]:
    opened = Port(answer)
    try:
        yield opened.url
    finally:
        opened.close()


async def test_a_port_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
    error = await refusal(settings(url))
    assert "can't be reached" in str(error)
    assert not isinstance(error, StoreRefusedError), "it may come up yet"


async def test_a_server_that_answers_nothing() -> None:
    with port(None) as url:
        error = await refusal(settings(url))
    assert f"did not answer within {CALL_TIMEOUT_S:g} s" in str(error)
    assert not isinstance(error, StoreRefusedError)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x15\x03\x01\x00\x02\x02\x0a",
    ],
    ids=["http", "ssh", "tls"],
)
async def test_a_server_of_another_protocol(answer: bytes) -> None:
    with port(answer) as url:
        error = await refusal(settings(url))
    assert "does not speak Redis's protocol" in str(error)
    assert isinstance(error, StoreRefusedError)


async def test_a_server_that_hangs_up() -> None:
    with port(b"") as url:
        error = await refusal(settings(url))
    assert "can't be reached" in str(error)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that asks for a password."""
    with redis_server(tmp_path_factory.mktemp("redis-locked"), "--requirepass", PASSWORD) as server:
        yield server


@pytest.mark.parametrize(
    ("user", "password"),
    [(None, None), (None, "another"), ("nobody", PASSWORD), ("nobody", None)],
    ids=["no password", "a wrong password", "an unknown user", "a user without a password"],
)
async def test_a_wrong_user_or_password(locked: RedisServer, user: str | None, password: str | None) -> None:
    secret = SecretStr(password) if password is not None else None
    error = await refusal(settings(locked.url, redis_username=user, redis_password=secret))
    assert "refuses the user or password" in str(error)
    assert isinstance(error, StoreRefusedError)


@pytest.mark.parametrize("by_url", [True, False], ids=["in the URL", "in the settings"])
async def test_the_right_password_is_taken_from_the_url_or_the_settings(locked: RedisServer, by_url: bool) -> None:
    index = (
        settings(f"redis://:{PASSWORD}@127.0.0.1:{locked.port}")
        if by_url
        else settings(locked.url, redis_password=SecretStr(PASSWORD))
    )
    store = RedisStore(index)
    assert "Redis" in await store.describe()
    await store.close()


async def test_a_password_with_every_sign_that_urls_give_a_meaning(tmp_path: Path) -> None:
    password = "a:b@c/d?e#f%g h"
    with redis_server(tmp_path) as server:
        with server.client() as admin:
            admin.config_set("requirepass", password)
        encoded = "".join(f"%{ord(sign):02X}" for sign in password)
        for index in (
            settings(f"redis://:{encoded}@127.0.0.1:{server.port}"),
            settings(server.url, redis_password=SecretStr(password)),
        ):
            store = RedisStore(index)
            assert "Redis" in await store.describe()
            await store.close()


async def test_a_namespace_of_another_major_version_is_left_alone(redis: RedisServer) -> None:
    index = settings(redis.url)
    key = f"{index.namespace}:{{{index.namespace}}}:meta"
    with redis.client() as client:
        client.hset(key, "format", "2")
        error = await refusal(index)
        assert isinstance(error, StoreRefusedError)
        assert "another major version of warmroute" in str(error)
        assert index.namespace in str(error)
        store = RedisStore(index)
        for call in (
            store.publish_inventory(inventory("r1", 1, stored("a"))),
            store.deregister("r1", 1),
            store.read(None, 0.0),
        ):
            with pytest.raises(StoreRefusedError) as caught:
                await call
            assert "another major version of warmroute" in str(caught.value)
        await store.close()
        assert client.keys(f"{index.namespace}:*") == [key.encode()]
        assert client.hgetall(key) == {b"format": b"2"}


async def test_looking_at_a_store_writes_nothing(redis: RedisServer) -> None:
    index = settings(redis.url)
    store = RedisStore(index)
    assert "standalone" in await store.describe()
    await store.close()
    with redis.client() as client:
        assert client.keys(f"{index.namespace}:*") == []


async def test_a_node_of_a_cluster_is_no_single_server_nor_the_other_way(
    redis: RedisServer, redis_nodes: RedisCluster
) -> None:
    error = await refusal(settings(redis_nodes.nodes[0].url))
    assert "give redis+cluster://" in str(error)
    error = await refusal(settings(f"redis+cluster://127.0.0.1:{redis.port}"))
    assert "no Cluster; give redis://" in str(error)


@pytest.mark.parametrize(
    ("version", "is_old"),
    [("5.0.14", True), ("6.0.16", True), ("6.2.0", False), ("7.2.4", False), ("10.0.1", False), ("unknown", True)],
)
async def test_a_server_that_is_too_old(version: str, is_old: bool) -> None:
    # What a server of that version says of itself; there is none older than 6.2 at hand to be asked.
    link = RedisLink(settings("redis://127.0.0.1:1"))
    facts = {"redis_version": version, "redis_mode": "standalone"}
    if not is_old:
        assert link._checked(facts) == f"Redis {version}, standalone"
        return
    with pytest.raises(StoreRefusedError) as caught:
        link._checked(facts)
    assert f"is version {version}, and 6.2 or newer is needed" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{PASSWORD}/x@127.0.0.1",
        f"redis://user:{PASSWORD}@127.0.0.1:port",
        "redis+sentinel://127.0.0.1:26379",
        f"redis+sentinel://u:{PASSWORD}@127.0.0.1:26379/mymaster/x",
        "redis+cluster://,",
        f"redis+cluster://u:{PASSWORD}@",
        f"redis+cluster://u:{PASSWORD}@[::1",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_a_word_of_its_password(url: str) -> None:
    with pytest.raises(StoreRefusedError) as caught:
        open_store(settings(url))
    assert "can't be read" in str(caught.value)
    assert PASSWORD not in str(caught.value)
    assert "user:" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://x", "redis:x", "", f"redis://h/?password={PASSWORD}", "REDIS://h"])
def test_a_url_of_another_kind_is_refused_by_the_settings(url: str) -> None:
    with pytest.raises(ValidationError) as caught:
        settings(url)
    assert PASSWORD not in str(caught.value)
