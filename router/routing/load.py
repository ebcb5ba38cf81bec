"""The router's view of each replica's load: what it sent there itself, and what the replica last said.

A replica's queue is pictured as prefill work done in order of arrival: sending it a prompt pushes the time at which it
will be idle further out. So a decision counts at once, and a burst does not herd, whatever the age of other news.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cache_index.blocks import BlockHash

__all__ = ["LoadView", "PromisedBlocks", "ReplicaReport"]


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica said of itself; None where it has not measured yet."""

    prefill_tokens_per_s: float | None = None


@dataclass(slots=True)
class _Sent:
    work_s: float
    # When its prefill is expected to be done.
    prefilled_at_s: float


@dataclass(slots=True)
class _ReplicaLoad:
    idle_at_s: float = 0.0
    report: ReplicaReport = field(default_factory=ReplicaReport)
    # By request id.
    in_flight: dict[str, _Sent] = field(default_factory=dict)


class LoadView:
    """Load per replica. Times are the caller's clock, in seconds. Bounded by the requests in flight."""

    def __init__(self, prefill_tokens_per_s_initial: float) -> None:
        self._initial_rate = prefill_tokens_per_s_initial
        self._replicas: dict[str, _ReplicaLoad] = {}

    def keep_only(self, replica_ids: set[str]) -> None:
        """Forget replicas that are gone, and what was sent to them."""
        for replica_id in set(self._replicas) - replica_ids:
            del self._replicas[replica_id]

    def report(self, replica_id: str, report: ReplicaReport) -> None:
        """Take a replica's word on itself."""
        self._load(replica_id).report = report

    def prefill_tokens_per_s(self, replica_id: str) -> float:
        """The rate that the replica measured, or the initial one."""
        return self._load(replica_id).report.prefill_tokens_per_s or self._initial_rate

    def wait_s(self, replica_id: str, now_s: float) -> float:
        """Time to drain the prefill work that is queued there."""
        return max(0.0, self._load(replica_id).idle_at_s - now_s)

    def num_queued(self, replica_id: str, now_s: float) -> int:
        """Requests in flight there whose prefill should not be done yet."""
        return sum(sent.prefilled_at_s > now_s for sent in self._load(replica_id).in_flight.values())

    def num_in_flight(self, replica_id: str) -> int:
        """Requests sent there that have not ended."""
        return len(self._load(replica_id).in_flight)

    def sent(self, replica_id: str, request_id: str, work_s: float, now_s: float) -> None:
        """A request with so much prefill work was sent there."""
        load = self._load(replica_id)
        load.idle_at_s = max(load.idle_at_s, now_s) + work_s
        load.in_flight[request_id] = _Sent(work_s, load.idle_at_s)

    def ended(self, replica_id: str, request_id: str, now_s: float) -> None:
        """A request ended, however it did. What it had not yet been expected to take is taken back."""
        load = self._replicas.get(replica_id)
        ended = load.in_flight.pop(request_id, None) if load is not None else None
        if load is None or ended is None:
            return
        left_s = min(ended.work_s, ended.prefilled_at_s - now_s)
        if left_s > 0.0:
            load.idle_at_s -= left_s
            # What stood behind it moves up.
            for sent in load.in_flight.values():
                if sent.prefilled_at_s > ended.prefilled_at_s:
                    sent.prefilled_at_s -= left_s
        if not load.in_flight:
            # Sums of floats need not come out even.
            load.idle_at_s = min(load.idle_at_s, now_s)

    def _load(self, replica_id: str) -> _ReplicaLoad:
        return self._replicas.setdefault(replica_id, _ReplicaLoad())


class PromisedBlocks:
    """Blocks that a replica will hold because a prompt was just sent there; bounded, the oldest are forgotten first.

    The index takes over once the replica has published them, so a promise counts for `valid_s`. Where there is no index
    the caller asks for promises of any age, and routes by what it sent itself.
    """

    def __init__(self, valid_s: float, blocks_max: int) -> None:
        self._valid_s = valid_s
        self._blocks_max = blocks_max
        self._promised: OrderedDict[BlockHash, dict[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._promised)

    def keep_only(self, replica_ids: set[str]) -> None:
        """Forget what was promised to replicas that are gone."""
        for block_hash, holders in list(self._promised.items()):
            kept = {replica_id: promised_s for replica_id, promised_s in holders.items() if replica_id in replica_ids}
            if kept:
                self._promised[block_hash] = kept
            else:
                del self._promised[block_hash]

    def promise(self, replica_id: str, block_hashes: Sequence[BlockHash], now_s: float) -> None:
        """The replica was sent a prompt with these blocks."""
        # The first block last, so that it is the last to be forgotten: without it the others match nothing.
        for block_hash in reversed(block_hashes):
            self._promised.setdefault(block_hash, {})[replica_id] = now_s
            self._promised.move_to_end(block_hash)
        while len(self._promised) > self._blocks_max:
            self._promised.popitem(last=False)

    def match(self, block_hashes: Sequence[BlockHash], now_s: float, *, any_age: bool) -> Mapping[str, int]:
        """Number of leading blocks promised to each replica; those with none are left out."""
        oldest_s = float("-inf") if any_age else now_s - self._valid_s
        matched: dict[str, int] = {}
        for num_matched, block_hash in enumerate(block_hashes):
            holders = self._promised.get(block_hash, {})
            still = False
            for replica_id, promised_s in holders.items():
                if promised_s >= oldest_s and matched.get(replica_id, 0) == num_matched:
                    matched[replica_id] = num_matched + 1
                    still = True
            if not still:
                break
        return matched
