"""`warmroute demo`: what a warm prefix saves, measured against a running cluster as any client would see it.

Every question is asked twice. Cold: under a copy of the system prompt that begins with words never used before, so that
no block of it can be cached, whatever has been asked earlier. Warm: under one copy that all questions share.
"""

import contextlib
import dataclasses
import http.client
import json
import secrets
import statistics
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

from .demo_handbook import HANDBOOK, QUESTIONS
from .errors import ClientError

__all__ = ["Answer", "run"]

_TIMEOUT_S = 120.0
_MAX_TOKENS = 32
_ANSWER_CHARS = 44


@dataclasses.dataclass(frozen=True)
class Answer:
    """One streamed answer. `cached_tokens` is what the replica says that it reused of `prompt_tokens`."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    text: str


def run(url: str, *, num_questions: int, model: str | None = None, write: Callable[[str], None] = print) -> None:
    """Ask `num_questions` questions cold and warm and print a table. Raises ClientError where nothing answers."""
    client = _Client(url)
    model = model or client.first_model()
    questions = [QUESTIONS[number % len(QUESTIONS)] for number in range(num_questions)]

    write(f"{url}, model {model}")
    client.ask(model, "You are brief.", "Say yes.")  # The first request of a connection pays for more than its prompt.
    cold = [client.ask(model, _handbook(), question) for question in questions]
    shared = _handbook()
    client.ask(model, shared, "What is this handbook about?")  # Computes the shared prompt, once.
    warm = [client.ask(model, shared, question) for question in questions]
    for line in table(questions, cold, warm):
        write(line)


def table(questions: list[str], cold: list[Answer], warm: list[Answer]) -> Iterator[str]:
    """The lines of the report: one per question, then the medians and their ratio."""
    yield ""
    yield f"{'':>3}  {'cold':>8}  {'warm':>8}  {'prompt':>7}  {'cached':>7}  {'cached':>7}"
    yield f"{'':>3}  {'ttft ms':>8}  {'ttft ms':>8}  {'tokens':>7}  {'cold':>7}  {'warm':>7}  question and warm answer"
    for number, (question, before, after) in enumerate(zip(questions, cold, warm, strict=True), start=1):
        yield (
            f"{number:>3}  {before.ttft_s * 1e3:>8.0f}  {after.ttft_s * 1e3:>8.0f}  {after.prompt_tokens:>7}  "
            f"{before.cached_tokens:>7}  {after.cached_tokens:>7}  {question}"
        )
        yield f"{'':>51}  > {_shorten(after.text)}"
    cold_s = statistics.median(answer.ttft_s for answer in cold)
    warm_s = statistics.median(answer.ttft_s for answer in warm)
    prompt, cached = (sum(getattr(answer, name) for answer in warm) for name in ("prompt_tokens", "cached_tokens"))
    yield ""
    yield (
        f"median time to first token: {cold_s * 1e3:.0f} ms cold, {warm_s * 1e3:.0f} ms warm: "
        f"{cold_s / warm_s:.1f} times sooner, with {cached / max(prompt, 1):.0%} of the prompt tokens from the cache"
    )


def _handbook() -> str:
    """The system prompt as no cache has seen it: its first words are new, and blocks are chained from the first on."""
    return f"Edition {secrets.token_hex(8)}.\n{HANDBOOK}"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _ANSWER_CHARS else f"{line[:_ANSWER_CHARS].rstrip()}…"


class _Client:
    """As much of the OpenAI API as the demo needs, with nothing but the standard library."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClientError(f"{url} is not an http address")
        self._url = url
        self._path = parts.path.rstrip("/")
        self._connect: Callable[[], http.client.HTTPConnection] = lambda: (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )(parts.netloc.rpartition("@")[2], timeout=_TIMEOUT_S)

    def first_model(self) -> str:
        """The id of the first model that the cluster serves."""
        with self._request("GET", "/v1/models") as response:
            try:
                return str(json.loads(response.read())["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise ClientError(f"what answers at {self._url} is not an OpenAI server") from error

    def ask(self, model: str, system: str, question: str) -> Answer:
        """Stream one answer and time its first token, from before the request is sent."""
        body = {
            "model": model,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
            "max_tokens": _MAX_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started_s = time.perf_counter()
        ttft_s: float | None = None
        text = ""
        usage: dict[str, Any] = {}
        with self._request("POST", "/v1/chat/completions", body) as response:
            for event in _events(response):
                if "error" in event:
                    raise ClientError(f"the cluster failed while it answered: {_error_message(event)}")
                usage = event.get("usage") or usage
                for choice in event.get("choices", []):
                    piece = choice.get("delta", {}).get("content") or ""
                    if piece and ttft_s is None:
                        ttft_s = time.perf_counter() - started_s
                    text += piece
        if ttft_s is None or "prompt_tokens" not in usage:
            raise ClientError(f"the answer from {self._url} ended without a token or without its usage")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(ttft_s, int(usage["prompt_tokens"]), int(details.get("cached_tokens") or 0), text)

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        with contextlib.closing(self._connect()) as connection:
            try:
                content = None if body is None else json.dumps(body).encode()
                connection.request(method, self._path + path, content, {"Content-Type": "application/json"})
                response = connection.getresponse()
                if response.status != http.HTTPStatus.OK:
                    raise ClientError(f"{self._url}{path} answered {response.status}: {_error_text(response.read())}")
                yield response
            except ConnectionRefusedError as error:
                raise ClientError(f"no server answers at {self._url}; start one with `warmroute serve`") from error
            except TimeoutError as error:
                raise ClientError(f"{self._url} did not answer within {_TIMEOUT_S:.0f} s") from error
            except (OSError, http.client.HTTPException) as error:
                raise ClientError(f"can't talk to {self._url}: {str(error) or type(error).__name__}") from error


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event, up to [DONE]."""
    for line in response:
        field, _, value = line.decode().strip().partition(":")
        if field != "data":
            continue
        if value.strip() == "[DONE]":
            return
        yield json.loads(value)


def _error_text(body: bytes) -> str:
    try:
        return _error_message(json.loads(body))
    except ValueError:
        return " ".join(body.decode(errors="replace").split())[:200]


def _error_message(event: Any) -> str:
    """The text of an OpenAI error body, or the body itself where it is no such thing."""
    error = event.get("error") if isinstance(event, dict) else None
    return str(error.get("message", error) if isinstance(error, dict) else error or event)
