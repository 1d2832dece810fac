"""Transactions over mlx-lm caches: write a block of rows, keep a prefix, exactly. Knows no model, draft or token."""

from .speculation import Speculation, check_rollback
from .views import cache_arrays, positions, temporal_rows

__all__ = ["Speculation", "cache_arrays", "check_rollback", "positions", "temporal_rows"]
