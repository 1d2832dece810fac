"""Which draft belongs to a target's name, and the list of drafts itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_dflash.known_drafts import base_name, drafts_for, find, known_drafts

QWEN = "z-lab/Qwen3.5-9B-DFlash"


def repositories(name: str, config: dict[str, object] | None = None) -> list[str]:
    return [draft.repository for draft in drafts_for(name, config)]


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3.5-9B",
        "mlx-community/Qwen3.5-9B-4bit",
        "mlx-community/Qwen3.5-9B-MLX-8bit",
        "somebody/Qwen3.5-9B-mlx-4Bit",
        "Qwen3.5-9B-bf16",
        "Qwen3.5-9B-mxfp4",
        "Qwen3.5-9B-nvfp4",
        "Qwen3.5-9B-MXFP4-Q8",
        "Qwen3.5-9B-AWQ",
        "Qwen3.5-9B-GPTQ-Int4",
        "Qwen3.5-9B-FP8-dynamic",
        "Qwen3.5-9B-quantized.w4a16",
        "Qwen3.5-9B-4bit-DWQ",
        "Qwen3.5-9B-4bit-DWQ-053125",
        "Qwen3.5-9B-mixed-3-6-bit",
        "Qwen3.5-9B-4-bit",
        "Qwen3.5-9B-8bit-gs32",
        "unsloth/Qwen3.5-9B-UD-MLX-4bit",
        "Qwen3.5-9B-4.5bpw",
        "mlx-community--Qwen3.5-9B-4bit",
        "~/models/qwen3.5_9b_4bit/",
        "/data/hub/models--mlx-community--Qwen3.5-9B-4bit/snapshots/0123456789abcdef",
    ],
)
def test_organisation_layout_and_precision_of_a_target_do_not_matter(name: str) -> None:
    assert repositories(name) == [QWEN]


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3.5-9B-Base",
        "somebody/Qwen3.5-9B-abliterated-4bit",
        "Qwen/Qwen3.5-9B-Instruct",
        "Qwen/Qwen3.5-9B-Coder",
        "My-Qwen3.5-9B",
        "Qwen/Qwen3-9B",
        "Qwen/Qwen3.5-90B",
        "Qwen/Qwen3.5-9B-A1B",
        "Qwen/Qwen3-4B-Instruct-2507",
        "Qwen/Qwen3.6-35B",
        "google/gemma-4-31B",
        "meta-llama/Llama-3.1-8B",
        "Qwen3.5-9B-DFlash",
        "4bit",
        "",
    ],
)
def test_another_model_of_a_similar_name_has_no_draft(name: str) -> None:
    """R22: a draft of the base model is accepted little by a fine-tune, an instruct draft little by the base."""
    assert repositories(name) == []


@pytest.mark.parametrize(
    "name, first",
    [
        ("mlx-community/Qwen3-4B-4bit", "z-lab/Qwen3-4B-DFlash-b16"),
        ("mlx-community/Qwen3.5-4B-4bit", "z-lab/Qwen3.5-4B-DFlash"),
        ("mlx-community/Qwen3.5-35B-A3B-4bit", "z-lab/Qwen3.5-35B-A3B-DFlash"),
        ("mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit", "z-lab/Qwen3-Coder-30B-A3B-DFlash"),
        ("mlx-community/gpt-oss-20b-MXFP4-Q4", "z-lab/gpt-oss-20b-DFlash"),
        ("mlx-community/gemma-4-31b-it-qat-4bit", "z-lab/gemma-4-31B-it-DFlash"),
        ("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
        ("mlx-community/Qwen3.8-27B-8bit", "z-lab/Qwen3.8-27B-DFlash2"),
        ("bundled", "bundled-draft"),
    ],
)
def test_each_model_gets_its_own_best_draft_first(name: str, first: str) -> None:
    assert repositories(name)[0] == first


def test_a_folder_with_a_name_of_its_own_is_known_by_what_its_config_says_it_was_made_of(tmp_path: Path) -> None:
    config = {"_name_or_path": "Qwen/Qwen3.5-9B", "hidden_size": 4096, "num_hidden_layers": 32}
    assert repositories(str(tmp_path), config) == [QWEN]
    tuned = tmp_path / "Qwen3.5-9B-abliterated"
    tuned.mkdir()
    assert repositories(str(tuned), config) == [], "its own name says that it is another model"
    assert repositories("somebody/Tuned", config) == [], "a repository is what it is called"


@pytest.mark.parametrize(
    "config, fits",
    [
        ({}, True),
        ({"hidden_size": 4096, "num_hidden_layers": 32}, True),
        ({"hidden_size": 1, "text_config": {"hidden_size": 4096, "num_hidden_layers": 32}}, True),
        ({"hidden_size": 2560}, False),
        ({"num_hidden_layers": 36}, False),
        ({"text_config": {"num_hidden_layers": 36}}, False),
    ],
)
def test_a_config_of_another_size_rules_a_draft_out(config: dict[str, object], fits: bool) -> None:
    """A folder may be called anything."""
    assert repositories("Qwen3.5-9B", config) == ([QWEN] if fits else [])


def test_a_draft_is_found_by_its_repository_or_a_folder_of_that_name() -> None:
    known = find(f"/models/{QWEN}")
    assert known is not None and known.repository == QWEN and known.block == 16
    assert find("z-lab/Qwen3.5-9B") is None


def test_the_list_names_every_draft_once_with_where_its_facts_are_from() -> None:
    drafts = known_drafts()
    assert len({draft.repository for draft in drafts}) == len(drafts)
    for draft in drafts:
        assert draft.source and draft.targets and all(map(base_name, draft.targets))
        assert draft.family in {"dflash", "dflash2", "dspark"}
        assert draft in drafts_for(draft.targets[0]), draft
        for value in (draft.block, draft.bytes, draft.target_layers, draft.target_width):
            assert value is None or value > 1


def test_the_bundled_draft_is_what_the_list_says() -> None:
    bundled = find("bundled-draft")
    assert bundled is not None
    folder = Path(__file__).parents[1] / "mlx_dflash" / "data" / "pair"
    target = json.loads((folder / "target" / "config.json").read_text())
    draft = json.loads((folder / "draft" / "config.json").read_text())
    assert bundled.bytes == (folder / "draft" / "model.safetensors").stat().st_size
    assert (bundled.target_layers, bundled.target_width) == (target["num_hidden_layers"], target["hidden_size"])
    assert bundled.block == draft["block_size"]
