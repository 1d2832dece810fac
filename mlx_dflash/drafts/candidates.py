"""The few tokens a slot is decided among: the largest logits of its row, largest first."""

from __future__ import annotations

import mlx.core as mx


def best(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """``[rows, V]`` -> the places ``[rows, count]`` int32 of the largest logits, and these; of equal ones the lower id
    comes first as far as the partition kept it."""
    places = mx.argpartition(-logits, kth=count - 1, axis=-1)[:, :count]
    # Ids in order first: the sort by value is stable, so that ties do not depend on how the partition left them.
    places = mx.sort(places, axis=-1)
    values = mx.take_along_axis(logits, places, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return (
        mx.take_along_axis(places, order, axis=-1).astype(mx.int32),
        mx.take_along_axis(values, order, axis=-1),
    )
