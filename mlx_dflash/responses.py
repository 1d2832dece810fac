"""What one token of a text says of itself, and the parts that make it: detokenised text and rates. Decodes nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .decoding.results import Round, Stats
from .decoding.text import StopStrings


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
    _logprobs: mx.array = field(repr=False)
    _row: int = field(repr=False)

    @property
    def logprobs(self) -> mx.array:
        """``[V]``: the target's log-probabilities this token was chosen from, after logits processors."""
        return self._logprobs[self._row]


class TokenText:
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


class Clock:
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
