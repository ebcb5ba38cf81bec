"""Chained block hashes and `PromptBlocks`, the form in which a prompt travels from the gateway to a replica.

    tokens   t0 … t15 | t16 … t31 | t32 … t40
    hashes   h0 = H(root, t0…t15, extras)   h1 = H(h0, t16…t31, extras)   (the rest is no full block, hence no hash)

A hash covers its parent's hash, so equal hashes mean equal prefixes, up to collisions of mmh3, which is not made to
withstand an attacker. A hash is therefore only ever a lookup key: the block pool compares tokens, extras and parent
before it shares a block.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import mmh3
import numpy as np
import numpy.typing as npt

__all__ = ["NO_EXTRAS", "BlockHash", "HashFunction", "PromptBlocks", "TokenIds", "as_token_ids", "hash_block"]

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

    Raises ValueError for an id that is no uint32: numpy would otherwise wrap it into another token.
    """
    wide = np.fromiter(token_ids, dtype=np.int64) if not isinstance(token_ids, np.ndarray) else token_ids
    if wide.ndim != 1:
        raise ValueError(f"token ids must be one-dimensional, got shape {wide.shape}")
    if wide.size and (int(wide.min()) < 0 or int(wide.max()) > 0xFFFF_FFFF):
        raise ValueError("a token id must be between 0 and 2**32 - 1")
    narrow = wide.astype("<u4")
    narrow.flags.writeable = False
    return narrow


@dataclass(frozen=True, slots=True, eq=False)
class PromptBlocks:
    """A tokenized prompt with one hash per full block.

    token_ids: uint32 [num_tokens]. block_hashes: [num_tokens // block_size]. root: 16 bytes, the chain's root
    (identity and scope). fingerprint: 16 bytes, the identity that the root was made from, so that a replica of another
    identity can tell. scope: 16 bytes, the partition. extras: block index -> bytes, for the blocks that have any.
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
) -> Sequence[BlockHash]:
    """Hashes of the full blocks of `token_ids` that follow `parent`, in order; a partial last block has none."""
    raw = token_ids.tobytes()
    stride = block_size * token_ids.itemsize
    hashes: list[BlockHash] = []
    for index in range(len(token_ids) // block_size):
        parent = hash_block(
            parent, raw[index * stride : (index + 1) * stride], extras.get(index, NO_EXTRAS), digest=digest
        )
        hashes.append(parent)
    return hashes
