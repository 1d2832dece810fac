"""The transaction: what it promises when a round is left early, and what it refuses loudly."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, ChunkedKVCache, ConcatenateKVCache, KVCache, RotatingKVCache

from mlx_dflash.cache import Speculation, cache_arrays
from tests.versions import BEFORE_0_32

from .rows import (
    CASES,
    HEADS,
    PROMPTS,
    REJECTED,
    WIDTH,
    assert_attends_exactly,
    assert_holds_exactly,
    feed,
    parts,
    write,
)

REJECTED_BLOCK = [REJECTED + row for row in range(5)]


def one_of_each(prompt: int) -> list[Any]:
    return [feed(case, range(prompt), prompt or 1) for case in CASES]


def forward(caches: list[Any], numbers: list[int]) -> None:
    for cache in caches:
        write(cache, numbers)


def assert_all_hold(caches: list[Any], count: int) -> None:
    for case, cache in zip(CASES, caches, strict=True):
        assert_holds_exactly(case, cache, count)
    for case, cache in zip(CASES, caches, strict=True):
        assert_attends_exactly(case, cache, count, 1)


class ForwardFailed(Exception):
    pass


@pytest.mark.parametrize("error", [ForwardFailed, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_forward_that_breaks_off_between_two_layers_leaves_every_cache_as_it_was(
    prompt: int, rows: int, error: type[BaseException]
) -> None:
    for reached in (0, 1, 6, len(CASES)):
        caches = one_of_each(prompt)
        with pytest.raises(error), Speculation.begin(caches, rows):
            forward(caches[:reached], REJECTED_BLOCK[:rows])
            raise error
        assert_all_hold(caches, prompt)


def test_a_forward_that_breaks_off_between_the_parts_of_a_cache_list_leaves_it_as_it_was() -> None:
    first, second = KVCache(), RotatingKVCache(8)
    both = CacheList(first, second)
    write(both, range(20))
    with pytest.raises(ForwardFailed), Speculation.begin([both], 5):
        write(first, REJECTED_BLOCK)
        raise ForwardFailed
    assert (first.offset, second.offset) == (20, 20)


def test_committing_none_after_a_half_done_forward_mends_all_caches() -> None:
    caches = one_of_each(20)
    with Speculation.begin(caches, 5) as speculation:
        forward(caches[::2], REJECTED_BLOCK)
        speculation.commit(0)
    assert_all_hold(caches, 20)


def test_leaving_the_block_without_a_commit_keeps_nothing() -> None:
    caches = one_of_each(20)
    with Speculation.begin(caches, 5):
        forward(caches, REJECTED_BLOCK)
    assert_all_hold(caches, 20)


@pytest.mark.skipif(BEFORE_0_32, reason="refused: mlx-lm before 0.32 drops rows that the chunk needs")
def test_the_front_that_a_chunked_cache_dropped_in_an_undone_forward_is_back() -> None:
    cache = ChunkedKVCache(8)
    write(cache, range(20))
    keys = cache.keys
    with Speculation.begin([cache], 3):
        write(cache, REJECTED_BLOCK[:3])
        assert cache.start_position == 12
    assert cache.keys is keys and (cache.start_position, cache.offset) == (0, 20)


def test_an_error_after_the_commit_keeps_what_was_committed() -> None:
    caches = one_of_each(20)
    with pytest.raises(ForwardFailed), Speculation.begin(caches, 3) as speculation:
        forward(caches, [20, 21, REJECTED])
        speculation.commit(2)
        raise ForwardFailed
    assert_all_hold(caches, 22)


@pytest.mark.parametrize(("announced", "written"), [(5, 4), (5, 6), (5, 1), (1, 2), (5, 0)])
def test_a_forward_that_writes_another_number_of_rows_is_an_error_that_names_the_cache_and_is_undone(
    announced: int, written: int
) -> None:
    caches: list[Any] = [KVCache(), CacheList(KVCache(), ConcatenateKVCache()), RotatingKVCache(64)]
    for odd, name in [(0, "cache 0 (KVCache)"), (2, "cache 2 (RotatingKVCache)")]:
        forward(caches, list(range(20)))
        at = caches[0].offset
        with (
            pytest.raises(RuntimeError, match=f"it has {written} new rows where {announced} were") as caught,
            Speculation.begin(caches, announced) as speculation,
        ):
            for place, cache in enumerate(caches):
                write(cache, range(100, 100 + (written if place == odd else announced)))
            speculation.commit(1)
        assert str(caught.value).startswith(name)
        assert [caches[0].offset, *(part.offset for part in caches[1].caches), caches[2].offset] == [at] * 4


def test_the_part_of_a_cache_list_that_is_at_fault_is_named() -> None:
    first, both = KVCache(), CacheList(KVCache(), ConcatenateKVCache())
    with (
        pytest.raises(RuntimeError, match=r"^cache 1\[1\] \(ConcatenateKVCache\): it has 0 new rows"),
        Speculation.begin([first, both], 2) as speculation,
    ):
        forward([first, both.caches[0]], [0, 1])
        speculation.commit(2)


def test_rows_that_were_overwritten_unannounced_are_an_error_and_not_a_wrong_answer() -> None:
    ring: Any = RotatingKVCache(8)
    write(ring, range(8))
    write(ring, [8])
    for announced in (5, 1):
        with (
            pytest.raises(RuntimeError, match=r"cache 0 \(RotatingKVCache\): cannot be restored"),
            Speculation.begin([ring], announced),
        ):
            write(ring, [REJECTED])
            write(ring, [REJECTED])


def test_a_buffer_laid_out_otherwise_than_known_is_an_error() -> None:
    ring: Any = RotatingKVCache(8)
    write(ring, range(20))
    with (
        pytest.raises(RuntimeError, match=r"cache 0 \(RotatingKVCache\): it holds 11 rows where 12 were expected"),
        Speculation.begin([ring], 5) as speculation,
    ):
        write(ring, REJECTED_BLOCK)
        ring.keys = ring.keys[:, :, 1:]
        speculation.commit(2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_commit_after_something_else_was_written_is_an_error(case: Any) -> None:
    cache = feed(case, range(20))
    with Speculation.begin([cache], 3) as speculation:
        write(cache, [20, 21, 22])
        speculation.commit(2)
    write(cache, [22])
    for keep in (1, 0):
        with pytest.raises(RuntimeError, match="it has 3 new rows where 2"):
            speculation.commit(keep)
    assert_attends_exactly(case, cache, 23, 1)


def test_a_commit_on_replaced_caches_is_an_error() -> None:
    """Quantising a prompt cache puts new objects into the list: rolling back the old ones would do nothing."""
    caches: list[Any] = [KVCache()]
    speculation = Speculation.begin(caches, 2)
    write(caches[0], [0, 1])
    speculation.commit(2)
    caches[0] = caches[0].to_quantized(group_size=32, bits=8)
    with pytest.raises(RuntimeError, match="not those the transaction began with"):
        speculation.commit(1)


def test_keep_is_between_none_and_what_is_there() -> None:
    cache = KVCache()
    speculation = Speculation.begin([cache], 4)
    write(cache, range(4))
    for keep in (-1, 5):
        with pytest.raises(ValueError, match=f"keep: {keep} "):
            speculation.commit(keep)
    speculation.commit(2)
    with pytest.raises(ValueError, match="keep: 3 is not between 0 and the 2 rows"):
        speculation.commit(3)


def test_a_block_has_at_least_one_row() -> None:
    with pytest.raises(ValueError, match="rows: 0"):
        Speculation.begin([KVCache()], 0)


def test_release_makes_the_rows_final() -> None:
    cache = KVCache()
    with Speculation.begin([cache], 4) as speculation:
        write(cache, range(4))
        speculation.commit(3)
        speculation.release()
    assert cache.offset == 3
    with pytest.raises(RuntimeError, match="after release"):
        speculation.commit(2)


def test_a_target_without_caches_is_no_special_case() -> None:
    with Speculation.begin([], 3) as speculation:
        speculation.commit(2)
    with pytest.raises(ValueError, match="keep: 3"):
        speculation.commit(3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_begin_and_commit_do_not_wait_for_the_device(case: Any) -> None:
    """Under a trace any evaluation raises; whole rounds over traced rows go through."""

    def rounds(row: mx.array) -> list[mx.array]:
        cache = case.fresh()

        def write_traced(count: int) -> None:
            for part in parts(cache):
                if isinstance(part, ChunkedKVCache):
                    part.maybe_trim_front()
                part.update_and_fetch(mx.repeat(row, count, axis=2), mx.repeat(row, count, axis=2))

        write_traced(9)
        for rows, keep in [(5, 5), (1, 1), (5, 3), (1, 0), (5, 0), (1, 1), (5, 1)]:
            with Speculation.begin([cache], rows) as speculation:
                write_traced(rows)
                speculation.commit(keep)
            speculation.commit(keep // 2)
        return cache_arrays([cache])

    mx.eval(mx.compile(rounds)(mx.ones((1, HEADS, 1, WIDTH))))


def test_an_evaluation_under_a_trace_would_be_noticed() -> None:
    def waits(x: mx.array) -> mx.array:
        mx.eval(x + 1)
        return x

    with pytest.raises(ValueError, match="eval"):
        mx.compile(waits)(mx.zeros(1))
