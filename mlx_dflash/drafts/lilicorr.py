"""LiLiCorr: a small transformer scores all candidates of a block against each other; the best path is drafted.

Sources: arXiv 2608.20530; sgl-project/sglang pull request 37462, NVIDIA/Model-Optimizer pull request 2342 (keys).
The lattice has a learned place for every slot of the trained block, so it is computed whole and the proposal cut
afterwards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import mlx.core as mx

from ..errors import UnsupportedError
from .backbone import Backbone, Layer
from .base import DraftSampler, Proposal, TargetFacts, TargetMemory
from .block import BlockDraft, BlockSession
from .candidates import best
from .checkpoint import DraftFolder
from .config import DraftConfig, open_keys, parse_config
from .convolution import KEEP_FLOAT, ConvolvedLayer, Kernel, read_kernel
from .families import Family, Signs
from .head import Ownership
from .keys import ConfigKeys, nested
from .lattice import Lattice, LatticeShape
from .loading import LoadOptions, load_parts


class LatticeBackbone(Backbone):
    """Backbone, with convolutions where the config has them, and the lattice's encoder."""

    def __init__(self, config: DraftConfig, ownership: Ownership, kernel: Kernel | None, shape: LatticeShape) -> None:
        super().__init__(
            config,
            embedding_rows=ownership.own_embedding_rows,
            head_rows=ownership.own_head_rows,
            layer=Layer if kernel is None else lambda config, layout: ConvolvedLayer(config, layout, kernel),
        )
        self.lilicorr = Lattice(config.hidden_size, config.block_size, config.rms_norm_eps, shape)


@dataclass(frozen=True)
class Scores:
    """A block's lattice; ``L`` slots of ``K`` candidates.

    Attributes:
        candidates: ``[L, K]`` int32 target ids, most probable first.
        log_probs: ``[L, K]`` float32, over the whole vocabulary.
        start: ``[K]`` float32, of the first slot's candidates.
        pairs: ``[L - 1, K, K]`` float32, of a slot's candidate (rows) with the next slot's.
        finite: scalar bool.
    """

    candidates: mx.array
    log_probs: mx.array
    start: mx.array
    pairs: mx.array
    finite: mx.array


class LiLiCorrDraft(BlockDraft):
    """Satisfies :class:`mlx_dflash.drafts.base.Draft`."""

    family = "lilicorr"
    top_k: int

    def open(self, target: TargetFacts, position: int = 0, memory: TargetMemory | None = None) -> LiLiCorrSession:
        return LiLiCorrSession(self, target, position)

    def block_rows(self, depth: int) -> int:
        """Always the trained block."""
        return self.block_size


class LiLiCorrSession(BlockSession):
    """One sequence."""

    draft: LiLiCorrDraft

    def choose(self, hidden: mx.array, anchor: mx.array, depth: int, sampler: DraftSampler | None) -> Proposal:
        """Slot after slot along the lattice: a candidate given the one just chosen."""
        scores = self.scores(hidden)
        row, tokens, probs = scores.start[None], [], []
        for slot in range(depth):
            if sampler is None:
                place = mx.argmax(row, axis=-1)
            else:
                place, q = sampler(row)
                probs.append(q)
            tokens.append(scores.candidates[slot][place])
            if slot + 1 < depth:
                row = scores.pairs[slot][place]
        chosen = mx.concatenate(tokens)
        if sampler is None:
            return Proposal(chosen, finite=scores.finite)
        candidates = scores.candidates[:depth]
        return Proposal(chosen, probs=mx.concatenate(probs), candidates=candidates, finite=scores.finite)

    def scores(self, hidden: mx.array) -> Scores:
        """``[L, H]`` normed rows -> the whole lattice."""
        draft, backbone = self.draft, self.draft.backbone
        assert isinstance(backbone, LatticeBackbone)
        raw = self.raw_logits(hidden)
        candidates, values = best(raw, draft.top_k)
        log_probs = values - mx.logsumexp(raw, axis=-1, keepdims=True)
        start, pairs = backbone.lilicorr(hidden, draft.embed(candidates, self.target), log_probs, self.last_fused)
        finite = mx.isfinite(raw).all() & mx.isfinite(start).all() & mx.isfinite(pairs).all()
        return Scores(candidates, log_probs, start, pairs, finite)


def load(folder: DraftFolder, target: TargetFacts, options: LoadOptions) -> LiLiCorrDraft:
    """Load a folder that was recognised as LiLiCorr; raises as :func:`mlx_dflash.drafts.registry.load_draft`."""
    folder = folder.renamed(_renamed)
    config = parse_config(folder.config_file, folder.config, target_layers=target.num_layers, record=folder.record)
    keys = open_keys(folder.config_file, folder.config, folder.record)
    shape = _lattice_shape(keys, folder, config)
    kernel = read_kernel(keys, config.hidden_size) if _convolved(keys) else None
    parts = load_parts(
        folder,
        config,
        target,
        options,
        build=lambda ownership: LatticeBackbone(config, ownership, kernel, shape),
        keep_float=(*KEEP_FLOAT, "lilicorr"),
    )
    if parts.vocabulary.ids is not None:
        raise UnsupportedError(
            f"{folder.path}: d2t: found a reduced vocabulary, expected a full one: the lattice embeds target ids"
        )
    if shape.top_k > parts.vocabulary.limit:
        raise keys.wrong(
            keys.sources["lilicorr_candidate_topk"],
            shape.top_k,
            f"at most the {parts.vocabulary.limit} ids that are proposed",
        )
    draft = LiLiCorrDraft(config, parts, folder)
    draft.top_k = shape.top_k
    return draft


_SPELLINGS = (
    (re.compile(r"^(lilicorr)\.feature_mlp\.0\."), r"\1.feature_norm."),
    (re.compile(r"^(lilicorr)\.feature_mlp\.1\."), r"\1.feature_mlp.up_proj."),
    (re.compile(r"^(lilicorr)\.feature_mlp\.3\."), r"\1.feature_mlp.down_proj."),
    (re.compile(r"^(lilicorr\.layers\.\d+\.mlp)\.0\."), r"\1.up_proj."),
    (re.compile(r"^(lilicorr\.layers\.\d+\.mlp)\.2\."), r"\1.down_proj."),
)
"""Training code numbers the modules of a sequence; servers name them."""


def _renamed(name: str) -> str:
    for pattern, replacement in _SPELLINGS:
        name = pattern.sub(replacement, name)
    return name


def _convolved(keys: ConfigKeys) -> bool:
    return any(keys.at(place) is not None for name in ("conv_kernel_size", "conv_group_size") for place in nested(name))


def _lattice_shape(keys: ConfigKeys, folder: DraftFolder, config: DraftConfig) -> LatticeShape:
    """Everything is required: implementations' defaults disagree."""
    if keys.boolean("lilicorr_enabled", nested("lilicorr_enabled")) is False:
        raise UnsupportedError(
            f"{keys.file}: {keys.sources['lilicorr_enabled']}: found false, expected true: without its lattice this "
            "draft is another one"
        )
    if config.first_row != 1:
        raise keys.wrong(keys.sources["first_row"], config.first_row, "1: the lattice has a slot for each mask row")

    def size(name: str) -> int:
        return keys.size(name, nested(name))

    top_k = size("lilicorr_candidate_topk")
    width = keys.integer("lilicorr_hidden_size", nested("lilicorr_hidden_size"), 0)
    assert width is not None
    width = width or config.hidden_size
    heads, inner = size("lilicorr_num_heads"), _inner_width(keys, width)
    if top_k not in (2, 4, 8, 16):
        raise keys.wrong(keys.sources["lilicorr_candidate_topk"], top_k, "a power of two from 2 to 16")
    if width % heads:
        raise keys.wrong(keys.sources["lilicorr_num_heads"], heads, f"a divisor of the lattice's width ({width})")
    return LatticeShape(
        top_k=top_k,
        width=width,
        layers=size("lilicorr_num_layers"),
        heads=heads,
        inner=inner,
        factor=size("lilicorr_factor_dim"),
        vector_eps=_number(keys, "lilicorr_vector_eps"),
        scale=_number(keys, "lilicorr_logit_scale"),
        projected="lilicorr.token_proj.weight" in folder.headers,
    )


def _inner_width(keys: ConfigKeys, width: int) -> int:
    """Inner width of the lattice's MLPs."""
    inner = int(width * _number(keys, "lilicorr_mlp_ratio"))
    if inner < 1:
        raise keys.wrong(keys.sources["lilicorr_mlp_ratio"], inner / width, "a ratio that leaves a width")
    return inner


def _number(keys: ConfigKeys, name: str) -> float:
    found = keys.number(name, nested(name))
    if found is None:
        raise keys.missing(name, nested(name), "a number above 0")
    return found


FAMILY = Family(
    "lilicorr",
    Signs(
        architectures=("LiLiCorrDraftModel",),
        projectors=("lilicorr",),
        tensors=(r"lilicorr\.",),
    ),
    load,
)
