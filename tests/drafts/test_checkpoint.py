"""Draft folders as they come: other spellings load the same weights, damaged ones are refused in one line."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

from mlx_dflash.drafts.registry import load_draft
from mlx_dflash.errors import CheckpointError, ConfigError, ModelNotFoundError, UnsupportedError

from .make_draft import backbone_tensors, features, make_draft, pretend_target, write_draft, z_lab_config

ANCHOR = mx.array([5], mx.int32)


def proposal_of(folder, **options):
    target = pretend_target()
    session = load_draft(folder, target, **options).open(target)
    session.commit(features(8), 0)
    return np.array(session.block_hidden(ANCHOR, 6))


def refusal(folder, kind=CheckpointError, **options):
    with pytest.raises(kind) as caught:
        load_draft(folder, pretend_target(), **options)
    message = str(caught.value)
    assert "\n" not in message and "expected" in message and str(folder) in message
    return message


@pytest.fixture
def plain(tmp_path):
    """What the undamaged draft computes."""
    return proposal_of(make_draft(tmp_path / "plain"))


# ------------------------------------------------------------------- spellings


def fused(tensors):
    result = dict(tensors)
    for i in range(2):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        parts = [result.pop(f"{attention}.{name}_proj.weight") for name in "qkv"]
        result[f"{attention}.qkv_proj.weight"] = mx.concatenate(parts)
        parts = [result.pop(f"{mlp}.{name}_proj.weight") for name in ("gate", "up")]
        result[f"{mlp}.gate_up_proj.weight"] = mx.concatenate(parts)
    return result


def encoder_names(tensors):
    result = dict(tensors)
    result["encoder.fc.weight"] = result.pop("fc.weight")
    result["encoder.output_norm_enc.weight"] = result.pop("hidden_norm.weight")
    return result


SPELLINGS = {
    "model. prefix": lambda t: {f"model.{name}": array for name, array in t.items()},
    "midlayer": lambda t: {name.replace("layers.0.", "midlayer."): array for name, array in t.items()},
    "encoder": encoder_names,
    "fused projections": fused,
    "rotary tables and training aids": lambda t: (
        t
        | {f"layers.{i}.self_attn.rotary_emb.inv_freq": mx.ones((8,)) for i in range(2)}
        | {"verifier_norm.weight": mx.ones((4,)), "verifier_lm_head.weight": mx.ones((4, 4))}
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
def test_other_spellings_of_the_names_load_the_same_weights(tmp_path, plain, spelling):
    config = z_lab_config()
    folder = write_draft(tmp_path / "spelled", config, SPELLINGS[spelling](backbone_tensors(config)))
    np.testing.assert_array_equal(proposal_of(folder), plain)


def test_tensors_that_are_never_read_are_reported(tmp_path):
    config = z_lab_config()
    folder = write_draft(tmp_path, config, SPELLINGS["rotary tables and training aids"](backbone_tensors(config)))
    ignored = load_draft(folder, pretend_target()).report.ignored
    assert len(ignored) == 4
    assert any(note.startswith("tensor verifier_lm_head.weight: ") for note in ignored)


def test_fused_projections_with_biases_are_split_alike(tmp_path):
    config = z_lab_config(attention_bias=True)
    tensors = backbone_tensors(config)
    rows = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64}
    for i in range(2):
        for j, (name, count) in enumerate(rows.items()):
            tensors[f"layers.{i}.self_attn.{name}.bias"] = mx.random.normal((count,), key=mx.random.key(10 * i + j))
    apart = proposal_of(write_draft(tmp_path / "apart", config, tensors))
    for i in range(2):
        attention = f"layers.{i}.self_attn"
        biases = [tensors.pop(f"{attention}.{name}_proj.bias") for name in "qkv"]
        tensors[f"{attention}.qkv_proj.bias"] = mx.concatenate(biases)
    np.testing.assert_array_equal(proposal_of(write_draft(tmp_path / "fused", config, fused(tensors))), apart)


def write_shards(folder, index=True, count=2):
    config = z_lab_config()
    names = sorted(tensors := backbone_tensors(config))
    weight_map = {}
    for shard in range(count):
        file = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
        part = names[shard::count]
        write_draft(folder, config, {name: tensors[name] for name in part}, file)
        weight_map |= dict.fromkeys(part, file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("index", [True, False])
def test_shards_load_with_and_without_an_index(tmp_path, plain, index):
    np.testing.assert_array_equal(proposal_of(write_shards(tmp_path / "shards", index)), plain)


def test_an_index_decides_alone_which_files_belong_to_the_draft(tmp_path, plain):
    folder = write_shards(tmp_path / "shards")
    mx.save_safetensors(str(folder / "model-old.safetensors"), {"fc.weight": mx.zeros((1, 1))})
    np.testing.assert_array_equal(proposal_of(folder), plain)


def test_the_file_name_of_built_in_drafts_is_found(tmp_path, plain):
    config = z_lab_config()
    folder = write_draft(tmp_path / "named", config, backbone_tensors(config), "dflash_draft_model.safetensors")
    np.testing.assert_array_equal(proposal_of(folder), plain)


def test_norm_weights_are_taken_as_stored(tmp_path, plain):
    """R09: DFlash backbones multiply by the weight itself, and loading twice shifts nothing."""
    folder = make_draft(tmp_path / "again")
    target = pretend_target()
    stored = backbone_tensors(z_lab_config())["norm.weight"]
    for _ in range(2):
        np.testing.assert_array_equal(load_draft(folder, target).backbone.norm.weight, stored)
    shifted = backbone_tensors(z_lab_config()) | {"norm.weight": stored - 1}
    found = proposal_of(write_draft(tmp_path / "shifted", z_lab_config(), shifted))
    np.testing.assert_allclose(found, plain * np.array((stored - 1) / stored), rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------- damaged folders


def test_no_folder_and_no_config_are_named(tmp_path):
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        load_draft(tmp_path / "nowhere", pretend_target())
    folder = make_draft(tmp_path / "draft")
    (folder / "config.json").unlink()
    assert "config.json" in refusal(folder, ConfigError)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\xff", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_one_line(tmp_path, text):
    folder = make_draft(tmp_path)
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        load_draft(folder, pretend_target())
    assert "config.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_weights_lists_what_is_there(tmp_path):
    folder = make_draft(tmp_path)
    (folder / "model.safetensors").unlink()
    assert "beside config.json" in refusal(folder)


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "ckpt"])
def test_pickles_are_refused_by_name_and_never_opened(tmp_path, suffix):
    folder = make_draft(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / f"pytorch_model.{suffix}").write_bytes(b"cos\nsystem\n(S'touch marker'\ntR.")
    message = refusal(folder)
    assert f"pytorch_model.{suffix}" in message and "pickle" in message


def test_a_missing_shard_is_named(tmp_path):
    for index in (True, False):
        folder = write_shards(tmp_path / str(index), index)
        (folder / "model-00002-of-00002.safetensors").unlink()
        assert "model-00002-of-00002.safetensors" in refusal(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_broken_index_is_one_line(tmp_path, content):
    folder = make_draft(tmp_path)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        load_draft(folder, pretend_target())
    assert "model.safetensors.index.json" in str(caught.value)


@pytest.mark.parametrize("keep", [0, 4, 50, 5_000, -1])
def test_a_truncated_file_is_found_before_it_is_read(tmp_path, keep):
    folder = make_draft(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = refusal(folder)
    assert "model.safetensors" in message and "truncated" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_tensor_name(tmp_path, value):
    tensors = backbone_tensors(z_lab_config())
    tensors["layers.1.mlp.up_proj.weight"][3, 5] = value
    message = refusal(write_draft(tmp_path, z_lab_config(), tensors))
    assert "layers.1.mlp.up_proj.weight" in message and "not finite" in message


def test_a_weight_that_leaves_the_asked_type_s_range_is_refused(tmp_path):
    tensors = backbone_tensors(z_lab_config())
    tensors["fc.weight"][0, 0] = 1e6
    folder = write_draft(tmp_path, z_lab_config(), tensors)
    assert "not finite as float16" in refusal(folder, dtype="float16")
    assert load_draft(folder, pretend_target()).report.dtype == "float32"


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.self_attn.q_norm.weight", "norm.weight"])
def test_a_missing_tensor_is_refused_by_name(tmp_path, name):
    tensors = backbone_tensors(z_lab_config())
    del tensors[name]
    assert f"found no tensor {name}" in refusal(write_draft(tmp_path, z_lab_config(), tensors))


@pytest.mark.parametrize("name", ["layers.2.mlp.up_proj.weight", "surprise.weight", "layers.0.self_attn.q_proj.bias"])
def test_a_tensor_without_a_place_is_refused_by_name(tmp_path, name):
    tensors = backbone_tensors(z_lab_config()) | {name: mx.ones((64,))}
    assert f"found tensor {name}" in refusal(write_draft(tmp_path, z_lab_config(), tensors))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("fc.weight", (64, 192), "[64, 128]"),
        ("layers.0.self_attn.q_proj.weight", (128, 64), "[64, 64]"),
        ("layers.0.self_attn.k_norm.weight", (32,), "[16]"),
        ("layers.1.mlp.down_proj.weight", (64, 32), "[64, 64]"),
        ("norm.weight", (64, 1), "[64]"),
    ],
)
def test_a_tensor_of_another_shape_is_refused_with_both_shapes(tmp_path, name, shape, expected):
    tensors = backbone_tensors(z_lab_config()) | {name: mx.ones(shape)}
    message = refusal(write_draft(tmp_path, z_lab_config(), tensors))
    assert f"tensor {name}: found shape {list(shape)}, expected {expected}" in message


def test_a_tensor_of_whole_numbers_is_refused(tmp_path):
    tensors = backbone_tensors(z_lab_config())
    tensors["fc.weight"] = tensors["fc.weight"].astype(mx.int32)
    assert "tensor fc.weight: found int32 values" in refusal(write_draft(tmp_path, z_lab_config(), tensors))


def test_one_tensor_under_two_names_is_refused(tmp_path):
    tensors = backbone_tensors(z_lab_config())
    tensors["model.norm.weight"] = tensors["norm.weight"]
    assert "found a second norm.weight" in refusal(write_draft(tmp_path, z_lab_config(), tensors))


def test_a_fused_projection_beside_its_parts_is_refused(tmp_path):
    tensors = backbone_tensors(z_lab_config())
    both = fused(tensors) | {"layers.0.self_attn.q_proj.weight": tensors["layers.0.self_attn.q_proj.weight"]}
    assert "found layers.0.self_attn.q_proj.weight beside it" in refusal(write_draft(tmp_path, z_lab_config(), both))


def test_a_fused_projection_of_odd_rows_is_refused(tmp_path):
    tensors = fused(backbone_tensors(z_lab_config()))
    for shape, rows in (((127, 64), 127), ((), 0)):
        tensors["layers.0.self_attn.qkv_proj.weight"] = mx.ones(shape)
        assert f"found {rows} rows" in refusal(write_draft(tmp_path, z_lab_config(), tensors))


@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight"])
@pytest.mark.parametrize("shape", [(), (64,), (64, 64, 1)])
def test_a_head_or_table_that_is_no_matrix_is_refused(tmp_path, name, shape):
    tensors = backbone_tensors(z_lab_config()) | {name: mx.ones(shape)}
    message = refusal(write_draft(tmp_path, z_lab_config(), tensors))
    assert f"tensor {name}: found shape {list(shape)}, expected a matrix" in message


def test_code_beside_a_checkpoint_is_never_run(tmp_path):
    marker = tmp_path / "marker"
    config = z_lab_config(auto_map={"AutoModel": "evil.Model"})
    folder = make_draft(tmp_path / "draft", config)
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()")
    assert any("auto_map" in note for note in load_draft(folder, pretend_target()).report.ignored)
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "evil.py"}))
    assert "model_file" in refusal(folder, UnsupportedError)
    assert not marker.exists()


# ------------------------------------------------------------------- sinks


def test_attention_sinks_enter_the_softmax_denominator(tmp_path):
    config = z_lab_config(dflash_config={"attention_sink_bias": True})
    tensors = backbone_tensors(config)
    for i in range(2):
        tensors[f"layers.{i}.self_attn.attention_sink_bias"] = mx.full((4,), -1e4)
    without = proposal_of(make_draft(tmp_path / "without"))
    np.testing.assert_allclose(proposal_of(write_draft(tmp_path / "far", config, tensors)), without, atol=1e-5)
    for i in range(2):
        tensors[f"layers.{i}.self_attn.attention_sink_bias"] = mx.full((4,), 1.0)
    found = proposal_of(write_draft(tmp_path / "near", config, tensors))
    assert np.abs(found - without).max() > 1e-2


def test_sinks_without_tensors_are_refused(tmp_path):
    config = z_lab_config(dflash_config={"attention_sink_bias": True})
    assert "attention_sink_bias" in refusal(make_draft(tmp_path, config))
