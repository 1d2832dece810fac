"""The steps every family's loader shares: options, weights in the right type, and a filled backbone.

Knows no family by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..errors import OptionError
from .backbone import Backbone, parameter_shapes
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

    def __post_init__(self) -> None:
        """Raises OptionError for values outside their range."""
        if self.bits is not None and self.bits not in BITS:
            raise OptionError(f"bits: found {self.bits!r}, expected {' or '.join(map(str, BITS))}")
        if self.dtype is not None and (not isinstance(self.dtype, str) or self.dtype not in _DTYPES):
            raise OptionError(f"dtype: found {self.dtype!r}, expected one of {', '.join(_DTYPES)}")


@dataclass(frozen=True)
class Parts:
    """A backbone with what surrounds it.

    Attributes:
        dtype: what it computes in.
        packings: packed modules by path; empty for float weights.
        mask_id: id of the block's rows after the anchor.
        weight_bytes: held in memory by the draft alone; what it borrows is not counted.
    """

    backbone: Backbone
    ownership: Ownership
    vocabulary: Vocabulary
    packings: Mapping[str, Packing]
    dtype: mx.Dtype
    mask_id: int
    weight_bytes: int


def load_parts(folder: DraftFolder, config: DraftConfig, target: TargetFacts, options: LoadOptions) -> Parts:
    """Check, read and fill.

    Raises:
        MlxDflashError: every kind that :func:`mlx_dflash.drafts.registry.load_draft` lists.
    """
    refuse_foreign_formats(folder)
    known_ids = vocabulary_of(options.tokenizer)
    if known_ids:
        check_tokenizers(folder.path, known_ids)
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
    packings = stored_packings(folder, config.quantization or _mlx_block(folder), tensors)
    _check_bits(folder, packings, options.bits)
    check_shapes(folder, tensors, parameter_shapes(config, packings, **ownership.rows()), packings)
    dtype = _DTYPES[options.dtype] if options.dtype else _stored_dtype(tensors)
    tensors = {name: cast(array, dtype) for name, array in tensors.items()}
    check_finite(folder, tensors)
    backbone = _filled(config, ownership, packings, tensors)
    if options.bits is not None and not packings:
        packings = quantize_loaded(backbone, options.bits)
    return _parts(backbone, ownership, vocabulary, packings, dtype, mask)


def recast(parts: Parts, config: DraftConfig, dtype: mx.Dtype) -> Parts:
    """The same weights in another type; packed integers are shared."""
    tensors = {name: cast(array, dtype) for name, array in _weights(parts.backbone).items()}
    backbone = _filled(config, parts.ownership, parts.packings, tensors)
    return _parts(backbone, parts.ownership, parts.vocabulary, parts.packings, dtype, parts.mask_id)


def _filled(
    config: DraftConfig, ownership: Ownership, packings: Mapping[str, Packing], tensors: Mapping[str, mx.array]
) -> Backbone:
    backbone = Backbone(config, **ownership.rows())
    pack_modules(backbone, packings)
    backbone.load_weights(list(tensors.items()), strict=True)
    return backbone


def _parts(
    backbone: Backbone,
    ownership: Ownership,
    vocabulary: Vocabulary,
    packings: Mapping[str, Packing],
    dtype: mx.Dtype,
    mask_id: int,
) -> Parts:
    backbone.eval()
    backbone.freeze()
    weights = _weights(backbone)
    mx.eval(list(weights.values()))
    held = sum(array.nbytes for array in weights.values())
    return Parts(backbone, ownership, vocabulary, packings, dtype, mask_id, held)


def _weights(backbone: Backbone) -> dict[str, mx.array]:
    return dict(tree_flatten(backbone.parameters()))


def cast(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Floats in ``dtype``; packed integers as they are."""
    return array.astype(dtype) if array.dtype in _FLOATS else array


def _stored_dtype(tensors: Mapping[str, mx.array]) -> mx.Dtype:
    """The type of the largest float share of ``fc``; float16 becomes bfloat16, which has float32's range."""
    for name in ("fc.weight", "fc.scales", "hidden_norm.weight"):
        found = tensors[name].dtype if name in tensors else None
        if found in _FLOATS:
            return mx.bfloat16 if found == mx.float16 else found
    return mx.bfloat16


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
