"""The public functions: a drop-in for mlx-lm's ``load``, ``generate`` and ``stream_generate``, with a draft.

Here tokens become text; decoding itself knows token ids only.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from . import hub
from .cache import check_rollback, positions
from .decoding.depth import FixedDepth
from .decoding.loop import Decoding, Request
from .decoding.results import Round, Stats
from .decoding.text import StopStrings
from .drafts.registry import load_draft
from .errors import OptionError, UnsupportedError
from .options import GenerateOptions
from .pair import Pair
from .target import Target, end_tokens, load_target


@dataclass(frozen=True)
class GenerationResponse:
    """One token of a text, as mlx-lm's class of the same name, and how it came about.

    Attributes:
        text: what this token adds to the text, possibly empty.
        token: its id.
        from_draft: the draft proposed it and the target accepted it; false for every token of the target's own.
        prompt_tokens, generation_tokens: counts; ``generation_tokens`` includes a closing stop token.
        prompt_tps, generation_tps: tokens a second, of prefill and of decoding.
        peak_memory: in GB, since the process started or ``mx.reset_peak_memory`` was called.
        finish_reason: ``"stop"`` or ``"length"`` on the last response, else ``None``.
        mode: ``"speculative"`` or ``"plain"``: what is really happening.
        mode_reason: why it is plain, or what narrows speculation; ``None`` otherwise.
        depth: tokens proposed a round when nothing limits it.
        acceptance_length: mean tokens committed by a round so far, the target's own included; 1.0 is plain decoding.
        rounds: forward passes of the target so far, prefill not counted.
        drafted: tokens proposed so far.
    """

    text: str
    token: int
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None
    mode: str
    mode_reason: str | None
    depth: int
    acceptance_length: float
    rounds: int
    drafted: int
    _logprobs: mx.array
    _row: int

    @property
    def logprobs(self) -> mx.array:
        """``[V]``: the target's log-probabilities this token was chosen from, after logits processors."""
        return self._logprobs[self._row]


def load(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    draft_bits: int | None = None,
    draft_dtype: str | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    trust_remote_code: bool = False,
    progress: Callable[..., Any] | None = None,
) -> tuple[Pair, TokenizerWrapper]:
    """Load a target and, when one is named, its draft.

    Args:
        target: a local folder, a Hub repository id, or ``None`` for the bundled demonstration pair.
        draft: likewise; ``None`` loads no draft (the bundled target brings its own).
        draft_bits: quantise the draft's linear layers on load, 4 or 8.
        draft_dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; ``None`` keeps the checkpoint's, float16 widened.
        tokenizer_config, adapter_path, lazy, trust_remote_code: as in mlx-lm's ``load``. Code named by a checkpoint is
            never run unless ``trust_remote_code`` is given.
        progress: told about downloads, see :func:`mlx_dflash.hub.resolve`.

    Returns:
        The pair, usable wherever mlx-lm takes its model, and the tokenizer.

    Raises:
        MlxDflashError: with one line saying what is wrong; see :mod:`mlx_dflash.errors` for its kinds.
    """
    if draft_bits not in (None, 4, 8):
        raise OptionError(f"draft_bits: found {draft_bits!r}, expected 4 or 8")
    if target is None:
        target, draft = hub.BUNDLED_TARGET, draft or hub.BUNDLED_DRAFT
    target_path = hub.resolve(str(target), role="target", progress=progress)
    # Both are looked up before either is loaded: a missing draft should not cost the time of loading a target.
    draft_path = None if draft is None else hub.resolve(str(draft), role="draft", progress=progress)
    model, tokenizer, config = load_target(
        target_path,
        name=str(target),
        trust_remote_code=trust_remote_code,
        lazy=lazy,
        tokenizer_config=tokenizer_config,
        adapter_path=adapter_path,
    )
    wrapped = Target(model, name=str(target), tokenizer=tokenizer)
    loaded = None
    if draft_path is not None:
        loaded = load_draft(draft_path, wrapped, bits=draft_bits, dtype=draft_dtype, tokenizer=tokenizer)
    elif draft_bits is not None or draft_dtype is not None:
        raise OptionError("draft_bits and draft_dtype: found without a draft, expected a draft to apply them to")
    return Pair(wrapped, loaded, end_tokens=end_tokens(tokenizer, config, target_path)), tokenizer


def generate(
    model: Any, tokenizer: Any, prompt: str | Sequence[int] | mx.array, verbose: bool = False, **options: Any
) -> str:
    """The whole text; arguments as :func:`stream_generate`. ``verbose`` prints it as it comes, then the rates."""
    text, response = "", None
    for response in stream_generate(model, tokenizer, prompt, **options):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and response is not None:
        print(
            f"\n{'=' * 10}\nPrompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec\n"
            f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec, "
            f"{response.mode}, acceptance length {response.acceptance_length:.2f}\n"
            f"Peak memory: {response.peak_memory:.3f} GB"
        )
    return text


def stream_generate(
    model: Any, tokenizer: Any, prompt: str | Sequence[int] | mx.array, max_tokens: int = 256, **options: Any
) -> Iterator[GenerationResponse]:
    """Decode ``prompt`` and yield one response a token; the tokens of a round follow each other at once.

    Args:
        model: what :func:`load` returned, or a model of mlx-lm's own ``load`` (decodes plainly).
        tokenizer: the tokenizer that came with it.
        prompt: text or token ids.
        max_tokens: most tokens to generate; -1 for no limit.
        **options: fields of :class:`mlx_dflash.options.GenerateOptions`: ``temp``, ``top_p``, ``seed``, ``depth``,
            ``stop``, ``logits_processors``, ``prompt_cache``, ...

    Closing the iterator early is a cancel: a ``prompt_cache`` then holds exactly the prompt and the tokens yielded.

    Raises:
        MlxDflashError: for bad options, before the first token.
    """
    parsed = GenerateOptions.parse(options)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens == 0 or max_tokens < -1:
        raise OptionError(f"max_tokens: found {max_tokens!r}, expected a whole number above 0, or -1 for no limit")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    pair = model if isinstance(model, Pair) else Pair(Target(model, tokenizer=tokenizer))
    ids = _encode(pair, tokenizer, prompt)
    decoding = _open(pair, tokenizer, ids, max_tokens, parsed)
    return _stream(pair, decoding, _Text(tokenizer, StopStrings(parsed.stops)), parsed)


def _encode(pair: Pair, tokenizer: TokenizerWrapper, prompt: str | Sequence[int] | mx.array) -> list[int]:
    if isinstance(prompt, str):
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        ids = list(tokenizer.encode(prompt, add_special_tokens=special))
    elif isinstance(prompt, mx.array):
        ids = np.array(prompt.reshape(-1).astype(mx.int32)).tolist()
    else:
        ids = [int(token) for token in prompt]
    if not ids:
        raise OptionError("prompt: found no tokens, expected at least one")
    pair.target.validate_ids(ids)
    return ids


def _open(
    pair: Pair, tokenizer: TokenizerWrapper, ids: list[int], max_tokens: int, options: GenerateOptions
) -> Decoding:
    """Put a decoding together: caches, draft session, judge. Everything that can be refused is refused here."""
    caches = options.prompt_cache
    reusable = caches is not None
    if caches is None:
        if options.max_kv_size is not None and hasattr(pair.target.model, "make_cache"):
            raise UnsupportedError(
                f"max_kv_size: found {options.max_kv_size} for a {pair.target.model_type} model, which lays out its "
                "own caches and would ignore it; expected no max_kv_size"
            )
        caches = pair.target.make_caches(options.max_kv_size)
    held = positions(caches)
    options.kv.check(caches)
    draft, stats = _effective_draft(pair, options)
    judge = options.judge(speculative=draft is not None)
    session = None
    if draft is not None:
        _check_rollback(caches, options)
        session = draft.open(pair.target, position=held)
        if held:
            stats.mode_reason = f"the draft knows nothing of the {held} tokens that were already in the prompt cache"
    request = Request(
        prompt=ids,
        max_tokens=max_tokens,
        stop_tokens=pair.end_tokens | frozenset(tokenizer.eos_token_ids),
        judge=judge,
        depth=FixedDepth(stats.depth),
        processors=options.processors(pair.target.vocab_size),
        key=options.key() if judge.needs_key else None,
        prefill_step_size=options.prefill_step_size,
        kv=options.kv,
        reusable=reusable,
        progress=options.prompt_progress_callback,
    )
    return Decoding(
        pair.target,
        caches,
        request,
        session=session,
        tap_layers=() if draft is None else draft.tap_layers,
        max_depth=0 if draft is None else draft.max_depth,
        position=held,
        stats=stats,
    )


def _check_rollback(caches: list[Any], options: GenerateOptions) -> None:
    """The caches of this request, which are not always those the pair was checked with."""
    try:
        check_rollback(caches)
    except UnsupportedError as error:
        cause = "max_kv_size" if options.max_kv_size is not None else "prompt_cache"
        raise UnsupportedError(f"{cause}: found with a draft, expected plain decoding; {error}") from error


def _effective_draft(pair: Pair, options: GenerateOptions) -> tuple[Any, Stats]:
    """The draft this request runs with, and the account that says so; plain decoding always has a reason."""
    draft = pair.draft
    if draft is None:
        if options.depth:
            raise OptionError(f"depth: found {options.depth}, expected a loaded draft to propose with, or no depth")
        return None, Stats("plain", "no draft is loaded")
    if options.depth is not None and options.depth > draft.max_depth:
        raise OptionError(
            f"depth: found {options.depth}, expected at most {draft.max_depth} "
            f"(the draft's block_size is {draft.block_size})"
        )
    if options.plain:
        return None, Stats("plain", "plain decoding was asked for")
    if options.depth == 0:
        return None, Stats("plain", "depth 0 was asked for")
    return draft, Stats("speculative", depth=options.depth or draft.max_depth)


class _Text:
    """Token ids in, text out: mlx-lm's streaming detokeniser with stop strings behind it."""

    def __init__(self, tokenizer: TokenizerWrapper, stops: StopStrings) -> None:
        self._detokenizer = tokenizer.detokenizer
        self._stops = stops

    def push(self, token: int) -> str:
        self._detokenizer.add_token(token)
        return self._stops.push(self._detokenizer.last_segment)

    def finish(self) -> str:
        """The last text; may still complete a stop string."""
        self._detokenizer.finalize()
        return self._stops.push(self._detokenizer.last_segment) + self._stops.flush()

    @property
    def stopped(self) -> bool:
        return self._stops.matched is not None


def _stream(pair: Pair, decoding: Decoding, text: _Text, options: GenerateOptions) -> Iterator[GenerationResponse]:
    started = time.perf_counter()
    kept = 0
    clock = _Clock(len(decoding.request.prompt))
    try:
        decoding.prefill()
        for outcome in decoding.rounds():
            clock.round_done(started)
            for kept, token in enumerate(outcome.tokens, start=1):
                is_last = kept == len(outcome.tokens)
                piece, finish = _take(text, token, outcome, is_last, options)
                if finish and not is_last:
                    decoding.stats.drop(outcome, kept)
                yield clock.response(decoding.stats, outcome, kept - 1, piece, finish)
                if finish:
                    return
    finally:
        decoding.close(kept)
        _answer_parking(pair, decoding)


def _take(text: _Text, token: int, outcome: Round, is_last: bool, options: GenerateOptions) -> tuple[str, str | None]:
    """One kept token: its text, and whether anything ends here."""
    finish = outcome.finish_reason if is_last else None
    piece = "" if finish == "stop" else text.push(token)
    hooked = options.on_token is not None and bool(options.on_token(token))
    if text.stopped or hooked:
        finish = "stop"
    if finish and not text.stopped:
        piece += text.finish()
    return piece, finish


class _Clock:
    """Rates as mlx-lm states them: prefill ends with the first round, decoding starts there."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._prompt_tps = 0.0
        self._first: float | None = None
        self._tokens = 0

    def round_done(self, started: float) -> None:
        if self._first is None:
            self._first = time.perf_counter()
            self._prompt_tps = self._prompt_tokens / max(self._first - started, 1e-9)

    def response(self, stats: Stats, outcome: Round, index: int, text: str, finish: str | None) -> GenerationResponse:
        self._tokens += 1
        elapsed = max(time.perf_counter() - (self._first or 0.0), 1e-9)
        return GenerationResponse(
            text=text,
            token=outcome.tokens[index],
            from_draft=index < outcome.accepted,
            prompt_tokens=self._prompt_tokens,
            prompt_tps=self._prompt_tps,
            generation_tokens=self._tokens,
            generation_tps=self._tokens / elapsed,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish,
            mode=stats.mode,
            mode_reason=stats.mode_reason,
            depth=stats.depth,
            acceptance_length=stats.acceptance_length,
            rounds=stats.rounds,
            drafted=stats.drafted,
            _logprobs=outcome.logprobs,
            _row=index,
        )


def _answer_parking(pair: Pair, decoding: Decoding) -> None:
    """A draft whose logits overflowed gets a wider dtype for the requests to come, and one warning says so."""
    if not decoding.parked or pair.draft is None:
        return
    widened = pair.draft.widened()
    if widened is not None:
        pair.replace_draft(widened)
        warnings.warn(f"{decoding.stats.mode_reason}; from now on the draft computes in float32", stacklevel=2)
    else:
        warnings.warn(str(decoding.stats.mode_reason), stacklevel=2)
