"""A whole cluster as a user starts it: `warmroute serve` with two replicas of a tiny model, reached over HTTP."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.http_cluster import MODEL, START_TIMEOUT_S, STOP_TIMEOUT_S, Cluster, free_port


@pytest.fixture(scope="session")
def cluster(model_folder: Callable[[str], Path]) -> Iterator[Cluster]:
    folder, port = model_folder("llama-long"), free_port()
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
        env={
            **os.environ,
            "WARMROUTE_ENGINE__NUM_THREADS": "1",
            "WARMROUTE_ENGINE__KV_MEMORY_BYTES": str(256 << 20),
            "WARMROUTE_ENGINE__MAX_NUM_SEQS": "8",
            "WARMROUTE_ENGINE__MAX_NUM_WAITING": "8",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )

    is_up = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.append(line.rstrip())
                if "Ctrl-C stops everything" in line:
                    is_up.set()
        is_up.set()  # Ended, for better or worse: there is nothing more to wait for.

    reader = threading.Thread(target=read)
    reader.start()
    running = Cluster(f"http://127.0.0.1:{port}", folder, lines)
    try:
        assert is_up.wait(START_TIMEOUT_S), "\n".join(lines)
        assert process.poll() is None, "\n".join(lines)
        yield running
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        finally:
            process.kill()
            reader.join()
