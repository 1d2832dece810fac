"""From logits to the distribution tokens are drawn from: parity with a reference, and with mlx-lm's own pieces."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors
from safetensors.numpy import load_file

from mlx_dflash.decoding.sampling import Filters, apply_processors, build_processors, log_softmax
from mlx_dflash.errors import OptionError

GOLDEN = Path(__file__).parent.parent / "golden" / "sampling" / "probs"
META = json.loads((GOLDEN / "meta.json").read_text())
CASES = {name: mx.array(value) for name, value in load_file(GOLDEN / "cases.safetensors").items()}


def order_matters(case: dict) -> bool:
    """The reference sharpens first and cuts top-k before top-p; mlx-lm, whose order we keep, cuts at temperature 1 and
    top-p before top-k. With one filter only, and top-p only at temperature 1, both mean the same."""
    return case["top_p"] < 1 and (case["temperature"] != 1 or case["top_k"] > 0)


@pytest.mark.parametrize("index", range(len(META["cases"])))
def test_probabilities_equal_the_reference(index: int) -> None:
    case, logits = META["cases"][index], CASES[f"s{index}.logits"][0]
    top_p, top_k, temperature = case["top_p"], case["top_k"], case["temperature"]
    if order_matters(case):
        sharpened = log_softmax(logits / temperature)
        cut = log_softmax(Filters(temperature=1.0, top_k=top_k).truncate(sharpened))
        found = Filters(temperature=1.0, top_p=top_p).probabilities(cut)
    else:
        filters = Filters(temperature=temperature, top_p=top_p, top_k=top_k)
        found = filters.probabilities(log_softmax(logits))
    assert mx.allclose(found, CASES[f"s{index}.probs"][0], atol=2e-5).item()


def test_filters_cut_in_mlx_lms_order() -> None:
    """top-p, min-p, top-k at temperature 1, then the temperature: sharpening first would keep fewer tokens."""
    logprobs = mx.log(mx.array([[0.4, 0.3, 0.2, 0.1]]))
    kept = Filters(temperature=0.3, top_p=0.8).probabilities(logprobs) > 0
    assert kept.tolist() == [[True, True, True, False]]
    sharpened_first = Filters(temperature=1.0, top_p=0.8).probabilities(log_softmax(logprobs / 0.3)) > 0
    assert sharpened_first.tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_rows_of_a_block_get_what_each_would_get_alone(dtype: mx.Dtype) -> None:
    logprobs = log_softmax(mx.random.normal((7, 300), key=mx.random.key(1)).astype(dtype))
    filters = Filters(temperature=0.8, top_p=0.9, min_p=0.02, top_k=40)
    block = filters.probabilities(logprobs)
    alone = mx.concatenate([filters.probabilities(logprobs[row : row + 1]) for row in range(7)])
    assert mx.array_equal(block, alone).item()


def test_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    logprobs = log_softmax(mx.array([[1.0, 2.0, 3.0]]))
    assert mx.array_equal(Filters(temperature=1.0, top_k=50).truncate(logprobs), logprobs).item()


@pytest.mark.parametrize("keep", [1, 2, 4, 5, 9])
def test_min_p_leaves_at_least_so_many_tokens_the_likeliest_ones(keep: int) -> None:
    logprobs = mx.log(mx.array([[0.05, 0.6, 0.1, 0.04, 0.21], [0.3, 0.1, 0.3, 0.1, 0.2]]))
    cut = Filters(temperature=1.0, min_p=0.5, min_tokens_to_keep=keep).truncate(logprobs)
    for row, natural in zip(range(2), (1, 3), strict=True):
        likeliest = mx.sort(logprobs[row]).tolist()[::-1][: max(keep, natural)]
        assert sorted((value for value in cut[row].tolist() if value > -math.inf), reverse=True) == likeliest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temp: found -1.0, expected a number of 0 or more"),
        ({"temperature": float("nan")}, "temp: found nan"),
        ({"top_p": 1.5}, "top_p: found 1.5, expected a number in 0..1"),
        ({"min_p": -0.1}, "min_p: found -0.1"),
        ({"top_k": -1}, "top_k: found -1, expected a whole number of 0 or more"),
        ({"top_k": 2.5}, "top_k: found 2.5"),
        ({"min_tokens_to_keep": 0}, "min_tokens_to_keep: found 0, expected a whole number of 1 or more"),
    ],
)
def test_values_out_of_range_are_named(options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message.replace(".", r"\.")):
        Filters(**options)


PENALTIES = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "presence_context_size": 3},
    {"frequency_penalty": 0.4},
    {"logit_bias": {3: 5.0, 1: -4.0}},
    {"logit_bias": {2: 1.0}, "repetition_penalty": 1.5, "presence_penalty": 0.2, "frequency_penalty": 0.1},
]


@pytest.mark.parametrize("options", PENALTIES)
def test_each_row_of_a_block_is_penalised_with_its_own_history(options: dict) -> None:
    """R52: history grows inside the block, and equals mlx-lm's when each row is computed alone."""
    vocab, history, block = 12, mx.array([5, 3, 3, 7]), mx.array([3, 9, 9, 2])
    logits = mx.random.normal((4, vocab), key=mx.random.key(2)) * 3
    together = apply_processors(build_processors(vocab, **options), mx.concatenate([history, block]), logits)
    for row in range(4):
        alone = logits[row : row + 1]
        for processor in make_logits_processors(**options):
            alone = processor(mx.concatenate([history, block[: row + 1]]), alone)
        assert mx.array_equal(together[row : row + 1], alone).item(), row
    assert not mx.array_equal(together, logits).item()


@pytest.mark.parametrize("distance", [10, 25, 45])
@pytest.mark.parametrize("window", [20, 128])
def test_the_penalty_window_is_a_setting(distance: int, window: int) -> None:
    """R53: a loop longer than the window is not seen; the window is ours to widen."""
    tokens = mx.array([4] + [1] * (distance - 1))
    processors = build_processors(8, repetition_penalty=2.0, repetition_context_size=window)
    logits = apply_processors(processors, tokens, mx.ones((1, 8)))
    assert (logits[0, 4].item() == 0.5) == (distance <= window)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {99: 1.0}}, "logit_bias: found token id 99, expected 0..11"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: found token id -1"),
        ({"repetition_penalty": -2.0}, "repetition_penalty: found -2.0"),
        ({"presence_context_size": 0}, "presence_context_size: found 0"),
    ],
)
def test_processor_options_out_of_range_are_named(options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build_processors(12, **options)


def test_log_softmax_is_mlx_lms_arithmetic_in_the_logits_own_dtype() -> None:
    logits = mx.random.normal((1, 100), key=mx.random.key(3)).astype(mx.bfloat16)
    assert mx.array_equal(log_softmax(logits), logits - mx.logsumexp(logits, keepdims=True)).item()
    assert np.isclose(mx.exp(log_softmax(logits.astype(mx.float32))).sum().item(), 1.0, atol=1e-4)
