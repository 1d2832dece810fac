"""After ``commit(keep)`` every cache is as if only ``keep`` rows had been written, and goes on like that."""

from __future__ import annotations

import pytest

from mlx_dflash.cache import Speculation

from .rows import CASES, PROMPTS, REJECTED, Case, assert_attends_exactly, assert_holds_exactly, feed, write

ROWS = [1, 2, 5, 16]


def block(start: int, rows: int, keep: int) -> list[int]:
    """``keep`` true rows, then rejected ones."""
    return [*range(start, start + keep), *range(REJECTED, REJECTED + rows - keep)]


def verified(case: Case, cache: object, prompt: int, rows: int, keep: int) -> Speculation:
    with Speculation.begin([cache], rows) as speculation:
        write(cache, block(prompt, rows, keep))
        speculation.commit(keep)
    return speculation


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rolled_back_cache_holds_what_a_cache_fed_only_the_kept_rows_holds(case: Case, prompt: int) -> None:
    """R34, R39: prompts below, at, above and far above the window, fed one by one and in one write."""
    for rows in ROWS:
        for keep in range(rows + 1):
            for writes in {1, prompt or 1}:
                cache = feed(case, range(prompt), writes)
                verified(case, cache, prompt, rows, keep)
                assert_holds_exactly(case, cache, prompt + keep)


@pytest.mark.parametrize("following", [(1, 1), (3, 1)], ids=str)
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_queries_after_a_rollback_see_exactly_what_they_should(
    case: Case, prompt: int, following: tuple[int, ...]
) -> None:
    """R34: also when the next write is a single row (depth 0, plain decoding), where a wrong rollback shows."""
    for rows in ROWS:
        for keep in {0, 1, rows // 2, rows - 1, rows}:
            cache = feed(case, range(prompt), prompt or 1)
            verified(case, cache, prompt, rows, keep)
            position = prompt + keep
            for count in following:
                if case.sinks and count > 1:
                    # mlx-lm's mask hides the sinks from later rows of a block, with or without a rollback before.
                    write(cache, range(position, position + count))
                else:
                    assert_attends_exactly(case, cache, position, count)
                position += count
            assert_holds_exactly(case, cache, position)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rounds_of_every_width_follow_each_other_without_drift(case: Case) -> None:
    """R34: scripted rejections over a whole generation, with plain steps in between."""
    cache, position = feed(case, range(6), 6), 6
    for turn in range(60):
        rows = (5, 1, 3, 2, 8, 1, 1, 4)[turn % 8]
        keep = (turn * 7 + turn // 5) % (rows + 1)
        verified(case, cache, position, rows, keep)
        position += keep
        assert_holds_exactly(case, cache, position)
        if turn % 3 == 0:
            assert_attends_exactly(case, cache, position, 1)
            position += 1


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_consumer_that_stops_inside_the_block_cuts_it_shorter_and_shorter(case: Case, prompt: int) -> None:
    """R28: the second and third commits keep fewer rows, down to none."""
    cache = feed(case, range(prompt), prompt or 1)
    with Speculation.begin([cache], 6) as speculation:
        write(cache, range(prompt, prompt + 6))
        speculation.commit(6)
    for keep in (6, 4, 4, 1, 0, 0):
        speculation.commit(keep)
        assert_holds_exactly(case, cache, prompt + keep)
    assert_attends_exactly(case, cache, prompt, 1)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_single_row_can_be_taken_back_after_it_was_kept(case: Case, prompt: int) -> None:
    """R28: a plain step whose token a stop string removes; on a full ring it has overwritten the oldest row."""
    for writes in {1, prompt or 1}:
        cache = feed(case, range(prompt), writes)
        speculation = verified(case, cache, prompt, 1, 1)
        assert_holds_exactly(case, cache, prompt + 1)
        speculation.commit(0)
        assert_holds_exactly(case, cache, prompt)
        assert_attends_exactly(case, cache, prompt, 1)


def test_a_first_block_that_keeps_nothing_leaves_an_empty_cache() -> None:
    for case in CASES:
        cache = case.fresh()
        verified(case, cache, 0, 4, 0)
        assert cache.empty(), case.name
