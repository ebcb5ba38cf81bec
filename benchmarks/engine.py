"""The engine against itself and against Transformers, in one run on this machine; prints ratios.

    python benchmarks/engine.py [--model FOLDER] [--repeats 5] [--threads N]

Prompts are 1,024 shared tokens and 64 of their own, answers 32 tokens, greedy, float32. Three questions:

1. How long is a warm time to first token as a share of a cold one?
2. How long is it as a share of the bare forward pass that it can't avoid: the same 64 tokens on the same cached keys
   and values, run by Transformers alone?
3. How many tokens per second do 8 sequences decode together, against Transformers' continuous batching? Counted while
   all 8 decode: from the last first token to the first last token.
"""

import argparse
import os
import random
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

from cache_index.messages import GenerationChunk, GenerationRequest, Refusal, SamplingParams
from replicas.engine import Engine
from replicas.forward.model import load
from replicas.settings import EngineSettings, ModelSettings

NUM_SHARED, NUM_OWN, NUM_OUT, BATCH = 1024, 64, 32, 8
PARAMS = SamplingParams(max_tokens=NUM_OUT, temperature=0.0, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id, folder or GGUF file; the default model when left out")
    parser.add_argument("--repeats", type=int, default=5, help="samples of each time; the median counts")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(
        f"load average before: {os.getloadavg()[0]:.2f}, {arguments.threads} torch threads, torch {torch.__version__}"
    )
    settings = EngineSettings()
    model = load(ModelSettings(model=arguments.model, device="cpu", dtype="float32"), settings)
    chosen = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [chosen.randrange(100, model.vocab_size - 100) for _ in range(count)]

    with Engine(model, settings) as engine:
        cold, warm = _times_to_first_token(engine, tokens, arguments.repeats)
        ours = _decode_rate(_run_engine(engine, *_batch(tokens)))
    reference = _plain_model(arguments.model)
    bare = _bare_forward(reference, tokens, arguments.repeats)
    theirs = _decode_rate(_run_continuous_batching(reference, *_batch(tokens)))

    rows = [
        ("time to first token, cold", f"{cold:.3f} s", "", ""),
        ("time to first token, warm", f"{warm:.3f} s", f"{warm / cold:.3f} of cold", "at most 0.12"),
        ("bare forward of the own tokens", f"{bare:.3f} s", f"warm is {warm / bare:.2f} of it", "at most 1.2"),
        (f"decode, {BATCH} sequences", f"{ours:.1f} tok/s", "", ""),
        (
            "Transformers' continuous batching",
            f"{theirs:.1f} tok/s",
            f"ours is {ours / theirs:.1f} times",
            "at least 3",
        ),
    ]
    for row in rows:
        print("{:36} {:>14}   {:22} {}".format(*row))
    print(f"load average after: {os.getloadavg()[0]:.2f}")


def _times_to_first_token(engine: Engine, tokens: Any, repeats: int) -> tuple[float, float]:
    """Medians over `repeats` cold prompts, and as many warm ones behind the last of them."""
    cold, warm = [], []
    for _ in range(repeats):
        shared = tokens(NUM_SHARED)
        [answer] = engine.generate([shared + tokens(NUM_OWN)], PARAMS)
        assert answer.cached_tokens == 0
        cold.append(answer.ttft_s)
        [answer] = engine.generate([shared + tokens(NUM_OWN)], PARAMS)
        assert answer.cached_tokens == NUM_SHARED
        warm.append(answer.ttft_s)
    return statistics.median(cold), statistics.median(warm)


def _batch(tokens: Any) -> tuple[list[int], list[list[int]]]:
    shared = tokens(NUM_SHARED)
    return shared, [shared + tokens(NUM_OWN) for _ in range(BATCH)]


def _run_engine(engine: Engine, shared: list[int], prompts: list[list[int]]) -> list[list[float]]:
    """Times of every token of every answer, the shared prefix being cached."""
    engine.generate([shared], SamplingParams(max_tokens=1, temperature=0.0))
    times: list[list[float]] = [[] for _ in prompts]
    finished = threading.Semaphore(0)

    def submit(index: int, prompt: list[int]) -> None:
        def on_chunk(message: GenerationChunk | Refusal) -> None:
            assert isinstance(message, GenerationChunk), message
            times[index].append(time.perf_counter())
            if message.finish_reason is not None:
                finished.release()

        engine.submit(GenerationRequest(f"bench-{index}", engine.prompt(prompt), PARAMS), on_chunk)

    for index, prompt in enumerate(prompts):
        submit(index, prompt)
    for _ in prompts:
        finished.acquire()
    return times


def _plain_model(name: str | None) -> Any:
    from transformers import AutoModelForCausalLM

    from replicas.forward.model import resolve

    folder = resolve(ModelSettings(model=name)).location
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@torch.inference_mode()
def _bare_forward(model: Any, tokens: Any, repeats: int) -> float:
    cache = DynamicCache(config=model.config)
    model(torch.tensor([tokens(NUM_SHARED)]), cache=cache, logits_to_keep=1)
    times = []
    for _ in range(repeats + 1):  # The first one warms up.
        own = torch.tensor([tokens(NUM_OWN)])
        started = time.perf_counter()
        model(own, cache=cache, logits_to_keep=1)
        times.append(time.perf_counter() - started)
        cache.crop(-NUM_OWN)
    return statistics.median(times[1:])


def _run_continuous_batching(model: Any, shared: list[int], prompts: list[list[int]]) -> list[list[float]]:
    del shared  # It shares blocks among the prompts of a batch by itself.
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=NUM_OUT, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512),
        record_timestamps=True,
    )
    times = [output.timestamps for output in outputs.values()]
    assert len(times) == BATCH
    assert all(len(each) == NUM_OUT for each in times)
    return times


def _decode_rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens per second while all sequences decode."""
    start, end = max(each[0] for each in times), min(each[-1] for each in times)
    assert end > start, "the sequences never decoded all together"
    return sum(start < at <= end for each in times for at in each) / (end - start)


if __name__ == "__main__":
    main()
