"""The end of a turn is known from everything that declares it, and from the markers the chat template writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mlx_dflash.errors import ConfigError
from mlx_dflash.target import end_tokens
from mlx_dflash.target.ending import turn_markers

MARKERS = ["<turn|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|tool_response>", "<|user|>"]
WORDS = ["<eos>", "a", "b", *MARKERS]
ID = {word: i for i, word in enumerate(WORDS)}


def tokenizer(template: Any, *, special: tuple[str, ...] = tuple(WORDS)) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel(ID, unk_token="a"))
    core.add_special_tokens([AddedToken(word, special=True) for word in WORDS if word in special])
    core.add_tokens([AddedToken(word, special=False) for word in WORDS if word not in special])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    made.chat_template = template
    return made


def test_the_set_is_the_union_of_config_text_config_generation_config_and_tokenizer() -> None:
    """R31."""
    config = {"model_type": "x", "eos_token_id": 11, "text_config": {"eos_token_id": [12]}}
    assert end_tokens(tokenizer(None), config, {"eos_token_id": [13, 14]}) == {0, 11, 12, 13, 14}


def test_the_folders_own_files_count_because_mlx_lm_replaces_one_id_by_the_other(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 21}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 22}))
    assert end_tokens(tokenizer(None), {"eos_token_id": 22}, tmp_path) == {0, 21, 22}


@pytest.mark.parametrize(
    ("model_type", "template", "markers"),
    [
        ("gemma4", "{{ x }}<turn|>", {"<turn|>"}),
        ("gemma4_unified", "<|tool_response>{{ x }}<turn|>", {"<turn|>", "<|tool_response>"}),
        ("qwen3", "<|im_start|>{{ x }}<|im_end|>", {"<|im_end|>"}),
        ("qwen3", "no marker in here", set()),
        ("gpt_oss", "<|end|><|call|><|return|>", {"<|return|>", "<|call|>"}),
        ("qwen3", "<|end|><|call|><|return|><|user|>", set()),
        ("phi3", "<|user|>{{ x }}<|end|>", {"<|end|>"}),
        ("glm4_moe", "<|user|>{{ x }}", {"<|user|>"}),
    ],
)
def test_a_turn_marker_counts_in_the_families_whose_template_ends_a_turn_with_it(
    model_type: str, template: str, markers: set[str]
) -> None:
    """R31."""
    expected = {ID[marker]: marker for marker in markers}
    assert turn_markers(tokenizer(template), model_type) == expected
    assert end_tokens(tokenizer(template), {"model_type": model_type}) == {0, *expected}


def test_a_marker_that_is_no_special_token_is_ordinary_text() -> None:
    assert turn_markers(tokenizer("<turn|>", special=("<eos>",)), "gemma4") == {}


def test_a_marker_in_one_of_several_templates_counts() -> None:
    assert turn_markers(tokenizer({"default": "{{ x }}", "tools": "<turn|>"}), "gemma4") == {ID["<turn|>"]: "<turn|>"}


@pytest.mark.parametrize("value", ["<eos>", [1, "2"], -1, True, 1.5])
def test_an_end_token_that_is_no_id_is_refused_with_file_and_key(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"generation_config\.json: eos_token_id: found .* expected a token id or a list"
    ):
        end_tokens(tokenizer(None), {}, {"eos_token_id": value})
    with pytest.raises(ConfigError, match=r"config\.json: text_config\.eos_token_id: found"):
        end_tokens(tokenizer(None), {"text_config": {"eos_token_id": value}})
