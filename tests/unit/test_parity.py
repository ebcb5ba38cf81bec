"""Parity: whether replicas serve the model state that a gateway hashes prompts for, told by the field that differs."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator

import pytest

from cache_index.embedded import EmbeddedStore
from cache_index.errors import StoreUnavailableError
from cache_index.identity import CacheIdentity
from cache_index.mirror import IndexMirror
from cache_index.settings import IndexSettings
from router.index_link import IndexLink
from router.routing.parity import Fingerprints, Mismatch, mismatches, watch_parity
from tests.index_examples import IDENTITY, heartbeat, inventory, registration

PATIENCE_S = 30.0
INTERVAL_S = 0.005
SETTINGS = IndexSettings(lease_s=3_600.0, heartbeat_interval_s=0.01)
FIELDS = [field.name for field in dataclasses.fields(CacheIdentity)]


def another(field: str) -> CacheIdentity:
    value = 32 if field == "block_size" else "another"
    changes: dict[str, object] = {field: value}
    return dataclasses.replace(IDENTITY, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_of_the_identity_is_told_by_its_name(field: str) -> None:
    other = dataclasses.replace(registration("r2", 7), identity=another(field))
    assert mismatches(IDENTITY, [registration("r1"), other]) == (Mismatch("r2", 7, (field,)),)


def test_replicas_of_the_same_identity_are_no_mismatch() -> None:
    assert mismatches(IDENTITY, [registration("r1"), registration("r2")]) == ()


def test_a_fingerprint_is_that_of_the_current_epoch_and_kept_only_for_replicas_that_are_there() -> None:
    fingerprints = Fingerprints()
    old, new = registration("r1", 1), dataclasses.replace(registration("r1", 2), identity=another("weights"))
    assert fingerprints.of(old) == fingerprints.of(old) == IDENTITY.fingerprint()
    assert fingerprints.of(new) == another("weights").fingerprint()
    fingerprints.keep_only(set())
    assert fingerprints._known == {}


async def until_mismatches(link: IndexLink, expected: tuple[Mismatch, ...]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while link.mismatches != expected:  # noqa: ASYNC110  The watch tells nobody, by design.
            await asyncio.sleep(INTERVAL_S)


class Site:
    """A store, a mirror that follows it, and a watch over both."""

    def __init__(self) -> None:
        self.store = EmbeddedStore(SETTINGS)
        self.link = IndexLink()
        self.link.mirror = IndexMirror(self.store, SETTINGS)

    async def until_mismatches(self, expected: tuple[Mismatch, ...]) -> None:
        await until_mismatches(self.link, expected)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    assert site.link.mirror is not None
    tasks = [
        asyncio.create_task(site.link.mirror.follow()),
        asyncio.create_task(watch_parity(site.link, site.store, INTERVAL_S)),
    ]
    yield site
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_replica_of_another_identity_is_said_once_and_forgotten_when_it_is_replaced(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.link.identity = IDENTITY
    await site.store.publish_inventory(inventory("r1", 1))
    stranger = dataclasses.replace(inventory("r2", 1).registration, identity=another("chat_template"))
    await site.store.publish_inventory(dataclasses.replace(inventory("r2", 1), registration=stranger))
    await site.until_mismatches((Mismatch("r2", 1, ("chat_template",)),))
    await asyncio.sleep(5 * INTERVAL_S)
    [message] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "r2" in message
    assert "chat_template" in message
    assert site.link.health()["state"] == "none", "no settings were left, so there is no index to tell of"
    await site.store.publish_inventory(inventory("r2", 1, epoch=2))
    await site.until_mismatches(())


async def test_replicas_hear_of_the_gateways_identity(site: Site) -> None:
    await site.store.publish_inventory(inventory("r1", 1))
    assert (await site.store.heartbeat(heartbeat("r1", 1))).identities == ()
    site.link.identity = IDENTITY
    async with asyncio.timeout(PATIENCE_S):
        while not (notices := await site.store.heartbeat(heartbeat("r1", 1))).identities:  # noqa: ASYNC110  As above.
            await asyncio.sleep(INTERVAL_S)
    assert notices.identities == (IDENTITY,)


async def test_a_store_that_is_away_does_not_end_the_watch() -> None:
    class Away(EmbeddedStore):
        async def announce(self, identity: CacheIdentity) -> None:
            raise StoreUnavailableError("away")

    link, store = IndexLink(), Away(SETTINGS)
    link.identity = IDENTITY
    link.mirror = IndexMirror(store, SETTINGS)
    stranger = dataclasses.replace(inventory("r1", 1).registration, identity=another("dtype"))
    await store.publish_inventory(dataclasses.replace(inventory("r1", 1), registration=stranger))
    await link.mirror.catch_up(0.0)
    watching = asyncio.create_task(watch_parity(link, store, INTERVAL_S))
    await until_mismatches(link, (Mismatch("r1", 1, ("dtype",)),))
    assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
