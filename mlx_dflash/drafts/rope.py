"""Rotary positions of a draft: which parameters a config means, and the rotation itself.

Everything comes from the draft's own config; the target's rope never enters here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import ConfigError, UnsupportedError
from .keys import ConfigKeys, is_positive, nested

KINDS = ("default", "linear", "llama3", "yarn")
_PLAIN = (None, "default", "mrope")  # mrope is plain rope where there are no images


@dataclass(frozen=True)
class Rope:
    """Rotation of one layer's queries and keys.

    Attributes:
        dims: rotated width: the whole head, or its first dimensions in a family that rotates only those.
        theta: base.
        kind: one of ``KINDS``.
        periods: ``dims / 2`` floats; position ``p`` turns pair ``i`` by ``p / periods[i]`` radians.
        amplitude: what the published code multiplies cos and sin with (YaRN); 1.0 otherwise. Applied to the attention
            scale as its square, which is the same product.
        interleaved: pairs are neighbours ``(2i, 2i + 1)`` instead of ``(i, i + dims / 2)``.
    """

    dims: int
    theta: float
    kind: str
    periods: tuple[float, ...]
    amplitude: float = 1.0
    interleaved: bool = False

    def __str__(self) -> str:
        style = ", interleaved" if self.interleaved else ""
        return f"rope theta {self.theta:g}" + (f", {self.kind}" if self.kind != "default" else "") + style


class Rotary:
    """A :class:`Rope` ready to run; holds its periods as an array."""

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self._periods = mx.array(rope.periods, mx.float32)

    def __call__(self, x: mx.array, position: int) -> mx.array:
        """Rotate ``x [1, heads, rows, dims]``, whose first row sits at ``position``."""
        rope = self._rope
        return mx.fast.rope(
            x, rope.dims, traditional=rope.interleaved, base=None, scale=1.0, offset=position, freqs=self._periods
        )


def read_rope(keys: ConfigKeys, layer_type: str, head_dim: int, *, partial: bool = False) -> Rope:
    """The rope of layers of one type. ``partial`` honours ``partial_rotary_factor``, which most drafts only copied from
    their target.

    Raises:
        ConfigError: no theta anywhere, two places that disagree, or a scaling without its factor.
        UnsupportedError: a scaling this package does not compute.
    """
    place, parameters, keyed = _parameters(keys, layer_type)
    (scaling_place,) = keys.backbone("rope_scaling")
    scaling = keys.mapping(scaling_place)
    theta = _theta(keys, place, scaling_place, keyed)
    kind_place, kind, options = _kind(keys, place, parameters, scaling_place, scaling)
    dims = _rotated_dims(keys, place, head_dim) if partial else head_dim
    if not partial:
        _note_partial_rotary(keys, place)
    interleaved = _interleaved(keys)
    try:
        periods, amplitude = _periods(keys, kind_place, kind, options, theta, dims)
    except (ArithmeticError, ValueError):  # legal numbers, but so extreme that a period leaves the floats
        periods, amplitude = [math.inf], 1.0
    if not all(is_positive(period) for period in periods):
        raise keys.wrong(kind_place, dict(options), f"numbers that with rope_theta {theta:g} give finite periods")
    return Rope(dims, theta, kind, tuple(periods), amplitude, interleaved)


def _periods(
    keys: ConfigKeys, kind_place: str, kind: str, options: Mapping[str, Any], theta: float, head_dim: int
) -> tuple[list[float], float]:
    """``head_dim / 2`` periods and the amplitude."""
    periods = [theta ** (2 * i / head_dim) for i in range(head_dim // 2)]
    if kind == "linear":
        factor = _number(keys, kind_place, options, "factor")
        periods = [p * factor for p in periods]
    elif kind == "llama3":
        periods = _llama3(keys, kind_place, options, periods)
    elif kind == "yarn":
        return _yarn(keys, kind_place, options, periods, theta, head_dim)
    return periods, 1.0


def _parameters(keys: ConfigKeys, layer_type: str) -> tuple[str, Mapping[str, Any], bool]:
    """``rope_parameters``, or its entry for this layer type when it is keyed by layer type (the last value says so)."""
    (place,) = keys.backbone("rope_parameters")
    parameters = keys.mapping(place)
    keyed = bool(parameters) and all(isinstance(value, Mapping) for value in parameters.values())
    if keyed:
        place = f"{place}.{layer_type}"
        if keys.at(place) is None:
            raise keys.missing("rope_parameters", [place], f"an entry for the {layer_type} layers")
        parameters = keys.mapping(place)
    return place, parameters, keyed


def _theta(keys: ConfigKeys, place: str, scaling_place: str, keyed: bool) -> float:
    (flat,) = keys.backbone("rope_theta")
    places = [flat, f"{place}.rope_theta", f"{scaling_place}.rope_theta"]
    if keyed:
        # An entry for one layer type says more than a flat value can, so the two are not held against each other.
        places.sort(key=lambda where: not where.startswith(place))
    else:
        stated = {where: keys.number("rope_theta", [where]) for where in places if keys.at(where) is not None}
        if len(set(stated.values())) > 1:
            shown = " and ".join(f"{where} = {value:g}" for where, value in stated.items())
            raise ConfigError(f"{keys.file}: rope_theta: found {shown}, expected the same value in every place")
    theta = keys.number("rope_theta", places)
    if theta is None:
        raise keys.missing("rope_theta", places, "a number above 1")
    if theta <= 1:
        raise keys.wrong(keys.sources["rope_theta"], theta, "a number above 1: the base of growing periods")
    return theta


def _kind(
    keys: ConfigKeys, place: str, parameters: Mapping[str, Any], scaling_place: str, scaling: Mapping[str, Any]
) -> tuple[str, str, Mapping[str, Any]]:
    """The scaling in force: its place, its kind and its options."""
    real: list[tuple[str, str, Mapping[str, Any]]] = []
    for where, options in ((place, parameters), (scaling_place, scaling)):
        kind = options.get("rope_type", options.get("type"))
        if kind in _PLAIN:
            continue
        if kind not in KINDS:
            raise UnsupportedError(
                f"{keys.file}: {where}.rope_type: found {kind!r}, expected one of {', '.join(KINDS)}"
            )
        real.append((where, kind, options))
    if len({kind for _, kind, _ in real}) > 1:
        raise keys.wrong(real[1][0], real[1][1], f"{real[0][1]!r} as in {real[0][0]}")
    return real[0] if real else (place, "default", parameters)


def _number(keys: ConfigKeys, place: str, options: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = options.get(name)
    if value is None:
        if default is None:
            raise keys.missing(f"{place}.{name}", [f"{place}.{name}"], "a number above 0")
        return default
    if not is_positive(value):
        raise keys.wrong(f"{place}.{name}", value, "a number above 0")
    return float(value)


def _original_length(keys: ConfigKeys, place: str, options: Mapping[str, Any]) -> float:
    """The context length that the scaling starts from."""
    if options.get("original_max_position_embeddings") is not None:
        return _number(keys, place, options, "original_max_position_embeddings")
    return float(keys.size("max_position_embeddings", keys.backbone("max_position_embeddings")))


def _llama3(keys: ConfigKeys, place: str, options: Mapping[str, Any], periods: list[float]) -> list[float]:
    factor = _number(keys, place, options, "factor")
    low, high = _number(keys, place, options, "low_freq_factor"), _number(keys, place, options, "high_freq_factor")
    original = _original_length(keys, place, options)
    if high <= low:
        raise keys.wrong(f"{place}.high_freq_factor", high, f"more than low_freq_factor ({low:g})")
    scaled = []
    for period in periods:
        turns = original / (2 * math.pi * period)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)  # 1: keep the frequency, 0: divide it by the factor
        scaled.append(1 / (share / period + (1 - share) / (factor * period)))
    return scaled


def _yarn(
    keys: ConfigKeys, place: str, options: Mapping[str, Any], periods: list[float], theta: float, dims: int
) -> tuple[list[float], float]:
    factor = _number(keys, place, options, "factor")
    original = _original_length(keys, place, options)

    def pair_with_turns(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_with_turns(_number(keys, place, options, "beta_fast", 32.0))
    high = pair_with_turns(_number(keys, place, options, "beta_slow", 1.0))
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    scaled = []
    for i, period in enumerate(periods):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)  # 0: keep the frequency, 1: divide it by the factor
        scaled.append(1 / (ramp / (factor * period) + (1 - ramp) / period))
    return scaled, _yarn_amplitude(keys, place, options, factor)


def _yarn_amplitude(keys: ConfigKeys, place: str, options: Mapping[str, Any], factor: float) -> float:
    """An explicit ``attention_factor``, else the ratio of two given mscales, else ``1 + 0.1 ln(factor)``."""
    if options.get("attention_factor") is not None:
        factor = _number(keys, place, options, "attention_factor")
        keys.derived("attention_factor", factor, f"{place}.attention_factor")
        return factor

    def amplitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if options.get("mscale") and options.get("mscale_all_dim"):
        above = amplitude(_number(keys, place, options, "mscale"))
        return above / amplitude(_number(keys, place, options, "mscale_all_dim"))
    return amplitude(1.0)


def _rotated_dims(keys: ConfigKeys, place: str, head_dim: int) -> int:
    places = (*keys.backbone("partial_rotary_factor"), f"{place}.partial_rotary_factor")
    share = keys.number("partial_rotary_factor", places, 1.0)
    assert share is not None
    dims = int(head_dim * share)
    if not 0 < dims <= head_dim or dims % 2:
        raise keys.wrong(keys.sources["partial_rotary_factor"], share, f"an even part of head_dim ({head_dim})")
    return dims


def _note_partial_rotary(keys: ConfigKeys, place: str) -> None:
    for where in (*keys.backbone("partial_rotary_factor"), f"{place}.partial_rotary_factor"):
        value = keys.at(where)
        if value is not None and value != 1:
            keys.record.note(f"{where} = {value!r}: copied from the target; drafts of this family rotate whole heads")


def _interleaved(keys: ConfigKeys) -> bool:
    places = [
        place for name in ("is_neox_style", "rope_is_neox_style") for place in (*keys.backbone(name), *nested(name))
    ]
    split_half = keys.boolean("is_neox_style", places)
    return split_half is False
