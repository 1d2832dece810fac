"""Which folders are drafts of this family, and which targets they belong to; everything else is refused by name."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_dflash.drafts.families import NOT_LOADED
from mlx_dflash.drafts.registry import FAMILIES, load_draft
from mlx_dflash.errors import ConfigError, MlxDflashError, PairingError, UnsupportedError

from .make_draft import (
    VOCAB,
    backbone_tensors,
    features,
    make_draft,
    pretend_target,
    speculators_config,
    write_draft,
    z_lab_config,
)


def refusal(folder, kind, target=None, **options):
    with pytest.raises(kind) as caught:
        load_draft(folder, target or pretend_target(), **options)
    message = str(caught.value)
    assert "\n" not in message and "found" in message and "expected" in message and str(folder) in message
    return message


# ------------------------------------------------------------------- families


@pytest.mark.parametrize("name", ["DFlashDraftModel", "Qwen3DFlashDraftModel"])
def test_dflash_is_recognised_by_architecture(tmp_path, name):
    report = load_draft(make_draft(tmp_path, z_lab_config(architectures=[name])), pretend_target()).report
    assert (report.family, report.dialect) == ("dflash", "z-lab")


@pytest.mark.parametrize("name", ["DFlashSpeculator", "DFlashDraftModel"])
def test_speculators_is_recognised_before_the_architecture(tmp_path, name):
    config = speculators_config(architectures=[name])
    report = load_draft(make_draft(tmp_path, config), pretend_target()).report
    assert (report.family, report.dialect) == ("dflash", "speculators")


def test_tensor_names_decide_where_no_architecture_is_given(tmp_path):
    config = z_lab_config(architectures=None, model_type=None)
    assert load_draft(make_draft(tmp_path, config), pretend_target()).report.family == "dflash"


def test_projector_type_dflash_is_plain(tmp_path):
    config = z_lab_config(dflash_config={"projector_type": "dflash"})
    assert load_draft(make_draft(tmp_path, config), pretend_target()).report.family == "dflash"


OTHERS = [
    ({"speculators_model_type": "peagle"}, "p-eagle"),
    ({"speculators_model_type": "eagle"}, "eagle"),
    ({"speculators_model_type": "mlp"}, "mlp-speculator"),
    ({"dflash_config": {"projector_type": "dlite"}}, "dlite"),
    ({"architectures": ["KimiK3DFlashDraftModel"]}, "dflash with MLA"),
    ({"architectures": ["DeepseekDFlashDraftModel"]}, "dflash with MLA"),
]


@pytest.mark.parametrize(("change", "family"), OTHERS, ids=lambda value: value if isinstance(value, str) else None)
def test_another_family_is_refused_by_its_name_with_the_list_of_those_that_load(tmp_path, change, family):
    message = refusal(make_draft(tmp_path, z_lab_config(**change)), UnsupportedError)
    assert f"found a {family} draft (" in message
    assert all(known.name in message for known in FAMILIES)


def test_no_two_families_answer_to_one_sign():
    """Otherwise their order in the registry would decide."""
    for kind in ("architectures", "model_types", "projectors", "speculators", "tensors"):
        words = [word for family in (*FAMILIES, *NOT_LOADED) for word in getattr(family.signs, kind)]
        assert len(set(words)) == len(words), kind


@pytest.mark.parametrize(
    ("tensor", "family"),
    [
        ("layers.0.self_attn.kv_a_proj_with_mqa.weight", "dflash with MLA"),
        ("mask_hidden", "p-eagle"),
    ],
)
def test_another_family_s_tensor_under_a_plain_name_is_refused(tmp_path, tensor, family):
    """Such a checkpoint would run as v1 and be wrong."""
    tensors = backbone_tensors(z_lab_config()) | {tensor: mx.ones((4, 4))}
    message = refusal(write_draft(tmp_path, z_lab_config(), tensors), UnsupportedError)
    assert f"(of {family}) under architectures: 'DFlashDraftModel'" in message


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["Qwen3ForCausalLM"]},
        {"speculators_model_type": "novel"},
        {"speculators_model_type": 3},
        {"dflash_config": {"projector_type": "novel"}},
        {"speculators_config": {"algorithm": "novel"}},
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path, change):
    assert "expected one of" in refusal(make_draft(tmp_path, z_lab_config(**change)), UnsupportedError)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=JUNK, wrapped=st.booleans())
def test_junk_anywhere_in_a_config_loads_or_is_one_line(tmp_path, data, value, wrapped):
    config = speculators_config(layer_types=["full_attention"] * 2) if wrapped else z_lab_config()
    config |= {"rope_scaling": None, "rope_parameters": {"rope_type": "default"}, "is_causal": None, "quantization": {}}
    level = config
    while True:
        key = data.draw(st.sampled_from(sorted(level)))
        if not isinstance(level[key], dict) or not level[key] or data.draw(st.booleans()):
            break
        level = level[key]
    level[key] = value
    folder = make_draft(tmp_path)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        load_draft(folder, pretend_target())
    except MlxDflashError as error:
        assert "\n" not in str(error) and str(folder) in str(error)


def test_a_folder_that_is_no_draft_at_all_is_refused(tmp_path):
    folder = write_draft(tmp_path, {"model_type": "llama"}, {"tok.weight": mx.ones((2, 2))})
    assert "no tensor of a known draft" in refusal(folder, UnsupportedError)


# ------------------------------------------------------------------- pairing


def test_a_target_of_another_width_is_refused_with_both_widths(tmp_path):
    """R20."""
    message = refusal(make_draft(tmp_path), PairingError, pretend_target(hidden=65))
    assert "hidden width: found a target of 65" in message and "64" in message


def test_a_target_of_another_depth_is_refused_with_both_depths(tmp_path):
    """R20."""
    message = refusal(make_draft(tmp_path), PairingError, pretend_target(layers=9))
    assert "num_target_layers: found a target of 9 layers" in message and "expected 8" in message


def test_a_tap_that_the_target_does_not_have_is_refused(tmp_path):
    """R20."""
    config = z_lab_config(num_target_layers=None)
    message = refusal(make_draft(tmp_path, config), PairingError, pretend_target(layers=3))
    assert "tap layer 3: found a target of 3 layers" in message


def test_the_embedding_output_and_the_last_layer_may_be_tapped(tmp_path):
    config = z_lab_config(dflash_config={"target_layer_ids": [-1, 7]})
    assert load_draft(make_draft(tmp_path, config), pretend_target()).tap_layers == (-1, 7)


def test_a_vocabulary_of_another_size_is_refused_unless_it_is_padding(tmp_path):
    """R20."""
    folder = make_draft(tmp_path / "other", z_lab_config(vocab_size=100))
    assert f"vocab_size: found a target with {VOCAB} rows" in refusal(folder, PairingError)
    folder = make_draft(tmp_path / "padded", z_lab_config(vocab_size=VOCAB + 1))
    assert load_draft(folder, pretend_target()).report.extra["proposed_ids"] == VOCAB


@pytest.mark.parametrize("mask", [VOCAB, 151669])
def test_a_mask_outside_the_table_is_refused_with_the_table_s_rows(tmp_path, mask):
    """R20: MLX would read whatever lies behind the table."""
    message = refusal(make_draft(tmp_path, z_lab_config(dflash_config={"mask_token_id": mask})), PairingError)
    assert f"mask_token_id: found {mask}" in message and f"0 .. {VOCAB - 1}" in message


# ------------------------------------------------------------------- tokenizers

TOKENS = {f"t{i}": i for i in range(VOCAB - 4)} | {"<mask>": VOCAB - 4}


class Tokenizer:
    """As much of a Hugging Face tokenizer as the comparison needs."""

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def get_vocab(self):
        return self.vocabulary


def shipping(folder, vocabulary, config=None, *, added=(), unigram=False):
    entries = [[token, 0.0] for token in sorted(vocabulary, key=vocabulary.get)] if unigram else vocabulary
    content = {"model": {"vocab": entries}, "added_tokens": [{"id": i, "content": t} for t, i in added]}
    make_draft(folder, config)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("unigram", [False, True])
def test_the_same_tokenizer_is_accepted(tmp_path, unigram):
    folder = shipping(tmp_path, TOKENS, unigram=unigram)
    assert load_draft(folder, pretend_target(), tokenizer=Tokenizer(TOKENS)).report.family == "dflash"


def test_permuted_ids_are_refused_naming_the_first_token_with_both_ids(tmp_path):
    """R20."""
    permuted = TOKENS | {"t7": 9, "t9": 7}
    message = refusal(shipping(tmp_path, permuted), PairingError, tokenizer=Tokenizer(TOKENS))
    assert "token 't9': found id 7 in the draft's tokenizer and 9 in the target's" in message


def test_another_token_on_the_same_id_is_refused(tmp_path):
    """R20."""
    other = {("u3" if token == "t3" else token): i for token, i in TOKENS.items()}
    message = refusal(shipping(tmp_path, other), PairingError, tokenizer=Tokenizer(TOKENS))
    assert "token 'u3': found id 3 in the draft's tokenizer and none (3 is 't3')" in message


def test_added_tokens_are_compared_too(tmp_path):
    """R20."""
    folder = shipping(tmp_path, TOKENS, added=[("<end>", 5)])
    assert "'<end>'" in refusal(folder, PairingError, tokenizer=Tokenizer(TOKENS))


def test_tokens_that_only_one_side_added_are_no_difference(tmp_path):
    target_side = Tokenizer(TOKENS | {"<tool>": VOCAB - 1})
    folder = shipping(tmp_path, TOKENS, added=[("<draft>", VOCAB - 2)])
    assert load_draft(folder, pretend_target(), tokenizer=target_side).report.family == "dflash"


def test_a_real_tokenizer_is_compared_with_itself(tmp_path):
    from pathlib import Path

    from mlx_lm.tokenizer_utils import load

    import mlx_dflash

    folder = Path(mlx_dflash.__file__).parent / "data" / "pair" / "target"
    make_draft(tmp_path, z_lab_config(vocab_size=2048))
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer, target = load(folder), pretend_target(2048)
    load_draft(tmp_path, target, tokenizer=tokenizer)
    (tmp_path / "tokenizer.json").write_text(json.dumps(_swapped(content)))
    assert "in the target's, expected the same tokenizer" in refusal(
        tmp_path, PairingError, target, tokenizer=tokenizer
    )


def _swapped(content):
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    return content


def test_without_a_tokenizer_at_hand_nothing_is_compared(tmp_path):
    assert load_draft(shipping(tmp_path, {"x": 0}), pretend_target()).report.family == "dflash"


@pytest.mark.parametrize("text", ["{", "[1", "\xff"])
def test_a_broken_tokenizer_is_one_line(tmp_path, text):
    folder = make_draft(tmp_path)
    (folder / "tokenizer.json").write_bytes(text.encode("latin-1"))
    refusal_of = pytest.raises(ConfigError, match=r"tokenizer\.json: found no readable JSON")
    with refusal_of:
        load_draft(folder, pretend_target(), tokenizer=Tokenizer(TOKENS))


BY_TEXT = {"mask_token_id": None, "mask_token": "<mask>"}


def test_a_mask_named_by_text_is_looked_up_in_the_target_s_tokenizer(tmp_path):
    folder = make_draft(tmp_path, z_lab_config(dflash_config=BY_TEXT))
    draft = load_draft(folder, pretend_target(), tokenizer=Tokenizer(TOKENS))
    assert draft.report.extra["mask_token_id"] == VOCAB - 4


def test_a_mask_named_by_text_is_looked_up_in_the_draft_s_own_tokenizer(tmp_path):
    folder = shipping(tmp_path, TOKENS, z_lab_config(dflash_config=BY_TEXT))
    assert load_draft(folder, pretend_target()).report.extra["mask_token_id"] == VOCAB - 4


def test_a_mask_named_by_text_needs_a_tokenizer_that_knows_it(tmp_path):
    folder = make_draft(tmp_path, z_lab_config(dflash_config=BY_TEXT))
    refusal(folder, ConfigError)
    assert "'<mask>'" in refusal(folder, PairingError, tokenizer=Tokenizer({"t0": 0}))


# ------------------------------------------------------------------- the bundled pair


def test_the_bundled_pair_reports_itself_and_accepts_what_it_was_trained_for():
    import mlx_dflash

    pair, tokenizer = mlx_dflash.load()
    report = pair.draft.report
    assert (report.family, report.block_size, report.tap_layers) == ("dflash", 16, (0, 2, 4))
    assert report.extra["borrowed"] == ("embed_tokens", "lm_head")
    responses = list(mlx_dflash.stream_generate(pair, tokenizer, "def is_prime(n", max_tokens=48))
    # A wrong tap, scale or slot leaves the text right and brings this to about 1.
    assert responses[-1].acceptance_length > 4


def test_one_draft_serves_two_sequences_that_do_not_mix(tmp_path):
    target = pretend_target()
    draft = load_draft(make_draft(tmp_path), target)
    first, second = draft.open(target), draft.open(target)
    anchor = mx.array([5], mx.int32)
    first.commit(features(8), 0)
    alone = first.propose(anchor, 5, None).tokens.tolist()
    second.commit(features(20, seed=11), 0)
    second.propose(anchor, 5, None)
    assert first.propose(anchor, 5, None).tokens.tolist() == alone
    assert (first.position, second.position) == (8, 20)
