"""R56: the audit says whether the fast text is the plain one, and catches a verify forward that computes otherwise."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_dflash import OptionError, UnsupportedError, compare
from tests.api.conftest import Tiny

PROMPT, TOKENS = "def f(x):", 40


def test_on_the_cpu_in_float32_both_ways_say_the_same(tiny: Tiny) -> None:
    result = compare(tiny.pair("scripted", PROMPT, TOKENS), tiny.tokenizer, PROMPT, TOKENS)
    assert result.identical and result.first_difference is None and result.margin is None
    assert result.largest_difference < 1e-3
    assert result.plain.mode == "plain" and result.speculative.mode == "speculative"
    assert result.verdict().startswith(f"identical ({TOKENS} tokens)")
    assert result.ratio == result.speculative.generation_tps / result.plain.generation_tps


class Perturbed:
    """A target whose forwards of several rows are off, as a multi-row kernel with another order of addition is."""

    def __init__(self, target: Any, amount: float) -> None:
        self._target, self._amount = target, amount

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, ids: mx.array, caches: list[Any], taps: tuple[int, ...] = ()) -> Any:
        logits, features = self._target.forward(ids, caches, taps)
        if ids.shape[1] > 1:
            noise = mx.random.normal(logits.shape, key=mx.random.key(ids.shape[1]))
            logits = logits + self._amount * noise
        return logits, features


@pytest.mark.parametrize("amount", [1e-3, 1e-2])
def test_a_perturbed_verify_forward_is_caught_though_the_text_may_be_right(tiny: Tiny, amount: float) -> None:
    pair = tiny.pair("perfect", PROMPT, TOKENS)
    clean = compare(pair, tiny.tokenizer, PROMPT, TOKENS).largest_difference
    pair.target = Perturbed(tiny.target, amount)
    result = compare(pair, tiny.tokenizer, PROMPT, TOKENS)
    assert result.largest_difference > 0.3 * amount
    assert result.largest_difference > 5 * clean


def test_a_difference_is_reported_with_its_place_and_margin(tiny: Tiny) -> None:
    pair = tiny.pair("perfect", PROMPT, TOKENS)
    pair.target = Perturbed(tiny.target, 30.0)
    result = compare(pair, tiny.tokenizer, PROMPT, TOKENS)
    assert not result.identical
    place = result.first_difference
    assert result.plain_tokens[:place] == result.speculative_tokens[:place]
    assert result.plain_tokens[place] != result.speculative_tokens[place]
    assert result.margin > 0
    assert f"differs from token {place} on" in result.verdict() and "margin" in result.verdict()


def test_there_must_be_something_to_compare(tiny: Tiny) -> None:
    with pytest.raises(UnsupportedError, match="no draft is loaded"):
        compare(tiny.target.model, tiny.tokenizer, PROMPT)
    with pytest.raises(OptionError, match="temp above 0"):
        compare(tiny.pair("perfect", PROMPT, 4), tiny.tokenizer, PROMPT, temp=1.0)
