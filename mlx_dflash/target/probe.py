"""The load-time proof that a target's taps, embedding and head are what ``structure.py`` took them for.

A few tokens go through the model's own forward, once untouched and once watched; everything is compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from ..errors import CheckpointError, UnsupportedError
from .reading import one_line
from .structure import Parts, unsupported
from .taps import EMBEDDING_TAP, observing

if TYPE_CHECKING:
    from .model import Target

_ROWS = 4
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
_MULTIPLIERS = ("output_multiplier", "logit_scale")

Calls = dict[str, list[tuple[Any, Any]]]


def probe(target: Target, parts: Parts, taps: tuple[int, ...]) -> str | None:
    """Check ``target`` for ``taps``; its caches are the probe's own and are thrown away.

    Returns:
        What the model does to the head's output before returning it as logits, for people; ``None`` for nothing.

    Raises:
        UnsupportedError, CheckpointError: see :meth:`Target.check`.
    """
    kind = target.model_type
    ids, own = check_runs(target)
    with observing(_watched(parts)) as calls:
        watched = target.model(ids, cache=target.make_caches())
    if not _same(own, watched):
        raise unsupported(kind, "its logits change when its layers are watched, or from one run to the next")
    outputs = _layer_outputs(kind, parts, calls, taps)
    _check_embedding(target, ids, outputs[EMBEDDING_TAP])
    raw = _check_head(target, calls, outputs[len(parts.layers) - 1], own)
    if taps:
        tapped, features = target.forward(ids, target.make_caches(), taps)
        expected = mx.concatenate([outputs[tap] for tap in taps], axis=-1)
        if features is None or not _same(own, tapped) or not _same(features, expected):
            raise unsupported(kind, f"taps {list(taps)} change its logits or do not give the outputs of those layers")
    return _shaping(kind, parts, raw, own)


def check_runs(target: Target) -> tuple[mx.array, mx.array]:
    """A few ids ``[1, rows]`` and the model's own logits for them, which are numbers.

    Raises:
        UnsupportedError, CheckpointError: see :meth:`Target.check_runs`.
    """
    ids = mx.array([[(1 + 7 * i) % max(target.vocab_size, 1) for i in range(_ROWS)]], mx.int32)
    logits = _own_logits(target, ids)
    _check_finite(target, logits)
    return ids, logits


def _own_logits(target: Target, ids: mx.array) -> mx.array:
    try:
        logits = target.model(ids, cache=target.make_caches())
        mx.eval(logits)
    except Exception as error:  # a model may fail in any way of its own; the line says which
        raise UnsupportedError(
            f"target model_type {target.model_type!r}: its forward fails: {type(error).__name__}: {one_line(error)}"
        ) from error
    return logits


def _watched(parts: Parts) -> dict[str, Any]:
    watched: dict[str, Any] = {f"layer {i}": (layer, "__call__") for i, layer in enumerate(parts.layers)}
    watched["norm"] = (parts.norm, "__call__")
    watched["head"] = (parts.embedding, "as_linear") if parts.head is None else (parts.head, "__call__")
    return watched


def _check_finite(target: Target, logits: mx.array) -> None:
    # Minus infinity is a legal logit: some families mask unused rows of the head with it.
    usable = mx.isfinite(logits) | (logits == -mx.inf)
    if mx.all(usable).item() and mx.all(mx.any(mx.isfinite(logits), axis=-1)).item():
        return
    where = target.name or target.model_type
    weights: Any = tree_flatten(target.model.parameters())
    for name, weight in weights:
        if mx.issubdtype(weight.dtype, mx.floating) and not mx.all(mx.isfinite(weight)).item():
            raise CheckpointError(f"{where}: tensor {name}: found NaN or infinity, expected finite weights")
    raise UnsupportedError(
        f"{where}: found NaN or infinite logits although every weight is finite, expected numbers: its hidden states "
        f"overflow {logits.dtype}"
    )


def _layer_outputs(kind: str, parts: Parts, calls: Calls, taps: tuple[int, ...]) -> dict[int, mx.array]:
    """``{tap: [1, rows, H]}`` of the taps, the embedding and the last layer, every layer having run exactly once."""
    expected = (1, _ROWS, parts.hidden_size)
    for i in range(len(parts.layers)):
        times = len(calls[f"layer {i}"])
        if times != 1:
            raise unsupported(
                kind, f"layer {i}: called {times} times in one forward, expected once, so taps are ambiguous"
            )
    outputs = {}
    for tap in {*taps, EMBEDDING_TAP, len(parts.layers) - 1}:
        where = "norm" if tap == len(parts.layers) else f"layer {max(tap, 0)}"
        if len(calls[where]) != 1:
            raise unsupported(kind, f"its final norm is called {len(calls[where])} times in one forward, expected once")
        entered, left = calls[where][0]
        hidden = entered if tap == EMBEDDING_TAP else left[0] if isinstance(left, tuple) else left
        if not isinstance(hidden, mx.array) or hidden.shape != expected:
            found = getattr(hidden, "shape", type(hidden).__name__)
            raise unsupported(
                kind, f"layer {tap}: found a hidden state {found}, expected one residual stream {expected}"
            )
        outputs[tap] = hidden
    return outputs


def _check_embedding(target: Target, ids: mx.array, entered: mx.array) -> None:
    """Layer 0 sees the raw rows times ``embed_scale``, unless it sees something that is no multiple of them at all
    (normed rows, added positions), which no single factor describes."""
    rows, entered = target.embed(ids).astype(mx.float32), entered.astype(mx.float32)
    factor = mx.sum(rows * entered) / mx.maximum(mx.sum(rows * rows), 1e-30)
    off = mx.max(mx.abs(entered - factor * rows)) / mx.maximum(mx.max(mx.abs(entered)), 1e-30)
    is_multiple, times = _number(off) < 0.02, _number(factor)
    claimed = target.embed_scale
    if (is_multiple and abs(times - claimed) > 0.02 * abs(claimed)) or (not is_multiple and claimed != 1.0):
        found = f"{times:.4g} times" if is_multiple else "no multiple of"
        raise unsupported(target.model_type, f"layer 0 sees {found} its embedding rows, expected {claimed:.4g} times")


def _check_head(target: Target, calls: Calls, last: mx.array, logits: mx.array) -> mx.array:
    """The head's raw output ``[1, rows, V]``: the product with the last norm of the last layer's raw output."""
    kind, parts = target.model_type, target.parts
    if not calls["norm"] or len(calls["head"]) > 1:
        found = f"the final norm called {len(calls['norm'])} times and the head {len(calls['head'])} times"
        raise unsupported(kind, f"found {found}, expected once each")
    normed = parts.norm(last)
    # Some tied families multiply with the table itself instead of calling it: then the logits stand for the result.
    entered, left = calls["head"][0] if calls["head"] else (normed, logits)
    if not _same(normed, entered):
        raise unsupported(kind, "what enters its head is not the final norm of the last layer's output")
    if not _same(target.head(normed), left):
        raise unsupported(kind, "its head gives other logits than the product with the head found for it")
    if left.shape[-1] != target.vocab_size:
        raise unsupported(
            kind, f"head: found {left.shape[-1]} rows, expected {target.vocab_size}, the rows of its embedding table"
        )
    return left


def _shaping(kind: str, parts: Parts, raw: mx.array, logits: mx.array) -> str | None:
    if _same(raw, logits):
        return None
    tolerance = 1e-4 if logits.dtype == mx.float32 and raw.dtype == mx.float32 else 0.02
    for words, shaped in _known_shapings(parts, raw.astype(mx.float32), logits.astype(mx.float32)):
        bound = tolerance * mx.max(mx.abs(shaped))
        if (mx.max(mx.abs(logits.astype(mx.float32) - shaped)) <= bound).item():
            return words
    raise unsupported(kind, "it changes the head's output in a way that is neither a factor nor its config's softcap")


def _known_shapings(parts: Parts, raw: mx.array, logits: mx.array) -> Iterator[tuple[str, mx.array]]:
    cap = _setting(parts, _SOFTCAPS)
    if cap:
        multiplier = _setting(parts, _MULTIPLIERS)
        if multiplier:
            yield f"times {multiplier:g}, softcap {cap:g}", mx.tanh(raw * multiplier / cap) * cap
        yield f"softcap {cap:g}", mx.tanh(raw / cap) * cap
    # Last: small logits under a softcap look like a factor close to one.
    factor = _number(mx.sum(raw * logits) / mx.maximum(mx.sum(raw * raw), 1e-30))
    yield f"times {factor:.6g}", raw * factor


def _setting(parts: Parts, names: tuple[str, ...]) -> float | None:
    for holder in parts.settings():
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, (int, float)):
                return float(value)
    return None


def _number(scalar: mx.array) -> float:
    return cast(float, scalar.item())


def _same(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(mx.array_equal(a, b).item())
