"""Servers that the integration tests share, each started on first use: Ray, a Redis server, a Redis Cluster."""

from collections.abc import Iterator

import pytest
import ray

from cache_index.actor_store import ActorStore
from tests.index_stores import ACTOR_SETTINGS
from tests.redis_servers import RedisCluster, RedisServer, redis_cluster, redis_server


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            namespace="tests",
        )
        # The actor ends with its last handle, and its name may be found for a moment longer: without this one a test
        # could meet the actor of the test before it, dying.
        keeper = ActorStore(ACTOR_SETTINGS)
        keeper._actor = keeper._find_or_make()
        yield
        ray.shutdown()


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def redis_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with redis_cluster(tmp_path_factory.mktemp("redis-cluster")) as cluster:
        yield cluster
