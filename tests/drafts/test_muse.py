"""Muse-Glimmer's assistant: the publisher's numbers, what its layers see, and the raw rows it borrows."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest

from mlx_dflash.drafts.registry import load_draft
from mlx_dflash.errors import PairingError
from tests.decoding.runs import target

from .contract import block_hidden, check_bits, check_required_key, check_rewind, check_tensors, check_widened, copied
from .end_to_end import check_distribution, check_greedy_text_and_caches
from .golden import (
    GOLDEN,
    HIDDEN,
    LOGITS,
    Recorder,
    case_name,
    cases,
    check_rounds,
    close,
    committed_rounds,
    open_case,
)
from .make_draft import features, pretend_target

CASES = cases("muse_glimmer_assistant")
SLIDING, MIXED = (GOLDEN / "muse_glimmer_assistant" / name for name in ("sliding_all", "mixed_window_lt_block"))
TARGET = pretend_target(256, 64, layers=12)
FEATURES = features(20, taps=2)
ANCHOR = mx.array([7])


def hidden(draft, rows=FEATURES):
    return block_hidden(draft, TARGET, rows)


def published():
    return load_draft(SLIDING / "checkpoint", TARGET)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_hidden_states_and_greedy_tokens_are_the_reference_s(case):
    check_rounds(open_case(case), first_row=1)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_logits_are_the_reference_s(case):
    opened = open_case(case)
    for i, round_, session in committed_rounds(opened):
        seen = Recorder()
        session.propose(opened.tensors[f"r{i}.anchor"], round_["block"] - 1, seen)
        close(seen.logits, opened.tensors[f"r{i}.logits"][0], LOGITS)


# ------------------------------------------------------------------- what layers see


@pytest.mark.parametrize(("distance", "seen"), [(12, True), (13, False)])
def test_the_window_is_the_farthest_distance_that_is_seen(distance, seen):
    """``sliding_window`` 12; position 20 is the anchor's."""
    changed = mx.array(FEATURES)
    changed[:, 20 - distance] = -changed[:, 20 - distance]
    draft = published()
    assert mx.allclose(hidden(draft, changed), hidden(draft), atol=HIDDEN).item() is not seen


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_layers_are_bidirectional_with_and_without_a_window(case):
    draft, _, _, _ = open_case(case)
    config = json.loads((case / "checkpoint" / "config.json").read_text())
    inclusive = config["sliding_window"] + 1
    expected = [(inclusive if kind == "sliding_attention" else None, False) for kind in config["layer_types"]]
    assert [(layer.window, layer.causal) for layer in draft.config.layers] == expected
    assert ("visible_window", [inclusive]) in [entry[:2] for entry in draft.report.config]
    assert draft.block_rows(1) == draft.block_size


def test_a_causality_that_is_stated_is_followed():
    causal = load_draft(SLIDING / "checkpoint", TARGET, config={"is_causal": True})
    assert all(layer.causal for layer in causal.config.layers)
    assert not mx.allclose(hidden(causal), hidden(published()), atol=HIDDEN).item()


# ------------------------------------------------------------------- what it borrows


def test_rows_of_the_table_are_taken_raw():
    """Whatever the target does to them in its own forward."""
    scaling = pretend_target(256, 64, layers=12, embed_scale=8.0)
    draft = load_draft(SLIDING / "checkpoint", scaling)
    ids = mx.array([[5, 250]])
    close(draft.embed(ids, scaling), scaling.embedding[ids], 0)


def test_a_vocabulary_that_the_config_leaves_out_is_the_target_s():
    draft = published()
    assert (draft.config.vocab_size, draft.config.num_target_layers) == (None, None)
    assert draft.report.extra["proposed_ids"] == 256
    small = pretend_target(250, 64, layers=12)
    with pytest.raises(PairingError, match=r"mask_token_id: found 250.*0 \.\. 249"):
        load_draft(SLIDING / "checkpoint", small)


# ------------------------------------------------------------------- config, recognition, tensors


@pytest.mark.parametrize(
    "place",
    [("block_size",), ("mask_token_id",), ("sliding_window",), ("rope_parameters", "rope_theta")],
    ids=lambda place: place[-1],
)
def test_what_decides_acceptance_has_no_default(tmp_path, place):
    check_required_key(SLIDING, tmp_path / "draft", TARGET, place)


def test_keys_may_stand_in_dflash_config(tmp_path):
    def nest(config):
        config["dflash_config"] = {
            name: config.pop(name) for name in ("target_layer_ids", "mask_token_id", "block_size")
        }

    nested = load_draft(copied(SLIDING, tmp_path / "draft", config=nest), TARGET)
    close(hidden(nested), hidden(published()), 0)


def test_windows_listed_one_a_layer_are_distances_too(tmp_path):
    draft = load_draft(
        copied(SLIDING, tmp_path / "draft", config=lambda config: config.update(sliding_windows=[12, 5])), TARGET
    )
    assert [layer.window for layer in draft.config.layers] == [13, 6]


def test_the_window_can_be_overridden():
    draft = load_draft(SLIDING / "checkpoint", TARGET, config={"sliding_window": 5})
    assert [layer.window for layer in draft.config.layers] == [6, 6]


@pytest.mark.parametrize(
    ("dropped", "sign"),
    [
        ((), "architectures: 'MuseGlimmerAssistantModel'"),
        (("architectures",), "model_type: 'muse_glimmer_assistant'"),
    ],
)
def test_it_is_recognised_by_either_name(tmp_path, dropped, sign):
    checkpoint = copied(SLIDING, tmp_path / "draft", config=lambda config: [config.pop(name) for name in dropped])
    report = load_draft(checkpoint, TARGET).report
    assert (report.family, report.extra["recognised_by"]) == ("muse-glimmer", sign)


def test_the_encoder_s_tensors_are_needed_in_their_shape(tmp_path):
    names = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    check_tensors(SLIDING, tmp_path, TARGET, names)


# ------------------------------------------------------------------- the contract of every family


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_text_and_caches_are_those_of_plain_decoding(case):
    draft = load_draft(case / "checkpoint", target("golden_sliding"))
    check_greedy_text_and_caches("golden_sliding", draft, depths=(1, draft.max_depth), tokens=12)


def test_sampled_text_has_the_target_s_distribution():
    check_distribution("golden", load_draft(MIXED / "checkpoint", target("golden")), depth=3, runs=200)


def test_the_wide_copy_computes_in_float32(tmp_path):
    check_widened(SLIDING, tmp_path / "draft", TARGET, hidden)


def test_quantised_matrices_stay_near_the_float_draft():
    check_bits(SLIDING, TARGET, hidden)


def test_rewinding_forgets():
    check_rewind(published(), TARGET, FEATURES, lambda session: session.block_hidden(ANCHOR, 6))
