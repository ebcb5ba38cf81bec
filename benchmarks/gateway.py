"""What the way through HTTP, gateway and router adds to the engine's own time to first token.

    python benchmarks/gateway.py [--samples 200]

A model with next to no work of its own (two layers of random weights, the default model's tokenizer) runs twice: in an
engine in this process, and in a cluster of one replica that is started for it. The same streamed requests go to both
in turn; the difference of the medians is the overhead: HTTP both ways, parsing, template, tokenizing, hashing, routing,
the call to the replica and its stream back.
"""

import argparse
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cache_index.messages import SamplingParams
from replicas.engine import Engine
from replicas.forward.model import load, resolve
from replicas.settings import EngineSettings, ModelSettings

START_TIMEOUT_S, STOP_TIMEOUT_S = 300.0, 30.0
NAME = "bench"
QUESTION = "Which of the moons of Jupiter is the largest, and who saw it first?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        _save_small_model(Path(folder))
        settings = EngineSettings(num_threads=1)
        model = load(ModelSettings(model=folder, device="cpu"), settings)
        with Engine(model, settings) as engine, _cluster(folder) as port:
            direct, over_http = [], []
            for _ in range(arguments.samples + 10):  # The first ten warm up.
                direct.append(_ask_engine(engine))
                over_http.append(_ask_over_http(port))
    for name, times in (("engine alone", direct[10:]), ("over HTTP", over_http[10:])):
        quantiles = statistics.quantiles(times, n=20)
        print(
            f"time to first token, {name:14} median {statistics.median(times) * 1e3:6.1f} ms, "
            f"p95 {quantiles[-1] * 1e3:6.1f} ms"
        )
    overhead_s = statistics.median(over_http[10:]) - statistics.median(direct[10:])
    print(f"gateway and routing overhead, median    {overhead_s * 1e3:6.1f} ms")
    print(f"load average after: {os.getloadavg()[0]:.2f}")


def _save_small_model(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve(ModelSettings()).location)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _cluster(folder: str) -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "deploy.cli", "serve", "--model", folder),
            *("--served-model-name", NAME, "--replicas", "1", "--port", str(port)),
        ],
        env={**os.environ, "WARMROUTE_ENGINE__NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    is_up = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if "Ctrl-C stops everything" in line:
                is_up.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        if not is_up.wait(START_TIMEOUT_S):
            sys.exit("the cluster did not start")
        yield port
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_TIMEOUT_S)


def _ask_engine(engine: Engine) -> float:
    messages = [{"role": "user", "content": QUESTION}]
    text = engine.model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = engine.model.tokenizer(text, add_special_tokens=False).input_ids
    submitted = time.perf_counter()
    for _ in engine.stream(prompt, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)):
        return time.perf_counter() - submitted
    raise AssertionError("a stream has at least one chunk")


def _ask_over_http(port: int) -> float:
    body = json.dumps(
        {
            "model": NAME,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    )
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        started = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.readline()
        elapsed = time.perf_counter() - started
        response.read()
        return elapsed
    finally:
        connection.close()


if __name__ == "__main__":
    main()
