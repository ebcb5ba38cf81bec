"""Attention by gathering: whole blocks are gathered from the pool, then attended with PyTorch's own products.

Runs on any device and dtype. Queries that share a KV head are laid side by side as one head's queries: grouped-query
attention without repeating keys and values.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ..kv.tensors import KVTensors
from .attention import PackedStep, Span, padded_table

__all__ = ["CASCADE_TOKENS_MIN", "GatherAttention"]

CASCADE_TOKENS_MIN = 64
"""Shared tokens from which one dense product is tried. Below a few blocks its extra steps cost more than they save."""


_BlockIds = torch.Tensor | slice


class GatherAttention:
    """Attends each part of the row in its own way: prefill chunks, decodes, decodes that share a prefix."""

    def __init__(self, step: PackedStep, kv: KVTensors) -> None:
        self._slots = step.slots
        self._kv = kv
        self._parts: list[_Part] = [*_decode_parts(step.spans[: step.num_decodes], kv)]
        self._parts += [_PrefillPart(span, kv) for span in step.spans[step.num_decodes :]]

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
        self._kv.write(layer, self._slots, key, value)
        output = query.new_empty(*query.shape[:2], value.shape[-1])
        start = 0
        for part in self._parts:
            end = start + part.num_tokens
            output[start:end] = part.attend(layer, query[start:end], scaling)
            start = end
        return output


class _Part(Protocol):
    """Some neighbouring tokens of a step's row."""

    num_tokens: int

    def attend(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """query: [num_tokens, num_heads, head_dim]. Returns [num_tokens, num_heads, dim]."""


class _PrefillPart:
    """One sequence's chunk, with a causal mask over all of the sequence so far."""

    def __init__(self, span: Span, kv: KVTensors) -> None:
        self.num_tokens = len(span.token_ids)
        self._kv = kv
        self._end = span.end
        self._blocks = _block_ids([span.block_table[: -(-span.end // kv.block_size)]], kv)
        visible = torch.ones(self.num_tokens, span.end, dtype=torch.bool, device=kv.device).tril(span.start)
        self._mask = _additive(visible, kv.layout.dtype)
        self._masks: dict[int, torch.Tensor] = {}

    def attend(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        num_tokens, num_heads, head_dim = query.shape
        keys, values = _gather(self._kv, layer, self._blocks, 1)
        num_kv_heads = keys.shape[1]
        group = num_heads // num_kv_heads
        if group not in self._masks:  # Once per step, not once per layer.
            self._masks[group] = self._mask.repeat(group, 1)
        output = F.scaled_dot_product_attention(
            query.transpose(0, 1).reshape(1, num_kv_heads, group * num_tokens, head_dim),
            keys[:, :, : self._end],
            values[:, :, : self._end],
            attn_mask=self._masks[group],
            scale=scaling,
        )
        return output.reshape(num_heads, num_tokens, -1).transpose(0, 1)


class _DecodePart:
    """One token each of sequences that share too little, padded to the longest and attended in one call."""

    def __init__(self, spans: Sequence[Span], kv: KVTensors) -> None:
        self.num_tokens = len(spans)
        self._kv = kv
        self._blocks, self._mask = _padded(spans, kv)

    def attend(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        keys, values = _gather(self._kv, layer, self._blocks, self.num_tokens)
        grouped = query.reshape(self.num_tokens, keys.shape[1], -1, query.shape[-1])
        output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask, scale=scaling)
        return output.reshape(self.num_tokens, query.shape[1], -1)


class _CascadePart:
    """One token each of sequences that begin with the same blocks, which are gathered and attended once for all.

        scores of a sequence   |  shared blocks: one dense product  |  own blocks: padded  |
                               └──────────────── one softmax ──────────────────────────────┘

    (Cascade attention as in FlashInfer, but with one softmax over both parts instead of merging two.)
    """

    def __init__(self, spans: Sequence[Span], num_shared_blocks: int, kv: KVTensors) -> None:
        self.num_tokens = len(spans)
        self._kv = kv
        self._shared = _block_ids([spans[0].block_table[:num_shared_blocks]], kv)
        self._blocks, self._mask = _padded(spans, kv, num_shared_blocks)

    def attend(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        shared_keys, shared_values = (tokens[0] for tokens in _gather(self._kv, layer, self._shared, 1))
        keys, values = _gather(self._kv, layer, self._blocks, self.num_tokens)
        num_kv_heads, num_shared = shared_keys.shape[:2]
        # [sequences, KV heads, group, dim], and the same by KV head for the dense product.
        grouped = query.reshape(self.num_tokens, num_kv_heads, -1, query.shape[-1]) * scaling
        by_head = grouped.transpose(0, 1)
        stacked = by_head.reshape(num_kv_heads, -1, query.shape[-1])
        shared_scores = torch.bmm(stacked, shared_keys.transpose(1, 2)).view(*by_head.shape[:3], num_shared)
        own_scores = torch.matmul(grouped, keys.transpose(2, 3)) + self._mask
        scores = torch.cat((shared_scores.transpose(0, 1), own_scores), dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
        shared_weights = weights[..., :num_shared].transpose(0, 1).reshape(num_kv_heads, -1, num_shared)
        output = torch.bmm(shared_weights, shared_values).view(*by_head.shape[:3], -1).transpose(0, 1)
        output = output + torch.matmul(weights[..., num_shared:], values)
        return output.reshape(self.num_tokens, query.shape[1], -1)


def _decode_parts(spans: Sequence[Span], kv: KVTensors) -> Iterator[_Part]:
    """Decodes in runs that share leading blocks worth a cascade, and runs that share none."""
    plain: list[Span] = []
    for _, run in groupby(spans, key=lambda span: span.block_table[0]):
        group = list(run)
        num_shared_blocks = _num_shared_blocks(group)
        if len(group) > 1 and num_shared_blocks * kv.block_size >= CASCADE_TOKENS_MIN:
            if plain:
                yield _DecodePart(plain, kv)
                plain = []
            yield _CascadePart(group, num_shared_blocks, kv)
        else:
            plain.extend(group)
    if plain:
        yield _DecodePart(plain, kv)


def _num_shared_blocks(spans: Sequence[Span]) -> int:
    """Leading blocks that all tables have in common. A sequence's last block is its own, so some of each is left."""
    columns = zip(*(span.block_table for span in spans), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def _padded(spans: Sequence[Span], kv: KVTensors, skip: int = 0) -> tuple[_BlockIds, torch.Tensor]:
    """Block ids from block `skip` on, [num_sequences * blocks], padded to the longest; and the mask over them."""
    num_blocks = max(-(-span.end // kv.block_size) for span in spans) - skip
    tables = [padded_table(span, kv.block_size, num_blocks, skip=skip) for span in spans]
    ends = torch.tensor([span.end for span in spans], dtype=torch.int64, device=kv.device)
    positions = torch.arange(skip * kv.block_size, (skip + num_blocks) * kv.block_size, device=kv.device)
    mask = _additive(positions[None] < ends[:, None], kv.layout.dtype)
    return _block_ids(tables, kv), mask[:, None, None]


def _block_ids(tables: Sequence[Sequence[int]], kv: KVTensors) -> _BlockIds:
    """Ids in order; as a slice where they lie side by side, for then nothing has to be copied."""
    ids = [block for table in tables for block in table]
    if ids == list(range(ids[0], ids[0] + len(ids))):
        return slice(ids[0], ids[0] + len(ids))
    return torch.tensor(ids, dtype=torch.int64, device=kv.device)


def _gather(kv: KVTensors, layer: int, blocks: _BlockIds, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as [num_sequences, num_kv_heads, num_slots, dim] views of whole blocks."""

    def gathered(pool: torch.Tensor) -> torch.Tensor:
        found = pool[blocks] if isinstance(blocks, slice) else pool.index_select(0, blocks)
        return found.view(num_sequences, -1, *pool.shape[2:]).transpose(1, 2)

    return gathered(kv.keys[layer]), gathered(kv.values[layer])


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
