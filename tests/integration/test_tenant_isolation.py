"""No tenant finds, or has anything in common with, another: with the hashes and scopes that gateways really make."""

import dataclasses
import random
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_index.blocks import BlockHash, PromptBlocks
from cache_index.events import BlocksRemoved, BlocksStored, EventBatch, Inventory
from cache_index.identity import CacheIdentity, chain_root, scope_key, tenant_key, tenant_of
from cache_index.redis_store import RedisStore
from cache_index.settings import IndexSettings
from tests.index_examples import IDENTITY, inventory, registration
from tests.index_stores import next_namespace
from tests.redis_servers import RedisServer

SECRET = b"a secret of the server"
FINGERPRINT = IDENTITY.fingerprint()
BLOCK_SIZE = 16
PROMPT = [number * 7 % 1_000 for number in range(20 * BLOCK_SIZE)]


def blocks_of(tenant: str, salt: str | None = None, token_ids: Iterable[int] = PROMPT) -> PromptBlocks:
    scope = scope_key(SECRET, tenant, salt)
    return PromptBlocks.build(
        token_ids, block_size=BLOCK_SIZE, root=chain_root(FINGERPRINT, scope), fingerprint=FINGERPRINT, scope=scope
    )


@pytest.fixture
def settings(redis: RedisServer) -> IndexSettings:
    return IndexSettings(redis_url=redis.secret_url, namespace=next_namespace(), lease_s=3_600.0)


@pytest.fixture
async def store(settings: IndexSettings) -> AsyncIterator[RedisStore]:
    store = RedisStore(settings)
    yield store
    await store.close()


def contents(client: Any, key: bytes) -> dict[bytes, bytes]:
    return {name: value for name, value in client.hgetall(key).items() if len(name) == BLOCK_SIZE}


async def test_two_tenants_with_the_same_prompt_have_no_key_field_or_hash_in_common(
    store: RedisStore, settings: IndexSettings, redis: RedisServer
) -> None:
    one, other = blocks_of("acme"), blocks_of("apex")
    stored = tuple(BlocksStored(prompt.tenant, prompt.block_hashes) for prompt in (one, other))
    await store.publish_inventory(Inventory(registration("r1"), 1, stored))
    with redis.client() as client:
        keys = sorted(client.keys(f"{settings.namespace}:*:blocks"))
        assert len(keys) == 2
        fields = [set(contents(client, key)) for key in keys]
        assert fields[0] & fields[1] == set()
        assert {frozenset(one.block_hashes), frozenset(other.block_hashes)} == set(map(frozenset, fields))
        everything = b"".join(client.dump(key) for key in client.keys(f"{settings.namespace}:*"))
        assert b"acme" not in everything
        assert b"apex" not in everything
    for mine, theirs in ((one, other), (other, one)):
        assert await store.match(mine.tenant, mine.block_hashes) == {"r1": 20}
        assert await store.match(mine.tenant, theirs.block_hashes) == {}
        assert await store.match(theirs.tenant, mine.block_hashes) == {}


async def test_two_salts_of_a_tenant_share_its_partition_and_no_hash(
    store: RedisStore, settings: IndexSettings, redis: RedisServer
) -> None:
    prompts = [blocks_of("acme", salt) for salt in (None, "", "one", "two")]
    stored = tuple(BlocksStored(prompt.tenant, prompt.block_hashes) for prompt in prompts)
    await store.publish_inventory(Inventory(registration("r1"), 1, stored))
    with redis.client() as client:
        [key] = client.keys(f"{settings.namespace}:*:blocks")
        assert tenant_key(SECRET, "acme").hex().encode() in key
        assert len(contents(client, key)) == 4 * 20
    # One purge takes them all, for they are one tenant's.
    assert await store.purge(tenant_key(SECRET, "acme")) == 4 * 20
    for prompt in prompts:
        assert await store.match(prompt.tenant, prompt.block_hashes) == {}


class PlainIndex:
    """The simplest index that is right: by tenant, replica and hash."""

    def __init__(self) -> None:
        self._held: set[tuple[bytes, str, BlockHash]] = set()

    def store(self, tenant: bytes, replica: str, block_hashes: Iterable[BlockHash]) -> None:
        self._held |= {(tenant, replica, block_hash) for block_hash in block_hashes}

    def remove(self, tenant: bytes, replica: str, block_hashes: Iterable[BlockHash]) -> None:
        self._held -= {(tenant, replica, block_hash) for block_hash in block_hashes}

    def match(self, tenant: bytes, block_hashes: Iterable[BlockHash], replicas: Iterable[str]) -> dict[str, int]:
        matched = {}
        for replica in replicas:
            num = 0
            for block_hash in block_hashes:
                if (tenant, replica, block_hash) not in self._held:
                    break
                num += 1
            if num:
                matched[replica] = num
        return matched


NUM_TENANTS, NUM_REPLICAS, NUM_OPERATIONS = 50, 4, 100_000


@dataclasses.dataclass
class Fuzz:
    """The same random traffic for every index that is asked: the same prompts for all tenants, a few at a time."""

    dice: random.Random
    prompts: list[list[PromptBlocks]]  # By tenant.

    @classmethod
    def draw(cls, *, shared_scope: bool) -> "Fuzz":
        dice = random.Random(20261201)
        texts = [[dice.randrange(1_000) for _ in range(8 * BLOCK_SIZE)] for _ in range(6)]
        # Some prompts begin alike, as real ones do.
        texts += [text[: 4 * BLOCK_SIZE] + [dice.randrange(1_000) for _ in range(4 * BLOCK_SIZE)] for text in texts]
        names = ["everybody" if shared_scope else f"tenant {number}" for number in range(NUM_TENANTS)]
        return cls(dice, [[blocks_of(name, token_ids=text) for text in texts] for name in names])


async def test_no_tenant_ever_matches_what_another_stored(store: RedisStore) -> None:
    fuzz, plain = Fuzz.draw(shared_scope=False), PlainIndex()
    replicas = [f"r{number}" for number in range(NUM_REPLICAS)]
    seqs = dict.fromkeys(replicas, 1)
    for replica in replicas:
        await store.publish_inventory(inventory(replica, 1))
    num_operations = num_found = 0
    while num_operations < NUM_OPERATIONS:
        replica, events = fuzz.dice.choice(replicas), []
        for tenant in fuzz.dice.sample(range(NUM_TENANTS), 6):
            for _ in range(12):
                prompt = fuzz.dice.choice(fuzz.prompts[tenant])
                first = fuzz.dice.randrange(8)
                if fuzz.dice.random() < 0.7:
                    events.append(BlocksStored(prompt.tenant, prompt.block_hashes[: first + 1]))
                    plain.store(prompt.tenant, replica, prompt.block_hashes[: first + 1])
                else:
                    events.append(BlocksRemoved(prompt.tenant, prompt.block_hashes[first:]))
                    plain.remove(prompt.tenant, replica, prompt.block_hashes[first:])
        seqs[replica] += 1
        await store.publish(EventBatch(replica, 1, seqs[replica], tuple(events)))
        num_operations += sum(len(event.block_hashes) for event in events)
        for _ in range(6):
            mine, theirs = fuzz.dice.sample(range(NUM_TENANTS), 2)
            number = fuzz.dice.randrange(len(fuzz.prompts[mine]))
            prompt, same_text = fuzz.prompts[mine][number], fuzz.prompts[theirs][number]
            expected = plain.match(prompt.tenant, prompt.block_hashes, replicas)
            assert await store.match(prompt.tenant, prompt.block_hashes) == expected
            assert await store.match(same_text.tenant, prompt.block_hashes) == {}
            num_found += len(expected)
            num_operations += 2 * len(prompt.block_hashes)
    assert num_found > 1_000, "matches are found where they should be, or the rest would prove nothing"


def test_an_index_without_tenants_would_have_been_caught() -> None:
    """The control: the same traffic, hashed in one scope and kept in one partition, does cross between tenants."""
    fuzz, plain = Fuzz.draw(shared_scope=True), PlainIndex()
    num_crossings = 0
    for _ in range(200):
        mine, theirs = fuzz.dice.sample(range(NUM_TENANTS), 2)
        number = fuzz.dice.randrange(len(fuzz.prompts[mine]))
        prompt, same_text = fuzz.prompts[mine][number], fuzz.prompts[theirs][number]
        plain.store(prompt.tenant, "r1", prompt.block_hashes)
        num_crossings += bool(plain.match(same_text.tenant, same_text.block_hashes, ["r1"]))
    assert num_crossings == 200


texts = st.text(max_size=12)


@given(texts, st.integers(0, 12), st.integers(0, 12))
def test_moving_text_between_tenant_and_salt_never_gives_the_same_scope(text: str, cut: int, other_cut: int) -> None:
    one, other = (text[:cut], text[cut:]), (text[:other_cut], text[other_cut:])
    assert (scope_key(SECRET, *one) == scope_key(SECRET, *other)) == (one == other)
    # What both would be if fields were only written one behind the other.
    assert "".join(one) == "".join(other)


@given(texts, texts, st.binary(min_size=16, max_size=16))
def test_a_salt_cannot_imitate_a_tenant(tenant: str, other: str, chosen: bytes) -> None:
    """Whatever bytes somebody writes into a salt or a name, the first 16 of a scope are an HMAC of the tenant alone."""
    salts = (other, tenant, tenant_key(SECRET, other).hex(), chosen.hex(), chosen.decode("latin-1"))
    for salt in salts:
        assert tenant_of(scope_key(SECRET, tenant, salt)) == tenant_key(SECRET, tenant)
        assert scope_key(SECRET, tenant, salt) != scope_key(SECRET, other)


TEXT_FIELDS = [field.name for field in dataclasses.fields(CacheIdentity) if field.name != "block_size"]


@given(texts, st.integers(0, 12), st.integers(0, 12), st.sampled_from(TEXT_FIELDS), st.sampled_from(TEXT_FIELDS))
def test_moving_text_between_fields_of_the_identity_never_gives_the_same_fingerprint(
    text: str, cut: int, other_cut: int, field: str, other_field: str
) -> None:
    one: dict[str, Any] = {field: text[:cut], other_field: text[cut:]}
    other: dict[str, Any] = {field: text[:other_cut], other_field: text[other_cut:]}
    identities = [dataclasses.replace(IDENTITY, **changes) for changes in (one, other)]
    same = identities[0] == identities[1]
    assert (identities[0].fingerprint() == identities[1].fingerprint()) == same
