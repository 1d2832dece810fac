"""What each mlx-lm cache class needs so that its last rows can be taken back exactly. Knows the inside of mlx-lm's
cache classes, and nothing of models, rounds or tokens.

A *row* is what one position adds to a cache. Adding a class is one :class:`Kind` and one line in :data:`KINDS`.
Classes are matched exactly: a subclass may write differently, and a rollback by the wrong rule is a wrong answer that
nobody sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache as memo
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)


class Kind:
    """One cache in one transaction: made before the forward writes ``rows`` rows, asked afterwards to keep some.

    Nothing here waits for the device, or starts it. ``cut`` and ``undo`` say where the cache must be, not how far to go
    back, so that ``undo`` also mends a cache that an error left half written or half cut.
    """

    __slots__ = ("cache", "fresh", "start")

    def __init__(self, cache: Any, rows: int) -> None:
        self.cache = cache
        self.start: int = cache.offset
        self.fresh = cache.keys is None

    @staticmethod
    def refusal(cache: Any) -> str | None:
        """Why this very cache, though of a known class, cannot be rolled back."""
        return None

    def fault(self, rows: int) -> str | None:
        """What is wrong, if the cache does not look like one that was given ``rows`` rows since this was made."""
        written = self.cache.offset - self.start
        return None if written == rows else f"it has {written} new rows where {rows} were expected"

    def restorable(self) -> bool:
        """Whether ``undo`` is exact now; it always is unless the cache was written in a way nobody announced."""
        return self.cache.offset >= self.start

    def cut(self, keep: int) -> None:
        """Be as if only the first ``keep >= 1`` rows had been written; no ``fault`` and ``keep`` rows are there."""
        raise NotImplementedError

    def undo(self) -> None:
        """Be as if nothing had been written."""
        raise NotImplementedError

    @staticmethod
    def visible(cache: Any) -> tuple[mx.array, ...]:
        """The rows that the next query can see, in time order; one array for each that a row is made of."""
        raise NotImplementedError


class PreallocatedKind(Kind):
    """``KVCache``: rows past ``offset`` are spare room, so moving ``offset`` is all.

    Only ``offset`` is kept. A second reference to the buffer across the write would make MLX copy the whole of it
    instead of writing in place.
    """

    __slots__ = ()

    def cut(self, keep: int) -> None:
        self.cache.offset = self.start + keep

    def undo(self) -> None:
        self.cache.offset = self.start
        if self.fresh:
            self.cache.keys = self.cache.values = None

    @staticmethod
    def visible(cache: Any) -> tuple[mx.array, ...]:
        return tuple(x[..., : cache.offset, :] for x in (cache.keys, cache.values))


class QuantizedKind(PreallocatedKind):
    """``QuantizedKVCache``: as ``KVCache``. Groups run along the head dimension, so no two rows share a scale."""

    __slots__ = ()

    @staticmethod
    def visible(cache: Any) -> tuple[mx.array, ...]:
        return tuple(x[..., : cache.offset, :] for x in (*cache.keys, *cache.values))


class ConcatenateKind(Kind):
    """``ConcatenateKVCache``: the next write appends to the *whole* arrays, whatever ``offset`` says: slice them."""

    __slots__ = ()

    def cut(self, keep: int) -> None:
        self._slice(self.start + keep)

    def undo(self) -> None:
        self._slice(self.start)
        if self.fresh:
            self.cache.keys = self.cache.values = None

    def _slice(self, length: int) -> None:
        cache = self.cache
        if cache.keys is not None:
            cache.keys = cache.keys[..., :length, :]
            cache.values = cache.values[..., :length, :]
        cache.offset = length

    @staticmethod
    def visible(cache: Any) -> tuple[mx.array, ...]:
        return (cache.keys, cache.values)


class RotatingKind(Kind):
    """``RotatingKVCache``: a ring of ``max_size`` rows, whose first ``keep`` rows (sinks) never leave.

    A write of several rows builds new arrays in time order: at most ``max_size - 1`` old rows, then all new ones. So
    the last rows can be sliced off and all the window needs is left; but keeping none would leave a row too few, so the
    arrays from before are held and put back (the write never assigned into them).

    A write of one row goes in place, on a full ring over the oldest row. That row needs no rescue: the next query
    brings a row itself, and so is the first that cannot see it. With the index moved back the next single row is
    written to the same place, and the next write of several leaves out just that place.

    The class's own ``trim`` is no use: on a full ring it leaves the rejected rows where a one-row write shows them.
    """

    __slots__ = ("index", "keys", "linear", "rows", "values")

    def __init__(self, cache: Any, rows: int) -> None:
        super().__init__(cache, rows)
        self.rows = rows
        # Two more names for the same Python objects, which cost no copy: assigning a slice changes the object itself.
        self.keys, self.values = cache.keys, cache.values
        self.index: int = cache._idx
        # Old rows in front of the new ones after a write of several.
        self.linear = min(_held(cache), cache.max_size - 1)

    @staticmethod
    def refusal(cache: Any) -> str | None:
        if cache.keep == 0:
            return None
        # Taking rows back would be exact. But the mask that goes with a block hides the sinks from its later rows, so
        # a verified row and a plain step would not see the same past.
        return (
            f"keep={cache.keep}: mlx-lm's mask hides the first {cache.keep} rows of such a window from the later rows "
            "of a block, so several tokens cannot be verified at once"
        )

    def fault(self, rows: int) -> str | None:
        # The layout is what `cut` relies on; a version of mlx-lm that lays rows out otherwise must not go unnoticed.
        if self.rows > 1 and rows and self.cache.offset == self.start + rows:
            length = self.cache.keys.shape[2]
            if length != self.linear + rows:
                return f"it holds {length} rows where {self.linear + rows} were expected"
        return super().fault(rows)

    def restorable(self) -> bool:
        cache = self.cache
        # Several single rows went over rows of the held arrays that the next query sees.
        overwritten = cache.keys is self.keys and cache.offset > max(self.start + 1, cache.max_size)
        return super().restorable() and not overwritten

    def cut(self, keep: int) -> None:
        cache, length = self.cache, self.linear + keep
        cache.keys = cache.keys[:, :, :length]
        cache.values = cache.values[:, :, :length]
        cache.offset = self.start + keep
        cache._idx = length

    def undo(self) -> None:
        cache = self.cache
        cache.keys, cache.values = self.keys, self.values
        cache.offset, cache._idx = self.start, self.index

    @staticmethod
    def visible(cache: Any) -> tuple[mx.array, ...]:
        sinks, index, held = cache.keep, cache._idx, _held(cache)
        # The next row takes one place of the window.
        recent = min(cache.max_size - 1, held) - sinks

        def in_time_order(x: mx.array) -> mx.array:
            if index < held:
                x = mx.concatenate([x[..., :sinks, :], x[..., index:, :], x[..., sinks:index, :]], axis=2)
            if recent < 0:
                return x[..., :held, :]
            return mx.concatenate([x[..., :sinks, :], x[..., held - recent : held, :]], axis=2)

        return in_time_order(cache.keys), in_time_order(cache.values)


def _held(cache: Any) -> int:
    """Rows in a ``RotatingKVCache``'s buffer that are not spare room."""
    if cache.keys is None:
        return 0
    return min(cache.offset, cache.keys.shape[2])


class ChunkedKind(PreallocatedKind):
    """``ChunkedKVCache``: as ``KVCache``, but the forward first drops rows older than a chunk.

    How many depends on the rows held before the write and not on the rows written, so keeping some of them leaves what
    a forward of just those would have left. To keep none, the arrays from before are put back; they are held only when
    rows will be dropped, where the write goes into new arrays anyway.
    """

    __slots__ = ("before",)

    def __init__(self, cache: Any, rows: int) -> None:
        super().__init__(cache, rows)
        drops = cache.offset - cache.start_position > cache.chunk_size
        self.before = (cache.keys, cache.values, cache.start_position) if drops else None

    @staticmethod
    def refusal(cache: Any) -> str | None:
        if not _drops_for_spare_room():
            return None
        # Which rows are left then depends on how they were cut into writes, and some that the chunk needs are gone.
        return f"mlx-lm {mlx_lm.__version__} drops too many rows of a chunk after a block, expected 0.32.0 or newer"

    def undo(self) -> None:
        super().undo()
        if self.before is not None:
            self.cache.keys, self.cache.values, self.cache.start_position = self.before

    @staticmethod
    def visible(cache: Any) -> tuple[mx.array, ...]:
        end = cache.offset - cache.start_position
        return tuple(x[..., max(0, end - cache.chunk_size) : end, :] for x in (cache.keys, cache.values))


@memo
def _drops_for_spare_room() -> bool:
    """Whether this mlx-lm takes the spare room of a ``ChunkedKVCache`` for rows, as it did before 0.32."""
    cache, row = ChunkedKVCache(1), mx.zeros((1, 1, 1, 1))
    cache.update_and_fetch(row, row)
    cache.maybe_trim_front()
    return bool(cache.start_position)


KINDS: dict[type, type[Kind]] = {
    KVCache: PreallocatedKind,
    QuantizedKVCache: QuantizedKind,
    ConcatenateKVCache: ConcatenateKind,
    RotatingKVCache: RotatingKind,
    ChunkedKVCache: ChunkedKind,
}


def leaves(caches: Sequence[Any]) -> list[Any]:
    """The caches with every ``CacheList`` replaced by its parts: each part is rolled back by its own rule."""
    flat: list[Any] = []
    for cache in caches:
        if type(cache) is CacheList:
            flat += leaves(cache.caches)
        else:
            flat.append(cache)
    return flat


def leaf_names(caches: Sequence[Any], place: str = "cache {}") -> list[str]:
    """For messages: where each of :func:`leaves` stands, and its class, as in ``cache 3[1] (KVCache)``."""
    names: list[str] = []
    for index, cache in enumerate(caches):
        here = place.format(index)
        if type(cache) is CacheList:
            names += leaf_names(cache.caches, here + "[{}]")
        else:
            names.append(f"{here} ({type(cache).__name__})")
    return names
