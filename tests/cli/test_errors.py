"""What users see when something is wrong: one line on stderr, nothing on stdout, an exit code, never a traceback."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mlx_dflash
from mlx_dflash import hub
from mlx_dflash.cli import entry
from tests.cli.conftest import Run

Runner = Callable[..., Run]
pytestmark = pytest.mark.usefixtures("no_network", "empty_home")


def _one_line(result: Run, code: int) -> str:
    assert result.code == code
    assert result.out == ""
    lines = result.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.err
    return lines[0]


@pytest.mark.parametrize(
    "flags, said",
    [
        (("--top-p", "1.5"), ("--top-p", "1.5", "0..1")),
        (("--temp", "-1"), ("--temp", "-1", "expected")),
        (("--temp", "hot"), ("--temp", "valid")),
        (("--min-p", "2"), ("--min-p", "2", "0..1")),
        (("--top-k", "-3"), ("--top-k", "-3", "expected")),
        (("--depth", "-1"), ("--depth", "-1", "0 or more")),
        (("--depth", "99"), ("--depth", "99", "at most 15")),
        (("--depth", "3", "--plain"), ("--depth", "--plain")),
        (("--max-tokens", "0"), ("--max-tokens", "0", "above 0")),
        (("--seed", "-1"), ("--seed", "-1", "0 or more")),
        (("--draft-bits", "5"), ("--draft-bits", "5", "4 or 8")),
        (("--draft-dtype", "int8"), ("--draft-dtype", "int8", "float32")),
        (("--kv-bits", "7"), ("--kv-bits", "7", "expected one of")),
        (("--prefill-step-size", "0"), ("--prefill-step-size", "0", "1 or more")),
        (("--logit-bias", "5:1"), ("--logit-bias", "'5:1'", "ID=VALUE")),
        (("--logit-bias", "5=nan"), ("--logit-bias of token 5", "nan")),
        (("--logit-bias", "99999=1"), ("--logit-bias", "99999")),
        (("--repetition-penalty", "-1"), ("--repetition-penalty", "-1")),
        (("--chat-template-config", "[1]"), ("--chat-template-config", "JSON object")),
        (("--chat-template-config", "{"), ("--chat-template-config", "JSON object")),
        (("--system", "x", "--no-chat-template"), ("--system", "--no-chat-template")),
        (("--compare", "--plain"), ("--compare", "--plain")),
        (("--compare", "--temp", "1"), ("temp", "greedy")),
        (("--xtc-probability", "0.5"), ("--xtc-probability",)),
        (("--prompt-file", "x"), ("--prompt-file", "argument")),
    ],
)
def test_a_wrong_flag_is_named_with_what_was_found_and_expected(
    flags: tuple[str, ...], said: tuple[str, ...], run: Runner
) -> None:
    result = run("generate", "hello", *flags)
    assert result.code == 2 and result.out == ""
    line = result.err.splitlines()[-1]
    assert line.startswith("error: ") and "Traceback" not in result.err
    for part in said:
        assert part in line


def test_wrong_flags_are_found_before_a_model_is_looked_for(run: Runner) -> None:
    for flags in (("--top-k", "-1"), ("--repetition-penalty", "-1"), ("--kv-bits", "7")):
        assert flags[0] in _one_line(run("generate", "hello", "--model", "./gone", *flags), 2)


def test_no_prompt_and_an_empty_one_are_usage_errors(run: Runner, tmp_path: Path) -> None:
    assert "PROMPT" in _one_line(run("generate", stdin=""), 2)
    assert "PROMPT" in _one_line(run("generate", ""), 2)
    assert "No such file" in _one_line(run("generate", "--prompt-file", str(tmp_path / "gone")), 2)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert "UTF-8" in _one_line(run("generate", "--prompt-file", str(tmp_path / "latin")), 2)


def test_an_unknown_command_is_a_usage_error(run: Runner) -> None:
    assert "nope" in _one_line(run("nope"), 2)


def test_a_draft_that_cannot_be_used_ends_the_program_with_the_reason(run: Runner, tmp_path: Path) -> None:
    """R03: nothing is generated plainly instead."""
    broken = tmp_path / "draft"
    shutil.copytree(hub.resolve("bundled", role="draft"), broken)
    (broken / "config.json").write_text('{"architectures": ["DFlashDraftModel"')
    assert str(broken / "config.json") in _one_line(run("generate", "hello", "--draft", str(broken)), 1)
    config = json.loads((hub.resolve("bundled", role="draft") / "config.json").read_text())
    del config["block_size"]
    (broken / "config.json").write_text(json.dumps(config))
    assert "block_size" in _one_line(run("generate", "hello", "--draft", str(broken)), 1)


@pytest.mark.parametrize("role, flag", [("target", "--model"), ("draft", "--draft")])
def test_offline_and_missing_is_one_line_before_anything_loads(
    role: str, flag: str, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R18: no connection is attempted, which the fixture proves."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = _one_line(run("generate", "hello", flag, "nobody/nothing"), 1)
    assert f"{role} nobody/nothing" in line and "models--nobody--nothing" in line


def test_a_missing_folder_is_not_taken_for_a_repository(run: Runner) -> None:
    assert "target ./gone: found no such folder" in _one_line(run("generate", "hello", "--model", "./gone"), 1)


def test_an_unforeseen_error_is_one_line_unless_debugging(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("something\nnobody thought of")

    monkeypatch.setattr("mlx_dflash.cli.generate.load", fail)
    line = _one_line(run("generate", "hello"), 1)
    assert "RuntimeError: something nobody thought of" in line and "MLX_DFLASH_DEBUG" in line
    monkeypatch.setenv("MLX_DFLASH_DEBUG", "1")
    with pytest.raises(RuntimeError):
        run("generate", "hello")


def test_the_version_is_the_packages(run: Runner) -> None:
    assert run("--version") == Run(0, f"mlx-dflash {mlx_dflash.__version__}\n", "")


def test_help_shows_examples(run: Runner) -> None:
    for arguments in ((), ("--help",), ("generate", "--help")):
        result = run(*arguments)
        assert result.code == 0 and 'mlx-dflash generate "def fibonacci("' in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--temp", "-1"), "--temp: found -1.0"),
        (("--top-p", "2"), "--top-p: found 2.0"),
        (("--stop", ""), "--stop: found ''"),
        (("--chat-template-config", "{bad"), "--chat-template-config: found '{bad'"),
        (("--chat-template-config", "{}", "--no-chat-template"), "--chat-template-config: found together with"),
        (("--system", "x", "--no-chat-template"), "--system: found together with --no-chat-template"),
        (("--compare", "--temp", "3"), "--compare: found --temp 3, expected greedy decoding"),
        (("--compare", "-m", "some/target"), "--compare: found no --draft"),
        (("--logit-bias", "-3=1"), "--logit-bias: found token id -3"),
    ],
)
def test_a_wrong_flag_is_told_before_anything_is_loaded(
    run: Runner, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    def load(*_: object, **__: object) -> None:
        pytest.fail("models were loaded first")

    monkeypatch.setattr("mlx_dflash.cli.generate.load", load)
    result = run("generate", "hello", *arguments)
    assert result.code == 2
    assert result.err.startswith(f"error: {message}") and result.err.count("\n") == 1


def test_bytes_that_are_no_text_are_refused_from_stdin_too(run: Runner) -> None:
    result = run("generate", "-", stdin=b"\xff\xfe\x00bad")
    assert (result.code, result.err) == (2, "error: stdin: found bytes that are not UTF-8, expected text\n")


def test_ctrl_c_while_the_program_is_being_imported_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Importing:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "mlx_dflash.cli.app", Importing())
    assert entry.main() == 130
    assert capsys.readouterr().err == "interrupted\n"
