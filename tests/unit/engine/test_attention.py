"""One suite for every way to attend: each token sees its own sequence up to itself, whatever lies around it."""

import random
from collections.abc import Sequence

import pytest
import torch

from replicas.forward.attention import PackedAttention, PackedStep, Span
from replicas.forward.gather import CASCADE_TOKENS_MIN, GatherAttention, _CascadePart, _decode_parts
from replicas.forward.runner import pick_attention
from replicas.forward.varlen import VarlenAttention
from replicas.kv.tensors import KVLayout, KVTensors, LayerShape

BLOCK_SIZE = 16
NUM_BLOCKS = 64


def paths() -> list[tuple[type[PackedAttention], str, torch.dtype]]:
    found: list[tuple[type[PackedAttention], str, torch.dtype]] = [(GatherAttention, "cpu", torch.float32)]
    if torch.cuda.is_available():
        found.append((GatherAttention, "cuda", torch.bfloat16))
        layout = KVLayout((LayerShape(2, 64, 64),), torch.bfloat16)
        if pick_attention(layout, BLOCK_SIZE, torch.device("cuda")) is VarlenAttention:
            found.append((VarlenAttention, "cuda", torch.bfloat16))
    return found


def by_hand(
    kv: KVTensors, spans: Sequence[Span], query: torch.Tensor, order: Sequence[int], scaling: float
) -> torch.Tensor:
    """Attention in float64, one query at a time."""
    rows = []
    at = 0
    for span in (spans[index] for index in order):
        slots = [span.block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(span.end)]
        keys = kv.keys[0].flatten(0, 1)[slots].double()
        values = kv.values[0].flatten(0, 1)[slots].double()
        for position in range(span.start, span.end):
            heads = query[at].double().view(keys.shape[1], -1, keys.shape[2])
            scores = torch.einsum("hgd,shd->hgs", heads, keys[: position + 1]) * scaling
            rows.append(torch.einsum("hgs,shd->hgd", scores.softmax(-1), values[: position + 1]).flatten(0, 1))
            at += 1
    return torch.stack(rows)


def tables(chosen: random.Random, num_tables: int, num_shared: int, num_own: int) -> list[list[int]]:
    """Block tables that begin with the same blocks and go on with blocks of their own, in no order."""
    ids = chosen.sample(range(NUM_BLOCKS), num_shared + num_tables * num_own)
    shared = ids[:num_shared]
    own = ids[num_shared:]
    return [[*shared, *own[index * num_own : (index + 1) * num_own]] for index in range(num_tables)]


def decode(table: list[int], end: int) -> Span:
    return Span([0], end - 1, table)


@pytest.mark.parametrize(("kind", "device", "dtype"), paths())
@pytest.mark.parametrize("heads", [(2, 1), (2, 3), (1, 4)], ids=["multi-head", "grouped", "multi-query"])
@pytest.mark.parametrize("num_shared", [0, 2, 5], ids=["no shared blocks", "a few", "enough for a cascade"])
def test_every_token_attends_to_its_own_sequence(
    kind: type[PackedAttention], device: str, dtype: torch.dtype, heads: tuple[int, int], num_shared: int
) -> None:
    num_kv_heads, group = heads
    chosen = random.Random(num_shared)
    torch.manual_seed(0)
    kv = KVTensors(KVLayout((LayerShape(num_kv_heads, 64, 64),), dtype), NUM_BLOCKS, BLOCK_SIZE, torch.device(device))
    kv.keys[0].normal_()
    kv.values[0].normal_()
    groups = [tables(chosen, 4, num_shared, 3)]
    first = num_shared * BLOCK_SIZE
    spans = [
        decode(groups[0][0], first + 1),
        Span([0] * 17, first + 3, groups[0][1]),
        decode(groups[0][2], first + 48),
        Span([0] * 20, 0, chosen.sample(range(NUM_BLOCKS), 2)),
        decode(groups[0][3], first + 20),
    ]
    step = PackedStep.build(spans, BLOCK_SIZE, torch.device(device))
    num_tokens = len(step.token_ids)
    query = torch.randn(num_tokens, num_kv_heads * group, 64, device=device).to(dtype)
    key = torch.randn(num_tokens, num_kv_heads, 64, device=device).to(dtype)
    value = torch.randn(num_tokens, num_kv_heads, 64, device=device).to(dtype)
    output = kind(step, kv).attend(0, query, key, value, scaling=0.125, keywords={})
    expected = by_hand(kv, spans, query, step.order, 0.125)
    assert float((output.double() - expected).abs().max()) < (1e-5 if dtype is torch.float32 else 3e-2)


def test_decodes_cascade_where_they_share_enough_and_only_there() -> None:
    chosen = random.Random(1)
    layout = KVLayout((LayerShape(1, 8, 8),), torch.float32)
    kv = KVTensors(layout, NUM_BLOCKS, BLOCK_SIZE, torch.device("cpu"))
    enough = CASCADE_TOKENS_MIN // BLOCK_SIZE

    def kinds(*groups: list[list[int]]) -> list[tuple[str, int]]:
        spans = [decode(table, len(table) * BLOCK_SIZE) for group in groups for table in group]
        step = PackedStep.build(spans, BLOCK_SIZE, torch.device("cpu"))
        return sorted((type(part).__name__, part.num_tokens) for part in _decode_parts(step.spans, kv))

    one, two = tables(chosen, 3, enough, 1), tables(chosen, 2, enough, 2)
    assert kinds(one) == [(_CascadePart.__name__, 3)]
    assert kinds(tables(chosen, 3, enough - 1, 2)) == [("_DecodePart", 3)]
    assert kinds(one[:1]) == [("_DecodePart", 1)]
    if one[0][0] != two[0][0]:
        assert kinds(one, two) == [("_CascadePart", 2), ("_CascadePart", 3)]


def test_spans_are_laid_out_decodes_first_and_written_to_their_own_slots() -> None:
    spans = [Span([7, 8, 9], 15, [3, 5]), Span([4], 16, [2, 6])]
    step = PackedStep.build(spans, BLOCK_SIZE, torch.device("cpu"))
    assert step.order == (1, 0)
    assert step.num_decodes == 1
    assert step.token_ids.tolist() == [4, 7, 8, 9]
    assert step.positions.tolist() == [16, 15, 16, 17]
    assert step.slots.tolist() == [6 * 16, 3 * 16 + 15, 5 * 16, 5 * 16 + 1]
