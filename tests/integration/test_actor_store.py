"""The embedded store as an actor: what is its own, besides the contract of tests/integration/test_index_store.py."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest
import ray

from cache_index.actor_store import ActorStore
from cache_index.errors import StoreUnavailableError, UnknownReplicaError
from cache_index.settings import IndexSettings
from tests.index_examples import TENANT, chain, heartbeat, inventory, stored
from tests.index_stores import ACTOR_SETTINGS

PATIENCE_S = 30.0
_namespaces = itertools.count()


@pytest.fixture
def own_settings(ray_cluster: None) -> IndexSettings:
    """Settings of a store that no other test uses."""
    return ACTOR_SETTINGS.model_copy(update={"namespace": f"own-{next(_namespaces)}"})


async def test_whoever_names_the_same_namespace_shares_one_actor(own_settings: IndexSettings) -> None:
    one, other, stranger = ActorStore(own_settings), ActorStore(own_settings), ActorStore(ACTOR_SETTINGS)
    # At once, so that both try to make it.
    await asyncio.gather(one.publish_inventory(inventory("r1", 1, stored("a"))), other.match(TENANT, ()))
    assert await other.match(TENANT, chain("a")) == {"r1": 1}
    assert await stranger.match(TENANT, chain("a")) == {}


async def retried(call: Callable[[], Awaitable[None]]) -> None:
    """Call until the store is there: an actor's name may outlive it for a moment, of which Ray tells nobody."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await call()
            except StoreUnavailableError:
                await asyncio.sleep(0.02)


async def test_a_lost_actor_is_made_anew_with_a_new_life_and_nothing_in_it(own_settings: IndexSettings) -> None:
    store, follower = ActorStore(own_settings), ActorStore(own_settings)
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    cursor = (await follower.read(None, 0.0)).cursor
    waiting = asyncio.create_task(follower.read(cursor, PATIENCE_S))
    await asyncio.sleep(0)
    ray.kill(ray.get_actor("warmroute-index", namespace=own_settings.namespace))
    with pytest.raises(StoreUnavailableError):
        await waiting
    with pytest.raises(StoreUnavailableError):
        await store.heartbeat(heartbeat("r1", 1))
    with pytest.raises(UnknownReplicaError):
        await retried(lambda: store.heartbeat(heartbeat("r1", 1)))
    news = await follower.read(cursor, PATIENCE_S)
    assert (news.items, news.is_snapshot) == ((), True)
    assert news.cursor.life != cursor.life
    await store.publish_inventory(inventory("r1", 2, stored("a")))
    assert await follower.match(TENANT, chain("a")) == {"r1": 1}
