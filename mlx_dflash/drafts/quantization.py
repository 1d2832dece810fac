"""Packed weights: what MLX's own quantised checkpoints hold, and quantising a loaded draft.

Knows module paths and MLX's packing; foreign formats are refused where the folder is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import ConfigError, OptionError, UnsupportedError
from .checkpoint import DraftFolder, canonical_name

BITS = (4, 8)
_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


@dataclass(frozen=True)
class Packing:
    """How one matrix is packed: ``group_size`` columns share a scale (and in affine mode a bias)."""

    group_size: int
    bits: int
    mode: str = "affine"

    def shapes(self, path: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """The tensors a packed ``[rows, columns]`` matrix consists of."""
        shapes: dict[str, tuple[int, ...]] = {f"{path}.weight": (rows, columns * self.bits // 32)}
        parts = ("scales", "biases") if self.mode == "affine" else ("scales",)
        return shapes | {f"{path}.{part}": (rows, columns // self.group_size) for part in parts}


def stored_packings(
    folder: DraftFolder, block: Mapping[str, Any], tensors: Mapping[str, mx.array]
) -> dict[str, Packing]:
    """Packing of every module whose ``.scales`` are in the checkpoint, by module path.

    Args:
        block: the config's ``quantization``, with per-path overrides.

    Raises:
        ConfigError: packed tensors that the config does not describe, or a description that is none.
        UnsupportedError: a packing that MLX does not have.
    """
    overrides = {canonical_name(path): value for path, value in block.items() if isinstance(value, Mapping)}
    packings = {}
    for name in tensors:
        path, _, leaf = name.rpartition(".")
        if leaf != "scales":
            continue
        stem, _, last = path.rpartition(".")
        described = overrides.get(path) or overrides.get(f"{stem}.{_FUSED.get(last, last)}") or block
        packings[path] = _packing(folder, path, described, block)
    return packings


def _packing(folder: DraftFolder, path: str, described: Mapping[str, Any], block: Mapping[str, Any]) -> Packing:
    values = {}
    for key in ("group_size", "bits"):
        value = described.get(key, block.get(key))
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"{folder.config_file}: quantization.{key}: found {value!r} for the packed {path}, expected a whole "
                "number"
            )
        values[key] = value
    mode = described.get("mode", block.get("mode", "affine"))
    if mode not in _MODES:
        raise UnsupportedError(
            f"{folder.config_file}: quantization.mode: found {mode!r}, expected one of {', '.join(_MODES)}"
        )
    packing = Packing(values["group_size"], values["bits"], mode)
    try:
        mx.quantize(mx.zeros((1, packing.group_size)), packing.group_size, packing.bits, mode=mode)
    except ValueError as error:  # which combinations exist is MLX's to say, and grows with its versions
        raise UnsupportedError(
            f"{folder.config_file}: quantization: found {packing.bits} bits in groups of {packing.group_size} ({mode}) "
            f"for {path}, expected what MLX packs: {' '.join(str(error).split())[:200]}"
        ) from None
    return packing


def pack_modules(model: nn.Module, packings: Mapping[str, Packing]) -> None:
    """Replace modules by their packed kinds, so that packed tensors can be loaded into them."""

    def described(path: str, module: nn.Module) -> bool | dict[str, Any]:
        packing = packings.get(path)
        if packing is None or not hasattr(module, "to_quantized"):
            return False
        return {"group_size": packing.group_size, "bits": packing.bits, "mode": packing.mode}

    nn.quantize(model, class_predicate=described)


def quantize_loaded(model: nn.Module, bits: int, keep_float: tuple[str, ...] = ()) -> dict[str, Packing]:
    """Quantise every linear layer, own head and own table in place, in groups of 64, or 32 where the width asks for it.

    Norms have no matrix and stay; so do layers whose width is no multiple of 32, and modules whose path holds one of
    the names in ``keep_float``.

    Returns:
        What was packed, by path.

    Raises:
        OptionError: ``bits`` is neither 4 nor 8.
    """
    if bits not in BITS:
        raise OptionError(f"bits: found {bits!r}, expected {' or '.join(map(str, BITS))}")
    chosen: dict[str, Packing] = {}
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Linear, nn.Embedding)) or not set(keep_float).isdisjoint(path.split(".")):
            continue
        width = module.weight.shape[-1]
        group = next((size for size in (64, 32) if width % size == 0), None)
        if group is not None:
            chosen[path] = Packing(group, bits)
    pack_modules(model, chosen)
    return chosen


def describe(packings: Mapping[str, Packing]) -> str:
    """For people: ``none``, or the commonest packing and how many modules differ."""
    if not packings:
        return "none"
    counts = Counter(packings.values())
    packing, most = counts.most_common(1)[0]
    text = f"{packing.mode} {packing.bits} bits, group {packing.group_size}"
    rest = len(packings) - most
    return text + (f" ({rest} of {len(packings)} matrices otherwise)" if rest else "")
