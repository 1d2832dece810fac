"""Lossless speculative decoding with DFlash-family drafts on MLX."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import generate, load, stream_generate
    from .comparison import Comparison, compare
    from .errors import (
        CheckpointError,
        ConfigError,
        MlxDflashError,
        ModelNotFoundError,
        OptionError,
        PairingError,
        UnsupportedError,
    )
    from .options import GenerateOptions
    from .responses import GenerationResponse

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Comparison",
    "ConfigError",
    "GenerateOptions",
    "GenerationResponse",
    "MlxDflashError",
    "ModelNotFoundError",
    "OptionError",
    "PairingError",
    "UnsupportedError",
    "__version__",
    "compare",
    "generate",
    "load",
    "stream_generate",
]

_HOMES = {
    "api": ("generate", "load", "stream_generate"),
    "comparison": ("Comparison", "compare"),
    "options": ("GenerateOptions",),
    "responses": ("GenerationResponse",),
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: MLX, mlx-lm and transformers take seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "errors")
    globals()[name] = getattr(import_module(f".{home}", __name__), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
