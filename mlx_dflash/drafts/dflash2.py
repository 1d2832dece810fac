"""DFlash 2: convolutions in the backbone, and a selector that decides each slot among candidates by its predecessor.

Sources: z-lab/dflash (``dflash/model.py``), vllm-project/speculators pull request 1006 for its dialect.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ..errors import UnsupportedError
from .backbone import Backbone
from .base import DraftSampler, Proposal, TargetFacts, TargetMemory
from .block import BlockDraft, BlockSession
from .candidates import best
from .checkpoint import DraftFolder
from .config import DraftConfig, open_keys, parse_config
from .convolution import KEEP_FLOAT, ConvolvedLayer, Kernel, read_kernel
from .families import Family, Signs
from .head import Ownership
from .keys import ConfigKeys, nested
from .loading import LoadOptions, load_parts


@dataclass(frozen=True)
class SelectorShape:
    """``selector_rank`` and ``selector_top_k``; ``rows`` of the codebooks, which are indexed by target ids."""

    rank: int
    top_k: int
    rows: int


class Selector(nn.Module):
    """Scores a candidate by what came before it.

    Attributes:
        predecessor_codebook, successor_codebook: ``[V, rank]``.
        hidden_projection: ``[rank, H]``.
    """

    def __init__(self, hidden: int, shape: SelectorShape) -> None:
        super().__init__()
        self.rows = shape.rows
        self.predecessor_codebook = mx.zeros((shape.rows, shape.rank))
        self.successor_codebook = mx.zeros((shape.rows, shape.rank))
        self.hidden_projection = nn.Linear(hidden, shape.rank, bias=False)

    def gates(self, hidden: mx.array) -> mx.array:
        """``[n, H]`` -> ``[n, rank]`` float32."""
        return self.hidden_projection(hidden).astype(mx.float32)

    def transition(self, previous: mx.array, gate: mx.array, candidates: mx.array) -> mx.array:
        """Ids ``[1]`` and ``[k]``, gate ``[rank]`` -> ``sum_r P[previous, r] gate[r] S[candidate, r]``, ``[k]``
        float32."""
        # Only padding ids can lie outside the codebooks; MLX would read whatever is there.
        before = self.predecessor_codebook[mx.minimum(previous, self.rows - 1)].astype(mx.float32) * gate
        return (before @ self.successor_codebook[candidates].astype(mx.float32).T)[0]


class SelectorBackbone(Backbone):
    """Backbone, convolutions and selector."""

    def __init__(self, config: DraftConfig, ownership: Ownership, kernel: Kernel, shape: SelectorShape) -> None:
        super().__init__(
            config,
            embedding_rows=ownership.own_embedding_rows,
            head_rows=ownership.own_head_rows,
            layer=lambda config, layout: ConvolvedLayer(config, layout, kernel),
        )
        self.candidate_selector = Selector(config.hidden_size, shape)


class DFlash2Draft(BlockDraft):
    """Satisfies :class:`mlx_dflash.drafts.base.Draft`."""

    family = "dflash2"
    top_k: int

    def open(self, target: TargetFacts, position: int = 0, memory: TargetMemory | None = None) -> DFlash2Session:
        return DFlash2Session(self, target, position)


class DFlash2Session(BlockSession):
    """One sequence."""

    draft: DFlash2Draft

    def choose(self, hidden: mx.array, anchor: mx.array, depth: int, sampler: DraftSampler | None) -> Proposal:
        """Slot after slot: the logit of a candidate plus its transition from the token just chosen."""
        backbone = self.draft.backbone
        assert isinstance(backbone, SelectorBackbone)
        selector = backbone.candidate_selector
        hidden = hidden[:depth]
        # What the codebooks have no row for cannot be scored.
        raw = self.raw_logits(hidden)[:, : selector.rows]
        candidates, values = best(raw, self.draft.top_k)
        unary, gates = self.draft.shape_logits(values), selector.gates(hidden)
        previous, tokens, probs = anchor, [], []
        finite = mx.isfinite(raw).all()
        for slot in range(depth):
            scores = (unary[slot] + selector.transition(previous, gates[slot], candidates[slot]))[None]
            finite = finite & mx.isfinite(scores).all()
            if sampler is None:
                place = mx.argmax(scores, axis=-1)
            else:
                place, q = sampler(scores)
                probs.append(q)
            previous = candidates[slot][place]
            tokens.append(previous)
        chosen = mx.concatenate(tokens)
        if sampler is None:
            return Proposal(chosen, finite=finite)
        return Proposal(chosen, probs=mx.concatenate(probs), candidates=candidates, finite=finite)


def load(folder: DraftFolder, target: TargetFacts, options: LoadOptions) -> DFlash2Draft:
    """Load a folder that was recognised as DFlash 2; raises as :func:`mlx_dflash.drafts.registry.load_draft`."""
    config = parse_config(folder.config_file, folder.config, target_layers=target.num_layers, record=folder.record)
    keys = open_keys(folder.config_file, folder.config, folder.record)
    kernel, shape = read_kernel(keys, config.hidden_size), _selector_shape(keys, folder, config, target)
    parts = load_parts(
        folder,
        config,
        target,
        options,
        build=lambda ownership: SelectorBackbone(config, ownership, kernel, shape),
        keep_float=(*KEEP_FLOAT, "candidate_selector"),
    )
    if parts.vocabulary.ids is not None:
        raise UnsupportedError(
            f"{folder.path}: d2t: found a reduced vocabulary, expected a full one: the selector's codebooks are "
            "indexed by target ids"
        )
    proposed = min(parts.vocabulary.limit, shape.rows)
    if shape.top_k > proposed:
        raise keys.wrong(keys.sources["selector_top_k"], shape.top_k, f"at most the {proposed} ids that are proposed")
    draft = DFlash2Draft(config, parts, folder)
    draft.top_k = shape.top_k
    return draft


def _selector_shape(keys: ConfigKeys, folder: DraftFolder, config: DraftConfig, target: TargetFacts) -> SelectorShape:
    rank = keys.size("selector_rank", nested("selector_rank"))
    top_k = keys.size("selector_top_k", nested("selector_top_k"))
    return SelectorShape(rank, top_k, config.vocab_size or target.vocab_size)


FAMILY = Family(
    "dflash2",
    Signs(
        architectures=("DFlash2DraftModel", "DFlash2Speculator"),
        projectors=("dflash2",),
        speculators=("dflash2",),
        tensors=(r"candidate_selector\.",),
    ),
    load,
)
