"""The public functions: a drop-in for mlx-lm's ``load``, ``generate`` and ``stream_generate``, with a draft.

Here tokens become text; decoding itself knows token ids only.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from . import hub
from .cache import check_rollback
from .decoding.depth import FixedDepth
from .decoding.loop import Decoding, Request
from .decoding.results import Round, Stats
from .decoding.text import StopStrings
from .draft_choice import choose_draft, load_chosen
from .drafts.loading import LoadOptions
from .errors import OptionError, UnsupportedError
from .options import GenerateOptions
from .pair import Pair
from .prompts import check_prompt_cache, encode_prompt, held_positions
from .responses import Clock, GenerationResponse, TokenText
from .target import Target, end_tokens, load_target


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
    """Load a target and its draft.

    Args:
        target: a local folder, a Hub repository id, or ``None`` for the bundled demonstration pair.
        draft: likewise, or a reserved word; ``None`` finds one where one is known for the target (see
            :mod:`mlx_dflash.known_drafts`), and ``"none"`` does not. Only a draft that was named has to work.
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
    if target is None or target == hub.BUNDLED_TARGET:
        target, draft = hub.BUNDLED_TARGET, draft or hub.BUNDLED_DRAFT
    target_path = hub.resolve(str(target), role="target", progress=progress, trust_remote_code=trust_remote_code)
    # Both are looked up before either is loaded: a missing draft should not cost the time of loading a target.
    choice = choose_draft(None if draft is None else str(draft), str(target), target_path, progress=progress)
    model, tokenizer, config = load_target(
        target_path,
        name=str(target),
        trust_remote_code=trust_remote_code,
        lazy=lazy,
        tokenizer_config=tokenizer_config,
        adapter_path=adapter_path,
    )
    wrapped = Target(model, name=str(target), tokenizer=tokenizer)
    loaded, choice = load_chosen(choice, wrapped, target_path, LoadOptions(draft_bits, draft_dtype, tokenizer))
    if loaded is None:
        if draft_bits is not None or draft_dtype is not None:
            why = f" ({choice.note})" if choice.note else ""
            raise OptionError(f"draft_bits and draft_dtype: found no draft{why}, expected one to apply them to")
        if not lazy:
            wrapped.check_runs()
    ends = end_tokens(tokenizer, config, target_path)
    return Pair(wrapped, loaded, end_tokens=ends, draft_name=choice.name, draft_note=choice.note), tokenizer


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

    Closing the iterator early is a cancel, and an error of a callback ends the text too: a ``prompt_cache`` then holds
    exactly the prompt and the tokens yielded (with the one that ``on_token`` was called with, if that is what failed).
    A prefill that does not end leaves the chunks it did. Before the first ``next`` nothing happens to it at all.

    Raises:
        MlxDflashError: for bad options, before the first token.
    """
    parsed = GenerateOptions.parse(options)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens == 0 or max_tokens < -1:
        raise OptionError(f"max_tokens: found {max_tokens!r}, expected a whole number above 0, or -1 for no limit")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    pair = model if isinstance(model, Pair) else Pair(Target(model, tokenizer=tokenizer))
    ids = encode_prompt(pair.target, tokenizer, prompt)
    decoding = _open(pair, tokenizer, ids, max_tokens, parsed)
    return _stream(pair, decoding, TokenText(tokenizer, StopStrings(parsed.stops)), parsed)


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
    else:
        check_prompt_cache(caches, pair.target)
    options.kv.check(caches)
    draft, stats = _effective_draft(pair, options)
    # Only a draft asks where the sequence stands, and only caches that roll back are sure to count in one way.
    held = 0 if draft is None else held_positions(caches)
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
        return None, Stats("plain", "plain decoding was asked for" if options.plain else pair.no_draft)
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


def _stream(pair: Pair, decoding: Decoding, text: TokenText, options: GenerateOptions) -> Iterator[GenerationResponse]:
    started = time.perf_counter()
    kept = 0
    clock = Clock(len(decoding.request.prompt))
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


def _take(
    text: TokenText, token: int, outcome: Round, is_last: bool, options: GenerateOptions
) -> tuple[str, str | None]:
    """One kept token: its text, and whether anything ends here."""
    finish = outcome.finish_reason if is_last else None
    piece = "" if finish == "stop" else text.push(token)
    hooked = options.on_token is not None and bool(options.on_token(token))
    if text.stopped or hooked:
        finish = "stop"
    if finish and not text.stopped:
        piece += text.finish()
    return piece, finish


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
