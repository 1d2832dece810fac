"""Where a draft's head and embedding come from, and how its ids become the target's.

Decided from the tensors that are present, cross-checked by the config; never from tied-embedding flags or from
vocabulary sizes alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from ..errors import CheckpointError, PairingError
from .base import TargetFacts
from .checkpoint import DraftFolder


@dataclass(frozen=True)
class Vocabulary:
    """What a draft's logits stand for.

    Attributes:
        rows: of the head that is used.
        ids: ``[rows]`` int32, the target id of each row of a reduced head; ``None`` when rows are target ids.
        limit: logits from this row on are padding and never proposed.
        target_rows: width of a distribution over the target's vocabulary.
    """

    rows: int
    ids: mx.array | None
    limit: int
    target_rows: int

    def to_target(self, rows: mx.array) -> mx.array:
        """Head rows ``[n]`` -> target ids ``[n]`` int32."""
        return (rows if self.ids is None else self.ids[rows]).astype(mx.int32)

    def spread(self, q: mx.array) -> mx.array:
        """``[n, limit]`` over head rows -> ``[n, target_rows]`` over target ids, zero wherever no row points."""
        if self.ids is not None:
            full = mx.zeros((q.shape[0], self.target_rows), q.dtype)
            full[:, self.ids[: self.limit]] = q
            return full
        short = self.target_rows - q.shape[1]
        return q if short == 0 else mx.pad(q, [(0, 0), (0, short)])


class Claims(Protocol):
    """What a config says about head and table, of whatever family it is; see
    :class:`mlx_dflash.drafts.config.DraftConfig` for the meaning of each."""

    @property
    def vocab_size(self) -> int | None: ...
    @property
    def draft_vocab_size(self) -> int | None: ...
    @property
    def promises_embedding(self) -> str | None: ...
    @property
    def promises_head(self) -> str | None: ...


@dataclass(frozen=True)
class Ownership:
    """Which of the two big matrices the draft brings; the reasons are for people."""

    own_head: bool
    own_embedding: bool
    head_rows: int
    embedding_rows: int
    head_reason: str
    embedding_reason: str
    reduced: bool

    @property
    def own_embedding_rows(self) -> int | None:
        """Rows of the draft's own table, ``None`` when it borrows the target's."""
        return self.embedding_rows if self.own_embedding else None

    @property
    def own_head_rows(self) -> int | None:
        """Rows of the draft's own head, ``None`` when it borrows the target's."""
        return self.head_rows if self.own_head else None

    @property
    def borrowed(self) -> tuple[str, ...]:
        """What the target lends."""
        owned = (("embed_tokens", self.own_embedding), ("lm_head", self.own_head))
        return tuple(name for name, own in owned if not own)


def decide_ownership(folder: DraftFolder, config: Claims, target: TargetFacts) -> Ownership:
    """The head rule and the embedding rule.

    Raises:
        CheckpointError: a reduced vocabulary without its parts, or a promised tensor that is not there.
        PairingError: a head or table whose rows fit neither the target nor its padding.
    """
    names = folder.headers
    own_head, own_embedding, has_map = "lm_head.weight" in names, "embed_tokens.weight" in names, "d2t" in names
    reduced = has_map or _reduced_by_config(config, target)
    head_rows = _matrix_rows(folder, "lm_head.weight") if own_head else target.vocab_size
    if reduced:
        _check_reduced(folder, config, own_head, has_map, head_rows)
    elif own_head:
        _check_rows(folder, "lm_head.weight", head_rows, config, target)
    elif config.promises_head:
        raise CheckpointError(
            f"{folder.path}: {config.promises_head} in config.json promises a head, found no tensor lm_head.weight"
        )
    table_rows = _matrix_rows(folder, "embed_tokens.weight") if own_embedding else target.vocab_size
    if own_embedding:
        _check_rows(folder, "embed_tokens.weight", table_rows, config, target)
    elif config.promises_embedding:
        raise CheckpointError(
            f"{folder.path}: {config.promises_embedding} in config.json promises a table, found no tensor "
            "embed_tokens.weight"
        )
    return Ownership(
        own_head,
        own_embedding,
        head_rows,
        table_rows,
        f"own (lm_head.weight in the checkpoint, {head_rows} rows{' mapped by d2t' if reduced else ''})"
        if own_head
        else "target (no lm_head.weight in the checkpoint)",
        "own (embed_tokens.weight in the checkpoint)"
        if own_embedding
        else "target (no embed_tokens.weight in the checkpoint)",
        reduced,
    )


def _matrix_rows(folder: DraftFolder, name: str) -> int:
    shape = folder.headers[name].shape
    if len(shape) != 2:
        raise CheckpointError(f"{folder.path}: tensor {name}: found shape {list(shape)}, expected a matrix")
    return shape[0]


def _reduced_by_config(config: Claims, target: TargetFacts) -> bool:
    """A stated draft vocabulary that is neither the target's nor the publisher's own count of the target's."""
    stated = config.draft_vocab_size
    if stated is None or stated in (target.vocab_size, config.vocab_size):
        return False
    return not is_padding(stated, target.vocab_size)


def _check_reduced(folder: DraftFolder, config: Claims, own_head: bool, has_map: bool, head_rows: int) -> None:
    missing = [name for name, there in (("lm_head.weight", own_head), ("d2t", has_map)) if not there]
    if missing:
        why = "d2t is there" if has_map else f"draft_vocab_size is {config.draft_vocab_size}"
        raise CheckpointError(
            f"{folder.path}: {why}, found no tensor {' and no '.join(missing)}: a reduced vocabulary needs its own "
            "lm_head and d2t"
        )
    length = folder.headers["d2t"].shape
    if length != (head_rows,):
        raise CheckpointError(
            f"{folder.path}: tensor d2t: found shape {list(length)}, expected [{head_rows}], one entry a row of lm_head"
        )
    if config.draft_vocab_size is not None and config.draft_vocab_size != head_rows:
        raise CheckpointError(
            f"{folder.path}: tensor lm_head.weight: found {head_rows} rows, expected draft_vocab_size = "
            f"{config.draft_vocab_size}"
        )


def _check_rows(folder: DraftFolder, name: str, rows: int, config: Claims, target: TargetFacts) -> None:
    if rows == target.vocab_size or is_padding(rows, target.vocab_size):
        return
    raise PairingError(
        f"{folder.path}: tensor {name}: found {rows} rows, expected the target's {target.vocab_size} or these padded"
    )


def is_padding(rows: int, other: int) -> bool:
    """Two counts that can be one vocabulary with differently padded tables."""
    apart = abs(rows - other)
    return apart < 1024 and apart * 64 <= max(rows, other)


def read_vocabulary(
    folder: DraftFolder,
    tensors: Mapping[str, mx.array],
    ownership: Ownership,
    target: TargetFacts,
    *,
    real_ids: int | None,
    published_rows: int | None,
) -> Vocabulary:
    """The id map, checked, and the limit below which ids are real.

    Args:
        real_ids: number of ids the tokenizer knows, ``None`` when no tokenizer is at hand.
        published_rows: the draft config's ``vocab_size``.

    Raises:
        CheckpointError: a map that is not increasing, leaves the target's vocabulary, or contradicts ``t2d``.
    """
    if ownership.reduced:
        ids = _read_map(folder, tensors["d2t"], target.vocab_size)
        if "t2d" in tensors:
            _check_mask(folder, tensors["t2d"], ids, target.vocab_size)
        return Vocabulary(ownership.head_rows, mx.array(ids, mx.int32), ownership.head_rows, target.vocab_size)
    limits = [ownership.head_rows, target.vocab_size]
    if real_ids is not None:
        limits.append(real_ids)
    if published_rows is not None and not ownership.own_head:
        # A publisher who counts fewer rows than the target's table has never trained the rest.
        limits.append(published_rows)
    return Vocabulary(ownership.head_rows, None, min(limits), target.vocab_size)


def _read_map(folder: DraftFolder, d2t: mx.array, vocab: int) -> list[int]:
    """Target ids of the draft's rows. Safetensors hold offsets; ids are taken only where offsets cannot be meant."""
    stored: list[int] = d2t.astype(mx.int64).tolist()  # type: ignore[assignment]
    sums = [row + offset for row, offset in enumerate(stored)]
    if _is_map(sums, vocab):
        return sums
    if _is_map(stored, vocab):  # increasing itself, so its sums failed only by leaving the vocabulary
        return stored
    raise CheckpointError(
        f"{folder.path}: tensor d2t: found {_fault(sums, vocab)}, expected offsets that give increasing target ids "
        f"below {vocab}"
    )


def _is_map(ids: list[int], vocab: int) -> bool:
    return bool(ids) and ids[0] >= 0 and ids[-1] < vocab and all(a < b for a, b in itertools.pairwise(ids))


def _fault(ids: list[int], vocab: int) -> str:
    for row, target_id in enumerate(ids):
        if not 0 <= target_id < vocab:
            return f"row {row} at target id {target_id}"
        if row and target_id <= ids[row - 1]:
            return f"row {row} at target id {target_id} after {ids[row - 1]}"
    return "no rows"


def _check_mask(folder: DraftFolder, t2d: mx.array, ids: list[int], vocab: int) -> None:
    if t2d.ndim != 1 or not (t2d.shape[0] == vocab or is_padding(t2d.shape[0], vocab)):
        raise CheckpointError(f"{folder.path}: tensor t2d: found shape {list(t2d.shape)}, expected [{vocab}]")
    flags: list[bool] = (t2d != 0).tolist()  # type: ignore[assignment]
    marked = [token for token, flag in enumerate(flags) if flag]
    if marked != ids:
        wrong = next((a for a, b in zip(marked, ids, strict=False) if a != b), None)
        detail = f"{len(marked)} ids" if wrong is None else f"id {wrong} marked"
        raise CheckpointError(f"{folder.path}: tensor t2d: found {detail}, expected the {len(ids)} ids that d2t gives")
