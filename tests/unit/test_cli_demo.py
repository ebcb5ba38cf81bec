"""`warmroute demo` against a real HTTP server that streams what a gateway would."""

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from deploy import demo
from deploy.errors import ClientError


class Gateway(http.server.BaseHTTPRequestHandler):
    """Knows a system prompt again, as a prefix cache does; `seen` and `failure` belong to one test's server."""

    seen: set[str]
    failure: dict[str, Any] | None

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.failure:
            self._send(400, json.dumps({"error": self.failure}).encode())
            return
        assert body["stream_options"] == {"include_usage": True}
        system = body["messages"][0]["content"]
        cached = 960 if system in self.seen else 0
        self.seen.add(system)
        usage = {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": cached}}
        events = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": "Twenty-one "}}]},
            {"choices": [{"delta": {"content": "hours."}}]},
            {"choices": [], "usage": usage},
        ]
        stream = b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events)
        self._send(200, stream + b"data: [DONE]\n\n")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Gateway]]]:
    handler = type("OneTestsGateway", (Gateway,), {"seen": set(), "failure": None})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", handler
        listening.shutdown()
        thread.join()


def test_the_table_shows_cold_prompts_uncached_and_warm_ones_cached(server: tuple[str, type[Gateway]]) -> None:
    url, _ = server
    lines: list[str] = []
    demo.run(url, num_questions=2, write=lines.append)
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2"]
    assert [row[3:6] for row in rows] == [["1000", "0", "960"]] * 2
    assert any("Twenty-one hours." in line for line in lines)
    assert "96% of the prompt tokens" in lines[-1]


def test_a_second_run_is_cold_again(server: tuple[str, type[Gateway]]) -> None:
    url, _ = server
    for _ in range(2):
        lines: list[str] = []
        demo.run(url, num_questions=1, write=lines.append)
        (row,) = [line.split() for line in lines if line.strip()[:1].isdigit()]
        assert row[4] == "0"


def test_an_openai_error_is_told_in_its_own_words(server: tuple[str, type[Gateway]]) -> None:
    url, handler = server
    handler.failure = {"message": "The prompt is longer than the context.", "code": "context_length_exceeded"}
    with pytest.raises(ClientError, match=r"answered 400: The prompt is longer than the context\."):
        demo.run(url, num_questions=1, write=lambda _: None)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "http://"])
def test_an_address_that_is_not_http_is_refused(url: str) -> None:
    with pytest.raises(ClientError, match="is not an http address"):
        demo.run(url, num_questions=1)
