"""The model whose output is wanted: loading it, tapping its layers, using its embedding and head, and its end tokens.

Knows mlx-lm models and nothing of drafts, rounds or text.
"""

from __future__ import annotations

from .ending import end_tokens
from .loading import load_target
from .model import Target

__all__ = ["Target", "end_tokens", "load_target"]
