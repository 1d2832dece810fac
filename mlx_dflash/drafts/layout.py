"""What each draft layer may see: its window, whether its block is causal, and from where the window is counted.

Knows the precedence among the keys that publishers use for this; no array is made here.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedError
from .keys import ConfigKeys, nested
from .rope import Rope, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class LayerLayout:
    """Visibility and rope of one layer. Block row ``j`` sits at position ``s + j``, ``s`` being the anchor's.

    Attributes:
        window: ``W``, or ``None`` for a full layer.
        causal: block rows do not see later block rows.
        from_anchor: the window is counted from the anchor: every row sees the context positions ``s - W .. s - 1``, and
            the window does not cut inside the block. Otherwise a row sees keys less than ``W`` positions away, so that
            the anchor's row sees ``W - 1`` context positions and later rows fewer.
    """

    window: int | None
    causal: bool
    from_anchor: bool
    rope: Rope

    @property
    def reach(self) -> int | None:
        """Context positions before the anchor that some row can see; ``None`` for all."""
        if self.window is None:
            return None
        return self.window if self.from_anchor else self.window - 1

    def __str__(self) -> str:
        where = " from the anchor" if self.from_anchor else ""
        kind = "full" if self.window is None else f"sliding {self.window}{where}"
        return f"{kind}, {'causal' if self.causal else 'bidirectional'}, {self.rope}"


def read_layout(
    keys: ConfigKeys,
    layers: int,
    head_dim: int,
    *,
    speculators: bool,
    partial_rotary: bool = False,
    causal: bool | None = None,
) -> tuple[LayerLayout, ...]:
    """One entry a layer.

    Args:
        partial_rotary: the family's drafts rotate the first dimensions of a head only, and say which part.
        causal: what the family's blocks are where no key says it; ``None`` leaves it to the keys' precedence.

    Raises:
        ConfigError: a layer list of the wrong length, a sliding layer without a window.
        UnsupportedError: an unknown layer type.
    """
    types, windows, everywhere = _windows(keys, layers)
    flags = _causality(keys, types, windows, everywhere, speculators, causal)
    ropes = {kind: read_rope(keys, kind, head_dim, partial=partial_rotary) for kind in dict.fromkeys(types)}
    # Speculators trains its sliding layers with one window for the whole block; everybody else counts from each row.
    return tuple(
        LayerLayout(window, flag, speculators and window is not None, ropes[kind])
        for kind, window, flag in zip(types, windows, flags, strict=True)
    )


def _layer_types(keys: ConfigKeys, layers: int) -> list[str]:
    places = ("layer_types", *keys.backbone("layer_types"))
    found = keys.find("layer_types", places)
    if found is None:
        if keys.at(keys.backbone("use_sliding_window")[0]) is True:
            keys.record.note("use_sliding_window: without layer_types every layer is full")
        return [FULL] * layers
    types, place = found
    if not isinstance(types, list) or len(types) != layers:
        shown = f"{len(types)} entries" if isinstance(types, list) else repr(types)
        raise keys.wrong_text(place, shown, f"{layers} entries, one a layer (num_hidden_layers)")
    for kind in types:
        if kind not in (FULL, SLIDING):
            raise UnsupportedError(f"{keys.file}: {place}: found {kind!r}, expected {FULL} or {SLIDING}")
    return types


def _windows(keys: ConfigKeys, layers: int) -> tuple[list[str], list[int | None], bool]:
    """Layer types, window of each layer, and whether ``use_swa`` windows layers that ``layer_types`` calls full."""
    types = _layer_types(keys, layers)
    if keys.boolean("use_swa", nested("use_swa")):
        window = keys.size("sliding_window", nested("swa_window_size"))
        if SLIDING not in types:
            return types, [window] * layers, True
        return types, [window if kind == SLIDING else None for kind in types], False
    if SLIDING not in types:
        return types, [None] * layers, False
    listed = _listed_windows(keys, types)
    if listed is not None:
        return types, listed, False
    window = keys.size("sliding_window", ("sliding_window", *keys.backbone("sliding_window")))
    return types, [window if kind == SLIDING else None for kind in types], False


def _listed_windows(keys: ConfigKeys, types: list[str]) -> list[int | None] | None:
    """``sliding_windows``: one a layer, looked at for sliding layers only; ``None`` when there is no such list."""
    found = keys.find("sliding_windows", keys.backbone("sliding_windows"))
    if found is None:
        return None
    windows, place = found
    expected = f"{len(types)} whole numbers above 0, one a layer"
    if not isinstance(windows, list) or len(windows) != len(types):
        raise keys.wrong(place, windows, expected)
    for window, kind in zip(windows, types, strict=True):
        if kind == SLIDING and (type(window) is not int or window < 1):
            raise keys.wrong(place, windows, expected)
    keys.at("sliding_window")  # said once more, for readers of one window
    return [window if kind == SLIDING else None for window, kind in zip(windows, types, strict=True)]


def _causality(
    keys: ConfigKeys,
    types: list[str],
    windows: list[int | None],
    everywhere: bool,
    speculators: bool,
    family: bool | None = None,
) -> list[bool]:
    places = ("is_causal", *(place for place in nested("causal") if "." in place), *nested("dflash_query_causal"))
    stated = keys.boolean("is_causal", places)
    if stated is not None:
        return [stated] * len(types)
    if family is not None:
        keys.derived("is_causal", family, "absent: what this family's blocks are")
        return [family] * len(types)
    if speculators:
        free = keys.boolean("sliding_window_non_causal", ("sliding_window_non_causal",))
        if free is None and SLIDING in types:
            keys.derived("sliding_window_non_causal", False, "absent: sliding layers are causal")
        return [window is not None and not free for window in windows]
    if everywhere:
        keys.derived("is_causal", False, "use_swa without sliding layer_types: bidirectional")
        return [False] * len(types)
    if SLIDING in types:
        keys.derived("is_causal", None, "absent: sliding layers are causal, full layers bidirectional")
    return [kind == SLIDING for kind in types]
