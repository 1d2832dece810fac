"""Which proposed tokens stand: parity with the numbers of a float64 reference, and the rules one by one."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_dflash.decoding.acceptance import ExternalJudge, GreedyJudge, RejectionJudge, matching_prefix, rejection
from mlx_dflash.decoding.sampling import Filters
from mlx_dflash.drafts.base import Proposal

GOLDEN = Path(__file__).parent.parent / "golden" / "acceptance" / "rejection"
META = json.loads((GOLDEN / "meta.json").read_text())
CASES = {
    name: mx.array(value.astype(np.float32 if value.dtype.kind == "f" else np.int32))
    for name, value in load_file(GOLDEN / "cases.safetensors").items()
}


def sparse(q: mx.array, tokens: mx.array, k: int) -> Proposal:
    """The same q, listed as k candidates a row."""
    ids = mx.argsort(-q, axis=-1)[:, :k].astype(mx.int32)
    return Proposal(tokens, mx.take_along_axis(q, ids, axis=-1), ids)


@pytest.mark.parametrize("index", range(len(META["cases"])))
def test_accepted_count_and_final_distribution_equal_the_reference(index: int) -> None:
    case = {key: CASES[f"c{index}.{key}"] for key in ("target_probs", "draft_probs", "draft_tokens", "uniforms")}
    proposal = Proposal(case["draft_tokens"], case["draft_probs"])
    accepted, distribution = rejection(case["target_probs"], proposal, case["uniforms"])
    assert accepted.item() == CASES[f"c{index}.accepted"].item() == META["cases"][index]["accepted"]
    assert mx.allclose(distribution, CASES[f"c{index}.final_distribution"], atol=1e-5).item()


@pytest.mark.parametrize("index", range(0, len(META["cases"]), 3))
def test_a_sparse_q_that_lists_every_token_decides_as_the_dense_one(index: int) -> None:
    p, q = CASES[f"c{index}.target_probs"], CASES[f"c{index}.draft_probs"]
    tokens, uniforms = CASES[f"c{index}.draft_tokens"], CASES[f"c{index}.uniforms"]
    dense = rejection(p, Proposal(tokens, q), uniforms)
    listed = rejection(p, sparse(q, tokens, q.shape[-1]), uniforms)
    assert dense[0].item() == listed[0].item()
    assert mx.allclose(dense[1], listed[1], atol=1e-6).item()


@pytest.mark.parametrize("index", sorted(key.split(".")[0] for key in CASES if key.endswith(".target_argmax")))
def test_greedy_acceptance_is_the_longest_matching_prefix(index: str) -> None:
    chosen, proposed = CASES[f"{index}.target_argmax"], CASES[f"{index}.draft_tokens"]
    accepted = matching_prefix(chosen, proposed)
    assert accepted.item() == CASES[f"{index}.accepted"].item()
    assert chosen[accepted.item()].item() == CASES[f"{index}.next_token"].item()


def test_the_emitted_token_has_exactly_the_targets_distribution() -> None:
    """Sum over the proposed token of q(x) * (accept + refuse * residual) is p: the rule is lossless, not nearly so."""
    p, q = CASES["marginal.p"], CASES["marginal.q"]
    vocab = p.shape[-1]
    total = np.zeros(vocab)
    for token in range(vocab):
        proposal = Proposal(mx.array([token], mx.int32), q)
        accept = min(1.0, p[0, token].item() / max(q[0, token].item(), 1e-30))
        _, residual = rejection(p, proposal, mx.array([1.0]))
        stood = np.eye(vocab)[token]
        refused = np.array(residual) if accept < 1 else np.zeros(vocab)
        total += q[0, token].item() * (accept * stood + (1 - accept) * refused)
    assert np.allclose(total, np.array(p[0]), atol=1e-6)
    assert np.allclose(total, np.array(CASES["marginal.first_token_distribution"]), atol=1e-6)


def test_a_refused_one_hot_proposal_is_never_drawn_again() -> None:
    p = mx.array([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    accepted, distribution = rejection(p, Proposal(mx.array([0], mx.int32)), mx.array([0.9]))
    assert accepted.item() == 0
    assert np.allclose(np.array(distribution), [0.0, 0.6, 0.4], atol=1e-6)


def test_where_the_residual_has_no_mass_the_target_decides() -> None:
    p = mx.array([[0.25, 0.75], [0.5, 0.5]])
    accepted, distribution = rejection(p, Proposal(mx.array([0], mx.int32), p[:1]), mx.array([1.0]))
    assert accepted.item() == 0
    assert np.allclose(np.array(distribution), [0.25, 0.75])


def test_a_q_that_is_not_a_number_accepts_nothing_and_leaves_the_target_alone() -> None:
    """R13: a draft whose logits overflowed must not reach the text."""
    p = mx.array([[0.25, 0.75], [0.5, 0.5]])
    q = mx.array([[float("nan"), float("nan")]])
    accepted, distribution = rejection(p, Proposal(mx.array([1], mx.int32), q), mx.array([0.0]))
    assert accepted.item() == 0
    assert np.allclose(np.array(distribution), [0.25, 0.75])


def test_the_greedy_judge_follows_argmax_and_its_tie_rule() -> None:
    logprobs = mx.array([[0.0, 1.0, 1.0], [2.0, 0.0, 2.0], [0.0, 0.0, 1.0]])
    verdict = GreedyJudge().judge(logprobs, Proposal(mx.array([1, 2], mx.int32)), None)
    assert verdict.accepted.item() == 1, "the tie at row 1 goes to the lower id, 0"
    assert verdict.token.tolist() == [0]


def test_an_external_sampler_is_asked_for_every_row_and_matched() -> None:
    asked = []

    def sampler(logprobs: mx.array) -> mx.array:
        asked.append(logprobs.shape)
        return mx.array([3, 1, 2])[: logprobs.shape[0]]

    verdict = ExternalJudge(sampler).judge(mx.zeros((3, 5)), Proposal(mx.array([3, 0], mx.int32)), None)
    assert asked == [(3, 5)]
    assert (verdict.accepted.item(), verdict.token.tolist()) == (1, [1])


def test_the_same_key_gives_the_same_verdict_and_another_key_another() -> None:
    """R51 at the level of one round."""
    judge = RejectionJudge(Filters(temperature=1.0))
    logprobs = mx.random.normal((4, 50), key=mx.random.key(5))
    proposal = Proposal(mx.array([1, 2, 3], mx.int32))
    draws = [judge.judge(logprobs, proposal, mx.random.key(seed)).token.item() for seed in (1, 1, *range(2, 30))]
    assert draws[0] == draws[1]
    assert len(set(draws)) > 5
