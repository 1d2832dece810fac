"""``config.json`` of every DFlash-v1 publisher -> one :class:`DraftConfig`, or an error that names the key.

Knows files and keys; weights, targets and arithmetic are other modules' business.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, UnsupportedError
from .keys import ConfigKeys, nested
from .layout import LayerLayout, read_layout

Z_LAB, SPECULATORS = "z-lab", "speculators"
WRAPPER = "transformer_layer_config"

_QWEN3_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
}
"""What a Qwen3 backbone means by a key left out of ``transformer_layer_config``, which is saved as a difference."""

_KNOWN_NESTED = frozenset(
    (
        *("target_layer_ids", "mask_token_id", "mask_token", "pard_token", "block_size", "num_target_layers"),
        *("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids", "sample_from_anchor", "projector_type"),
        *("causal", "dflash_query_causal", "use_swa", "swa_window_size", "attention_sink_bias"),
        *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
        *("is_neox_style", "rope_is_neox_style", "has_lm_head", "has_own_lm_head", "use_draft_lm_head", "auto_map"),
    )
)
_RUNTIME_NESTED = frozenset(("runtime_block_size", "draft_window_size"))
_HEAD_PROMISES = ("has_lm_head", "has_own_lm_head", "use_draft_lm_head")


@dataclass(frozen=True)
class DraftConfig:
    """One DFlash-v1 draft as its publisher describes it.

    Attributes:
        file: the ``config.json`` it came from.
        dialect: ``"z-lab"`` (flat, nested, Gemma and Model-Optimizer flavours) or ``"speculators"``.
        hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim: the backbone's widths.
        target_hidden_size: width of one tap, the target's hidden size.
        vocab_size: rows of the target's table as the draft's publisher counted them, possibly padded otherwise than
            the target at hand; ``None`` when not stated.
        draft_vocab_size: rows of the draft's own head when stated.
        block_size: rows of the trained block.
        first_row: the block row whose output is the first proposal: 1 (predict-at) or 0 (predict-next).
        mask_token_id: id of the rows after the anchor; ``None`` when only ``mask_token`` names it.
        tap_layers: 0-based target layers whose *outputs* are the features; -1 is the embedding output.
        layers: visibility and rope, one entry a layer.
        attention_sinks: every layer has a sink logit a head.
        embedding_scale: factor on the block's embedding rows, before the target's own.
        scaled_like_target: the rows are also multiplied with the target's ``embed_scale``, as the draft was trained.
        output_multiplier, logit_scale, softcap: what happens to the head's output, in this order.
        promises_embedding, promises_head: a config key (named here) says that the checkpoint ships the tensor.
        quantization: MLX's own block, per-path overrides included; empty when not quantised by MLX.
        sources: value name -> place it was read from.
        ignored: keys that were read and not used, with the reason.
    """

    file: Path
    dialect: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    target_hidden_size: int
    vocab_size: int | None
    draft_vocab_size: int | None
    num_target_layers: int | None
    block_size: int
    first_row: int
    mask_token_id: int | None
    mask_token: str | None
    tap_layers: tuple[int, ...]
    layers: tuple[LayerLayout, ...]
    attention_sinks: bool = False
    embedding_scale: float = 1.0
    scaled_like_target: bool = True
    output_multiplier: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    promises_embedding: str | None = None
    promises_head: str | None = None
    quantization: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def max_depth(self) -> int:
        """The most tokens one block proposes."""
        return self.block_size - self.first_row

    @property
    def all_causal(self) -> bool:
        """No row depends on later rows, so a block may be cut short without changing the rest."""
        return all(layer.causal for layer in self.layers)


def parse_config(file: Path, content: Mapping[str, Any], *, target_layers: int | None = None) -> DraftConfig:
    """Resolve every value by the format's precedence.

    Args:
        file: where ``content`` was read from.
        content: the JSON object.
        target_layers: depth of the target at hand, for configs that neither list taps nor say how deep the target is.

    Raises:
        ConfigError: one line with file, key, what was found and what was expected.
        UnsupportedError: a legal value that this package does not run.
    """
    speculators = WRAPPER in content or "speculators_model_type" in content
    keys = _open(file, content, speculators)
    _refuse_code(keys)
    widths = _widths(keys)
    layers = keys.size("num_hidden_layers", keys.backbone("num_hidden_layers"))
    layout = read_layout(keys, layers, widths["head_dim"], speculators=speculators)
    depth = keys.integer("num_target_layers", ("num_target_layers", *nested("num_target_layers")), optional=True)
    taps = _taps(keys, layers, depth or target_layers, speculators)
    block_size = keys.size("block_size", (*nested("block_size"), "dspark_block_size"))
    first_row = _first_row(keys, block_size)
    if block_size - first_row < 1:
        raise keys.wrong(keys.sources["block_size"], block_size, "at least 2: the anchor and one proposed row")
    mask_id, mask_token = _mask(keys)
    promises_table = any(keys.at(place) is True for place in nested("has_embed_tokens"))
    return DraftConfig(
        file=file,
        dialect=SPECULATORS if speculators else Z_LAB,
        **widths,
        **_shaping(keys),
        num_target_layers=depth,
        block_size=block_size,
        first_row=first_row,
        mask_token_id=mask_id,
        mask_token=mask_token,
        tap_layers=taps,
        layers=layout,
        attention_sinks=_sinks(keys),
        scaled_like_target=not speculators,
        promises_embedding="has_embed_tokens" if promises_table else None,
        promises_head=next((key for key in _HEAD_PROMISES if _promised(keys, key)), None),
        quantization=keys.mapping("quantization"),
        ignored=_ignored(keys),
        sources=keys.sources,
    )


def _widths(keys: ConfigKeys) -> dict[str, Any]:
    """The backbone's dimensions, by the names of :class:`DraftConfig`."""
    top = keys.backbone
    hidden = keys.size("hidden_size", top("hidden_size"))
    heads = keys.size("num_attention_heads", top("num_attention_heads"))
    kv_heads = keys.size("num_key_value_heads", top("num_key_value_heads"))
    if heads % kv_heads:
        raise keys.wrong(keys.sources["num_key_value_heads"], kv_heads, f"a divisor of num_attention_heads ({heads})")
    _check_activation(keys)
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.size("intermediate_size", top("intermediate_size")),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": _head_dim(keys, hidden, heads),
        "rms_norm_eps": keys.number("rms_norm_eps", top("rms_norm_eps"), 1e-6),
        "attention_bias": bool(keys.boolean("attention_bias", top("attention_bias"))),
        "target_hidden_size": keys.integer("target_hidden_size", ("target_hidden_size",), optional=True) or hidden,
        "vocab_size": keys.integer("vocab_size", top("vocab_size"), optional=True),
        "draft_vocab_size": keys.integer("draft_vocab_size", ("draft_vocab_size",), optional=True),
    }


def _shaping(keys: ConfigKeys) -> dict[str, Any]:
    """What happens to the block's embedding and to the head's output; all of it optional."""
    return {
        "embedding_scale": keys.number("input_embedding_scale", nested("input_embedding_scale"), 1.0),
        "output_multiplier": keys.number("output_multiplier", nested("output_multiplier"), 1.0),
        "logit_scale": keys.number("logit_scale", ("logit_scale",), 1.0),
        "softcap": keys.number("final_logit_softcapping", nested("final_logit_softcapping")),
    }


def _open(file: Path, content: Mapping[str, Any], speculators: bool) -> ConfigKeys:
    if not speculators:
        return ConfigKeys(file, content)
    wrapper = content.get(WRAPPER)
    if not isinstance(wrapper, Mapping):
        found = "none" if wrapper is None else type(wrapper).__name__
        raise ConfigError(f"{file}: {WRAPPER}: found {found}, expected an object with the draft's backbone")
    qwen3 = wrapper.get("model_type", "qwen3") == "qwen3"
    return ConfigKeys(file, content, backbone=WRAPPER, defaults=_QWEN3_DEFAULTS if qwen3 else None)


def _refuse_code(keys: ConfigKeys) -> None:
    """``auto_map`` names code that nothing here looks at; ``model_file`` asks the loader itself to run some."""
    for level in ("", f"{WRAPPER}.", *(f"{name}." for name in ("dflash_config", "eagle_config"))):
        if keys.at(f"{level}model_file"):
            raise UnsupportedError(
                f"{keys.file}: {level}model_file: found {keys.at(f'{level}model_file')!r}, expected a checkpoint that "
                "brings no code: a draft's code is never run"
            )
        if keys.at(f"{level}auto_map"):
            keys.notes.append(f"{level}auto_map: names code, which is never run")


def _head_dim(keys: ConfigKeys, hidden: int, heads: int) -> int:
    found = keys.integer("head_dim", keys.backbone("head_dim"), optional=True)
    if found is None:
        if hidden % heads:
            raise keys.missing(
                "head_dim", keys.backbone("head_dim"), f"one: hidden_size {hidden} / {heads} is not whole"
            )
        keys.sources["head_dim"] = "hidden_size / num_attention_heads"
        found = hidden // heads
    if found % 2:
        raise keys.wrong(keys.backbone("head_dim")[0], found, "an even number, which rope needs")
    return found


def _check_activation(keys: ConfigKeys) -> None:
    found = keys.find("hidden_act", keys.backbone("hidden_act"))
    if found is not None and found[0] not in ("silu", "swish"):
        raise UnsupportedError(f"{keys.file}: {found[1]}: found {found[0]!r}, expected 'silu', the DFlash backbone's")


def _taps(keys: ConfigKeys, layers: int, target_layers: int | None, speculators: bool) -> tuple[int, ...]:
    """Output-layer ids. The auxiliary keys name the layer a state *enters*, which is the output of the one before."""
    outputs = nested("target_layer_ids")
    inputs = (*nested("aux_hidden_state_layer_ids"), *nested("eagle_aux_hidden_state_layer_ids"))
    found = keys.find("target_layer_ids", (*outputs, *inputs))
    if found is None:
        if target_layers is None:
            raise keys.missing(
                "target_layer_ids", (*outputs, *inputs), "a list, or num_target_layers to derive it from"
            )
        keys.sources["target_layer_ids"] = f"derived for a target of {target_layers} layers"
        return derived_taps(layers, target_layers, speculators=speculators)
    ids, place = found
    _note_other_taps(keys, ids, place, inputs)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise keys.wrong(place, ids, "a list of layer numbers")
    shift = 1 if place in inputs else 0
    taps = tuple(i - shift for i in ids)
    if taps[0] < -1 or any(a >= b for a, b in itertools.pairwise(taps)):
        raise keys.wrong(place, ids, f"increasing layer numbers from {shift - 1} on")
    return taps


def _note_other_taps(keys: ConfigKeys, ids: Any, place: str, inputs: tuple[str, ...]) -> None:
    """Some publishers list the taps under both conventions, one apart."""
    for other in inputs:
        value = keys.at(other)
        if place in inputs or not isinstance(value, list) or not isinstance(ids, list):
            continue
        if value != [i + 1 for i in ids if type(i) is int]:
            keys.notes.append(f"{other} = {value!r}: {place} wins, though it is not one less everywhere")


def derived_taps(layers: int, target_layers: int, *, speculators: bool = False) -> tuple[int, ...]:
    """The published rule for a config that lists no taps, as 0-based outputs.

    z-lab spreads one tap a draft layer between layer 1 and layer N - 3; speculators takes the layers *entering* 2,
    N // 2 and N - 3. Rounding is to even, as Python does.
    """
    if speculators:
        return (1, target_layers // 2 - 1, target_layers - 4)
    if layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers))


def _first_row(keys: ConfigKeys, block_size: int) -> int:
    """1 when row ``j`` predicts the token at its own position, 0 when it predicts the next one.

    How many tokens the checkpoint says it proposes is the best witness; then ``sample_from_anchor``; else predict-at.
    """
    methods = keys.at("speculators_config.proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    proposed = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    stated = keys.boolean("sample_from_anchor", nested("sample_from_anchor"))
    if type(proposed) is int and block_size - proposed in (0, 1):
        row = block_size - proposed
        if stated is not None and stated is not (row == 0):
            keys.notes.append(
                f"sample_from_anchor = {str(stated).lower()}: speculative_tokens {proposed} says otherwise"
            )
        keys.sources["first_row"] = "speculators_config.proposal_methods.speculative_tokens"
        return row
    if stated is not None:
        keys.sources["first_row"] = keys.sources["sample_from_anchor"]
        return 0 if stated else 1
    return 1


def _mask(keys: ConfigKeys) -> tuple[int | None, str | None]:
    names = nested("mask_token")[:-1]
    places = (*nested("mask_token_id"), *names, "dspark_noise_token_id", *nested("pard_token"))
    found = keys.find("mask_token_id", places)
    if found is None:
        raise keys.missing("mask_token_id", places, "the id of the mask token")
    value, place = found
    if place in names:
        if not isinstance(value, str) or not value:
            raise keys.wrong(place, value, "the mask token as text")
        return None, value
    return keys.integer("mask_token_id", [place], 0), None


def _sinks(keys: ConfigKeys) -> bool:
    places = (*nested("attention_sink_bias"), "add_swa_attention_sink_bias")
    return bool(keys.boolean("attention_sink_bias", places))


def _promised(keys: ConfigKeys, key: str) -> bool:
    return any(keys.at(place) is True for place in nested(key))


def _ignored(keys: ConfigKeys) -> tuple[str, ...]:
    notes = list(keys.notes)
    for level in ("dflash_config", "eagle_config"):
        for name, value in keys.mapping(level).items():
            if name in _RUNTIME_NESTED:
                notes.append(f"{level}.{name} = {value!r}: a run-time setting of another program")
            elif name not in _KNOWN_NESTED:
                notes.append(f"{level}.{name}: unknown key")
    return tuple(notes)
