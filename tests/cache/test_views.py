"""Reading caches: the arrays to schedule, the positions held, the rows a query can see."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from mlx_dflash.cache import cache_arrays, positions, temporal_rows

from .rows import CASES, Case, feed, numbers_of, rotating, write


def quantized() -> QuantizedKVCache:
    return QuantizedKVCache(group_size=32, bits=8)


def parts_of(cache: Any) -> list[mx.array]:
    both = (cache.keys, cache.values)
    return [*both[0], *both[1]] if isinstance(cache, QuantizedKVCache) else list(both)


def test_empty_caches_have_no_arrays() -> None:
    assert cache_arrays([case.fresh() for case in CASES]) == [] and cache_arrays([]) == []
    assert cache_arrays([ArraysCache(2), BatchKVCache([0])]) == []


def test_all_live_arrays_are_listed_in_order_with_the_parts_of_quantised_rows_and_of_lists() -> None:
    plain, packed, inner = KVCache(), quantized(), RotatingKVCache(8)
    caches = [plain, packed, CacheList(inner, KVCache())]
    write(plain, range(3))
    write(packed, range(3))
    write(inner, range(3))
    expected = [*parts_of(plain), *parts_of(packed), *parts_of(inner)]
    listed = cache_arrays(caches)
    assert len(listed) == len(expected) and all(a is b for a, b in zip(listed, expected, strict=True))


def test_classes_that_cannot_be_rolled_back_are_listed_too() -> None:
    """Plain decoding schedules them as well."""
    state = ArraysCache(2)
    state[0], state[1] = mx.zeros(3), mx.ones(2)
    assert [array.shape for array in cache_arrays([state])] == [(3,), (2,)]


def test_positions_are_those_of_the_caches_that_count() -> None:
    plain, ring = KVCache(), RotatingKVCache(4)
    write(plain, range(9))
    write(ring, range(9))
    assert positions([ArraysCache(1), CacheList(ring, plain), plain]) == 9
    assert positions([]) == 0 and positions([ArraysCache(1)]) == 0 and positions([KVCache()]) == 0


def test_caches_that_disagree_on_the_positions_are_both_named() -> None:
    """R28."""
    plain, ring = KVCache(), RotatingKVCache(4)
    write(plain, range(9))
    write(ring, range(8))
    with pytest.raises(RuntimeError, match=r"cache 0 \(KVCache\) holds 9 .* cache 1\[0\] \(RotatingKVCache\) holds 8"):
        positions([plain, CacheList(ring)])


@pytest.mark.parametrize("writes", [1, 2, 3, 7, 30])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_rows_look_the_same_however_they_were_cut_into_writes(case: Case, writes: int) -> None:
    for count in range(1, 30):
        got, want = temporal_rows(feed(case, range(count), writes)), temporal_rows(feed(case, range(count)))
        assert all(mx.array_equal(a, b) for a, b in zip(got, want, strict=True)), count


def test_a_ring_shows_its_sinks_and_then_all_but_the_row_that_the_next_one_replaces() -> None:
    keys, values = temporal_rows(feed(rotating(8, 3), range(20)))
    assert numbers_of(keys) == [0, 1, 2, 16, 17, 18, 19] and values.shape[2] == 7


def test_one_wrong_row_is_a_difference() -> None:
    good, bad = feed(rotating(8), range(20)), feed(rotating(8), [*range(19), 500])
    assert not mx.array_equal(temporal_rows(good)[0], temporal_rows(bad)[0])


def test_empty_caches_show_no_rows_and_unknown_ones_are_refused() -> None:
    assert temporal_rows(KVCache()) == () and temporal_rows(CacheList(quantized(), KVCache())) == ()
    with pytest.raises(TypeError, match="ArraysCache"):
        temporal_rows(ArraysCache(1))
