"""Every publisher's ``config.json`` leads to the same settings, or to one line that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_dflash.drafts.config import ignored_keys, parse_config
from mlx_dflash.drafts.taps import derived_taps
from mlx_dflash.errors import ConfigError, UnsupportedError

from .make_draft import LAYERS, TAPS, speculators_config, z_lab_config

FILE = Path("draft") / "config.json"


def parse(config, **facts):
    return parse_config(FILE, config, **facts)


def ignored(config):
    return ignored_keys(parse(config).record, config)


def refusal(config, kind=ConfigError, **facts):
    with pytest.raises(kind) as caught:
        parse(config, **facts)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(str(FILE)) and "expected" in message
    return message


FLAT = z_lab_config(rope_theta=1e7, block_size=8)
NESTED = z_lab_config(
    rope_theta=None,
    block_size=None,
    num_target_layers=None,
    rope_parameters={"rope_theta": 1e7, "rope_type": "default"},
    dflash_config={"block_size": 8, "num_target_layers": LAYERS},
)
MIXED = z_lab_config(rope_theta=1e7, rope_parameters={"rope_theta": 1e7}, block_size=5, dflash_config={"block_size": 8})
TAPS_ON_TOP = z_lab_config(
    rope_theta=1e7,
    block_size=8,
    dflash_config={"target_layer_ids": None, "mask_token_id": None},
    target_layer_ids=list(TAPS),
    mask_token_id=3,
)


@pytest.mark.parametrize("config", [FLAT, NESTED, MIXED, TAPS_ON_TOP], ids=["flat", "nested", "mixed", "taps on top"])
def test_layouts_of_all_revisions_mean_the_same(config):
    """R01. The report wants the root to win where both are given; the publisher's own code lets ``dflash_config`` win
    (golden case ``gemma_style_top_level``), and so do we."""
    parsed = parse(config)
    assert parsed.block_size == 8
    assert {layer.rope.theta for layer in parsed.layers} == {1e7}
    assert parsed.tap_layers == TAPS
    assert (parsed.mask_token_id, parsed.num_target_layers, parsed.first_row, parsed.max_depth) == (3, LAYERS, 1, 7)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"rope_theta": None}, "rope_theta"),
        ({"block_size": None}, "block_size"),
        ({"dflash_config": {"mask_token_id": None}}, "mask_token_id"),
        ({"dflash_config": {"target_layer_ids": None}, "num_target_layers": None}, "target_layer_ids"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_key_value_heads": None}, "num_key_value_heads"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window"),
        ({"dflash_config": {"use_swa": True}}, "sliding_window"),
    ],
)
def test_a_value_that_is_nowhere_is_one_line_with_the_places_looked_at(change, key):
    """R01: nothing that decides acceptance is ever assumed."""
    message = refusal(z_lab_config(**change))
    assert f"{key}: found none (looked at" in message


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"block_size": "16"}, "block_size: found '16'"),
        ({"block_size": 1}, "block_size: found 1"),
        ({"block_size": True}, "block_size: found True"),
        ({"block_size": 10**9}, "block_size: found 1000000000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: found 1000000000"),
        ({"rope_theta": 0}, "rope_theta: found 0"),
        ({"rope_theta": float("nan")}, "rope_theta: found nan"),
        ({"rope_parameters": [1]}, "rope_parameters: found [1]"),
        ({"head_dim": 15}, "head_dim: found 15"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: found 3"),
        ({"dflash_config": {"mask_token_id": -1}}, "dflash_config.mask_token_id: found -1"),
        ({"dflash_config": {"target_layer_ids": []}}, "dflash_config.target_layer_ids: found []"),
        ({"dflash_config": {"target_layer_ids": [3, 1]}}, "dflash_config.target_layer_ids: found [3, 1]"),
        ({"dflash_config": {"target_layer_ids": [1, "3"]}}, "dflash_config.target_layer_ids: found [1, '3']"),
        ({"layer_types": ["full_attention"]}, "layer_types: found 1 entries"),
        ({"is_causal": "no"}, "is_causal: found 'no'"),
        ({"final_logit_softcapping": -3}, "final_logit_softcapping: found -3"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: found 'small'"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps: found 1000"),
        ({"rope_theta": 10**400}, "rope_theta: found 1000"),
        ({"rope_theta": 1.0}, "rope_theta: found 1.0, expected a number above 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 10**400}}, "rope_scaling.factor: found 1000"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e308}}, "rope_scaling: found {'rope_type': 'linear'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 1e308, "original_max_position_embeddings": 64}},
            "numbers that with rope_theta 10000 give finite periods",
        ),
    ],
)
def test_an_impossible_value_is_one_line_with_the_value(change, key):
    assert key in refusal(z_lab_config(**change))


def test_a_value_of_a_million_characters_is_not_repeated_in_full():
    assert len(refusal(z_lab_config(dflash_config={"target_layer_ids": [5] * 10**5}))) < 1000


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: found 'gelu'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types: found 'linear_attention'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type: found 'longrope'"),
        ({"model_file": "model.py"}, "model_file: found 'model.py'"),
        ({"dflash_config": {"model_file": "model.py"}}, "dflash_config.model_file: found 'model.py'"),
    ],
)
def test_what_is_legal_elsewhere_but_not_run_here_is_refused_by_name(change, key):
    assert key in refusal(z_lab_config(**change), UnsupportedError)


def test_every_value_says_where_it_came_from():
    sources = parse(MIXED).sources
    assert sources["block_size"] == "dflash_config.block_size"
    assert sources["target_layer_ids"] == "dflash_config.target_layer_ids"
    assert sources["rope_theta"] == "rope_theta"
    assert parse(NESTED).sources["rope_theta"] == "rope_parameters.rope_theta"
    assert parse(speculators_config()).sources["hidden_size"] == "transformer_layer_config.hidden_size"


# ------------------------------------------------------------------- causality and windows

SLIDING_THEN_FULL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}


@pytest.mark.parametrize(
    ("change", "causal", "windows"),
    [
        ({}, [False, False], [None, None]),
        (SLIDING_THEN_FULL, [True, False], [12, None]),
        (SLIDING_THEN_FULL | {"use_sliding_window": False}, [True, False], [12, None]),
        (SLIDING_THEN_FULL | {"is_causal": False}, [False, False], [12, None]),
        (SLIDING_THEN_FULL | {"is_causal": True}, [True, True], [12, None]),
        ({"is_causal": True}, [True, True], [None, None]),
        ({"dflash_config": {"causal": True}}, [True, True], [None, None]),
        ({"is_causal": False, "dflash_config": {"causal": True}}, [False, False], [None, None]),
        ({"dflash_query_causal": True}, [True, True], [None, None]),
        (SLIDING_THEN_FULL | {"dflash_query_causal": False}, [False, False], [12, None]),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 7}}, [False, False], [7, 7]),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 7, "causal": True}}, [True, True], [7, 7]),
        (SLIDING_THEN_FULL | {"dflash_config": {"use_swa": True, "swa_window_size": 7}}, [True, False], [7, None]),
        (SLIDING_THEN_FULL | {"dflash_config": {"use_swa": False}}, [True, False], [12, None]),
    ],
)
def test_causality_and_window_of_each_layer_follow_the_precedence_of_the_keys(change, causal, windows):
    layers = parse(z_lab_config(**change)).layers
    assert [layer.causal for layer in layers] == causal
    assert [layer.window for layer in layers] == windows
    assert [layer.reach for layer in layers] == [None if window is None else window - 1 for window in windows]
    assert not any(layer.from_anchor for layer in layers)


@pytest.mark.parametrize(("flag", "causal"), [(None, True), (False, True), (True, False)])
def test_speculators_sliding_layers_count_the_window_from_the_anchor(flag, causal):
    parsed = parse(speculators_config(SLIDING_THEN_FULL, sliding_window_non_causal=flag))
    sliding, full = parsed.layers
    assert (sliding.causal, sliding.window, sliding.reach, sliding.from_anchor) == (causal, 12, 12, True)
    assert (full.causal, full.window, full.from_anchor) == (False, None, False)


def test_speculators_layer_lists_at_the_top_override_the_wrapped_ones():
    config = speculators_config({"layer_types": ["full_attention"] * 2}, **SLIDING_THEN_FULL)
    assert [layer.window for layer in parse(config).layers] == [12, None]


# ------------------------------------------------------------------- taps and slots


@pytest.mark.parametrize(
    ("layers", "depth", "taps"),
    [(1, 36, (18,)), (5, 36, (1, 9, 17, 25, 33)), (3, 36, (1, 17, 33)), (6, 64, (1, 13, 25, 37, 49, 61))],
)
def test_taps_are_derived_by_the_published_rule_when_none_are_listed(layers, depth, taps):
    assert derived_taps(layers, depth) == taps


def test_derived_taps_use_the_config_s_depth_before_the_target_s():
    config = z_lab_config(dflash_config={"target_layer_ids": None})
    assert parse(config, target_layers=99).tap_layers == (1, 5)
    config.pop("num_target_layers")
    assert parse(config, target_layers=10).tap_layers == (1, 7)


def test_speculators_derives_its_own_default_taps():
    config = speculators_config(aux_hidden_state_layer_ids=None)
    assert parse(config, target_layers=36).tap_layers == (1, 17, 32)


def test_auxiliary_ids_name_the_layer_a_state_enters():
    assert parse(speculators_config()).tap_layers == TAPS
    config = z_lab_config(dflash_config={"target_layer_ids": None}, eagle_aux_hidden_state_layer_ids=[0, 2, 8])
    assert parse(config).tap_layers == (-1, 1, 7)


def test_auxiliary_ids_that_contradict_the_listed_taps_are_reported():
    agreeing = z_lab_config(eagle_aux_hidden_state_layer_ids=[tap + 1 for tap in TAPS])
    assert ignored(agreeing) == ()
    (note,) = ignored(z_lab_config(eagle_aux_hidden_state_layer_ids=list(TAPS)))
    assert note.startswith("eagle_aux_hidden_state_layer_ids")


@pytest.mark.parametrize(
    ("proposed", "flag", "first_row"),
    [
        (5, None, 1),
        (6, None, 0),
        (5, True, 1),
        (6, False, 0),
        (3, None, 1),
        (3, True, 0),
        (None, None, 1),
        (7, False, 1),
    ],
)
def test_slot_convention_comes_from_the_checkpoint(proposed, flag, first_row):
    """R07. Block size 6: five proposals mean that row 0 is the anchor's, six that it predicts too."""
    methods = [] if proposed is None else [{"speculative_tokens": proposed}]
    config = speculators_config(speculators_config={"proposal_methods": methods}, sample_from_anchor=flag)
    parsed = parse(config)
    assert (parsed.first_row, parsed.max_depth) == (first_row, 6 - first_row)


# ------------------------------------------------------------------- rope


def test_two_different_thetas_are_refused_with_both_shown():
    message = refusal(z_lab_config(rope_theta=1e4, rope_parameters={"rope_theta": 1e6}))
    assert "rope_theta = 10000" in message and "rope_parameters.rope_theta = 1e+06" in message


def test_rope_parameters_keyed_by_layer_type_serve_each_type():
    parameters = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    parsed = parse(z_lab_config(**SLIDING_THEN_FULL, rope_theta=1e6, rope_parameters=parameters))
    assert [layer.rope.theta for layer in parsed.layers] == [1e4, 1e6]


def test_rope_parameters_without_the_layer_s_type_are_refused():
    config = z_lab_config(rope_theta=None, rope_parameters={"sliding_attention": {"rope_theta": 1e4}})
    assert "rope_parameters.full_attention" in refusal(config)


@pytest.mark.parametrize("place", ["top", "rope_parameters"])
def test_partial_rotary_copied_from_the_target_is_ignored_and_said_so(place):
    change = {"partial_rotary_factor": 0.25}
    if place != "top":
        change = {"rope_theta": None, "rope_parameters": {"rope_theta": 1e4, **change}}
    parsed = parse(z_lab_config(**change))
    assert parsed.layers[0].rope.dims == 16
    (note,) = parsed.record.notes
    assert "partial_rotary_factor" in note


@pytest.mark.parametrize("key", ["is_neox_style", "rope_is_neox_style"])
@pytest.mark.parametrize("level", ["top", "dflash_config"])
@pytest.mark.parametrize("split_half", [True, False])
def test_rope_style_flag_is_read_wherever_it_stands(key, level, split_half):
    """R10."""
    change = {key: split_half} if level == "top" else {"dflash_config": {key: split_half}}
    assert {layer.rope.interleaved for layer in parse(z_lab_config(**change)).layers} == {not split_half}


def test_rope_is_split_half_when_no_flag_says_otherwise():
    """R10."""
    assert not parse(z_lab_config()).layers[0].rope.interleaved


# ------------------------------------------------------------------- shaping and notes


def test_dflash_config_wins_over_the_top_level_for_every_shaping_key():
    """R11."""
    keys = {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}
    top = parse(z_lab_config(**keys))
    assert (top.embedding_scale, top.output_multiplier, top.softcap) == (2.0, 0.5, 30.0)
    both = parse(z_lab_config(**keys, dflash_config={key: 4.0 for key in keys}))
    assert (both.embedding_scale, both.output_multiplier, both.softcap) == (4.0, 4.0, 4.0)
    plain = parse(z_lab_config())
    assert (plain.embedding_scale, plain.output_multiplier, plain.logit_scale, plain.softcap) == (1.0, 1.0, 1.0, None)


def test_only_z_lab_drafts_scale_their_block_like_the_target():
    """R11: speculators trains on raw rows, also for Gemma verifiers."""
    assert parse(z_lab_config()).scaled_like_target
    assert not parse(speculators_config()).scaled_like_target


def test_run_time_knobs_code_names_and_unknown_keys_are_reported_as_ignored():
    nested = {"runtime_block_size": 5, "draft_window_size": 9, "shiny": 1}
    notes = ignored(z_lab_config(auto_map={"AutoModel": "x.Y"}, dflash_config=nested))
    assert len(notes) == 4
    for key in ("auto_map", "runtime_block_size = 5", "draft_window_size = 9", "dflash_config.shiny: unknown"):
        assert any(key in note for note in notes)


def test_a_mask_named_by_text_is_kept_for_the_tokenizer():
    config = z_lab_config(dflash_config={"mask_token_id": None, "mask_token": "<mask>"})
    parsed = parse(config)
    assert (parsed.mask_token_id, parsed.mask_token) == (None, "<mask>")


def test_the_wrapper_s_gaps_are_the_backbone_s_defaults():
    wrapper = {"hidden_size": 4096, "head_dim": None, "num_attention_heads": None, "num_key_value_heads": None}
    parsed = parse(speculators_config(wrapper))
    assert (parsed.head_dim, parsed.num_heads, parsed.num_kv_heads, parsed.rms_norm_eps) == (128, 32, 32, 1e-6)
    assert parsed.layers[0].rope.theta == 1e4
    assert "stores only what differs" in parsed.sources["rope_theta"]


@pytest.mark.parametrize("key", ["block_size", "mask_token_id"])
def test_the_wrapper_s_own_keys_have_no_defaults(key):
    assert f"{key}: found none" in refusal(speculators_config(**{key: None}))


def test_no_gap_is_filled_for_a_backbone_with_other_defaults():
    assert "rope_theta: found none" in refusal(speculators_config({"model_type": "llama"}))


def test_head_dim_is_derived_only_when_it_is_absent():
    assert parse(z_lab_config(head_dim=None)).head_dim == 16
    assert "head_dim" in refusal(z_lab_config(head_dim=None, hidden_size=66))


def test_a_reach_beyond_the_config_s_length_limits_nothing():
    """R16: max_position_embeddings only feeds YaRN; the draft follows the target however far it goes."""
    assert parse(z_lab_config(max_position_embeddings=8)).layers == parse(z_lab_config()).layers
