"""What gateway and router tell each other about the index, and what `/health` and Serve's own pages show of it."""

import json

import pytest
from pydantic import SecretStr

from cache_index.embedded import EmbeddedStore
from cache_index.mirror import IndexMirror
from cache_index.settings import IndexSettings
from deploy import app
from deploy.settings import AppSettings
from router.index_link import IndexLink
from router.routing.parity import Mismatch
from tests.index_examples import inventory, stored

PASSWORD = "hunter2-hunter2"
REDIS = IndexSettings(redis_url=SecretStr(f"redis://warmroute:{PASSWORD}@10.1.2.3:6379"))


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


def test_health_names_no_address_and_no_password() -> None:
    link = IndexLink()
    link.settings = REDIS
    link.mirror = IndexMirror(EmbeddedStore(REDIS), REDIS)
    link.mirror.degraded_reason = f"Redis at {REDIS.shown_url} did not answer within 2 s"
    health = link.health()
    assert (health["store"], health["reason"]) == ("redis", "Redis did not answer within 2 s")
    assert "10.1.2.3" not in json.dumps(health)
    assert PASSWORD not in json.dumps(health)


def test_serve_is_shown_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = AppSettings(index=REDIS, device="cpu", engine={"num_threads": 1})
    application = app.application(settings)
    gateways = application._bound_deployment
    [replicas] = [argument for argument in gateways.init_args if hasattr(argument, "_bound_deployment")]
    for deployment in (gateways, replicas._bound_deployment):
        config = deployment._deployment_config
        shown = config.model_dump_json() if hasattr(config, "model_dump_json") else config.json()
        assert PASSWORD not in shown
        assert "10.1.2.3" not in shown
    # It does get where it is needed, by a way that is not shown.
    assert REDIS in gateways.init_args
