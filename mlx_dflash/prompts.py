"""What a caller may hand over as a prompt or as prompt caches, and what is refused, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .cache import positions
from .errors import OptionError
from .target import Target


def encode_prompt(target: Target, tokenizer: TokenizerWrapper, prompt: str | Sequence[int] | mx.array) -> list[int]:
    """Token ids, at least one, all of them rows of the target's table.

    Raises:
        OptionError: saying what was found instead.
    """
    ids = _encode_text(tokenizer, prompt) if isinstance(prompt, str) else _as_ids(prompt)
    if not ids:
        raise OptionError("prompt: found no tokens, expected at least one")
    target.validate_ids(ids)
    return ids


def _encode_text(tokenizer: TokenizerWrapper, prompt: str) -> list[int]:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise OptionError(
            f"prompt: found {prompt[error.start]!r} at character {error.start}, half of a surrogate pair; expected text"
        ) from None
    special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
    return list(tokenizer.encode(prompt, add_special_tokens=special))


def _as_ids(prompt: Any) -> list[int]:
    """Token ids of one sequence; nothing is rounded, cut to 32 bits or flattened."""
    if isinstance(prompt, mx.array):
        if prompt.ndim != 1 or not mx.issubdtype(prompt.dtype, mx.integer):
            raise OptionError(
                f"prompt: found {prompt.dtype} of shape {list(prompt.shape)}, expected whole numbers of shape [tokens]"
            )
        return np.array(prompt).tolist()
    try:
        if isinstance(prompt, (bytes, bytearray)):
            raise TypeError
        return [index(token) for token in prompt]
    except TypeError:
        raise OptionError(f"prompt: found {type(prompt).__name__}, expected text or a list of token ids") from None


def check_prompt_cache(caches: Any, target: Target) -> None:
    """Caches of the right number, each an object of its own: models index them without looking."""
    expected = len(target.make_caches())
    if not isinstance(caches, list) or len(caches) != expected:
        found = f"{len(caches)} caches" if isinstance(caches, list) else type(caches).__name__
        raise OptionError(
            f"prompt_cache: found {found}, expected a list of the {expected} that make_prompt_cache gives"
        )
    for place, cache in enumerate(caches):
        if not hasattr(type(cache), "state"):
            raise OptionError(f"prompt_cache: found {type(cache).__name__} as cache {place}, expected mlx-lm's caches")
    if len({id(cache) for cache in caches}) != expected:
        raise OptionError("prompt_cache: found one cache object at several places, expected one for each")


def held_positions(caches: list[Any]) -> int:
    """How many positions the caches hold. Raises OptionError where they disagree."""
    try:
        return positions(caches)
    except RuntimeError as error:
        raise OptionError(f"prompt_cache: {error}; expected the same number in all of them") from None
