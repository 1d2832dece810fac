"""What cannot be rolled back is refused before anything is generated, by name."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
)

from mlx_dflash.cache import Speculation, check_rollback
from mlx_dflash.errors import UnsupportedError
from tests.versions import BEFORE_0_32

from .rows import CASES


class Sharper(KVCache):
    """A subclass may write differently; by its name nobody can tell."""


class SharperList(CacheList):
    pass


REFUSED = [
    (ArraysCache(2), "cache 2 (ArraysCache)"),
    (BatchKVCache([0]), "cache 2 (BatchKVCache)"),
    (BatchRotatingKVCache(8, [0]), "cache 2 (BatchRotatingKVCache)"),
    (Sharper(), "cache 2 (Sharper)"),
    (SharperList(KVCache()), "cache 2 (SharperList)"),
    (object(), "cache 2 (object)"),
    (None, "cache 2 (NoneType)"),
    (CacheList(KVCache(), CacheList(KVCache(), ArraysCache(2))), "cache 2[1][1] (ArraysCache)"),
    (RotatingKVCache(8, keep=4), "cache 2 (RotatingKVCache): keep=4: mlx-lm's mask hides the first 4 rows"),
]


@pytest.mark.parametrize(("cache", "name"), REFUSED, ids=[name for _, name in REFUSED])
def test_a_cache_that_cannot_be_rolled_back_is_refused_by_place_and_class(cache: Any, name: str) -> None:
    """R36: a hybrid target is refused at load and not in its first request."""
    with pytest.raises(UnsupportedError) as caught:
        check_rollback([KVCache(), KVCache(), cache, ArraysCache(1)])
    message = str(caught.value)
    assert message.startswith(name) and "\n" not in message


@pytest.mark.parametrize("cache", [cache for cache, _ in REFUSED[:-1]], ids=[name for _, name in REFUSED[:-1]])
def test_a_transaction_over_such_a_cache_does_not_begin(cache: Any) -> None:
    """R36."""
    with pytest.raises(UnsupportedError, match=r"^cache 1"):
        Speculation.begin([KVCache(), cache], 2)


@pytest.mark.skipif(not BEFORE_0_32, reason="since mlx-lm 0.32 a chunked cache drops no row that its chunk needs")
def test_a_chunked_cache_is_refused_where_mlx_lm_drops_rows_that_its_chunk_needs() -> None:
    with pytest.raises(UnsupportedError, match=r"^cache 0 \(ChunkedKVCache\): mlx-lm 0\.31\..*, expected 0\.32\.0"):
        check_rollback([ChunkedKVCache(8)])


@pytest.mark.parametrize("case", [case for case in CASES if not getattr(case.fresh(), "keep", 0)], ids=str)
def test_every_kind_that_can_be_rolled_back_passes(case: Any) -> None:
    check_rollback([case.fresh(), case.fresh()])


def test_no_caches_pass() -> None:
    check_rollback([])
