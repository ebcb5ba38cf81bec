"""Running one packed step of the model over the KV pool."""

import logging
from collections.abc import Sequence

import torch

from ..kv.tensors import KVLayout, KVTensors
from .attention import PackedAttention, PackedStep, Span
from .gather import GatherAttention
from .model import LoadedModel
from .varlen import VarlenAttention

__all__ = ["ModelRunner", "pick_attention"]

logger = logging.getLogger(__name__)

# 16-bit floats differ in the third digit after a few hundred additions in another order.
_PROBE_TOLERANCE = 2e-2


class ModelRunner:
    """The model with its KV tensors. Knows slots and positions, no requests. The engine's thread owns it."""

    def __init__(self, model: LoadedModel, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.kv = KVTensors(model.layout, num_blocks, block_size, model.device)
        self.attention = pick_attention(model.layout, block_size, model.device)

    @torch.inference_mode()
    def run(self, spans: Sequence[Span]) -> torch.Tensor:
        """Compute the spans' tokens, writing their keys and values to the pool.

        Returns logits float32 [spans that want logits, vocab_size], in the order of `spans`. All positions must lie
        below the model's `max_model_len`; a slot past it has no position to be written with.
        """
        assert all(span.end <= self.model.max_model_len for span in spans), "no position at or past the context limit"
        step = PackedStep.build(spans, self.kv.block_size, self.kv.device)
        last_tokens: dict[int, int] = {}
        end = 0
        for index, span in zip(step.order, step.spans, strict=True):
            end += len(span.token_ids)
            if span.wants_logits:
                last_tokens[index] = end - 1
        keep = [last_tokens[index] for index in sorted(last_tokens)]
        output = self.model.module(
            input_ids=step.token_ids[None],
            position_ids=step.positions[None],
            use_cache=False,
            logits_to_keep=torch.tensor(keep, dtype=torch.int64, device=self.kv.device),
            packed=self.attention(step, self.kv),
        )
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's keys and values in every layer."""
        self.kv.copy_block(source, target)


def pick_attention(layout: KVLayout, block_size: int, device: torch.device) -> type[PackedAttention]:
    """The fastest way to attend that gives the right values on this device.

    The flash path is tried on a small pool and compared with the plain one: whether PyTorch's build has it, with
    paging and for this block size, is not to be told from version numbers.
    """
    if device.type != "cuda" or layout.dtype not in (torch.float16, torch.bfloat16):
        return GatherAttention
    try:
        difference = _compare_attention(layout, block_size, device)
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        logger.warning("paged flash attention is not available here, using the plain path: %s", error)
        return GatherAttention
    if difference > _PROBE_TOLERANCE:
        logger.warning("paged flash attention differs from the plain path by %.3g, using the plain path", difference)
        return GatherAttention
    return VarlenAttention


@torch.inference_mode()
def _compare_attention(layout: KVLayout, block_size: int, device: torch.device) -> float:
    generator = torch.Generator(device).manual_seed(0)
    layer = layout.layers[0]

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(layout.dtype)

    kv = KVTensors(KVLayout((layer,), layout.dtype), 8, block_size, device)
    kv.keys[0].copy_(noise(*kv.keys[0].shape))
    kv.values[0].copy_(noise(*kv.values[0].shape))
    length = 2 * block_size
    spans = (Span([0], length - 1, [5, 2]), Span([0] * block_size, block_size, [7, 1]), Span([0] * length, 0, [3, 4]))
    step = PackedStep.build(spans, block_size, device)
    num_tokens = len(step.token_ids)
    query = noise(num_tokens, 2 * layer.num_kv_heads, layer.key_dim)
    key = noise(num_tokens, layer.num_kv_heads, layer.key_dim)
    value = noise(num_tokens, layer.num_kv_heads, layer.value_dim)
    scaling = layer.key_dim**-0.5
    flash, plain = (
        kind(step, kv).attend(0, query, key, value, scaling=scaling, keywords={})
        for kind in (VarlenAttention, GatherAttention)
    )
    return float((flash - plain).abs().max())
