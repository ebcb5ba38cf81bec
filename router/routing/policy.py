"""The routing policy: which replica is the cheapest for a prompt. A pure function, driven by tests without a cluster.

For each candidate two times are estimated, in seconds: `wait`, to drain the prefill work queued there, and `work`, to
prefill this prompt's uncached tokens there. The cost is

    wait + (1 + price) * work        price = price_base + price_per_queued * mean queued requests per replica

`work` costs more than its own seconds because every request that will queue behind it waits too (DESIGN section 8).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mmh3

from ..settings import RoutingSettings

__all__ = ["Candidate", "CandidateCost", "Decision", "choose"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as the router sees it now.

    num_matched_tokens: prompt tokens that it is expected to have cached, at most the prompt's. wait_s: to drain the
    prefill work queued there. num_queued: requests whose prefill is not done yet. prefill_tokens_per_s: its rate.
    """

    replica_id: str
    num_matched_tokens: int
    wait_s: float
    num_queued: int
    prefill_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class CandidateCost:
    """A candidate with its terms; all in seconds."""

    candidate: Candidate
    work_s: float
    cost_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """All candidates, the chosen one first, then in the order in which to fall back to them."""

    ranking: tuple[CandidateCost, ...]
    price: float
    tie_tolerance: float


def choose(num_prompt_tokens: int, home: bytes, candidates: Sequence[Candidate], settings: RoutingSettings) -> Decision:
    """Rank candidates by cost; those within the tie tolerance of the least by rendezvous hash of `home`.

    home: the hash of the prompt's first uncached block, so that equal prompts tie towards the same replica wherever
    they are routed (rendezvous hashing, Thaler and Ravishankar 1998). The order of `candidates` does not matter.
    """
    mean_queued = sum(candidate.num_queued for candidate in candidates) / max(1, len(candidates))
    price = settings.price_base + settings.price_per_queued * mean_queued
    tolerance = min(settings.tie_tolerance_max, settings.tie_tolerance_per_queued * max(0.0, mean_queued - 1.0))
    costs = [_cost(candidate, num_prompt_tokens, price) for candidate in candidates]
    least = min((cost.cost_s for cost in costs), default=0.0)

    def rank(cost: CandidateCost) -> tuple[bool, float, int]:
        is_tie = cost.cost_s <= least * (1.0 + tolerance)
        affinity = mmh3.hash64(home + cost.candidate.replica_id.encode(), signed=False)[0]
        return (not is_tie, 0.0 if is_tie else cost.cost_s, affinity)

    return Decision(tuple(sorted(costs, key=rank)), price, tolerance)


def _cost(candidate: Candidate, num_prompt_tokens: int, price: float) -> CandidateCost:
    # At least one token is computed, however much is cached: its logits give the first token.
    num_uncached = max(1, num_prompt_tokens - candidate.num_matched_tokens)
    work_s = num_uncached / candidate.prefill_tokens_per_s
    return CandidateCost(candidate, work_s, candidate.wait_s + (1.0 + price) * work_s)
