"""A draft that nobody named: which one is taken, when it is fetched, and what becomes of one that does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mlx_dflash
from mlx_dflash import draft_choice, hub
from mlx_dflash.draft_choice import choose_draft
from mlx_dflash.drafts.families import Family
from mlx_dflash.errors import ModelNotFoundError, OptionError, PairingError
from mlx_dflash.known_drafts import drafts_for
from tests import stub_drafts

pytestmark = pytest.mark.usefixtures("no_network", "empty_home")

NAME, DRAFT = "Qwen3.5-397B-A17B-4bit", "z-lab/Qwen3.5-397B-A17B-DFlash"
"""A pair whose sizes nobody knows, so that the bundled models can stand in for it."""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return shutil.copytree(hub.resolve("bundled", role="target"), tmp_path / NAME)


@pytest.fixture
def install(empty_home: Path) -> Callable[..., Path]:
    """``install(repository)``: the bundled draft under another name, as a download of LM Studio's."""

    def install(repository: str, **changes: Any) -> Path:
        folder = empty_home / ".lmstudio" / "models" / repository
        shutil.copytree(hub.resolve("bundled-draft", role="draft"), folder)
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return install


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, install: Callable[..., Path]) -> list[str]:
    """Downloads succeed; the list says of what."""
    names: list[str] = []

    def download(name: str, *_: object) -> Path:
        names.append(name)
        return install(name)

    monkeypatch.setattr(hub, "_download", download)
    return names


def said(pair: Any, tokenizer: Any) -> Any:
    return list(mlx_dflash.stream_generate(pair, tokenizer, "def is_prime(n", 16))[-1]


def test_a_draft_on_this_machine_is_found_and_used(target: Path, install: Callable[..., Path]) -> None:
    folder = install(DRAFT)
    pair, tokenizer = mlx_dflash.load(target)
    assert pair.report.draft is not None and pair.report.draft.path == str(folder)
    assert pair.report.draft_name == DRAFT
    assert any(line.startswith("draft found: published for Qwen3.5-397B-A17B") for line in pair.report.lines())
    assert said(pair, tokenizer).mode == "speculative"


def test_none_looks_for_none(target: Path, install: Callable[..., Path]) -> None:
    install(DRAFT)
    pair, tokenizer = mlx_dflash.load(target, "none")
    assert pair.draft is None and len(pair.report.lines()) == 1
    assert said(pair, tokenizer).mode_reason == "no draft is loaded"
    assert mlx_dflash.load(draft="none")[0].draft is None, "for the bundled pair, too"


def test_a_draft_that_is_nowhere_is_fetched(target: Path, fetched: list[str]) -> None:
    pair, _ = mlx_dflash.load(target)
    assert fetched == [DRAFT] and pair.has_draft
    mlx_dflash.load(target)
    assert fetched == [DRAFT], "once"


def test_nothing_is_fetched_for_a_target_without_a_known_draft(tmp_path: Path, fetched: list[str]) -> None:
    folder = shutil.copytree(hub.resolve("bundled", role="target"), tmp_path / "Qwen3.5-397B-A17B-Base")
    pair, tokenizer = mlx_dflash.load(folder)
    assert fetched == [] and said(pair, tokenizer).mode_reason == "no draft is loaded"


def test_a_target_that_only_bears_a_known_name_gets_no_draft_and_is_told_so(tmp_path: Path, fetched: list[str]) -> None:
    folder = shutil.copytree(hub.resolve("bundled", role="target"), tmp_path / "Qwen3-8B-4bit")
    pair, tokenizer = mlx_dflash.load(folder)
    assert fetched == []
    assert f"{folder / 'config.json'} is not that of Qwen3-8B" in str(said(pair, tokenizer).mode_reason)


def test_offline_the_target_decodes_plainly_and_says_which_draft_is_missing(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pair, tokenizer = mlx_dflash.load(target)
    last = said(pair, tokenizer)
    assert last.mode == "plain"
    assert last.mode_reason == (
        f"no draft is loaded: draft {DRAFT}: not on this machine, and HF_HUB_OFFLINE forbids a download"
    )
    assert f"no draft: draft {DRAFT}: not on this machine" in pair.report.lines()[-1]


def test_of_several_drafts_one_on_this_machine_wins_over_a_better_one_that_is_not(
    install: Callable[..., Path],
    fetched: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft_choice, "is_loaded", lambda family: True)
    names = [draft.repository for draft in drafts_for("Qwen3-8B")]
    later = install(names[2])
    assert choose_draft(None, "Qwen3-8B", tmp_path).folder == later and fetched == []
    earlier = install(names[1])
    assert choose_draft(None, "Qwen3-8B", tmp_path).folder == earlier, "of two on this machine the first in the list"
    shutil.rmtree(earlier)
    shutil.rmtree(later)
    assert choose_draft(None, "Qwen3-8B", tmp_path).name == names[0] and fetched == [names[0]]


def test_a_family_that_this_version_does_not_load_is_passed_over_and_told_when_nothing_is_left(
    fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dspark, dflash = drafts_for("Qwen3.6-35B-A3B")
    assert (dspark.family, dflash.family) == ("dspark", "dflash")
    monkeypatch.setattr(draft_choice, "is_loaded", lambda family: family == "dflash")
    assert choose_draft(None, "Qwen3.6-35B-A3B", tmp_path).name == dflash.repository
    monkeypatch.setattr(draft_choice, "is_loaded", lambda family: False)
    choice = choose_draft(None, "Qwen3.6-35B-A3B", tmp_path)
    assert choice.is_none and "not loaded by this version" in choice.note and dflash.repository in choice.note
    assert fetched == [dflash.repository]


def test_a_found_draft_that_does_not_fit_is_no_error_and_a_named_one_is(
    target: Path, install: Callable[..., Path]
) -> None:
    """R03, R20: never silent, and both values are shown."""
    folder = install(DRAFT, num_target_layers=7)
    pair, tokenizer = mlx_dflash.load(target)
    last = said(pair, tokenizer)
    assert last.mode == "plain"
    for part in (DRAFT, "cannot be used", "found a target of 6 layers", "expected 7"):
        assert part in str(last.mode_reason)
    for name in (DRAFT, str(folder)):
        with pytest.raises(PairingError, match="expected 7"):
            mlx_dflash.load(target, name)


def test_a_found_draft_whose_weights_are_broken_is_no_error_either(target: Path, install: Callable[..., Path]) -> None:
    weights = install(DRAFT) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    pair, _ = mlx_dflash.load(target)
    assert pair.draft is None and "model.safetensors" in pair.no_draft


def test_options_for_a_draft_go_to_the_one_that_was_found_and_need_one(
    target: Path, install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OptionError, match=r"found no draft .*not on this machine.*, expected one to apply them to"):
        mlx_dflash.load(target, draft_bits=8)
    install(DRAFT)
    report = mlx_dflash.load(target, draft_bits=8)[0].report.draft
    assert report is not None and report.quantization.startswith("affine 8 bits")


def test_a_named_draft_that_cannot_be_had_is_an_error(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match=f"^draft {DRAFT}: not on this machine"):
        mlx_dflash.load(target, DRAFT)


def test_a_draft_in_the_target_s_own_folder_comes_before_every_list(
    target: Path, install: Callable[..., Path], fetched: list[str]
) -> None:
    install(DRAFT)
    shutil.copytree(hub.resolve("bundled-draft", role="draft"), target / "dflash")
    pair, tokenizer = mlx_dflash.load(target)
    assert pair.report.draft is not None and pair.report.draft.path == str(target / "dflash")
    assert fetched == [] and said(pair, tokenizer).mode == "speculative"


def test_a_reserved_word_is_no_folder_and_no_repository(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def load(folder: Path | None, facts: Any, options: Any) -> Any:
        given.append((folder, options.bits))
        return stub_drafts.hostile([], vocab_size=facts.vocab_size)

    monkeypatch.setitem(draft_choice.RESERVED, "wordy", Family("wordy", reserved="wordy", load_reserved=load))
    (target.parent / "wordy").mkdir()
    monkeypatch.chdir(target.parent)
    pair, tokenizer = mlx_dflash.load(target, "wordy", draft_bits=4)
    assert given == [(target, 4)] and pair.report.draft_name == "wordy"
    assert said(pair, tokenizer).mode == "speculative"
