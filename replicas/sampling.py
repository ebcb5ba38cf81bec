"""Choosing the next token from logits, one sequence at a time where it is random and all at once where it is greedy.

Random sampling runs through Transformers' logits warpers, with a generator per sequence: what a sequence draws depends
on its own seed and logits, never on who shares its batch.
"""

import secrets
from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from cache_index.messages import SamplingParams

__all__ = ["Sampler", "sample"]

_NO_IDS = torch.LongTensor(1, 0)

GREEDY_BELOW = 1e-6
"""Colder than this is greedy: nothing but the likeliest token has a chance, and dividing float32 logits by less than
some 1e-38 gives infinities, which no token can be drawn from."""


class Sampler:
    """One sequence's way of choosing a token; keeps the state of its random generator."""

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self.is_greedy = params.temperature < GREEDY_BELOW
        self._warpers = LogitsProcessorList()
        self._generator: torch.Generator | None = None
        if self.is_greedy:
            return
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        self._generator = torch.Generator(device).manual_seed(seed)
        if params.temperature != 1.0:
            self._warpers.append(TemperatureLogitsWarper(float(params.temperature)))
        if params.top_k is not None:
            self._warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(params.top_p))

    def draw(self, logits: torch.Tensor) -> int:
        """One token from logits float32 [vocab_size], at random."""
        # Processors take the ids so far, for the penalties among them; none of those used here reads them.
        scores = self._warpers(_NO_IDS, logits[None])
        return int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=self._generator))


def sample(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """The next token of each sequence: logits float32 [num_sequences, vocab_size], one sampler per row."""
    greedy: list[int] = logits.argmax(dim=-1).tolist()
    return [
        token_id if sampler.is_greedy else sampler.draw(row)
        for token_id, sampler, row in zip(greedy, samplers, logits, strict=True)
    ]
