"""A whole cluster as a user starts it, `warmroute serve` with a tiny model, and as a test sees it: by HTTP."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 30.0
MODEL = "tiny-llama"


@dataclass(frozen=True)
class Cluster:
    """Where the cluster answers, and what it serves."""

    url: str
    model_folder: Path
    lines: list[str]
    pid: int

    def get(self, path: str) -> tuple[int, Any]:
        return self._send(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        return self._send(urllib.request.Request(self.url + path, data=data, headers=headers))

    def complete(self, prompt: str | list[int], **parameters: Any) -> tuple[str, Any]:
        """Text and usage of one greedy completion."""
        defaults = {"model": MODEL, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        status, body = self.post("/v1/completions", {**defaults, "prompt": prompt, **parameters})
        assert status == 200, body
        return body["choices"][0]["text"], body["usage"]

    @staticmethod
    def _send(request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(folder: Path, *flags: str, environ: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """A cluster of the model in `folder`, small enough for two cores; ended by Ctrl-C."""
    port = free_port()
    lines: list[str] = []
    command = [sys.executable, "-m", "deploy.cli", "serve", "--model", str(folder), "--served-model-name", MODEL]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--replicas", "2", *flags],
        env={
            **os.environ,
            "WARMROUTE_ENGINE__NUM_THREADS": "1",
            "WARMROUTE_ENGINE__KV_MEMORY_BYTES": str(256 << 20),
            "WARMROUTE_ENGINE__MAX_NUM_SEQS": "8",
            "WARMROUTE_ENGINE__MAX_NUM_WAITING": "8",
            **(environ or {}),
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
    try:
        assert is_up.wait(START_TIMEOUT_S), "\n".join(lines)
        assert process.poll() is None, "\n".join(lines)
        yield Cluster(f"http://127.0.0.1:{port}", folder, lines, process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        finally:
            process.kill()
            reader.join()
