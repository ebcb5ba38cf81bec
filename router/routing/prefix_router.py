"""The Ray Serve adapter of the routing policy.

Serve makes one of these in every process that has a handle to the replica deployment, and asks it to rank the replicas
for each request. It follows the index from its own process, so a decision makes no network call while its mirror is
complete.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cache_index.blocks import PromptBlocks
from cache_index.messages import GenerationRequest
from cache_index.mirror import IndexMirror
from cache_index.opening import open_store
from cache_index.settings import IndexSettings

from .. import index_link
from ..settings import RoutingSettings
from .load import LoadView, PromisedBlocks, ReplicaReport
from .metrics import mirror_metrics
from .parity import Fingerprints, watch_parity
from .policy import Candidate, choose

__all__ = ["PrefixRouter"]

logger = logging.getLogger(__name__)

# Longer than a prompt's prefill and the way of its blocks through the index, shorter than they are likely to live.
_PROMISE_S = 30.0
# Some 100 bytes each; a million tokens' worth of prompts at 16 tokens a block.
_PROMISED_BLOCKS_MAX = 65_536
_NO_INDEX = "no index in this process"


class PrefixRouter(RequestRouter):
    """Sends each request to the replica where it is cheapest to prefill; see `policy`.

    Which replicas are alive is Serve's to say: the index is asked only about those.
    """

    def initialize_state(  # type: ignore[override]  # Serve passes exactly the keywords that deploy names.
        self, settings: dict[str, Any]
    ) -> None:
        """Called by Serve with the deployment's `request_router_kwargs`, which have to be JSON."""
        self._settings = RoutingSettings.model_validate(settings)
        # None in a process without a gateway: then there is no index, and what was sent where is all there is to know.
        self._mirror: IndexMirror | None = None
        self._fingerprints = Fingerprints()
        # By reason, of which there are a handful.
        self._blind_lookups: Counter[str] = Counter()
        self._load = LoadView(self._settings.prefill_tokens_per_s_initial)
        self._promised = PromisedBlocks(_PROMISE_S, _PROMISED_BLOCKS_MAX)
        # Request id -> replica it was charged to and the work, until it ends. Bounded by the requests in flight.
        self._charged: dict[str, tuple[str, float]] = {}
        self._replica_ids: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._duties: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve, on the router's event loop, when replicas come, go, or report."""
        super().update_replicas(replicas)
        replica_ids = {replica.replica_id.unique_id for replica in replicas}
        if replica_ids != self._replica_ids:
            self._replica_ids = replica_ids
            self._load.keep_only(replica_ids)
            self._promised.keep_only(replica_ids)
            self._fingerprints.keep_only(replica_ids)
        for replica in replicas:
            rate = replica.routing_stats.get("prefill_tokens_per_s")
            self._load.report(replica.replica_id.unique_id, ReplicaReport(prefill_tokens_per_s=rate))
        self._keep_running()

    def _open_index(self, settings: IndexSettings) -> None:
        store = open_store(settings)
        index_link.LINK.mirror = self._mirror = mirror = IndexMirror(store, settings)
        self._duties = {
            "the index mirror": mirror.follow,
            "the count of blocks": lambda: index_link.LINK.count_blocks(mirror),
            "the identity check": lambda: watch_parity(index_link.LINK, store, settings.heartbeat_interval_s),
            "the metrics": mirror_metrics(mirror, self._blind_lookups, index_link.LINK).run,
        }

    def _keep_running(self) -> None:
        """Start what runs beside the decisions, and what ended though nobody ended it.

        Not in `initialize_state`, which Serve may call outside of the loop in which requests are routed, and before the
        gateway has left the settings.
        """
        # By way of its module: Serve sends this class by value, and with it a copy of every object that it names.
        if self._mirror is None and index_link.LINK.settings is not None:
            self._open_index(index_link.LINK.settings)
        for name, duty in self._duties.items():
            task = self._tasks.get(name)
            if task is None or task.done():
                if task is not None and not task.cancelled():
                    logger.error("%s had stopped and is started anew", name, exc_info=task.exception())
                self._tasks[name] = asyncio.get_running_loop().create_task(duty())

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas by cost, each a rank of its own, so that one which is full falls to the next best."""
        self._keep_running()
        request = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if pending_request is None or not isinstance(request, GenerationRequest):
            # A question about the model, say: the least busy one answers.
            return [sorted(candidate_replicas, key=lambda r: self._load.num_in_flight(r.replica_id.unique_id))]
        now_s = time.monotonic()
        request_id = pending_request.metadata.internal_request_id
        # Serve asks again while replicas are full; a request must not wait behind itself.
        self._uncharge(request_id, now_s)
        prompt = request.prompt
        matched = await self._matched(prompt)
        is_complete = self._mirror is not None and self._mirror.is_complete
        promised = self._promised.match(prompt.block_hashes, now_s, any_age=not is_complete)
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        strangers = {replica_id for replica_id in by_id if self._is_stranger(replica_id, prompt)}
        matched = {replica_id: num for replica_id, num in matched.items() if replica_id not in strangers}
        candidates = [
            Candidate(
                replica_id,
                0 if replica_id in strangers else self._cached_tokens(prompt, replica_id, matched, promised),
                self._load.wait_s(replica_id, now_s),
                self._load.num_queued(replica_id, now_s),
                self._load.prefill_tokens_per_s(replica_id),
            )
            for replica_id in by_id
        ]
        ranking = choose(prompt.num_tokens, _home(prompt, matched), candidates, self._settings).ranking
        # Charged now, not when Serve reports it sent, so that the next request of a burst already sees it.
        best = ranking[0]
        self._charge(request_id, best.candidate.replica_id, best.work_s, now_s)
        # A request that is given up before it is sent anywhere is not reported as completed.
        pending_request.future.add_done_callback(lambda future: self._forget_if_cancelled(future, request_id))
        if best.candidate.replica_id not in strangers:
            self._promised.promise(best.candidate.replica_id, prompt.block_hashes, now_s)
        return [[by_id[cost.candidate.replica_id]] for cost in ranking]

    async def _matched(self, prompt: PromptBlocks) -> Mapping[str, int]:
        """Leading blocks of the prompt on each replica, as the index knows it."""
        if self._mirror is None:
            if not self._blind_lookups[_NO_INDEX]:
                logger.warning("no gateway left the index's settings in this process: requests are routed without it")
            self._blind_lookups[_NO_INDEX] += 1
            return {}
        lookup = await self._mirror.lookup(prompt.tenant, prompt.block_hashes)
        if lookup.blind_reason is not None:
            self._blind_lookups[lookup.blind_reason] += 1
        return lookup.matched

    def _is_stranger(self, replica_id: str, prompt: PromptBlocks) -> bool:
        """Whether a replica serves another model state than the prompt was hashed for, so that it can reuse nothing."""
        registration = self._mirror.registration(replica_id) if self._mirror is not None else None
        return registration is not None and self._fingerprints.of(registration) != prompt.fingerprint

    @staticmethod
    def _cached_tokens(
        prompt: PromptBlocks, replica_id: str, matched: Mapping[str, int], promised: Mapping[str, int]
    ) -> int:
        num_blocks = max(matched.get(replica_id, 0), promised.get(replica_id, 0))
        return min(prompt.num_tokens, num_blocks * prompt.block_size)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Serve once a replica accepted: not always the one that was charged."""
        request_id = pending_request.metadata.internal_request_id
        charged = self._charged.get(request_id)
        if charged is not None and charged[0] != replica_id.unique_id:
            now_s = time.monotonic()
            self._uncharge(request_id, now_s)
            self._charge(request_id, replica_id.unique_id, charged[1], now_s)
            prompt = pending_request.args[0].prompt
            if not self._is_stranger(replica_id.unique_id, prompt):
                self._promised.promise(replica_id.unique_id, prompt.block_hashes, now_s)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Serve when a request ended, however it did."""
        self._uncharge(internal_request_id, time.monotonic())

    def _forget_if_cancelled(self, future: asyncio.Future[RunningReplica], request_id: str) -> None:
        if future.cancelled():
            self._uncharge(request_id, time.monotonic())

    def _uncharge(self, request_id: str, now_s: float) -> None:
        charged = self._charged.pop(request_id, None)
        if charged is not None:
            self._load.ended(charged[0], request_id, now_s)

    def _charge(self, request_id: str, replica_id: str, work_s: float, now_s: float) -> None:
        self._charged[request_id] = (replica_id, work_s)
        self._load.sent(replica_id, request_id, work_s, now_s)


def _home(prompt: PromptBlocks, matched: Mapping[str, int]) -> bytes:
    """What a prompt's ties are settled by: its first block that no replica holds, so that prompts which only share what
    is cached anyway get different homes, and those which share more get the same one.
    """
    first_uncached = max(matched.values(), default=0)
    return prompt.block_hashes[first_uncached] if first_uncached < prompt.num_blocks else prompt.root
