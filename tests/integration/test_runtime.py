"""The real runtime with a small Serve application: it comes up, and nothing of it is left when it ends.

Each cluster is a process of its own, as on a terminal. All that it starts inherits one variable by which the test finds
every process of it afterwards, also one that has lost its parent.
"""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.runtime import check_port

READY = "Ctrl-C stops everything"
TIMEOUT_S = 180.0
# From the signal to the exit: the shutdown's own bounds add up to less.
STOP_TIMEOUT_S = 30.0

PROGRAM = """
import sys
from deploy import processes
from deploy.errors import DeployError
from deploy.runtime import serve_forever
from deploy.settings import load_settings

def build():
    from fastapi import FastAPI
    from ray import serve

    api = FastAPI()
    fails = "--fail" in sys.argv  # Here, not in the constructor: a replica's process has other arguments.

    @serve.deployment(name="Replica", ray_actor_options={"num_cpus": 0.1})
    class Replica:
        def __init__(self):
            if fails:
                raise ValueError("this model is not one that can be served.")

        async def answer(self):
            return 42

    @serve.deployment(name="Gateway", ray_actor_options={"num_cpus": 0.1})
    @serve.ingress(api)
    class Gateway:
        def __init__(self, replica):
            self.replica = replica

        @api.get("/answer")
        async def answer(self):
            return await self.replica.answer.remote()

    return Gateway.bind(Replica.bind())

flags = dict(argument.split("=") for argument in sys.argv[1:] if "=" in argument)
try:
    serve_forever(load_settings(flags, environ={}), build, lambda line: print(line, flush=True))
    exit_code = 0
except DeployError as error:
    print(f"error: {error}", file=sys.stderr)
    exit_code = 1
processes.leave(exit_code)
"""


class Cluster:
    """One run of the program, in a process group of its own, as a shell starts it."""

    def __init__(self, script: Path, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        self.lines: list[str] = []
        self._arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**os.environ, "RUNTIME_TEST_MARK": self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._arrived.put(line.rstrip())
        self._arrived.put(None)

    def wait_for(self, text: str) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not any(text in line for line in self.lines):
            line = self._arrived.get(timeout=max(0.1, deadline_s - time.monotonic()))
            assert line is not None, f"ended before {text!r}: {self.lines}, {self.process.communicate()[1]}"
            self.lines.append(line)

    def signal_group(self, number: int) -> None:
        """As a terminal's Ctrl-C does: to every process of the foreground group."""
        os.killpg(self.process.pid, number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> tuple[int, str]:
        """Exit code and standard error."""
        exit_code = self.process.wait(timeout_s)
        self._reader.join()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        with self.process.stdout, self.process.stderr:
            return exit_code, self.process.stderr.read()

    def survivors(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RUNTIME_TEST_MARK") == self.mark:
                    found.append(process)
        return found

    def folder(self) -> Path:
        """Where it keeps its files, as it said itself."""
        (line,) = [line for line in self.lines if "its logs" in line]
        return Path("/", *Path(line.partition("its logs: ")[2]).parts[1:3])

    def close(self) -> None:
        """Whatever the test found, leave nothing behind."""
        for process in self.survivors():
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ValueError, subprocess.TimeoutExpired):
            self.wait()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextlib.contextmanager
def running(script: Path, *arguments: str) -> Iterator[Cluster]:
    cluster = Cluster(script, *arguments)
    try:
        yield cluster
    finally:
        cluster.close()


def get(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/answer", timeout=30) as response:
        return bytes(response.read())


def test_a_signal_ends_every_process_and_a_second_start_takes_the_same_port(script: Path, port: int) -> None:
    # Both ways of serving HTTP and both usual signals, one after the other on one port.
    for fast_path, stop in (("auto", signal.SIGINT), ("off", signal.SIGTERM)):
        with running(script, f"port={port}", f"http_fast_path={fast_path}") as cluster:
            cluster.wait_for(READY)
            assert get(port) == b"42"
            assert len(cluster.survivors()) > 5, "the mark finds the processes that Ray starts"

            cluster.signal_group(stop)
            exit_code, errors = cluster.wait()

            assert (exit_code, errors) == (0, "")
            assert cluster.survivors() == []
            assert not cluster.folder().exists()
            check_port("127.0.0.1", port)


def test_a_replica_that_cannot_start_ends_everything_with_its_own_sentence(script: Path, port: int) -> None:
    with running(script, f"port={port}", "--fail") as cluster:
        exit_code, errors = cluster.wait(TIMEOUT_S)
        assert exit_code == 1
        assert errors == "error: Replica can't start: this model is not one that can be served.\n"
        assert cluster.survivors() == []
        check_port("127.0.0.1", port)


def test_a_signal_while_it_starts_ends_every_process(script: Path, port: int) -> None:
    with running(script, f"port={port}") as cluster:
        cluster.wait_for("starting Ray Serve")
        cluster.signal_group(signal.SIGINT)
        exit_code, _ = cluster.wait()
        assert exit_code == 0
        assert cluster.survivors() == []
        assert not cluster.folder().exists()


def test_a_second_signal_ends_every_process_at_once(script: Path, port: int) -> None:
    with running(script, f"port={port}") as cluster:
        cluster.wait_for(READY)
        cluster.signal_group(signal.SIGINT)
        cluster.wait_for("stopping")
        cluster.signal_group(signal.SIGINT)
        exit_code, _ = cluster.wait()
        # It may have ended in the ordinary way in the meantime.
        assert exit_code in (0, 130)
        assert cluster.survivors() == []


def test_no_process_outlives_one_that_was_killed(script: Path, port: int) -> None:
    with running(script, f"port={port}") as cluster:
        cluster.wait_for(READY)
        processes = cluster.survivors()
        cluster.process.kill()
        cluster.wait()
        _, alive = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)
        assert alive == []
