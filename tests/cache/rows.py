"""Rows that carry their number, caches to put them into, and what a query must see according to the definition.

Row ``i`` belongs to position ``i`` of the true sequence; rejected rows have numbers from ``REJECTED`` on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache as memo
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_dflash.cache import cache_arrays, temporal_rows
from tests.versions import BEFORE_0_32

HEADS, WIDTH, REJECTED = 2, 32, 500
_RANDOM = np.random.default_rng(7).normal(size=(3, 1000, HEADS, WIDTH)).astype(np.float32)
_KEYS, _VALUES, _QUERIES = _RANDOM
# The first element of a key is the row's number, exactly; queries ignore it.
_KEYS[:, :, 0] = np.arange(1000)[:, None]
_QUERIES[:, :, 0] = 0


@dataclass(frozen=True)
class Case:
    """A cache and the rule of what a position sees: the last ``window`` with the ``sinks``, its chunk, or everything.

    Buffers grow in steps of 4 rows, so that growing happens at the small sizes tested.
    """

    name: str
    make: Callable[[], Any]
    window: int | None = None
    sinks: int = 0
    chunk: int | None = None

    def __str__(self) -> str:
        return self.name

    def fresh(self) -> Any:
        cache = self.make()
        for part in parts(cache):
            part.step = 4
        return cache

    def seen_by(self, position: int) -> list[int]:
        everything = list(range(position + 1))
        if self.chunk is not None:
            return everything[position // self.chunk * self.chunk :]
        if self.window is None or len(everything) <= self.window:
            return everything
        return everything[: self.sinks] + everything[len(everything) - self.window + self.sinks :]


def rotating(window: int, sinks: int = 0) -> Case:
    return Case(f"rotating-{window}-{sinks}", lambda: RotatingKVCache(window, sinks), window, sinks)


CASES = [
    Case("plain", KVCache),
    Case("quantized", lambda: QuantizedKVCache(group_size=32, bits=8)),
    Case("concatenate", ConcatenateKVCache),
    Case("chunked-8", lambda: ChunkedKVCache(8), chunk=8),
    Case("list", lambda: CacheList(KVCache(), CacheList(KVCache(), ConcatenateKVCache()))),
    rotating(8),
    rotating(8, 3),
    rotating(5, 4),
    rotating(2),
    rotating(1),
]
if BEFORE_0_32:
    # It drops rows that its chunk still needs, with or without a rollback, and is refused.
    CASES = [case for case in CASES if not case.chunk]
PROMPTS = [0, 1, 7, 8, 9, 30]
"""Below, at, above and far above a window of 8."""


def parts(cache: Any) -> list[Any]:
    return [leaf for part in cache.caches for leaf in parts(part)] if isinstance(cache, CacheList) else [cache]


@memo
def _rows(numbers: tuple[int, ...]) -> tuple[mx.array, ...]:
    return tuple(mx.array(table[list(numbers)].transpose(1, 0, 2)[None]) for table in _RANDOM)


def write(cache: Any, numbers: Sequence[int]) -> Any:
    """What one layer does with its cache in a forward of these rows; returns what attention gets (last part's)."""
    fetched = None
    for part in parts(cache) if len(numbers) else []:
        if isinstance(part, ChunkedKVCache):
            part.maybe_trim_front()
        keys, values, _ = _rows(tuple(numbers))
        # New objects: a cache may keep its first write as its buffer, and assign into it.
        fetched = part.update_and_fetch(mx.array(keys), mx.array(values))
    return fetched


def feed(case: Case, numbers: Sequence[int], writes: int = 1) -> Any:
    """A new cache given the rows one by one, or in writes of ``writes`` rows."""
    return copy.deepcopy(_fed(case, tuple(numbers), writes))


@memo
def _fed(case: Case, numbers: tuple[int, ...], writes: int) -> Any:
    cache = case.fresh()
    for start in range(0, len(numbers), writes):
        write(cache, numbers[start : start + writes])
    mx.eval(cache_arrays([cache]))
    return cache


def numbers_of(keys: mx.array) -> list[int]:
    return [int(number) for number in np.array(keys[0, 0, :, 0])]


@memo
def rows_fed_one_by_one(case: Case, count: int) -> tuple[mx.array, ...]:
    return temporal_rows(feed(case, range(count)))


def assert_holds_exactly(case: Case, cache: Any, count: int) -> None:
    """The cache is as if rows 0 .. count-1 had been fed one by one: compared as arrays, bit for bit."""
    got, want = temporal_rows(cache), rows_fed_one_by_one(case, count)
    assert [part.offset for part in parts(cache)] == [count] * len(parts(cache))
    assert len(got) == len(want)
    assert [array.shape for array in got] == [array.shape for array in want], case
    same = [mx.array_equal(ours, theirs) for ours, theirs in zip(got, want, strict=True)]
    assert not same or mx.all(mx.stack(same)), case


def attend(cache: Any, start: int, count: int) -> np.ndarray:
    """What queries ``start`` .. ``start + count - 1`` get from the cache through mlx-lm's own mask."""
    numbers = range(start, start + count)
    last = parts(cache)[-1]
    if isinstance(last, ChunkedKVCache):
        last.maybe_trim_front()
        mask = _llama4_mask(last, count)
    else:
        mask = last.make_mask(count, return_array=False, window_size=None)
    keys, values = write(cache, numbers)
    if isinstance(last, QuantizedKVCache):
        keys, values = (_dequantized(x) for x in (keys, values))
    _, _, queries = _rows(tuple(numbers))
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=WIDTH**-0.5, mask=mask)
    return np.array(out[0].transpose(1, 0, 2))


def _dequantized(packed: Sequence[mx.array]) -> mx.array:
    words, scales, biases = packed
    return mx.dequantize(words, scales, biases, group_size=32, bits=8)


def _llama4_mask(cache: ChunkedKVCache, count: int) -> mx.array:
    columns = mx.arange(cache.start_position, cache.offset + count)
    queries = mx.arange(cache.offset, cache.offset + count)[:, None]
    return (columns // cache.chunk_size == queries // cache.chunk_size) & (columns <= queries)


@memo
def attention_by_definition(case: Case, position: int) -> np.ndarray:
    seen = case.seen_by(position)
    keys, values = _KEYS[seen], _VALUES[seen]
    if case.name == "quantized":
        keys, values = (_through_quantization(x) for x in (keys, values))
    scores = np.einsum("hd,shd->hs", _QUERIES[position].astype(np.float64), keys) * WIDTH**-0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hs,shd->hd", weights / weights.sum(axis=-1, keepdims=True), values)


def _through_quantization(rows: np.ndarray) -> np.ndarray:
    packed = mx.quantize(mx.array(rows), group_size=32, bits=8)
    return np.array(_dequantized(packed))


def assert_attends_exactly(case: Case, cache: Any, start: int, count: int) -> None:
    got = attend(cache, start, count)
    for row in range(count):
        np.testing.assert_allclose(
            got[row], attention_by_definition(case, start + row), atol=2e-5, err_msg=f"{case} at {start + row}"
        )
