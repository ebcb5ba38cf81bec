"""Attention by PyTorch's variable-length flash attention, which reads the pool through block tables itself."""

from itertools import accumulate
from typing import Any

import torch

from ..kv.tensors import KVTensors
from .attention import PackedStep, padded_table

__all__ = ["VarlenAttention"]


class VarlenAttention:
    """PyTorch's variable-length flash attention over the pool itself: no gathering; CUDA, 16-bit types.

    Paging needs a flash attention that supports it (FlashAttention 3 in PyTorch so far), so a replica tries this path
    on its own device before it uses it. `num_splits=1` keeps a sequence's result independent of its batch mates.
    """

    def __init__(self, step: PackedStep, kv: KVTensors) -> None:
        self._step = step
        self._kv = kv
        spans, device = step.spans, kv.device
        lengths = [len(span.token_ids) for span in spans]
        num_blocks_max = max(-(-span.end // kv.block_size) for span in spans)
        tables = [padded_table(span, kv.block_size, num_blocks_max) for span in spans]
        self._block_table = torch.tensor(tables, dtype=torch.int32, device=device)
        self._query_starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        self._ends = torch.tensor([span.end for span in spans], dtype=torch.int32, device=device)
        self._query_length_max = max(lengths)
        self._end_max = max(span.end for span in spans)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        keywords: dict[str, Any],
    ) -> torch.Tensor:
        """As `AttentionContext.attend`; the model's load made sure that no keyword asks for more."""
        # Imported here: older PyTorch has no such module, and then this path is not chosen.
        from torch.nn.attention.varlen import varlen_attn

        self._kv.write(layer, self._step.slots, key, value)
        output = varlen_attn(
            query.contiguous(),
            self._kv.keys[layer],
            self._kv.values[layer],
            self._query_starts,
            None,
            self._query_length_max,
            self._end_max,
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
            seqused_k=self._ends,
            block_table=self._block_table,
            num_splits=1,
        )
        assert isinstance(output, torch.Tensor)
        return output
