"""Laguna: the reference's numbers inside and beyond the window, its norms and gates, and what its loader asks for."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest

from mlx_dflash.drafts.registry import load_draft
from mlx_dflash.errors import CheckpointError, ConfigError, UnsupportedError
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

CASES = cases("laguna_dflash")
SLIDING, SHORT = GOLDEN / "laguna_dflash" / "sliding_causal", GOLDEN / "laguna_dflash" / "short_context"
TARGET = pretend_target(256, 64, layers=12)
FEATURES = features(20, taps=3)
ANCHOR = mx.array([7])


def hidden(draft):
    return block_hidden(draft, TARGET, FEATURES)


def load(case, folder, **changes):
    return load_draft(copied(case, folder, **changes), TARGET)


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


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_layers_are_read_as_the_reference_reads_them(case):
    draft, _, _, meta = open_case(case)
    layers = [{"is_causal": x.causal, "window_left": x.window - 1} for x in draft.config.layers]
    assert layers == meta["layers"]
    assert draft.parts.mask_id == meta["mask_token_id"]
    assert list(draft.tap_layers) == meta["target_layer_ids"]


@pytest.mark.parametrize("stated", [None, True, False])
def test_context_passes_a_layer_s_input_norm_unless_it_is_switched_off(stated):
    options = {} if stated is None else {"context_kv_layer_norm": stated}
    draft = load_draft(SLIDING / "checkpoint", TARGET, config=options)
    fused = draft.backbone.fuse(FEATURES)
    for layer in draft.backbone.layers:
        given = fused if stated is False else layer.input_layernorm(fused)
        for found, expected in zip(layer.keys_values(fused, 3), layer.self_attn.keys_values(given, 3), strict=True):
            close(found, expected, 0)
    reference = hidden(load_draft(SLIDING / "checkpoint", TARGET))
    assert mx.allclose(hidden(draft), reference, atol=HIDDEN).item() is (stated is not False)
    value, place = next((value, place) for name, value, place in draft.report.config if name == "context_kv_layer_norm")
    assert value is (stated is not False)
    assert place.startswith("absent" if stated is None else "draft_config")


def test_every_tap_has_a_norm_of_its_own(tmp_path):
    """The norms of two taps swapped are another draft."""

    def swap(arrays):
        first, second = "aux_hidden_norms.0.weight", "aux_hidden_norms.1.weight"
        arrays[first], arrays[second] = arrays[second], arrays[first]

    swapped = load(SLIDING, tmp_path / "draft", tensors=swap)
    assert not mx.allclose(hidden(swapped), hidden(load_draft(SLIDING / "checkpoint", TARGET)), atol=HIDDEN).item()


def test_gates_are_softplus_of_a_head_s_projection(tmp_path):
    """``softplus(0) = ln 2``: a projection to zero scales every head by it."""

    def zero(arrays):
        for name in [name for name in arrays if name.endswith("g_proj.weight")]:
            arrays[name] = mx.zeros_like(arrays[name])

    draft = load(SLIDING, tmp_path / "draft", tensors=zero)
    attention, session = draft.backbone.layers[0].self_attn, draft.open(TARGET)
    session.commit(FEATURES, 0, [0] * 20)
    x = mx.random.normal((1, 6, 64), key=mx.random.key(2))
    arguments = (x, session._contexts[0], session._visibility, 20)
    close(attention(*arguments), attention.o_proj(attention.heads(*arguments)) * math.log(2), HIDDEN)


# ------------------------------------------------------------------- config


def test_windows_may_be_listed_one_a_layer(tmp_path):
    def listed(config):
        del config["sliding_window"]
        config["sliding_windows"] = [12, 12, 12]

    close(
        hidden(load(SLIDING, tmp_path / "same", config=listed)), hidden(load_draft(SLIDING / "checkpoint", TARGET)), 0
    )
    varied = load(SLIDING, tmp_path / "varied", config=lambda config: config.update(sliding_windows=[5, 12, 9]))
    assert [layer.window for layer in varied.config.layers] == [5, 12, 9]
    assert [context.reach for context in varied.open(TARGET)._contexts] == [4, 11, 8]


@pytest.mark.parametrize("windows", [[12, 12], 12, [12, 0, 12], [12, None, 12], [12, True, 12]])
def test_a_list_of_windows_that_fits_no_layers_is_refused(tmp_path, windows):
    with pytest.raises(ConfigError, match=r"sliding_windows: found .*expected 3 whole numbers above 0"):
        load(SLIDING, tmp_path / "draft", config=lambda config: config.update(sliding_windows=windows))


@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
def test_blocks_are_causal_where_no_key_says_it(tmp_path, kind):
    def silent(config):
        del config["dflash_config"]["causal"]
        config["layer_types"] = [kind] * 3

    draft = load(SLIDING, tmp_path / "draft", config=silent)
    assert [layer.causal for layer in draft.config.layers] == [True] * 3
    assert draft.block_rows(2) == 3


@pytest.mark.parametrize(("ids", "expected"), [("inputs", (1, 5, 9)), ("outputs", (2, 6, 10))])
def test_taps_may_be_given_as_inputs_alone(tmp_path, ids, expected):
    checkpoint = copied(
        SLIDING, tmp_path / "draft", config=lambda config: config["dflash_config"].pop("target_layer_ids")
    )
    assert load_draft(checkpoint, TARGET, config={"aux_ids_are": ids}).tap_layers == expected


@pytest.mark.parametrize(
    "place",
    [
        ("layer_types",),
        ("sliding_window",),
        ("rope_theta",),
        ("dflash_config", "block_size"),
        ("dflash_config", "mask_token_id"),
    ],
    ids=lambda place: place[-1],
)
def test_what_decides_acceptance_has_no_default(tmp_path, place):
    check_required_key(SLIDING, tmp_path / "draft", TARGET, place)


def test_another_kind_of_gate_is_refused_by_its_name(tmp_path):
    with pytest.raises(UnsupportedError, match="gating: found 'per-element', expected 'per-head'"):
        load(SLIDING, tmp_path / "draft", config=lambda config: config.update(gating="per-element"))


def test_a_reduced_vocabulary_needs_its_own_head(tmp_path):
    with pytest.raises(CheckpointError, match="draft_vocab_size is 100, found no tensor"):
        load(SLIDING, tmp_path / "draft", config=lambda config: config.update(draft_vocab_size=100))


# ------------------------------------------------------------------- recognition and tensors


def test_it_is_recognised_by_architecture_though_it_has_its_target_s_model_type():
    report = load_draft(SLIDING / "checkpoint", TARGET).report
    assert (report.family, report.extra["recognised_by"]) == ("laguna", "architectures: 'DFlashLagunaForCausalLM'")


def test_its_norms_are_recognised_where_no_architecture_is_given(tmp_path):
    report = load(SLIDING, tmp_path / "draft", config=lambda config: config.pop("architectures")).report
    assert (report.family, report.extra["recognised_by"]) == ("laguna", "tensor aux_hidden_norms.0.weight")


def test_its_tensors_under_a_plain_name_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match=r"aux_hidden_norms.*of laguna.*DFlashDraftModel"):
        load(SLIDING, tmp_path / "draft", config=lambda config: config.update(architectures=["DFlashDraftModel"]))


def test_every_tensor_of_its_own_is_needed_in_its_shape(tmp_path):
    names = ["aux_hidden_norms.2.weight", "layers.1.self_attn.g_proj.weight"]
    check_tensors(SLIDING, tmp_path, TARGET, {name: name for name in names})


def test_the_published_fused_projection_is_the_same_draft(tmp_path):
    def fuse(arrays):
        for layer in range(3):
            parts = [arrays.pop(f"layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
            arrays[f"layers.{layer}.self_attn.qkv_proj.weight"] = mx.concatenate(parts)

    fused = load(SLIDING, tmp_path / "draft", tensors=fuse)
    close(hidden(fused), hidden(load_draft(SLIDING / "checkpoint", TARGET)), 0)


# ------------------------------------------------------------------- the contract of every family


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_text_and_caches_are_those_of_plain_decoding(case):
    draft = load_draft(case / "checkpoint", target("golden_sliding"))
    check_greedy_text_and_caches("golden_sliding", draft, depths=(1, draft.max_depth), tokens=12)


def test_sampled_text_has_the_target_s_distribution():
    check_distribution("golden", load_draft(SHORT / "checkpoint", target("golden")), depth=3, runs=200)


def test_the_wide_copy_computes_in_float32(tmp_path):
    check_widened(SLIDING, tmp_path / "draft", TARGET, hidden)


def test_quantised_matrices_leave_the_gates_in_float():
    check_bits(SLIDING, TARGET, hidden, ("g_proj",))


def test_rewinding_forgets():
    draft = load_draft(SLIDING / "checkpoint", TARGET)
    check_rewind(draft, TARGET, FEATURES, lambda session: session.block_hidden(ANCHOR, 6))
