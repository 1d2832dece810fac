"""Runs of the loop on tiny targets, and the plain mlx-lm run each is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step

from mlx_dflash.decoding.acceptance import GreedyJudge, Judge
from mlx_dflash.decoding.depth import FixedDepth
from mlx_dflash.decoding.loop import Decoding, KVQuantization, Request
from mlx_dflash.decoding.results import Round, Stats
from mlx_dflash.target import Target
from tests import tiny_models
from tests.versions import BEFORE_0_32

VOCAB = 64
WINDOW = 8
NOT_QUANTISED = KVQuantization()

TARGETS: dict[str, Callable[[], nn.Module]] = {
    "full": lambda: tiny_models.tiny_llama(layers=2, vocab=VOCAB),
    "sliding": lambda: tiny_models.tiny_llama(
        layers=2, vocab=VOCAB, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "gemma4": lambda: tiny_models.tiny_gemma4(layers=3, vocab=VOCAB, window=WINDOW),
    "gemma4_shared_kv": lambda: tiny_models.tiny_gemma4(layers=5, vocab=VOCAB, window=WINDOW, kv_shared=2),
    "gpt_oss": lambda: tiny_models.tiny_gpt_oss(layers=2, vocab=VOCAB, window=WINDOW),
    "all_sliding": lambda: tiny_models.tiny_gemma4(
        layers=2, vocab=VOCAB, window=WINDOW, layer_types=["sliding_attention", "sliding_attention"]
    ),
    # head_dim 32, which quantised caches need
    "wide": lambda: tiny_models.tiny_llama(layers=2, hidden=128, vocab=VOCAB),
    "chunked": lambda: tiny_models.tiny_llama4(layers=4, vocab=VOCAB, chunk=WINDOW),
}
if BEFORE_0_32:
    del TARGETS["chunked"]  # its cache drops rows that the chunk needs, in mlx-lm's own decoding too, and is refused

FOR_GOLDEN: dict[str, Callable[[], nn.Module]] = {
    "golden": lambda: tiny_models.tiny_llama(layers=12, hidden=64, vocab=256),
    "golden_sliding": lambda: tiny_models.tiny_llama(
        layers=12,
        hidden=64,
        vocab=256,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 6,
    ),
}
"""Of the width, depth and vocabulary that the checkpoints under ``tests/golden`` were made for, so that each of them
runs end to end."""


@cache
def target(kind: str) -> Target:
    return Target((TARGETS | FOR_GOLDEN)[kind](), name=kind)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in mx.random.randint(6, VOCAB, (length,), key=mx.random.key(100 + seed)).tolist()]


@cache
def plain(kind: str, prompt: tuple[int, ...], tokens: int, kv: KVQuantization = NOT_QUANTISED) -> tuple[int, ...]:
    """mlx-lm's own greedy decoding, nothing of ours in it."""
    options = {"kv_bits": kv.bits, "kv_group_size": kv.group_size, "quantized_kv_start": kv.start}
    steps = generate_step(mx.array(prompt), target(kind).model, max_tokens=tokens, **options)
    return tuple(token for token, _ in steps)


@dataclass
class Run:
    """What came out of one decoding, and what it left behind."""

    decoding: Decoding
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    @property
    def finish_reason(self) -> str | None:
        return self.rounds[-1].finish_reason

    @property
    def caches(self) -> list[Any]:
        return self.decoding.caches


def start(
    kind: str,
    prompt: Sequence[int],
    draft: Any = None,
    *,
    max_tokens: int = 40,
    depth: int | None = None,
    stop_tokens: Sequence[int] = (),
    judge: Judge | None = None,
    caches: list[Any] | None = None,
    **request: Any,
) -> Decoding:
    """A decoding that has done its prefill. ``caches`` makes it reusable."""
    model = target(kind)
    chosen = 0 if draft is None else depth or draft.max_depth
    decoding = Decoding(
        model,
        model.make_caches() if caches is None else caches,
        Request(
            prompt=list(prompt),
            max_tokens=max_tokens,
            stop_tokens=frozenset(stop_tokens),
            judge=judge or GreedyJudge(),
            depth=FixedDepth(chosen),
            reusable=caches is not None,
            **request,
        ),
        session=None if draft is None else draft.open(model),
        tap_layers=() if draft is None else draft.tap_layers,
        max_depth=0 if draft is None else draft.max_depth,
        stats=Stats("plain" if draft is None else "speculative", depth=chosen),
    )
    decoding.prefill()
    return decoding


def run(
    kind: str, prompt: Sequence[int], draft: Any = None, *, each: Callable[..., None] | None = None, **options
) -> Run:
    """Decode to the end. ``each(run, round)`` is called after every round."""
    result = Run(start(kind, prompt, draft, **options))
    for outcome in result.decoding.rounds():
        result.rounds.append(outcome)
        result.tokens.extend(outcome.tokens)
        if each is not None:
            each(result, outcome)
    result.decoding.close(len(result.rounds[-1].tokens) if result.rounds else 0)
    return result
