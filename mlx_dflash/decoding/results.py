"""What a round and a whole decoding say of themselves."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Round:
    """The tokens one round committed, already cut at a stop token and at the budget.

    Attributes:
        tokens: kept token ids, at least one.
        accepted: how many of them were proposed by the draft; the ``accepted`` first ones.
        depth: how many tokens were proposed, 0 for a plain step.
        logprobs: ``[rows, V]``, the target's log-probabilities; row ``i`` belongs to ``tokens[i]``.
        finish_reason: ``"stop"`` or ``"length"`` when the last token ends the text, else ``None``.
    """

    tokens: tuple[int, ...]
    accepted: int
    depth: int
    logprobs: mx.array
    finish_reason: str | None = None


@dataclass
class Stats:
    """Running account of one decoding.

    Attributes:
        mode: ``"speculative"`` or ``"plain"``: what is really happening now.
        mode_reason: why it is plain, or what narrowed it; ``None`` for undisturbed speculation.
        depth: tokens proposed a round when nothing limits it; 0 in plain mode.
        rounds: forward passes of the target after prefill, each committing at least one token.
        tokens: kept tokens.
        drafted / accepted: tokens proposed, and kept tokens that were proposed.
    """

    mode: str
    mode_reason: str | None = None
    depth: int = 0
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed by a round, the target's own included; exactly 1.0 for plain decoding."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def count(self, outcome: Round) -> None:
        self.rounds += 1
        self.tokens += len(outcome.tokens)
        self.drafted += outcome.depth
        self.accepted += outcome.accepted

    def drop(self, outcome: Round, kept: int) -> None:
        """Only ``kept`` tokens of the last round, which was counted, are part of the text after all."""
        self.tokens -= len(outcome.tokens) - kept
        self.accepted -= outcome.accepted - min(outcome.accepted, kept)
