"""What makes a family of drafts, and which one a folder holds, by what its config and tensors say.

Knows no family itself: the signs come with each family's own file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from .base import Draft, TargetFacts
from .checkpoint import DraftFolder
from .loading import LoadOptions

Loader = Callable[[DraftFolder, TargetFacts, LoadOptions], Draft]
ReservedLoader = Callable[["Path | None", TargetFacts, LoadOptions], Draft]
"""``(folder of the target, target, options)`` -> the draft; no folder when the target has none on disk."""


@dataclass(frozen=True)
class Signs:
    """What a family's checkpoints are recognised by.

    Attributes:
        architectures: entries of the config's ``architectures``.
        model_types: values of ``model_type``.
        projectors: values of ``dflash_config.projector_type``.
        speculators: values of ``speculators_model_type``.
        tensors: patterns, matched at the start of canonical names, of tensors that a plain DFlash draft does not have.
        config: looks at the config for anything else and says what it saw, ``None`` for nothing. Asked before
            ``architectures``, which such checkpoints share with another family.
        contains: families whose tensors are found in this one's checkpoints, too.
    """

    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    projectors: tuple[str, ...] = ()
    speculators: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    config: Callable[[Mapping[str, Any]], str | None] | None = None
    contains: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """One kind of draft.

    Attributes:
        name: as reports and messages call it.
        signs: how its checkpoints are recognised.
        load: reads one; ``None`` for a family that is known by name only and refused.
        reserved: a word that users give in place of a folder, for a draft that needs none.
        load_reserved: what that word loads.
    """

    name: str
    signs: Signs = Signs()
    load: Loader | None = None
    reserved: str | None = None
    load_reserved: ReservedLoader | None = None


NOT_LOADED: tuple[Family, ...] = (
    Family("p-eagle", Signs(speculators=("peagle", "p_eagle"), tensors=(r"mask_hidden$",))),
    Family("eagle", Signs(speculators=("eagle",))),
    Family("mlp-speculator", Signs(speculators=("mlp", "mlp_speculator"))),
    Family("dlite", Signs(projectors=("dlite",))),
    Family(
        "dflash with MLA",
        Signs(
            architectures=("DeepseekDFlashDraftModel", "KimiK3DFlashDraftModel"),
            tensors=(r"layers\.\d+\.self_attn\.kv_(a_proj_with_mqa|b_proj)\.",),
        ),
    ),
)
"""Formats that exist and that nothing here reads: refused by their names."""

_PLAIN = frozenset(("fc.weight", "hidden_norm.weight", "norm.weight"))
"""What every DFlash backbone has; says DFlash v1 only where nothing else was said."""


@dataclass(frozen=True)
class Recognised:
    """A family and the sign it was recognised by, such as ``architectures: 'DFlashDraftModel'``."""

    family: Family
    sign: str


def recognise(folder: DraftFolder, families: Sequence[Family], plain: Family) -> Recognised:
    """Ask, in this order: speculators_model_type, projector_type, the families' own config signs, architectures,
    model_type, tensor names. Whatever answered first, the tensors must agree: another family's head under a plain name
    would run and be wrong.

    Args:
        families: all that can be meant.
        plain: the one meant by a bare DFlash backbone.

    Raises:
        UnsupportedError: nothing known was seen, or config and tensors name different families.
    """
    known = (*families, *NOT_LOADED)
    seen = _by_tensors(folder, known)
    said = _by_config(folder, known, seen)
    if said is not None:
        for name, other in seen.items():
            if name != said.family.name and name not in said.family.signs.contains:
                raise UnsupportedError(
                    f"{folder.path}: found {other.sign} (of {name}) under {said.sign}, expected the tensors of "
                    f"{said.family.name}"
                )
        return said
    whole = [one for name, one in seen.items() if set(seen) <= {name, *one.family.signs.contains}]
    if whole:
        return whole[0]
    if not seen and set(folder.headers) >= _PLAIN:
        return Recognised(plain, "its tensors")
    tensors = f"tensors of {' and '.join(seen)}" if seen else "no tensor of a known draft"
    raise UnsupportedError(
        f"{folder.config_file}: found architectures {folder.config.get('architectures')!r}, model_type "
        f"{folder.config.get('model_type')!r} and {tensors}, expected a draft"
    )


def _by_config(folder: DraftFolder, known: Sequence[Family], seen: Mapping[str, Recognised]) -> Recognised | None:
    config = folder.config
    outer = config.get("speculators_config")
    algorithm = outer.get("algorithm") if isinstance(outer, Mapping) else None
    for key, kind in (
        ("speculators_model_type", config.get("speculators_model_type")),
        ("speculators_config.algorithm", algorithm),
    ):
        if kind is not None:
            return _named(folder, key, kind, {word: family for family in known for word in family.signs.speculators})
    nested = config.get("dflash_config")
    projector = nested.get("projector_type") if isinstance(nested, Mapping) else None
    if projector is not None:
        table = {word: family for family in known for word in family.signs.projectors}
        return _named(folder, "dflash_config.projector_type", projector, table)
    for family in known:
        sign = family.signs.config(config) if family.signs.config is not None else None
        if sign is not None:
            return Recognised(family, sign)
    return _by_architecture(folder, known, seen)


def _by_architecture(folder: DraftFolder, known: Sequence[Family], seen: Mapping[str, Recognised]) -> Recognised | None:
    config = folder.config
    architectures = config.get("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    table = {name: family for family in known for name in family.signs.architectures}
    for name in names:
        if name in table:
            return Recognised(table[name], f"architectures: {name!r}")
    model_type = config.get("model_type")
    for family in known:
        if isinstance(model_type, str) and model_type in family.signs.model_types:
            return Recognised(family, f"model_type: {model_type!r}")
    if names:
        other = next(iter(seen.values()), None)
        sign = f" and {other.sign} (of {other.family.name})" if other else ""
        raise UnsupportedError(
            f"{folder.config_file}: architectures: found {names!r}{sign}, expected one of {', '.join(sorted(table))}"
        )
    return None


def _named(folder: DraftFolder, key: str, value: Any, table: Mapping[str, Family]) -> Recognised:
    family = table.get(value) if isinstance(value, str) else None
    if family is None:
        raise UnsupportedError(f"{folder.config_file}: {key}: found {value!r}, expected one of {', '.join(table)}")
    return Recognised(family, f"{key}: {value!r}")


def _by_tensors(folder: DraftFolder, known: Sequence[Family]) -> dict[str, Recognised]:
    """Families that some tensor speaks for, by name."""
    seen = {}
    for family in known:
        for pattern in family.signs.tensors:
            start = re.compile(pattern)
            name = next((name for name in folder.headers if start.match(name)), None)
            if name is not None:
                seen[family.name] = Recognised(family, f"tensor {name}")
                break
    return seen
