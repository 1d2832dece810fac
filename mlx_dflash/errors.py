"""Every error a user can see, in one small tree.

Each message is one line that names the file, key or flag, what was found and what was expected. The command line
prints it after ``error:`` and exits non-zero; library callers catch :class:`MlxDflashError` or one of its kinds.
"""

from __future__ import annotations


class MlxDflashError(Exception):
    """Base of all errors raised on purpose by this package."""


class ModelNotFoundError(MlxDflashError):
    """A model name leads to no usable folder: not on disk, not in the Hub cache, or not reachable."""


class CheckpointError(MlxDflashError):
    """A checkpoint file is missing, truncated, of a refused kind, or holds wrong tensors."""


class ConfigError(MlxDflashError):
    """A ``config.json`` lacks a required key, or a key holds a value that cannot be right."""


class PairingError(MlxDflashError):
    """Target and draft are both sound but do not belong together (width, depth, vocabulary, tokenizer)."""


class UnsupportedError(MlxDflashError):
    """Something legal that this package does not do: a model family, a cache class, a combination of options."""


class OptionError(MlxDflashError, ValueError):
    """An argument or flag has a value outside its range."""
