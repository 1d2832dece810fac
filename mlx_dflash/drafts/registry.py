"""Finds the family a draft's folder holds and hands it to that family's loader.

A new family is one file with its signs and loader, and one line in ``FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ModelNotFoundError, UnsupportedError
from . import dflash, dflash2, domino, laguna, lilicorr, muse
from .base import Draft, TargetFacts
from .checkpoint import DraftFolder, open_folder
from .config import ignored_keys
from .families import Family, recognise
from .loading import LoadOptions

FAMILIES: tuple[Family, ...] = (
    dflash.FAMILY,
    dflash2.FAMILY,
    lilicorr.FAMILY,
    domino.FAMILY,
    laguna.FAMILY,
    muse.FAMILY,
)

RESERVED: dict[str, Family] = {family.reserved: family for family in FAMILIES if family.reserved}
"""Words that name a draft without a folder of its own."""


def load_draft(
    path: Path,
    target: TargetFacts,
    *,
    bits: int | None = None,
    dtype: str | None = None,
    tokenizer: Any = None,
    config: Mapping[str, Any] | None = None,
    confidence: float | None = None,
) -> Draft:
    """Load the draft in a local folder for ``target``.

    Args:
        path: folder with ``config.json`` and safetensors.
        target: what the draft will be paired with; checked against it.
        bits: quantise the draft's matrices on load, 4 or 8; ``None`` leaves them as stored.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; ``None`` computes in the stored type, float16 excepted,
            which becomes bfloat16: the residual stream of these drafts leaves float16's range.
        tokenizer: the target's (Hugging Face or mlx-lm); compared with one in the draft's folder, and tells which rows
            of a padded vocabulary are real.
        config: values that win over what ``config.json`` says, by the names of ``report.config``.
        confidence: end a block before the first token whose chance the draft's confidence head puts lower than this.

    Raises:
        ModelNotFoundError: no such folder.
        ConfigError, CheckpointError: something in the folder is missing or wrong.
        UnsupportedError: another family, or another program's quantised weights.
        PairingError: the draft was made for another target.
        OptionError: ``bits``, ``dtype``, ``config`` or ``confidence``.
    """
    path = Path(path)
    if not path.is_dir():
        raise ModelNotFoundError(f"{path}: found no folder, expected a draft with config.json and weights")
    options = LoadOptions(bits, dtype, tokenizer, config or {}, confidence)
    folder = open_folder(path, options.config)
    recognised = recognise(folder, FAMILIES, plain=dflash.FAMILY)
    if recognised.family.load is None:
        raise UnsupportedError(
            f"{folder.config_file}: found a {recognised.family.name} draft ({recognised.sign}), expected a family that "
            f"this version loads: {', '.join(family.name for family in FAMILIES)}"
        )
    draft = recognised.family.load(folder, target, options)
    folder.record.check_overrides()
    draft.report = _completed(draft, folder, recognised.sign)
    return draft


def load_reserved(word: str, target_folder: Path | None, target: TargetFacts, options: LoadOptions) -> Draft:
    """Load the draft that a reserved word stands for.

    Args:
        target_folder: where the target's own checkpoint lies, for drafts that are part of it.

    Raises:
        MlxDflashError: as :func:`load_draft`.
    """
    load = RESERVED[word].load_reserved
    assert load is not None
    return load(target_folder, target, options)


def _completed(draft: Draft, folder: DraftFolder, sign: str) -> Any:
    """The family's own report with what only a finished load knows: everything that was read, and what was not."""
    read = tuple((name, value, place) for name, (value, place) in folder.record.read.items())
    ignored = (*ignored_keys(folder.record, folder.config), *folder.dropped)
    extra = draft.report.extra | {"recognised_by": sign}
    return replace(draft.report, config=read, ignored=ignored, extra=extra)
