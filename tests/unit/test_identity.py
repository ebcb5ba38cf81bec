"""Identity: whatever shapes keys and values, or may not share them, changes the root of the hash chain."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_index.identity import DIGEST_BYTES, CacheIdentity, chain_root, scope_key, tenant_key, tenant_of
from tests.index_examples import IDENTITY

FIELDS = [field.name for field in dataclasses.fields(CacheIdentity)]
SECRET = b"the server's secret"

texts = st.text(max_size=6)
identities = st.builds(
    CacheIdentity,
    weights=texts,
    config=texts,
    dtype=texts,
    kv_dtype=texts,
    quantization=st.none() | texts,
    attention=texts,
    tokenizer=texts,
    chat_template=st.none() | texts,
    adapter=st.none() | texts,
    block_size=st.integers(1, 64),
)


def other_value(name: str) -> Any:
    return 32 if name == "block_size" else "something else"


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_changes_the_fingerprint_and_is_named_as_the_difference(name: str) -> None:
    other = dataclasses.replace(IDENTITY, **{name: other_value(name)})
    assert other.fingerprint() != IDENTITY.fingerprint()
    assert IDENTITY.differing_fields(other) == (name,)


def test_the_same_fields_make_the_same_fingerprint_in_every_process_and_release() -> None:
    # Replicas of two releases share a store, so a change of this value empties every cache: it has to be meant.
    assert IDENTITY.fingerprint().hex() == "6f73b45bd9cf6de99d794d10dc2c64a2"
    assert len(IDENTITY.fingerprint()) == DIGEST_BYTES
    assert IDENTITY.differing_fields(dataclasses.replace(IDENTITY)) == ()


@given(identities, identities)
def test_two_identities_have_one_fingerprint_only_if_they_are_equal(one: CacheIdentity, other: CacheIdentity) -> None:
    assert (one.fingerprint() == other.fingerprint()) == (one == other)


def test_no_adapter_is_another_value_than_an_adapter_called_none_or_nothing() -> None:
    fingerprints = {
        dataclasses.replace(IDENTITY, adapter=adapter).fingerprint() for adapter in (None, "None", "", "NoneType")
    }
    assert len(fingerprints) == 4


def test_text_that_moves_from_one_field_to_the_next_is_another_identity() -> None:
    one = dataclasses.replace(IDENTITY, weights="ab", config="c")
    other = dataclasses.replace(IDENTITY, weights="a", config="bc")
    assert one.fingerprint() != other.fingerprint()


def test_a_number_and_its_digits_are_different_values() -> None:
    digits: Any = "16"
    assert dataclasses.replace(IDENTITY, block_size=digits).fingerprint() != IDENTITY.fingerprint()


def test_a_tenants_scope_needs_the_secret() -> None:
    assert scope_key(SECRET, "acme") == scope_key(SECRET, "acme")
    assert scope_key(SECRET, "acme") != scope_key(b"another secret", "acme")
    with pytest.raises(ValueError, match="empty"):
        scope_key(b"", "acme")


@given(st.tuples(texts, st.none() | texts))
def test_a_scope_names_its_tenant_and_a_salt_comes_after(whose: tuple[str, str | None]) -> None:
    scope = scope_key(SECRET, *whose)
    assert tenant_of(scope) == tenant_key(SECRET, whose[0])
    assert len(scope) == DIGEST_BYTES * (1 if whose[1] is None else 2)


def test_the_same_salt_of_two_tenants_has_nothing_in_common() -> None:
    one, other = scope_key(SECRET, "acme", "salt"), scope_key(SECRET, "apex", "salt")
    assert one[:DIGEST_BYTES] != other[:DIGEST_BYTES]
    assert one[DIGEST_BYTES:] != other[DIGEST_BYTES:]


@given(st.tuples(texts, st.none() | texts), st.tuples(texts, st.none() | texts))
def test_a_salt_splits_a_tenant_and_never_joins_two(one: tuple[str, str | None], other: tuple[str, str | None]) -> None:
    assert (scope_key(SECRET, *one) == scope_key(SECRET, *other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("acme", None), ("acme", "")),
        (("ac", "me"), ("acme", None)),
        (("ac", "me"), ("acm", "e")),
        (("a\x00b", None), ("a", "b")),
        (("\ud800", None), ("?", None)),
    ],
)
def test_tenants_and_salts_that_only_look_alike_have_different_scopes(
    one: tuple[str, str | None], other: tuple[str, str | None]
) -> None:
    assert scope_key(SECRET, *one) != scope_key(SECRET, *other)


def test_a_root_depends_on_identity_and_on_scope_and_on_which_is_which() -> None:
    fingerprint, scope = b"f" * 16, b"s" * 16
    roots = {
        chain_root(fingerprint, scope),
        chain_root(scope, fingerprint),
        chain_root(b"g" * 16, scope),
        chain_root(fingerprint, b"t" * 16),
        chain_root(fingerprint + scope[:1], scope[1:]),
    }
    assert len(roots) == 5
    assert {len(root) for root in roots} == {DIGEST_BYTES}
