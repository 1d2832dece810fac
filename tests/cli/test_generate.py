"""``mlx-dflash generate`` on the bundled pair: text, JSON, prompts, modes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mlx_dflash
from mlx_dflash import hub
from mlx_dflash.cli import prompt as prompts
from mlx_dflash.errors import OptionError
from tests.cli.conftest import Run

Runner = Callable[..., Run]
pytestmark = pytest.mark.usefixtures("no_network", "empty_home")

PROMPT = "def is_prime(n"


def _json(result: Run) -> dict[str, Any]:
    assert result.code == 0, result.err
    assert result.out.count("\n") == 1, "one object on one line"
    return json.loads(result.out)


def test_a_named_draft_is_used_at_its_trained_depth_and_the_text_says_so(run: Runner) -> None:
    """R02: nothing but the draft is given; depth is the block's, and far fewer rounds than tokens are run."""
    result = run("generate", PROMPT, "--draft", "bundled-draft", "--json")
    facts = _json(result)
    assert facts["mode"] == "speculative" and facts["mode_reason"] is None
    assert facts["depth"] == 15
    assert facts["rounds"] < facts["generation_tokens"] / 2
    assert facts["acceptance_length"] == pytest.approx(facts["generation_tokens"] / facts["rounds"])
    assert "speculative, depth 15" in result.err.splitlines()[-2], "start line"
    assert "speculative, depth 15" in result.err.splitlines()[-1], "closing line"


def test_the_json_object_has_every_fact(run: Runner) -> None:
    facts = _json(run("generate", PROMPT, "--json", "--max-tokens", "8"))
    assert set(facts) == {
        "text",
        "mode",
        "mode_reason",
        "depth",
        "rounds",
        "acceptance_length",
        "drafted_tokens",
        "tokens_from_draft",
        "prompt_tokens",
        "prompt_tps",
        "generation_tokens",
        "generation_tps",
        "peak_memory_gb",
        "finish_reason",
        "target",
        "draft",
    }
    assert facts["generation_tokens"] == 8 and facts["finish_reason"] == "length"
    assert facts["target"] == {"name": "bundled", "model_type": "gemma4_text"}
    assert facts["draft"]["family"] == "dflash" and facts["draft"]["head"].startswith("target")


@pytest.mark.parametrize("budget", [8, 64, 256])
def test_no_budget_switches_the_mode(budget: int, run: Runner) -> None:
    """R90."""
    facts = _json(run("generate", PROMPT, "--json", "--max-tokens", str(budget)))
    assert facts["mode"] == "speculative" and facts["rounds"] < facts["generation_tokens"]


def test_plain_gives_the_same_text_and_says_why_it_is_plain(run: Runner) -> None:
    speculative = run("generate", PROMPT)
    plain = run("generate", PROMPT, "--plain")
    assert plain.out == speculative.out != ""
    assert "plain (" in plain.err.splitlines()[-1] and "draft" not in plain.err.splitlines()[1]


def test_compare_prints_ratio_and_verdict(run: Runner) -> None:
    result = run("generate", PROMPT, "--compare")
    assert result.code == 0
    assert result.out == run("generate", PROMPT).out
    plain, speculative, verdict = result.err.splitlines()[-3:]
    assert plain.startswith("plain: ") and "acceptance length 1.00" in plain
    assert speculative.startswith("with draft: ")
    assert verdict.startswith("ratio ") and "identical" in verdict


def test_compare_as_json(run: Runner) -> None:
    facts = _json(run("generate", PROMPT, "--compare", "--json"))
    assert facts["identical"] is True and facts["first_difference"] is None and facts["ratio"] > 0
    assert facts["plain"]["text"] == facts["speculative"]["text"]
    assert facts["plain"]["mode"] == "plain" and facts["speculative"]["mode"] == "speculative"


def test_stats_are_a_table_on_stderr(run: Runner) -> None:
    result = run("generate", PROMPT, "--stats", "--max-tokens", "4")
    assert "acceptance length" in result.err and "tokens from draft" in result.err
    assert "acceptance" not in result.out


def test_only_the_bundled_pair_is_called_a_demonstration(run: Runner) -> None:
    target = hub.resolve("bundled", role="target")
    assert "demonstration" in run("generate", PROMPT, "-n", "1").err
    assert "demonstration" not in run("generate", PROMPT, "-n", "1", "--model", str(target)).err


def test_a_seed_repeats_a_sampled_text(run: Runner) -> None:
    flags = ("--temp", "1.5", "--top-p", "0.95", "--top-k", "200", "--seed", "7", "--max-tokens", "40")
    assert run("generate", "Explain.", *flags).out == run("generate", "Explain.", *flags).out


def test_stop_strings_end_the_text_and_escapes_are_understood(run: Runner) -> None:
    whole = run("generate", PROMPT).out
    assert run("generate", PROMPT, "--stop", "return False").out.strip("\n") == whole.split("return False")[0].strip(
        "\n"
    )
    assert run("generate", PROMPT, "--stop", r"\n").out == whole.split("\n")[0] + "\n"


def test_a_biased_token_is_never_chosen(run: Runner) -> None:
    facts = _json(run("generate", PROMPT, "--json", "--logit-bias", "1=-1000", "--logit-bias", "5=-1000", "-n", "120"))
    assert facts["finish_reason"] == "length"


def test_the_window_of_each_penalty_is_a_flag_whose_default_is_shown(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R53."""
    monkeypatch.setenv("COLUMNS", "160")
    text = " ".join(run("generate", "--help").out.split())
    for penalty in ("repetition", "presence", "frequency"):
        after = text.split(f"--{penalty}-context-size")[1]
        assert "[default: 20]" in after[:160]
    looping = ("generate", PROMPT, "--repetition-penalty", "1.3", "-n", "60", "--logit-bias", "1=-1000")
    narrow = run(*looping, "--repetition-context-size", "2").out
    assert narrow != run(*looping, "--repetition-context-size", "200").out


# ------------------------------------------------------------------------------------------------- prompts


def test_the_prompt_comes_from_argument_stdin_pipe_or_file(run: Runner, tmp_path: Path) -> None:
    expected = run("generate", PROMPT)
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    assert run("generate", "-", stdin=PROMPT + "\n").out == expected.out
    assert run("generate", stdin=PROMPT).out == expected.out
    assert run("generate", "--prompt-file", str(file)).out == expected.out


@pytest.mark.parametrize(
    "flags, prompt, form",
    [
        ((), "def fibonacci(", "text to continue"),
        ((), "class Stack:", "text to continue"),
        ((), "What is the capital of Norway?", "a chat turn"),
        ((), "default settings?", "a chat turn"),
        (("--chat-template",), "def fibonacci(", "a chat turn"),
        (("--system", "You answer."), "def fibonacci(", "a chat turn"),
        (("--no-chat-template",), "What is the capital of Norway?", "text to continue"),
        (("--ignore-chat-template",), "What is the capital of Norway?", "text to continue"),
        (("--model", "{target}"), "def fibonacci(", "a chat turn"),
    ],
)
def test_code_is_continued_by_the_bundled_pair_and_everything_else_is_a_chat_turn(
    flags: tuple[str, ...], prompt: str, form: str, run: Runner
) -> None:
    target = str(hub.resolve("bundled", role="target"))
    result = run("generate", prompt, "-n", "2", *(flag.replace("{target}", target) for flag in flags))
    assert result.code == 0 and form in result.err


def test_both_ways_of_asking_get_sensible_answers(run: Runner) -> None:
    assert run("generate", "What is the capital of Norway?").out == "The capital of Norway is Oslo.\n"
    assert "a, b = b, a + b" in run("generate", "def fibonacci(").out


class _Refusing:
    has_chat_template = True

    def apply_chat_template(self, *_: Any, **__: Any) -> str:
        raise RuntimeError("System role\nnot supported")


def test_a_template_that_refuses_is_one_line() -> None:
    with pytest.raises(OptionError, match="chat template: RuntimeError: System role not supported; --no-chat-template"):
        prompts.encode(_Refusing(), "hello", chat=True, system="x", template={})


def test_a_system_message_needs_a_template() -> None:
    class Bare:
        has_chat_template = False

    with pytest.raises(OptionError, match="--system: found a tokenizer without a chat template"):
        prompts.is_chat(Bare(), "hello", wanted=None, system="x", bundled=False)
    assert prompts.is_chat(Bare(), "hello", wanted=None, system=None, bundled=False) is False


def test_compare_with_stats_shows_both_runs(run: Runner) -> None:
    result = run("generate", PROMPT, "--compare", "--stats", "-n", "8")
    assert result.code == 0
    rows = [line.split() for line in result.err.splitlines() if line.startswith("rounds")]
    assert [row[1] for row in rows] == ["8"] and int(rows[0][2]) < 8


def test_the_bundled_pair_by_name_is_the_pair_and_plain_says_that_it_was_asked_for(run: Runner) -> None:
    assert "speculative, depth 15" in run("generate", PROMPT, "-m", "bundled", "-n", "4").err
    assert "plain (plain decoding was asked for)" in run("generate", PROMPT, "--plain", "-n", "4").err


def test_a_target_alone_says_how_to_name_a_draft(run: Runner) -> None:
    target = Path(mlx_dflash.__file__).parent / "data" / "pair" / "target"
    assert "plain (no draft is loaded; --draft names one)" in run("generate", PROMPT, "-m", str(target), "-n", "4").err
