"""What gateway and router tell each other about the index, and what `/health` and Serve's own pages show of it."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import SecretStr
from ray import serve
from ray.serve.config import RequestRouterConfig

from cache_index.embedded import EmbeddedStore
from cache_index.errors import StoreUnavailableError
from cache_index.mirror import IndexMirror
from cache_index.opening import open_store
from cache_index.settings import IndexSettings
from deploy import app
from deploy.settings import AppSettings
from replicas.settings import EngineSettings
from router.index_link import IndexLink
from router.routing.parity import Mismatch
from tests.index_examples import inventory, stored

PASSWORD = "hunter2-hunter2"
REDIS = IndexSettings(redis_url=SecretStr(f"redis://warmroute:{PASSWORD}@10.1.2.3:6379"))


@contextlib.asynccontextmanager
async def counting(link: IndexLink, mirror: IndexMirror) -> AsyncIterator[None]:
    """The link, having counted the mirror's blocks once, and going on to."""
    task = asyncio.create_task(link.count_blocks(mirror))
    await asyncio.sleep(0)
    yield
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_health_follows_the_index_from_its_start_to_trouble_and_back() -> None:
    settings = IndexSettings()
    link, store = IndexLink(), EmbeddedStore(settings)
    assert link.health() == {"state": "none"}
    link.settings = settings
    assert link.health()["state"] == "starting"
    link.mirror = mirror = IndexMirror(store, settings)
    assert link.health()["state"] == "starting"
    await store.publish_inventory(inventory("r1", 1, stored("abc")))
    await mirror.catch_up(0.0)
    async with counting(link, mirror):
        pass
    assert link.health() == {
        "store": "embedded",
        "state": "ok",
        "reason": None,
        "complete": True,
        "blocks": 3,
        "replicas_of_another_identity": [],
    }
    mirror.degraded_reason = "the store is away"
    assert (link.health()["state"], link.health()["reason"]) == ("degraded", "the store is away")
    link.mismatches = (Mismatch("r1", 1, ("dtype", "weights")),)
    assert link.health()["replicas_of_another_identity"] == [{"replica": "r1", "differs_in": ["dtype", "weights"]}]
    mirror.degraded_reason = None
    assert link.health()["state"] == "ok"


class CountedAtHome(IndexMirror):
    """A mirror that refuses to be counted outside of the thread that made it."""

    home = threading.get_ident()

    @property
    def num_blocks(self) -> int:
        assert threading.get_ident() == self.home, "replicas come and go while another thread walks them"
        return super().num_blocks


async def test_health_may_be_asked_in_another_thread_than_the_mirrors() -> None:
    link, store, settings = IndexLink(), EmbeddedStore(IndexSettings()), IndexSettings()
    link.settings = settings
    link.mirror = mirror = CountedAtHome(store, settings)
    await store.publish_inventory(inventory("r1", 1, stored("abc")))
    await mirror.catch_up(0.0)
    async with counting(link, mirror):
        assert (await asyncio.to_thread(link.health))["blocks"] == 3
        with pytest.raises(AssertionError, match="another thread"):
            await asyncio.to_thread(lambda: mirror.num_blocks)


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


@pytest.mark.parametrize("scheme", ["redis", "redis+sentinel", "redis+cluster"])
async def test_health_names_no_address_where_redis_refuses_the_connection(scheme: str) -> None:
    port = free_port()
    url = f"{scheme}://warmroute:{PASSWORD}@127.0.0.1:{port}" + ("/primary" if scheme == "redis+sentinel" else "")
    settings = IndexSettings(redis_url=SecretStr(url))
    link, store = IndexLink(), open_store(settings)
    link.settings, link.mirror = settings, IndexMirror(store, settings)
    with pytest.raises(StoreUnavailableError) as caught:
        await link.mirror.catch_up(0.0)
    await store.close()
    # The log is told where; so there is something to hide.
    assert str(port) in str(caught.value)
    who = "the Sentinels" if scheme == "redis+sentinel" else "Redis"
    assert link.health()["reason"] == f"{who} can't be reached"


def test_health_names_no_address_of_what_speaks_another_protocol() -> None:
    link = IndexLink()
    link.settings = REDIS
    link.mirror = IndexMirror(EmbeddedStore(REDIS), REDIS)
    link.mirror.degraded_reason = f"what listens at {REDIS.shown_url} does not speak Redis's protocol"
    assert link.health()["reason"] == "what listens does not speak Redis's protocol"


def test_health_names_no_address_and_no_password() -> None:
    link = IndexLink()
    link.settings = REDIS
    link.mirror = IndexMirror(EmbeddedStore(REDIS), REDIS)
    link.mirror.degraded_reason = f"Redis at {REDIS.shown_url} did not answer within 2 s"
    health = link.health()
    assert (health["store"], health["reason"]) == ("redis", "Redis did not answer within 2 s")
    assert "10.1.2.3" not in json.dumps(health)
    assert PASSWORD not in json.dumps(health)


def shown(deployment: Any) -> str:
    """What Serve's REST API and dashboard show of a deployment's configuration."""
    return str(deployment._deployment_config.model_dump_json())


def test_serve_is_shown_no_password() -> None:
    application = app.application(AppSettings(index=REDIS, device="cpu", engine=EngineSettings(num_threads=1)))
    gateways = application._bound_deployment
    [replicas] = [argument for argument in gateways.init_args if hasattr(argument, "_bound_deployment")]
    for deployment in (gateways, replicas._bound_deployment):
        assert PASSWORD not in shown(deployment)
        assert "10.1.2.3" not in shown(deployment)
    # It does get where it is needed, by a way that is not shown.
    assert REDIS in gateways.init_args


def test_serve_does_show_what_is_given_to_the_router() -> None:
    """The negative control of the test above."""
    config = RequestRouterConfig(request_router_kwargs={"index": f"redis://warmroute:{PASSWORD}@10.1.2.3:6379"})
    assert PASSWORD in shown(serve.deployment(request_router_config=config)(IndexLink))
