"""Drafts without weights: perfect (what the target would say), hostile (always wrong), scripted (a fixed pattern).

They know the target's own continuation of a prompt beforehand, so that a test can decide exactly which proposals stand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_dflash.drafts.base import DraftReport, DraftSampler, Proposal


def report(block_size: int, taps: tuple[int, ...]) -> DraftReport:
    return DraftReport(
        family="stub",
        dialect="stub",
        path="stub",
        block_size=block_size,
        max_depth=block_size - 1,
        tap_layers=taps,
        head="target",
        embedding="target",
        dtype="float32",
        quantization="none",
        weight_bytes=0,
    )


class StubDraft:
    """Proposes from a known sequence; ``right(round, slot)`` says whether a slot is proposed rightly."""

    def __init__(
        self,
        sequence: Sequence[int],
        right: Callable[[int, int], bool],
        *,
        vocab_size: int,
        block_size: int = 16,
        taps: tuple[int, ...] = (0,),
    ) -> None:
        self.sequence, self.right, self.vocab_size = list(sequence), right, vocab_size
        self.block_size, self.max_depth, self.tap_layers = block_size, block_size - 1, taps
        self.report = report(block_size, taps)
        self.sessions: list[StubSession] = []

    def open(self, target, position: int = 0, memory=None) -> StubSession:
        self.sessions.append(StubSession(self, position))
        return self.sessions[-1]

    def widened(self):
        return None


class StubSession:
    """Keeps every feature row it is told, so that tests can look at what reached the draft."""

    def __init__(self, draft: StubDraft, position: int) -> None:
        self.draft, self.start, self.position = draft, position, position
        self.features: list[mx.array] = []
        self.tokens: list[int] = []
        self.rounds = 0
        self.anchors: list[tuple[int, int]] = []

    def commit(self, features: mx.array, position: int, tokens: Sequence[int]) -> None:
        if position != self.position or len(tokens) != features.shape[1]:
            raise ValueError(f"told position {position} with {len(tokens)} tokens, expected {self.position}")
        self.features.append(features)
        self.tokens += tokens
        self.position += features.shape[1]

    def propose(self, anchor: mx.array, depth: int, sampler: DraftSampler | None) -> Proposal:
        known = self.draft.sequence[self.position + 1 : self.position + 1 + depth]
        known += [0] * (depth - len(known))
        tokens = [
            token if self.draft.right(self.rounds, slot) else (token + 1) % self.draft.vocab_size
            for slot, token in enumerate(known)
        ]
        self.rounds += 1
        return Proposal(mx.array(tokens, mx.int32), finite=mx.array(True))

    def rewind(self, position: int) -> None:
        rows = mx.concatenate(self.features, axis=1)[:, : position - self.start]
        self.features, self.position = [rows], position
        del self.tokens[position - self.start :]

    def arrays(self) -> list[mx.array]:
        return self.features


def perfect(sequence: Sequence[int], **options) -> StubDraft:
    return StubDraft(sequence, lambda round_, slot: True, **options)


def hostile(sequence: Sequence[int], **options) -> StubDraft:
    return StubDraft(sequence, lambda round_, slot: False, **options)


def scripted(sequence: Sequence[int], accepts: Sequence[int], **options) -> StubDraft:
    """Round ``r`` proposes ``accepts[r % len]`` right tokens, then a wrong one, then right ones again."""
    return StubDraft(sequence, lambda round_, slot: slot != accepts[round_ % len(accepts)], **options)
