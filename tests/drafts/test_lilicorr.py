"""LiLiCorr: the reference's lattice, its greedy and sampled paths, and what the loader asks for."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_dflash.drafts.registry import load_draft
from mlx_dflash.errors import ConfigError, UnsupportedError
from tests.decoding.runs import target

from .contract import block_hidden, check_bits, check_required_key, check_rewind, check_tensors, check_widened, copied
from .end_to_end import check_distribution, check_greedy_text_and_caches
from .golden import (
    GOLDEN,
    LOGITS,
    Q,
    Replayer,
    case_name,
    cases,
    check_rounds,
    close,
    committed_rounds,
    drawn_paths,
    open_case,
)
from .make_draft import features, pretend_target

CASES = cases("lilicorr")
PROJECTED, CONVOLVED = GOLDEN / "lilicorr" / "projected", GOLDEN / "lilicorr" / "same_width_conv"
TARGET = pretend_target(256, 64, layers=12)
FEATURES = features(9, taps=3)


def lattice(draft_or_session):
    """Start and pair scores in one array."""
    session = draft_or_session
    if hasattr(session, "open"):
        session = session.open(TARGET)
        session.commit(FEATURES, 0, [0] * 9)
    scores = session.scores(session.block_hidden(mx.array([7]), session.draft.block_size)[0, 1:])
    return mx.concatenate([scores.start, scores.pairs.reshape(-1)])


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_hidden_states_and_greedy_tokens_are_the_reference_s(case):
    check_rounds(open_case(case), first_row=1)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_the_lattice_is_the_reference_s(case):
    opened = open_case(case)
    for i, round_, session in committed_rounds(opened):
        expected = {
            name.partition(".")[2]: array for name, array in opened.tensors.items() if name.startswith(f"r{i}.")
        }
        hidden = session.block_hidden(expected["anchor"], round_["block"])[0, 1:]
        scores = session.scores(hidden)
        close(session.raw_logits(hidden), expected["logits"][0], LOGITS)
        assert scores.candidates.tolist() == expected["candidates"][0].tolist()
        close(scores.log_probs, expected["candidate_log_probs"][0], LOGITS)
        close(scores.start, expected["start_scores"][0], LOGITS)
        close(scores.pairs, expected["pair_scores"][0], LOGITS)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_without_a_committed_row_the_anchor_state_is_zero(case):
    """As a session that starts behind a prompt cache."""
    opened = open_case(case)
    for i, round_, session in committed_rounds(opened):
        hidden = session.block_hidden(opened.tensors[f"r{i}.anchor"], round_["block"])[0, 1:]
        scores = session.scores(hidden)
        embedded = session.draft.embed(scores.candidates, opened.target)
        start, _ = session.draft.backbone.lilicorr(hidden, embedded, scores.log_probs, None)
        close(start, opened.tensors[f"r{i}.no_anchor_start_scores"][0], LOGITS)


@pytest.mark.parametrize(("case", "temperature"), drawn_paths("lilicorr"))
def test_q_along_a_path_that_the_reference_drew_is_the_reference_s(case, temperature):
    opened = open_case(case)
    for i, round_, session in committed_rounds(opened):
        drawn = opened.tensors[f"r{i}.temp{temperature}.tokens"][0].tolist()
        ids = opened.tensors[f"r{i}.candidates"][0].tolist()
        places = [row.index(token) for row, token in zip(ids, drawn, strict=True)]
        anchor = opened.tensors[f"r{i}.anchor"]
        proposal = session.propose(anchor, round_["block"] - 1, Replayer(places, float(temperature)))
        assert proposal.tokens.tolist() == drawn
        assert proposal.candidates.tolist() == ids
        close(proposal.probs, opened.tensors[f"r{i}.temp{temperature}.q"][0], Q)


def test_a_shorter_proposal_is_the_start_of_the_whole_one():
    """The lattice is never cut: its slots were trained together."""
    session = load_draft(PROJECTED / "checkpoint", TARGET).open(TARGET)
    session.commit(FEATURES, 0, [0] * 9)
    whole = session.propose(mx.array([7]), 5, None).tokens.tolist()
    for depth in range(1, 5):
        assert session.propose(mx.array([7]), depth, None).tokens.tolist() == whole[:depth]


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_text_and_caches_are_those_of_plain_decoding(case):
    draft = load_draft(case / "checkpoint", target("golden_sliding"))
    check_greedy_text_and_caches("golden_sliding", draft, depths=(1, draft.max_depth), tokens=12)


def test_sampled_text_has_the_target_s_distribution():
    check_distribution("golden", load_draft(CONVOLVED / "checkpoint", target("golden")), depth=3, runs=200)


@pytest.mark.parametrize(
    ("change", "sign"),
    [
        ({}, "architectures: 'LiLiCorrDraftModel'"),
        ({"projector_type": "lilicorr"}, "dflash_config.projector_type: 'lilicorr'"),
    ],
)
def test_it_is_recognised_by_either_name(tmp_path, change, sign):
    checkpoint = copied(PROJECTED, tmp_path / "draft", config=lambda config: config["dflash_config"].update(change))
    report = load_draft(checkpoint, TARGET).report
    assert (report.family, report.extra["recognised_by"]) == ("lilicorr", sign)


@pytest.mark.parametrize(
    "key",
    [
        "candidate_topk",
        "hidden_size",
        "num_layers",
        "num_heads",
        "mlp_ratio",
        "factor_dim",
        "vector_eps",
        "logit_scale",
    ],
)
def test_no_key_of_its_own_has_a_default(tmp_path, key):
    check_required_key(PROJECTED, tmp_path / "draft", TARGET, ("dflash_config", f"lilicorr_{key}"))


def test_every_tensor_of_its_own_is_needed_in_its_shape(tmp_path):
    names = [
        "lilicorr.slot_embedding",
        "lilicorr.rank_embedding",
        "lilicorr.relative_slot_bias",
        "lilicorr.layers.0.attn.in_proj_weight",
        "lilicorr.feature_norm.weight",
        "lilicorr.anchor_out_head.bias",
    ]
    check_tensors(PROJECTED, tmp_path, TARGET, {name: name for name in names})


def test_modules_numbered_as_in_training_code_are_the_same_draft(tmp_path):
    def number(arrays):
        for name in list(arrays):
            new = name.replace("feature_norm", "feature_mlp.0").replace("feature_mlp.up_proj", "feature_mlp.1")
            new = new.replace("feature_mlp.down_proj", "feature_mlp.3")
            if ".layers." in name:
                new = new.replace("mlp.up_proj", "mlp.0").replace("mlp.down_proj", "mlp.2")
            arrays[new] = arrays.pop(name)
        assert "lilicorr.feature_mlp.3.weight" in arrays and "lilicorr.layers.0.mlp.2.bias" in arrays

    numbered = load_draft(copied(PROJECTED, tmp_path / "draft", tensors=number), TARGET)
    close(lattice(numbered), lattice(load_draft(PROJECTED / "checkpoint", TARGET)), 0)


def test_a_head_of_its_own_is_used(tmp_path):
    head = mx.random.normal((256, 64), key=mx.random.key(5))

    def bring(arrays):
        arrays["lm_head.weight"] = head

    draft = load_draft(copied(PROJECTED, tmp_path / "draft", tensors=bring), TARGET)
    session = draft.open(TARGET)
    session.commit(FEATURES, 0, [0] * 9)
    hidden = session.block_hidden(mx.array([7]), 6)[0, 1:]
    close(session.raw_logits(hidden), hidden @ head.T, LOGITS)
    assert draft.report.head.startswith("own")


def test_a_promised_head_that_is_missing_is_an_error(tmp_path):
    checkpoint = copied(
        PROJECTED, tmp_path / "draft", config=lambda config: config["dflash_config"].update(has_own_lm_head=True)
    )
    with pytest.raises(Exception, match=r"has_own_lm_head.*lm_head\.weight"):
        load_draft(checkpoint, TARGET)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lilicorr_candidate_topk": 6}, ConfigError, "found 6, expected a power of two from 2 to 16"),
        ({"lilicorr_num_heads": 5}, ConfigError, "found 5, expected a divisor"),
        ({"lilicorr_enabled": False}, UnsupportedError, "lilicorr_enabled: found false"),
        ({"sample_from_anchor": True}, ConfigError, "found 0, expected 1: the lattice has a slot"),
        ({"lilicorr_mlp_ratio": 0.001}, ConfigError, "expected a ratio that leaves a width"),
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path, change, error, message):
    checkpoint = copied(PROJECTED, tmp_path / "draft", config=lambda config: config["dflash_config"].update(change))
    with pytest.raises(error, match=message):
        load_draft(checkpoint, TARGET)


def test_the_wide_copy_computes_in_float32(tmp_path):
    check_widened(PROJECTED, tmp_path / "draft", TARGET, lattice)


def test_quantised_matrices_leave_the_lattice_in_float():
    check_bits(CONVOLVED, TARGET, lambda draft: block_hidden(draft, TARGET, FEATURES), ("conv", "lilicorr"))


def test_rewinding_forgets():
    draft = load_draft(PROJECTED / "checkpoint", TARGET)
    check_rewind(draft, TARGET, FEATURES, lattice)
