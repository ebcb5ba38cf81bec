"""The router's view of load against a naive queue, and what it remembers of its own promises."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.routing.load import LoadView, PromisedBlocks, ReplicaReport
from tests.index_examples import chain

REPLICAS = ("r1", "r2")


def test_a_replica_of_which_nothing_is_known_is_idle_and_has_the_initial_rate() -> None:
    load = LoadView(500.0)
    assert load.wait_s("r1", 3.0) == 0.0
    assert load.num_queued("r1", 3.0) == 0
    assert load.num_in_flight("r1") == 0
    assert load.prefill_tokens_per_s("r1") == 500.0


def test_work_sent_counts_at_once_and_drains_as_time_passes() -> None:
    load = LoadView(500.0)
    load.sent("r1", "a", 4.0, now_s=10.0)
    load.sent("r1", "b", 2.0, now_s=11.0)
    assert [load.wait_s("r1", now_s) for now_s in (11.0, 15.5, 16.0, 99.0)] == [5.0, 0.5, 0.0, 0.0]
    assert [load.num_queued("r1", now_s) for now_s in (11.0, 13.9, 14.0, 15.9, 16.0)] == [2, 2, 1, 1, 0]
    assert load.num_in_flight("r1") == 2
    assert load.wait_s("r2", 11.0) == 0.0


def test_an_idle_replica_does_not_work_ahead() -> None:
    load = LoadView(500.0)
    load.sent("r1", "a", 1.0, now_s=0.0)
    load.sent("r1", "b", 1.0, now_s=100.0)
    assert load.wait_s("r1", 100.0) == 1.0


@pytest.mark.parametrize(
    ("ended", "wait_s", "num_queued"), [("a", 3.0, 2), ("b", 10.0, 2), ("c", 11.0, 2), ("unknown", 12.0, 3)]
)
def test_the_work_of_a_request_that_ends_early_is_taken_back_wherever_it_stood(
    ended: str, wait_s: float, num_queued: int
) -> None:
    load = LoadView(500.0)
    for request_id, work_s in (("a", 10.0), ("b", 2.0), ("c", 1.0)):
        load.sent("r1", request_id, work_s, now_s=0.0)
    # One second of the first one's work is done by then.
    load.ended("r1", ended, now_s=1.0)
    assert load.wait_s("r1", 1.0) == wait_s
    assert load.num_queued("r1", 1.0) == num_queued
    # And the others are done as much earlier.
    assert load.num_queued("r1", 1.0 + wait_s - 0.125) == 1
    assert load.num_queued("r1", 1.0 + wait_s) == 0


def test_the_end_of_a_request_whose_prefill_was_over_takes_nothing_back() -> None:
    load = LoadView(500.0)
    load.sent("r1", "a", 1.0, now_s=0.0)
    load.sent("r1", "b", 5.0, now_s=0.0)
    load.ended("r1", "a", now_s=2.0)
    assert load.wait_s("r1", 2.0) == 4.0
    assert load.num_in_flight("r1") == 1


def test_replicas_that_are_gone_are_forgotten_and_late_ends_do_not_bring_them_back() -> None:
    load = LoadView(500.0)
    for replica_id in REPLICAS:
        load.sent(replica_id, "a", 4.0, now_s=0.0)
        load.report(replica_id, ReplicaReport(prefill_tokens_per_s=9.0))
    load.keep_only({"r2", "r3"})
    load.ended("r1", "a", now_s=0.0)
    assert set(load._replicas) == {"r2"}
    assert load.wait_s("r2", 0.0) == 4.0
    assert load.wait_s("r1", 0.0) == 0.0
    assert load.prefill_tokens_per_s("r1") == 500.0
    assert load.prefill_tokens_per_s("r2") == 9.0


@pytest.mark.parametrize(("reported", "rate"), [(None, 500.0), (0.0, 500.0), (2_000.0, 2_000.0)])
def test_a_replica_is_as_fast_as_it_measured_or_as_it_is_credited_with(reported: float | None, rate: float) -> None:
    load = LoadView(500.0)
    load.report("r1", ReplicaReport(prefill_tokens_per_s=123.0))
    load.report("r1", ReplicaReport(prefill_tokens_per_s=reported))
    assert load.prefill_tokens_per_s("r1") == rate


class LoadMachine(RuleBasedStateMachine):
    """Sends and ends requests on one replica, beside a queue that works off one request after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.load = LoadView(500.0)
        self.now_s = 0.0
        self.num_sent = 0
        self.left_s: dict[str, float] = {}

    # Eighths of a second, so that sums are exact.
    @rule(work=st.integers(1, 40))
    def send(self, work: int) -> None:
        self.num_sent += 1
        self.left_s[str(self.num_sent)] = work / 8
        self.load.sent("r1", str(self.num_sent), work / 8, self.now_s)

    @rule(data=st.data())
    def end(self, data: Any) -> None:
        request_id = data.draw(st.sampled_from([*self.left_s, "unknown"]))
        self.left_s.pop(request_id, None)
        self.load.ended("r1", request_id, self.now_s)

    @rule(eighths=st.integers(1, 60))
    def pass_time(self, eighths: int) -> None:
        self.now_s += eighths / 8
        budget_s = eighths / 8
        for request_id, left_s in self.left_s.items():
            done_s = min(left_s, budget_s)
            self.left_s[request_id] -= done_s
            budget_s -= done_s

    @invariant()
    def the_view_is_the_queue(self) -> None:
        assert self.load.wait_s("r1", self.now_s) == sum(self.left_s.values())
        assert self.load.num_queued("r1", self.now_s) == sum(left_s > 0 for left_s in self.left_s.values())
        assert self.load.num_in_flight("r1") == len(self.left_s)


LoadMachine.TestCase.settings = settings(stateful_step_count=20)
test_the_view_is_that_of_a_queue_that_works_in_order_of_arrival = LoadMachine.TestCase


def test_promised_blocks_match_until_their_time_is_over() -> None:
    promised = PromisedBlocks(valid_s=30.0, blocks_max=100)
    promised.promise("r1", chain("abc"), now_s=10.0)
    promised.promise("r2", chain("ab"), now_s=20.0)
    assert promised.match(chain("abcd"), 40.0, any_age=False) == {"r1": 3, "r2": 2}
    assert promised.match(chain("abcd"), 40.1, any_age=False) == {"r2": 2}
    assert promised.match(chain("abcd"), 50.1, any_age=False) == {}
    assert promised.match(chain("abcd"), 1e9, any_age=True) == {"r1": 3, "r2": 2}
    assert promised.match(chain("b"), 40.0, any_age=False) == {"r1": 1, "r2": 1}
    assert promised.match((), 40.0, any_age=False) == {}


def test_a_promise_made_again_counts_from_then() -> None:
    promised = PromisedBlocks(valid_s=30.0, blocks_max=100)
    promised.promise("r1", chain("ab"), now_s=0.0)
    promised.promise("r1", chain("a"), now_s=20.0)
    assert promised.match(chain("ab"), 45.0, any_age=False) == {"r1": 1}


def test_a_replica_matches_only_from_the_first_block_on() -> None:
    promised = PromisedBlocks(valid_s=30.0, blocks_max=100)
    promised.promise("r1", chain("ab"), now_s=0.0)
    promised.promise("r2", chain("bc"), now_s=0.0)
    assert promised.match(chain("abc"), 0.0, any_age=False) == {"r1": 2}


def test_promises_are_bounded_and_the_oldest_go_first() -> None:
    promised = PromisedBlocks(valid_s=30.0, blocks_max=4)
    for number, prompt in enumerate(("ab", "cd", "ef")):
        promised.promise("r1", chain(prompt), now_s=float(number))
        assert len(promised) <= 4
    matched = [promised.match(chain(prompt), 3.0, any_age=True) for prompt in ("ab", "cd", "ef")]
    assert matched == [{}, {"r1": 2}, {"r1": 2}]


def test_what_is_forgotten_of_a_prompt_is_its_end_for_a_match_needs_its_beginning() -> None:
    promised = PromisedBlocks(valid_s=30.0, blocks_max=4)
    promised.promise("r1", chain("abcdefgh"), now_s=0.0)
    assert len(promised) == 4
    assert promised.match(chain("abcdefgh"), 0.0, any_age=False) == {"r1": 4}
    promised.promise("r2", chain("x"), now_s=0.0)
    assert promised.match(chain("abcdefgh"), 0.0, any_age=False) == {"r1": 3}


def test_a_shared_beginning_is_kept_by_the_prompts_that_share_it() -> None:
    promised = PromisedBlocks(valid_s=30.0, blocks_max=3)
    promised.promise("r1", chain("sa"), now_s=0.0)
    for name in "bcdef":
        promised.promise("r1", chain("s" + name), now_s=0.0)
    assert promised.match(chain("sf"), 0.0, any_age=False) == {"r1": 2}
    assert promised.match(chain("sa"), 0.0, any_age=False) == {"r1": 1}


prompts = st.lists(st.sampled_from("abcd"), max_size=5).map("".join)


@given(st.lists(st.tuples(st.sampled_from(REPLICAS), prompts, st.integers(0, 9))), prompts, st.integers(0, 9))
def test_promises_match_as_a_plain_search_does(made: list[tuple[str, str, int]], prompt: str, valid_s: int) -> None:
    promised = PromisedBlocks(valid_s=float(valid_s), blocks_max=100)
    made = sorted(made, key=lambda promise: promise[2])
    for replica_id, blocks, at_s in made:
        promised.promise(replica_id, chain(blocks), float(at_s))
    expected = {}
    for replica_id in REPLICAS:
        held = {name for who, blocks, at_s in made for name in blocks if who == replica_id and at_s >= 9 - valid_s}
        num_matched = next((i for i, name in enumerate(prompt) if name not in held), len(prompt))
        if num_matched:
            expected[replica_id] = num_matched
    assert promised.match(chain(prompt), 9.0, any_age=False) == expected
