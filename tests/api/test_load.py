"""``load``: what comes back, what ends a turn, and what is refused before the first token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest

import mlx_dflash
from mlx_dflash import CheckpointError, UnsupportedError, stream_generate
from tests import tiny_models
from tests.drafts.make_draft import make_draft, z_lab_config

WIDTH, VOCAB = 64, 64
PROMPT = [7, 8, 9, 30, 12, 40, 41, 8, 20]


def tokens_of(responses: Any) -> list[int]:
    return [response.token for response in responses]


def draft_folder(folder: Path, layers: int) -> Path:
    config = z_lab_config(num_target_layers=layers, dflash_config={"target_layer_ids": [0, layers - 1]})
    return make_draft(folder, config)


PLAIN_ONLY: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "qwen3_5": (lambda: tiny_models.tiny_qwen3_5(hidden=WIDTH), 4, "cache 0 (ArraysCache)"),
    "nemotron_h": (lambda: tiny_models.tiny_nemotron_h(hidden=WIDTH), 4, "cache 1 (ArraysCache)"),
    "mamba2": (lambda: tiny_models.tiny_mamba2(hidden=WIDTH), 2, "cache 0 (ArraysCache)"),
    "nanochat": (lambda: tiny_models.tiny_nanochat(hidden=WIDTH), 2, "final norm: not found"),
}


@pytest.mark.parametrize("family", PLAIN_ONLY)
def test_a_target_that_cannot_speculate_is_refused_with_a_draft_and_decodes_plainly(
    family: str, tmp_path: Path
) -> None:
    """R36, R03: refused at load by cache and class, or by the part that was not found; alone it says what mlx-lm
    says, also in a second turn from a prompt cache."""
    make, layers, reason = PLAIN_ONLY[family]
    model = make()
    folder = tiny_models.save_model_folder(model, None, tmp_path / "target")
    with pytest.raises(UnsupportedError) as refusal:
        mlx_dflash.load(folder, draft_folder(tmp_path / "draft", layers))
    assert reason in str(refusal.value) and family in str(refusal.value) and "\n" not in str(refusal.value)
    pair, tokenizer = mlx_dflash.load(folder)
    pair.end_tokens = frozenset()  # mlx-lm, which this is compared with, goes on after a turn marker
    theirs = mlx_lm.models.cache.make_prompt_cache(model)
    mine, bare = pair.target.make_caches(), pair.target.make_caches()
    for prompt, budget in ((PROMPT, 6), ([11], 1), (PROMPT[::-1], 9)):
        expected = tokens_of(mlx_lm.stream_generate(model, tokenizer, prompt, budget, prompt_cache=theirs))
        for runner, cache in ((pair, mine), (model, bare)):
            responses = list(stream_generate(runner, tokenizer, prompt, budget, prompt_cache=cache))
            assert tokens_of(responses) == expected
            assert (responses[-1].mode, responses[-1].mode_reason) == ("plain", "no draft is loaded")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma4", "gpt_oss"])
def test_a_real_draft_from_disk_says_what_plain_mlx_lm_says_over_several_turns(family: str, tmp_path: Path) -> None:
    """R28: a random draft proposes nonsense, and nothing of it stays in the cache that every turn goes on from."""
    make = getattr(tiny_models, f"tiny_{family}")
    model = make(hidden=WIDTH)
    folder = tiny_models.save_model_folder(model, None, tmp_path / "target")
    layers = len(model.layers)
    pair, tokenizer = mlx_dflash.load(folder, draft_folder(tmp_path / "draft", layers))
    pair.end_tokens = frozenset()
    mine, theirs = pair.target.make_caches(), mlx_lm.models.cache.make_prompt_cache(model)
    for turn, (prompt, budget) in enumerate(((PROMPT, 12), ([11], 1), (PROMPT * 2, 17), ([9, 8], 5))):
        options = {"max_tokens": budget, "prefill_step_size": 8}
        expected = tokens_of(mlx_lm.stream_generate(model, tokenizer, prompt, prompt_cache=theirs, **options))
        responses = list(stream_generate(pair, tokenizer, prompt, prompt_cache=mine, **options))
        assert tokens_of(responses) == expected, turn
        assert responses[-1].mode == "speculative"


def test_generation_stops_at_the_turn_marker_in_both_modes(tmp_path: Path) -> None:
    """R31: the marker is neither the tokenizer's end id nor in any config; the chat template alone writes it."""
    model = tiny_models.tiny_llama(hidden=WIDTH)
    marker = tiny_models.SPECIALS.index(tiny_models.TURN_END)
    model.lm_head.weight[marker] = 3 * model.lm_head.weight[20]
    folder = tiny_models.save_model_folder(model, None, tmp_path / "target")
    pair, tokenizer = mlx_dflash.load(folder, draft_folder(tmp_path / "draft", 2))
    endless = tokens_of(mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=30))
    assert marker in endless[1:-1] and marker not in tokenizer.eos_token_ids
    expected = endless[: endless.index(marker) + 1]
    for plain in (True, False):
        responses = list(stream_generate(pair, tokenizer, PROMPT, max_tokens=30, plain=plain))
        assert tokens_of(responses) == expected
        assert responses[-1].finish_reason == "stop" and tiny_models.TURN_END not in responses[-1].text


def test_a_target_with_a_weight_that_is_no_number_is_refused_without_a_draft_too(tmp_path: Path) -> None:
    model = tiny_models.tiny_llama()
    model.model.layers[1].mlp.up_proj.weight[2, 2] = mx.nan
    folder = tiny_models.save_model_folder(model, None, tmp_path)
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight: found NaN"):
        mlx_dflash.load(folder)
