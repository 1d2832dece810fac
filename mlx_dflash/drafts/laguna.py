"""Laguna: a causal, sliding DFlash draft with gated heads, which norms each tap before and the context after fusing.

Sources: sgl-project/sglang and vllm-project/vllm (``DFlashLagunaForCausalLM``). Implementations differ in whether the
context passes a layer's own input norm; here it does, as in these two.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..errors import UnsupportedError
from .backbone import Attention, Backbone, Layer, Masks
from .base import TargetFacts
from .block import BlockDraft
from .checkpoint import DraftFolder
from .config import DraftConfig, open_keys, parse_config
from .context import LayerContext
from .families import Family, Signs
from .head import Ownership
from .keys import ConfigKeys, nested
from .layout import LayerLayout, read_layout
from .loading import LoadOptions, load_parts


class GatedAttention(Attention):
    """Attention whose heads are each multiplied with ``softplus(g_proj(x))`` of their row.

    Attributes:
        g_proj: ``[heads, H]``.
    """

    def __init__(self, config: DraftConfig, layout: LayerLayout) -> None:
        super().__init__(config, layout)
        self.g_proj = nn.Linear(config.hidden_size, config.num_heads, bias=False)

    def __call__(self, x: mx.array, context: LayerContext, masks: Masks, position: int) -> mx.array:
        gates = nn.softplus(self.g_proj(x).astype(mx.float32)).astype(x.dtype)
        heads = self._split(self.heads(x, context, masks, position), self._heads)
        return self.o_proj((heads * gates[..., None]).reshape(1, x.shape[1], -1))


class LagunaLayer(Layer):
    """A backbone layer with gated heads, whose context may pass its input norm, too."""

    def __init__(self, config: DraftConfig, layout: LayerLayout, norms_context: bool) -> None:
        super().__init__(config, layout)
        self.self_attn = GatedAttention(config, layout)
        self._norms_context = norms_context

    def keys_values(self, fused: mx.array, position: int) -> tuple[mx.array, mx.array]:
        return super().keys_values(self.input_layernorm(fused) if self._norms_context else fused, position)


class LagunaBackbone(Backbone):
    """Backbone with a norm for every tap.

    Attributes:
        aux_hidden_norms: one a tap, in the order of the features.
    """

    def __init__(self, config: DraftConfig, ownership: Ownership, norms_context: bool) -> None:
        super().__init__(
            config,
            embedding_rows=ownership.own_embedding_rows,
            head_rows=ownership.own_head_rows,
            layer=lambda config, layout: LagunaLayer(config, layout, norms_context),
        )
        width, eps = config.target_hidden_size, config.rms_norm_eps
        self.aux_hidden_norms = [nn.RMSNorm(width, eps=eps) for _ in config.tap_layers]

    def fuse(self, features: mx.array) -> mx.array:
        taps = mx.split(features, len(self.aux_hidden_norms), axis=-1)
        normed = [norm(tap) for norm, tap in zip(self.aux_hidden_norms, taps, strict=True)]
        return super().fuse(mx.concatenate(normed, axis=-1))


class LagunaDraft(BlockDraft):
    """Satisfies :class:`mlx_dflash.drafts.base.Draft`."""

    family = "laguna"


def load(folder: DraftFolder, target: TargetFacts, options: LoadOptions) -> LagunaDraft:
    """Load a folder that was recognised as Laguna's; raises as :func:`mlx_dflash.drafts.registry.load_draft`."""
    config = parse_config(
        folder.config_file, folder.config, target_layers=target.num_layers, record=folder.record, layout=_layout
    )
    keys = open_keys(folder.config_file, folder.config, folder.record)
    _check_gating(keys)
    norms_context = _norms_context(keys)
    parts = load_parts(
        folder,
        config,
        target,
        options,
        build=lambda ownership: LagunaBackbone(config, ownership, norms_context),
        keep_float=("g_proj",),
    )
    return LagunaDraft(config, parts, folder)


def _layout(keys: ConfigKeys, layers: int, head_dim: int, *, speculators: bool) -> tuple[LayerLayout, ...]:
    if keys.find("layer_types", ("layer_types",)) is None:
        raise keys.missing("layer_types", ["layer_types"], "a list: published drafts are sliding throughout")
    return read_layout(keys, layers, head_dim, speculators=speculators, causal=True)


def _check_gating(keys: ConfigKeys) -> None:
    found = keys.find("gating", ("gating",))
    if found is not None and found[0] != "per-head":
        raise UnsupportedError(f"{keys.file}: {found[1]}: found {found[0]!r}, expected 'per-head'")


def _norms_context(keys: ConfigKeys) -> bool:
    """Whether context rows pass a layer's input norm before their keys and values are made of them. No published
    config says it; a key (or an override) of llama.cpp's name does."""
    stated = keys.boolean("context_kv_layer_norm", nested("context_kv_layer_norm"))
    if stated is None:
        keys.derived("context_kv_layer_norm", True, "absent: what this family does")
        return True
    return stated


FAMILY = Family(
    "laguna",
    # Its model_type is the target's own, too, and says nothing.
    Signs(architectures=("DFlashLagunaForCausalLM",), tensors=(r"aux_hidden_norms\.",)),
    load,
)
