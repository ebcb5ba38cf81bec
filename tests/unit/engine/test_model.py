"""Loading: what is refused, in one sentence, and what a model's identity depends on."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2MoeConfig,
)

from replicas.errors import MemoryBudgetError, ModelError, ModelNotFoundError, UnsupportedModelError
from replicas.forward.model import LoadedModel, check_servable, discover_layout, load
from replicas.settings import EngineSettings, ModelSettings

ENGINE = EngineSettings(kv_memory_bytes=1 << 20)


def settings_of(folder: Path, **kwargs: Any) -> ModelSettings:
    return ModelSettings(model=str(folder), device="cpu", **kwargs)


@pytest.mark.parametrize(
    "model", ["/nowhere/at/all", "./nowhere", "~/nowhere-at-all", "a/b/c", "nowhere.gguf", "/nowhere/model.gguf"]
)
def test_a_path_that_does_not_exist_is_said_to_be_missing(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no") as error:
        check_servable(ModelSettings(model=model), ENGINE)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_model_is_said_to_hold_none(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        check_servable(settings_of(tmp_path), ENGINE)


def test_a_file_that_is_no_gguf_is_said_to_be_unreadable(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the gguf extra")
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"not a model")
    with pytest.raises(ModelError, match="can't be read as a GGUF model") as error:
        check_servable(ModelSettings(model=str(file), cache_dir=str(tmp_path / "cache")), ENGINE)
    assert "\n" not in str(error.value)
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()], "no half-made folder is left"


def test_a_model_without_the_attention_interface_is_refused_before_its_weights_load(tmp_path: Path) -> None:
    BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="BloomForCausalLM does not support"):
        check_servable(settings_of(tmp_path), ENGINE)


def test_an_attention_feature_that_the_packed_path_does_not_honour_is_refused_by_name(tmp_path: Path) -> None:
    config = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    windowed = MistralForCausalLM(MistralConfig(**config, sliding_window=8))
    windowed.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="sliding_window=8"):
        check_servable(settings_of(tmp_path), ENGINE)
    MistralForCausalLM(MistralConfig(**config, sliding_window=None)).save_pretrained(tmp_path)
    check_servable(settings_of(tmp_path), ENGINE)


def test_a_window_that_only_a_mask_would_tell_of_is_refused(tmp_path: Path) -> None:
    config = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "num_experts": 2}
    config |= {"num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    windowed = Qwen2MoeConfig(**config, sliding_window=8, layer_types=["full_attention", "sliding_attention"])
    windowed.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="do not see the whole prompt: sliding_attention"):
        check_servable(settings_of(tmp_path), ENGINE)
    Qwen2MoeConfig(**config).save_pretrained(tmp_path)
    check_servable(settings_of(tmp_path), ENGINE)


def test_positions_that_change_with_the_length_are_refused_beyond_the_original_context(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    config = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "max_position_embeddings": 128}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    shutil.copytree(model_folder("llama"), tmp_path, dirs_exist_ok=True)
    LlamaForCausalLM(LlamaConfig(**config, rope_parameters=rope)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"set engine\.max_model_len to 32 or less"):
        check_servable(settings_of(tmp_path), ENGINE)
    with pytest.raises(UnsupportedModelError, match="longrope"):
        load(settings_of(tmp_path), ENGINE)
    check_servable(settings_of(tmp_path), EngineSettings(kv_memory_bytes=1 << 20, max_model_len=32))


def test_a_model_larger_than_memory_is_refused_before_its_weights_load(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copy(model_folder("llama") / "config.json", tmp_path)
    with pytest.raises(MemoryBudgetError, match="does not fit"):
        check_servable(settings_of(tmp_path), EngineSettings(kv_memory_bytes=1 << 50))
    with pytest.raises(MemoryBudgetError, match="does not hold one block"):
        check_servable(settings_of(tmp_path), EngineSettings(kv_memory_bytes=1))
    with pytest.raises(MemoryBudgetError, match=r"raise engine\.kv_memory_bytes"):
        check_servable(settings_of(tmp_path), EngineSettings(kv_memory_bytes=30_000))
    assert check_servable(settings_of(tmp_path), ENGINE).location == str(tmp_path)


def test_a_device_that_is_not_there_is_refused(model_folder: Callable[[str], Path]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(UnsupportedModelError, match="no CUDA device"):
        check_servable(ModelSettings(model=str(model_folder("llama")), device="cuda"), ENGINE)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_the_layout_is_the_same_with_and_without_weights(
    family: str, loaded: Callable[[str], LoadedModel], model_folder: Callable[[str], Path]
) -> None:
    model = loaded(family)
    with torch.device("meta"):
        shell = type(model.module)(model.module.config)
    assert discover_layout(shell.to(model.module.dtype).eval()) == model.layout


@pytest.fixture
def copy_of_llama(model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder("llama"), tmp_path / "copy"))


def test_a_copy_of_a_model_has_its_identity(copy_of_llama: Path, loaded: Callable[[str], LoadedModel]) -> None:
    assert load(settings_of(copy_of_llama), EngineSettings()).identity == loaded("llama").identity


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_each_thing_that_shapes_kv_values_changes_its_own_field_of_the_identity(
    copy_of_llama: Path, loaded: Callable[[str], LoadedModel]
) -> None:
    original = loaded("llama").identity

    def changed(**settings: Any) -> tuple[str, ...]:
        engine = EngineSettings(block_size=settings.pop("block_size", 16))
        identity = load(settings_of(copy_of_llama, **settings), engine).identity
        assert identity.fingerprint() != original.fingerprint()
        return original.differing_fields(identity)

    assert changed(block_size=32) == ("block_size",)
    assert changed(dtype="bfloat16") == ("dtype", "kv_dtype")
    (copy_of_llama / "chat_template.jinja").write_text("{{ messages }}")
    assert changed() == ("chat_template",)
    edit_json(copy_of_llama / "config.json", rms_norm_eps=1e-3)
    assert set(changed()) == {"chat_template", "config"}
    model = LlamaForCausalLM.from_pretrained(copy_of_llama)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1.0
    model.save_pretrained(copy_of_llama)
    assert "weights" in changed()


def test_where_a_model_was_loaded_from_is_not_part_of_its_identity(
    copy_of_llama: Path, loaded: Callable[[str], LoadedModel]
) -> None:
    moved = copy_of_llama.rename(copy_of_llama.with_name("moved"))
    identity = load(settings_of(moved, served_model_name="another-name"), EngineSettings()).identity
    assert replace(identity) == loaded("llama").identity
