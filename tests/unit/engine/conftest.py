"""Engines over tiny models whose logits can be watched, and the full recompute to compare them with."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from replicas.engine import Engine
from replicas.forward.attention import Span
from replicas.forward.model import LoadedModel, load
from replicas.forward.runner import ModelRunner
from replicas.settings import EngineSettings, ModelSettings

BLOCK_SIZE = 16


class WatchedRunner(ModelRunner):
    """Runs the real model and keeps what it was asked and what it gave."""

    def __init__(self, model: LoadedModel, num_blocks: int, block_size: int) -> None:
        super().__init__(model, num_blocks, block_size)
        self.steps: list[tuple[list[Span], torch.Tensor]] = []

    def run(self, spans: Sequence[Span]) -> torch.Tensor:
        kept = [Span(list(s.token_ids), s.start, list(s.block_table), s.wants_logits) for s in spans]
        logits = super().run(spans)
        self.steps.append((kept, logits.clone()))
        return logits

    @property
    def last_logits(self) -> torch.Tensor:
        return self.steps[-1][1]

    @property
    def positions(self) -> list[int]:
        """Every position that was computed, in order."""
        return [position for spans, _ in self.steps for span in spans for position in range(span.start, span.end)]


@pytest.fixture(scope="session")
def loaded(model_folder: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    models: dict[str, LoadedModel] = {}

    def loaded_model(family: str) -> LoadedModel:
        if family not in models:
            settings = ModelSettings(model=str(model_folder(family)), device="cpu")
            models[family] = load(settings, EngineSettings(block_size=BLOCK_SIZE))
        return models[family]

    return loaded_model


@pytest.fixture(scope="session")
def recompute(model_folder: Callable[[str], Path]) -> Callable[[str, Sequence[int]], torch.Tensor]:
    """Logits of the last token by Transformers alone, with its own attention and no cache."""
    models: dict[str, Any] = {}

    @torch.inference_mode()
    def last_logits(family: str, token_ids: Sequence[int]) -> torch.Tensor:
        if family not in models:
            models[family] = AutoModelForCausalLM.from_pretrained(
                model_folder(family), attn_implementation="eager", dtype=torch.float32
            ).eval()
        return models[family](torch.tensor([list(token_ids)]), use_cache=False).logits[0, -1]

    return last_logits


@pytest.fixture
def make_engine(loaded: Callable[[str], LoadedModel]) -> Iterator[Callable[..., Engine]]:
    """An engine with a watched runner; its invariants are checked, and it is closed, when the test ends."""
    engines: list[Engine] = []

    def make(family: str = "llama", *, num_blocks: int = 64, runner: Any = WatchedRunner, **kwargs: Any) -> Engine:
        digest = kwargs.pop("digest", None)
        settings = EngineSettings(**{"block_size": BLOCK_SIZE, "pinned_share_max": 0.25, **kwargs})
        engine = Engine(loaded(family), settings, num_blocks=num_blocks, runner=runner, digest=digest)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        if engine.is_healthy:
            engine.call(lambda core: core.check_invariants())
        engine.close()


@pytest.fixture
def runner_of() -> Callable[[Engine], WatchedRunner]:
    return lambda engine: engine.call(lambda core: core.runner)  # type: ignore[return-value]
