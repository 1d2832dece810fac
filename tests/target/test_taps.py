"""A tap is the residual stream right after a layer: by the publishers' own numbers, and by sums done by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load_model

from mlx_dflash.errors import PairingError
from mlx_dflash.target import Target
from tests.tiny_models import tiny_gemma4, tiny_llama
from tests.versions import BEFORE_0_32

GOLDEN = Path(__file__).parent.parent / "golden" / "targets_taps"
KNOWN_TO_DIFFER = {"gpt_oss_yarn_untruncated": "mlx-lm rounds the yarn correction range in spite of the config"}
if BEFORE_0_32:
    KNOWN_TO_DIFFER["qwen3_5"] = "mlx-lm before 0.32 adds the l2 norm's epsilon to the mean of squares, not the sum"
CASES = [
    pytest.param(folder.name, marks=[pytest.mark.xfail(reason=KNOWN_TO_DIFFER[folder.name], strict=True)])
    if folder.name in KNOWN_TO_DIFFER
    else folder.name
    for folder in sorted(GOLDEN.iterdir())
]
HIDDEN, LOGITS = 1e-4, 2e-4


class AddingBlock(nn.Module):
    """Adds its number, counted from one, to the stream."""

    use_sliding = False

    def __init__(self, index: int) -> None:
        super().__init__()
        self.amount = index + 1

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return x + self.amount


def target_of(case: str) -> tuple[Target, dict[str, mx.array]]:
    model, _ = load_model(GOLDEN / case / "checkpoint")
    return Target(model, name=case), mx.load(str(GOLDEN / case / "cases.safetensors"))  # type: ignore[return-value]


def off(a: mx.array, b: mx.array) -> float:
    return mx.max(mx.abs(a - b)).item()


def all_taps(target: Target) -> tuple[int, ...]:
    return tuple(range(-1, target.num_layers + 1))


def expected_features(target: Target, expected: dict[str, mx.array]) -> mx.array:
    names = ["embedding", *(f"layer{i}" for i in range(target.num_layers)), "final_norm"]
    return mx.concatenate([expected[name] for name in names], axis=-1)


@pytest.mark.parametrize("case", CASES)
def test_taps_and_logits_of_one_pass_are_the_publishers(case: str) -> None:
    target, expected = target_of(case)
    logits, features = target.forward(expected["input_ids"], target.make_caches(), all_taps(target))
    assert off(features, expected_features(target, expected)) < HIDDEN
    assert off(logits, expected["logits"]) < LOGITS
    assert off(target.embed(expected["input_ids"]) * target.embed_scale, expected["embedding"]) < HIDDEN


@pytest.mark.parametrize("case", CASES)
def test_taps_and_logits_in_chunks_with_a_cache_are_the_publishers(case: str) -> None:
    target, expected = target_of(case)
    ids, caches, start = expected["input_ids"], target.make_caches(), 0
    logits, features = [], []
    for rows in (7, 1, 4, 1, ids.shape[1]):
        out, tapped = target.forward(ids[:, start : start + rows], caches, all_taps(target))
        logits.append(out)
        features.append(tapped)
        start += rows
    assert off(mx.concatenate(features, axis=1), expected_features(target, expected)) < HIDDEN
    assert off(mx.concatenate(logits, axis=1), expected["logits"]) < LOGITS


@pytest.mark.parametrize("case", [folder.name for folder in sorted(GOLDEN.iterdir())])
def test_every_golden_target_passes_its_load_time_check(case: str) -> None:
    target, _ = target_of(case)
    target.check(all_taps(target))
    assert target.shaping == ("softcap 30" if case.startswith("gemma4") else None)


def test_tap_i_is_the_output_of_block_i_and_tap_minus_one_the_embedding() -> None:
    """R12."""
    model = tiny_llama(layers=5)
    model.model.layers = [AddingBlock(i) for i in range(5)]
    target, ids = Target(model), mx.array([[3, 1, 4]])
    _, features = target.forward(ids, target.make_caches(), (-1, 0, 1, 3, 4))
    added = [0, 1, 1 + 2, 1 + 2 + 3 + 4, 1 + 2 + 3 + 4 + 5]
    for row, amount in enumerate(added):
        width = target.hidden_size
        tap = features[..., row * width : (row + 1) * width]
        assert off(tap, target.embed(ids) + amount) < 1e-5


def test_taps_come_in_the_order_they_are_asked_for() -> None:
    target, ids = Target(tiny_llama(layers=3)), mx.array([[3, 1, 4]])
    width = target.hidden_size
    _, ordered = target.forward(ids, target.make_caches(), (0, 2))
    _, reversed_ = target.forward(ids, target.make_caches(), (2, 0))
    assert mx.array_equal(ordered, mx.concatenate([reversed_[..., width:], reversed_[..., :width]], axis=-1))


def test_gemmas_embedding_tap_is_scaled_while_embed_gives_the_raw_row() -> None:
    target, ids = Target(tiny_gemma4()), mx.array([[3, 1, 4]])
    _, features = target.forward(ids, target.make_caches(), (-1,))
    assert target.embed_scale == 32**0.5
    assert mx.array_equal(target.embed(ids), target.parts.inner.embed_tokens.weight[ids])
    assert mx.array_equal(features, target.embed(ids) * target.embed_scale)


def test_without_taps_there_are_no_features() -> None:
    target, ids = Target(tiny_llama()), mx.array([[3, 1, 4]])
    logits, features = target.forward(ids, target.make_caches())
    assert features is None
    assert mx.array_equal(logits, target.model(ids))


@pytest.mark.parametrize("tap", [-2, 3, 40])
def test_a_tap_on_a_layer_that_does_not_exist_is_refused_with_both_numbers(tap: int) -> None:
    """R20."""
    target = Target(tiny_llama(layers=2), name="tiny")
    with pytest.raises(
        PairingError, match=f"tap layer {tap}: found a target of 2 layers .tiny., expected -1 .. 1, or 2"
    ):
        target.check((0, tap))
