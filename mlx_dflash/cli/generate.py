"""``mlx-dflash generate``: one prompt, one text."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from .. import compare as compare_both
from .. import load, stream_generate
from ..draft_choice import NONE
from ..errors import OptionError
from ..hub import BUNDLED_TARGET
from ..known_drafts import drafts_for
from ..options import GenerateOptions
from ..pair import Pair
from ..responses import GenerationResponse
from . import flags, output
from . import prompt as prompts

INTERRUPTED = 130
"""What a shell reports for a program that SIGINT ended."""


def generate(
    prompt: flags.Prompt = None,
    prompt_file: flags.PromptFile = None,
    system: flags.System = None,
    chat_template: flags.ChatTemplate = None,
    chat_template_config: flags.ChatTemplateConfig = None,
    model: flags.Model = None,
    draft: flags.Draft = None,
    draft_bits: flags.DraftBits = None,
    draft_dtype: flags.DraftDtype = None,
    adapter_path: flags.AdapterPath = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    max_tokens: flags.MaxTokens = 256,
    stop: flags.Stop = None,
    temp: flags.Temp = GenerateOptions.temp,
    top_p: flags.TopP = GenerateOptions.top_p,
    top_k: flags.TopK = GenerateOptions.top_k,
    min_p: flags.MinP = GenerateOptions.min_p,
    seed: flags.Seed = None,
    logit_bias: flags.LogitBias = None,
    repetition_penalty: flags.RepetitionPenalty = None,
    repetition_context_size: flags.RepetitionContextSize = GenerateOptions.repetition_context_size,
    presence_penalty: flags.PresencePenalty = None,
    presence_context_size: flags.PresenceContextSize = GenerateOptions.presence_context_size,
    frequency_penalty: flags.FrequencyPenalty = None,
    frequency_context_size: flags.FrequencyContextSize = GenerateOptions.frequency_context_size,
    depth: flags.Depth = None,
    plain: flags.Plain = False,
    compare: flags.Compare = False,
    prefill_step_size: flags.PrefillStepSize = GenerateOptions.prefill_step_size,
    max_kv_size: flags.MaxKvSize = None,
    kv_bits: flags.KvBits = None,
    kv_group_size: flags.KvGroupSize = GenerateOptions.kv_group_size,
    quantized_kv_start: flags.QuantizedKvStart = GenerateOptions.quantized_kv_start,
    stats: flags.ShowStats = False,
    json: flags.Json = False,
) -> None:
    """Generate text with a target and its draft.

    [bold]Examples[/bold]

      mlx-dflash generate "def fibonacci("
      mlx-dflash generate "What is the capital of Norway?" --stats
      mlx-dflash generate -m Qwen/Qwen3-8B -d z-lab/Qwen3-8B-DFlash-b16 "Hello"
      git diff | mlx-dflash generate - --system "Review this." --temp 0.7
      mlx-dflash generate --compare --json --prompt-file question.txt
    """
    given = locals()
    if plain and compare:
        raise OptionError("--compare: found together with --plain, expected one of them")
    if compare and not _may_have_draft(model, draft):
        raise OptionError("--compare: found no --draft, expected one to compare plain decoding with")
    if compare and temp:
        raise OptionError(f"--compare: found --temp {temp:g}, expected greedy decoding; two samples need not be equal")
    template = prompts.template_arguments(chat_template_config, chat_template)
    if chat_template is False and system is not None:
        raise OptionError("--system: found together with --no-chat-template, expected one of them")
    text = prompts.read_prompt(prompt, prompt_file)
    options = {name: given[name] for name in _OPTIONS}
    options["stop"] = [prompts.unescape(entry) for entry in stop or ()]
    options["logit_bias"] = prompts.parse_bias(logit_bias)
    _check(options, max_tokens)
    pair, tokenizer = _load(given)
    output.loaded(pair.report, bundled=_is_bundled(model))
    chat = prompts.is_chat(tokenizer, text, wanted=chat_template, system=system, bundled=_is_bundled(model))
    ids = prompts.encode(tokenizer, text, chat=chat, system=system, template=template)
    job = _Job(pair, tokenizer, text, ids, chat, max_tokens, options, stats, json)
    raise typer.Exit(_compare(job) if compare else _generate(job))


_OPTIONS = (
    "temp", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "repetition_context_size", "presence_penalty",
    "presence_context_size", "frequency_penalty", "frequency_context_size", "depth", "plain", "prefill_step_size",
    "max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start",
)  # fmt: skip
"""Flags that are options of the API under the same name."""


@dataclass(frozen=True)
class _Job:
    """What is to be generated and how to show it. ``prompt`` is what the API is given for ``text``."""

    pair: Pair
    tokenizer: Any
    text: str
    prompt: str | list[int]
    chat: bool
    max_tokens: int
    options: dict[str, Any]
    stats: bool
    json: bool


@dataclass
class _Outcome:
    text: str = ""
    last: GenerationResponse | None = None
    from_draft: int = 0
    interrupted: bool = False

    def add(self, response: GenerationResponse) -> None:
        self.text += response.text
        self.from_draft += response.from_draft
        self.last = response


def _check(options: dict[str, Any], max_tokens: int) -> None:
    """Say what is wrong with a flag before minutes are spent on loading."""
    if max_tokens == 0 or max_tokens < -1:
        raise OptionError(f"max_tokens: found {max_tokens}, expected a whole number above 0, or -1 for no limit")
    GenerateOptions.parse(options).processors(0)  # 0: the vocabulary is not known yet
    if options["plain"] and options["depth"]:
        raise OptionError("--depth: found together with --plain, expected one of them")


def _may_have_draft(model: str | None, draft: str | None) -> bool:
    """What can be said before a model is looked for; a folder may bring a draft along."""
    if draft is not None or model is None or _is_bundled(model):
        return draft != NONE
    return bool(drafts_for(model)) or Path(model).expanduser().is_dir()


def _is_bundled(model: str | None) -> bool:
    return model in (None, BUNDLED_TARGET)


def _load(given: dict[str, Any]) -> tuple[Pair, Any]:
    target = given["model"]
    draft = NONE if given["plain"] else given["draft"]
    with output.loading("the bundled pair" if target is None else target) as progress:
        return load(
            target,
            draft,
            draft_bits=None if given["plain"] else given["draft_bits"],
            draft_dtype=None if given["plain"] else given["draft_dtype"],
            adapter_path=given["adapter_path"],
            trust_remote_code=given["trust_remote_code"],
            progress=progress,
        )


def _generate(job: _Job) -> int:
    outcome = _decode(job)
    if not job.json and outcome.text and not outcome.text.endswith("\n"):
        output.write("\n")
    output.finished(outcome.last, interrupted=outcome.interrupted)
    if job.stats and outcome.last is not None:
        output.table(outcome.last, outcome.from_draft)
    if job.json:
        output.as_json(job.pair.report, outcome.text, outcome.last, outcome.from_draft, interrupted=outcome.interrupted)
    return INTERRUPTED if outcome.interrupted else 0


def _decode(job: _Job) -> _Outcome:
    """Decode and stream, up to the end or the first Ctrl-C."""
    outcome, prefill = _Outcome(), output.Prefill(job.options["prefill_step_size"])
    with _interrupts() as interrupted:

        def report(done: int, total: int) -> None:
            if interrupted.is_set():
                raise KeyboardInterrupt
            prefill.report(done, total)

        options = {**job.options, "prompt_progress_callback": report}
        stream: Any = stream_generate(job.pair, job.tokenizer, job.prompt, job.max_tokens, **options)
        try:
            with closing(stream):
                for response in stream:
                    if outcome.last is None:
                        prefill.stop()
                        _show_start(job, response)
                    outcome.add(response)
                    if not job.json:
                        output.write(response.text)
                    if interrupted.is_set():
                        break
        except KeyboardInterrupt:
            interrupted.set()
        finally:
            prefill.stop()
        outcome.interrupted = interrupted.is_set()
    return outcome


def _show_start(job: _Job, response: GenerationResponse) -> None:
    output.started(response, chat=job.chat)
    if not job.chat and not job.json and output.is_terminal():
        output.prompt_echo(job.text)


def _compare(job: _Job) -> int:
    with _interrupts() as interrupted:

        def stop(_token: int) -> None:
            if interrupted.is_set():
                raise KeyboardInterrupt

        comparison = compare_both(
            job.pair, job.tokenizer, job.prompt, job.max_tokens, **{**job.options, "on_token": stop}
        )
    if job.json:
        output.comparison_as_json(job.pair.report, comparison)
    else:
        output.write(comparison.speculative_text.removesuffix("\n") + "\n")
    output.compared(comparison)
    if job.stats:
        output.comparison_table(comparison)
    return 0


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that decoding ends between two tokens; a second one ends the program where it is."""
    event = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    if threading.current_thread() is not threading.main_thread():
        yield event  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
