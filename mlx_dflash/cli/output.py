"""What the user sees beside the text: progress, start and closing lines, tables, the JSON object. Knows no model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from ..comparison import Comparison
from ..hub import Progress as DownloadProgress
from ..pair import NO_DRAFT, LoadReport
from ..responses import GenerationResponse

_console = Console(stderr=True, highlight=False, soft_wrap=True)


def error(message: str) -> None:
    """One line, whatever the message holds, so that it can be searched for and quoted."""
    _console.print(Text.assemble(("error: ", "bold red"), " ".join(message.split())))


def note(line: str) -> None:
    _console.print(Text(line, style="dim"))


def say(line: str) -> None:
    _console.print(Text(line))


def write(text: str) -> None:
    """Text of the model, to stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def is_terminal() -> bool:
    """Whether a person watches both streams."""
    return _console.is_terminal and sys.stdout.isatty()


def prompt_echo(prompt: str) -> None:
    """The prompt in front of the text that continues it."""
    _console.print(Text(prompt, style="dim"), end="")


# ------------------------------------------------------------------------------------------------ progress


@contextmanager
def loading(name: str) -> Iterator[DownloadProgress]:
    """A spinner while a model loads, a bar for each download; nothing where nobody watches. Gives what to report to."""
    if not _console.is_terminal:
        yield lambda what, done, total: None
        return
    columns = (TextColumn("downloading {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    downloads = Progress(*columns, console=_console, transient=True)
    bars: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in bars:
            spinner.stop()  # one live display at a time
            downloads.start()
            bars[what] = downloads.add_task(what)
        downloads.update(bars[what], completed=done, total=total)

    with _console.status(f"loading {escape(name)}") as spinner:
        try:
            yield report
        finally:
            downloads.stop()


class Prefill:
    """A bar for prompts that take more than one forward pass."""

    def __init__(self, step_size: int) -> None:
        self._step_size = step_size
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def report(self, done: int, total: int) -> None:
        if self._progress is None:
            if total <= self._step_size or not _console.is_terminal:
                return
            columns = (SpinnerColumn(), TextColumn("reading the prompt"), BarColumn(), MofNCompleteColumn())
            self._progress = Progress(*columns, TextColumn("tokens"), console=_console, transient=True)
            self._task = self._progress.add_task("", total=total)
            self._progress.start()
        assert self._task is not None
        self._progress.update(self._task, completed=done)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()


# --------------------------------------------------------------------------------------------------- lines


def loaded(report: LoadReport, *, bundled: bool) -> None:
    if bundled:
        note(
            "bundled demonstration pair: tiny models that know some Python functions and a few questions, no assistant"
        )
    for line in report.lines():
        note(line)


def started(response: GenerationResponse, *, chat: bool) -> None:
    """What really runs; known from the first token on."""
    form = "a chat turn" if chat else "text to continue"
    note(f"{_mode(response)}, prompt of {response.prompt_tokens} tokens as {form}")


def _mode(response: GenerationResponse) -> str:
    mode = f"speculative, depth {response.depth}" if response.mode == "speculative" else response.mode
    hint = "; --draft names one" if response.mode_reason == NO_DRAFT else ""
    return mode + (f" ({response.mode_reason}{hint})" if response.mode_reason else "")


def finished(response: GenerationResponse | None, *, interrupted: bool) -> None:
    """The closing line."""
    if response is None:
        say("interrupted before the first token")
        return
    end = "interrupted" if interrupted else f"finish reason {response.finish_reason}"
    prompt = f"prompt {response.prompt_tokens} tokens, {response.prompt_tps:.1f} tokens/s"
    say(f"{_rates(response)}; {end}; {prompt}; peak memory {response.peak_memory:.3f} GB")


def _rates(response: GenerationResponse) -> str:
    return (
        f"{response.generation_tokens} tokens, {response.generation_tps:.1f} tokens/s; {_mode(response)}; acceptance "
        f"length {response.acceptance_length:.2f}, {response.rounds} rounds"
    )


def compared(comparison: Comparison) -> None:
    for name, response in (("plain", comparison.plain), ("with draft", comparison.speculative)):
        say(f"{name}: {_rates(response)}; peak memory so far {response.peak_memory:.3f} GB")
    say(f"ratio {comparison.ratio:.2f}; texts: {comparison.verdict()}")


def table(response: GenerationResponse, from_draft: int) -> None:
    """``--stats``."""
    grid = Table(show_header=False, box=None, pad_edge=False)
    for name, value in (_facts(response) | {"tokens_from_draft": from_draft}).items():
        grid.add_row(name.replace("_", " "), _shown(value))
    _console.print(grid)


def comparison_table(comparison: Comparison) -> None:
    """``--compare --stats``: both runs side by side."""
    grid = Table(box=None, pad_edge=False)
    for heading in ("", "plain", "with draft"):
        grid.add_column(heading)
    fast = _facts(comparison.speculative)
    for name, value in _facts(comparison.plain).items():
        grid.add_row(name.replace("_", " "), _shown(value), _shown(fast[name]))
    _console.print(grid)


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _facts(response: GenerationResponse) -> dict[str, Any]:
    return {
        "mode": response.mode,
        "mode_reason": response.mode_reason,
        "depth": response.depth,
        "rounds": response.rounds,
        "acceptance_length": response.acceptance_length,
        "drafted_tokens": response.drafted,
        "prompt_tokens": response.prompt_tokens,
        "prompt_tps": response.prompt_tps,
        "generation_tokens": response.generation_tokens,
        "generation_tps": response.generation_tps,
        "peak_memory_gb": response.peak_memory,
        "finish_reason": response.finish_reason,
    }


# ---------------------------------------------------------------------------------------------------- JSON


def as_json(
    report: LoadReport, text: str, response: GenerationResponse | None, from_draft: int, *, interrupted: bool
) -> None:
    """``--json``: one object on stdout."""
    facts = {} if response is None else _facts(response) | {"tokens_from_draft": from_draft}
    if interrupted:
        facts["finish_reason"] = "interrupted"
    _print_json({"text": text, **facts, **_models(report)})


def comparison_as_json(report: LoadReport, comparison: Comparison) -> None:
    _print_json(
        {
            "identical": comparison.identical,
            "first_difference": comparison.first_difference,
            "margin": comparison.margin,
            "largest_difference": comparison.largest_difference,
            "ratio": comparison.ratio,
            "plain": {"text": comparison.plain_text, **_facts(comparison.plain)},
            "speculative": {"text": comparison.speculative_text, **_facts(comparison.speculative)},
            **_models(report),
        }
    )


def _models(report: LoadReport) -> dict[str, Any]:
    draft = report.draft
    return {
        "target": {"name": report.target.name, "model_type": report.target.model_type},
        "draft": None
        if draft is None
        else {"path": draft.path, "family": draft.family, "head": draft.head, "block_size": draft.block_size},
    }


def _print_json(value: dict[str, Any]) -> None:
    write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
