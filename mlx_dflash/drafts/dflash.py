"""DFlash v1: one bidirectional (or causal) block of mask rows after the anchor, read by one head, rows independent.

Sources: z-lab/dflash, and vllm-project/speculators for its dialect.
"""

from __future__ import annotations

from ..errors import UnsupportedError
from .base import TargetFacts
from .block import BlockDraft
from .checkpoint import DraftFolder
from .config import parse_config
from .families import Family, Signs
from .keys import ConfigKeys, nested
from .loading import LoadOptions, load_parts


def load(folder: DraftFolder, target: TargetFacts, options: LoadOptions) -> BlockDraft:
    """Load a folder that was recognised as DFlash v1; raises as :func:`mlx_dflash.drafts.registry.load_draft`."""
    shifted = next(
        (place for place in nested("shift_label") if ConfigKeys(folder.config_file, folder.config).at(place)), None
    )
    if shifted is not None:
        raise UnsupportedError(
            f"{folder.config_file}: {shifted}: found true on a draft without a projector_type, expected dspark's or "
            "domino's, whose head this draft would be missing"
        )
    config = parse_config(folder.config_file, folder.config, target_layers=target.num_layers, record=folder.record)
    parts = load_parts(folder, config, target, options)
    return BlockDraft(config, parts, folder)


FAMILY = Family(
    "dflash",
    Signs(
        architectures=("DFlashDraftModel", "Qwen3DFlashDraftModel", "DFlashSpeculator"),
        projectors=("dflash",),
        speculators=("dflash",),
    ),
    load,
)
