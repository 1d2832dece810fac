"""What must hold for every family on a tiny pair, however its weights came about: the text, its distribution, the
caches. Random weights accept little, so a draft is also given a *helping* head where its family allows one."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import mlx.core as mx
import scipy.stats

from mlx_dflash.cache.views import temporal_rows
from mlx_dflash.decoding.acceptance import RejectionJudge
from mlx_dflash.decoding.sampling import Filters
from tests.decoding.runs import plain, prompt_of, run, start, target

LENGTHS = (1, 5, 19)
"""Prompt lengths: nothing before the anchor, a few rows, and more than the tiny targets' window of 8."""


def check_greedy_text_and_caches(kind: str, draft: Any, *, depths: tuple[int, ...], tokens: int = 24) -> int:
    """Invariants 1 and 3: the text is plain greedy decoding's, and after every round caches equal those of a plain run
    up to that position. Returns how many proposed tokens were accepted in all."""
    accepted = 0
    for length, depth in product(LENGTHS, depths):
        prompt = prompt_of(length)
        expected = list(plain(kind, tuple(prompt), tokens))

        def compare(result: Any, outcome: Any, prompt: list[int] = prompt) -> None:
            fed = (prompt + result.tokens)[: result.decoding.position]
            fresh = target(kind).make_caches()
            target(kind).forward(mx.array(fed)[None], fresh)
            for own, other in zip(result.caches, fresh, strict=True):
                for a, b in zip(temporal_rows(own), temporal_rows(other), strict=True):
                    assert a.shape == b.shape
                    assert mx.allclose(a, b, atol=1e-4).item()

        result = run(kind, prompt, draft, depth=depth, max_tokens=tokens, each=compare)
        assert result.tokens == expected, (length, depth)
        assert result.decoding.stats.mode == "speculative"
        accepted += result.decoding.stats.accepted
    return accepted


def check_distribution(kind: str, draft: Any, *, depth: int, runs: int = 300) -> None:
    """Invariant 2: the joint distribution of the first two tokens is the target's (top 3 of each, so 9 outcomes),
    with proposals drawn from the draft's own q."""
    prompt = prompt_of(5)
    filters = Filters(temperature=1.0, top_k=3)
    p = _joint(kind, prompt, filters)
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(runs):
        decoding = start(
            kind,
            prompt,
            draft,
            depth=depth,
            max_tokens=depth + 1,
            judge=RejectionJudge(filters, sample_draft=True),
            key=mx.random.key(seed),
        )
        tokens: list[int] = []
        for outcome in decoding.rounds():
            tokens += outcome.tokens
            if len(tokens) >= 2:
                break
        seen[tuple(tokens[:2])] += 1
    assert set(seen) <= set(p), "a token outside the target's support was emitted"
    outcomes, mass = list(p), sum(p.values())  # which is 1 but for rounding, and scipy insists
    test = scipy.stats.chisquare([seen[o] for o in outcomes], [runs * p[o] / mass for o in outcomes])
    assert test.pvalue > 1e-3, (test.pvalue, seen, p)


def _joint(kind: str, prompt: list[int], filters: Filters) -> dict[tuple[int, int], float]:
    """Exact probabilities of every pair of first tokens that the filters leave."""

    def following(tokens: list[int]) -> dict[int, float]:
        logits, _ = target(kind).forward(mx.array(tokens)[None], target(kind).make_caches())
        row = logits[0, -1:].astype(mx.float32)
        p = filters.probabilities(row - mx.logsumexp(row, axis=-1, keepdims=True))[0].tolist()
        return {token: mass for token, mass in enumerate(p) if mass > 0}

    return {
        (first, second): a * b
        for first, a in following(prompt).items()
        for second, b in following([*prompt, first]).items()
    }
