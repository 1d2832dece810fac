"""``config.json`` of every publisher of a DFlash backbone -> one :class:`DraftConfig`, or an error that names the key.

Knows files and keys; weights, targets and arithmetic are other modules' business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, UnsupportedError
from .keys import NESTED, ConfigKeys, ConfigRecord, nested
from .layout import LayerLayout, read_layout
from .taps import read_taps

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

_RUNTIME_NESTED = frozenset(("runtime_block_size", "draft_window_size"))
_HEAD_PROMISES = ("has_lm_head", "has_own_lm_head", "use_draft_lm_head")


LayoutReader = Callable[..., "tuple[LayerLayout, ...]"]
"""``(keys, layers, head_dim, speculators=...)`` -> one entry a layer, as :func:`read_layout`."""


@dataclass(frozen=True)
class DraftConfig:
    """One draft with a DFlash backbone as its publisher describes it.

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
        value_scale: what attention values are multiplied with.
        record: every value with the place it was read from, and what was ignored.
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
    value_scale: float = 1.0
    embedding_scale: float = 1.0
    scaled_like_target: bool = True
    output_multiplier: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    promises_embedding: str | None = None
    promises_head: str | None = None
    quantization: Mapping[str, Any] = field(default_factory=dict)
    record: ConfigRecord = field(default_factory=ConfigRecord)

    @property
    def sources(self) -> Mapping[str, str]:
        """Value name -> the place it was read from."""
        return self.record.sources

    @property
    def max_depth(self) -> int:
        """The most tokens one block proposes."""
        return self.block_size - self.first_row

    @property
    def all_causal(self) -> bool:
        """No row depends on later rows, so a block may be cut short without changing the rest."""
        return all(layer.causal for layer in self.layers)


def parse_config(
    file: Path,
    content: Mapping[str, Any],
    *,
    target_layers: int | None = None,
    record: ConfigRecord | None = None,
    layout: LayoutReader = read_layout,
    first_row: int | None = None,
    default_block: int | None = None,
) -> DraftConfig:
    """Resolve every value by the format's precedence.

    Args:
        file: where ``content`` was read from.
        content: the JSON object.
        target_layers: depth of the target at hand, for configs that neither list taps nor say how deep the target is.
        record: where to note what was read.
        layout: how this family's layers see each other, where it has keys of its own for that.
        first_row: the slot convention of a family whose configs do not state it.
        default_block: block size of a family whose configs may leave it out; such a config is an error otherwise.

    Raises:
        ConfigError: one line with file, key, what was found and what was expected.
        UnsupportedError: a legal value that this package does not run.
    """
    keys = open_keys(file, content, record)
    speculators = is_speculators(content)
    _refuse_code(keys)
    widths = _widths(keys)
    layers = keys.size("num_hidden_layers", keys.backbone("num_hidden_layers"))
    layer_layout = layout(keys, layers, widths["head_dim"], speculators=speculators)
    depth = keys.integer("num_target_layers", ("num_target_layers", *nested("num_target_layers")), optional=True)
    taps = read_taps(keys, layers, depth or target_layers, speculators)
    block_size = _block_size(keys, default_block)
    row = _first_row(keys, block_size, first_row)
    if block_size - row < 1:
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
        first_row=row,
        mask_token_id=mask_id,
        mask_token=mask_token,
        tap_layers=taps,
        layers=layer_layout,
        attention_sinks=_sinks(keys),
        scaled_like_target=not speculators,
        promises_embedding="has_embed_tokens" if promises_table else None,
        promises_head=next((key for key in _HEAD_PROMISES if _promised(keys, key)), None),
        quantization=keys.mapping("quantization"),
        record=keys.record,
    )


def is_speculators(content: Mapping[str, Any]) -> bool:
    """Written by vllm-project/speculators, in whose wrapper absent backbone keys mean Qwen3's defaults."""
    return WRAPPER in content or "speculators_model_type" in content


def _block_size(keys: ConfigKeys, default: int | None) -> int:
    places = (*nested("block_size"), "dspark_block_size")
    found = keys.integer("block_size", places, optional=default is not None)
    if found is None:
        assert default is not None
        keys.derived("block_size", default, "this family's default, the config has none")
        return default
    return found


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


def open_keys(file: Path, content: Mapping[str, Any], record: ConfigRecord | None = None) -> ConfigKeys:
    """The look-ups of a config, with the backbone's keys where this publisher keeps them.

    Raises:
        ConfigError: a speculators config without its backbone.
    """
    if not is_speculators(content):
        return ConfigKeys(file, content, record=record)
    wrapper = content.get(WRAPPER)
    if not isinstance(wrapper, Mapping):
        found = "none" if wrapper is None else type(wrapper).__name__
        raise ConfigError(f"{file}: {WRAPPER}: found {found}, expected an object with the draft's backbone")
    qwen3 = wrapper.get("model_type", "qwen3") == "qwen3"
    defaults = _QWEN3_DEFAULTS if qwen3 else None
    return ConfigKeys(file, content, backbone=WRAPPER, defaults=defaults, record=record)


def _refuse_code(keys: ConfigKeys) -> None:
    """``auto_map`` names code that nothing here looks at; ``model_file`` asks the loader itself to run some."""
    for level in ("", f"{WRAPPER}.", *(f"{name}." for name in ("dflash_config", "eagle_config"))):
        if keys.at(f"{level}model_file"):
            raise UnsupportedError(
                f"{keys.file}: {level}model_file: found {keys.at(f'{level}model_file')!r}, expected a checkpoint that "
                "brings no code: a draft's code is never run"
            )
        if keys.at(f"{level}auto_map"):
            keys.record.note(f"{level}auto_map: names code, which is never run")


def _head_dim(keys: ConfigKeys, hidden: int, heads: int) -> int:
    found = keys.integer("head_dim", keys.backbone("head_dim"), optional=True)
    if found is None:
        if hidden % heads:
            raise keys.missing(
                "head_dim", keys.backbone("head_dim"), f"one: hidden_size {hidden} / {heads} is not whole"
            )
        found = hidden // heads
        keys.derived("head_dim", found, "hidden_size / num_attention_heads")
    if found % 2:
        raise keys.wrong(keys.backbone("head_dim")[0], found, "an even number, which rope needs")
    return found


def _check_activation(keys: ConfigKeys) -> None:
    found = keys.find("hidden_act", keys.backbone("hidden_act"))
    if found is not None and found[0] not in ("silu", "swish"):
        raise UnsupportedError(f"{keys.file}: {found[1]}: found {found[0]!r}, expected 'silu', the DFlash backbone's")


def _first_row(keys: ConfigKeys, block_size: int, family: int | None) -> int:
    """1 when row ``j`` predicts the token at its own position, 0 when it predicts the next one.

    How many tokens the checkpoint says it proposes is the best witness; then ``sample_from_anchor``; then what the
    family does; else predict-at.
    """
    overridden = keys.integer("first_row", (), 0, optional=True)
    if overridden is not None:
        if overridden > 1:
            raise keys.wrong(keys.sources["first_row"], overridden, "0 or 1")
        return overridden
    methods = keys.at("speculators_config.proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    proposed = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    stated = keys.boolean("sample_from_anchor", nested("sample_from_anchor"))
    if type(proposed) is int and block_size - proposed in (0, 1):
        row = block_size - proposed
        if stated is not None and stated is not (row == 0):
            keys.record.note(
                f"sample_from_anchor = {str(stated).lower()}: speculative_tokens {proposed} says otherwise"
            )
        keys.derived("first_row", row, "speculators_config.proposal_methods.speculative_tokens")
        return row
    if stated is not None:
        keys.derived("first_row", 0 if stated else 1, keys.sources["sample_from_anchor"])
        return 0 if stated else 1
    row, how = (1, "predict-at, as DFlash") if family is None else (family, "this family's convention")
    keys.derived("first_row", row, how)
    return row


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


def ignored_keys(record: ConfigRecord, content: Mapping[str, Any]) -> tuple[str, ...]:
    """What was read and not used, and the keys of a draft's own levels that nobody looked at; complete once the draft
    is loaded."""
    notes = list(record.notes)
    for place in record.unread(content, NESTED):
        name = place.rpartition(".")[2]
        if name in _RUNTIME_NESTED:
            value = content[place.partition(".")[0]][name]
            notes.append(f"{place} = {value!r}: a run-time setting of another program")
        else:
            notes.append(f"{place}: unknown key")
    return tuple(notes)
