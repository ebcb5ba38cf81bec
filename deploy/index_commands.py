"""`warmroute index`: what the index holds, whether it is true, and how to drop a tenant from it.

Asks the store itself: Redis, where the settings name one, else the actor in a Ray cluster that runs.
"""

import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from cache_index.checking import check
from cache_index.errors import CacheIndexError
from cache_index.identity import tenant_key
from cache_index.opening import open_store
from cache_index.settings import IndexSettings
from cache_index.store import IndexStore

from .errors import ClientError
from .index_report import check_json, check_lines, stats_json, stats_lines, tenants_json, tenants_lines
from .settings import Settings

__all__ = ["EXIT_DRIFT", "check_drift", "print_stats", "print_tenants", "purge"]

# Of a command that ran well and found the index wrong; 1 and 2 say that it could not run.
EXIT_DRIFT = 3

Write = Callable[[str], None]


async def print_stats(settings: Settings, write: Write, *, as_json: bool) -> int:
    """Replicas and totals. Returns the exit code, as all commands here do; raises ClientError."""
    async with _opened(settings) as store:
        stats = await store.stats()
    where, now_s = _where(settings.index), time.time()
    if as_json:
        write(json.dumps(stats_json(where, stats, now_s)))
    else:
        _write_all(stats_lines(where, stats, now_s), write)
    return 0


async def print_tenants(settings: Settings, write: Write, *, as_json: bool) -> int:
    """One line per tenant, with its name where that can be known."""
    async with _opened(settings) as store:
        tenants = (await store.stats()).tenants
    names = _known_names(settings)
    if as_json:
        write(json.dumps(tenants_json(tenants, names)))
    else:
        _write_all(tenants_lines(tenants, names), write)
    return 0


async def purge(settings: Settings, write: Write, tenant: str | bytes) -> int:
    """Drop a tenant, given by its name or its key, from the index and from the replicas."""
    key = _key_of(settings, tenant) if isinstance(tenant, str) else tenant
    async with _opened(settings) as store:
        num_blocks = await store.purge(key)
    write(
        f"purged tenant {key.hex()}: the index knew of {num_blocks:,} of its blocks; "
        f"replicas drop theirs with their next heartbeat, within {settings.index.heartbeat_interval_s:g} s"
    )
    return 0


async def check_drift(settings: Settings, write: Write, *, as_json: bool) -> int:
    """Compare the store with what each replica says it holds. Returns EXIT_DRIFT where one differs or is silent."""
    async with _opened(settings) as store:
        checks = await check(store, settings.index)
    if as_json:
        write(json.dumps(check_json(checks)))
    else:
        _write_all(check_lines(checks), write)
    return 0 if all(checked.agrees for checked in checks) else EXIT_DRIFT


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[IndexStore]:
    """The store of these settings. What is raised inside is translated to ClientError."""
    try:
        store = _open(settings)
        try:
            yield store
        finally:
            await store.close()
    except CacheIndexError as error:
        raise ClientError(str(error)) from error


def _open(settings: Settings) -> IndexStore:
    if settings.index.redis_url is not None:
        return open_store(settings.index)

    # Here, not above: Ray takes a second to import, and Redis needs none of it.
    from .ray_connection import join_cluster

    join_cluster(settings.address)

    # Only now, for it imports Ray, which reads its environment once.
    from cache_index.actor_store import ActorStore

    return ActorStore(settings.index, may_create=False)


def _where(settings: IndexSettings) -> str:
    place = "in the Ray cluster" if settings.redis_url is None else f"at {settings.shown_url}"
    return f"index {settings.namespace} {place}"


def _known_names(settings: Settings) -> dict[bytes, str]:
    """Names of the tenants that the settings name, by key. A key can be made of a name, and never the other way."""
    if settings.secret is None:
        return {}
    name = settings.gateway.open_tenant
    return {_key_of(settings, name): name}


def _key_of(settings: Settings, name: str) -> bytes:
    if settings.secret is None:
        raise ClientError(
            "a tenant's key is made of its name and the server's secret: set WARMROUTE_SECRET to that of the cluster, "
            "or give the key with --key, as `warmroute index tenants` prints it"
        )
    return tenant_key(settings.secret.get_secret_value().encode(), name)


def _write_all(lines: Iterable[str], write: Write) -> None:
    for line in lines:
        write(line)
