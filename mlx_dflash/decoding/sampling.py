"""From target logits to the distribution a token is drawn from: mlx-lm's processors and filters, in mlx-lm's order.

Knows arrays and mlx-lm's callables; knows nothing of drafts, caches or text. Shapes: a *row* is one position, ``V`` the
vocabulary; a block is verified as ``[rows, V]`` with the same arithmetic a single row would get.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from ..checks import require_integer, require_number
from ..errors import OptionError

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""mlx-lm's interface: ``(tokens [L], logits [1, V]) -> logits [1, V]``."""

ExternalSampler = Callable[[mx.array], mx.array]
"""mlx-lm's interface: ``logprobs [rows, V] -> tokens [rows]``."""


@dataclass(frozen=True)
class Filters:
    """Temperature and truncation, with mlx-lm's meaning: top-p, then min-p, then top-k cut the distribution at
    temperature 1, and the temperature sharpens what is left.

    Attributes:
        temperature: 0 is greedy.
        top_p: mass of the nucleus, off outside (0, 1).
        min_p: least probability relative to the most likely token, 0 is off.
        min_tokens_to_keep: how many tokens ``min_p`` must leave.
        top_k: number of tokens kept, 0 is off; at or above ``V`` it keeps all.
    """

    temperature: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0

    def __post_init__(self) -> None:
        require_number("temp", self.temperature, 0.0, math.inf)
        require_number("top_p", self.top_p, 0.0, 1.0)
        require_number("min_p", self.min_p, 0.0, 1.0)
        require_integer("top_k", self.top_k, 0)
        require_integer("min_tokens_to_keep", self.min_tokens_to_keep, 1)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def truncate(self, logprobs: mx.array) -> mx.array:
        """``[rows, V]`` log-probabilities with every token outside the filters set to ``-inf``; same dtype."""
        if 0 < self.top_p < 1:
            logprobs = apply_top_p(logprobs, self.top_p)
        if self.min_p > 0:
            # The tokens to keep are put back here: mlx-lm's function fails when there are fewer, and before 0.32 with
            # any number above one; as a compiled one it then leaves MLX's global random state unusable.
            before, keep = logprobs, min(self.min_tokens_to_keep, logprobs.shape[-1])
            logprobs = apply_min_p(logprobs, self.min_p)
            if keep > 1:
                top = mx.argpartition(before, kth=-keep, axis=-1)[..., -keep:]
                logprobs = mx.put_along_axis(logprobs, top, mx.take_along_axis(before, top, axis=-1), axis=-1)
        if 0 < self.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, self.top_k)
        return logprobs

    def log_weights(self, logprobs: mx.array) -> mx.array:
        """``[rows, V]`` float32, unnormalised: what mlx-lm hands to ``mx.random.categorical``."""
        return self.truncate(logprobs).astype(mx.float32) * (1.0 / self.temperature)

    def probabilities(self, logprobs: mx.array) -> mx.array:
        """``[rows, V]`` float32: the distribution each row's token is drawn from."""
        return mx.softmax(self.log_weights(logprobs), axis=-1)


def log_softmax(logits: mx.array) -> mx.array:
    """``[rows, V] -> [rows, V]`` in the logits' own dtype, computed as mlx-lm does so that argmax ties fall alike."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def apply_processors(processors: Sequence[LogitsProcessor], tokens: mx.array, logits: mx.array) -> mx.array:
    """Run mlx-lm logits processors over the rows of a block, each row with its own history.

    Args:
        processors: applied in order.
        tokens: ``[history + rows]``: everything fed so far, then the block. Row ``j`` sees it up to its own input.
        logits: ``[rows, V]``.

    Rejected tokens never enter a history: the next block brings its own.
    """
    rows = logits.shape[0]
    history = tokens.shape[0] - rows
    processed = []
    for row in range(rows):
        seen = tokens[: history + row + 1]
        row_logits = logits[row : row + 1]
        for processor in processors:
            row_logits = processor(seen, row_logits)
        processed.append(row_logits)
    return processed[0] if rows == 1 else mx.concatenate(processed, axis=0)


def build_processors(
    vocab_size: int,
    *,
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int = 20,
    presence_penalty: float | None = None,
    presence_context_size: int = 20,
    frequency_penalty: float | None = None,
    frequency_context_size: int = 20,
) -> list[LogitsProcessor]:
    """mlx-lm's penalties and bias, after checking what mlx-lm does not.

    The ``*_context_size`` windows (default 20 tokens, mlx-lm's) say how far back a penalty looks. ``vocab_size`` is 0
    where it is not known.

    Raises:
        OptionError: a penalty or window outside its range, or a biased token id outside ``0..vocab_size-1``.
    """
    for name, size in (
        ("repetition_context_size", repetition_context_size),
        ("presence_context_size", presence_context_size),
        ("frequency_context_size", frequency_context_size),
    ):
        require_integer(name, size, 1)
    if repetition_penalty is not None:
        require_number("repetition_penalty", repetition_penalty, 0.0)
    for name, penalty in (("presence_penalty", presence_penalty), ("frequency_penalty", frequency_penalty)):
        if penalty is not None:
            require_number(name, penalty)
    return make_logits_processors(
        _biases({} if logit_bias is None else logit_bias, vocab_size) or None,
        repetition_penalty,
        repetition_context_size,
        presence_penalty,
        presence_context_size,
        frequency_penalty,
        frequency_context_size,
    )


def _biases(logit_bias: Mapping[int, float], vocab_size: int) -> dict[int, float]:
    """Checked, with ids as whole numbers: JSON writes them as text. Minus infinity is legal and bans a token."""
    if not isinstance(logit_bias, Mapping):
        raise OptionError(f"logit_bias: found {type(logit_bias).__name__}, expected a mapping of token ids to numbers")
    biases = {}
    for key, bias in logit_bias.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        if type(token) is not int or token < 0 or (vocab_size and token >= vocab_size):
            raise OptionError(f"logit_bias: found token id {key!r}, expected 0..{max(vocab_size - 1, 0) or ''}")
        if bias != -math.inf:
            require_number(f"logit_bias of token {token}", bias)
        biases[token] = float(bias)
    return biases
