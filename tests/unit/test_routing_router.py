"""The part of the Serve adapter that is ours: what it makes of the index, and what runs beside its decisions.

Serve makes its replicas and requests in a running cluster only (`tests/e2e`). The router reads little more of them than
their names, so here they are names.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from cache_index.blocks import PromptBlocks
from cache_index.embedded import EmbeddedStore
from cache_index.events import BlocksStored
from cache_index.identity import CacheIdentity, chain_root, tenant_of
from cache_index.messages import GenerationRequest, SamplingParams
from cache_index.mirror import IndexMirror
from cache_index.settings import IndexSettings
from router import index_link
from router.index_link import IndexLink
from router.routing.prefix_router import PrefixRouter
from router.settings import RoutingSettings
from tests.index_examples import IDENTITY, TENANT, inventory

PATIENCE_S = 30.0
SETTINGS = IndexSettings(lease_s=3_600.0)
ANOTHER = dataclasses.replace(IDENTITY, chat_template="another")
NUM_PROMPTS = 32


@pytest.fixture(autouse=True)
def link(monkeypatch: pytest.MonkeyPatch) -> IndexLink:
    """The link of a process in which no gateway has left anything yet."""
    monkeypatch.setattr(index_link, "LINK", IndexLink())
    return index_link.LINK


def make_router() -> PrefixRouter:
    # Serve's own constructor wants a cluster; this is what it calls next, and all of the state that is ours.
    router = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state(settings=RoutingSettings().model_dump(mode="json"))
    return router


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name))


def make_prompt(number: int) -> PromptBlocks:
    fingerprint = IDENTITY.fingerprint()
    return PromptBlocks.build(
        [number] * 100,
        block_size=IDENTITY.block_size,
        root=chain_root(fingerprint, TENANT),
        fingerprint=fingerprint,
        scope=TENANT,
    )


def pending(prompt: PromptBlocks) -> Any:
    request = GenerationRequest("request", prompt, SamplingParams())
    metadata = SimpleNamespace(internal_request_id="request")
    return SimpleNamespace(args=[request], metadata=metadata, future=asyncio.get_running_loop().create_future())


async def ranked(router: PrefixRouter, prompt: PromptBlocks, *names: str) -> list[str]:
    ranks = await router.choose_replicas([replica(name) for name in names], pending(prompt))
    return [only.replica_id.unique_id for [only] in ranks]


async def mirror_of(identity: CacheIdentity, prompts: list[PromptBlocks]) -> IndexMirror:
    """A mirror by which r1 holds nothing, and r2, of this identity, all of the prompts' blocks."""
    store = EmbeddedStore(SETTINGS)
    await store.publish_inventory(inventory("r1", 1))
    blocks = [BlocksStored(tenant_of(prompt.scope), prompt.block_hashes) for prompt in prompts]
    theirs = inventory("r2", 1, *blocks)
    registration = dataclasses.replace(theirs.registration, identity=identity)
    await store.publish_inventory(dataclasses.replace(theirs, registration=registration))
    mirror = IndexMirror(store, SETTINGS)
    await mirror.catch_up(0.0)
    return mirror


@pytest.mark.parametrize("identity", [IDENTITY, ANOTHER], ids=["the gateway's identity", "another identity"])
async def test_what_a_replica_of_another_identity_holds_draws_no_request(identity: CacheIdentity) -> None:
    prompts = [make_prompt(number) for number in range(NUM_PROMPTS)]
    mirror = await mirror_of(identity, prompts)
    chosen, cold = [], []
    for prompt in prompts:
        # A fresh one for each, so that no request leaves load or promises for the next.
        router = make_router()
        router._mirror = mirror
        chosen.append((await ranked(router, prompt, "r1", "r2"))[0])
        cold.append((await ranked(make_router(), prompt, "r1", "r2"))[0])
    assert set(cold) == {"r1", "r2"}
    assert chosen == (["r2"] * NUM_PROMPTS if identity == IDENTITY else cold)


@pytest.mark.parametrize("identity", [IDENTITY, ANOTHER], ids=["the gateway's identity", "another identity"])
async def test_a_replica_of_another_identity_serves_and_is_promised_nothing(identity: CacheIdentity) -> None:
    router, prompt = make_router(), make_prompt(1)
    router._mirror = await mirror_of(identity, [])
    assert await ranked(router, prompt, "r2") == ["r2"]
    promised = {"r2": prompt.num_blocks} if identity == IDENTITY else {}
    assert router._promised.match(prompt.block_hashes, time.monotonic(), any_age=True) == promised


@pytest.mark.parametrize("identity", [IDENTITY, ANOTHER], ids=["the gateway's identity", "another identity"])
async def test_nor_is_it_where_another_replica_was_full(identity: CacheIdentity) -> None:
    router, prompt = make_router(), make_prompt(1)
    router._mirror = await mirror_of(identity, [])
    request = pending(prompt)
    await router.choose_replicas([replica("r1")], request)
    router.on_request_routed(request, replica("r2").replica_id, None)
    promised = router._promised.match(prompt.block_hashes, time.monotonic(), any_age=True)
    assert promised.get("r2", 0) == (prompt.num_blocks if identity == IDENTITY else 0)


@pytest.mark.parametrize("identity", [IDENTITY, ANOTHER], ids=["the gateway's identity", "another identity"])
async def test_what_was_promised_to_it_before_it_was_known_counts_no_more(identity: CacheIdentity) -> None:
    prompts = [make_prompt(number) for number in range(NUM_PROMPTS)]
    mirror = await mirror_of(identity, [])
    chosen, cold = [], []
    for prompt in prompts:
        router = make_router()
        assert await ranked(router, prompt, "r2") == ["r2"]
        router.on_request_completed(replica("r2").replica_id, "request")
        router._mirror = mirror
        chosen.append((await ranked(router, prompt, "r1", "r2"))[0])
        cold.append((await ranked(make_router(), prompt, "r1", "r2"))[0])
    assert set(cold) == {"r1", "r2"}
    assert chosen == (["r2"] * NUM_PROMPTS if identity == IDENTITY else cold)


async def test_a_process_without_a_gateway_routes_without_an_index_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    router = make_router()
    for number in range(3):
        assert await ranked(router, make_prompt(number), "r1") == ["r1"]
    [message] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "without" in message
    assert router._blind_lookups == {"no index in this process": 3}


@pytest.fixture
async def router_of_a_gateway(link: IndexLink) -> AsyncIterator[PrefixRouter]:
    """A router to which a gateway left the settings of a Redis that is not there."""
    link.settings = IndexSettings(redis_url=SecretStr("redis://warmroute:hunter2@127.0.0.1:1"))
    router = make_router()
    yield router
    for task in router._tasks.values():
        task.cancel()
    await asyncio.gather(*router._tasks.values(), return_exceptions=True)


async def test_a_router_follows_the_index_whose_settings_the_gateway_left(
    router_of_a_gateway: PrefixRouter, link: IndexLink
) -> None:
    assert link.health()["state"] == "starting"
    # No request is lost to a Redis that is away.
    assert await ranked(router_of_a_gateway, make_prompt(1), "r1") == ["r1"]
    async with asyncio.timeout(PATIENCE_S):
        while link.health()["state"] != "degraded":  # noqa: ASYNC110  The link tells nobody, by design.
            await asyncio.sleep(0.005)
    assert link.mirror is router_of_a_gateway._mirror
    assert set(router_of_a_gateway._tasks) == set(router_of_a_gateway._duties)
    assert not any(task.done() for task in router_of_a_gateway._tasks.values())


async def test_what_runs_beside_the_decisions_is_started_anew_where_it_ended_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise RuntimeError("a fault")

    router = make_router()
    router._duties = {"a duty": fail}
    await ranked(router, make_prompt(1), "r1")
    ended = router._tasks["a duty"]
    await asyncio.wait([ended])
    assert [record for record in caplog.records if record.levelno == logging.ERROR] == []
    await ranked(router, make_prompt(2), "r1")
    assert router._tasks["a duty"] is not ended
    [error] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "a duty had stopped" in error.getMessage()
    assert error.exc_info is not None
    assert str(error.exc_info[1]) == "a fault"
    await asyncio.wait([router._tasks["a duty"]])
    router._tasks["a duty"].exception()
