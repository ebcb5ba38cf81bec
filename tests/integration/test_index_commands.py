"""`warmroute index`, and the question of `warmroute serve` before it starts, as typed, against real Redis servers."""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from pydantic import SecretStr

from cache_index.actor_store import ActorStore
from cache_index.errors import CacheIndexError
from cache_index.identity import tenant_key
from cache_index.redis_store import RedisStore
from cache_index.settings import IndexSettings
from deploy.errors import SettingsError, StartError
from deploy.index_check import refuse_wrong_index, require_index
from tests.index_examples import IDENTITY, OTHER_TENANT, TENANT, block, chain, heartbeat, inventory, stored
from tests.index_stores import next_namespace
from tests.redis_servers import RedisServer, redis_server

SECRET = "a secret of more than sixteen characters"
PASSWORD = "hunter2/of:all@redis"
TIMEOUT_S = 60
HEARTBEAT_INTERVAL_S = 0.4


async def warmroute(*arguments: str, **environ: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command, while this event loop goes on."""
    return await ended(await start(*arguments, **environ))


async def start(*arguments: str, **environ: str) -> Process:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("WARMROUTE_", "RAY_ADDRESS"))
    }
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.cli", *arguments),
        env={**inherited, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def ended(process: Process) -> tuple[int, str, str]:
    try:
        output, errors = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


@pytest.fixture
def settings(redis: RedisServer) -> IndexSettings:
    """Settings of an index that no other test uses."""
    return IndexSettings(
        redis_url=redis.secret_url,
        namespace=next_namespace(),
        heartbeat_interval_s=HEARTBEAT_INTERVAL_S,
    )


@pytest.fixture
async def store(settings: IndexSettings) -> AsyncIterator[RedisStore]:
    async with closing(RedisStore(settings)) as store:
        yield store


def environment(settings: IndexSettings) -> dict[str, str]:
    """The settings as a user gives them."""
    assert settings.redis_url is not None
    password = settings.redis_password
    return {
        "WARMROUTE_INDEX__REDIS_URL": settings.redis_url.get_secret_value(),
        "WARMROUTE_INDEX__NAMESPACE": settings.namespace,
        "WARMROUTE_INDEX__HEARTBEAT_INTERVAL_S": str(settings.heartbeat_interval_s),
        "WARMROUTE_INDEX__CALL_TIMEOUT_S": str(settings.call_timeout_s),
        **({"WARMROUTE_INDEX__REDIS_PASSWORD": password.get_secret_value()} if password else {}),
    }


async def index(*arguments: str, settings: IndexSettings, **environ: str) -> tuple[int, str, str]:
    """`warmroute index` on this index."""
    return await warmroute("index", *arguments, **environment(settings), **environ)


async def answer(*arguments: str, settings: IndexSettings, **environ: str) -> Any:
    exit_code, output, errors = await index(*arguments, "--json", settings=settings, **environ)
    assert (exit_code, errors) == (0, "")
    return json.loads(output)


@contextlib.asynccontextmanager
async def closing(store: RedisStore) -> AsyncIterator[RedisStore]:
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def alive(settings: IndexSettings, **names: str) -> AsyncIterator[None]:
    """These replicas, which hold the named blocks, say so again and again, each from a store of its own."""

    async def say(replica_id: str, held: str) -> None:
        async with closing(RedisStore(settings)) as store:
            while True:
                # A store that holds something else says so; this replica is one that doesn't mend it.
                with contextlib.suppress(CacheIndexError):
                    await store.heartbeat(heartbeat(replica_id, 1, held))
                await asyncio.sleep(HEARTBEAT_INTERVAL_S / 4)

    tasks = [asyncio.create_task(say(replica_id, held)) for replica_id, held in names.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended


async def test_stats_name_each_replica_and_add_up(store: RedisStore, settings: IndexSettings) -> None:
    began_ns = time.time_ns() - 7_000_000_000
    await store.publish_inventory(inventory("r1", 3, stored("abc"), stored("x", OTHER_TENANT), epoch=began_ns))
    await store.publish_inventory(inventory("r2", 1, stored("ab"), epoch=began_ns))

    found = await answer("stats", settings=settings)

    assert found["store"] == f"index {settings.namespace} at {settings.shown_url}"
    assert re.fullmatch(r"Redis \d+\.\d+\.\d+, standalone", found["description"])
    assert (found["num_tenants"], found["num_blocks"], found["num_copies"]) == (2, 4, 6)
    assert found["bytes_per_block"] == found["memory_bytes"] / 4
    assert found["log_items"] >= 2
    by_id = {replica["replica_id"]: replica for replica in found["replicas"]}
    assert {name: (replica["num_blocks"], replica["seq"]) for name, replica in by_id.items()} == {
        "r1": (4, 3),
        "r2": (2, 1),
    }
    assert by_id["r1"]["epoch"] == began_ns
    assert 7 <= by_id["r1"]["age_s"] < 7 + TIMEOUT_S
    assert 0 < by_id["r1"]["lease_left_s"] <= settings.lease_s
    assert by_id["r1"]["fingerprint"] == IDENTITY.fingerprint().hex()
    assert by_id["r1"]["identity"]["block_size"] == IDENTITY.block_size

    exit_code, output, errors = await index("stats", settings=settings)
    assert (exit_code, errors) == (0, "")
    title, _, header, *lines = output.splitlines()
    assert title == f"{found['store']}: {found['description']}"
    assert header.split("  ")[0] == "replica"
    assert {line.split()[0]: line.split()[-1] for line in lines[:2]} == dict.fromkeys(
        ("r1", "r2"), IDENTITY.fingerprint().hex()[:8]
    )
    assert "2 replicas, 2 tenants, 4 blocks in 6 copies, " in output


async def test_an_empty_index_says_so(settings: IndexSettings) -> None:
    exit_code, output, _ = await index("stats", settings=settings)
    assert exit_code == 0
    assert "0 replicas, 0 tenants, 0 blocks in 0 copies" in output
    assert (await index("tenants", settings=settings))[1] == "no tenant has a block in the index\n"


async def test_tenants_are_listed_by_size_with_the_name_that_the_settings_give(
    store: RedisStore, settings: IndexSettings
) -> None:
    named = tenant_key(SECRET.encode(), "acme")
    await store.publish_inventory(inventory("r1", 1, stored("ab", named), stored("abc"), stored("x", OTHER_TENANT)))
    await store.publish_inventory(inventory("r2", 1, stored("a", named)))
    environ = {"WARMROUTE_SECRET": SECRET, "WARMROUTE_GATEWAY__OPEN_TENANT": "acme"}

    found = (await answer("tenants", settings=settings, **environ))["tenants"]

    assert [(tenant["key"], tenant["name"], tenant["num_blocks"], tenant["num_copies"]) for tenant in found] == [
        (TENANT.hex(), None, 3, 3),
        (named.hex(), "acme", 2, 3),
        (OTHER_TENANT.hex(), None, 1, 1),
    ]
    assert all(tenant["memory_bytes"] > 0 for tenant in found)
    exit_code, output, errors = await index("tenants", settings=settings, **environ)
    assert (exit_code, errors) == (0, "")
    assert [line.split()[0] for line in output.splitlines()] == ["key", *(tenant["key"] for tenant in found)]
    assert output.splitlines()[2].endswith("acme")
    # Without the secret the same tenant has no name.
    assert [tenant["name"] for tenant in (await answer("tenants", settings=settings))["tenants"]] == [None] * 3


async def test_a_tenant_is_purged_by_its_name_and_by_its_key(store: RedisStore, settings: IndexSettings) -> None:
    named = tenant_key(SECRET.encode(), "acme")
    await store.publish_inventory(inventory("r1", 1, stored("de", named), stored("abc"), stored("x", OTHER_TENANT)))
    before = await store.heartbeat(heartbeat("r1", 1, "abcdex"))

    exit_code, output, errors = await index("purge", "acme", settings=settings, WARMROUTE_SECRET=SECRET)
    assert (exit_code, errors) == (0, "")
    assert output == (
        f"purged tenant {named.hex()}: the index knew of 2 of its blocks; replicas drop theirs with their next "
        f"heartbeat, within {HEARTBEAT_INTERVAL_S:g} s\n"
    )
    exit_code, output, errors = await index("purge", "--key", TENANT.hex().upper(), settings=settings)
    assert (exit_code, errors) == (0, "")
    assert "the index knew of 3 of its blocks" in output

    assert await store.match(named, chain("de")) == {}
    assert await store.match(TENANT, chain("abc")) == {}
    assert await store.match(OTHER_TENANT, chain("x")) == {"r1": 1}
    notices = await store.heartbeat(heartbeat("r1", 1, "x", num_purges_seen=before.num_purges))
    assert set(notices.purged) == {named, TENANT}


async def test_purging_by_name_without_the_secret_is_one_sentence(settings: IndexSettings) -> None:
    exit_code, output, errors = await index("purge", "acme", settings=settings)
    assert (exit_code, output) == (1, "")
    (line,) = errors.splitlines()
    assert "WARMROUTE_SECRET" in line
    assert "--key" in line


async def test_check_of_an_index_without_replicas_finds_nothing_wrong(settings: IndexSettings) -> None:
    assert await index("check", settings=settings) == (
        0,
        "no replica is registered, so there is nothing to compare\n",
        "",
    )


async def test_check_finds_the_one_replica_of_which_an_entry_was_lost(
    redis: RedisServer, store: RedisStore, settings: IndexSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Or the replicas, which count their blocks too, would have found and mended it before.
    monkeypatch.setattr("cache_index.redis_store.store._COUNTED_BLOCKS", 0)
    await store.publish_inventory(inventory("r1", 1, stored("abc")))
    await store.publish_inventory(inventory("r2", 1, stored("de")))
    async with alive(settings, r1="abc", r2="de"):
        exit_code, output, errors = await index("check", settings=settings)
        assert (exit_code, errors) == (0, "")
        assert [line.split() for line in output.splitlines()[1:3]] == [
            ["r1", "3", "3", "agrees"],
            ["r2", "2", "2", "agrees"],
        ]
        assert output.splitlines()[-1] == "no drift: the store has what 2 replicas said to hold"

        with redis.client() as client:
            # The tenant's partition, as cache_index/REDIS.md describes it.
            assert client.hdel(f"{settings.namespace}:{{{TENANT.hex()}}}:blocks", block("b")) == 1
        exit_code, output, errors = await index("check", "--json", settings=settings)
        assert (exit_code, errors) == (3, "")
        assert json.loads(output)["replicas"] == [
            {"replica_id": "r1", "num_blocks_stored": 2, "num_blocks_held": 3, "agrees": False},
            {"replica_id": "r2", "num_blocks_stored": 2, "num_blocks_held": 2, "agrees": True},
        ]

        await store.publish_inventory(inventory("r1", 1, stored("abc")))
        exit_code, output, _ = await index("check", settings=settings)
        assert exit_code == 0, output


async def test_check_does_not_take_silence_for_agreement(store: RedisStore, settings: IndexSettings) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("abc")))
    await store.publish_inventory(inventory("r2", 1, stored("de")))
    async with alive(settings, r2="de"):
        exit_code, output, errors = await index("check", settings=settings)
    assert (exit_code, errors) == (3, "")
    lines = [line.split() for line in output.splitlines()]
    assert lines[1:3] == [["r1", "3", "silent"], ["r2", "2", "2", "agrees"]]
    assert output.splitlines()[-1] == "of 2 replicas, 0 drifted and 1 said nothing"


async def test_ctrl_c_ends_a_check_that_waits_without_a_word(
    redis: RedisServer, store: RedisStore, settings: IndexSettings
) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("abc")))
    patient = settings.model_copy(update={"heartbeat_interval_s": 2 * TIMEOUT_S})
    environ = {**environment(patient), "WARMROUTE_INDEX__LEASE_S": str(4 * TIMEOUT_S)}
    process = await start("index", "check", **environ)
    with redis.client() as client:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                if any(one["cmd"] == "xread" for one in client.client_list()):
                    break
                await asyncio.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert await ended(process) == (128 + signal.SIGINT, "", "")


async def test_the_embedded_index_of_a_ray_cluster_is_found(ray_cluster: None) -> None:
    settings = IndexSettings(namespace=next_namespace())
    arguments = ("--address", ray.get_runtime_context().gcs_address, "--json")
    # A cluster that Ray starts has a token, and an address given to Ray does not make it look for one.
    environ = {"WARMROUTE_INDEX__NAMESPACE": settings.namespace, "RAY_AUTH_MODE": "token"}
    exit_code, output, errors = await warmroute("index", "stats", *arguments, **environ)
    assert (exit_code, output) == (1, ""), "asking must not make an index"
    assert len(errors.splitlines()) == 1

    embedded = ActorStore(settings)
    await embedded.publish_inventory(inventory("r1", 1, stored("abc")))
    exit_code, output, errors = await warmroute("index", "stats", *arguments, **environ)
    assert (exit_code, errors) == (0, "")
    found = json.loads(output)
    assert found["store"] == f"index {settings.namespace} in the Ray cluster"
    assert [(replica["replica_id"], replica["num_blocks"]) for replica in found["replicas"]] == [("r1", 3)]


# What can be wrong with a Redis. Each gives the settings to be tried, and what the one sentence has to name.
Wrong = tuple[IndexSettings, str]


@pytest.fixture
def nobody() -> Wrong:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    return IndexSettings(redis_url=SecretStr(f"redis://127.0.0.1:{port}")), "can't be reached"


@pytest.fixture
def wrong_password(tmp_path: Path) -> Iterator[Wrong]:
    with redis_server(tmp_path, "--requirepass", "another password") as server:
        yield (
            IndexSettings(redis_url=server.secret_url, redis_password=SecretStr(PASSWORD)),
            "refuses the user or password",
        )


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Wrong]:
    with redis_server(tmp_path) as server:
        server.freeze()
        yield IndexSettings(redis_url=server.secret_url, call_timeout_s=0.5), "did not answer within 0.5 s"


@pytest.fixture
def another_protocol() -> Iterator[Wrong]:
    program = (
        "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.BaseHTTPRequestHandler);"
        "print(s.server_port, flush=True); s.serve_forever()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield IndexSettings(redis_url=SecretStr(f"redis://127.0.0.1:{port}")), "does not speak Redis's protocol"
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def another_format(redis: RedisServer) -> Wrong:
    namespace = next_namespace()
    with redis.client() as client:
        client.hset(f"{namespace}:{{{namespace}}}:meta", "format", "99")
    return IndexSettings(redis_url=redis.secret_url, namespace=namespace), "another major version of warmroute"


ALL_WRONG = ("nobody", "wrong_password", "frozen", "another_protocol", "another_format")
# Those that mend themselves, or may.
AWAY = ("nobody", "frozen")


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("index", "stats"), ("index", "check")])
@pytest.mark.parametrize("wrong", ALL_WRONG)
async def test_a_redis_that_can_not_be_used_is_one_sentence(
    wrong: str, command: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    if command[0] == "serve":
        with socket.create_server(("127.0.0.1", 0)) as free:
            command = (*command[:-1], str(free.getsockname()[1]))
    settings, reason = request.getfixturevalue(wrong)
    exit_code, output, errors = await warmroute(*command, **environment(settings))
    assert (exit_code, output) == (1, "")
    (line,) = errors.splitlines()
    assert line.startswith("warmroute: ")
    assert reason in line
    assert str(settings.shown_url) in line
    assert PASSWORD not in line


@pytest.mark.parametrize("wrong", ALL_WRONG)
def test_a_build_is_refused_only_for_what_will_stay_wrong(
    wrong: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    settings, reason = request.getfixturevalue(wrong)
    with pytest.raises(StartError, match=reason):
        require_index(settings)
    with caplog.at_level(logging.WARNING, "deploy.index_check"):
        if wrong in AWAY:
            refuse_wrong_index(settings)
        else:
            with pytest.raises(SettingsError, match=reason) as caught:
                refuse_wrong_index(settings)
            assert caught.value.key == "index.redis_url"
    assert [reason in message for message in caplog.messages] == ([True] if wrong in AWAY else [])
    assert PASSWORD not in caplog.text


async def test_serve_says_where_the_index_is_before_it_starts_anything(redis: RedisServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # A model that is not there ends the start right after it.
    arguments = ("serve", "--port", str(port), "--model", str(tmp_path / "no-model"))
    exit_code, output, errors = await warmroute(*arguments, "--redis-url", redis.url)
    assert exit_code == 1
    assert re.fullmatch(rf"warmroute: index: Redis \d+\.\d+\.\d+, standalone, at {redis.url}\n", output)
    assert "no-model" in errors
    assert require_index(IndexSettings()) == "an actor in the Ray cluster"


async def test_the_question_before_the_start_leaves_what_is_there_as_it_was(
    redis: RedisServer, store: RedisStore, settings: IndexSettings
) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("abc")))
    with redis.client() as client:
        pattern = f"{settings.namespace}:*"
        before = {key: client.dump(key) for key in client.scan_iter(pattern)}
        assert len(before) > 3
        await asyncio.to_thread(require_index, settings)
        assert {key: client.dump(key) for key in client.scan_iter(pattern)} == before
