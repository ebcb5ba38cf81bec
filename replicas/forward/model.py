"""Loading a model, learning what its attention layers store, and telling its identity.

A model is served packed: Transformers calls our attention function in every layer. What the function is called with is
not guessed from the configuration but recorded in one short forward pass, so a layer that asks for something which the
packed path does not honour is found here, by name, and never ignored.
"""

import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from huggingface_hub.utils import logging as hub_logging
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from cache_index.identity import CacheIdentity

from ..errors import MemoryBudgetError, ModelNotFoundError, UnsupportedModelError
from ..kv.tensors import KVLayout, LayerShape, num_blocks_for
from ..settings import EngineSettings, ModelSettings
from . import attention
from .fingerprint import ModelSource, identity_of
from .gguf import DEFAULT_MODEL_NAME, converted_gguf, default_gguf
from .linear import speed_up_few_rows

__all__ = [
    "LoadedModel",
    "check_servable",
    "discover_layout",
    "load",
    "num_pool_blocks",
    "pick_device",
    "resolve",
]

logger = logging.getLogger(__name__)

CPU_KV_MEMORY_BYTES = 1 << 30
CUDA_KV_SHARE = 0.85
"""Of the memory that the weights left free; the rest is for activations, which a step's token budget bounds."""

POOL_TOKENS_MIN = 256
"""The fewest tokens that a model is worth serving with, unless its own context is shorter."""

# Layers that keep a state which can't be split into blocks; a prefix of it can't be shared.
_STATEFUL_LAYER_TYPES = ("linear_attention", "mamba", "recurrent", "conv")

# Layers that do not see all of the past. Most models ask for it by keyword, which is found as such; others, Qwen2-MoE
# and Llama 4 among them, only by a mask, and none is built here.
_WINDOWED_LAYER_TYPES = ("sliding_attention", "chunked_attention")

# What models pass along that changes nothing here: positions were applied before, and nothing is cached by them.
_HARMLESS_KEYWORDS = frozenset({"position_ids", "cache_position", "use_cache", "position_embeddings"})


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run packed. `max_model_len`: positions that it has; no position at or past it is ever used."""

    source: ModelSource
    module: PreTrainedModel
    tokenizer: Any
    identity: CacheIdentity
    layout: KVLayout
    device: torch.device
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]


def resolve(settings: ModelSettings, on_convert: Callable[[str], None] | None = None) -> ModelSource:
    """Turn what an operator named into a folder or hub id; a GGUF file is converted on first use.

    Raises ModelNotFoundError for a path that does not exist, ModelError for a GGUF file that can't be read.
    """
    model = settings.model
    if model is None:
        folder = converted_gguf(default_gguf(), _cache_dir(settings), on_convert)
        return ModelSource(settings.served_model_name or DEFAULT_MODEL_NAME, str(folder), None)
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFoundError(f"there is no GGUF file {model}")
        folder = converted_gguf(path, _cache_dir(settings), on_convert)
        return ModelSource(settings.served_model_name or path.stem, str(folder), None)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"the folder {model} holds no config.json, so it is no model in Hugging Face form")
        return ModelSource(settings.served_model_name or path.resolve().name, str(path.resolve()), None)
    # A hub id is `name` or `owner/name`; anything else that looks like a path was meant as one.
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1 or path.exists():
        raise ModelNotFoundError(f"there is no model folder {model}")
    return ModelSource(settings.served_model_name or model, model, settings.revision)


def check_servable(
    settings: ModelSettings, engine: EngineSettings, on_convert: Callable[[str], None] | None = None
) -> ModelSource:
    """Find out, without loading weights, whether this model can be served at all; takes a second or so.

    Raises a ModelError whose text is one sentence.
    """
    source = resolve(settings, on_convert)
    config = _load_config(source)
    device = pick_device(settings)
    dtype = _pick_dtype(settings, config, device)
    attention.register()
    with torch.device("meta"):
        module = _from_config(config, dtype)
    _check_supported(module)
    _check_positions(config, _max_model_len(config, engine), source.name)
    try:
        layout = discover_layout(module)
    except RuntimeError:
        # Some forward passes look at values, which a model without weights has none of (NotImplementedError), and some
        # kernels, those of experts among them, ask more of such a model than of a real one. The load itself will tell.
        _check_windows(module)
        return source
    _check_windows(module)
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    kv_bytes = _kv_memory_bytes(engine, device, weight_bytes)
    _num_useful_blocks(kv_bytes, engine, layout, _max_model_len(config, engine), source.name)
    total_bytes = _total_memory_bytes(device)
    if weight_bytes + kv_bytes > total_bytes:
        raise MemoryBudgetError(
            f"{source.name} does not fit: {weight_bytes / 2**30:.1f} GiB of weights and {kv_bytes / 2**30:.1f} GiB of "
            f"KV blocks are more than the {total_bytes / 2**30:.1f} GiB of this {device.type}"
        )
    return source


def load(settings: ModelSettings, engine: EngineSettings) -> LoadedModel:
    """Load weights, tokenizer and identity. Raises a ModelError whose text is one sentence."""
    disable_progress_bar()
    attention.register()
    source = resolve(settings)
    config = _load_config(source)
    device = pick_device(settings)
    dtype = _pick_dtype(settings, config, device)
    try:
        # Transformers types this call too narrowly to be of use, hence Any.
        module: Any = AutoModelForCausalLM.from_pretrained(
            source.location,
            revision=_revision(source),
            dtype=dtype,
            attn_implementation=attention.ATTENTION_NAME,
        )
        tokenizer = AutoTokenizer.from_pretrained(source.location, revision=_revision(source))
    except (OSError, ValueError, ImportError) as error:
        raise UnsupportedModelError(f"{source.name} can't be loaded: {_one_line(error)}") from error
    module = module.to(device).eval()
    _check_supported(module)
    max_model_len = _max_model_len(config, engine)
    _check_positions(config, max_model_len, source.name)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UnsupportedModelError(f"{source.name} has no fast tokenizer (tokenizer.json), which streaming text needs")
    layout = discover_layout(module)
    _check_windows(module)
    speed_up_few_rows(module)
    return LoadedModel(
        source=source,
        module=module,
        tokenizer=tokenizer,
        identity=identity_of(source, module, tokenizer, layout, engine.block_size),
        layout=layout,
        device=device,
        max_model_len=max_model_len,
        vocab_size=module.get_input_embeddings().num_embeddings,
        eos_token_ids=_eos_token_ids(module, tokenizer),
    )


def num_pool_blocks(engine: EngineSettings, model: LoadedModel) -> int:
    """Size of the KV pool for a loaded model: as many blocks as its memory budget holds.

    Raises MemoryBudgetError where that is too little to serve the model with.
    """
    kv_bytes = _kv_memory_bytes(engine, model.device, weight_bytes_to_come=0)
    return _num_useful_blocks(kv_bytes, engine, model.layout, model.max_model_len, model.source.name)


def pick_device(settings: ModelSettings) -> torch.device:
    """The device to serve on. Raises UnsupportedModelError where CUDA is asked for and absent."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModelError("device cuda was asked for, but PyTorch sees no CUDA device")
    if settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class _LayoutRecorder:
    """An attention context that records what each layer stores and what else it asks for."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}
        self.dtype = torch.float32
        self.not_honoured: list[str] = []

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
        if layer in self.layers:
            self.not_honoured.append(f"a second attention in layer {layer}")
        self.layers[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        self.dtype = key.dtype
        for name, asked in keywords.items():
            if not _is_honoured(name, asked):
                self.not_honoured.append(f"{name}={asked if isinstance(asked, (int, float, str)) else '...'}")
        group = query.shape[1] // key.shape[1]
        output = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None].repeat_interleave(group, dim=1),
            value.transpose(0, 1)[None].repeat_interleave(group, dim=1),
            is_causal=True,
            scale=scaling,
        )
        return output[0].transpose(0, 1)


def _is_honoured(name: str, asked: Any) -> bool:
    if name in _HARMLESS_KEYWORDS or asked is None or asked is False:
        return True
    # Attention here is causal and never drops anything, so these two values ask for nothing else.
    return (name == "is_causal" and asked is True) or (name == "dropout" and asked == 0.0)


@torch.inference_mode()
def discover_layout(module: PreTrainedModel) -> KVLayout:
    """What every attention layer stores per token, recorded in a forward pass of two tokens.

    Raises UnsupportedModelError, naming it, for what a layer asks of attention and the packed path does not honour.
    """
    recorder = _LayoutRecorder()
    device = module.device
    try:
        module(
            input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device),
            position_ids=torch.arange(2, device=device)[None],
            use_cache=False,
            logits_to_keep=torch.tensor([1], device=device),
            packed=recorder,
        )
    except TypeError as error:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not hand keyword arguments down to its attention: {_one_line(error)}"
        ) from error
    if recorder.not_honoured:
        asked = ", ".join(dict.fromkeys(recorder.not_honoured))
        raise UnsupportedModelError(f"{type(module).__name__} asks its attention for what is not supported: {asked}")
    if sorted(recorder.layers) != list(range(len(recorder.layers))) or not recorder.layers:
        raise UnsupportedModelError(
            f"{type(module).__name__} ran our attention in layers {sorted(recorder.layers)}, not in all of them"
        )
    return KVLayout(tuple(recorder.layers[index] for index in range(len(recorder.layers))), recorder.dtype)


def _check_supported(module: PreTrainedModel) -> None:
    name = type(module).__name__
    if not module._supports_attention_backend:
        raise UnsupportedModelError(
            f"{name} does not support Transformers' attention interface, so it can't run packed over KV blocks"
        )
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise UnsupportedModelError(f"{name} can't compute logits of chosen positions only (logits_to_keep)")
    layer_types = getattr(module.config.get_text_config(), "layer_types", None) or ()
    stateful = sorted({kind for kind in layer_types if kind.startswith(_STATEFUL_LAYER_TYPES)})
    if stateful:
        raise UnsupportedModelError(f"{name} has layers whose state can't be split into blocks: {', '.join(stateful)}")


def _check_windows(module: PreTrainedModel) -> None:
    """Refuse layers that would attend to less than everything by a mask, which the packed path has none of."""
    layer_types = getattr(module.config.get_text_config(), "layer_types", None) or ()
    windowed = sorted({kind for kind in layer_types if kind in _WINDOWED_LAYER_TYPES})
    if windowed:
        raise UnsupportedModelError(
            f"{type(module).__name__} has layers that do not see the whole prompt: {', '.join(windowed)}"
        )


def _check_positions(config: PreTrainedConfig, max_model_len: int, name: str) -> None:
    """Refuse positions that mean something else once a sequence is long: what was cached before would be wrong then.

    LongRoPE turns every position by other angles as soon as one in the batch lies past the original context.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # One set of parameters, or one for each type of layer.
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        original = parameters.get("original_max_position_embeddings")
        if parameters.get("rope_type") == "longrope" and original is not None and max_model_len > original:
            raise UnsupportedModelError(
                f"{name} changes the positions of what is cached once a sequence is longer than {original} tokens "
                f"(longrope): set engine.max_model_len to {original} or less"
            )


def _load_config(source: ModelSource) -> PreTrainedConfig:
    # Its retries are not news by the line; the error that is raised in the end says what is wrong.
    hub_logging.set_verbosity_error()
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source.location, revision=_revision(source))
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFoundError(f"the model {source.location} can't be found or read: {_one_line(error)}") from error
    return config


def _from_config(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        module: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention.ATTENTION_NAME
        )
    except ValueError as error:
        raise UnsupportedModelError(f"{config.model_type} is no causal language model: {_one_line(error)}") from error
    return cast(PreTrainedModel, module.eval())


def _revision(source: ModelSource) -> str:
    return source.revision or "main"


def _cache_dir(settings: ModelSettings) -> Path:
    return Path(settings.cache_dir).expanduser() if settings.cache_dir else Path.home() / ".cache" / "warmroute"


def _pick_dtype(settings: ModelSettings, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    if settings.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[settings.dtype]
    if device.type == "cpu":
        return torch.float32
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16


def _max_model_len(config: PreTrainedConfig, engine: EngineSettings) -> int:
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    lengths = [length for length in (own, engine.max_model_len) if length is not None]
    if not lengths:
        raise UnsupportedModelError("the model's configuration names no context length; set engine.max_model_len")
    return min(lengths)


def _eos_token_ids(module: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    # Where generation stops is the generation config's to say, as in Transformers' own generate.
    declared = module.generation_config.eos_token_id if module.generation_config is not None else None
    if declared is None:
        declared = tokenizer.eos_token_id
    if declared is None:
        return frozenset()
    return frozenset([declared] if isinstance(declared, int) else declared)


def _kv_memory_bytes(engine: EngineSettings, device: torch.device, weight_bytes_to_come: int) -> int:
    if engine.kv_memory_bytes is not None:
        return engine.kv_memory_bytes
    if device.type == "cpu":
        return CPU_KV_MEMORY_BYTES
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(max(0, free_bytes - weight_bytes_to_come) * CUDA_KV_SHARE)


def _num_useful_blocks(kv_bytes: int, engine: EngineSettings, layout: KVLayout, max_model_len: int, name: str) -> int:
    num_blocks = num_blocks_for(kv_bytes, engine.block_size, layout)
    needed = min(max_model_len, POOL_TOKENS_MIN)
    if num_blocks * engine.block_size < needed:
        raise MemoryBudgetError(
            f"the KV budget holds {num_blocks * engine.block_size} tokens of {name}, at least {needed} are needed: "
            f"raise engine.kv_memory_bytes to {needed * layout.bytes_per_token:,} or more"
        )
    return num_blocks


def _total_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
