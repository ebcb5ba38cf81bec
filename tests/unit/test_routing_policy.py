"""The routing policy's promises, for any replicas: what draws a request, what drives it away, and where ties go."""

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.routing.load import LoadView, PromisedBlocks
from router.routing.policy import Candidate, Decision, choose
from router.settings import RoutingSettings
from tests.index_examples import block, chain

SETTINGS = RoutingSettings()
HOME = block("home")

candidates_of = st.builds(
    Candidate,
    replica_id=st.sampled_from([f"r{number}" for number in range(8)]),
    num_matched_tokens=st.integers(0, 4_000),
    wait_s=st.floats(0.0, 1e4),
    num_queued=st.integers(0, 50),
    prefill_tokens_per_s=st.floats(1e-3, 1e6),
)
replicas = st.lists(candidates_of, min_size=1, max_size=6, unique_by=lambda candidate: candidate.replica_id)
prompts = st.integers(0, 4_000)
homes = st.binary(min_size=16, max_size=16)
prices = st.builds(
    RoutingSettings,
    price_base=st.floats(0.0, 10.0),
    price_per_queued=st.floats(0.0, 10.0),
    tie_tolerance_per_queued=st.floats(0.0, 1.0),
    tie_tolerance_max=st.floats(0.0, 1.0),
)


def replica(replica_id: str, matched: int = 0, wait_s: float = 0.0, queued: int = 0, rate: float = 500.0) -> Candidate:
    return Candidate(replica_id, matched, wait_s, queued, rate)


def ids(decision: Decision) -> list[str]:
    return [cost.candidate.replica_id for cost in decision.ranking]


def cost_s(decision: Decision, replica_id: str) -> float:
    return next(cost.cost_s for cost in decision.ranking if cost.candidate.replica_id == replica_id)


def test_the_cost_is_the_wait_and_the_priced_work() -> None:
    decision = choose(
        1_000,
        HOME,
        [replica("r1", matched=800, wait_s=1.5, queued=3, rate=100.0), replica("r2", queued=1, rate=400.0)],
        SETTINGS,
    )
    # Two queued requests on average: 2 + 4 * 2 = 10; 5 percent for the one beyond the first.
    assert decision.price == 10.0
    assert decision.tie_tolerance == 0.05
    assert [(cost.candidate.replica_id, cost.work_s, cost.cost_s) for cost in decision.ranking] == [
        ("r1", 2.0, 23.5),
        ("r2", 2.5, 27.5),
    ]


@pytest.mark.parametrize(
    ("queued", "tolerance"), [(0, 0.0), (1, 0.0), (2, 0.05), (3, 0.10), (5, 0.20), (6, 0.20), (10**6, 0.20)]
)
def test_the_tolerance_is_nought_while_queues_are_short_grows_with_them_and_is_bounded(
    queued: int, tolerance: float
) -> None:
    decision = choose(10, HOME, [replica("r1", queued=queued), replica("r2", queued=queued)], SETTINGS)
    assert decision.tie_tolerance == pytest.approx(tolerance)


@pytest.mark.parametrize("matched", [0, 99, 100, 10**9])
@pytest.mark.parametrize("num_prompt_tokens", [0, 1, 100])
def test_at_least_one_token_is_computed(num_prompt_tokens: int, matched: int) -> None:
    decision = choose(num_prompt_tokens, HOME, [replica("r1", matched=matched)], SETTINGS)
    assert decision.ranking[0].work_s == max(1, num_prompt_tokens - matched) / 500.0


def test_without_replicas_there_is_nothing_to_choose() -> None:
    assert choose(100, HOME, [], SETTINGS).ranking == ()


def test_where_waiting_for_a_prefix_costs_more_than_computing_it_the_request_goes_elsewhere() -> None:
    # 900 of 1,000 tokens cached at 500 tokens/s: 1.8 s of work saved, each worth three while nothing is queued.
    def chosen(wait_s: float) -> str:
        candidates = [replica("owner", matched=900, wait_s=wait_s), replica("idle")]
        return ids(choose(1_000, HOME, candidates, SETTINGS))[0]

    assert [chosen(wait_s) for wait_s in (0.0, 5.3, 5.5, 60.0)] == ["owner", "owner", "idle", "idle"]


@given(prompts, homes, replicas, prices, st.integers(0, 10), st.integers(1, 4_000))
def test_more_match_never_costs_more_and_never_drives_a_request_away(
    num_prompt_tokens: int, home: bytes, candidates: list[Candidate], settings: RoutingSettings, which: int, more: int
) -> None:
    which %= len(candidates)
    warmer = candidates.copy()
    warmer[which] = dataclasses.replace(
        candidates[which], num_matched_tokens=candidates[which].num_matched_tokens + more
    )
    before, after = (choose(num_prompt_tokens, home, each, settings) for each in (candidates, warmer))
    mine = candidates[which].replica_id
    assert cost_s(after, mine) <= cost_s(before, mine)
    assert all(cost_s(after, each) == cost_s(before, each) for each in ids(before) if each != mine)
    if ids(before)[0] == mine:
        assert ids(after)[0] == mine


@given(prompts, homes, replicas, prices, st.integers(0, 10), st.floats(0.0, 1e4))
def test_more_wait_never_costs_less_and_never_attracts_a_request(
    num_prompt_tokens: int, home: bytes, candidates: list[Candidate], settings: RoutingSettings, which: int, more: float
) -> None:
    which %= len(candidates)
    busier = candidates.copy()
    busier[which] = dataclasses.replace(candidates[which], wait_s=candidates[which].wait_s + more)
    before, after = (choose(num_prompt_tokens, home, each, settings) for each in (candidates, busier))
    mine = candidates[which].replica_id
    assert cost_s(after, mine) >= cost_s(before, mine)
    if ids(before)[0] != mine:
        assert ids(after)[0] != mine


@given(prompts, homes, replicas, prices, st.integers(0, 10), st.floats(1.0, 100.0))
def test_a_faster_replica_never_costs_more(
    num_prompt_tokens: int,
    home: bytes,
    candidates: list[Candidate],
    settings: RoutingSettings,
    which: int,
    factor: float,
) -> None:
    which %= len(candidates)
    faster = candidates.copy()
    faster[which] = dataclasses.replace(
        candidates[which], prefill_tokens_per_s=candidates[which].prefill_tokens_per_s * factor
    )
    before, after = (choose(num_prompt_tokens, home, each, settings) for each in (candidates, faster))
    mine = candidates[which].replica_id
    assert cost_s(after, mine) <= cost_s(before, mine)


@given(prompts, homes, replicas, prices, st.data())
def test_the_order_in_which_replicas_are_named_does_not_matter(
    num_prompt_tokens: int, home: bytes, candidates: list[Candidate], settings: RoutingSettings, data: Any
) -> None:
    shuffled = data.draw(st.permutations(candidates))
    assert choose(num_prompt_tokens, home, shuffled, settings) == choose(num_prompt_tokens, home, candidates, settings)


@given(prompts, homes, replicas, prices)
def test_all_are_ranked_those_within_the_tolerance_first_and_the_rest_by_cost(
    num_prompt_tokens: int, home: bytes, candidates: list[Candidate], settings: RoutingSettings
) -> None:
    decision = choose(num_prompt_tokens, home, candidates, settings)
    assert {cost.candidate for cost in decision.ranking} == set(candidates)
    costs = [cost.cost_s for cost in decision.ranking]
    assert all(math.isfinite(each) and each >= 0.0 for each in costs)
    limit = min(costs) * (1.0 + decision.tie_tolerance)
    num_ties = sum(each <= limit for each in costs)
    assert all(each <= limit for each in costs[:num_ties])
    assert costs[num_ties:] == sorted(costs[num_ties:])


@given(homes, st.integers(2, 8), st.data())
def test_when_a_tied_replica_leaves_only_the_prefixes_at_home_there_move(home: bytes, number: int, data: Any) -> None:
    candidates = [replica(f"r{each}") for each in range(number)]
    order = ids(choose(100, home, candidates, SETTINGS))
    gone = data.draw(st.sampled_from(order))
    left = [each for each in candidates if each.replica_id != gone]
    # The others keep their order among each other, hence every prefix its home that did not lose it.
    assert ids(choose(100, home, left, SETTINGS)) == [each for each in order if each != gone]


def test_ties_settle_the_same_way_in_every_process_and_release() -> None:
    # Routers in several processes have to agree on a home without talking to each other.
    candidates = [replica(f"r{each}") for each in range(4)]
    assert ids(choose(100, HOME, candidates, SETTINGS)) == ["r1", "r3", "r0", "r2"]


def test_equal_replicas_share_the_homes_of_many_prefixes_evenly() -> None:
    candidates = [replica(f"replica-{each}") for each in range(4)]
    homes = [block(f"prompt {number}") for number in range(2_000)]
    counted = Counter(ids(choose(100, home, candidates, SETTINGS))[0] for home in homes)
    assert set(counted) == {candidate.replica_id for candidate in candidates}
    # 500 each on average, with a standard deviation of 19: five of them are allowed.
    assert all(400 < count < 600 for count in counted.values()), counted


def test_a_tie_is_within_the_tolerance_and_not_beyond() -> None:
    def chosen(wait_s: float, home: bytes) -> str:
        # Mean queue of 3: tolerance 0.1, price 14. The cost of the first is 15 * 2 s = 30 s.
        near = [replica("least", queued=3), replica("near", wait_s=wait_s, queued=3)]
        return ids(choose(1_000, home, near, SETTINGS))[0]

    homes = [block(f"prompt {number}") for number in range(64)]
    assert {chosen(2.9, home) for home in homes} == {"least", "near"}
    assert {chosen(3.1, home) for home in homes} == {"least"}


class Router:
    """The policy with its view of load, as the adapter of Ray Serve puts them together."""

    def __init__(
        self,
        num_replicas: int,
        *,
        settings: RoutingSettings = SETTINGS,
        counts_promises: bool = True,
        counts_load: bool = True,
    ) -> None:
        self.settings = settings
        self.replica_ids = [f"r{number}" for number in range(num_replicas)]
        self.load = LoadView(SETTINGS.prefill_tokens_per_s_initial)
        self.promised = PromisedBlocks(valid_s=30.0, blocks_max=10_000)
        self.counts_promises = counts_promises
        self.counts_load = counts_load
        self.num_sent = 0

    def send(self, names: str, block_size: int, now_s: float = 0.0) -> str:
        hashes = chain(names)
        num_tokens = len(hashes) * block_size
        promised = self.promised.match(hashes, now_s, any_age=False)
        candidates = [
            Candidate(
                replica_id,
                promised.get(replica_id, 0) * block_size if self.counts_promises else 0,
                self.load.wait_s(replica_id, now_s),
                self.load.num_queued(replica_id, now_s),
                self.load.prefill_tokens_per_s(replica_id),
            )
            for replica_id in self.replica_ids
        ]
        best = choose(num_tokens, hashes[0], candidates, self.settings).ranking[0]
        self.num_sent += 1
        if self.counts_load:
            self.load.sent(best.candidate.replica_id, str(self.num_sent), best.work_s, now_s)
        self.promised.promise(best.candidate.replica_id, hashes, now_s)
        return best.candidate.replica_id


@given(st.integers(2, 8), st.integers(1, 30), st.integers(1, 12))
def test_a_burst_of_equal_cold_prompts_is_computed_by_one_replica(
    num_replicas: int, num_prompts: int, num_blocks: int
) -> None:
    router = Router(num_replicas)
    assert len({router.send("abcdefghijkl"[:num_blocks], 16) for _ in range(num_prompts)}) == 1


@pytest.mark.parametrize(("price", "num_at_home"), [(0.0, 1), (0.5, 8), (1.1, 17)])
def test_a_burst_uses_a_second_replica_exactly_when_the_cost_says_so(price: float, num_at_home: int) -> None:
    # 16 tokens, all of them promised to the first replica: the k-th prompt waits there for 16 + k - 2 tokens and has
    # one token of work; elsewhere it has 16 tokens of work. It stays where k < 1 + 15 * price.
    router = Router(4, settings=RoutingSettings(price_base=price, price_per_queued=0.0, tie_tolerance_max=0.0))
    chosen = [router.send("a", 16) for _ in range(num_at_home + 1)]
    assert len(set(chosen[:-1])) == 1
    assert chosen[-1] != chosen[0]


def test_a_router_that_forgets_what_it_promised_computes_a_prefix_everywhere() -> None:
    # The negative control of the bursts above.
    router = Router(4, counts_promises=False)
    assert {router.send("abcdefghijkl", 16) for _ in range(30)} == set(router.replica_ids)


def test_a_burst_of_different_prompts_spreads_evenly_over_equal_replicas() -> None:
    prompts = ["abcd", "efgh", "ijkl", "mnop", "qrst", "uvwx", "yzAB", "CDEF"]
    router = Router(4)
    assert Counter(router.send(prompt, 16) for prompt in prompts) == dict.fromkeys(router.replica_ids, 2)
    # Negative control: a router that does not count what it just sent leaves it to the hash, which is uneven.
    blind = Router(4, counts_load=False)
    assert Counter(blind.send(prompt, 16) for prompt in prompts) != dict.fromkeys(router.replica_ids, 2)


def test_the_next_prompts_go_elsewhere_once_the_owners_queue_costs_more_than_computing() -> None:
    router = Router(2)
    owner = router.send("abcdefghijkl", 16)
    # 192 tokens are saved there, at 500 tokens/s and a price of 4: worth waiting 1.9 s and not a minute.
    router.load.sent(owner, "long", 60.0, 0.0)
    other = router.send("abcdefghijkl", 16)
    assert other != owner
    # Now both have it, and the shorter queue decides.
    assert router.send("abcdefghijkl", 16) == other
