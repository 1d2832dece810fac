"""Packed drafts, drafts packed on load, the types they compute in, and the formats that are refused."""

from __future__ import annotations

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_dflash.drafts.registry import load_draft
from mlx_dflash.errors import ConfigError, OptionError, UnsupportedError

from .make_draft import (
    VOCAB,
    backbone_tensors,
    features,
    head_tensor,
    make_draft,
    pretend_target,
    quantized,
    speculators_config,
    write_draft,
    z_lab_config,
)

ANCHOR = mx.array([5], mx.int32)


def hidden_of(draft, target):
    session = draft.open(target)
    session.commit(features(8), 0)
    return np.array(session.block_hidden(ANCHOR, 6).astype(mx.float32))


def packed_folder(folder, block, tensors):
    return write_draft(folder, z_lab_config(quantization=block), tensors)


def unpacked(tensors, group_size=64, bits=4):
    """What the packed tensors stand for."""
    result = {}
    for name, array in tensors.items():
        if array.ndim == 2:
            array = mx.dequantize(*mx.quantize(array, group_size, bits), group_size=group_size, bits=bits)
        result[name] = array
    return result


# ------------------------------------------------------------------- MLX's own packing


@pytest.mark.parametrize(("group_size", "bits"), [(64, 4), (32, 4), (64, 8)])
@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_a_packed_checkpoint_computes_what_its_unpacked_weights_would(tmp_path, group_size, bits, key):
    tensors, block = backbone_tensors(z_lab_config()), {"group_size": group_size, "bits": bits}
    config = z_lab_config(**{key: block})
    folder = write_draft(tmp_path / "packed", config, quantized(tensors, group_size, bits))
    target = pretend_target()
    draft = load_draft(folder, target)
    assert draft.report.quantization == f"affine {bits} bits, group {group_size}"
    plain = write_draft(tmp_path / "plain", z_lab_config(), unpacked(tensors, group_size, bits))
    np.testing.assert_allclose(hidden_of(draft, target), hidden_of(load_draft(plain, target), target), atol=1e-4)


def test_overrides_by_path_and_unpacked_layers_are_honoured(tmp_path):
    tensors = backbone_tensors(z_lab_config())
    path = "layers.1.mlp.down_proj"
    wide = {name: array for name, array in tensors.items() if name.startswith(path)}
    plain = {name: array for name, array in tensors.items() if name.startswith("fc")}
    rest = {name: array for name, array in tensors.items() if name not in wide | plain}
    block = {"group_size": 64, "bits": 4, f"model.{path}": {"group_size": 32, "bits": 8}, "fc": False}
    folder = packed_folder(tmp_path / "packed", block, quantized(rest) | quantized(wide, 32, 8) | plain)
    target = pretend_target()
    draft = load_draft(folder, target)
    assert isinstance(draft.backbone.fc, nn.Linear)
    assert draft.backbone.layers[1].mlp.down_proj.bits == 8
    assert draft.report.quantization == "affine 4 bits, group 64 (1 of 14 matrices otherwise)"
    expected = unpacked(rest) | unpacked(wide, 32, 8) | plain
    reference = load_draft(write_draft(tmp_path / "plain", z_lab_config(), expected), target)
    np.testing.assert_allclose(hidden_of(draft, target), hidden_of(reference, target), atol=1e-4)


def test_fused_packed_projections_are_split_with_their_scales(tmp_path):
    tensors = quantized(backbone_tensors(z_lab_config()))
    target = pretend_target()
    block = {"group_size": 64, "bits": 4}
    apart = hidden_of(load_draft(packed_folder(tmp_path / "apart", block, tensors), target), target)
    for i in range(2):
        for leaf in ("weight", "scales", "biases"):
            attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
            parts = [tensors.pop(f"{attention}.{name}_proj.{leaf}") for name in "qkv"]
            tensors[f"{attention}.qkv_proj.{leaf}"] = mx.concatenate(parts)
            parts = [tensors.pop(f"{mlp}.{name}_proj.{leaf}") for name in ("gate", "up")]
            tensors[f"{mlp}.gate_up_proj.{leaf}"] = mx.concatenate(parts)
    found = hidden_of(load_draft(packed_folder(tmp_path / "fused", block, tensors), target), target)
    np.testing.assert_array_equal(found, apart)


@pytest.mark.parametrize("block", [None, {"bits": 4}, {"group_size": 64, "bits": "four"}])
def test_packed_tensors_that_the_config_does_not_describe_are_refused(tmp_path, block):
    folder = packed_folder(tmp_path, block, quantized(backbone_tensors(z_lab_config())))
    with pytest.raises(ConfigError, match=r"quantization\.(group_size|bits): found"):
        load_draft(folder, pretend_target())


@pytest.mark.parametrize("block", [{"bits": 7, "group_size": 64}, {"bits": 4, "group_size": 16}])
def test_a_packing_that_mlx_does_not_have_is_refused_by_its_numbers(tmp_path, block):
    folder = packed_folder(tmp_path, block, quantized(backbone_tensors(z_lab_config())))
    with pytest.raises(UnsupportedError, match=f"found {block['bits']} bits in groups of {block['group_size']}"):
        load_draft(folder, pretend_target())


def test_a_packed_own_head_keeps_its_map(tmp_path):
    config = speculators_config(draft_vocab_size=8, quantization={"group_size": 64, "bits": 4})
    tensors = quantized(backbone_tensors(config) | {"lm_head.weight": head_tensor(8)})
    folder = write_draft(tmp_path, config, tensors | {"d2t": mx.full((8,), 8, mx.int64)})
    target = pretend_target()
    session = load_draft(folder, target).open(target)
    session.commit(features(8), 0)
    assert all(8 <= token < 16 for token in session.propose(ANCHOR, 5, None).tokens.tolist())


# ------------------------------------------------------------------- packing on load


@pytest.mark.parametrize("bits", [4, 8])
def test_bits_packs_every_matrix_and_nothing_else(tmp_path, bits):
    config = z_lab_config()
    tensors = backbone_tensors(config) | {
        "embed_tokens.weight": head_tensor(VOCAB),
        "lm_head.weight": head_tensor(VOCAB),
    }
    target = pretend_target()
    folder = write_draft(tmp_path / "draft", config, tensors)
    draft, plain = load_draft(folder, target, bits=bits), load_draft(folder, target)
    assert draft.report.quantization == f"affine {bits} bits, group 64"
    assert isinstance(draft.backbone.fc, nn.QuantizedLinear)
    assert isinstance(draft.backbone.lm_head, nn.QuantizedLinear)
    assert isinstance(draft.backbone.embed_tokens, nn.QuantizedEmbedding)
    assert draft.backbone.norm.weight.dtype == mx.float32
    assert draft.report.weight_bytes < plain.report.weight_bytes / 2
    reference = load_draft(write_draft(tmp_path / "unpacked", config, unpacked(tensors, bits=bits)), target)
    np.testing.assert_allclose(hidden_of(draft, target), hidden_of(reference, target), atol=1e-4)


def test_widths_that_64_does_not_divide_take_groups_of_32_or_stay(tmp_path):
    config = z_lab_config(intermediate_size=96)
    draft = load_draft(make_draft(tmp_path / "96", config), pretend_target(), bits=4)
    assert draft.backbone.layers[0].mlp.down_proj.group_size == 32
    assert draft.backbone.layers[0].mlp.up_proj.group_size == 64
    config = z_lab_config(intermediate_size=40)
    draft = load_draft(make_draft(tmp_path / "40", config), pretend_target(), bits=4)
    assert isinstance(draft.backbone.layers[0].mlp.down_proj, nn.Linear)


@pytest.mark.parametrize("bits", [0, 2, 16, "4"])
def test_other_bits_are_refused(tmp_path, bits):
    with pytest.raises(OptionError, match="bits: found"):
        load_draft(make_draft(tmp_path), pretend_target(), bits=bits)


def test_bits_on_a_packed_checkpoint_must_be_its_own(tmp_path):
    folder = packed_folder(tmp_path, {"group_size": 64, "bits": 4}, quantized(backbone_tensors(z_lab_config())))
    assert load_draft(folder, pretend_target(), bits=4).report.quantization == "affine 4 bits, group 64"
    with pytest.raises(OptionError, match="already quantised to 4 bits"):
        load_draft(folder, pretend_target(), bits=8)


# ------------------------------------------------------------------- types


def stored_as(folder, dtype):
    return write_draft(folder, z_lab_config(), backbone_tensors(z_lab_config(), dtype=dtype))


@pytest.mark.parametrize(
    ("stored", "asked", "computes"),
    [
        (mx.float32, None, "float32"),
        (mx.bfloat16, None, "bfloat16"),
        (mx.float16, None, "bfloat16"),
        (mx.float16, "float16", "float16"),
        (mx.float16, "float32", "float32"),
        (mx.float32, "bfloat16", "bfloat16"),
    ],
)
def test_a_draft_never_computes_in_float16_unless_asked(tmp_path, stored, asked, computes):
    """R13."""
    target = pretend_target()
    draft = load_draft(stored_as(tmp_path, stored), target, dtype=asked)
    assert draft.report.dtype == computes
    session = draft.open(target)
    session.commit(features(3), 0)
    assert {str(array.dtype).rpartition(".")[2] for array in session.arrays()} == {computes}


def test_an_unknown_dtype_is_refused(tmp_path):
    with pytest.raises(OptionError, match="dtype: found 'int8'"):
        load_draft(make_draft(tmp_path), pretend_target(), dtype="int8")


def overflowing(folder):
    """A draft whose residual stream leaves float16's range in the MLP, as published drafts' do."""
    tensors = backbone_tensors(z_lab_config())
    tensors["layers.0.mlp.down_proj.weight"] = tensors["layers.0.mlp.down_proj.weight"] * 1e4
    tensors["layers.0.mlp.up_proj.weight"] = tensors["layers.0.mlp.up_proj.weight"] * 1e2
    return write_draft(folder, z_lab_config(), tensors)


@pytest.mark.parametrize(("dtype", "finite"), [("float16", False), ("bfloat16", True), ("float32", True)])
def test_an_overflow_is_reported_with_the_proposal(tmp_path, dtype, finite):
    """R13: the loop reads the flag in its one synchronisation."""
    target = pretend_target()
    session = load_draft(overflowing(tmp_path), target, dtype=dtype).open(target)
    session.commit(features(8), 0)
    assert session.propose(ANCHOR, 5, None).finite.item() is finite


def test_the_softcap_does_not_hide_an_infinity(tmp_path):
    """R13: tanh turns an infinity into the cap."""
    target = pretend_target()
    target.head_matrix[7] = 1e38
    session = load_draft(make_draft(tmp_path, z_lab_config(final_logit_softcapping=30.0)), target).open(target)
    session.commit(features(8), 0)
    assert not session.propose(ANCHOR, 5, None).finite.item()


@pytest.mark.parametrize("bits", [None, 4])
def test_a_widened_draft_is_the_same_draft_in_float32(tmp_path, bits):
    """R13."""
    target = pretend_target()
    draft = load_draft(overflowing(tmp_path), target, dtype="float16", bits=bits)
    wide = draft.widened()
    assert (wide.report.dtype, wide.report.quantization) == ("float32", draft.report.quantization)
    session = wide.open(target)
    session.commit(features(8), 0)
    assert session.propose(ANCHOR, 5, None).finite.item()
    assert wide.widened() is None
    assert draft.report.dtype == "float16"


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_the_draft_s_context_is_never_packed(tmp_path, bits):
    """R14: whatever the weights are, K and V stay in the type the draft computes in."""
    target = pretend_target()
    session = load_draft(stored_as(tmp_path, mx.bfloat16), target, bits=bits).open(target)
    session.commit(features(9), 0)
    assert len(session.arrays()) == 4
    assert {array.dtype for array in session.arrays()} == {mx.bfloat16}


def test_a_borrowed_head_multiplies_in_the_target_s_type(tmp_path):
    """Otherwise MLX would widen the whole head for every block."""
    target = pretend_target()
    target.embedding, target.head_matrix = target.embedding.astype(mx.bfloat16), target.head_matrix.astype(mx.bfloat16)
    seen = []
    plain_head = target.head
    target.head = lambda hidden: (seen.append(hidden.dtype), plain_head(hidden))[1]
    session = load_draft(make_draft(tmp_path), target).open(target)
    session.commit(features(8), 0)
    session.propose(ANCHOR, 5, None)
    assert seen == [mx.bfloat16]


# ------------------------------------------------------------------- foreign formats


def foreign_tensor(name):
    tensors = backbone_tensors(z_lab_config())
    return tensors | {name: mx.ones((4,))}


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt NVFP4"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors pack-quantized"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq"),
    ],
)
def test_other_programs_formats_are_refused_by_name(tmp_path, block, named):
    folder = make_draft(tmp_path, z_lab_config(quantization_config=block))
    with pytest.raises(UnsupportedError, match=f"quantization_config: found {named} weights"):
        load_draft(folder, pretend_target())


@pytest.mark.parametrize("ending", ["weight_packed", "weight_scale_inv", "weight_scale"])
def test_other_programs_tensors_are_refused_without_any_config(tmp_path, ending):
    name = f"layers.0.mlp.up_proj.{ending}"
    folder = write_draft(tmp_path, z_lab_config(), foreign_tensor(name))
    with pytest.raises(UnsupportedError, match=name):
        load_draft(folder, pretend_target())


def test_model_optimizer_s_side_file_is_refused(tmp_path):
    folder = make_draft(tmp_path)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A16_NVFP4"}}))
    with pytest.raises(UnsupportedError, match="W4A16_NVFP4"):
        load_draft(folder, pretend_target())
