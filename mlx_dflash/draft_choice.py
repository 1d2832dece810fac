"""Which draft a target gets: the named one, one that the target brings along, or one that is known to fit it.

A draft that was named and fails is an error. One that was found here is not worth an error: the target then decodes
plainly and the report says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import hub
from .drafts.base import Draft
from .drafts.loading import LoadOptions
from .drafts.registry import FAMILIES, RESERVED, load_draft, load_reserved
from .errors import MlxDflashError, ModelNotFoundError, OptionError
from .known_drafts import KnownDraft, drafts_for
from .pair import check_can_speculate
from .target import Target
from .target.reading import read_json

NONE = "none"
"""The word for: no draft, and do not look for one."""


@dataclass(frozen=True)
class DraftChoice:
    """What was decided before anything is loaded.

    Attributes:
        name: how reports call the draft; empty when there is none.
        folder: where it lies; ``None`` for none, and for a reserved word.
        word: the reserved word that names it, such as that of a draft without weights.
        found: nobody named it: it was found here, and a failure of it is no error.
        note: how it was found, or why there is none; empty when the user said all there is to say.
    """

    name: str = ""
    folder: Path | None = None
    word: str | None = None
    found: bool = False
    note: str = ""

    @property
    def is_none(self) -> bool:
        return self.folder is None and self.word is None


def choose_draft(
    draft: str | None, target: str, target_folder: Path, *, progress: hub.Progress | None = None
) -> DraftChoice:
    """Look a draft up, and download it when it is nowhere on this machine.

    Args:
        draft: a folder, a repository id, a reserved word, ``"none"``, or ``None`` to have one found.
        target: how the user called the target.
        target_folder: where it lies.
        progress: told about downloads.

    Raises:
        ModelNotFoundError: a draft was named and cannot be had.
    """
    if draft == NONE:
        return DraftChoice()
    if draft is not None:
        if draft in RESERVED:
            return DraftChoice(draft, word=draft)
        return DraftChoice(draft, hub.resolve(draft, role="draft", progress=progress))
    for built_in in BUILT_IN:
        folder = built_in(target_folder)
        if folder is not None:
            return DraftChoice(str(folder), folder, found=True, note="the target's folder brings it along")
    return _known(target, target_folder, progress)


def _known(target: str, target_folder: Path, progress: hub.Progress | None) -> DraftChoice:
    candidates = drafts_for(target, _config_of(target_folder))
    if not candidates:
        namesakes = drafts_for(target)
        other = f"{target_folder / 'config.json'} is not that of {namesakes[0].targets[0]}" if namesakes else ""
        return DraftChoice(note=other)
    known = preferred(candidates)
    if known is None:
        unread = ", ".join(f"{draft.repository} ({draft.family})" for draft in candidates)
        return DraftChoice(note=f"known for this target and not loaded by this version: {unread}")
    try:
        folder = hub.resolve(known.repository, role="draft", progress=progress)
    except ModelNotFoundError as error:
        return DraftChoice(note=str(error).partition("; looked in ")[0])
    return DraftChoice(known.repository, folder, found=True, note=f"published for {known.targets[0]}")


def preferred(candidates: tuple[KnownDraft, ...]) -> KnownDraft | None:
    """The draft that is taken: of those on this machine the first, else the first; ``None`` when none can be loaded."""
    loaded = [draft for draft in candidates if is_loaded(draft.family)]
    here = (draft for draft in loaded if hub.installed(draft.repository, role="draft") is not None)
    return next(here, loaded[0] if loaded else None)


def is_loaded(family: str) -> bool:
    """Whether this version loads drafts of a family."""
    return any(one.name == family and one.load is not None for one in FAMILIES)


def load_chosen(
    choice: DraftChoice, target: Target, target_folder: Path, options: LoadOptions
) -> tuple[Draft | None, DraftChoice]:
    """Load the chosen draft for ``target``.

    Returns:
        The draft and the choice; for one that was found and does not fit ``None``, and a choice that says why.

    Raises:
        OptionError: ``options`` ask for something that cannot be done to this draft.
        MlxDflashError: a draft that was named cannot be used.
    """
    if choice.is_none:
        return None, choice
    try:
        check_can_speculate(target)
        draft = _load(choice, target, target_folder, options)
        if choice.found:
            target.check(draft.tap_layers)
        return draft, choice
    except OptionError:
        raise
    except MlxDflashError as error:
        if not choice.found:
            raise
        return None, DraftChoice(note=f"{choice.name} was found for this target and cannot be used: {error}")


def _load(choice: DraftChoice, target: Target, target_folder: Path, options: LoadOptions) -> Draft:
    if choice.word is not None:
        return load_reserved(choice.word, target_folder, target, options)
    assert choice.folder is not None
    return load_draft(
        choice.folder,
        target,
        bits=options.bits,
        dtype=options.dtype,
        tokenizer=options.tokenizer,
        config=options.config,
        confidence=options.confidence,
    )


def _config_of(folder: Path) -> Mapping[str, Any]:
    try:
        return read_json(folder / "config.json")
    except MlxDflashError:
        return {}  # the target's loader reads it again and says what is wrong


def _subfolder(target_folder: Path) -> Path | None:
    """A draft that lies in ``dflash/`` of the target's own folder, as MiMo's does."""
    folder = target_folder / "dflash"
    return folder if (folder / "config.json").is_file() else None


BUILT_IN: tuple[Callable[[Path], Path | None], ...] = (_subfolder,)
"""Where a target may keep a draft of its own; each is asked with the target's folder, before any list is."""
