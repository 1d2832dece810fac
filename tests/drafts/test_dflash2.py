"""DFlash 2: the publishers' numbers on both of its paths, in both spellings, and what its loader asks for."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_dflash.drafts.registry import load_draft
from mlx_dflash.errors import CheckpointError, ConfigError, UnsupportedError
from tests.decoding.runs import target

from .contract import block_hidden, check_bits, check_required_key, check_rewind, check_tensors, check_widened, copied
from .end_to_end import check_distribution, check_greedy_text_and_caches
from .golden import (
    GOLDEN,
    LOGITS,
    Q,
    Recorder,
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

CASES = cases("dflash2", "speculators_dflash2")
BASIC, SPECULATORS = GOLDEN / "dflash2" / "basic", GOLDEN / "speculators_dflash2" / "basic"
TARGET = pretend_target(256, 64, layers=12)
FEATURES = features(9, taps=3)


def scores(draft_or_session):
    """The scores of a block's candidates along the greedy path."""
    session = draft_or_session
    if hasattr(session, "open"):
        session = session.open(TARGET)
        session.commit(FEATURES, 0, [0] * 9)
    seen = Recorder()
    session.propose(mx.array([7]), session.draft.max_depth, seen)
    return seen.logits


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_hidden_states_and_greedy_tokens_are_the_reference_s(case):
    check_rounds(open_case(case), first_row=1)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_candidates_and_their_scores_are_the_reference_s(case):
    opened = open_case(case)
    for i, round_, session in committed_rounds(opened):
        rows, anchor, expected = round_["block"], opened.tensors[f"r{i}.anchor"], opened.tensors
        proposal = session.propose(anchor, rows - 1, Recorder())
        assert proposal.candidates.tolist() == expected[f"r{i}.candidates"][0].tolist()
        logits = session.draft.shape_logits(session.raw_logits(session.block_hidden(anchor, rows)[0, 1:]))
        close(logits, expected[f"r{i}.logits"][0], LOGITS)
        seen = Recorder()
        session.propose(anchor, rows - 1, seen)
        if f"r{i}.scores" in expected:
            close(seen.logits, expected[f"r{i}.scores"][0], LOGITS)
        else:  # the first slot's transition is all that stands between the two
            unary = mx.take_along_axis(logits, proposal.candidates, axis=-1)
            close(unary, expected[f"r{i}.unary"][0], LOGITS)


@pytest.mark.parametrize(("case", "temperature"), drawn_paths("dflash2", "speculators_dflash2"))
def test_q_along_a_path_that_the_reference_drew_is_the_reference_s(case, temperature):
    opened = open_case(case)
    for i, round_, session in committed_rounds(opened):
        drawn = opened.tensors[f"r{i}.temp{temperature}.tokens"][0].tolist()
        ids = opened.tensors[f"r{i}.temp{temperature}.candidates"][0].tolist()
        places = [row.index(token) for row, token in zip(ids, drawn, strict=True)]
        anchor = opened.tensors[f"r{i}.anchor"]
        proposal = session.propose(anchor, round_["block"] - 1, Replayer(places, float(temperature)))
        assert proposal.tokens.tolist() == drawn
        assert proposal.candidates.tolist() == ids
        close(proposal.probs, opened.tensors[f"r{i}.temp{temperature}.q"][0], Q)


@pytest.mark.parametrize("case", [BASIC, SPECULATORS], ids=case_name)
def test_text_and_caches_are_those_of_plain_decoding(case):
    draft = load_draft(case / "checkpoint", target("golden_sliding"))
    check_greedy_text_and_caches("golden_sliding", draft, depths=(1, draft.max_depth), tokens=12)


def test_sampled_text_has_the_target_s_distribution():
    check_distribution("golden", load_draft(BASIC / "checkpoint", target("golden")), depth=3, runs=200)


@pytest.mark.parametrize(
    ("case", "sign"),
    [
        (BASIC, "architectures: 'DFlash2DraftModel'"),
        (SPECULATORS, "speculators_model_type: 'dflash2'"),
    ],
    ids=["z-lab", "speculators"],
)
def test_it_is_recognised_in_both_spellings(case, sign):
    report = load_draft(case / "checkpoint", TARGET).report
    assert (report.family, report.extra["recognised_by"]) == ("dflash2", sign)


@pytest.mark.parametrize("key", ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"])
@pytest.mark.parametrize("case", [BASIC, SPECULATORS], ids=["z-lab", "speculators"])
def test_no_key_of_its_own_has_a_default(tmp_path, case, key):
    place = ("dflash_config", key) if case is BASIC else (key,)
    check_required_key(case, tmp_path / "draft", TARGET, place)


def test_every_tensor_of_its_own_is_needed_in_its_shape(tmp_path):
    names = [
        "candidate_selector.hidden_projection.weight",
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
        "layers.0.attention_conv.base_kernel",
        "layers.1.mlp_conv.kernel_projection.weight",
    ]
    check_tensors(BASIC, tmp_path, TARGET, {name: name for name in names})


def test_its_tensors_under_a_plain_name_are_refused(tmp_path):
    def rename(config):
        config["architectures"] = ["DFlashDraftModel"]

    with pytest.raises(UnsupportedError, match=r"candidate_selector.*dflash2.*DFlashDraftModel"):
        load_draft(copied(BASIC, tmp_path / "draft", config=rename), TARGET)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conv_group_size": 24}, "conv_group_size: found 24, expected a divisor of hidden_size"),
        ({"selector_top_k": 257}, "selector_top_k: found 257, expected at most the 256 ids"),
    ],
)
def test_values_that_cannot_be_are_refused_by_their_place(tmp_path, change, message):
    checkpoint = copied(BASIC, tmp_path / "draft", config=lambda config: config["dflash_config"].update(change))
    with pytest.raises(ConfigError, match=message):
        load_draft(checkpoint, TARGET)


def test_fewer_candidates_can_be_asked_for():
    draft = load_draft(BASIC / "checkpoint", TARGET, config={"selector_top_k": 2})
    assert scores(draft).shape == (draft.max_depth, 2)
    assert ("selector_top_k", 2, "draft_config.selector_top_k") in draft.report.config


def test_a_reduced_vocabulary_is_refused_for_the_codebooks_are_over_target_ids(tmp_path):
    def reduce(arrays):
        arrays["lm_head.weight"] = mx.zeros((16, 64))
        arrays["d2t"] = mx.arange(16)

    with pytest.raises((UnsupportedError, CheckpointError), match=r"d2t|draft_vocab_size"):
        load_draft(copied(BASIC, tmp_path / "draft", tensors=reduce), TARGET)


def test_ids_beyond_the_codebooks_are_not_candidates():
    """A target whose table is padded further than the draft's publisher counted."""
    padded = pretend_target(260, 64, layers=12)
    padded.head_matrix[256:] = 100 * mx.abs(padded.head_matrix[:1])
    session = load_draft(BASIC / "checkpoint", padded).open(padded)
    session.commit(FEATURES, 0, [0] * 9)
    proposal = session.propose(mx.array([259]), 4, Recorder())
    assert mx.max(proposal.candidates).item() < 256


def test_the_wide_copy_computes_in_float32(tmp_path):
    check_widened(BASIC, tmp_path / "draft", TARGET, scores)


def test_quantised_matrices_leave_convolutions_and_selector_in_float():
    keep_float = ("conv", "candidate_selector")
    check_bits(BASIC, TARGET, lambda draft: block_hidden(draft, TARGET, FEATURES), keep_float)


def test_rewinding_forgets():
    check_rewind(load_draft(BASIC / "checkpoint", TARGET), TARGET, FEATURES, scores)
