"""The assistant of Muse-Glimmer: a DFlash v1 draft that is bidirectional in its sliding layers and says so nowhere.

Source: huggingface/transformers (``models/muse_glimmer_assistant``). The target norms its embedding and scales its
logits; the draft was trained on the raw rows of that table and on raw products with that head.
"""

from __future__ import annotations

from dataclasses import replace

from .base import TargetFacts
from .block import BlockDraft
from .checkpoint import DraftFolder
from .config import parse_config
from .families import Family, Signs
from .keys import ConfigKeys
from .layout import LayerLayout, read_layout
from .loading import LoadOptions, load_parts


class MuseDraft(BlockDraft):
    """Satisfies :class:`mlx_dflash.drafts.base.Draft`."""

    family = "muse-glimmer"


def load(folder: DraftFolder, target: TargetFacts, options: LoadOptions) -> MuseDraft:
    """Load a folder that was recognised as this assistant; raises as
    :func:`mlx_dflash.drafts.registry.load_draft`."""
    config = parse_config(
        folder.config_file, folder.config, target_layers=target.num_layers, record=folder.record, layout=_layout
    )
    config = replace(config, scaled_like_target=False)
    return MuseDraft(config, load_parts(folder, config, target, options), folder)


def _layout(keys: ConfigKeys, layers: int, head_dim: int, *, speculators: bool) -> tuple[LayerLayout, ...]:
    """``sliding_window`` is the farthest distance seen, in both directions, so that one position more is visible than
    where a window counts the query's own."""
    read = read_layout(keys, layers, head_dim, speculators=speculators, causal=False)
    windows = sorted({layout.window + 1 for layout in read if layout.window is not None})
    if windows:
        place = keys.sources.get("sliding_windows") or keys.sources["sliding_window"]
        keys.derived("visible_window", windows, f"{place} + 1: it is a distance here")
    return tuple(layout if layout.window is None else replace(layout, window=layout.window + 1) for layout in read)


FAMILY = Family(
    "muse-glimmer",
    Signs(architectures=("MuseGlimmerAssistantModel",), model_types=("muse_glimmer_assistant",)),
    load,
)
