"""Where models are looked for, in which order, and that looking never touches the network."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_dflash import hub
from mlx_dflash.errors import ModelNotFoundError
from tests.hub.checkpoints import REPOSITORY, make, make_in_cache

pytestmark = pytest.mark.usefixtures("no_network", "empty_home")

Layout = Callable[[Path, pytest.MonkeyPatch], Path]


def _default_cache(home: Path, env: pytest.MonkeyPatch) -> Path:
    return make_in_cache(home / ".cache" / "huggingface" / "hub")


def _hf_home(home: Path, env: pytest.MonkeyPatch) -> Path:
    env.setenv("HF_HOME", str(home / "drive"))
    return make_in_cache(home / "drive" / "hub")


def _hf_hub_cache(home: Path, env: pytest.MonkeyPatch) -> Path:
    env.setenv("HF_HOME", str(home / "ignored"))
    env.setenv("HF_HUB_CACHE", "~/moved")
    return make_in_cache(home / "moved")


def _xdg(home: Path, env: pytest.MonkeyPatch) -> Path:
    env.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    return make_in_cache(home / "xdg" / "huggingface" / "hub")


def _lm_studio(home: Path, env: pytest.MonkeyPatch) -> Path:
    return make(home / ".lmstudio" / "models" / "some-org" / "some-model")


def _older_lm_studio(home: Path, env: pytest.MonkeyPatch) -> Path:
    return make(home / ".cache" / "lm-studio" / "models" / "some-org" / "some-model")


def _extra(layout: str) -> Layout:
    def place(home: Path, env: pytest.MonkeyPatch) -> Path:
        env.setenv("MLX_DFLASH_MODELS", os.pathsep.join([str(home / "nothing"), "~/drive"]))
        return make(home / "drive" / layout)

    return place


def _extra_cache(home: Path, env: pytest.MonkeyPatch) -> Path:
    env.setenv("MLX_DFLASH_MODELS", str(home / "drive"))
    return make_in_cache(home / "drive")


LAYOUTS: dict[str, Layout] = {
    "default cache": _default_cache,
    "HF_HOME": _hf_home,
    "HF_HUB_CACHE": _hf_hub_cache,
    "XDG_CACHE_HOME": _xdg,
    "LM Studio": _lm_studio,
    "older LM Studio": _older_lm_studio,
    "extra folder, owner/name": _extra("some-org/some-model"),
    "extra folder, owner--name": _extra("some-org--some-model"),
    "extra folder, name": _extra("some-model"),
    "extra folder that is a Hub cache": _extra_cache,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_is_found_in_every_layout_and_all_callers_agree(
    layout: str, empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R17: load, the question whether it is installed, and the download all find the same folder."""
    assert hub.installed(REPOSITORY) is None
    folder = LAYOUTS[layout](empty_home, monkeypatch)
    assert hub.installed(REPOSITORY) == folder
    assert hub.resolve(REPOSITORY, role="target") == folder
    assert hub.resolve(REPOSITORY, role="draft") == folder
    assert [place.path for place in hub.places(REPOSITORY) if place.problem is None] == [folder]


def test_a_folder_is_taken_before_the_cache(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _default_cache(empty_home, monkeypatch)
    monkeypatch.chdir(empty_home)
    local = make(empty_home / "some-org" / "some-model")
    assert hub.resolve(REPOSITORY, role="target") == local


def test_home_is_written_as_a_tilde(empty_home: Path) -> None:
    folder = make(empty_home / "mine")
    assert hub.resolve("~/mine", role="target") == folder


def test_the_bundled_pair_needs_no_network_and_no_folder_shadows_it(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(empty_home)
    make(empty_home / "bundled")
    target = hub.resolve(hub.BUNDLED_TARGET, role="target")
    draft = hub.resolve(hub.BUNDLED_DRAFT, role="draft")
    assert (target.name, draft.name) == ("target", "draft")
    assert target.parent == draft.parent and target.parent.is_relative_to(Path(hub.__file__).parent)
    assert hub.resolve("bundled", role="draft") == draft


@pytest.mark.parametrize(
    "lacks, said",
    [
        (("model-00002-of-00003.safetensors",), "model-00002-of-00003.safetensors"),
        (("model-00003-of-00003.safetensors", "model.safetensors.index.json"), "model-00003-of-00003.safetensors"),
        (("config.json",), "config.json"),
        (("tokenizer.json",), "tokenizer"),
    ],
)
def test_half_a_download_is_not_installed(lacks: tuple[str, ...], said: str, empty_home: Path) -> None:
    """R17: also where the index itself has not arrived."""
    make(empty_home / ".lmstudio" / "models" / "some-org" / "some-model", shards=3, lacks=lacks)
    assert hub.installed(REPOSITORY) is None
    assert any(said in str(place) for place in hub.places(REPOSITORY))


def test_a_draft_needs_no_tokenizer(empty_home: Path) -> None:
    folder = make(empty_home / ".lmstudio" / "models" / "some-org" / "some-model", lacks=("tokenizer.json",))
    assert hub.installed(REPOSITORY, role="draft") == folder


def test_a_complete_copy_elsewhere_is_used_when_the_cache_holds_half(empty_home: Path) -> None:
    make_in_cache(empty_home / ".cache" / "huggingface" / "hub", shards=2, lacks=("model-00001-of-00002.safetensors",))
    whole = make(empty_home / ".lmstudio" / "models" / "some-org" / "some-model")
    assert hub.resolve(REPOSITORY, role="target") == whole


def test_code_that_an_untrusted_download_left_out_is_wanted_when_trusted(empty_home: Path) -> None:
    folder = make(empty_home / ".lmstudio" / "models" / "some-org" / "some-model")
    (folder / "config.json").write_text('{"auto_map": {"AutoConfig": "configuration_some.Config"}}')
    assert hub.installed(REPOSITORY) == folder
    assert hub.installed(REPOSITORY, trust_remote_code=True) is None
    (folder / "configuration_some.py").write_text("")
    assert hub.installed(REPOSITORY, trust_remote_code=True) == folder


@pytest.mark.parametrize("name", ["./gone", "/gone/away", "~/gone", "../gone"])
def test_a_missing_folder_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=rf"^draft {name}: found no such folder, expected a folder"):
        hub.resolve(name, role="draft")


def test_a_file_is_no_model(empty_home: Path) -> None:
    (empty_home / "model.safetensors").write_text("")
    with pytest.raises(ModelNotFoundError, match="found a file, expected a folder"):
        hub.resolve("~/model.safetensors", role="target")


@pytest.mark.parametrize("name", ["a/b/c", "some org/model", "x" * 300, "org/..", ""])
def test_what_is_neither_folder_nor_repository_id_is_said_to_be_neither(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="expected a folder or a Hub repository id"):
        hub.resolve(name, role="target")


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_and_missing_is_one_line_with_role_name_and_every_place(
    variable: str, empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R18: and no attempt to connect, which the fixture proves."""
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("MLX_DFLASH_MODELS", str(empty_home / "drive"))
    with pytest.raises(ModelNotFoundError) as caught:
        hub.resolve(REPOSITORY, role="draft")
    message = str(caught.value)
    assert message.startswith(f"draft {REPOSITORY}: not on this machine")
    assert "\n" not in message
    for place in ("models--some-org--some-model", "drive", ".lmstudio", str(Path.cwd() / REPOSITORY)):
        assert place in message
