"""The options of one generation, checked once at the edge; past this module nothing is optional."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from .checks import require_boolean, require_callable, require_integer, require_number
from .decoding.acceptance import ExternalJudge, GreedyJudge, Judge, RejectionJudge
from .decoding.loop import KVQuantization
from .decoding.sampling import ExternalSampler, Filters, LogitsProcessor, build_processors
from .decoding.text import StopStrings
from .errors import OptionError, UnsupportedError

_MLX_LM_ONLY = {
    "draft_model": "give the draft to load(target, draft=...)",
    "num_draft_tokens": "use depth=",
    "input_embeddings": "this package decodes text prompts",
    "image": "images are not read; of a model with an image tower only the text model runs",
    "images": "images are not read; of a model with an image tower only the text model runs",
}


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of :func:`mlx_dflash.stream_generate`; names and defaults are mlx-lm's wherever mlx-lm has them.

    Attributes:
        plain: decode with the target alone.
        depth: tokens a round proposes; ``None`` takes the draft's trained block. 0 is plain decoding.
        temp, top_p, min_p, min_tokens_to_keep, top_k: see :class:`mlx_dflash.decoding.sampling.Filters`.
        xtc_probability, xtc_threshold: mlx-lm's XTC; plain decoding only (it draws one number for all rows, so its
            distribution is not known row by row).
        seed: repeats a sampled text for the same model, settings and depth, across runs and processes. It does not
            make a speculative text equal the plain one: both follow the same distribution with other random numbers.
            ``None`` draws one from MLX's global generator, which ``mx.random.seed`` controls. Refused with ``sampler``
            and with XTC, which draw from that generator themselves.
        sampler: mlx-lm sampler, ``logprobs [rows, V] -> tokens [rows]``, instead of ``temp`` and its companions.
        logits_processors: mlx-lm processors; they run after the penalties built from the options below.
        logit_bias: token id -> added logit.
        repetition_penalty, presence_penalty, frequency_penalty: mlx-lm's; each looks back over its
            ``*_context_size`` tokens (20, mlx-lm's default).
        stop: strings that end the text; nothing at or after the first match is returned.
        on_token: called with each token id before its text is returned; a true result ends the text there, and
            nothing after that token stays in a reusable cache.
        prompt_cache: caches to continue from and to leave the sequence in (mlx-lm's ``make_prompt_cache``).
        max_kv_size: mlx-lm's rotating cache for models without a cache layout of their own.
        prefill_step_size: prompt tokens a forward pass takes.
        kv_bits, kv_group_size, quantized_kv_start: mlx-lm's KV-cache quantisation.
        prompt_progress_callback: called with (processed, total) prompt tokens.
        sample_draft: when sampling, let the draft draw its proposals from its own distribution (see
            :class:`mlx_dflash.decoding.acceptance.RejectionJudge`).
    """

    plain: bool = False
    depth: int | None = None
    temp: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.0
    seed: int | None = None
    sampler: ExternalSampler | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    stop: str | Sequence[str] | None = ()
    on_token: Callable[[int], Any] | None = None
    prompt_cache: list[Any] | None = None
    max_kv_size: int | None = None
    prefill_step_size: int = 2048
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000
    prompt_progress_callback: Callable[[int, int], None] | None = None
    sample_draft: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        if self.sampler is not None:
            if self.filters != Filters() or self.xtc_probability > 0:
                raise OptionError(
                    "sampler: found together with temp, top_p, min_p, top_k or xtc_probability, expected one or the "
                    "other"
                )
            self._refuse_seed("sampler, a function that draws its own numbers")
        elif self.xtc_probability > 0 and not self.filters.greedy:
            self._refuse_seed("xtc_probability, whose mlx-lm sampler draws from MLX's global generator")

    def _check_types(self) -> None:
        for name, low in (("prefill_step_size", 1), ("quantized_kv_start", 0)):
            require_integer(name, getattr(self, name), low)
        for name, low in (("max_kv_size", 1), ("depth", 0)):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), low)
        for name in ("plain", "sample_draft"):
            require_boolean(name, getattr(self, name))
        for name in ("sampler", "on_token", "prompt_progress_callback"):
            if getattr(self, name) is not None:
                require_callable(name, getattr(self, name))
        for name, choices in (("kv_bits", (None, 2, 3, 4, 5, 6, 8)), ("kv_group_size", (32, 64, 128))):
            value = getattr(self, name)
            if value not in choices or isinstance(value, float):
                listed = ", ".join(str(choice) for choice in choices if choice is not None)
                raise OptionError(f"{name}: found {value!r}, expected one of {listed}")
        if self.seed is not None and not (type(self.seed) is int and 0 <= self.seed < 2**64):
            raise OptionError(f"seed: found {self.seed!r}, expected a whole number of 0 or more, below 2**64")
        if not isinstance(self.logits_processors, (Sequence, type(None))) or isinstance(self.logits_processors, str):
            raise OptionError(f"logits_processors: found {self.logits_processors!r}, expected a list of functions")
        for index, processor in enumerate(self.logits_processors or ()):
            require_callable(f"logits_processors[{index}]", processor)
        require_number("xtc_probability", self.xtc_probability, 0.0, 1.0)
        require_number("xtc_threshold", self.xtc_threshold, 0.0, 0.5)
        # These check themselves, also where nothing will use them.
        _ = self.filters
        StopStrings(self.stops)

    def _refuse_seed(self, generator: str) -> None:
        """A seed that reaches nobody would be believed to repeat the text."""
        if self.seed is not None:
            raise OptionError(f"seed: found together with {generator}; expected mx.random.seed for it, or no seed")

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> GenerateOptions:
        """From keyword arguments; an unknown name is an error that says what was probably meant."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name in _MLX_LM_ONLY:
                raise UnsupportedError(f"{name}: not an option of mlx-dflash; {_MLX_LM_ONLY[name]}")
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise OptionError(f"{name}: unknown option{hint}")
        return cls(**options)

    @property
    def filters(self) -> Filters:
        return Filters(
            temperature=self.temp,
            top_p=self.top_p,
            min_p=self.min_p,
            min_tokens_to_keep=self.min_tokens_to_keep,
            top_k=self.top_k,
        )

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None or isinstance(self.stop, str):
            return () if self.stop is None else (self.stop,)
        if not isinstance(self.stop, Sequence) or isinstance(self.stop, bytes):
            raise OptionError(f"stop: found {type(self.stop).__name__}, expected a string or a list of strings")
        return tuple(self.stop)

    @property
    def kv(self) -> KVQuantization:
        return KVQuantization(self.kv_bits, self.kv_group_size, self.quantized_kv_start)

    def judge(self, *, speculative: bool) -> Judge:
        """How tokens are chosen.

        Raises:
            UnsupportedError: XTC together with a draft.
        """
        if self.sampler is not None:
            return ExternalJudge(self.sampler)
        if self.xtc_probability > 0:
            if speculative:
                raise UnsupportedError("xtc_probability: XTC sampling does not run with a draft; use plain decoding")
            return ExternalJudge(
                make_sampler(
                    self.temp,
                    self.top_p,
                    self.min_p,
                    self.min_tokens_to_keep,
                    self.top_k,
                    self.xtc_probability,
                    self.xtc_threshold,
                )
            )
        return GreedyJudge() if self.filters.greedy else RejectionJudge(self.filters, self.sample_draft)

    def processors(self, vocab_size: int) -> list[LogitsProcessor]:
        built = build_processors(
            vocab_size,
            logit_bias=self.logit_bias,
            repetition_penalty=self.repetition_penalty,
            repetition_context_size=self.repetition_context_size,
            presence_penalty=self.presence_penalty,
            presence_context_size=self.presence_context_size,
            frequency_penalty=self.frequency_penalty,
            frequency_context_size=self.frequency_context_size,
        )
        return [*built, *(self.logits_processors or ())]

    def key(self) -> mx.array:
        if self.seed is not None:
            return mx.random.key(self.seed)
        drawn = mx.random.randint(0, 2**31 - 1).item()
        assert isinstance(drawn, int)
        return mx.random.key(drawn)
