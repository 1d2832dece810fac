"""Random mlx-lm models of a few thousand weights, float32, whose greedy choices are far from tied, and folders of them.

``tiny_<family>(...)`` gives an mlx-lm model object; keywords not listed in a signature go into its config under
mlx-lm's own names. ``save_model_folder`` writes one to disk, with a tokenizer, the way a published model looks.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import MODEL_REMAPPING
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Config = dict[str, Any]

PAD, EOS, BOS, UNK, TURN_START, TURN_END = "<pad>", "<eos>", "<bos>", "<unk>", "<|im_start|>", "<|im_end|>"
SPECIALS = (PAD, EOS, BOS, UNK, TURN_START, TURN_END)
"""Ids 0 .. 5 of every tiny tokenizer, in this order."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def tiny_llama(layers: int = 2, hidden: int = 32, vocab: int = 64, seed: int = 0, **config: Any) -> nn.Module:
    """Full attention everywhere, untied head. ``sliding_window`` + ``layer_types`` give rotating caches."""
    return build(_dense("llama", layers, hidden, vocab, rope_theta=10000.0) | config, seed)


def tiny_qwen3(layers: int = 2, hidden: int = 32, vocab: int = 64, seed: int = 0, **config: Any) -> nn.Module:
    return build(_dense("qwen3", layers, hidden, vocab, rope_theta=10000.0) | config, seed)


def tiny_qwen3_moe(
    layers: int = 2, hidden: int = 32, vocab: int = 64, seed: int = 0, experts: int = 4, **config: Any
) -> nn.Module:
    experts_config = {
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": hidden,
        "norm_topk_prob": True,
    }
    return build(_dense("qwen3_moe", layers, hidden, vocab, rope_theta=10000.0) | experts_config | config, seed)


def tiny_gemma4(
    layers: int = 3,
    hidden: int = 32,
    vocab: int = 64,
    seed: int = 0,
    *,
    window: int = 8,
    kv_shared: int = 0,
    softcap: float = 30.0,
    wrapper: str | None = None,
    **config: Any,
) -> nn.Module:
    """Sliding layers with a full one as every third (and last), tied head, scaled embedding.

    Args:
        kv_shared: this many last layers own no cache. Needs a sliding and a full layer before them, so ``layers >= 3 +
            kv_shared``.
        wrapper: ``"gemma4"`` or ``"gemma4_unified"`` nests the text model as those checkpoints do; the weights are the
            same ones as without it.
    """
    types = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(layers)]
    text = _dense("gemma4_text", layers, hidden, vocab) | {
        "global_head_dim": 2 * (hidden // 4),
        "num_kv_shared_layers": kv_shared,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": vocab,
        "sliding_window": window,
        "final_logit_softcapping": softcap,
        "use_double_wide_mlp": False,
        "layer_types": types,
        "tie_word_embeddings": True,
    }
    text |= config
    if wrapper is None:
        return build(text, seed)
    return build({"model_type": wrapper, "vocab_size": vocab, "text_config": text}, seed)


def tiny_gpt_oss(
    layers: int = 2,
    hidden: int = 32,
    vocab: int = 64,
    seed: int = 0,
    *,
    window: int = 8,
    experts: int = 4,
    **config: Any,
) -> nn.Module:
    """Sliding and full layers alternating, attention sinks, mixture of experts."""
    own = {
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "sliding_window": window,
        "rope_theta": 10000,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
    }
    return build(_dense("gpt_oss", layers, hidden, vocab) | own | config, seed)


def tiny_mistral3(layers: int = 2, hidden: int = 32, vocab: int = 64, seed: int = 0, **text_config: Any) -> nn.Module:
    """The image wrapper around a ministral3 text model."""
    rope = {"rope_theta": 10000.0, "rope_type": "default", "llama_4_scaling_beta": 0.1}
    rope["original_max_position_embeddings"] = 4096
    text = _dense("ministral3", layers, hidden, vocab, rope_parameters=rope) | text_config
    return build({"model_type": "mistral3", "text_config": text}, seed)


def tiny_llama4(
    layers: int = 4, hidden: int = 32, vocab: int = 64, seed: int = 0, *, chunk: int = 8, **text_config: Any
) -> nn.Module:
    """Three chunked-attention layers to one full one (mlx-lm's forward needs at least four layers)."""
    text = _dense("llama4_text", layers, hidden, vocab, rope_theta=10000.0) | {
        "attention_bias": False,
        "attention_chunk_size": chunk,
        "attn_temperature_tuning": True,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 2 * hidden,
        "num_experts_per_tok": 1,
        "num_local_experts": 2,
        "rope_scaling": None,
        "use_qk_norm": True,
    }
    return build({"model_type": "llama4", "text_config": text | text_config}, seed)


def tiny_nemotron_h(hidden: int = 32, vocab: int = 64, seed: int = 0, **config: Any) -> nn.Module:
    """A hybrid: attention and state-space layers in turn."""
    own = {
        "hybrid_override_pattern": ["*", "M", "*", "M"],
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 32,
        "conv_kernel": 3,
        "n_groups": 2,
        "time_step_limit": [1.0, 2.0],
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": True,
        "use_conv_bias": True,
    }
    return build(_dense("nemotron_h", 4, hidden, vocab) | own | config, seed)


def tiny_qwen3_5(layers: int = 4, hidden: int = 32, vocab: int = 64, seed: int = 0, **text_config: Any) -> nn.Module:
    """A hybrid: gated-delta layers with full attention as every second one."""
    text = _dense("qwen3_5", layers, hidden, vocab) | {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 3,
        "full_attention_interval": 2,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "type": "default"},
    }
    return build({"model_type": "qwen3_5", "vocab_size": vocab, "text_config": text | text_config}, seed)


def tiny_mamba2(layers: int = 2, hidden: int = 32, vocab: int = 64, seed: int = 0, **config: Any) -> nn.Module:
    """Recurrent state only."""
    own = {
        "num_heads": hidden // 8,
        "head_dim": 16,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 3,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": False,
        "tie_word_embeddings": True,
        "time_step_limit": [0.01, 10.0],
        "time_step_rank": "auto",
        "intermediate_size": 64,
    }
    return build(_dense("mamba2", layers, hidden, vocab) | own | config, seed)


def tiny_nanochat(layers: int = 2, hidden: int = 32, vocab: int = 64, seed: int = 0, **config: Any) -> nn.Module:
    """A family whose last norm is a function and not a module, so that its parts are not found."""
    own = {"num_key_value_heads": 4, "tie_word_embeddings": False}
    return build(_dense("nanochat", layers, hidden, vocab) | own | config, seed)


def build(config: Config, seed: int = 0) -> nn.Module:
    """The mlx-lm model of ``config`` with weights that depend on ``seed`` and on nothing else."""
    remapping = {"gemma4_unified": "gemma4", **MODEL_REMAPPING}  # mlx-lm before 0.32 lacks this one
    name = remapping.get(config["model_type"], config["model_type"])
    arch = importlib.import_module(f"mlx_lm.models.{name}")
    model = arch.Model(arch.ModelArgs.from_dict(json.loads(json.dumps(config))))
    weights = [
        (name, _weight(name, array.shape, mx.random.key(seed * 100_003 + i)))
        for i, (name, array) in enumerate(tree_flatten(model.parameters()))
    ]
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def config_of(model: nn.Module) -> Config:
    """The ``config.json`` of a tiny model, ready for ``build`` or ``save_model_folder``."""
    return {key: value for key, value in dataclasses.asdict(model.args).items() if value is not None}


def save_model_folder(
    model: nn.Module,
    config: Config | None,
    path: Path,
    *,
    tokenizer: bool = True,
    generation_config: Config | None = None,
) -> Path:
    """Write ``config.json``, ``model.safetensors`` and a tokenizer to ``path``, as mlx-lm's converter lays them out.

    Args:
        config: ``None`` writes the model's own.
        tokenizer: with ``False`` the folder holds none.
        generation_config: also write this ``generation_config.json``.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = config_of(model) if config is None else config
    (path / "config.json").write_text(json.dumps(config, indent=1))
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    if tokenizer:
        save_tokenizer(path, config.get("vocab_size") or config["text_config"]["vocab_size"])
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    return path


def save_tokenizer(path: Path, vocab_size: int) -> None:
    """A tokenizer of exactly ``vocab_size`` ids: one token a byte where they fit, else words ``w6``, ``w7``, ..."""
    path.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer(vocab_size).save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNK,
        "additional_special_tokens": [TURN_START, TURN_END],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def tiny_tokenizer(vocab_size: int) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_bytes = vocab_size >= len(SPECIALS) + len(alphabet)
    entries = list(SPECIALS) + (alphabet if by_bytes else ["system", "user", "assistant"])
    entries += [f"w{i}" for i in range(len(entries), vocab_size)]
    vocab = {entry: i for i, entry in enumerate(entries[:vocab_size])}
    if by_bytes:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token=UNK))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in SPECIALS])
    return tokenizer


def _dense(model_type: str, layers: int, hidden: int, vocab: int, **more: Any) -> Config:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        **more,
    }


def _weight(name: str, shape: tuple[int, ...], key: mx.array) -> mx.array:
    """Layers write more into the residual stream than the embedding does, so that the text does not merely repeat its
    last token; the last norm is large, so that the best logit stands out (also under a tied head)."""
    noise = mx.random.normal(shape, key=key)
    if name.endswith("layer_scalar"):
        return mx.ones(shape)
    if name.endswith("lm_head.weight"):
        return 0.15 * noise
    if name.endswith(("router.weight", "mlp.gate.weight")):
        return noise
    if "embed" in name:
        return 0.1 * noise
    if len(shape) == 1:
        if not name.endswith("weight"):
            return 0.1 * noise
        final = name.endswith("model.norm.weight")
        return (20.0 if final else 1.5) * (1 + 0.1 * noise)
    return noise * (2.0 / math.sqrt(shape[-1]))
