"""A running cluster as a test sees it: an address that answers HTTP."""

import json
import socket
import urllib.error
import urllib.request
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
