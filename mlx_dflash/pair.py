"""A loaded target with its draft, or without one: what ``load`` returns and ``generate`` takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_reduce

from .cache import check_rollback
from .drafts.base import Draft, DraftReport
from .errors import UnsupportedError
from .target import Target

NO_DRAFT = "no draft is loaded"
"""Why a pair without a draft decodes plainly."""


@dataclass(frozen=True)
class TargetReport:
    """What is known of the loaded target; a size is 0 where a model of an unknown structure does not say it.
    ``parameter_bytes`` counts its weights as they are held in memory."""

    name: str
    model_type: str
    layers: int
    hidden_size: int
    vocab_size: int
    parameter_bytes: int


@dataclass(frozen=True)
class LoadReport:
    """What was loaded and how it was understood."""

    target: TargetReport
    draft: DraftReport | None
    draft_name: str = ""
    """How the user called the draft, or the repository of one that was found."""
    draft_note: str = ""
    """How a draft that nobody named was found, or why there is none; empty when there is nothing to say."""

    def lines(self) -> list[str]:
        """For people: one line a model."""
        t = self.target
        size = f"{t.parameter_bytes / 1e6:,.1f} MB"
        width = f"width {t.hidden_size}, " if t.hidden_size else ""
        lines = [f"target {t.name}: {t.model_type}, {t.layers} layers, {width}{size}"]
        if self.draft is not None:
            d, name = self.draft, self.draft_name or self.draft.path
            lines.append(
                f"draft {name}: {d.family} ({d.dialect}), block {d.block_size}, up to {d.max_depth} tokens a round, "
                f"taps {list(d.tap_layers)}, head {d.head}, embedding {d.embedding}, {d.dtype}"
                + (f", {d.quantization}" if d.quantization and d.quantization != "none" else "")
            )
            lines += [f"draft, ignored: {what}" for what in d.ignored]
        if self.draft_note:
            lines.append(f"no draft: {self.draft_note}" if self.draft is None else f"draft found: {self.draft_note}")
        return lines


class Pair:
    """A target and its draft. Calling it, and every attribute not listed here, goes to the mlx-lm model, so that it
    can stand where mlx-lm expects its model.

    Attributes:
        target: the wrapped mlx-lm model (``pair.target.model`` is the object mlx-lm made).
        draft: the draft, or ``None``.
        end_tokens: ids that end a turn, from config, generation config and tokenizer.
        report: what was loaded.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None = None,
        *,
        end_tokens: frozenset[int] = frozenset(),
        draft_name: str = "",
        draft_note: str = "",
    ) -> None:
        """Raises UnsupportedError when there is a draft and the target cannot be rolled back, or its taps or head
        cannot be found. Alone, every target of mlx-lm's decodes plainly."""
        self.target = target
        self.draft = draft
        self.end_tokens = end_tokens
        if draft is not None:
            check_can_speculate(target)
            target.check(draft.tap_layers)
        self.report = LoadReport(_describe(target), None if draft is None else draft.report, draft_name, draft_note)

    @property
    def no_draft(self) -> str:
        """Why a pair without a draft has none."""
        return f"{NO_DRAFT}: {self.report.draft_note}" if self.report.draft_note else NO_DRAFT

    @property
    def has_draft(self) -> bool:
        return self.draft is not None

    def replace_draft(self, draft: Draft) -> None:
        """Swap the draft for the requests that start from now on; running ones keep theirs."""
        self.draft = draft
        self.report = replace(self.report, draft=draft.report)

    def __repr__(self) -> str:
        return f"Pair({'; '.join(self.report.lines()[:2])})"

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return self.target.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "target" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.target.model, name)


def check_can_speculate(target: Target) -> None:
    """What every draft needs of a target, known before one is read: caches that roll back, and parts that were found.

    Raises:
        UnsupportedError: naming the cache and its class, or what was not found.
    """
    try:
        check_rollback(target.make_caches())
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{target.name or target.model_type} ({target.model_type}) cannot run with a draft: {error}"
        ) from error
    _ = target.parts


def _describe(target: Target) -> TargetReport:
    held = tree_reduce(lambda total, array: total + array.nbytes, target.model.parameters(), 0)
    return TargetReport(target.name, target.model_type, target.num_layers, target.hidden_size, target.vocab_size, held)
