"""DFlash v1: one bidirectional (or causal) block of mask rows after the anchor, read by one head, rows independent.

Knows how a proposal is made from a backbone, a head and an embedding; not how its weights were spelled on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from .backbone import Backbone
from .base import DraftReport, DraftSampler, Proposal, TargetFacts
from .checkpoint import DraftFolder, dtype_name
from .config import DraftConfig, parse_config
from .context import LayerContext, visibility
from .layout import LayerLayout
from .loading import LoadOptions, Parts, load_parts, recast
from .quantization import describe


def load(folder: DraftFolder, target: TargetFacts, options: LoadOptions) -> DFlashDraft:
    """Load a folder that was recognised as DFlash v1; raises as :func:`mlx_dflash.drafts.registry.load_draft`."""
    config = parse_config(folder.config_file, folder.config, target_layers=target.num_layers)
    parts = load_parts(folder, config, target, options)
    config = replace(config, ignored=(*config.ignored, *folder.dropped))
    return DFlashDraft(config, parts, str(folder.path))


class DFlashDraft:
    """Weights and config of one DFlash-v1 draft; satisfies :class:`mlx_dflash.drafts.base.Draft`.

    Attributes:
        short_block: run only the rows that are read. Always exact for causal layers, where it is done anyway; a
            bidirectional draft was trained with all of its mask rows and proposes otherwise (mostly worse) with fewer.
    """

    family = "dflash"
    short_block = False

    def __init__(self, config: DraftConfig, parts: Parts, path: str, *, short_block: bool = False) -> None:
        self.config, self.parts, self.path = config, parts, path
        self.short_block = short_block
        self.block_size, self.max_depth, self.tap_layers = config.block_size, config.max_depth, config.tap_layers
        self.report = _report(self.family, config, parts, path)

    @property
    def backbone(self) -> Backbone:
        return self.parts.backbone

    def open(self, target: TargetFacts, position: int = 0) -> DFlashSession:
        return DFlashSession(self, target, position)

    def widened(self) -> DFlashDraft | None:
        if self.parts.dtype == mx.float32:
            return None
        parts = recast(self.parts, self.config, mx.float32)
        return type(self)(self.config, parts, self.path, short_block=self.short_block)

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


class DFlashSession:
    """One sequence; satisfies :class:`mlx_dflash.drafts.base.DraftSession`. Nothing here waits for the device."""

    def __init__(self, draft: DFlashDraft, target: TargetFacts, position: int) -> None:
        self.draft, self.target = draft, target
        self._position = position
        config = draft.config
        self._contexts = [LayerContext(layout.reach, config.block_size, position) for layout in config.layers]
        retains = [context.retain for context in self._contexts]
        self._retain = None if None in retains else max(rows for rows in retains if rows is not None)
        self._head_dtype = target.embed(mx.zeros((1,), mx.int32)).dtype
        self._masks: dict[Any, mx.array | str | None] = {}

    @property
    def position(self) -> int:
        return self._position

    def commit(self, features: mx.array, position: int) -> None:
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
            context.append(*layer.self_attn.keys_values(fused[:, wanted - kept :], first), first)
        self._position += rows

    def propose(self, anchor: mx.array, depth: int, sampler: DraftSampler | None) -> Proposal:
        draft = self.draft
        if not 1 <= depth <= draft.max_depth:
            raise ValueError(f"depth {depth}, expected 1 .. {draft.max_depth}")
        first = draft.config.first_row
        hidden = self.block_hidden(anchor, draft.block_rows(depth))[0, first : first + depth]
        raw = draft.raw_logits(hidden, self.target, self._head_dtype)
        vocabulary = draft.parts.vocabulary
        raw = raw[:, : vocabulary.limit]
        # Before the soft-cap, which would turn an infinity into an ordinary number.
        finite = mx.isfinite(raw).all()
        logits = draft.shape_logits(raw)
        if sampler is None:
            return Proposal(vocabulary.to_target(mx.argmax(logits, axis=-1)), finite=finite)
        tokens, q = sampler(logits)
        return Proposal(vocabulary.to_target(tokens), probs=vocabulary.spread(q), finite=finite)

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

    def rewind(self, position: int) -> None:
        if position > self._position:
            raise ValueError(f"rewind to {position}, expected at most {self._position}")
        for context in self._contexts:
            context.rewind(position)
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


def _report(family: str, config: DraftConfig, parts: Parts, path: str) -> DraftReport:
    ownership = parts.ownership
    return DraftReport(
        family=family,
        dialect=config.dialect,
        path=path,
        block_size=config.block_size,
        max_depth=config.max_depth,
        tap_layers=config.tap_layers,
        head=ownership.head_reason,
        embedding=ownership.embedding_reason,
        dtype=dtype_name(parts.dtype),
        quantization=describe(parts.packings),
        weight_bytes=parts.weight_bytes,
        layers=tuple(str(layout) for layout in config.layers),
        ignored=config.ignored,
        extra={
            "borrowed": ownership.borrowed,
            "first_row": config.first_row,
            "mask_token_id": parts.mask_id,
            "proposed_ids": parts.vocabulary.limit,
            "sources": dict(config.sources),
        },
    )
