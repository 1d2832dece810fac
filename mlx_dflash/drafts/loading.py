"""The steps every family's loader shares: options, weights in the right type, and filled modules.

Knows no family by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import OptionError
from .backbone import Backbone
from .base import TargetFacts
from .checkpoint import (
    DraftFolder,
    check_finite,
    check_shapes,
    read_tensors,
    refuse_foreign_formats,
    split_fused,
)
from .config import DraftConfig
from .head import Ownership, Vocabulary, decide_ownership, read_vocabulary
from .pairing import check_borrowing, check_pairing, check_tokenizers, mask_id, shipped_vocabulary, vocabulary_of
from .quantization import BITS, Packing, pack_modules, quantize_loaded, stored_packings

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_FLOATS = frozenset(_DTYPES.values())
_NOT_PARAMETERS = ("d2t", "t2d")


@dataclass(frozen=True)
class LoadOptions:
    """What the caller wants of a draft beyond its folder; see :func:`mlx_dflash.drafts.registry.load_draft`."""

    bits: int | None = None
    dtype: str | None = None
    tokenizer: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    confidence: float | None = None

    def __post_init__(self) -> None:
        """Raises OptionError for values outside their range."""
        if self.bits is not None and self.bits not in BITS:
            raise OptionError(f"bits: found {self.bits!r}, expected {' or '.join(map(str, BITS))}")
        if self.dtype is not None and (not isinstance(self.dtype, str) or self.dtype not in _DTYPES):
            raise OptionError(f"dtype: found {self.dtype!r}, expected one of {', '.join(_DTYPES)}")
        confidence = self.confidence
        if confidence is not None and (type(confidence) not in (int, float) or not 0 <= confidence < 1):
            raise OptionError(f"confidence: found {confidence!r}, expected a number from 0 to below 1")


Build = Callable[[], nn.Module]
"""Makes the modules that a checkpoint's tensors go into, unpacked and with any weights."""


@dataclass(frozen=True)
class Filled:
    """Modules with a checkpoint's weights in them.

    Attributes:
        model: evaluated and frozen.
        packings: packed modules by path; empty for float weights.
        dtype: what it computes in.
        weight_bytes: held in memory by the draft alone; what it borrows is not counted.
        build: makes the same modules anew.
    """

    model: nn.Module
    packings: Mapping[str, Packing]
    dtype: mx.Dtype
    weight_bytes: int
    build: Build

    def recast(self, dtype: mx.Dtype) -> Filled:
        """The same weights in another type; packed integers are shared."""
        return _filled(self.build, self.packings, _weights(self.model), dtype)


@dataclass(frozen=True)
class Parts:
    """A DFlash backbone with what surrounds it.

    Attributes:
        filled: the backbone's modules with their weights.
        mask_id: id of the block's rows after the anchor.
    """

    filled: Filled
    ownership: Ownership
    vocabulary: Vocabulary
    mask_id: int

    @property
    def backbone(self) -> Backbone:
        model = self.filled.model
        assert isinstance(model, Backbone)
        return model

    @property
    def packings(self) -> Mapping[str, Packing]:
        return self.filled.packings

    @property
    def dtype(self) -> mx.Dtype:
        return self.filled.dtype

    @property
    def weight_bytes(self) -> int:
        return self.filled.weight_bytes

    def recast(self, dtype: mx.Dtype) -> Parts:
        """The same weights in another type."""
        return Parts(self.filled.recast(dtype), self.ownership, self.vocabulary, self.mask_id)


def load_parts(
    folder: DraftFolder,
    config: DraftConfig,
    target: TargetFacts,
    options: LoadOptions,
    *,
    build: Callable[[Ownership], Backbone] | None = None,
    keep_float: tuple[str, ...] = (),
) -> Parts:
    """Check, read and fill a draft with a DFlash backbone.

    Args:
        build: makes the family's modules; a plain backbone when not given.
        keep_float: names of modules that ``options.bits`` leaves alone.

    Raises:
        MlxDflashError: every kind that :func:`mlx_dflash.drafts.registry.load_draft` lists.
    """
    refuse_foreign_formats(folder)
    known_ids = known_vocabulary(folder, options)
    check_pairing(config, target)
    ownership = decide_ownership(folder, config, target)
    mask = mask_id(config, known_ids or shipped_vocabulary(folder.path))
    check_borrowing(config, ownership, mask)
    tensors = split_fused(folder, read_tensors(folder), config.num_heads, config.num_kv_heads)
    vocabulary = read_vocabulary(
        folder,
        tensors,
        ownership,
        target,
        real_ids=max(known_ids.values()) + 1 if known_ids else None,
        published_rows=config.vocab_size,
    )
    tensors = {name: array for name, array in tensors.items() if name not in _NOT_PARAMETERS}

    def built() -> nn.Module:
        if build is not None:
            return build(ownership)
        return Backbone(config, embedding_rows=ownership.own_embedding_rows, head_rows=ownership.own_head_rows)

    filled = fill(folder, tensors, built, options, quantization=config.quantization, keep_float=keep_float)
    return Parts(filled, ownership, vocabulary, mask)


def known_vocabulary(folder: DraftFolder, options: LoadOptions) -> dict[str, int] | None:
    """Token -> id of the target's tokenizer, compared with one in the draft's folder; ``None`` when it is not at hand.

    Raises:
        PairingError: the two differ.
    """
    known_ids = vocabulary_of(options.tokenizer)
    if known_ids:
        check_tokenizers(folder.path, known_ids)
    return known_ids


def fill(
    folder: DraftFolder,
    tensors: Mapping[str, mx.array],
    build: Build,
    options: LoadOptions,
    *,
    quantization: Mapping[str, Any] | None = None,
    keep_float: tuple[str, ...] = (),
) -> Filled:
    """Put tensors into modules, strictly both ways.

    Args:
        tensors: by the modules' parameter names.
        quantization: MLX's block of the config; its other spelling is looked for where this is empty.
        keep_float: names of modules that ``options.bits`` leaves alone.

    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape, or not finite.
        OptionError, ConfigError, UnsupportedError: about quantisation.
    """
    packings = stored_packings(folder, quantization or _mlx_block(folder), tensors)
    _check_bits(folder, packings, options.bits)
    check_shapes(folder, tensors, parameter_shapes(build(), packings), packings)
    dtype = _DTYPES[options.dtype] if options.dtype else _stored_dtype(tensors)
    tensors = {name: cast(array, dtype) for name, array in tensors.items()}
    check_finite(folder, tensors)
    filled = _filled(build, packings, tensors, dtype)
    if options.bits is not None and not packings:
        chosen = quantize_loaded(filled.model, options.bits, keep_float)
        return _measured(filled.model, chosen, dtype, build)
    return filled


def parameter_shapes(model: nn.Module, packings: Mapping[str, Packing]) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint for these modules must hold, and nothing else; ``model`` is not packed yet."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, array in _weights(model).items():
        path, _, leaf = name.rpartition(".")
        packing = packings.get(path) if leaf == "weight" and array.ndim == 2 else None
        shapes |= {name: tuple(array.shape)} if packing is None else packing.shapes(path, *array.shape)
    return shapes


def _filled(build: Build, packings: Mapping[str, Packing], tensors: Mapping[str, mx.array], dtype: mx.Dtype) -> Filled:
    model = build()
    pack_modules(model, packings)
    model.load_weights([(name, cast(array, dtype)) for name, array in tensors.items()], strict=True)
    return _measured(model, packings, dtype, build)


def _measured(model: nn.Module, packings: Mapping[str, Packing], dtype: mx.Dtype, build: Build) -> Filled:
    model.eval()
    model.freeze()
    weights = _weights(model)
    mx.eval(list(weights.values()))
    return Filled(model, packings, dtype, sum(array.nbytes for array in weights.values()), build)


def _weights(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def cast(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Floats in ``dtype``; packed integers as they are."""
    return array.astype(dtype) if array.dtype in _FLOATS else array


def _stored_dtype(tensors: Mapping[str, mx.array]) -> mx.Dtype:
    """The float type that most bytes are stored in; float16 becomes bfloat16, which has float32's range."""
    held = {dtype: sum(a.nbytes for a in tensors.values() if a.dtype == dtype) for dtype in _DTYPES.values()}
    most = max(held, key=lambda dtype: held[dtype])
    return most if held[most] and most != mx.float16 else mx.bfloat16


def _mlx_block(folder: DraftFolder) -> Mapping[str, Any]:
    """mlx-lm writes its block under both names; some tools keep only this one."""
    block = folder.config.get("quantization_config")
    return block if isinstance(block, Mapping) else {}


def _check_bits(folder: DraftFolder, packings: Mapping[str, Packing], bits: int | None) -> None:
    stored = sorted({packing.bits for packing in packings.values()})
    if bits is not None and stored and stored != [bits]:
        raise OptionError(
            f"bits: found {bits}, expected none for {folder.path}: its weights are already quantised to "
            f"{', '.join(map(str, stored))} bits"
        )
