"""Exactness by value: what prefix reuse gives is what a full recompute gives, and the controls differ by far.

Everything is float32, where the two may differ only by the order of additions.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from cache_index.blocks import PromptBlocks
from cache_index.identity import chain_root
from cache_index.messages import SamplingParams
from replicas.engine import Engine
from replicas.forward.attention import Span
from replicas.forward.gather import CASCADE_TOKENS_MIN
from replicas.forward.model import LoadedModel
from replicas.forward.runner import ModelRunner
from tests.tiny_models import CONTEXT, VOCAB_SIZE

BLOCK_SIZE = 16
TOLERANCE = 1e-4
# What a wrong position or a wrong block moves logits by, at the least: hundreds of times the tolerance.
FAR = 500 * TOLERANCE

GREEDY_ONE = SamplingParams(max_tokens=1, temperature=0.0)

pytestmark = pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])

Recompute = Callable[[str, Sequence[int]], torch.Tensor]


def tokens(count: int, seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(4, VOCAB_SIZE) for _ in range(count)]


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max())


def test_a_reused_prefix_gives_the_logits_of_a_full_recompute_at_every_suffix_length(
    family: str, make_engine: Callable[..., Engine], runner_of: Callable[[Engine], Any], recompute: Recompute
) -> None:
    engine = make_engine(family)
    prefix = tokens(4 * BLOCK_SIZE, seed=1)
    engine.generate([prefix], GREEDY_ONE)
    for length in range(1, 3 * BLOCK_SIZE + 1):
        prompt = prefix + tokens(length, seed=100 + length)
        [answer] = engine.generate([prompt], GREEDY_ONE)
        assert answer.cached_tokens == len(prefix)
        assert difference(runner_of(engine).last_logits[0], recompute(family, prompt)) < TOLERANCE


def test_a_wholly_cached_prompt_gives_the_logits_of_a_full_recompute(
    family: str, make_engine: Callable[..., Engine], runner_of: Callable[[Engine], Any], recompute: Recompute
) -> None:
    engine = make_engine(family)
    prompt = tokens(3 * BLOCK_SIZE, seed=2)
    engine.generate([prompt], GREEDY_ONE)
    [answer] = engine.generate([prompt], GREEDY_ONE)
    assert answer.cached_tokens == len(prompt) - 1
    assert difference(runner_of(engine).last_logits[0], recompute(family, prompt)) < TOLERANCE


def test_an_evicted_prefix_is_computed_again_and_right(
    family: str, make_engine: Callable[..., Engine], runner_of: Callable[[Engine], Any], recompute: Recompute
) -> None:
    engine = make_engine(family, num_blocks=12, pinned_share_max=0.0)
    prompt = tokens(5 * BLOCK_SIZE + 3, seed=3)
    engine.generate([prompt], GREEDY_ONE)
    for seed in range(4, 8):  # Other prompts, each over half the pool.
        engine.generate([tokens(7 * BLOCK_SIZE, seed)], GREEDY_ONE)
    assert engine.stats.num_evicted_blocks > 0
    [evicted] = engine.generate([prompt], GREEDY_ONE)
    assert evicted.cached_tokens == 0
    assert difference(runner_of(engine).last_logits[0], recompute(family, prompt)) < TOLERANCE
    [again] = engine.generate([prompt + tokens(5, seed=9)], GREEDY_ONE)
    assert again.cached_tokens == 5 * BLOCK_SIZE
    assert difference(runner_of(engine).last_logits[0], recompute(family, prompt + tokens(5, seed=9))) < TOLERANCE


def test_sequences_packed_into_one_batch_give_their_own_logits_at_every_step(
    family: str, make_engine: Callable[..., Engine], runner_of: Callable[[Engine], Any], recompute: Recompute
) -> None:
    # Chunks smaller than the prompts, so that prefill chunks and decodes share steps.
    engine = make_engine(family, max_num_batched_tokens=40)
    # Long enough that the decoding sequences attend to it as one (cascade attention).
    prefix = tokens(CASCADE_TOKENS_MIN + BLOCK_SIZE, seed=10)
    engine.generate([prefix], GREEDY_ONE)
    num_steps = len(runner_of(engine).steps)
    prompts = [prefix + tokens(length, seed=20 + length) for length in (1, 7, 16, 33)] + [tokens(50, seed=30)]
    answers = engine.generate(prompts, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    assert [answer.cached_tokens for answer in answers] == [len(prefix)] * 4 + [0]
    texts = [[*p, *a.token_ids] for p, a in zip(prompts, answers, strict=True)]
    num_compared = num_mixed = 0
    for spans, logits in runner_of(engine).steps[num_steps:]:
        num_mixed += {len(span.token_ids) == 1 for span in spans} == {True, False}
        wanted = [span for span in spans if span.wants_logits]
        for span, row in zip(wanted, logits, strict=True):
            # Two sequences may have the same token at the same position; the row has to be right for one of them.
            owners = [text for text in texts if text[span.start : span.end] == list(span.token_ids)]
            assert min(difference(row, recompute(family, text[: span.end])) for text in owners) < TOLERANCE
            num_compared += 1
    assert num_compared == 5 * 20
    assert num_mixed > 0, "no step mixed a prefill chunk with a decode, so the test does not test that"


def test_greedy_tokens_are_the_same_cold_warm_and_with_caching_off(
    family: str, make_engine: Callable[..., Engine]
) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompt = tokens(3 * BLOCK_SIZE + 5, seed=40)
    engine, uncached = make_engine(family), make_engine(family, enable_prefix_caching=False)
    [cold] = engine.generate([prompt], params)
    [warm] = engine.generate([prompt], params)
    [off_before] = uncached.generate([prompt], params)
    [off_after] = uncached.generate([prompt], params)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 3 * BLOCK_SIZE)
    assert (off_before.cached_tokens, off_after.cached_tokens) == (0, 0)
    assert cold.token_ids == warm.token_ids == off_before.token_ids == off_after.token_ids


def test_answers_of_earlier_requests_are_reused_and_right(
    family: str, make_engine: Callable[..., Engine], runner_of: Callable[[Engine], Any], recompute: Recompute
) -> None:
    engine = make_engine(family)
    prompt = tokens(20, seed=50)
    [answer] = engine.generate([prompt], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    conversation = [*prompt, *answer.token_ids, *tokens(9, seed=51)]
    [follow_up] = engine.generate([conversation], GREEDY_ONE)
    assert follow_up.cached_tokens == (20 + 40 - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert difference(runner_of(engine).last_logits[0], recompute(family, conversation)) < TOLERANCE


def test_a_preempted_sequence_resumes_with_the_same_tokens(family: str, make_engine: Callable[..., Engine]) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    prompts = [tokens(30, seed=60), tokens(30, seed=61), tokens(30, seed=62)]
    roomy, tight = make_engine(family), make_engine(family, num_blocks=10, pinned_share_max=0.0)
    expected = roomy.generate(prompts, params)
    answers = tight.generate(prompts, params)
    assert tight.stats.num_preemptions > 0
    assert [a.token_ids for a in answers] == [e.token_ids for e in expected]


def test_control_positions_reset_to_zero_give_other_logits(
    family: str, make_engine: Callable[..., Engine], loaded: Callable[[str], LoadedModel], recompute: Recompute
) -> None:
    class PositionsReset(ModelRunner):
        """The classic fault: a suffix is fed as if it began the prompt."""

        def run(self, spans: Sequence[Span]) -> torch.Tensor:
            module = self.model.module
            run, start = module.forward, spans[0].start

            def forward(*, position_ids: torch.Tensor, **kwargs: Any) -> Any:
                return run(position_ids=position_ids - start, **kwargs)

            module.forward = forward
            try:
                return super().run(spans)
            finally:
                module.forward = run

    prefix, suffix = tokens(4 * BLOCK_SIZE, seed=1), tokens(9, seed=70)
    prompt = prefix + suffix
    table = [0, 1, 2, 3, 4]
    right, wrong = ModelRunner(loaded(family), 8, BLOCK_SIZE), PositionsReset(loaded(family), 8, BLOCK_SIZE)
    expected = recompute(family, prompt)
    for runner in (right, wrong):
        runner.run([Span(prefix, 0, table)])
    assert difference(right.run([Span(suffix, len(prefix), table)])[0], expected) < TOLERANCE
    assert difference(wrong.run([Span(suffix, len(prefix), table)])[0], expected) > FAR


def test_control_a_block_under_another_parent_gives_other_logits(
    family: str, loaded: Callable[[str], LoadedModel], recompute: Recompute
) -> None:
    first, other, block = (tokens(BLOCK_SIZE, seed) for seed in (80, 81, 82))
    suffix = tokens(5, seed=83)
    runner = ModelRunner(loaded(family), 8, BLOCK_SIZE)
    runner.run([Span(first + block, 0, [0, 1])])
    runner.run([Span(other, 0, [2])])
    expected = recompute(family, other + block + suffix)
    # Block 1 holds the right tokens at the right positions, computed after another parent.
    stolen = runner.run([Span(suffix, 2 * BLOCK_SIZE, [2, 1, 3])])[0]
    assert difference(stolen, expected) > FAR
    runner.run([Span(block, BLOCK_SIZE, [2, 4])])
    assert difference(runner.run([Span(suffix, 2 * BLOCK_SIZE, [2, 4, 3])])[0], expected) < TOLERANCE


def test_control_a_shared_block_that_its_first_user_writes_gives_other_logits(
    family: str, loaded: Callable[[str], LoadedModel], recompute: Recompute
) -> None:
    prefix, one, two = tokens(BLOCK_SIZE + 8, seed=90), tokens(4, seed=91), tokens(4, seed=92)
    runner = ModelRunner(loaded(family), 8, BLOCK_SIZE)
    expected = recompute(family, prefix + two + one)
    # Both users hold block 1, whose last 8 slots are theirs to fill, so the first one's tokens are overwritten.
    runner.run([Span(prefix, 0, [0, 1])])
    runner.run([Span(two, len(prefix), [0, 1])])
    runner.run([Span(one, len(prefix), [0, 1])])
    assert difference(runner.run([Span(one, len(prefix) + 4, [0, 1])])[0], expected) > FAR
    # With a copy each, neither sees the other.
    runner.run([Span(prefix, 0, [2, 3])])
    runner.copy_block(3, 4)
    runner.run([Span(two, len(prefix), [2, 3])])
    runner.run([Span(one, len(prefix), [2, 4])])
    assert difference(runner.run([Span(one, len(prefix) + 4, [2, 3])])[0], expected) < TOLERANCE


def test_users_of_a_saved_prefix_leave_its_tensors_as_they_were_and_see_only_their_own_suffix(
    family: str, make_engine: Callable[..., Engine], recompute: Recompute
) -> None:
    engine = make_engine(family)
    saved = engine.save_prefix(tokens(3 * BLOCK_SIZE, seed=1000))
    assert saved.num_tokens == 3 * BLOCK_SIZE
    before = engine.call(lambda core: core.runner.kv.read(saved.block_ids))
    prefix = tokens(3 * BLOCK_SIZE, seed=1000)
    # One user's prompt is exactly the prefix, the case in which a careless engine writes into the shared last block.
    prompts = [prefix, prefix + tokens(10, seed=1001), prefix + tokens(10, seed=1002)]
    answers = engine.generate(prompts, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        text = list(prompt)
        for token_id in answer.token_ids:
            assert int(recompute(family, text).argmax()) == token_id
            text.append(token_id)
    after = engine.call(lambda core: core.runner.kv.read(saved.block_ids))
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))
    engine.release_prefix(saved)


def test_a_context_of_l_positions_returns_at_most_l_minus_n_plus_one_tokens_and_uses_no_position_past_it(
    family: str, make_engine: Callable[..., Engine], runner_of: Callable[[Engine], Any]
) -> None:
    engine = make_engine(family, num_blocks=64)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    for length in (CONTEXT, CONTEXT - 1, CONTEXT - BLOCK_SIZE, CONTEXT - 37):
        [answer] = engine.generate([tokens(length, seed=length)], params)
        assert len(answer.token_ids) == CONTEXT - length + 1
        assert answer.finish_reason == "length"
    assert max(runner_of(engine).positions) == CONTEXT - 1


def test_each_sequence_owns_its_positions_while_many_run_interleaved(
    family: str, make_engine: Callable[..., Engine], runner_of: Callable[[Engine], Any]
) -> None:
    engine = make_engine(family, max_num_batched_tokens=24)
    prompts = [tokens(length, seed=200 + length) for length in (5, 23, 40, 61)]
    answers = engine.generate(prompts, SamplingParams(max_tokens=15, temperature=0.0, ignore_eos=True))
    texts = [[*p, *a.token_ids] for p, a in zip(prompts, answers, strict=True)]
    positions: dict[int, list[int]] = {index: [] for index in range(len(texts))}
    for spans, _ in runner_of(engine).steps:
        for span in spans:
            owner = next(
                i
                for i, text in enumerate(texts)
                if text[span.start : span.end] == list(span.token_ids) and len(positions[i]) == span.start
            )
            positions[owner].extend(range(span.start, span.end))
    for index, text in enumerate(texts):
        assert positions[index] == list(range(len(text) - 1)), "0, 1, 2, … and the last token is never fed back"


def test_a_forged_collision_gives_a_miss_and_the_right_answer(
    family: str, make_engine: Callable[..., Engine], runner_of: Callable[[Engine], Any], recompute: Recompute
) -> None:
    engine = make_engine(family, digest=lambda _: bytes(16))
    for seed in (300, 301, 302):
        prompt = tokens(3 * BLOCK_SIZE + 4, seed)
        [answer] = engine.generate([prompt], GREEDY_ONE)
        assert answer.cached_tokens == 0
        assert difference(runner_of(engine).last_logits[0], recompute(family, prompt)) < TOLERANCE
    assert engine.call(lambda core: core.pool.num_refuted_hits) > 0


def test_another_scope_or_identity_matches_nothing_of_the_same_tokens(
    family: str, make_engine: Callable[..., Engine], runner_of: Callable[[Engine], Any], recompute: Recompute
) -> None:
    engine = make_engine(family)
    prompt = tokens(3 * BLOCK_SIZE + 4, seed=310)
    engine.generate([prompt], GREEDY_ONE)
    own = engine.prompt(prompt)

    def elsewhere(fingerprint: bytes, scope: bytes) -> PromptBlocks:
        root = chain_root(fingerprint, scope)
        return PromptBlocks.build(prompt, block_size=BLOCK_SIZE, root=root, fingerprint=fingerprint, scope=scope)

    for blocks in (elsewhere(own.fingerprint, b"another tenant.."), elsewhere(b"another model...", b"s" * 16)):
        [answer] = engine.generate([blocks], GREEDY_ONE)
        assert answer.cached_tokens == 0
        assert difference(runner_of(engine).last_logits[0], recompute(family, prompt)) < TOLERANCE
    [control] = engine.generate([elsewhere(own.fingerprint, own.scope)], GREEDY_ONE)
    assert control.cached_tokens == 3 * BLOCK_SIZE
