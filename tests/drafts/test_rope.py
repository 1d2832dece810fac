"""Rotary positions against their definition, written out in numpy."""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.rope_utils import Llama3RoPE

from mlx_dflash.drafts.config import parse_config
from mlx_dflash.drafts.rope import Rotary
from mlx_dflash.errors import ConfigError

from .make_draft import z_lab_config

DIMS = 16


def rope_of(**config):
    return parse_config(Path("config.json"), z_lab_config(**config)).layers[0].rope


def rotated(x: np.ndarray, position: int, periods, interleaved: bool) -> np.ndarray:
    """``x [rows, dims]``: pair i of row r turns by (position + r) / periods[i]."""
    out = np.empty_like(x)
    half = x.shape[1] // 2
    for row in range(x.shape[0]):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            angle = (position + row) / periods[i]
            cos, sin = math.cos(angle), math.sin(angle)
            out[row, a] = x[row, a] * cos - x[row, b] * sin
            out[row, b] = x[row, a] * sin + x[row, b] * cos
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("position", [0, 5, 1000])
def test_rotation_is_the_definition_in_either_style(interleaved, position):
    """R10."""
    rope = rope_of(is_neox_style=not interleaved)
    x = np.random.default_rng(0).standard_normal((3, DIMS)).astype(np.float32)
    expected = rotated(x, position, [10000 ** (2 * i / DIMS) for i in range(DIMS // 2)], interleaved)
    found = Rotary(rope)(mx.array(x)[None, None], position)[0, 0]
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_linear_scaling_stretches_positions():
    plain, scaled = rope_of(), rope_of(rope_scaling={"type": "linear", "factor": 4.0})
    np.testing.assert_allclose(scaled.periods, 4 * np.array(plain.periods))


def test_llama3_scaling_is_mlx_lm_s():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64}
    reference = Llama3RoPE(DIMS, traditional=False, base=10000.0, scaling_config=scaling)
    np.testing.assert_allclose(rope_of(rope_scaling=scaling).periods, reference._freqs, rtol=1e-5)


YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("options", "amplitude"),
    [
        ({}, 1 + 0.1 * math.log(16)),
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.25}, 1.25),
        ({"mscale": 0.5}, 1 + 0.1 * math.log(16)),
    ],
)
def test_yarn_amplitude_is_explicit_first_then_the_ratio_then_the_rule(options, amplitude):
    assert rope_of(rope_scaling=YARN | options).amplitude == pytest.approx(amplitude)


def test_yarn_range_is_rounded_unless_the_config_says_not_to():
    rounded, exact = rope_of(rope_scaling=YARN), rope_of(rope_scaling=YARN | {"truncate": False})
    assert rounded.periods != exact.periods
    assert rounded.periods[0] == exact.periods[0] == 1.0


def test_yarn_without_a_factor_is_refused():
    with pytest.raises(ConfigError, match=r"rope_scaling\.factor: found none"):
        rope_of(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 64})


def test_yarn_takes_the_length_from_max_position_embeddings_when_it_has_none_of_its_own():
    short = {"rope_type": "yarn", "factor": 16.0}
    assert rope_of(rope_scaling=short, max_position_embeddings=64) == rope_of(rope_scaling=YARN)
    with pytest.raises(ConfigError, match="max_position_embeddings: found none"):
        rope_of(rope_scaling=short)


def test_multimodal_rope_is_plain_rope_for_text():
    assert rope_of(rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]}) == rope_of()
