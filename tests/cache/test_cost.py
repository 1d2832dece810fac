"""What a rollback adds to a round does not grow with the caches: bytes allocated, against caches of 1 MiB."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ChunkedKVCache, ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from mlx_dflash.cache import Speculation, cache_arrays

WINDOW, HEADS, WIDTH = 1024, 2, 64
WHOLE = WINDOW * HEADS * WIDTH * 4
"""Bytes of the keys alone."""
ROW = HEADS * WIDTH * 4
LITTLE = 64 * ROW
"""A block's worth of rows, keys and values, with room to spare for small change."""


def rows(count: int) -> tuple[mx.array, mx.array]:
    block = mx.random.normal((1, HEADS, count, WIDTH))
    mx.eval(block)
    return block, block + 0


def filled(make: Callable[[], Any], writes: int) -> Any:
    cache = make()
    for _ in range(writes):
        cache.update_and_fetch(*rows(WINDOW // 2 if writes < 9 else 1))
        mx.eval(cache_arrays([cache]))
    return cache


def full_ring() -> Any:
    """Filled and wrapped, last written one row, so that the buffer is exactly the window."""
    cache = filled(lambda: RotatingKVCache(WINDOW), 3)
    cache.update_and_fetch(*rows(1))
    mx.eval(cache_arrays([cache]))
    assert cache.keys.shape[2] == WINDOW
    return cache


def allocated(work: Callable[[], Any]) -> int:
    """The most that was allocated at once on top of what was there, for doing and evaluating ``work``."""
    gc.collect()
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(work())
    mx.synchronize()
    return mx.get_peak_memory() - before


KINDS: list[Callable[[], Any]] = [
    KVCache,
    lambda: QuantizedKVCache(group_size=64, bits=8),
    ConcatenateKVCache,
    lambda: RotatingKVCache(WINDOW),
    lambda: ChunkedKVCache(WINDOW),
]


@pytest.mark.parametrize("make", KINDS, ids=["plain", "quantized", "concatenate", "rotating", "chunked"])
@pytest.mark.parametrize("keep", [0, 1, 5])
def test_a_commit_allocates_nothing_that_grows_with_the_cache(make: Callable[[], Any], keep: int) -> None:
    cache = filled(make, 3)
    for _ in range(3):
        speculation = Speculation.begin([cache], 8)
        cache.update_and_fetch(*rows(8))
        mx.eval(cache_arrays([cache]))

        def commit(speculation: Speculation = speculation) -> list[mx.array]:
            speculation.commit(keep)
            return cache_arrays([cache])

        assert allocated(commit) < LITTLE


def test_copying_the_kept_rows_would_be_noticed() -> None:
    cache = full_ring()
    assert allocated(lambda: mx.contiguous(cache.keys[:, :, :-3])) > WHOLE // 2


def one_row_round(hold: Callable[[Any], Any]) -> int:
    """Bytes of a one-row write on a full ring while something is held across it."""
    cache, new = full_ring(), rows(1)
    held = hold(cache)

    def forward() -> list[mx.array]:
        cache.update_and_fetch(*new)
        return cache_arrays([cache])

    cost = allocated(forward)
    assert held is not None
    return cost


def test_a_single_row_on_a_full_ring_is_still_written_in_place() -> None:
    assert one_row_round(lambda cache: Speculation.begin([cache], 1)) < LITTLE


def test_holding_a_lazy_slice_of_the_ring_instead_would_be_noticed() -> None:
    """Why the overwritten row is not set aside on the way: it would be a lazy slice of the ring."""
    assert one_row_round(lambda cache: cache.keys[:, :, 5:6]) > WHOLE // 2


@pytest.mark.parametrize("make", [KVCache, lambda: ChunkedKVCache(2 * WINDOW)], ids=["plain", "chunked"])
def test_a_block_goes_into_a_growing_buffer_in_place_while_the_last_transaction_is_kept(
    make: Callable[[], Any],
) -> None:
    cache = filled(make, 2)
    cache.update_and_fetch(*rows(1))  # leaves room for a step's worth of rows
    mx.eval(cache_arrays([cache]))
    kept = []
    for _ in range(5):
        new = rows(8)

        def forward(new: tuple[mx.array, mx.array] = new) -> list[mx.array]:
            kept.append(Speculation.begin([cache], 8))
            cache.update_and_fetch(*new)
            kept[-1].commit(5)
            return cache_arrays([cache])

        assert allocated(forward) < LITTLE


def test_memory_is_flat_over_many_rounds() -> None:
    """R59."""
    caches: list[Any] = [full_ring(), filled(KVCache, 1)]
    held = []
    for turn in range(60):
        with Speculation.begin(caches, 1 + turn % 4) as speculation:
            for cache in caches:
                cache.update_and_fetch(*rows(1 + turn % 4))
            speculation.commit(turn % 2)
        mx.eval(cache_arrays(caches))
        mx.synchronize()
        held.append(mx.get_active_memory())
    assert max(held[30:]) <= max(held[:30]) + LITTLE


def test_release_lets_go_of_the_window_from_before() -> None:
    cache = full_ring()
    with Speculation.begin([cache], 4) as speculation:
        cache.update_and_fetch(*rows(4))
        speculation.commit(2)
    mx.eval(cache_arrays([cache]))
    held = mx.get_active_memory()
    speculation.release()
    gc.collect()
    assert held - mx.get_active_memory() > WHOLE
