"""Attention over the paged KV pool, for one packed step of many sequences.

Transformers calls the function registered here once per layer with the new tokens of all sequences in one row. The step
writes their keys and values to the pool, then every sequence attends to its own blocks:

    tokens of a step   | d0 | d1 | d2 |  prefill chunk of s3  |  prefill chunk of s4  |
                       └── decodes ──┘ └────────── spans ─────────────────────────────┘

Two ways to attend, which the same suite tests: `GatherAttention` runs everywhere (blocks are gathered, then scaled dot
product attention), `VarlenAttention` hands the block table to PyTorch's variable-length flash attention on CUDA.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from ..kv.tensors import KVTensors

__all__ = [
    "ATTENTION_NAME",
    "AttentionContext",
    "GatherAttention",
    "PackedAttention",
    "PackedStep",
    "Span",
    "VarlenAttention",
    "packed_attention",
    "register",
]

ATTENTION_NAME = "warmroute_packed"


class AttentionContext(Protocol):
    """What travels through `model(..., packed=...)` to every attention layer."""

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
        """query, key, value: [num_tokens, num_heads | num_kv_heads, head_dim]. Returns [num_tokens, num_heads, dim].

        keywords: whatever else the model passed to its attention function.
        """


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: AttentionContext,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that Transformers calls; query, key, value: [1, heads, num_tokens, head_dim].

    Returns ([1, num_tokens, num_heads, head_dim], None).
    """
    if attention_mask is not None:
        keywords["attention_mask"] = attention_mask
    output = packed.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        keywords=keywords,
    )
    return output[None], None


def register() -> None:
    """Make `attn_implementation=ATTENTION_NAME` known to Transformers; calling it again changes nothing.

    No mask function is registered under that name, so models build no mask: the packed step knows who may see whom.
    """
    AttentionInterface.register(ATTENTION_NAME, packed_attention)


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's share of a step: `token_ids` at positions `start`, `start + 1`, …

    block_table: the sequence's block ids in order; covers every position up to the span's end.
    wants_logits: whether the logits of the span's last token are needed.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    wants_logits: bool = True

    @property
    def end(self) -> int:
        """Tokens in the sequence's cache once the span is written."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step's tokens in one row, decodes first, and where each one's keys and values go.

    order: for each span in the row, its index in the list that the caller gave.
    """

    spans: tuple[Span, ...]
    order: tuple[int, ...]
    num_decodes: int
    token_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    slots: torch.Tensor  # int64 [num_tokens]

    @classmethod
    def build(cls, spans: Sequence[Span], block_size: int, device: torch.device) -> "PackedStep":
        """Lay spans out; each span has at least one token and a block table that covers its end."""
        order = sorted(range(len(spans)), key=lambda index: len(spans[index].token_ids) > 1)
        ordered = tuple(spans[index] for index in order)
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for span in ordered:
            assert len(span.token_ids) > 0 and span.end <= len(span.block_table) * block_size
            token_ids.extend(span.token_ids)
            positions.extend(range(span.start, span.end))
            slots.extend(
                span.block_table[position // block_size] * block_size + position % block_size
                for position in range(span.start, span.end)
            )
        rows = torch.tensor([token_ids, positions, slots], dtype=torch.int64).to(device, non_blocking=True)
        num_decodes = sum(len(span.token_ids) == 1 for span in ordered)
        return cls(ordered, tuple(order), num_decodes, rows[0], rows[1], rows[2])


class PackedAttention(Protocol):
    """One way to attend over the pool. Made once per step, used by every layer."""

    def __init__(self, step: PackedStep, kv: KVTensors) -> None: ...

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        keywords: dict[str, Any],
    ) -> torch.Tensor: ...


class GatherAttention:
    """Whole blocks are gathered, then attended with PyTorch's scaled dot product attention; any device and dtype.

    Decoding sequences are padded to the longest and attended in one call. Queries that share a KV head are laid side by
    side as one head's queries (grouped-query attention without repeating keys and values).
    """

    def __init__(self, step: PackedStep, kv: KVTensors) -> None:
        self._step = step
        self._kv = kv
        device, block_size = kv.device, kv.block_size
        decodes, prefills = step.spans[: step.num_decodes], step.spans[step.num_decodes :]
        num_blocks_max = max((-(-span.end // block_size) for span in decodes), default=0)
        # A short table is padded with any block, here block 0: its weight is exactly 0, and a pool holds no NaN.
        tables = [_pad(span.block_table, span.end, block_size, num_blocks_max) for span in decodes]
        self._decode_blocks = torch.tensor(tables, dtype=torch.int64, device=device).flatten()
        ends = torch.tensor([span.end for span in decodes], dtype=torch.int64, device=device)
        visible = torch.arange(num_blocks_max * block_size, device=device)[None] < ends[:, None]
        self._decode_mask = _additive(visible, kv.layout.dtype)[:, None, None]
        self._prefills = [_Prefill(span, kv) for span in prefills]

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
        self._kv.write(layer, self._step.slots, key, value)
        output = query.new_empty(*query.shape[:2], value.shape[-1])
        at = self._step.num_decodes
        if at:
            output[:at] = self._attend_decodes(layer, query[:at], scaling)
        for prefill in self._prefills:
            until = at + prefill.num_tokens
            output[at:until] = self._attend_prefill(layer, prefill, query[at:until], scaling)
            at = until
        return output

    def _attend_decodes(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        num_sequences, num_heads, _ = query.shape
        keys, values = self._gather(layer, self._decode_blocks, num_sequences)
        grouped = query.reshape(num_sequences, keys.shape[1], num_heads // keys.shape[1], -1)
        output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._decode_mask, scale=scaling)
        return output.reshape(num_sequences, num_heads, -1)

    def _attend_prefill(self, layer: int, prefill: "_Prefill", query: torch.Tensor, scaling: float) -> torch.Tensor:
        num_tokens, num_heads, head_dim = query.shape
        keys, values = self._gather(layer, prefill.blocks, 1)
        num_kv_heads = keys.shape[1]
        group = num_heads // num_kv_heads
        output = F.scaled_dot_product_attention(
            query.transpose(0, 1).reshape(1, num_kv_heads, group * num_tokens, head_dim),
            keys[:, :, : prefill.end],
            values[:, :, : prefill.end],
            attn_mask=prefill.mask(group),
            scale=scaling,
        )
        return output.reshape(num_heads, num_tokens, -1).transpose(0, 1)

    def _gather(self, layer: int, blocks: torch.Tensor, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as [num_sequences, num_kv_heads, num_slots, dim] views of whole gathered blocks."""

        def gathered(pool: torch.Tensor) -> torch.Tensor:
            tokens = pool.index_select(0, blocks).view(num_sequences, -1, *pool.shape[2:])
            return tokens.transpose(1, 2)

        return gathered(self._kv.keys[layer]), gathered(self._kv.values[layer])


class _Prefill:
    """What attending one prefill chunk takes, the same in every layer."""

    def __init__(self, span: Span, kv: KVTensors) -> None:
        self.num_tokens = len(span.token_ids)
        self.end = span.end
        num_blocks = -(-span.end // kv.block_size)
        self.blocks = torch.tensor(list(span.block_table[:num_blocks]), dtype=torch.int64, device=kv.device)
        visible = torch.ones(self.num_tokens, span.end, dtype=torch.bool, device=kv.device).tril(span.start)
        self._mask = _additive(visible, kv.layout.dtype)
        self._by_group: dict[int, torch.Tensor] = {}

    def mask(self, group: int) -> torch.Tensor:
        """The causal mask for `group` query heads laid side by side: [group * num_tokens, end]."""
        if group not in self._by_group:
            self._by_group[group] = self._mask.repeat(group, 1)
        return self._by_group[group]


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
        tables = [_pad(span.block_table, span.end, kv.block_size, num_blocks_max) for span in spans]
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


def _pad(block_table: Sequence[int], end: int, block_size: int, num_blocks: int) -> list[int]:
    used = list(block_table[: -(-end // block_size)])
    return used + [0] * (num_blocks - len(used))


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
