"""LiLiCorr's encoder: all candidates of all slots attend to each other, and every pair of neighbours gets a score.

Knows arrays only. Letters: ``L`` slots, ``K`` candidates a slot, ``h`` the encoder's width, ``f`` the width of the
vectors whose products are the scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

_FEATURES = 5


@dataclass(frozen=True)
class LatticeShape:
    """The ``lilicorr_*`` keys of a config.

    Attributes:
        width: ``h``.
        inner: of the MLPs.
        factor: ``f``.
        vector_eps: keeps the length of a vector from zero.
        scale: what the products are multiplied with.
        projected: token embeddings go through a projection; otherwise they have the encoder's width.
    """

    top_k: int
    width: int
    layers: int
    heads: int
    inner: int
    factor: int
    vector_eps: float
    scale: float
    projected: bool


class LatticeMLP(nn.Module):
    """SiLU between two linear layers with biases."""

    def __init__(self, given: int, inner: int, width: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(given, inner)
        self.down_proj = nn.Linear(inner, width)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.up_proj(x)))


class LatticeAttention(nn.Module):
    """Multi-head attention among all candidates, under torch's parameter names.

    Attributes:
        in_proj_weight, in_proj_bias: ``[3 h, h]`` and ``[3 h]``: queries, keys, values below each other.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.in_proj_weight = mx.zeros((3 * width, width))
        self.in_proj_bias = mx.zeros((3 * width,))
        self.out_proj = nn.Linear(width, width)

    def __call__(self, x: mx.array, bias: mx.array) -> mx.array:
        """``x [1, L K, h]``, ``bias [heads, L K, L K]`` added to the attention logits -> ``[1, L K, h]``."""
        rows, width = x.shape[1:]
        parts = (x @ self.in_proj_weight.T + self.in_proj_bias).reshape(1, rows, 3, self._heads, -1)
        queries, keys, values = (parts[:, :, part].swapaxes(1, 2) for part in range(3))
        scale = (width // self._heads) ** -0.5
        mixed = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=bias[None])
        return self.out_proj(mixed.swapaxes(1, 2).reshape(1, rows, width))


class LatticeLayer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, shape: LatticeShape, eps: float) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(shape.width, eps=eps)
        self.attn = LatticeAttention(shape.width, shape.heads)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=eps)
        self.mlp = LatticeMLP(shape.width, shape.inner, shape.width)

    def __call__(self, x: mx.array, bias: mx.array) -> mx.array:
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


class Lattice(nn.Module):
    """Candidates with their probabilities -> a score of each first candidate, and of each pair of neighbours."""

    def __init__(self, hidden: int, block_size: int, eps: float, shape: LatticeShape) -> None:
        super().__init__()
        self._shape, slots, width = shape, block_size - 1, shape.width
        if shape.projected:
            self.token_proj = nn.Linear(hidden, width)
        self.pass_hidden_proj = nn.Linear(hidden, width)
        self.feature_norm = nn.LayerNorm(_FEATURES)
        self.feature_mlp = LatticeMLP(_FEATURES, width, width)
        self.slot_embedding = mx.zeros((1, 1, slots, 1, width))
        self.rank_embedding = mx.zeros((1, 1, 1, shape.top_k, width))
        self.relative_slot_bias = mx.zeros((shape.heads, 2 * block_size - 1))
        self.same_slot_bias = mx.zeros((shape.heads,))
        self.context_proj = nn.Linear(hidden, width)
        self.layers = [LatticeLayer(shape, eps) for _ in range(shape.layers)]
        self.output_norm = nn.RMSNorm(width, eps=eps)
        self.anchor_norm = nn.RMSNorm(width, eps=eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head = nn.Linear(width, shape.factor)
        self.in_head = nn.Linear(width, shape.factor)
        self.anchor_out_head = nn.Linear(width, shape.factor)

    def __call__(
        self, hidden: mx.array, embedded: mx.array, log_probs: mx.array, fused: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """
        Args:
            hidden: ``[L, H]``, the backbone's normed rows.
            embedded: ``[L, K, H]``, the candidates' embeddings.
            log_probs: ``[L, K]`` float32, largest first.
            fused: ``[1, 1, H]``, the fused feature of the newest committed position; ``None`` when there is none.

        Returns:
            ``[K]`` and ``[L - 1, K, K]`` float32.
        """
        slots, count = log_probs.shape
        state = self._states(hidden, embedded, log_probs).reshape(1, slots * count, -1)
        bias = self._bias(slots, count)
        for layer in self.layers:
            state = layer(state, bias)
        state = self.output_norm(state).reshape(slots, count, -1)
        anchor = self._anchor(fused, state.dtype)
        joined = mx.concatenate([state, mx.broadcast_to(anchor, state.shape), state * anchor], axis=-1)
        factors = nn.silu(self.factor_input_proj(joined))
        out, into = self._unit(self.out_head(factors)), self._unit(self.in_head(factors))
        first = self._unit(self.anchor_out_head(anchor))
        scale = self._shape.scale
        return scale * (into[0] @ first), scale * (out[:-1] @ into[1:].swapaxes(-1, -2))

    def _states(self, hidden: mx.array, embedded: mx.array, log_probs: mx.array) -> mx.array:
        """``[L, K, h]`` before the first layer."""
        shape = self._shape
        tokens = self.token_proj(embedded) if shape.projected else embedded
        rank = mx.broadcast_to(mx.arange(shape.top_k) / (shape.top_k - 1), log_probs.shape)
        features = mx.stack(
            [log_probs, mx.exp(log_probs), log_probs - log_probs[:, :1], rank, (rank == 0).astype(mx.float32)], axis=-1
        ).astype(hidden.dtype)
        state = tokens + self.pass_hidden_proj(hidden)[:, None] + self.feature_mlp(self.feature_norm(features))
        return state + self.slot_embedding[0, 0] + self.rank_embedding[0, 0]

    def _bias(self, slots: int, count: int) -> mx.array:
        """``[heads, L K, L K]``: by how far apart two slots are, and more where they are the same."""
        slot = mx.repeat(mx.arange(slots), count)
        apart = slot[:, None] - slot[None]
        middle = self.relative_slot_bias.shape[1] // 2
        bias = self.relative_slot_bias[:, apart + middle]
        return bias + self.same_slot_bias[:, None, None] * (apart == 0).astype(bias.dtype)

    def _anchor(self, fused: mx.array | None, dtype: mx.Dtype) -> mx.array:
        """``[h]``; zero without a committed position."""
        if fused is None:
            return mx.zeros((self._shape.width,), dtype)
        return self.anchor_norm(self.context_proj(fused[0, 0]))

    def _unit(self, x: mx.array) -> mx.array:
        x = x.astype(mx.float32)
        length = mx.sqrt((x * x).sum(axis=-1, keepdims=True))
        return x / mx.maximum(length, self._shape.vector_eps)
