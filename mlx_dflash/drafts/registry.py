"""Finds the family a draft's folder holds and hands it to that family's loader.

A new family is one file with a loader and one line in ``FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ModelNotFoundError, UnsupportedError
from . import dflash
from .base import Draft, TargetFacts
from .checkpoint import DraftFolder, open_folder
from .families import recognise
from .loading import LoadOptions

Loader = Callable[[DraftFolder, TargetFacts, LoadOptions], Draft]

FAMILIES: dict[str, Loader] = {
    "dflash": dflash.load,
}


def load_draft(
    path: Path,
    target: TargetFacts,
    *,
    bits: int | None = None,
    dtype: str | None = None,
    tokenizer: Any = None,
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

    Raises:
        ModelNotFoundError: no such folder.
        ConfigError, CheckpointError: something in the folder is missing or wrong.
        UnsupportedError: another family, or another program's quantised weights.
        PairingError: the draft was made for another target.
        OptionError: ``bits`` or ``dtype``.
    """
    path = Path(path)
    if not path.is_dir():
        raise ModelNotFoundError(f"{path}: found no folder, expected a draft with config.json and weights")
    options = LoadOptions(bits, dtype, tokenizer)
    folder = open_folder(path)
    recognised = recognise(folder)
    load = FAMILIES.get(recognised.family)
    if load is None:
        raise UnsupportedError(
            f"{folder.config_file}: found a {recognised.family} draft ({recognised.sign}), expected a family that this "
            f"version loads: {', '.join(FAMILIES)}"
        )
    return load(folder, target, options)
