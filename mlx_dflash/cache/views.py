"""Reading caches without changing them: what to schedule, how many positions, which rows. Knows no rollback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from .kinds import KINDS, leaf_names, leaves


def cache_arrays(caches: Sequence[Any]) -> list[mx.array]:
    """All arrays that live in the caches, of whatever class, for scheduling their evaluation."""
    arrays: list[mx.array] = []
    for cache in leaves(caches):
        if getattr(cache, "keys", cache) is None:
            continue
        if type(cache) not in KINDS:
            state = cast("list[tuple[str, Any]]", tree_flatten(cache.state))
            arrays += [leaf for _, leaf in state if isinstance(leaf, mx.array)]
        elif isinstance(cache.keys, mx.array):
            arrays += (cache.keys, cache.values)
        else:
            arrays += (*cache.keys, *cache.values)
    return arrays


def positions(caches: Sequence[Any]) -> int:
    """How many positions the caches hold. Caches that do not count (recurrent state) have no say; 0 if none does."""
    first: tuple[int, int] | None = None
    for place, cache in enumerate(leaves(caches)):
        offset = getattr(cache, "offset", None)
        if not isinstance(offset, int):
            continue
        if first is None:
            first = (place, offset)
        elif offset != first[1]:
            names = leaf_names(caches)
            raise RuntimeError(f"{names[first[0]]} holds {first[1]} positions but {names[place]} holds {offset}")
    return 0 if first is None else first[1]


def temporal_rows(cache: Any) -> tuple[mx.array, ...]:
    """The rows that the next query can see, in time order: how to compare two caches by what they hold.

    Two caches that were given the same rows agree here however the rows were cut into writes: rows that a cache still
    holds but no later query can see are left out. One array for each that a row is made of (keys, values; packed words,
    scales and biases when quantised), the parts of a ``CacheList`` one after another; none for an empty cache.
    """
    rows: tuple[mx.array, ...] = ()
    for leaf in leaves([cache]):
        kind = KINDS.get(type(leaf))
        if kind is None:
            raise TypeError(f"{leaf_names([cache])[0]}: not a cache of rows that this package knows")
        if leaf.keys is not None:
            rows += kind.visible(leaf)
    return rows
