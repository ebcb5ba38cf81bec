"""Chained block hashes and `PromptBlocks`, the form in which a prompt travels from the gateway to a replica.

    tokens   t0 … t15 | t16 … t31 | t32 … t40
    hashes   h0 = H(root, t0…t15, extras)   h1 = H(h0, t16…t31, extras)   (the rest is no full block, hence no hash)

A hash covers its parent's hash, so equal hashes mean equal prefixes, up to collisions of mmh3, which is not made to
withstand an attacker. A hash is therefore only ever a lookup key: the block pool compares tokens, extras and parent
before it shares a block.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import mmh3
import numpy as np
import numpy.typing as npt

from .identity import tenant_of

__all__ = [
    "NO_EXTRAS",
    "BlockChain",
    "BlockHash",
    "HashFunction",
    "PromptBlocks",
    "TokenIds",
    "as_token_ids",
    "hash_block",
]

BlockHash = bytes
TokenIds = npt.NDArray[np.uint32]
HashFunction = Callable[[bytes], bytes]

NO_EXTRAS = b""


def hash_block(
    parent: BlockHash, token_ids: bytes, extras: bytes = NO_EXTRAS, *, digest: HashFunction | None = None
) -> BlockHash:
    """Hash of one full block: mmh3 x64 128-bit over the parent's hash, the token ids and the extras.

    parent: 16 bytes, the previous block's hash or the chain's root. token_ids: block_size uint32, little-endian.
    extras: what a token id does not say, such as the digest of the image that a placeholder stands for.
    digest: another hash function, for tests that need collisions.
    The parent and the tokens have a fixed length per identity, so the extras can't imitate either.
    """
    return (digest or mmh3.mmh3_x64_128_digest)(parent + token_ids + extras)


def as_token_ids(token_ids: Iterable[int]) -> TokenIds:
    """Token ids as a read-only uint32 array.

    Raises ValueError for an id that is no uint32: numpy would otherwise wrap or round it into another token.
    """
    wide = token_ids if isinstance(token_ids, np.ndarray) else np.array(list(token_ids))
    if wide.ndim != 1:
        raise ValueError(f"token ids must be one-dimensional, got shape {wide.shape}")
    # What holds anything but integers of at most 64 bits has another kind; an empty list has one of its own.
    if wide.size and (wide.dtype.kind not in "iu" or int(wide.min()) < 0 or int(wide.max()) > 0xFFFF_FFFF):
        raise ValueError("a token id must be an integer between 0 and 2**32 - 1")
    narrow = wide.astype("<u4")
    narrow.flags.writeable = False
    return narrow


@dataclass(frozen=True, slots=True, eq=False)
class PromptBlocks:
    """A tokenized prompt with one hash per full block.

    token_ids: uint32 [num_tokens]. block_hashes: [num_tokens // block_size]. root: 16 bytes, the chain's root
    (identity and scope). fingerprint: 16 bytes, the identity that the root was made from, so that a replica of another
    identity can tell. scope: who shares (`identity.scope_key`); its first 16 bytes are the tenant. extras: block
    index -> bytes, for the blocks that have any.
    """

    token_ids: TokenIds
    block_size: int
    root: bytes
    fingerprint: bytes
    scope: bytes
    block_hashes: tuple[BlockHash, ...]
    extras: Mapping[int, bytes] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        token_ids: Iterable[int],
        *,
        block_size: int,
        root: bytes,
        fingerprint: bytes,
        scope: bytes,
        extras: Mapping[int, bytes] | None = None,
        digest: HashFunction | None = None,
    ) -> "PromptBlocks":
        """Hash every full block of a prompt; O(num_tokens).

        Raises ValueError for a block size below 1 or a token id that is no uint32.
        """
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        ids = as_token_ids(token_ids)
        extras = dict(extras or {})
        hashes = chain_hashes(root, ids, block_size=block_size, extras=extras, digest=digest)
        return cls(ids, block_size, root, fingerprint, scope, tuple(hashes), extras)

    def rebased(self, *, fingerprint: bytes, root: bytes, block_size: int) -> "PromptBlocks":
        """The same tokens and scope under another identity: what a replica does with a prompt hashed for another one.

        Extras are per block, so a prompt that has any keeps its block size. Raises ValueError where it would not.
        """
        if self.extras and block_size != self.block_size:
            raise ValueError("a prompt with extras can't change its block size")
        return PromptBlocks.build(
            self.token_ids,
            block_size=block_size,
            root=root,
            fingerprint=fingerprint,
            scope=self.scope,
            extras=self.extras,
        )

    @property
    def tenant(self) -> bytes:
        """16 bytes, the key of the tenant whose prompt it is: its partition of the index."""
        return tenant_of(self.scope)

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens, those after the last full block included."""
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        """Number of full blocks, the only ones that can be shared."""
        return len(self.block_hashes)

    def __len__(self) -> int:
        return self.num_tokens


def chain_hashes(
    parent: BlockHash,
    token_ids: TokenIds,
    *,
    block_size: int,
    extras: Mapping[int, bytes],
    digest: HashFunction | None = None,
) -> list[BlockHash]:
    """Hashes of the full blocks of `token_ids` that follow `parent`, in order; a partial last block has none."""
    raw = token_ids.tobytes()
    stride = block_size * token_ids.itemsize
    hashes: list[BlockHash] = []
    for index in range(len(token_ids) // block_size):
        block_tokens = raw[index * stride : (index + 1) * stride]
        parent = hash_block(parent, block_tokens, extras.get(index, NO_EXTRAS), digest=digest)
        hashes.append(parent)
    return hashes


class BlockChain:
    """A prompt that grows: its tokens, then those of the answer, hashed block by block as they fill.

    Owned by one sequence. `digest` is another hash function, for tests that need collisions.
    """

    def __init__(self, prompt: PromptBlocks, digest: HashFunction | None = None) -> None:
        self.block_size = prompt.block_size
        self.root = prompt.root
        self.scope = prompt.scope
        self.token_ids = array("I", prompt.token_ids.tobytes())
        self.block_hashes = list(prompt.block_hashes)
        self._extras = prompt.extras
        self._digest = digest

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        """Number of full blocks."""
        return len(self.block_hashes)

    def append(self, token_id: int) -> None:
        """Add one token; a block that it fills is hashed."""
        self.token_ids.append(token_id)
        if len(self.token_ids) % self.block_size == 0:
            index = self.num_blocks
            parent = self.block_hashes[-1] if self.block_hashes else self.root
            self.block_hashes.append(
                hash_block(parent, self.block_tokens(index), self.block_extras(index), digest=self._digest)
            )

    def block_tokens(self, index: int) -> bytes:
        """Token ids of full block `index`, uint32 little-endian."""
        return self.token_ids[index * self.block_size : (index + 1) * self.block_size].tobytes()

    def block_extras(self, index: int) -> bytes:
        """Extras of block `index`; empty for most."""
        return self._extras.get(index, NO_EXTRAS)
