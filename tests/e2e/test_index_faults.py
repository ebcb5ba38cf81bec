"""The index on Redis under faults: requests go on being served, and soon after its return the index is exact again.

One cluster for all faults, with a client that never stops asking. Redis is reached through a line that can be cut.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from cache_index.events import Inventory
from cache_index.redis_store import RedisStore
from cache_index.settings import IndexSettings
from tests.http_cluster import Cluster, serving
from tests.redis_servers import RedisServer, redis_server
from tests.tcp_proxy import TcpProxy

# What the issue promises: so soon after Redis is back, `warmroute index check` finds nothing.
REPAIRED_S = 5.0
CALL_TIMEOUT_S = 0.5
LEASE_S = 4.0
BLOCK_SIZE = 16
PATIENCE_S = 60.0


@dataclass
class Client:
    """Asks one question after the other, half of them with the same long beginning, and keeps what went wrong."""

    cluster: Cluster
    num_answers: int = 0
    failures: list[Any] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        shared = "A" * 6 * BLOCK_SIZE
        while not self._is_over.is_set():
            number = self.num_answers
            prompt = shared + f"{number % 7}" if number % 2 else f"{number}" + "B" * 3 * BLOCK_SIZE
            body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            try:
                status, answer = self.cluster.post("/v1/completions", body)
                if status != 200:
                    self.failures.append((status, answer))
            except OSError as error:
                self.failures.append(error)
            self.num_answers += 1

    def wait_for(self, num_more: int) -> None:
        """Wait until so many more questions were answered."""
        goal, deadline = self.num_answers + num_more, time.monotonic() + PATIENCE_S
        while self.num_answers < goal:
            assert time.monotonic() < deadline, "the cluster does not answer any more"
            time.sleep(0.01)

    def stop(self) -> None:
        self._is_over.set()


@dataclass
class Site:
    """A cluster under load, its Redis, and the line between them."""

    cluster: Cluster
    redis: RedisServer
    line: TcpProxy
    client: Client
    environ: dict[str, str]

    def check(self) -> "subprocess.CompletedProcess[str]":
        """`warmroute index check`, as a person runs it."""
        return subprocess.run(
            [sys.executable, "-m", "deploy.cli", "index", "check"],
            env={**os.environ, **self.environ},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def index(self) -> Any:
        return self.cluster.get("/health")[1]["index"]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.05)


@pytest.fixture(scope="module")
def site(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with redis_server(tmp_path_factory.mktemp("redis")) as redis, TcpProxy(redis.port) as line:
        environ = {
            "WARMROUTE_INDEX__REDIS_URL": f"redis://127.0.0.1:{line.port}",
            "WARMROUTE_INDEX__CALL_TIMEOUT_S": str(CALL_TIMEOUT_S),
            "WARMROUTE_INDEX__LEASE_S": str(LEASE_S),
            "WARMROUTE_INDEX__HEARTBEAT_INTERVAL_S": "1",
        }
        with serving(model_folder("llama-long"), environ=environ) as cluster:
            client = Client(cluster)
            asking = threading.Thread(target=client.run)
            asking.start()
            try:
                yield Site(cluster, redis, line, client, environ)
            finally:
                client.stop()
                asking.join()


@pytest.fixture(autouse=True)
def _nothing_failed(site: Site) -> Iterator[None]:
    """Before each test the index is exact, and during it no request fails."""
    site.until(lambda: site.index()["state"] == "ok", "the index did not come up")
    del site.client.failures[:]
    yield
    assert site.client.failures == []


def assert_repaired(site: Site, returned_s: float) -> None:
    """The check finds nothing, begun at the latest so long after the return; nor does a cached prefix go unfound."""
    checked = site.check()
    while checked.returncode != 0 and time.monotonic() < returned_s + REPAIRED_S:
        checked = site.check()
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert site.index()["state"] == "ok"
    _, usage = site.cluster.complete("A" * 6 * BLOCK_SIZE + "again")
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 5 * BLOCK_SIZE


def test_the_index_is_on_redis_and_exact(site: Site) -> None:
    site.client.wait_for(20)
    checked = site.check()
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert site.index()["store"] == "redis"
    assert site.index()["blocks"] > 0
    assert site.index()["replicas_of_another_identity"] == []


def test_every_metric_of_the_readme_is_exported_under_its_name(site: Site) -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    counts = {
        "resyncs",
        "gaps",
        "drifts",
        "lookups",
        "read_throughs",
        "blind_lookups",
        "evicted_blocks",
        "inventories",
        "losses",
        "store_drifts",
    }
    documented = set(re.findall(r"^\| `warmroute_index_(\w+)` ", readme, re.MULTILINE))
    assert len(documented) == 17
    assert counts < documented
    # A count appears with its first event, and these have none while nothing is wrong.
    quiet = {"gaps", "drifts", "read_throughs", "blind_lookups", "evicted_blocks", "losses", "store_drifts"}
    expected = {f"ray_warmroute_index_{name}{'_total' if name in counts else ''}" for name in documented - quiet}

    def exported() -> set[str]:
        [address] = re.findall(r"its logs: (\S+?)/session_latest", "\n".join(site.cluster.lines))
        [service] = json.loads((Path(address) / "prom_metrics_service_discovery.json").read_text())[:1]
        names = set()
        for target in service["targets"]:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
                names |= set(re.findall(r"^(ray_warmroute_index_\w+)\{", answer.read().decode(), re.MULTILINE))
        return names

    site.until(lambda: expected <= exported(), f"missing: {expected - exported()}")


def test_redis_is_killed_and_comes_back_empty(site: Site) -> None:
    site.redis.kill()
    site.until(lambda: site.index()["state"] == "degraded", "nobody noticed")
    assert "reached" in site.index()["reason"]
    assert str(site.line.port) not in site.index()["reason"], "health is for everybody, an address is not"
    site.client.wait_for(20)
    assert site.check().returncode == 1
    site.redis.start()
    assert_repaired(site, time.monotonic())


def test_everything_in_redis_is_flushed(site: Site) -> None:
    with site.redis.client() as redis:
        redis.flushall()
    assert_repaired(site, time.monotonic())
    site.client.wait_for(5)


def test_redis_freezes_for_longer_than_every_time_limit(site: Site) -> None:
    site.redis.freeze()
    frozen_s = time.monotonic()
    site.until(lambda: site.index()["state"] == "degraded", "nobody noticed")
    assert "did not answer" in site.index()["reason"]
    site.client.wait_for(20)
    site.until(lambda: time.monotonic() > frozen_s + LEASE_S + 2 * CALL_TIMEOUT_S, "time stands still")
    site.redis.resume()
    assert_repaired(site, time.monotonic())


def test_redis_is_out_of_memory(site: Site) -> None:
    with site.redis.client() as redis:
        redis.config_set("maxmemory-policy", "noeviction")
        redis.config_set("maxmemory", "1mb")
        site.client.wait_for(30)
        # A replica that has news to tell can't.
        errors = redis.info("stats")["total_error_replies"]
        assert errors > 0
        redis.config_set("maxmemory", "0")
    assert_repaired(site, time.monotonic())


@pytest.mark.parametrize("num_bytes", [10, 300, 1_500])
def test_the_line_is_cut_in_the_middle_of_what_is_said(site: Site, num_bytes: int) -> None:
    before = site.line.num_cuts
    site.line.cut_after(num_bytes)
    site.until(lambda: site.line.num_cuts > before, "nothing was said")
    assert_repaired(site, time.monotonic())


def test_a_block_is_lost_and_another_invented(site: Site) -> None:
    """Drift that no error tells of: a bit that is gone, and one that nobody set."""
    with site.redis.client() as redis:
        [tenant] = redis.smembers("warmroute:{warmroute}:tenants")
        key = f"warmroute:{{{tenant.decode()}}}:blocks"
        block_hash = next(name for name in redis.hkeys(key) if len(name) == 16)
        redis.hdel(key, block_hash)
        redis.hset(key, b"never hashed....", b"\xff")
    assert_repaired(site, time.monotonic())


def test_a_replica_is_killed_and_within_its_lease_nothing_of_it_counts(site: Site) -> None:
    def replicas() -> set[str]:
        with site.redis.client() as redis:
            return {name.decode() for name in redis.hkeys("warmroute:{warmroute}:replicas")}

    before = replicas()
    assert len(before) == 2
    killed = kill_one_replica(site.cluster)
    killed_s = time.monotonic()
    # What was running there fails, for streams do not outlive their replica yet; what comes after does not.
    site.until(lambda: not before <= replicas(), "the dead replica stayed")
    assert time.monotonic() - killed_s < LEASE_S + 2.0
    assert killed
    site.until(lambda: len(replicas()) == 2, "no other replica came")
    assert_repaired(site, time.monotonic())
    assert len(replicas() & before) == 1, "the newcomer has a name of its own"
    del site.client.failures[:]


def test_a_replica_of_another_identity_is_told_by_the_field_that_differs(site: Site) -> None:
    """The last of the tests, for the replica whose name is taken here falls silent."""

    async def take_its_name() -> str:
        store = RedisStore(IndexSettings(redis_url=site.redis.secret_url, lease_s=3_600.0))
        [stats, *_] = (await store.stats()).replicas
        own = stats.registration
        other = dataclasses.replace(
            own, epoch=own.epoch + 1, identity=dataclasses.replace(own.identity, chat_template="another")
        )
        await store.publish_inventory(Inventory(other, 1, ()))
        await store.close()
        return own.replica_id

    replica_id = asyncio.run(take_its_name())
    expected = [{"replica": replica_id, "differs_in": ["chat_template"]}]
    site.until(lambda: site.index()["replicas_of_another_identity"] == expected, "nobody said so")
    site.client.wait_for(20)


def kill_one_replica(cluster: Cluster) -> int:
    """kill -9 of one of a cluster's replicas, found by the title of its process. Returns its process id."""
    for process in psutil.Process(cluster.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any("ServeReplica:warmroute:Replica" in part for part in process.cmdline()):
                process.kill()
                return int(process.pid)
    raise AssertionError("no replica runs")
