"""Domino: the publisher's corrected logits in both slot conventions, the recurrence by hand, and what its loader asks
for."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
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
    Recorder,
    Replayer,
    case_name,
    cases,
    check_rounds,
    close,
    committed_rounds,
    open_case,
)
from .make_draft import features, pretend_target

CASES = cases("domino")
SHIFTED, UNSHIFTED = GOLDEN / "domino" / "shifted", GOLDEN / "domino" / "unshifted"
TARGET = pretend_target(256, 64, layers=12)
FEATURES = features(9, taps=3)
ANCHOR = mx.array([7])


def session_of(draft, against=TARGET):
    session = draft.open(against)
    session.commit(FEATURES, 0, [0] * 9)
    return session


def logits(draft_or_session):
    """Corrected logits of a block along the greedy path."""
    session = session_of(draft_or_session) if hasattr(draft_or_session, "open") else draft_or_session
    seen = Recorder()
    session.propose(ANCHOR, session.draft.max_depth, seen)
    return seen.logits


def base_logits(session, anchor, first_row):
    """What the head alone gives for the five rows that propose."""
    hidden = session.block_hidden(anchor, 6)[0, first_row : first_row + 5]
    return session.draft.shape_logits(session.raw_logits(hidden))


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_hidden_states_and_greedy_tokens_are_the_reference_s(case):
    check_rounds(open_case(case), first_row=1)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_logits_before_and_after_the_correction_are_the_reference_s(case):
    opened = open_case(case)
    for i, round_, session in committed_rounds(opened):
        anchor, expected = opened.tensors[f"r{i}.anchor"], opened.tensors
        first_row = 0 if case == SHIFTED else 1
        close(base_logits(session, anchor, first_row), expected[f"r{i}.base_logits"][0], LOGITS)
        seen = Recorder()
        session.propose(anchor, round_["block"] - 1, seen)
        close(seen.logits, expected[f"r{i}.logits"][0], LOGITS)


@pytest.mark.parametrize(("case", "first_row"), [(SHIFTED, 0), (UNSHIFTED, 1)], ids=["shifted", "unshifted"])
def test_q_along_any_path_is_that_of_the_recurrence_by_hand(case, first_row):
    """Tokens that greedy drafting would not take, so that the state has to follow what was drawn."""
    draft = load_draft(case / "checkpoint", TARGET)
    session, path, temperature = session_of(draft), [200, 3, 77, 3, 120], 0.7
    proposal = session.propose(ANCHOR, 5, Replayer(path, temperature))
    assert proposal.tokens.tolist() == path

    weights = {name: np.array(array, np.float64) for name, array in _weights(case).items()}
    hidden = np.array(session.block_hidden(ANCHOR, 6)[0], np.float64)[first_row:]
    base = np.array(base_logits(session, ANCHOR, first_row), np.float64)
    state = np.zeros(24)
    for slot, token in enumerate([7, *path[:4]]):
        state = _gru(weights, np.array(TARGET.embedding[token], np.float64), state)
        row = base[slot]
        if slot >= 1:  # pure_draft_prefix_len of both cases
            inner = weights["embed_proj.0.weight"] @ np.concatenate([hidden[slot], state])
            row = row + weights["embed_proj.2.weight"] @ (inner / (1 + np.exp(-inner)))
        mass = np.exp((row - row.max()) / temperature)
        np.testing.assert_allclose(np.array(proposal.probs[slot]), mass / mass.sum(), atol=Q)


def _gru(weights, x, state):
    """PyTorch's definition, gates in the order reset, update, new."""
    given, kept = weights["prefix_gru.weight_ih_l0"] @ x, weights["prefix_gru.weight_hh_l0"] @ state
    reset, update = (1 / (1 + np.exp(-(given[part] + kept[part]))) for part in (slice(0, 24), slice(24, 48)))
    new = np.tanh(given[48:] + reset * kept[48:])
    return (1 - update) * new + update * state


def _weights(case):
    return mx.load(str(case / "checkpoint" / "model.safetensors"))


@pytest.mark.parametrize("uncorrected", [0, 3, 5])
def test_the_first_slots_are_left_as_the_head_gave_them(uncorrected):
    draft = load_draft(SHIFTED / "checkpoint", TARGET, config={"pure_draft_prefix_len": uncorrected})
    session = session_of(draft)
    base, corrected = base_logits(session, ANCHOR, 0), logits(session)
    close(corrected[:uncorrected], base[:uncorrected], 0)
    changed = [not mx.allclose(corrected[slot], base[slot], atol=LOGITS).item() for slot in range(5)]
    assert changed == [slot >= uncorrected for slot in range(5)]


@pytest.mark.parametrize(("shifted", "first_row"), [(True, 0), (False, 1)])
def test_shift_label_says_which_row_proposes_the_first_token(shifted, first_row):
    """R07. Without any correction the proposal is the head's choice row by row."""
    options = {"shift_label": shifted, "pure_draft_prefix_len": 5}
    draft = load_draft(SHIFTED / "checkpoint", TARGET, config=options)
    session = session_of(draft)
    expected = mx.argmax(base_logits(session, ANCHOR, first_row), axis=-1).tolist()
    assert session.propose(ANCHOR, 5, None).tokens.tolist() == expected
    assert draft.report.extra["first_row"] == first_row
    assert draft.max_depth == draft.report.max_depth == 5


def test_a_shorter_proposal_is_the_start_of_the_whole_one():
    session = session_of(load_draft(UNSHIFTED / "checkpoint", TARGET))
    whole = session.propose(ANCHOR, 5, None).tokens.tolist()
    for depth in range(1, 5):
        assert session.propose(ANCHOR, depth, None).tokens.tolist() == whole[:depth]


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_text_and_caches_are_those_of_plain_decoding(case):
    draft = load_draft(case / "checkpoint", target("golden_sliding"))
    check_greedy_text_and_caches("golden_sliding", draft, depths=(1, draft.max_depth), tokens=12)


def test_sampled_text_has_the_target_s_distribution():
    check_distribution("golden", load_draft(SHIFTED / "checkpoint", target("golden")), depth=3, runs=200)


@pytest.mark.parametrize(
    ("architecture", "projector", "sign"),
    [
        ("DominoDraftModel", "domino", "dflash_config.projector_type: 'domino'"),
        ("DFlashDraftModel", "domino", "dflash_config.projector_type: 'domino'"),
        ("DominoDraftModel", None, "architectures: 'DominoDraftModel'"),
    ],
)
def test_it_is_recognised_under_every_published_name(tmp_path, architecture, projector, sign):
    def rename(config):
        config["architectures"] = [architecture]
        config["dflash_config"]["projector_type"] = projector

    report = load_draft(copied(SHIFTED, tmp_path / "draft", config=rename), TARGET).report
    assert (report.family, report.extra["recognised_by"]) == ("domino", sign)


def test_its_tensors_under_a_plain_name_are_refused(tmp_path):
    def rename(config):
        config["architectures"] = ["DFlashDraftModel"]
        del config["dflash_config"]["projector_type"]

    with pytest.raises(UnsupportedError, match=r"(prefix_gru|embed_proj).*of domino.*DFlashDraftModel"):
        load_draft(copied(SHIFTED, tmp_path / "draft", config=rename), TARGET)


def test_early_checkpoints_that_nest_the_head_are_the_same_draft(tmp_path):
    def nest(arrays):
        for name in [name for name in arrays if name.startswith(("prefix_gru", "embed_proj"))]:
            arrays[f"logit_head.{name}"] = arrays.pop(name)
        assert sum(name.startswith("logit_head.") for name in arrays) == 4

    nested = load_draft(copied(SHIFTED, tmp_path / "draft", tensors=nest), TARGET)
    close(logits(nested), logits(load_draft(SHIFTED / "checkpoint", TARGET)), 0)


@pytest.mark.parametrize("key", ["emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label"])
def test_no_key_of_its_own_has_a_default(tmp_path, key):
    check_required_key(SHIFTED, tmp_path / "draft", TARGET, ("dflash_config", key))


def test_every_tensor_of_its_own_is_needed_in_its_shape(tmp_path):
    names = ["prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"]
    check_tensors(SHIFTED, tmp_path, TARGET, {name: name for name in names})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pure_draft_prefix_len": 6}, "pure_draft_prefix_len: found 6, expected less than block_size"),
        ({"pure_draft_prefix_len": -1}, "pure_draft_prefix_len: found -1, expected a whole number of at least 0"),
        ({"gru_hidden_dim": 0}, "gru_hidden_dim: found 0"),
        ({"shift_label": 1}, "shift_label: found 1, expected true or false"),
    ],
)
def test_values_that_cannot_be_are_refused_by_their_place(tmp_path, change, message):
    checkpoint = copied(SHIFTED, tmp_path / "draft", config=lambda config: config["dflash_config"].update(change))
    with pytest.raises(ConfigError, match=f"dflash_config.{message}"):
        load_draft(checkpoint, TARGET)


def test_a_reduced_vocabulary_is_refused(tmp_path):
    def reduce(arrays):
        arrays["lm_head.weight"] = mx.zeros((16, 64))
        arrays["d2t"] = mx.arange(16)

    with pytest.raises(UnsupportedError, match="d2t: found a reduced vocabulary"):
        load_draft(copied(SHIFTED, tmp_path / "draft", tensors=reduce), TARGET)


def test_ids_that_have_no_correction_are_not_proposed():
    """A target whose table is padded further than the draft's publisher counted."""
    padded = pretend_target(260, 64, layers=12)
    padded.head_matrix[256:] = 100 * mx.abs(padded.head_matrix[:1])
    session = session_of(load_draft(SHIFTED / "checkpoint", padded), padded)
    proposal = session.propose(mx.array([259]), 5, Recorder())
    assert mx.max(proposal.tokens).item() < 256
    assert proposal.probs.shape == (5, 260) and mx.all(proposal.probs[:, 256:] == 0).item()


def test_a_correction_that_is_not_finite_is_told():
    draft = load_draft(SHIFTED / "checkpoint", TARGET)
    session = session_of(draft)
    assert session.propose(ANCHOR, 5, None).finite.item()
    draft.backbone.embed_proj[2].weight = draft.backbone.embed_proj[2].weight * 3e38
    assert not session.propose(ANCHOR, 5, None).finite.item()


def test_the_wide_copy_computes_in_float32(tmp_path):
    check_widened(SHIFTED, tmp_path / "draft", TARGET, logits)


def test_quantised_matrices_stay_near_the_float_draft():
    check_bits(SHIFTED, TARGET, lambda draft: block_hidden(draft, TARGET, FEATURES), ("prefix_gru",))


def test_the_correction_s_matrices_are_quantised_too_where_their_widths_allow(tmp_path):
    def widen(arrays):  # by zeros, which changes nothing
        arrays["embed_proj.0.weight"] = mx.pad(arrays["embed_proj.0.weight"], [(0, 12), (0, 0)])
        arrays["embed_proj.2.weight"] = mx.pad(arrays["embed_proj.2.weight"], [(0, 0), (0, 12)])

    wide = copied(
        SHIFTED, tmp_path / "draft", tensors=widen, config=lambda config: config["dflash_config"].update(emb_dim=32)
    )
    close(logits(load_draft(wide, TARGET)), logits(load_draft(SHIFTED / "checkpoint", TARGET)), LOGITS)
    packed = load_draft(wide, TARGET, bits=8)
    assert "embed_proj.2" in packed.parts.packings
    session, exact = session_of(packed), session_of(load_draft(wide, TARGET))
    base, found, expected = base_logits(session, ANCHOR, 0), logits(session), logits(exact)
    assert mx.abs(found - expected).max() < 0.2 * mx.abs(expected).max()
    assert not mx.allclose(found[1:], base[1:], atol=0.1).item()


def test_rewinding_forgets():
    check_rewind(load_draft(SHIFTED / "checkpoint", TARGET), TARGET, FEATURES, logits)
