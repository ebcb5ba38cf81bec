"""What decides KV values besides the tokens, and who may share them.

A block may be reused only where everything that shaped its keys and values is the same. `CacheIdentity` names those
things, `scope_key` says who may share, and `chain_root` folds both into the root of every hash chain. This module knows
nothing of models or tensors: the replica that loads a model fills the fields in.
"""

import hashlib
import hmac
from dataclasses import dataclass, fields
from typing import Protocol

__all__ = ["DIGEST_BYTES", "CacheIdentity", "chain_root", "scope_key", "tenant_key", "tenant_of"]

# One size for every digest here and for block hashes: 128 bits is what mmh3 yields, and enough for a keyed digest
# that only separates tenants, because the tokens are compared before a block is shared.
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """Everything besides tokens and scope that decides the keys and values of a block.

    Sampling parameters are not part of it: they act after the logits. `adapter` is the adapter's digest, and None
    (no adapter) is a value of its own.
    """

    weights: str
    config: str
    dtype: str
    kv_dtype: str
    quantization: str | None
    attention: str
    tokenizer: str
    chat_template: str | None
    adapter: str | None
    block_size: int

    def fingerprint(self) -> bytes:
        """16 bytes that change when any field changes.

        Every field goes in with its name and length, so that no value can imitate another field (BLAKE2b, RFC 7693).
        """
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"warmroute.ident")
        for field in fields(self):
            _update_tagged(digest, field.name.encode())
            value = getattr(self, field.name)
            # None and the text "None" are different values, hence the type's name before the value.
            _update_tagged(digest, type(value).__name__.encode())
            _update_tagged(digest, str(value).encode())
        return digest.digest()

    def differing_fields(self, other: "CacheIdentity") -> tuple[str, ...]:
        """Names of the fields in which `other` differs, in declaration order; empty when both are the same."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name))


def tenant_key(secret: bytes, tenant: str) -> bytes:
    """16 bytes that name a tenant's partition, meaningless without the server's secret (HMAC-SHA-256, RFC 2104).

    secret: the server's secret. Raises ValueError for an empty one, under which anybody could compute the key.
    """
    if not secret:
        raise ValueError("the scope secret must not be empty")
    return _keyed(secret, b"warmroute.tenant", _encoded(tenant))


def scope_key(secret: bytes, tenant: str, cache_salt: str | None = None) -> bytes:
    """Bytes that name who shares with whom: the tenant's key and, where a salt splits the tenant, 16 bytes of the salt.

    A salt can never join two tenants; None and "" are different scopes. Raises ValueError as `tenant_key` does.
    """
    key = tenant_key(secret, tenant)
    if cache_salt is None:
        return key
    # The tenant goes in too, so that equal salts of two tenants have nothing in common.
    return key + _keyed(secret, b"warmroute.salt", key, _encoded(cache_salt))


def tenant_of(scope: bytes) -> bytes:
    """The key of the tenant whose scope this is: 16 bytes."""
    return scope[:DIGEST_BYTES]


def chain_root(fingerprint: bytes, scope: bytes) -> bytes:
    """16 bytes: the parent of the first block of every chain of this identity in this scope.

    scope: of any length, for it goes in with its length.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"warmroute.root")
    _update_tagged(digest, fingerprint)
    _update_tagged(digest, scope)
    return digest.digest()


def _keyed(secret: bytes, purpose: bytes, *parts: bytes) -> bytes:
    keyed = hmac.new(secret, purpose, hashlib.sha256)
    for part in parts:
        _update_tagged(keyed, part)
    return keyed.digest()[:DIGEST_BYTES]


def _encoded(text: str) -> bytes:
    # What JSON can carry and UTF-8 can't, a lone surrogate, is a name like any other.
    return text.encode("utf-8", "surrogatepass")


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


def _update_tagged(digest: _Digest, value: bytes) -> None:
    digest.update(len(value).to_bytes(8, "little"))
    digest.update(value)
