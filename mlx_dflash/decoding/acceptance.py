"""Which proposed tokens the target accepts, and the token of its own that follows them; all on the device.

A *judge* is chosen before the loop starts and is asked once a round. Letters as in the papers on speculative sampling
(Leviathan et al. 2023, Chen et al. 2023): p is the target's distribution, q the one a proposed token was drawn from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import mlx.core as mx

from ..drafts.base import DraftSampler, Proposal
from .sampling import ExternalSampler, Filters


class Verdict(NamedTuple):
    """``accepted``: scalar int32, how many of the proposed tokens stand. ``token``: ``[1]`` int32, the target's own."""

    accepted: mx.array
    token: mx.array


class Judge(Protocol):
    """Decides a round. With ``proposal=None`` there is one row and the verdict is a plain decoding step."""

    def judge(self, logprobs: mx.array, proposal: Proposal | None, key: mx.array | None) -> Verdict:
        """``logprobs``: ``[n + 1, V]`` of the target after processors; row ``i`` follows the ``i``-th block token."""
        ...

    def draft_sampler(self, key: mx.array | None) -> DraftSampler | None:
        """How the draft should draw its tokens; ``None`` for its greedy choice."""
        ...

    needs_key: bool


def matching_prefix(chosen: mx.array, proposed: mx.array) -> mx.array:
    """Length of the longest prefix on which ``chosen [n + 1]`` (or longer) and ``proposed [n]`` agree: scalar int32."""
    agree = (chosen[: proposed.shape[0]] == proposed).astype(mx.int32)
    return mx.cumprod(agree).sum().astype(mx.int32)


def _verdict_by_match(chosen: mx.array, proposal: Proposal | None) -> Verdict:
    chosen = chosen.astype(mx.int32)
    if proposal is None:
        return Verdict(mx.array(0, mx.int32), chosen[:1])
    accepted = matching_prefix(chosen, proposal.tokens)
    return Verdict(accepted, mx.take(chosen, accepted[None], axis=0))


class GreedyJudge:
    """A proposed token stands while it is the target's own argmax (lowest id wins a tie, as in ``mx.argmax``)."""

    needs_key = False

    def judge(self, logprobs: mx.array, proposal: Proposal | None, key: mx.array | None) -> Verdict:
        return _verdict_by_match(mx.argmax(logprobs, axis=-1), proposal)

    def draft_sampler(self, key: mx.array | None) -> DraftSampler | None:
        return None


@dataclass(frozen=True)
class ExternalJudge:
    """For a caller's own sampler, whose distribution is unknown: sample every row from the target, and let a proposed
    token stand while it equals the sample. Rows are drawn independently, so the text has exactly the sampler's
    distribution; it equals rejection sampling with a one-hot q."""

    sampler: ExternalSampler
    needs_key = False

    def judge(self, logprobs: mx.array, proposal: Proposal | None, key: mx.array | None) -> Verdict:
        return _verdict_by_match(self.sampler(logprobs).reshape(-1), proposal)

    def draft_sampler(self, key: mx.array | None) -> DraftSampler | None:
        return None


@dataclass(frozen=True)
class RejectionJudge:
    """Rejection sampling with the residual: lossless for any q.

    Attributes:
        filters: the target's temperature and truncation; temperature > 0.
        sample_draft: draw the proposals from the draft's own distribution instead of taking its most likely tokens.
            Both are exact. A block's rows are marginals, not a joint sample, so the greedy choice is accepted at least
            as often in practice (measured on the bundled pair) and is the default.
    """

    filters: Filters
    sample_draft: bool = False
    needs_key = True

    def judge(self, logprobs: mx.array, proposal: Proposal | None, key: mx.array | None) -> Verdict:
        if proposal is None:
            token = mx.random.categorical(self.filters.log_weights(logprobs), axis=-1, key=key)
            return Verdict(mx.array(0, mx.int32), token.astype(mx.int32))
        assert key is not None
        accept_key, token_key = mx.random.split(key, 2)
        p = self.filters.probabilities(logprobs)
        uniforms = mx.random.uniform(shape=proposal.tokens.shape, key=accept_key)
        accepted, distribution = rejection(p, proposal, uniforms)
        token = mx.random.categorical(mx.log(distribution), key=token_key)
        return Verdict(accepted, token.reshape(1).astype(mx.int32))

    def draft_sampler(self, key: mx.array | None) -> DraftSampler | None:
        if not self.sample_draft:
            return None

        fresh = key

        def draw(logits: mx.array) -> tuple[mx.array, mx.array]:
            nonlocal fresh
            # One key for every call: slots drawn with the same noise would depend on each other beyond their q.
            assert fresh is not None
            fresh, own = mx.random.split(fresh, 2)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            weights = self.filters.log_weights(logprobs)
            tokens = mx.random.categorical(weights, axis=-1, key=own).astype(mx.int32)
            return tokens, mx.softmax(weights, axis=-1)

        return draw


def rejection(p: mx.array, proposal: Proposal, uniforms: mx.array) -> tuple[mx.array, mx.array]:
    """Accept token ``x`` at slot ``i`` iff ``u_i * q_i(x) < p_i(x)``; the first refusal ends the block.

    Args:
        p: ``[n + 1, V]`` float32, the target's distributions.
        proposal: ``n`` tokens with their q (one-hot, dense, or sparse over candidates).
        uniforms: ``[n]`` in [0, 1).

    Returns:
        ``accepted``: scalar int32. ``distribution``: ``[V]`` float32 of the token that follows: the residual
        ``max(p - q, 0)``, normalised, at a refusal (``p`` itself where that has no mass), ``p[n]`` when all stand.
    """
    n = proposal.tokens.shape[0]
    p_token = mx.take_along_axis(p[:n], proposal.tokens[:, None], axis=-1)[:, 0]
    stands = (uniforms * _token_q(proposal) < p_token).astype(mx.int32)
    accepted = mx.cumprod(stands).sum().astype(mx.int32)
    p_row = mx.take(p, accepted[None], axis=0)[0]
    # At full acceptance there is no slot n; the clamped row is computed and then ignored.
    slot = mx.minimum(accepted, n - 1)[None]
    residual = mx.maximum(p_row - _q_row(proposal, slot, p.shape[-1]), 0)
    mass = residual.sum()
    residual = mx.where(mass > 0, residual / mx.maximum(mass, 1e-38), p_row)
    return accepted, mx.where(accepted < n, residual, p_row)


def _token_q(proposal: Proposal) -> mx.array:
    """``[n]``: q of each proposed token, in its own slot."""
    tokens, q = proposal.tokens, proposal.probs
    if q is None:
        return mx.ones(tokens.shape, mx.float32)
    if proposal.candidates is None:
        return mx.take_along_axis(q, tokens[:, None], axis=-1)[:, 0]
    return mx.where(proposal.candidates == tokens[:, None], q, 0).sum(axis=-1)


def _q_row(proposal: Proposal, slot: mx.array, vocab_size: int) -> mx.array:
    """``[V]`` float32: q of one slot (``slot [1]``), scattered to the target's vocabulary."""
    q = proposal.probs
    if q is not None and proposal.candidates is None:
        return mx.take(q, slot, axis=0)[0]
    if q is None:
        ids = mx.take(proposal.tokens, slot, axis=0)
        mass = mx.ones((1,), mx.float32)
    else:
        assert proposal.candidates is not None
        ids = mx.take(proposal.candidates, slot, axis=0)[0]
        mass = mx.take(q, slot, axis=0)[0]
    return mx.zeros((vocab_size,), mx.float32).at[ids].add(mass)
