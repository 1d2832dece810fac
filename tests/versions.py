"""Which mlx-lm is installed. Python 3.10 gets 0.31.3, the last one for it, which computes a few things otherwise."""

from __future__ import annotations

import mlx_lm

BEFORE_0_32 = tuple(int(part) for part in mlx_lm.__version__.split(".")[:2]) < (0, 32)
