"""The engine's life around its steps: refusals, cancellation, bounds, faults, stopping."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from cache_index.messages import (
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    Refusal,
    RefusalCode,
    SamplingParams,
)
from replicas.core import FAILED_STEPS_MAX, EngineCore
from replicas.engine import Engine
from replicas.errors import ReplicaError, RequestRefusedError
from replicas.forward.attention import Span
from replicas.forward.model import LoadedModel
from replicas.forward.runner import ModelRunner
from replicas.kv.tensors import num_blocks_for
from replicas.settings import EngineSettings
from tests.tiny_models import CONTEXT, VOCAB_SIZE

MakeEngine = Callable[..., Engine]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)


def test_a_prompt_longer_than_the_context_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(RequestRefusedError) as refused:
        engine.generate([[5] * (CONTEXT + 1)], GREEDY)
    assert refused.value.code is RefusalCode.CONTEXT_LENGTH_EXCEEDED
    [longest] = engine.generate([[5] * CONTEXT], GREEDY)
    assert len(longest.token_ids) == 1


def test_a_context_that_the_pool_can_not_hold_is_shortened_to_the_pool(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8, pinned_share_max=0.25)
    assert engine.max_model_len == 6 * 16
    [answer] = engine.generate([[5] * 90], ENDLESS)
    assert len(answer.token_ids) == 96 - 90 + 1


@pytest.mark.parametrize("token_ids", [[], [VOCAB_SIZE], [2**32 - 1]])
def test_an_empty_prompt_and_unknown_tokens_are_refused(make_engine: MakeEngine, token_ids: list[int]) -> None:
    with pytest.raises(RequestRefusedError) as refused:
        make_engine().generate([token_ids], GREEDY)
    assert refused.value.code is RefusalCode.INVALID_REQUEST


@pytest.mark.parametrize("token_ids", [[-1], [2**32]])
def test_what_is_no_token_id_is_refused(make_engine: MakeEngine, token_ids: list[int]) -> None:
    with pytest.raises(ValueError, match="token id"):
        make_engine().generate([token_ids], GREEDY)


def test_one_request_more_than_may_run_and_wait_is_refused_and_nothing_else_is_lost(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=2, max_num_waiting=1)
    streams = [engine.stream([7 + index] * 20, ENDLESS) for index in range(3)]
    with pytest.raises(RequestRefusedError) as refused:
        engine.stream([9] * 20, ENDLESS)
    assert refused.value.code is RefusalCode.OVERLOADED
    for stream in streams:
        assert sum(len(chunk.token_ids) for chunk in stream) == CONTEXT - 20 + 1
    [accepted] = engine.generate([[9] * 20], GREEDY)
    assert len(accepted.token_ids) == 8


def test_leaving_a_stream_frees_its_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for chunk in engine.stream([5] * 40, ENDLESS):
        assert engine.stats.pool.num_used_blocks > 0
        if chunk.token_ids:
            break
    assert engine.call(lambda core: core.pool.size().num_used_blocks) == 0
    assert not engine.call(lambda core: core.has_work)


def test_prompts_that_are_answered_together_end_together_where_one_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(RequestRefusedError):
        engine.generate([[5] * 20, [6] * 20, []], ENDLESS)
    assert not engine.call(lambda core: core.has_work)


def test_a_request_that_is_cancelled_while_it_waits_is_gone(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    running = engine.stream([5] * 20, ENDLESS)
    waiting = engine.stream([6] * 20, ENDLESS)
    engine.cancel(waiting.request_id)
    left = engine.call(lambda core: [*core.scheduler.running, *core.scheduler.waiting])
    assert [sequence.request_id for sequence in left] == [running.request_id]
    assert sum(len(chunk.token_ids) for chunk in running) == CONTEXT - 20 + 1


def test_a_request_id_that_is_in_flight_is_refused_and_the_first_goes_on(make_engine: MakeEngine) -> None:
    engine = make_engine()
    messages: dict[str, list[GenerationChunk | Refusal]] = {"first": [], "second": []}
    done = threading.Event()

    def first(message: GenerationChunk | Refusal) -> None:
        messages["first"].append(message)
        if isinstance(message, GenerationChunk) and message.finish_reason is not None:
            done.set()

    engine.submit(GenerationRequest("same", engine.prompt([5] * 20), GREEDY), first)
    engine.submit(GenerationRequest("same", engine.prompt([6] * 20), GREEDY), messages["second"].append)
    assert done.wait(30)
    [refusal] = messages["second"]
    assert isinstance(refusal, Refusal)
    assert refusal.code is RefusalCode.INVALID_REQUEST
    assert len(messages["first"]) == 8


def test_a_reader_that_fails_costs_only_its_own_request(make_engine: MakeEngine) -> None:
    engine = make_engine()

    def fail(message: GenerationChunk | Refusal) -> None:
        raise RuntimeError("the event loop is closed")

    engine.submit(GenerationRequest("broken", engine.prompt([5] * 20), ENDLESS), fail)
    [answer] = engine.generate([[6] * 20], GREEDY)
    assert len(answer.token_ids) == 8
    assert not engine.call(lambda core: core.has_work)


class FailingRunner(ModelRunner):
    """The real runner, failing while it is told to."""

    failing = False

    def run(self, spans: Sequence[Span]) -> torch.Tensor:
        if self.failing:
            raise RuntimeError("out of memory, say")
        return super().run(spans)


def test_a_failing_step_refuses_its_requests_clears_the_cache_and_the_engine_goes_on(make_engine: MakeEngine) -> None:
    engine = make_engine(runner=FailingRunner)
    [before] = engine.generate([[5] * 40], GREEDY)
    saved = engine.save_prefix([5] * 32)
    runner: Any = engine.call(lambda core: core.runner)
    runner.failing = True
    with pytest.raises(RequestRefusedError) as refused:
        engine.generate([[5] * 41], GREEDY)
    assert refused.value.code is RefusalCode.INTERNAL
    assert engine.is_healthy
    runner.failing = False
    [after] = engine.generate([[5] * 40], GREEDY)
    assert after.cached_tokens == 0, "half a step may have been written, so nothing older is trusted"
    assert after.token_ids == before.token_ids
    engine.release_prefix(saved)


def test_steps_that_keep_failing_make_the_replica_unhealthy(make_engine: MakeEngine) -> None:
    engine = make_engine(runner=FailingRunner)
    runner: Any = engine.call(lambda core: core.runner)
    runner.failing = True
    for _ in range(FAILED_STEPS_MAX):
        assert engine.is_healthy
        with pytest.raises(RequestRefusedError):
            engine.generate([[5] * 4], GREEDY)
    assert not engine.is_healthy


def test_closing_refuses_what_is_unfinished_and_whatever_comes_later(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stream = engine.stream([5] * 20, ENDLESS)
    engine.close()
    with pytest.raises(RequestRefusedError) as refused:
        list(stream)
    assert refused.value.code is RefusalCode.INTERNAL
    with pytest.raises(ReplicaError, match="closed"):
        engine.generate([[5]], GREEDY)
    engine.close()


def test_the_end_of_text_token_ends_an_answer_unless_it_is_ignored(
    make_engine: MakeEngine, loaded: Callable[[str], LoadedModel]
) -> None:
    engine = make_engine()
    [free] = engine.generate([[5] * 20], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    eos = free.token_ids[5]
    first = free.token_ids.index(eos)
    engine.call(lambda core: setattr(core, "_eos_token_ids", frozenset({eos})))
    [ended] = engine.generate([[5] * 20], SamplingParams(max_tokens=40, temperature=0.0))
    assert ended.token_ids == free.token_ids[: first + 1]
    assert ended.finish_reason is FinishReason.STOP


def test_a_stop_string_ends_an_answer_and_is_not_in_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    [free] = engine.generate([[70] * 20], params)
    stop = next(character for character in free.text if character != "\ufffd")
    cut = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, stop=(stop,))
    [stopped] = engine.generate([[70] * 20], cut)
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason is FinishReason.STOP
    assert len(stopped.token_ids) < len(free.token_ids)


def test_a_seed_repeats_an_answer_whoever_shares_its_batch(make_engine: MakeEngine) -> None:
    engine = make_engine()
    seeded = SamplingParams(max_tokens=20, temperature=1.0, seed=11, ignore_eos=True)
    other = SamplingParams(max_tokens=20, temperature=1.0, seed=12, ignore_eos=True)
    [alone] = engine.generate([[5] * 20], seeded)
    crowd = [engine.stream([seed] * 20, SamplingParams(max_tokens=20, ignore_eos=True)) for seed in range(10, 14)]
    [among] = engine.generate([[5] * 20], seeded)
    [different] = engine.generate([[5] * 20], other)
    assert alone.token_ids == among.token_ids
    assert alone.token_ids != different.token_ids
    for stream in crowd:
        list(stream)


def test_top_k_of_one_and_a_tiny_top_p_are_greedy(make_engine: MakeEngine) -> None:
    engine = make_engine()
    [greedy] = engine.generate([[5] * 20], GREEDY)
    for params in (
        SamplingParams(max_tokens=8, temperature=2.0, top_k=1, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=2.0, top_p=1e-9, ignore_eos=True),
    ):
        assert engine.generate([[5] * 20], params)[0].token_ids == greedy.token_ids
    [hot] = engine.generate([[5] * 20], SamplingParams(max_tokens=8, temperature=2.0, ignore_eos=True, seed=1))
    assert hot.token_ids != greedy.token_ids


@pytest.mark.parametrize("temperature", [1e-7, 1e-38, 5e-324])
def test_a_temperature_next_to_nothing_is_greedy_and_fails_no_step(make_engine: MakeEngine, temperature: float) -> None:
    engine = make_engine()
    [greedy] = engine.generate([[5] * 20], GREEDY)
    params = SamplingParams(max_tokens=8, temperature=temperature, top_p=0.9, ignore_eos=True)
    assert engine.generate([[5] * 20], params)[0].token_ids == greedy.token_ids
    assert engine.stats.num_failed_steps == 0


def test_a_temperature_may_be_a_whole_number(make_engine: MakeEngine) -> None:
    [answer] = make_engine().generate([[5] * 20], SamplingParams(max_tokens=8, temperature=2, ignore_eos=True))
    assert len(answer.token_ids) == 8


def test_saved_prefixes_survive_a_flood_until_released_and_are_bounded(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=16, pinned_share_max=0.25)
    saved = engine.save_prefix([5] * 64)
    assert engine.save_prefix([5] * 64) == saved, "saving it twice holds it once"
    with pytest.raises(RequestRefusedError, match="can't be kept"):
        engine.save_prefix([6] * 64)

    def flood() -> None:
        engine.generate([[seed] * 180 for seed in range(20, 26)], GREEDY)

    flood()
    [kept] = engine.generate([[5] * 64 + [9]], GREEDY)
    assert kept.cached_tokens == 64
    engine.release_prefix(saved)
    engine.release_prefix(saved)
    flood()
    [gone] = engine.generate([[5] * 64 + [9]], GREEDY)
    assert gone.cached_tokens == 0


def test_releasing_a_prefix_again_does_not_release_another_that_lies_in_its_blocks_now(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8, pinned_share_max=0.5)
    first = engine.save_prefix([5] * 16)
    engine.release_prefix(first)
    engine.call(lambda core: core.pool.clear())
    second = engine.save_prefix([6] * 16)
    assert second.block_ids == first.block_ids, "or this test shows nothing"
    engine.release_prefix(first)
    assert engine.call(lambda core: core.pool.size().num_used_blocks) == 1
    engine.release_prefix(second)
    assert engine.call(lambda core: core.pool.size().num_used_blocks) == 0


def test_text_that_can_not_be_decoded_costs_only_its_own_request(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stream = engine.stream([5] * 20, ENDLESS)
    other = engine.stream([6] * 20, GREEDY)

    def fail(core: EngineCore) -> None:
        def push(token_id: int) -> str:
            raise ValueError("no such token")

        core._jobs[stream.request_id].text.push = push  # type: ignore[method-assign]

    engine.call(fail)
    with pytest.raises(RequestRefusedError) as refused:
        list(stream)
    assert refused.value.code is RefusalCode.INTERNAL
    assert sum(len(chunk.token_ids) for chunk in other) == 8
    assert engine.stats.num_failed_steps == 0
    assert not engine.call(lambda core: core.has_work)


class PanickingRunner(ModelRunner):
    """Raises what no `except Exception` catches, as extensions written in Rust do where they panic."""

    def run(self, spans: Sequence[Span]) -> torch.Tensor:
        raise Panic


class Panic(BaseException):
    pass


def test_a_thread_that_ends_lets_nobody_wait_for_ever(make_engine: MakeEngine) -> None:
    engine = make_engine(runner=PanickingRunner)
    stream = engine.stream([5] * 20, GREEDY)
    with pytest.raises(RequestRefusedError) as refused:
        list(stream)
    assert refused.value.code is RefusalCode.INTERNAL
    for late in (lambda: engine.generate([[5]], GREEDY), lambda: engine.call(lambda core: None)):
        with pytest.raises(ReplicaError, match="closed"):
            late()
    engine.close()
    assert not engine.is_healthy


def test_counts_say_what_was_reused_and_computed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.generate([[5] * 40], GREEDY)
    engine.generate([[5] * 40], GREEDY)
    stats = engine.stats
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (80, 32)
    assert stats.num_prefilled_tokens == 40 + 8
    assert stats.num_decoded_tokens == 2 * 7
    assert (stats.num_running, stats.num_waiting, stats.pool.num_used_blocks) == (0, 0, 0)


def test_the_pool_is_as_large_as_its_budget_and_no_larger(loaded: Callable[[str], LoadedModel]) -> None:
    model = loaded("llama")
    block_bytes = 16 * model.layout.bytes_per_token
    assert model.layout.bytes_per_token == 3 * 2 * (8 + 8) * 4
    assert num_blocks_for(20 * block_bytes, 16, model.layout) == 20
    assert num_blocks_for(21 * block_bytes - 1, 16, model.layout) == 20
    with Engine(model, EngineSettings(kv_memory_bytes=20 * block_bytes)) as engine:
        tensors = engine.call(lambda core: [*core.runner.kv.keys, *core.runner.kv.values])
        assert sum(tensor.nbytes for tensor in tensors) == 20 * block_bytes


def test_the_cheapest_of_budgets_is_refused_in_one_sentence(loaded: Callable[[str], LoadedModel]) -> None:
    model = loaded("llama")
    with pytest.raises(ReplicaError, match="does not hold one block"):
        Engine(model, EngineSettings(kv_memory_bytes=100))
    with pytest.raises(ReplicaError, match=r"raise engine\.kv_memory_bytes"):
        Engine(model, EngineSettings(kv_memory_bytes=2 * 16 * model.layout.bytes_per_token))


def test_saved_prefixes_can_not_be_given_the_whole_pool() -> None:
    with pytest.raises(ValidationError, match="pinned_share_max"):
        EngineSettings(pinned_share_max=1.0)


class OverflowingRunner(ModelRunner):
    """The real runner, whose keys and logits overflow while it is told to, as in 16-bit floats."""

    overflowing = False

    def run(self, spans: Sequence[Span]) -> torch.Tensor:
        logits = super().run(spans)
        if self.overflowing:
            for pool in (*self.kv.keys, *self.kv.values):
                pool.fill_(float("nan"))
            return torch.full_like(logits, float("nan"))
        return logits


def test_what_is_not_a_number_is_no_answer_and_reaches_no_other_request(make_engine: MakeEngine) -> None:
    engine = make_engine(runner=OverflowingRunner, num_blocks=8)
    [before] = engine.generate([[7] * 20], GREEDY)
    runner: Any = engine.call(lambda core: core.runner)
    runner.overflowing = True
    with pytest.raises(RequestRefusedError) as refused:
        engine.generate([[5] * 40], GREEDY)
    assert refused.value.code is RefusalCode.INTERNAL
    runner.overflowing = False
    [after] = engine.generate([[7] * 20], GREEDY)
    assert after.token_ids == before.token_ids
