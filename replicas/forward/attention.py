"""Attention over the paged KV pool, for one packed step of many sequences.

Transformers calls the function registered here once per layer with the new tokens of all sequences in one row. The step
writes their keys and values to the pool, then every sequence attends to its own blocks:

    tokens of a step   | d0 | d1 | d2 |  prefill chunk of s3  |  prefill chunk of s4  |
                       └── decodes ──┘ └────────── spans ─────────────────────────────┘

This module has the layout of a step and the way in. Two ways to attend, which the same suite tests, lie beside it:
`gather` runs everywhere, `varlen` on CUDA where PyTorch's flash attention can read the pool itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from ..kv.tensors import KVTensors

__all__ = [
    "ATTENTION_NAME",
    "AttentionContext",
    "PackedAttention",
    "PackedStep",
    "Span",
    "packed_attention",
    "padded_table",
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
        """Lay spans out; each span has at least one token and a block table that covers its end.

        Decodes come first, those with the same first block side by side.
        """
        order = sorted(range(len(spans)), key=lambda i: (len(spans[i].token_ids) > 1, spans[i].block_table[0]))
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


class PackedAttention(AttentionContext, Protocol):
    """One way to attend over the pool. Made once per step, used by every layer."""

    def __init__(self, step: PackedStep, kv: KVTensors) -> None: ...


def padded_table(span: "Span", block_size: int, num_blocks: int, *, skip: int = 0) -> list[int]:
    """Block ids of a span from block `skip` on, padded to `num_blocks`.

    Padded with its own first block: what that holds is masked out, and should it hold NaN, it is nobody else's.
    """
    used = list(span.block_table[skip : -(-span.end // block_size)])
    return used + [span.block_table[0]] * (num_blocks - len(used))
