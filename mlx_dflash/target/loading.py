"""From a folder on disk to an mlx-lm model and tokenizer: everything that can be wrong is looked for first.

Knows files, config keys and mlx-lm's loaders; not what the model is used for. No message is a traceback of mlx-lm's.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.models
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import MODEL_REMAPPING, load_adapters, load_config, load_model, load_tokenizer

from ..errors import CheckpointError, ConfigError, ModelNotFoundError, UnsupportedError
from ..safetensors_check import check_safetensors, refuse_pickles, shards_of
from .reading import one_line, read_json

_PATTERN = "model*.safetensors"  # what mlx-lm reads
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt", "*.tiktoken")
_SIZES = {
    "num_hidden_layers": 10_000,
    "hidden_size": 1 << 20,
    "vocab_size": 1 << 26,
    "intermediate_size": 1 << 24,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
}
"""Largest believable values; above them building the model would exhaust memory before any check could fail."""

_UNIFIED = "gemma4_unified"
_REMAPPING: dict[str, str] = {_UNIFIED: "gemma4", **MODEL_REMAPPING}
"""mlx-lm's aliases, and the one that mlx-lm before 0.32 lacks."""


def load_target(
    path: Path,
    *,
    name: str,
    trust_remote_code: bool = False,
    lazy: bool = False,
    tokenizer_config: dict[str, Any] | None = None,
    adapter_path: str | Path | None = None,
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """Load what mlx-lm's ``load`` would, after checking the folder.

    Args:
        path: a local folder.
        name: how the user called the model; leads every message that names no file.
        trust_remote_code: let config files name Python code to run; without it such a folder is refused.
        lazy: leave the weights unread until they are used.
        tokenizer_config: passed to the tokenizer, as in mlx-lm.
        adapter_path: a folder with a LoRA adapter of mlx-lm's.

    Returns:
        mlx-lm's model and tokenizer, and the config as mlx-lm completes it.

    Raises:
        ModelNotFoundError: no such folder.
        ConfigError: ``config.json`` cannot be read, or a key is missing or impossible.
        CheckpointError: a file is missing, truncated, a pickle, names code to run, or holds tensors that do not fit.
        UnsupportedError: mlx-lm has no such model type.
    """
    if not path.is_dir():
        raise ModelNotFoundError(f"{name}: found no folder {path}, expected a checkpoint with config.json and weights")
    config = _check_config(path, trust_remote_code)
    _check_weight_files(path)
    _check_tokenizer_files(path)
    _check_arguments(path, config)
    # The tokenizer first: it takes a second, the weights of a large model a minute.
    tokenizer = _load_tokenizer(path, name, tokenizer_config or {}, trust_remote_code)
    model, config = _load_model(path, name, trust_remote_code, lazy)
    if adapter_path is not None:
        model = _with_adapter(model, Path(adapter_path), name)
    return model, tokenizer, config


def _check_config(path: Path, trust_remote_code: bool) -> dict[str, Any]:
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: found no config.json, expected a model folder")
    config = read_json(path / "config.json")
    settings = {"config.json": config}
    for extra in ("tokenizer_config.json", "generation_config.json"):
        if (path / extra).is_file():
            settings[extra] = read_json(path / extra)
    code = list(_code_keys(settings))
    if code and not trust_remote_code:
        raise CheckpointError(
            f"{path}: found keys that name Python code to run: {', '.join(code)}; expected none, or the option "
            "trust_remote_code for a checkpoint whose code you trust"
        )
    _check_sizes(path, config)
    if "model_file" not in config:
        _check_model_type(path, config)
    return config


def _code_keys(settings: dict[str, dict[str, Any]]) -> Iterator[str]:
    for file, content in settings.items():
        for key in ("model_file", "auto_map"):
            if content.get(key):
                yield f"{file}: {key}"
        for name, nested in content.items():
            if isinstance(nested, dict) and nested.get("auto_map"):
                yield f"{file}: {name}.auto_map"


def _check_sizes(path: Path, config: dict[str, Any]) -> None:
    text = config.get("text_config")
    for prefix, level in (("", config), ("text_config.", text)):
        for key, largest in _SIZES.items():
            value = level.get(key) if isinstance(level, dict) else None
            if value is not None and (type(value) is not int or not 1 <= value <= largest):
                if isinstance(value, list):
                    continue  # one entry a layer, in families with uneven layers
                raise ConfigError(f"{path / 'config.json'}: {prefix}{key}: found {value!r}, expected 1 .. {largest}")


def _check_model_type(path: Path, config: dict[str, Any]) -> None:
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ConfigError(f"{path / 'config.json'}: model_type: found {kind!r}, expected the name of a model family")
    families = supported_families()
    if _REMAPPING.get(kind, kind) not in families:
        raise UnsupportedError(
            f"{path / 'config.json'}: model_type: found {kind!r}, expected one of the {len(families)} families of "
            f"mlx-lm {mlx_lm.__version__}: {', '.join(sorted(families))}"
        )


def supported_families() -> frozenset[str]:
    """The model types that the installed mlx-lm implements, aliases included."""
    # By name: importing all of them takes seconds. The rest are parts that the families share.
    modules = {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)}
    shared = {"activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline", "rope_utils", "ssm"}
    families = modules - shared - {"switch_layers"}
    return frozenset(families | {alias for alias, family in _REMAPPING.items() if family in families})


def _check_weight_files(path: Path) -> None:
    shards = shards_of(path, _PATTERN)
    if not shards:
        refuse_pickles(path, "target")
        files = sorted(file.name for file in path.iterdir() if file.is_file())
        raise CheckpointError(f"{path}: found no {_PATTERN}, expected weights beside {', '.join(files[:8])}")
    for shard in shards:
        check_safetensors(shard)


def _check_tokenizer_files(path: Path) -> None:
    if not any(next(path.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        raise CheckpointError(f"{path}: found no tokenizer, expected tokenizer.json or tokenizer.model")


def _check_arguments(path: Path, config: dict[str, Any]) -> None:
    """Let the family's own config class read the config: what it lacks is better said before the weights are read."""
    if "model_file" in config:
        return
    kind = config["model_type"]
    try:
        module = importlib.import_module(f"mlx_lm.models.{_REMAPPING.get(kind, kind)}")
    except (ImportError, SystemExit) as error:  # one family exits when a package it needs is not installed
        raise UnsupportedError(
            f"{path / 'config.json'}: model_type: found {kind!r}, which mlx-lm cannot import here: {_cause(error)}"
        ) from None
    try:
        module.ModelArgs.from_dict(config)
    except TypeError as error:
        missing = re.search(r"missing \d+ required positional arguments?: (.*)", one_line(error))
        found = f"{missing[1]}: not found" if missing else one_line(error)
        raise ConfigError(f"{path / 'config.json'}: {found}, expected what model_type {kind!r} needs") from None
    except (ValueError, KeyError, AttributeError, AssertionError, ArithmeticError) as error:
        raise ConfigError(f"{path / 'config.json'}: model_type {kind!r}: {_cause(error)}") from None


def _load_model(path: Path, name: str, trust_remote_code: bool, lazy: bool) -> tuple[nn.Module, dict[str, Any]]:
    options: dict[str, Any] = {"lazy": lazy}
    # mlx-lm before 0.32 has no such switch and runs any `model_file`; by now a folder with one is known to be trusted.
    if "trust_remote_code" in inspect.signature(load_model).parameters:
        options["trust_remote_code"] = trust_remote_code
    try:
        if _UNIFIED not in MODEL_REMAPPING and load_config(path).get("model_type") == _UNIFIED:
            options["get_model_classes"] = _unified_classes
        return load_model(path, **options)
    except Exception as error:
        # Any error may come out of a family's constructor and its renaming of weights; the line says which one did.
        misfit = _misfit(str(error)) if isinstance(error, ValueError) else None
        if misfit is not None:
            raise CheckpointError(f"{path}: {misfit}") from error
        raise CheckpointError(
            f"{name}: mlx-lm could not build the model from {path / 'config.json'} and its weights: {_cause(error)}"
        ) from error


def _unified_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """What mlx-lm before 0.32 needs to load a ``gemma4_unified``: the gemma4 classes, and images left out."""
    gemma4 = importlib.import_module("mlx_lm.models.gemma4")

    class Model(gemma4.Model):  # type: ignore[name-defined]
        def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
            images = ("vision_embedder", "model.vision_embedder")
            return super().sanitize({key: value for key, value in weights.items() if not key.startswith(images)})

    return Model, gemma4.ModelArgs


def _misfit(message: str) -> str | None:
    """What mlx says of weights that do not fit a model, in one line with the first few names."""
    counted = re.match(r"(Received|Missing) (\d+) parameters[^:]*:\s*(.*)\.\s*$", message, re.DOTALL)
    if counted:
        names = [part.strip() for part in counted[3].split(",") if part.strip()]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        if counted[1] == "Missing":
            return f"found no tensors for {counted[2]} weights of the model, expected {shown}"
        return f"found {counted[2]} tensors that the model has no place for: {shown}; expected none"
    shape = re.match(r"Expected shape (\(.*?\)) but received shape (\(.*?\)) for parameter (\S+)", message)
    return f"tensor {shape[3]}: found shape {shape[2]}, expected {shape[1]}" if shape else None


def _with_adapter(model: nn.Module, adapter: Path, name: str) -> nn.Module:
    for file in ("adapter_config.json", "adapters.safetensors"):
        if not (adapter / file).is_file():
            raise CheckpointError(f"{adapter}: found no {file}, expected an adapter of mlx-lm's")
    read_json(adapter / "adapter_config.json")
    check_safetensors(adapter / "adapters.safetensors")
    try:
        model = load_adapters(model, str(adapter))
    except Exception as error:  # the line says which; the adapter's config can name anything
        raise CheckpointError(f"{adapter}: the adapter does not fit {name}: {_cause(error)}") from error
    # mlx-lm before 0.32 passes over tensors that the model has no place for.
    known = dict(tree_flatten(model.parameters()))
    stray = [tensor for tensor in mx.load(str(adapter / "adapters.safetensors")) if tensor not in known]
    if stray:
        raise CheckpointError(
            f"{adapter}: the adapter does not fit {name}: found {stray[0]}, expected tensors that the model has"
        )
    model.eval()
    return model


def _load_tokenizer(path: Path, name: str, settings: dict[str, Any], trust_remote_code: bool) -> TokenizerWrapper:
    settings = settings | {"trust_remote_code": trust_remote_code}
    try:
        return load_tokenizer(path, settings, eos_token_ids=load_config(path).get("eos_token_id"))
    except Exception as error:  # transformers and tokenizers raise bare exceptions of many kinds; the line says which
        if (path / "tokenizer.json").is_file():
            read_json(path / "tokenizer.json")  # says line and column where that is the trouble
        raise CheckpointError(f"{name}: the tokenizer in {path} could not be loaded: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"
