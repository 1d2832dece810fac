"""The DFlash backbone as modules: features to context K/V, a block of embeddings to hidden states.

Knows weights and one layer's arithmetic; which rows are a proposal, and whose head reads them, is not its business.
Parameter names are the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from .config import DraftConfig
from .context import LayerContext
from .layout import LayerLayout
from .rope import Rotary

Masks = Callable[[LayerLayout, int, int], "mx.array | str | None"]
"""``(layout, context rows, block rows)`` -> what :func:`mlx_dflash.drafts.context.visibility` says, memoised."""


class Attention(nn.Module):
    """Grouped attention of block rows over the context and the block; keys and values are never repeated a head."""

    def __init__(self, config: DraftConfig, layout: LayerLayout) -> None:
        super().__init__()
        hidden, width, bias = config.hidden_size, config.head_dim, config.attention_bias
        self._heads, self._kv_heads, self._width = config.num_heads, config.num_kv_heads, width
        self._layout, self._rotary = layout, Rotary(layout.rope)
        self._scale = width**-0.5 * layout.rope.amplitude**2
        self._value_scale = config.value_scale
        self.q_proj = nn.Linear(hidden, self._heads * width, bias=bias)
        self.k_proj = nn.Linear(hidden, self._kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(hidden, self._kv_heads * width, bias=bias)
        self.o_proj = nn.Linear(self._heads * width, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self._sinks = config.attention_sinks
        if self._sinks:
            self.attention_sink_bias = mx.zeros((self._heads,))

    def keys_values(self, x: mx.array, position: int) -> tuple[mx.array, mx.array]:
        """``x [1, rows, H]`` from ``position`` on -> rotated K and plain V, ``[1, kv heads, rows, head_dim]``."""
        keys = self._rotary(self.k_norm(self._split(self.k_proj(x), self._kv_heads)).swapaxes(1, 2), position)
        values = self._split(self.v_proj(x), self._kv_heads).swapaxes(1, 2)
        return keys, values if self._value_scale == 1.0 else values * self._value_scale

    def __call__(self, x: mx.array, context: LayerContext, masks: Masks, position: int) -> mx.array:
        """``x [1, rows, H]``, the normed block whose anchor sits at ``position`` -> ``[1, rows, H]``."""
        return self.o_proj(self.heads(x, context, masks, position))

    def heads(self, x: mx.array, context: LayerContext, masks: Masks, position: int) -> mx.array:
        """``[1, rows, heads * head_dim]``, before the output projection."""
        rows = x.shape[1]
        queries = self._rotary(self.q_norm(self._split(self.q_proj(x), self._heads)).swapaxes(1, 2), position)
        keys, values, seen = context.with_block(*self.keys_values(x, position))
        mixed = mx.fast.scaled_dot_product_attention(
            queries,
            keys,
            values,
            scale=self._scale,
            mask=masks(self._layout, seen, rows),
            sinks=self.attention_sink_bias if self._sinks else None,
        )
        return mixed.swapaxes(1, 2).reshape(1, rows, -1)

    def _split(self, x: mx.array, heads: int) -> mx.array:
        return x.reshape(1, x.shape[1], heads, self._width)


class MLP(nn.Module):
    """Gated SiLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: DraftConfig, layout: LayerLayout) -> None:
        super().__init__()
        self.self_attn = Attention(config, layout)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def keys_values(self, fused: mx.array, position: int) -> tuple[mx.array, mx.array]:
        """This layer's context rows ``[1, kv heads, rows, head_dim]`` of fused features from ``position`` on, which are
        not normed again."""
        return self.self_attn.keys_values(fused, position)

    def __call__(self, x: mx.array, context: LayerContext, masks: Masks, position: int) -> mx.array:
        """``x [1, rows, H]``, the block whose anchor sits at ``position`` -> ``[1, rows, H]``."""
        x = x + self.self_attn(self.input_layernorm(x), context, masks, position)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """The draft's layers between features and hidden states, and its own table and head where it has them."""

    def __init__(
        self,
        config: DraftConfig,
        *,
        embedding_rows: int | None,
        head_rows: int | None,
        layer: Callable[[DraftConfig, LayerLayout], nn.Module] = Layer,
    ) -> None:
        """``embedding_rows`` and ``head_rows`` are ``None`` for what the target lends. ``layer`` makes one layer, with
        the calls of :class:`Layer`."""
        super().__init__()
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.tap_layers) * config.target_hidden_size, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.layers = [layer(config, layout) for layout in config.layers]
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        if embedding_rows is not None:
            self.embed_tokens = nn.Embedding(embedding_rows, hidden)
        if head_rows is not None:
            self.lm_head = nn.Linear(hidden, head_rows, bias=False)

    def fuse(self, features: mx.array) -> mx.array:
        """``[1, rows, T * H_target]`` -> ``[1, rows, H]``: what every layer's context K/V are projected from."""
        return self.hidden_norm(self.fc(features))

    def __call__(self, x: mx.array, contexts: list[LayerContext], masks: Masks, position: int) -> mx.array:
        """``x [1, rows, H]``, the block's embeddings -> ``[1, rows, H]`` after the final norm."""
        for layer, context in zip(self.layers, contexts, strict=True):
            x = layer(x, context, masks, position)
        return self.norm(x)
