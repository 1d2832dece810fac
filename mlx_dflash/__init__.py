"""Lossless speculative decoding with DFlash-family drafts on MLX."""

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
from .responses import GenerationResponse

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Comparison",
    "ConfigError",
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
