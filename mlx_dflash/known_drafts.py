"""Which published draft was made for which target, by the target's name.

Knows names only: nothing here looks at a disk, loads a model or touches the network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parent / "data" / "drafts.json"

_QUANTISED = re.compile(
    r"\d+(\.\d+)?(bits?|bpw)|(bf|fp|f|int|mxfp|nvfp)\d+|(i|o)?q\d+|qx\d+\w*|dq\d+\w*|w\d+a\d+\w*|gs?\d+"
    r"|mlx|awq|gptq|gguf|bnb|autoround|dwq|qat|optiq|mixed|dynamic|quantized(\.w\d+a\d+)?|ud|unsloth"
)
"""A part of a name that says how the weights are stored, and nothing of what they were trained to do."""
_SPELLED_IN_PARTS = (
    (re.compile(r"mixed-\d+-\d+(-?bits?)?"), "mixed"),
    (re.compile(r"(\d)-(bits?)(?=-|$)"), r"\1\2"),
    (re.compile(r"dwq-\d{6,8}(v\d+)?"), "dwq"),
)


@dataclass(frozen=True)
class KnownDraft:
    """One published draft.

    Attributes:
        repository: on the Hub, or the reserved name of the bundled one.
        targets: names of the model it was made for, in every spelling in use.
        family: of this package's draft families, see :mod:`mlx_dflash.drafts.registry`.
        block: rows of the trained block, ``None`` when not known. The checkpoint itself decides.
        bytes: size of the weight files, ``None`` when not known.
        target_layers, target_width: decoder layers and hidden size of the target, ``None`` when not known.
        source: where these facts are from.
    """

    repository: str
    targets: tuple[str, ...]
    family: str
    block: int | None
    bytes: int | None
    target_layers: int | None
    target_width: int | None
    source: str

    def fits(self, config: Mapping[str, Any]) -> bool:
        """Whether a target's ``config.json`` can be that of a model this draft was made for. A folder may be called
        anything; what its config does not say cannot speak against it."""
        text = config.get("text_config")
        for name, expected in (("num_hidden_layers", self.target_layers), ("hidden_size", self.target_width)):
            found = text.get(name, config.get(name)) if isinstance(text, Mapping) else config.get(name)
            if expected is not None and type(found) is int and found != expected:
                return False
        return True


@cache
def known_drafts() -> tuple[KnownDraft, ...]:
    """Every draft in the list, the best one of a target first."""
    entries = json.loads(_FILE.read_text(encoding="utf-8"))["drafts"]
    return tuple(KnownDraft(**{**entry, "targets": tuple(entry["targets"])}) for entry in entries)


def base_name(name: str) -> str:
    """What a model is, whoever stores it in whatever precision: ``mlx-community/Qwen3.5-9B-MLX-4bit`` is
    ``qwen3.5-9b``.

    Args:
        name: a repository id, or a folder in any of the layouts that model folders have, Hub caches included.
    """
    parts = [part for part in re.split(r"[/\\]", name) if part not in ("", ".")]
    cached = [part for part in parts if part.startswith("models--")]
    last = (cached or parts or [""])[-1].rpartition("--")[2].lower()
    spelled = re.sub(r"[\s_-]+", "-", last).strip("-")
    for pattern, replacement in _SPELLED_IN_PARTS:
        spelled = pattern.sub(replacement, spelled)
    words = spelled.split("-")
    while len(words) > 1 and _QUANTISED.fullmatch(words[-1]):
        words.pop()
    return "-".join(words)


def drafts_for(name: str, config: Mapping[str, Any] | None = None) -> tuple[KnownDraft, ...]:
    """Drafts that were made for a target, the best one first; empty when none is known.

    Only the whole name counts: an ``-Instruct``, a ``-Coder`` or the ``-abliterated`` of a fine-tune is another model.

    Args:
        name: how the target is called: a repository id, or its folder.
        config: its ``config.json`` where that is at hand. It can rule drafts out. And where ``name`` is a folder with
            a name of its own, ``_name_or_path`` says what the model was made of.
    """
    wanted = base_name(name)
    by_name = _by_base_name()
    if wanted not in by_name and config is not None and not _is_variant(wanted) and Path(name).expanduser().is_dir():
        origin = config.get("_name_or_path")
        wanted = base_name(origin) if isinstance(origin, str) else wanted
    return tuple(draft for draft in by_name.get(wanted, ()) if config is None or draft.fits(config))


def find(repository: str) -> KnownDraft | None:
    """What the list says of a draft, by its repository or a folder of that name."""
    wanted = base_name(repository)
    return next((draft for draft in known_drafts() if base_name(draft.repository) == wanted), None)


@cache
def _by_base_name() -> dict[str, tuple[KnownDraft, ...]]:
    found: dict[str, tuple[KnownDraft, ...]] = {}
    for draft in known_drafts():
        for target in dict.fromkeys(map(base_name, draft.targets)):
            found[target] = (*found.get(target, ()), draft)
    return found


def _is_variant(wanted: str) -> bool:
    """A known name with something before or behind it: somebody says that this is another model."""
    return any(f"-{target}-" in f"-{wanted}-" for target in _by_base_name())
