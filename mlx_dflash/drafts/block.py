"""A draft that proposes a whole block at once from a DFlash backbone; what its families have in common.

Knows how a block is embedded, run and read; how a family turns hidden rows into tokens is one method,
:meth:`BlockSession.choose`, and its weights' spelling on disk is its loader's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from typing_extensions import Self

from .backbone import Backbone
from .base import DraftReport, DraftSampler, Proposal, TargetFacts, TargetMemory
from .checkpoint import DraftFolder, dtype_name
from .config import DraftConfig
from .context import LayerContext, visibility
from .layout import LayerLayout
from .loading import Parts
from .quantization import describe


class BlockDraft:
    """Weights and config of one draft with a DFlash backbone; satisfies :class:`mlx_dflash.drafts.base.Draft`.

    Attributes:
        short_block: run only the rows that are read. Always exact for causal layers, where it is done anyway; a
            bidirectional draft was trained with all of its mask rows and proposes otherwise (mostly worse) with fewer.
    """

    family = "dflash"
    short_block = False

    def __init__(self, config: DraftConfig, parts: Parts, folder: DraftFolder) -> None:
        self.config, self.parts, self.folder = config, parts, folder
        self.block_size, self.max_depth, self.tap_layers = config.block_size, config.max_depth, config.tap_layers
        self.report = _report(self.family, config, parts, folder)

    @property
    def backbone(self) -> Backbone:
        return self.parts.backbone

    def open(self, target: TargetFacts, position: int = 0, memory: TargetMemory | None = None) -> BlockSession:
        return BlockSession(self, target, position)

    def widened(self) -> Self | None:
        """A copy over the same weights in float32, with whatever else a family keeps on its drafts."""
        if self.parts.dtype == mx.float32:
            return None
        wide = copy.copy(self)
        wide.parts = self.parts.recast(mx.float32)
        wide.report = replace(self.report, dtype=dtype_name(mx.float32), weight_bytes=wide.parts.weight_bytes)
        return wide

    def block_rows(self, depth: int) -> int:
        """Rows to run for ``depth`` proposals."""
        if self.short_block or self.config.all_causal:
            return self.config.first_row + depth
        return self.block_size

    def embed(self, ids: mx.array, target: TargetFacts) -> mx.array:
        """``[1, rows]`` ids -> ``[1, rows, H]``: the block as it enters the first layer."""
        config = self.config
        if self.parts.ownership.own_embedding:
            # Only padding ids can lie outside an own table; MLX would read whatever is there.
            x = self.backbone.embed_tokens(mx.minimum(ids, self.parts.ownership.embedding_rows - 1))
        else:
            x = target.embed(ids)
        scale = config.embedding_scale * (target.embed_scale if config.scaled_like_target else 1.0)
        x = x.astype(self.parts.dtype)
        return x if scale == 1.0 else x * scale

    def raw_logits(self, hidden: mx.array, target: TargetFacts, head_dtype: mx.Dtype) -> mx.array:
        """``[n, H]`` normed rows -> ``[n, head rows]`` float32, before multiplier, scale and soft-cap."""
        if self.parts.ownership.own_head:
            return self.backbone.lm_head(hidden).astype(mx.float32)
        # In the target's type: a wider row would make MLX widen the whole matrix for every product.
        return target.head(hidden.astype(head_dtype)).astype(mx.float32)

    def shape_logits(self, logits: mx.array) -> mx.array:
        """Multiplier, logit scale, soft-cap: those of the draft's own config, whosever head it was."""
        factor = self.config.output_multiplier * self.config.logit_scale
        if factor != 1.0:
            logits = logits * factor
        cap = self.config.softcap
        return logits if cap is None else mx.tanh(logits / cap) * cap


class BlockSession:
    """One sequence; satisfies :class:`mlx_dflash.drafts.base.DraftSession`. Nothing here waits for the device."""

    def __init__(self, draft: BlockDraft, target: TargetFacts, position: int) -> None:
        self.draft, self.target = draft, target
        self._position = position
        self._fused: mx.array | None = None
        config = draft.config
        self._contexts = [LayerContext(layout.reach, config.block_size, position) for layout in config.layers]
        retains = [context.retain for context in self._contexts]
        self._retain = None if None in retains else max(rows for rows in retains if rows is not None)
        self._head_dtype = target.embed(mx.zeros((1,), mx.int32)).dtype
        self._masks: dict[Any, mx.array | str | None] = {}

    @property
    def position(self) -> int:
        return self._position

    def commit(self, features: mx.array | None, position: int, tokens: Sequence[int] = ()) -> None:
        assert features is not None
        width = len(self.draft.tap_layers) * self.draft.config.target_hidden_size
        if features.ndim != 3 or features.shape[0] != 1 or features.shape[2] != width:
            raise ValueError(f"features of shape {list(features.shape)}, expected [1, rows, {width}]")
        if position != self._position:
            raise ValueError(f"told position {position}, expected {self._position}")
        rows = features.shape[1]
        if rows == 0:
            return
        # Rows that have left every layer's window before anybody could look are not projected at all.
        wanted = rows if self._retain is None else min(rows, self._retain)
        fused = self.draft.backbone.fuse(features[:, rows - wanted :].astype(self.draft.parts.dtype))
        for layer, context in zip(self.draft.backbone.layers, self._contexts, strict=True):
            kept = wanted if context.retain is None else min(wanted, context.retain)
            first = position + rows - kept
            keys, values = layer.keys_values(fused[:, wanted - kept :], first)
            context.append(keys, values, first)
        self._position += rows
        self._fused = fused[:, -1:]

    def propose(self, anchor: mx.array, depth: int, sampler: DraftSampler | None) -> Proposal | None:
        draft = self.draft
        if not 1 <= depth <= draft.max_depth:
            raise ValueError(f"depth {depth}, expected 1 .. {draft.max_depth}")
        first = draft.config.first_row
        hidden = self.block_hidden(anchor, draft.block_rows(depth))[0, first:]
        return self.choose(hidden, anchor, depth, sampler)

    def choose(self, hidden: mx.array, anchor: mx.array, depth: int, sampler: DraftSampler | None) -> Proposal | None:
        """Make a proposal of a block's hidden states. Here every row is read by itself.

        Args:
            hidden: ``[rows, H]`` after the final norm, from the first proposing row on; ``depth`` rows or more.
            anchor: ``[1]`` int32.
        """
        draft, vocabulary = self.draft, self.draft.parts.vocabulary
        raw = self.raw_logits(hidden[:depth])
        # Before the soft-cap, which would turn an infinity into an ordinary number.
        finite = mx.isfinite(raw).all()
        logits = draft.shape_logits(raw)
        if sampler is None:
            return Proposal(vocabulary.to_target(mx.argmax(logits, axis=-1)), finite=finite)
        tokens, q = sampler(logits)
        return Proposal(vocabulary.to_target(tokens), probs=vocabulary.spread(q), finite=finite)

    def raw_logits(self, hidden: mx.array) -> mx.array:
        """``[n, H]`` normed rows -> ``[n, vocabulary.limit]`` float32: what can be proposed, before any shaping."""
        raw = self.draft.raw_logits(hidden, self.target, self._head_dtype)
        return raw[:, : self.draft.parts.vocabulary.limit]

    def block_hidden(self, anchor: mx.array, rows: int) -> mx.array:
        """Run one block at the current position.

        Args:
            anchor: ``[1]`` int32.
            rows: anchor and masks together.

        Returns:
            ``[1, rows, H]`` after the final norm.
        """
        masks = mx.full((rows - 1,), self.draft.parts.mask_id, mx.int32)
        ids = mx.concatenate([anchor.astype(mx.int32), masks])[None]
        x = self.draft.embed(ids, self.target)
        return self.draft.backbone(x, self._contexts, self._visibility, self._position)

    @property
    def last_fused(self) -> mx.array | None:
        """``[1, 1, H]``: the fused features of the newest committed position; ``None`` when none was told, or when a
        rewind has gone behind it."""
        return self._fused

    def rewind(self, position: int) -> None:
        if position > self._position:
            raise ValueError(f"rewind to {position}, expected at most {self._position}")
        for context in self._contexts:
            context.rewind(position)
        if position < self._position:
            self._fused = None
        self._position = position

    def arrays(self) -> Sequence[mx.array]:
        return [array for context in self._contexts for array in context.arrays()]

    def _visibility(self, layout: LayerLayout, context: int, rows: int) -> mx.array | str | None:
        """Masks by shape. Once the window is full every round asks for the same few."""
        key = (layout.window, layout.causal, layout.from_anchor, context, rows)
        if key not in self._masks:
            if len(self._masks) >= 64:
                self._masks.clear()
            self._masks[key] = visibility(
                context, rows, window=layout.window, causal=layout.causal, from_anchor=layout.from_anchor
            )
        return self._masks[key]


def _report(family: str, config: DraftConfig, parts: Parts, folder: DraftFolder) -> DraftReport:
    ownership = parts.ownership
    return DraftReport(
        family=family,
        dialect=config.dialect,
        path=str(folder.path),
        block_size=config.block_size,
        max_depth=config.max_depth,
        tap_layers=config.tap_layers,
        head=ownership.head_reason,
        embedding=ownership.embedding_reason,
        dtype=dtype_name(parts.dtype),
        quantization=describe(parts.packings),
        weight_bytes=parts.weight_bytes,
        layers=tuple(str(layout) for layout in config.layers),
        extra={
            "borrowed": ownership.borrowed,
            "first_row": config.first_row,
            "mask_token_id": parts.mask_id,
            "proposed_ids": parts.vocabulary.limit,
        },
    )
