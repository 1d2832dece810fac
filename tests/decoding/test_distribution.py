"""Invariant 2: sampled text has the target's distribution, whatever the draft proposes and however q is given.

The target is a table: the logits after a token are that token's row. A text is then a Markov chain, every step of which
is an independent draw from a known distribution, so a single long text is a chi-squared test with thousands of draws,
across rounds, accepted tokens, refusals and bonus tokens alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler
from scipy.stats import chi2

from mlx_dflash.decoding.acceptance import ExternalJudge, Judge, RejectionJudge
from mlx_dflash.decoding.depth import FixedDepth
from mlx_dflash.decoding.loop import Decoding, Request
from mlx_dflash.decoding.results import Stats
from mlx_dflash.decoding.sampling import Filters, log_softmax
from mlx_dflash.drafts.base import Proposal

VOCAB = 8
DRAWS = 3000
TABLE = mx.random.normal((VOCAB, VOCAB), key=mx.random.key(11)) * 1.5
DRAFT_TABLE = mx.random.normal((VOCAB, VOCAB), key=mx.random.key(12)) * 1.5


class TableTarget:
    """Logits depend on the last token only; features are its one-hot row; there is nothing to cache."""

    def forward(self, ids: mx.array, caches: list, taps: tuple[int, ...] = ()):
        return TABLE[ids], mx.eye(VOCAB)[ids]


class TableSession:
    """Proposes from another table. ``kind`` says how q is told: one-hot, dense, or sparse over candidates."""

    def __init__(self, kind: str) -> None:
        self.kind, self.position = kind, 0

    def commit(self, features: mx.array, position: int, tokens: Sequence[int]) -> None:
        assert position == self.position
        self.position += features.shape[1]

    def rewind(self, position: int) -> None:
        self.position = position

    def arrays(self) -> list[mx.array]:
        return []

    def propose(self, anchor: mx.array, depth: int, sampler) -> Proposal:
        # As in DFlash, a block's rows are drawn independently of each other.
        rows = DRAFT_TABLE[(anchor + mx.arange(depth)) % VOCAB]
        if self.kind == "one-hot" or sampler is None:
            return Proposal(mx.argmax(rows, axis=-1).astype(mx.int32))
        if self.kind == "dense":
            return Proposal(*sampler(rows))
        ids = mx.argsort(-rows, axis=-1)[:, :3].astype(mx.int32)
        slots, q = sampler(mx.take_along_axis(rows, ids, axis=-1))
        return Proposal(mx.take_along_axis(ids, slots[:, None], axis=-1)[:, 0], q, ids)


def text(judge: Judge, kind: str | None, seed: int = 0, draws: int = DRAWS) -> tuple[list[int], Stats]:
    decoding = Decoding(
        TableTarget(),
        [],
        Request([3], draws, frozenset(), judge, FixedDepth(4), key=mx.random.key(seed)),
        session=None if kind is None else TableSession(kind),
        max_depth=4,
        stats=Stats("speculative"),
    )
    decoding.prefill()
    return [token for outcome in decoding.rounds() for token in outcome.tokens], decoding.stats


def p_value(tokens: list[int], expected: np.ndarray) -> float:
    """Of the transition counts, against ``expected [V, V]``; raises where an impossible transition occurred."""
    counts = np.zeros((VOCAB, VOCAB))
    for before, after in zip([3, *tokens], tokens, strict=False):
        counts[before, after] += 1
    statistic, freedom = 0.0, 0
    for row, wanted in zip(counts, expected, strict=True):
        assert row[wanted == 0].sum() == 0, "a token outside the filters was emitted"
        mean = wanted * row.sum()
        # Cells too rare for the chi-squared approximation are pooled.
        rare = mean < 5
        cells = [(row[rare].sum(), mean[rare].sum()), *zip(row[~rare], mean[~rare], strict=True)]
        cells = [(n, m) for n, m in cells if m > 0]
        statistic += sum((n - m) ** 2 / m for n, m in cells)
        freedom += max(len(cells) - 1, 0)
    return float(chi2.sf(statistic, freedom)) if freedom else 1.0


def expected(filters: Filters) -> np.ndarray:
    return np.array(filters.probabilities(log_softmax(TABLE)), dtype=np.float64)


FILTERS = [
    Filters(temperature=0.3),
    Filters(temperature=1.0),
    Filters(temperature=1.5),
    Filters(temperature=0.3, top_p=0.95),
    Filters(temperature=1.0, top_k=3),
    Filters(temperature=1.5, min_p=0.1),
    Filters(temperature=1.5, top_p=0.9, min_p=0.05, top_k=5),
]


@pytest.mark.parametrize("filters", FILTERS, ids=lambda f: f"T{f.temperature}p{f.top_p}m{f.min_p}k{f.top_k}")
@pytest.mark.parametrize("kind", ["one-hot", "dense", "sparse"])
def test_speculative_sampling_has_the_targets_distribution(filters: Filters, kind: str) -> None:
    """Invariant 2, R48: the draft is far from the target, so every rule of the round is exercised."""
    tokens, stats = text(RejectionJudge(filters, sample_draft=kind != "one-hot"), kind)
    assert p_value(tokens, expected(filters)) > 1e-3
    assert 1.02 < stats.acceptance_length < 4, "both acceptance and refusal must happen for the test to mean anything"


@pytest.mark.parametrize("filters", FILTERS[:3], ids=lambda f: f"T{f.temperature}")
def test_plain_sampling_has_the_targets_distribution(filters: Filters) -> None:
    tokens, _ = text(RejectionJudge(filters), None)
    assert p_value(tokens, expected(filters)) > 1e-3


def test_a_callers_own_sampler_keeps_its_distribution_with_a_draft() -> None:
    filters = Filters(temperature=1.0, top_p=0.8)
    mx.random.seed(5)
    tokens, stats = text(ExternalJudge(make_sampler(temp=1.0, top_p=0.8)), "one-hot")
    assert p_value(tokens, expected(filters)) > 1e-3
    assert stats.acceptance_length > 1.02


def test_the_test_can_fail() -> None:
    """A judge that takes every proposal whatever p says is caught, and so is a residual that forgets q."""

    class Gullible(RejectionJudge):
        def judge(self, logprobs, proposal, key):
            verdict = super().judge(logprobs, proposal, key)
            return verdict if proposal is None else verdict._replace(accepted=mx.array(1, mx.int32))

    class Forgetful(RejectionJudge):
        def judge(self, logprobs, proposal, key):
            verdict = super().judge(logprobs, proposal, key)
            if proposal is None:
                return verdict
            row = mx.take(self.filters.log_weights(logprobs), verdict.accepted[None], axis=0)
            return verdict._replace(token=mx.random.categorical(row, key=key).astype(mx.int32))

    filters = Filters(temperature=1.0)
    for judge in (Gullible(filters), Forgetful(filters)):
        tokens, _ = text(judge, "one-hot")
        assert p_value(tokens, expected(filters)) < 1e-6


def test_the_same_seed_repeats_the_text_and_another_does_not() -> None:
    """R50, R51."""
    judge = RejectionJudge(Filters(temperature=1.5))
    first, again, other = (text(judge, "one-hot", seed, 60)[0] for seed in (1, 1, 2))
    assert first == again != other
