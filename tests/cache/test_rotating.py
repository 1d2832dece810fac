"""The ring of ``RotatingKVCache``: the documented traps, and random programs against a Python list."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import RotatingKVCache

from mlx_dflash.cache import Speculation, positions, temporal_rows

from .rows import assert_attends_exactly, feed, numbers_of, rotating, write


def full_ring() -> Any:
    """Window 8, rows 0..19 written one by one."""
    return feed(rotating(8), range(20))


def test_the_trim_of_mlx_lm_shows_rejected_rows_to_the_next_single_row() -> None:
    """R34. Why no rollback here calls ``trim``: this is what it does, without an error."""
    cache = full_ring()
    write(cache, [20, 21, 22, 23, 24])
    cache.trim(3)
    keys, _ = write(cache, [22])
    assert sorted(numbers_of(keys)) == [18, 19, 20, 21, 22, 22, 23, 24]


def test_commit_shows_the_last_eight_rows_to_the_next_single_row() -> None:
    """R34, the same example."""
    cache = full_ring()
    with Speculation.begin([cache], 5) as speculation:
        write(cache, [20, 21, 522, 523, 524])
        speculation.commit(2)
    keys, _ = write(cache, [22])
    assert sorted(numbers_of(keys)) == [15, 16, 17, 18, 19, 20, 21, 22]


def test_dropping_all_rows_by_slicing_breaks_the_next_single_row_so_the_arrays_from_before_come_back() -> None:
    cache = full_ring()
    keys, values, index = cache.keys, cache.values, cache._idx
    with Speculation.begin([cache], 5):
        write(cache, [520, 521, 522, 523, 524])
    assert cache.keys is keys and cache.values is values and (cache.offset, cache._idx) == (20, index)
    fetched, _ = write(cache, [20])
    assert sorted(numbers_of(fetched)) == list(range(13, 21))


@pytest.mark.parametrize("following", [[1, 1], [3], [1, 3, 1]], ids=str)
@pytest.mark.parametrize("sinks", [0, 3])
def test_the_row_that_an_undone_single_row_overwrote_is_one_that_no_later_query_sees(
    sinks: int, following: list[int]
) -> None:
    """All turns of the ring. The overwritten row is lost, and nobody can tell."""
    case = rotating(8, sinks)
    for position in range(8, 8 + 2 * (8 - sinks) + 1):
        cache = feed(case, range(position))
        with Speculation.begin([cache], 1):
            keys, _ = write(cache, [500])
            assert cache.keys.shape[2] == 8 and 500 in numbers_of(keys)
        at = position
        for count in following:
            keys, _ = write(cache, range(at, at + count))
            at += count
            seen = set(case.seen_by(at - 1)) if count == 1 else {*case.seen_by(at - count), *range(at - count, at)}
            assert set(numbers_of(keys)) == seen


def test_a_single_row_after_a_block_shortens_the_buffer_first_and_still_comes_back() -> None:
    cache = full_ring()
    write(cache, [20, 21, 22])
    assert cache.keys.shape[2] > cache.max_size
    with Speculation.begin([cache], 1):
        write(cache, [523])
    keys, _ = write(cache, [23])
    assert sorted(numbers_of(keys)) == list(range(16, 24))


def test_a_single_row_that_grows_the_buffer_comes_back() -> None:
    cache = feed(rotating(8), range(4), 4)
    assert cache.keys.shape[2] == cache.offset < cache.max_size
    with Speculation.begin([cache], 1):
        write(cache, [504])
        assert cache.keys.shape[2] > 4
    keys, _ = write(cache, [4])
    assert numbers_of(keys) == [0, 1, 2, 3, 4]


def test_the_mask_of_mlx_lm_hides_sinks_from_the_later_rows_of_a_block() -> None:
    """A limit of verifying on a ring with sinks, and no matter of rollback: the rows are all there, single rows see the
    sinks, and a block's later rows do not."""
    case = rotating(8, 3)
    single, block = feed(case, range(20)), feed(case, range(20))
    assert_attends_exactly(case, single, 20, 1)
    mask = block.make_mask(4, return_array=True)
    keys, _ = write(block, range(20, 24))
    seen = [[number for number, seen in zip(numbers_of(keys), row, strict=True) if seen] for row in mask.tolist()]
    assert seen[0] == case.seen_by(20) == [0, 1, 2, 16, 17, 18, 19, 20]
    assert seen[2] == [2, 16, 17, 18, 19, 20, 21, 22] != case.seen_by(22)


steps = st.one_of(
    st.tuples(st.just("plain"), st.integers(1, 20), st.just(())),
    # rows, then the commits of the round as shares of what there is; no commit at all is an abort
    st.tuples(st.just("round"), st.integers(1, 16), st.lists(st.floats(0, 1), max_size=3).map(tuple)),
    st.tuples(st.just("broken"), st.integers(1, 16), st.just(())),
)


@settings(max_examples=250, deadline=None)
@given(
    window=st.integers(1, 12),
    sinks=st.integers(0, 11),
    step=st.sampled_from([2, 5, 256]),
    program=st.lists(steps, max_size=20),
)
def test_any_program_of_plain_writes_rounds_and_aborts_leaves_the_rows_a_list_would(
    window: int, sinks: int, step: int, program: list[tuple[str, int, tuple[float, ...]]]
) -> None:
    """R34."""
    sinks = min(sinks, window - 1)
    cache = RotatingKVCache(window, sinks)
    cache.step = step
    rows: list[int] = []
    number = 0
    for verb, count, commits in program:
        numbers = [(number + i) % 1000 for i in range(count)]
        number += count
        if verb == "plain":
            write(cache, numbers)
            kept = count
        else:
            with Speculation.begin([cache], count) as speculation:
                kept = 0
                if verb == "round":
                    write(cache, numbers)
                    for index, share in enumerate(commits):
                        kept = round(share * (kept if index else count))
                        speculation.commit(kept)
        rows += numbers[:kept]
        seen = rows if len(rows) < window else rows[:sinks] + rows[len(rows) - (window - 1) + sinks :]
        held = temporal_rows(cache)
        assert (numbers_of(held[0]) if held else []) == seen
        assert positions([cache]) == len(rows)
