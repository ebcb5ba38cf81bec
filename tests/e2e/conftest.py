"""A whole cluster as a user starts it: `warmroute serve` with two replicas of a tiny model, reached over HTTP."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.http_cluster import MODEL, START_TIMEOUT_S, STOP_TIMEOUT_S, Cluster, free_port


@pytest.fixture(scope="session")
def cluster(model_folder: Callable[[str], Path]) -> Iterator[Cluster]:
    folder, port = model_folder("llama"), free_port()
    lines: list[str] = []
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "deploy.cli",
            "serve",
            "--model",
            str(folder),
            "--served-model-name",
            MODEL,
            "--port",
            str(port),
            "--replicas",
            "2",
        ],
        env={**os.environ, "WARMROUTE_ENGINE__NUM_THREADS": "1", "WARMROUTE_ENGINE__KV_MEMORY_BYTES": str(32 << 20)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            lines.extend(line.rstrip() for line in process.stdout)

    reader = threading.Thread(target=read)
    reader.start()
    running = Cluster(f"http://127.0.0.1:{port}", folder, lines)
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            assert process.poll() is None, "\n".join(lines)
            assert time.monotonic() < deadline_s, "\n".join(lines)
            try:
                if running.get("/health")[0] == 200:
                    break
            except (OSError, json.JSONDecodeError):
                time.sleep(0.25)  # Nothing listens yet, so there is no event to wait for.
        yield running
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        finally:
            process.kill()
            reader.join()
