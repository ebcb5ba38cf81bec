"""Tiny real models: random weights, real architectures, made in a second."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 320
CONTEXT = 256
LONG_CONTEXT = 16_384

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the sea, the sky and the stars above the sea"] * 8, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=CHAT_TEMPLATE)


def _gpt2() -> GPT2LMHeadModel:
    """Learned positions: an index past the table raises, and a wrong one gives wrong logits."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB_SIZE, n_positions=CONTEXT, n_embd=48, n_layer=3, n_head=4, eos_token_id=0)
    )


def _llama(context: int = CONTEXT) -> LlamaForCausalLM:
    """Rotary positions and grouped KV heads."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=context,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            eos_token_id=0,
        )
    )


def _qwen3() -> Qwen3ForCausalLM:
    """Rotary positions, query and key norms, and a head dimension of its own."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=CONTEXT,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            eos_token_id=0,
        )
    )


def _llama_long() -> LlamaForCausalLM:
    """A context so long that no answer ends by itself while a test looks at it."""
    return _llama(LONG_CONTEXT)


FAMILIES = {"gpt2": _gpt2, "llama": _llama, "llama-long": _llama_long, "qwen3": _qwen3}


def save(family: str, folder: Path) -> None:
    """Make a family's model and tokenizer in a folder, the same ones each time."""
    torch.manual_seed(7)
    model = FAMILIES[family]().eval()
    # Random weights of the usual size give nearly flat logits; larger ones make positions and context matter.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
