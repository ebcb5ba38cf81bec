"""The KV pool's tensors and the formula for its size.

Per layer two tensors, keys and values, of shape `[num_blocks, block_size, num_kv_heads, head_dim]`. A slot is one
token's place: block id × block_size + offset. This module moves and measures; who may read or write which block is the
block pool's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import MemoryBudgetError

__all__ = ["KVLayout", "KVTensors", "LayerShape", "num_blocks_for"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What every layer of a model stores per token, in layer order."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Sum over layers of num_kv_heads × (key_dim + value_dim) × bytes per element."""
        elements = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in self.layers)
        return elements * self.dtype.itemsize


def num_blocks_for(memory_bytes: int, block_size: int, layout: KVLayout) -> int:
    """Number of blocks that a memory budget holds:

        num_blocks = floor(memory_bytes / (block_size × bytes_per_token))

    with `bytes_per_token` as `KVLayout` gives it. SmolLM2-135M in float32: 30 layers × 3 heads × (64 + 64) × 4 bytes =
    46,080 bytes per token, so 1 GiB holds 1,456 blocks of 16.
    Raises MemoryBudgetError where not even one block fits.
    """
    num_blocks = memory_bytes // (block_size * layout.bytes_per_token)
    if num_blocks < 1:
        raise MemoryBudgetError(
            f"a KV budget of {memory_bytes:,} bytes does not hold one block: "
            f"{block_size} tokens need {block_size * layout.bytes_per_token:,} bytes"
        )
    return num_blocks


class KVTensors:
    """Keys and values of every layer.

    keys[layer], values[layer]: `[num_blocks, block_size, num_kv_heads, key_dim | value_dim]`.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        shape = (num_blocks, block_size)
        # Zeros, not empty: a slot that no token was written to takes part in a padded attention with weight 0, and
        # 0 × NaN would be NaN.
        self.keys = [
            torch.zeros(*shape, layer.num_kv_heads, layer.key_dim, dtype=layout.dtype, device=device)
            for layer in layout.layers
        ]
        self.values = [
            torch.zeros(*shape, layer.num_kv_heads, layer.value_dim, dtype=layout.dtype, device=device)
            for layer in layout.layers
        ]

    @property
    def num_bytes(self) -> int:
        """Memory that the tensors take."""
        return self.num_blocks * self.block_size * self.layout.bytes_per_token

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one step's new tokens: slots int64 [num_tokens]; keys, values [num_tokens, num_kv_heads, dim]."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in every layer; the copy on write of a wholly cached prompt."""
        for pool in (*self.keys, *self.values):
            pool[target].copy_(pool[source])

    def clear(self) -> None:
        """Zero every slot; after a fault that may have left NaN behind, which no mask keeps out of a product."""
        for pool in (*self.keys, *self.values):
            pool.zero_()

    def read(self, block_ids: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """A copy of some blocks, keys then values, layer by layer; for tests and audits."""
        index = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        return tuple(pool.index_select(0, index) for pool in (*self.keys, *self.values))
