"""Tiny DFlash drafts on disk and pretend targets: what the tests of ``mlx_dflash.drafts`` are made of.

A checkpoint is a config dict and a tensor dict, so that a test spoils exactly the one thing that it is about.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

VOCAB, HIDDEN, LAYERS, TAPS = 64, 64, 8, (1, 3)


class PretendTarget:
    """The part of a target that drafts see: two matrices and their facts. Counts how often each is used."""

    def __init__(
        self,
        embedding: mx.array,
        head: mx.array | None = None,
        *,
        layers: int = LAYERS,
        embed_scale: float = 1.0,
        model_type: str = "pretend",
    ) -> None:
        self.embedding, self.head_matrix = embedding, embedding if head is None else head
        self.vocab_size, self.hidden_size = embedding.shape
        self.num_layers, self.embed_scale, self.model_type = layers, embed_scale, model_type
        self.head_calls = 0

    def embed(self, ids: mx.array) -> mx.array:
        return self.embedding[ids]

    def head(self, hidden: mx.array) -> mx.array:
        self.head_calls += 1
        return hidden @ self.head_matrix.T


def pretend_target(vocab: int = VOCAB, hidden: int = HIDDEN, seed: int = 1, **facts: Any) -> PretendTarget:
    keys = mx.random.split(mx.random.key(seed))
    embedding = mx.random.normal((vocab, hidden), key=keys[0])
    return PretendTarget(embedding, mx.random.normal((vocab, hidden), key=keys[1]), **facts)


def z_lab_config(**changes: Any) -> dict[str, Any]:
    """A flat z-lab config; ``dflash_config`` entries are given as ``dflash_config={...}`` and merged. ``None`` as a
    value removes a key."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "num_target_layers": LAYERS,
        "block_size": 6,
        "dflash_config": {"target_layer_ids": list(TAPS), "mask_token_id": 3},
    }
    return _changed(config, changes)


def speculators_config(wrapper: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A speculators config; ``wrapper`` is merged into ``transformer_layer_config``."""
    config: dict[str, Any] = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash", "proposal_methods": [{"speculative_tokens": 5}]},
        "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
        "block_size": 6,
        "mask_token_id": 3,
        "draft_vocab_size": VOCAB,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_size": HIDDEN,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": VOCAB,
        },
    }
    if wrapper:
        config["transformer_layer_config"] = _changed(config["transformer_layer_config"], wrapper)
    return _changed(config, changes)


def _changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        elif isinstance(value, dict) and isinstance(config.get(key), dict):
            config[key] = {k: v for k, v in (config[key] | value).items() if v is not None}
        else:
            config[key] = value
    return config


def backbone_tensors(config: dict[str, Any], seed: int = 0, dtype: mx.Dtype = mx.float32) -> dict[str, mx.array]:
    """Random tensors under published names for a config, without table and head."""
    top = config.get("transformer_layer_config", config)
    nested = config.get("dflash_config", {})
    taps = nested.get("target_layer_ids") or config.get("aux_hidden_state_layer_ids") or TAPS
    hidden, inner, width = top["hidden_size"], top["intermediate_size"], top["head_dim"]
    q, kv = top["num_attention_heads"] * width, top["num_key_value_heads"] * width
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(taps) * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(top["num_hidden_layers"]):
        layer = f"layers.{i}"
        shapes |= {f"{layer}.{n}.weight": (hidden,) for n in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.self_attn.{n}.weight": (width,) for n in ("q_norm", "k_norm")}
        shapes[f"{layer}.self_attn.q_proj.weight"] = (q, hidden)
        shapes |= {f"{layer}.self_attn.{n}.weight": (kv, hidden) for n in ("k_proj", "v_proj")}
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, q)
        shapes |= {f"{layer}.mlp.{n}.weight": (inner, hidden) for n in ("gate_proj", "up_proj")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    tensors = {}
    for key, (name, shape) in zip(keys, shapes.items(), strict=True):
        noise = mx.random.normal(shape, key=key)
        tensors[name] = ((1 + 0.1 * noise) if len(shape) == 1 else noise * shape[1] ** -0.5).astype(dtype)
    return tensors


def head_tensor(rows: int, hidden: int = HIDDEN, seed: int = 7) -> mx.array:
    return mx.random.normal((rows, hidden), key=mx.random.key(seed))


def offsets(ids: list[int]) -> mx.array:
    """``d2t`` for a list of target ids."""
    return mx.array([target - row for row, target in enumerate(ids)], mx.int64)


def write_draft(
    folder: Path, config: dict[str, Any], tensors: dict[str, mx.array], file: str = "model.safetensors"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / file), tensors)
    return folder


def make_draft(folder: Path, config: dict[str, Any] | None = None, *, seed: int = 0, **tensors: mx.array) -> Path:
    """A complete z-lab draft; further tensors by keyword with ``__`` for dots."""
    config = z_lab_config() if config is None else config
    extra = {name.replace("__", "."): array for name, array in tensors.items()}
    return write_draft(folder, config, backbone_tensors(config, seed) | extra)


def quantized(tensors: dict[str, mx.array], group_size: int = 64, bits: int = 4) -> dict[str, mx.array]:
    """The matrices of a tensor dict packed as MLX does, the rest as it is."""
    result: dict[str, mx.array] = {}
    for name, array in tensors.items():
        if array.ndim != 2:
            result[name] = array
            continue
        stem = name.removesuffix(".weight")
        packed = mx.quantize(array, group_size=group_size, bits=bits)
        result |= dict(zip((name, f"{stem}.scales", f"{stem}.biases"), packed, strict=True))
    return result


def features(rows: int, taps: int = len(TAPS), hidden: int = HIDDEN, seed: int = 3) -> mx.array:
    """``[1, rows, taps * hidden]`` pretend target states."""
    return mx.random.normal((1, rows, taps * hidden), key=mx.random.key(seed))


def module(draft: Any) -> nn.Module:
    """The modules that hold a loaded draft's weights."""
    return draft.backbone
