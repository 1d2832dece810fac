"""Where an mlx-lm model keeps its embedding, decoder layers, last norm and head. Looks; never calls and never changes.

What is found here is a claim by name. ``probe.py`` proves it with a real forward before anything relies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from ..errors import UnsupportedError

_INNER = ("model", "language_model", "backbone", "transformer", "text_model")
_EMBEDDINGS = (
    "embed_tokens",
    "embeddings",
    "word_embeddings",
    "tok_embeddings",
    "token_embeddings",
    "wte",
    "embedding",
    "embed_in",
)
_LAYERS = ("layers", "h", "blocks")
_NORMS = ("norm", "norm_f", "ln_f", "final_layernorm", "final_layer_norm", "final_norm", "embedding_norm")
_HEADS = ("lm_head", "output", "embed_out")
_SCALES = ("embed_scale", "embedding_multiplier", "mup_embedding_multiplier")
_SCALED_BY_ROOT = frozenset({"gemma", "gemma2", "gemma3_text", "gemma3n"})
"""Families whose forward writes ``hidden_size ** 0.5`` out instead of keeping it in an attribute."""

SUPPORTED = (
    "llama, mistral3, llama4, qwen3, qwen3_moe, qwen3_5, qwen3_next, gemma, gemma2, gemma3, gemma4, gpt_oss, glm4_moe, "
    "deepseek_v3, minimax, nemotron_h, and other mlx-lm families with an embedding, a list of decoder layers, a final "
    "norm and a head"
)


@dataclass(frozen=True)
class Parts:
    """The modules of a target, as objects of the model itself (nothing is copied).

    Attributes:
        owner: the text model that holds ``inner`` and usually the head; ``inner`` itself when nothing holds it.
        inner: the module with the embedding, the layers and the last norm.
        head: the head module, or ``None`` when the embedding's table is the head too (``embedding.as_linear``).
        embed_scale: what the model's forward multiplies embedding rows with.
    """

    owner: nn.Module
    inner: nn.Module
    embedding: nn.Module
    layers: tuple[nn.Module, ...]
    norm: nn.Module
    head: nn.Module | None
    hidden_size: int
    vocab_size: int
    embed_scale: float

    @property
    def project(self) -> Callable[[mx.array], mx.array]:
        """``[..., H] -> [..., V]``, through the model's own module."""
        return self.embedding.as_linear if self.head is None else self.head

    def settings(self) -> Iterator[Any]:
        """The objects a family's own constants may sit on, nearest to the logits first."""
        for module in (self.owner, self.inner):
            yield module
            for name in ("args", "config"):
                args = getattr(module, name, None)
                if args is not None:
                    yield args
                    yield getattr(args, "text", None)


def model_type_of(model: nn.Module) -> str:
    found = getattr(model, "model_type", None)
    return found if isinstance(found, str) else type(model).__module__.rsplit(".", 1)[-1]


def sizes_of(model: nn.Module, parts: Parts | None) -> tuple[int, int, int]:
    """Width, layers and vocabulary: of the parts, else as the model's config states them, 0 where it does not."""
    if parts is not None:
        return parts.hidden_size, len(parts.layers), parts.vocab_size
    args = getattr(model, "args", None)
    text = getattr(args, "text_config", None)
    return (
        _stated((args, text), ("hidden_size", "hidden_dim", "d_model", "n_embd", "dim")),
        len(getattr(model, "layers", None) or ()) or _stated((args, text), ("num_hidden_layers", "num_layers")),
        _stated((args, text), ("vocab_size",)),
    )


def _stated(configs: Iterable[Any], names: tuple[str, ...]) -> int:
    for config in configs:
        for name in names:
            value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
            if type(value) is int and value > 0:
                return value
    return 0


def find_parts(model: nn.Module) -> Parts:
    """Find the parts of a text model, also inside the wrappers of multimodal checkpoints.

    Raises:
        UnsupportedError: with the model type, what was not found, and what is supported.
    """
    kind = model_type_of(model)
    nearest: list[str] = []
    candidates = _candidates(model)
    for first_owner, inner in candidates:
        embedding = _first_module(inner, _EMBEDDINGS)
        layers = _layer_list(inner)
        norm = _first_module(inner, _NORMS)
        found = {"embedding": embedding, "decoder layers": layers, "final norm": norm}
        missing = [name for name, part in found.items() if part is None]
        if embedding is None or layers is None or norm is None:
            if not nearest or len(missing) < len(nearest):
                nearest = missing
            continue
        _check_layers(kind, layers)
        rows, width = _table_size(kind, embedding)
        owner, head = _find_head(first_owner, inner, candidates)
        if head is None and not callable(getattr(embedding, "as_linear", None)):
            raise unsupported(kind, "head: found neither a head module nor an embedding that can serve as one")
        scale = _embed_scale(inner, width)
        return Parts(owner, inner, embedding, tuple(layers), norm, head, width, rows, scale)
    raise unsupported(
        kind, f"{' and '.join(nearest or ['inner text model'])}: not found where mlx-lm's families keep it"
    )


def unsupported(model_type: str, reason: str) -> UnsupportedError:
    """The one form in which a target is refused: the family, the reason, and what is supported."""
    return UnsupportedError(f"target model_type {model_type!r}: {reason} (supported: {SUPPORTED})")


def _candidates(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """``(owner, inner)`` pairs, outermost first, through the attribute names that wrappers use."""
    pairs = [(model, model)]
    seen = {(id(model), id(model))}
    for _, inner in pairs:  # grows while it is walked
        for name in _INNER:
            child = getattr(inner, name, None)
            if isinstance(child, nn.Module) and (id(inner), id(child)) not in seen:
                seen.add((id(inner), id(child)))
                pairs.append((inner, child))
    return pairs


def _find_head(
    first_owner: nn.Module, inner: nn.Module, candidates: list[tuple[nn.Module, nn.Module]]
) -> tuple[nn.Module, nn.Module | None]:
    """The head and the module it is on. Wrappers may lead to ``inner`` past its real owner (``kimi_k25`` does)."""
    for owner in [*(owner for owner, child in candidates if child is inner), inner]:
        head = _first_module(owner, _HEADS)
        if head is not None:
            return owner, head
    return first_owner, None


def _first_module(parent: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    for name in names:
        child = getattr(parent, name, None)
        # Not by truth value: a module is a dict, and one without parameters is an empty one.
        if isinstance(child, nn.Module):
            return child
    return None


def _layer_list(inner: nn.Module) -> list[Any] | None:
    for name in _LAYERS:
        layers = getattr(inner, name, None)
        if isinstance(layers, list) and layers and all(x is None or isinstance(x, nn.Module) for x in layers):
            return layers
    return None


def _check_layers(kind: str, layers: list[Any]) -> None:
    absent = [i for i, layer in enumerate(layers) if layer is None]
    if absent:
        raise unsupported(kind, f"layer {absent[0]}: found none, its layers are split over several machines (pipeline)")
    if len({id(layer) for layer in layers}) != len(layers):
        raise unsupported(kind, "one layer object stands at several places of the layer list, so a tap is ambiguous")


def _table_size(kind: str, embedding: nn.Module) -> tuple[int, int]:
    """Rows and width of the embedding table, also when it is quantised or carries an adapter."""
    base = getattr(embedding, "embedding", None)
    weight = getattr(embedding if base is None else base, "weight", None)
    try:
        row = embedding(mx.zeros((1,), mx.int32))
    except Exception:  # whatever a module that is no table makes of a single id
        row = None
    if not isinstance(weight, mx.array) or not isinstance(row, mx.array) or row.ndim != 2:
        raise unsupported(kind, f"embedding: found a {type(embedding).__name__}, expected a table of rows")
    return weight.shape[0], row.shape[-1]


def _embed_scale(inner: nn.Module, width: int) -> float:
    for name in _SCALES:
        value = getattr(inner, name, None)
        if isinstance(value, (int, float)) and value:
            return float(value)
    value = getattr(getattr(inner, "args", None), "scale_emb", None)
    if isinstance(value, (int, float)):
        return float(value)
    family = type(inner).__module__.rsplit(".", 1)[-1]
    if family == "gemma3_text":
        # Its forward rounds the root to bfloat16 first.
        return float(cast(float, mx.array(width**0.5, mx.bfloat16).item()))
    # afmoe has a switch for it.
    by_root = family in _SCALED_BY_ROOT or getattr(inner, "mup_enabled", False) is True
    return width**0.5 if by_root else 1.0
