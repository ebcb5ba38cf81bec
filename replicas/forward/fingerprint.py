"""Telling a model's identity: what decides its KV values, read off its files and its configuration."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from cache_index.identity import CacheIdentity

from ..kv.tensors import KVLayout
from . import attention

__all__ = ["ModelSource", "identity_of"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from: `location` is a folder or a hub id, `name` what clients call it."""

    name: str
    location: str
    revision: str | None

    @property
    def is_local(self) -> bool:
        return Path(self.location).is_dir()


def identity_of(
    source: ModelSource, module: PreTrainedModel, tokenizer: Any, layout: KVLayout, block_size: int
) -> CacheIdentity:
    """What decides this model's KV values, read off the loaded model and its files.

    tokenizer: a fast one. O(size of the weight files) for a local folder, whose content is its only name.
    """
    config = module.config
    quantization = getattr(config, "quantization_config", None)
    return CacheIdentity(
        weights=_weights_digest(source, config),
        config=_config_digest(config),
        dtype=str(module.dtype),
        kv_dtype=str(layout.dtype),
        quantization=None if quantization is None else _digest(str(quantization).encode()),
        attention=attention.ATTENTION_NAME,
        tokenizer=_digest(tokenizer.backend_tokenizer.to_str().encode()),
        chat_template=None if not tokenizer.chat_template else _digest(json.dumps(tokenizer.chat_template).encode()),
        adapter=None,
        block_size=block_size,
    )


def _weights_digest(source: ModelSource, config: PreTrainedConfig) -> str:
    if not source.is_local:
        # A commit names its files' content, so hashing tens of gigabytes again would say nothing more.
        return f"{source.location}@{config._commit_hash}"
    files = sorted(
        file for pattern in ("*.safetensors", "*.bin") for file in Path(source.location).glob(pattern) if file.is_file()
    )
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, hashlib.blake2b).digest())
    return digest.hexdigest()


def _config_digest(config: PreTrainedConfig) -> str:
    fields = config.to_dict()
    # These say where the configuration came from, or stand in fields of their own, as dtype does.
    for name in ("transformers_version", "_name_or_path", "_commit_hash", "_attn_implementation", "dtype"):
        fields.pop(name, None)
    return _digest(json.dumps(fields, sort_keys=True, default=str).encode())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
