"""Domino: a DFlash backbone whose logits are corrected slot after slot by a small recurrent net over the chosen tokens.

Sources: sgl-project/SpecForge (``specforge/modeling/draft/domino.py``), NVIDIA/Model-Optimizer for its export.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn

from ..errors import UnsupportedError
from .backbone import Backbone
from .base import DraftSampler, Proposal, TargetFacts, TargetMemory
from .block import BlockDraft, BlockSession
from .checkpoint import DraftFolder
from .config import DraftConfig, open_keys, parse_config
from .families import Family, Signs
from .head import Ownership
from .keys import ConfigKeys, nested
from .loading import LoadOptions, load_parts


@dataclass(frozen=True)
class CorrectionShape:
    """``gru_hidden_dim``, ``emb_dim``, and ``pure_draft_prefix_len``: how many slots are left as the head gave them;
    ``rows`` of vocabulary that a correction is computed for."""

    state: int
    inner: int
    uncorrected: int
    rows: int


class PrefixGRU(nn.Module):
    """A gated recurrent unit without biases, in the layout of PyTorch.

    Attributes:
        weight_ih_l0: ``[3 state, H]``, the input's share of the reset, update and new gates, in this order.
        weight_hh_l0: ``[3 state, state]``, the state's share.
    """

    def __init__(self, hidden: int, state: int) -> None:
        super().__init__()
        self.weight_ih_l0 = mx.zeros((3 * state, hidden))
        self.weight_hh_l0 = mx.zeros((3 * state, state))

    def __call__(self, x: mx.array, state: mx.array | None) -> mx.array:
        """``x [1, H]`` and the state before it (``None`` for zeros) -> the state after it, ``[1, state]``."""
        if state is None:
            state = mx.zeros((1, self.weight_hh_l0.shape[1]), x.dtype)
        given = mx.split(x @ self.weight_ih_l0.T, 3, axis=-1)
        kept = mx.split(state @ self.weight_hh_l0.T, 3, axis=-1)
        reset, update = mx.sigmoid(given[0] + kept[0]), mx.sigmoid(given[1] + kept[1])
        new = mx.tanh(given[2] + reset * kept[2])
        return (1 - update) * new + update * state


class DominoBackbone(Backbone):
    """Backbone and the net that corrects its logits."""

    def __init__(self, config: DraftConfig, ownership: Ownership, shape: CorrectionShape) -> None:
        super().__init__(config, embedding_rows=ownership.own_embedding_rows, head_rows=ownership.own_head_rows)
        hidden = config.hidden_size
        self.prefix_gru = PrefixGRU(hidden, shape.state)
        # A list, so that the parameters are called as in the checkpoint.
        self.embed_proj = [
            nn.Linear(hidden + shape.state, shape.inner, bias=False),
            nn.SiLU(),
            nn.Linear(shape.inner, shape.rows, bias=False),
        ]

    def correction(self, hidden: mx.array, state: mx.array) -> mx.array:
        """``[1, H]`` of a row and ``[1, state]`` -> what is added to the row's logits, ``[1, rows]`` float32."""
        x = mx.concatenate([hidden, state], axis=-1)
        for layer in self.embed_proj:
            x = layer(x)
        return x.astype(mx.float32)


class DominoDraft(BlockDraft):
    """Satisfies :class:`mlx_dflash.drafts.base.Draft`."""

    family = "domino"
    shape: CorrectionShape

    def open(self, target: TargetFacts, position: int = 0, memory: TargetMemory | None = None) -> DominoSession:
        return DominoSession(self, target, position)


class DominoSession(BlockSession):
    """One sequence."""

    draft: DominoDraft

    def choose(self, hidden: mx.array, anchor: mx.array, depth: int, sampler: DraftSampler | None) -> Proposal:
        """Slot after slot: a row's logits, corrected by the anchor and the tokens chosen before this slot.

        Whichever row proposes a slot, the state it meets has seen the anchor and the slots before; see the two
        conventions of ``shift_label``.
        """
        draft, vocabulary, shape = self.draft, self.draft.parts.vocabulary, self.draft.shape
        backbone = draft.backbone
        assert isinstance(backbone, DominoBackbone)
        hidden = hidden[:depth]
        raw = self.raw_logits(hidden)[:, : shape.rows]
        base, finite = draft.shape_logits(raw), mx.isfinite(raw).all()
        state, previous = None, anchor.astype(mx.int32)
        tokens, probs = [], []
        for slot in range(depth):
            state = backbone.prefix_gru(draft.embed(previous, self.target), state)
            logits = base[slot : slot + 1]
            if slot >= shape.uncorrected:
                logits = logits + backbone.correction(hidden[slot : slot + 1], state)[:, : raw.shape[1]]
                finite = finite & mx.isfinite(logits).all()
            if sampler is None:
                previous = mx.argmax(logits, axis=-1).astype(mx.int32)
            else:
                previous, q = sampler(logits)
                probs.append(vocabulary.spread(q))
            tokens.append(previous)
        chosen = vocabulary.to_target(mx.concatenate(tokens))
        return Proposal(chosen, probs=mx.concatenate(probs) if probs else None, finite=finite)


def load(folder: DraftFolder, target: TargetFacts, options: LoadOptions) -> DominoDraft:
    """Load a folder that was recognised as Domino; raises as :func:`mlx_dflash.drafts.registry.load_draft`."""
    folder = folder.renamed(lambda name: re.sub(r"^logit_head\.", "", name))
    keys = open_keys(folder.config_file, folder.config, folder.record)
    shifted = _shifted(keys)
    config = parse_config(
        folder.config_file,
        folder.config,
        target_layers=target.num_layers,
        record=folder.record,
        first_row=0 if shifted else 1,
    )
    shape = _correction_shape(keys, config, target)
    parts = load_parts(
        folder, config, target, options, build=lambda ownership: DominoBackbone(config, ownership, shape)
    )
    if parts.vocabulary.ids is not None:
        raise UnsupportedError(
            f"{folder.path}: d2t: found a reduced vocabulary, expected a full one: the correction is over target ids"
        )
    draft = DominoDraft(config, parts, folder)
    draft.shape = shape
    # The publisher's own decoding never proposes from the block's last row, in either convention.
    draft.max_depth = config.block_size - 1
    draft.report = replace(draft.report, max_depth=draft.max_depth)
    return draft


def _shifted(keys: ConfigKeys) -> bool:
    """Whether a row predicts the token after its own. Required: one publisher's default is no, another's yes."""
    shifted = keys.boolean("shift_label", nested("shift_label"))
    if shifted is None:
        raise keys.missing("shift_label", nested("shift_label"), "true (predict-next) or false (predict-at)")
    return shifted


def _correction_shape(keys: ConfigKeys, config: DraftConfig, target: TargetFacts) -> CorrectionShape:
    places = nested("pure_draft_prefix_len")
    uncorrected = keys.integer("pure_draft_prefix_len", places, 0)
    assert uncorrected is not None
    if uncorrected >= config.block_size:
        raise keys.wrong(
            keys.sources["pure_draft_prefix_len"], uncorrected, f"less than block_size ({config.block_size})"
        )
    return CorrectionShape(
        state=keys.size("gru_hidden_dim", nested("gru_hidden_dim")),
        inner=keys.size("emb_dim", nested("emb_dim")),
        uncorrected=uncorrected,
        rows=config.vocab_size or target.vocab_size,
    )


FAMILY = Family(
    "domino",
    Signs(
        architectures=("DominoDraftModel",),
        projectors=("domino",),
        tensors=(r"(logit_head\.)?prefix_gru\.", r"(logit_head\.)?embed_proj\."),
    ),
    load,
)
