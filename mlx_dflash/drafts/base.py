"""What the decoding loop knows of a draft: four verbs and a report. Nothing here names a draft family.

A :class:`Draft` is immutable weights and config, shared by every request. A :class:`DraftSession` is what one sequence
knows of its past. The session is told every committed position exactly once, in order (``commit``), also while no
tokens are being drafted, so drafting can start or resume at any position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

DraftSampler = Callable[[mx.array], "tuple[mx.array, mx.array]"]
"""``logits [n, V] -> (tokens [n] int32, q [n, V] float32)``: draws one token a row and says from which distribution.

Every call draws anew, so a draft whose rows depend on each other calls it row by row. ``V`` may be any set of choices,
such as a row's candidates."""


@dataclass(frozen=True)
class Proposal:
    """Tokens proposed by a draft for the positions after the anchor, lazily evaluated.

    Attributes:
        tokens: ``[n]`` int32, *target* ids.
        probs: what the tokens were drawn from. ``None`` means a one-hot q (the tokens are the draft's greedy choice);
            ``[n, V]`` float32 is a dense q over the target's vocabulary; with ``candidates`` it is ``[n, k]``.
        candidates: ``[n, k]`` int32 target ids that ``probs`` refers to, for a sparse q. ``None`` for a dense q.
        finite: scalar bool array, false when any draft logit was NaN or infinite; read by the loop in the round's one
            synchronisation.
    """

    tokens: mx.array
    probs: mx.array | None = None
    candidates: mx.array | None = None
    finite: mx.array | None = None


class DraftSession(Protocol):
    """The draft's state of one sequence."""

    @property
    def position(self) -> int:
        """Number of committed positions the session has been told: the position of the anchor."""
        ...

    def commit(self, features: mx.array | None, position: int, tokens: Sequence[int]) -> None:
        """Take in positions that are now part of the sequence.

        Args:
            features: ``[1, rows, T * H_target]``, the taps concatenated on the last axis in ``tap_layers`` order;
                ``None`` when the draft has no taps.
            position: absolute position of the first row; must equal ``self.position``.
            tokens: ids at these positions, one a row. The token after the last of them is the next anchor.

        Raises:
            ValueError: a position was skipped or told twice.
        """
        ...

    def propose(self, anchor: mx.array, depth: int, sampler: DraftSampler | None) -> Proposal | None:
        """Propose up to ``depth`` tokens to follow the anchor; ``None`` for none, which makes a plain step.

        Args:
            anchor: ``[1]`` int32, the last committed token; it sits at ``self.position``. The host knows it already,
                so reading it waits for nothing.
            depth: 1 .. ``Draft.max_depth``.
            sampler: ``None`` proposes the greedy choice with a one-hot q.
        """
        ...

    def rewind(self, position: int) -> None:
        """Forget every position from ``position`` on. Rewinding to a position that the window no longer reaches back
        from raises ``ValueError``."""
        ...

    def arrays(self) -> Sequence[mx.array]:
        """The arrays that make up the state, so that the caller can schedule their evaluation."""
        ...


@dataclass(frozen=True)
class DraftReport:
    """What was loaded and how it was understood; printed at load and carried by results."""

    family: str
    dialect: str
    path: str
    block_size: int
    max_depth: int
    tap_layers: tuple[int, ...]
    head: str
    """``"own"`` or ``"target"``, with the reason, such as ``own (lm_head.weight in the checkpoint)``."""
    embedding: str
    dtype: str
    quantization: str
    weight_bytes: int
    layers: tuple[str, ...] = ()
    """One entry a draft layer, such as ``sliding 2048, causal``."""
    ignored: tuple[str, ...] = ()
    """Config keys and tensors that were read and deliberately not used, each with the reason."""
    config: tuple[tuple[str, Any, str], ...] = ()
    """The config as it was understood: ``(name, value, the place it was read from or the rule that gave it)``."""
    extra: dict[str, Any] = field(default_factory=dict)


class Draft(Protocol):
    """Immutable weights and configuration of one draft."""

    block_size: int
    """Rows of the trained block."""
    max_depth: int
    """The most tokens one round can propose: ``block_size - 1`` for predict-at drafts, ``block_size`` for
    predict-next."""
    tap_layers: tuple[int, ...]
    """Target layers whose outputs are the features, 0-based; -1 is the embedding output, and the number of layers the
    output of the final norm. Empty for a draft that needs no features."""
    report: DraftReport

    def open(self, target: TargetFacts, position: int = 0, memory: TargetMemory | None = None) -> DraftSession:
        """Start a sequence against ``target``.

        Args:
            position: above 0 the session knows nothing of the positions before it (a prompt cache brought them): its
                context starts there.
            memory: the target's own keys and values of this sequence, for the few drafts that attend to them.
        """
        ...

    def widened(self) -> Draft | None:
        """The same draft computing in float32, or ``None`` when it already does."""
        ...


class TargetMemory(Protocol):
    """Read-only view of what the target's caches hold of one sequence, always of exactly the committed positions."""

    def keys_values(self, layer: int) -> tuple[mx.array, mx.array]:
        """``[1, kv heads, rows, head dim]`` twice: rotated keys and the values of the newest ``rows`` positions that
        the cache of target layer ``layer`` holds, in time order.

        Raises:
            UnsupportedError: that layer keeps no such rows.
        """
        ...


class TargetFacts(Protocol):
    """The part of a target that a draft may use. Drafts never touch the target's caches."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    """Rows of the target's embedding table (may be padded beyond the tokenizer)."""
    embed_scale: float
    """What the target's own forward multiplies embedding rows with (``sqrt(H)`` for Gemma), 1.0 when it does not."""
    model_type: str

    def embed(self, ids: mx.array) -> mx.array:
        """``[..., L] int -> [..., L, H]``: raw rows of the embedding table, without any scale or norm."""
        ...

    def head(self, hidden: mx.array) -> mx.array:
        """``[..., H] -> [..., V]``: raw product with the output head, without softcap or multiplier."""
        ...
