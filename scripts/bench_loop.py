"""Measures the loop itself on this machine and prints one table: plain decoding against mlx-lm's, what a round costs
beside its two forward passes, and peak memory.

Everything is interleaved in one process, because machines drift: rates as medians of ratios taken within a repetition,
the parts of a round as lower quartiles, because other work makes a round slower and never faster.
Two pairs: the bundled one, and a larger one with random weights (bfloat16, about 100 M parameters) whose draft accepts
nothing, so that every round pays for its full block.

    python scripts/bench_loop.py [--repeat 7] [--tokens 96] [--depth N] [--pair bundled|large|both]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3

import mlx_dflash
from mlx_dflash.decoding.acceptance import GreedyJudge
from mlx_dflash.decoding.depth import FixedDepth
from mlx_dflash.decoding.loop import Decoding, Request
from mlx_dflash.decoding.results import Stats
from mlx_dflash.drafts.registry import load_draft
from mlx_dflash.pair import Pair
from mlx_dflash.target import Target

VOCAB, HIDDEN, LAYERS, TAPS = 32000, 768, 12, (1, 5, 9)


# ------------------------------------------------------------------------------------------------ the larger pair


def large_pair(folder: Path) -> Pair:
    """A random Qwen3 of about 110 M parameters with a two-layer draft, both bfloat16."""
    args = qwen3.ModelArgs.from_dict(
        {
            "model_type": "qwen3",
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "intermediate_size": 2304,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "rms_norm_eps": 1e-6,
            "vocab_size": VOCAB,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        }
    )
    mx.random.seed(0)
    model = qwen3.Model(args)
    model.update(tree_map(lambda a: a.astype(mx.bfloat16), model.parameters()))
    mx.eval(model.parameters())
    target = Target(model, name="random-qwen3-110m")
    return Pair(target, load_draft(random_draft(folder), target))


def random_draft(folder: Path) -> Path:
    """A DFlash v1 checkpoint with random weights for the larger target."""
    heads, kv_heads, head_dim, width = 12, 4, 64, 2304
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": width,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "block_size": 16,
        "num_target_layers": LAYERS,
        "dflash_config": {"target_layer_ids": list(TAPS), "mask_token_id": 5},
    }
    shapes = {"fc.weight": (HIDDEN, len(TAPS) * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for layer in range(2):
        prefix = f"layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (heads * head_dim, HIDDEN),
            prefix + "self_attn.k_proj.weight": (kv_heads * head_dim, HIDDEN),
            prefix + "self_attn.v_proj.weight": (kv_heads * head_dim, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, heads * head_dim),
            prefix + "self_attn.q_norm.weight": (head_dim,),
            prefix + "self_attn.k_norm.weight": (head_dim,),
            prefix + "mlp.gate_proj.weight": (width, HIDDEN),
            prefix + "mlp.up_proj.weight": (width, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, width),
        }
    weights = {
        name: (mx.ones(shape) if len(shape) == 1 else mx.random.normal(shape) * shape[-1] ** -0.5).astype(mx.bfloat16)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


# ------------------------------------------------------------------------------------------------ what is timed


@dataclass
class Parts:
    """Seconds spent in the two forward passes of timed rounds; ``rows`` is what a whole block has."""

    rows: int
    draft: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)


class TimedTarget:
    """Stands for a target; evaluates each verify forward by itself and notes how long it took."""

    def __init__(self, target: Target, parts: Parts) -> None:
        self._target, self._parts = target, parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, ids: mx.array, caches: list[Any], taps: tuple[int, ...] = ()) -> Any:
        mx.eval(ids)
        begin = time.perf_counter()
        result = self._target.forward(ids, caches, taps)
        mx.eval([r for r in result if r is not None])
        if ids.shape[1] == self._parts.rows:
            self._parts.verify.append(time.perf_counter() - begin)
        return result


class TimedSession:
    """Stands for a draft session; commit and propose of one round are timed together as the draft's forward."""

    def __init__(self, session: Any, parts: Parts) -> None:
        self._session, self._parts, self._commit = session, parts, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def commit(self, features: mx.array, position: int) -> None:
        begin = time.perf_counter()
        self._session.commit(features, position)
        mx.eval(list(self._session.arrays()))
        self._commit = time.perf_counter() - begin

    def propose(self, anchor: mx.array, depth: int, sampler: Any) -> Any:
        begin = time.perf_counter()
        proposal = self._session.propose(anchor, depth, sampler)
        mx.eval(proposal.tokens, proposal.finite)
        self._parts.draft.append(self._commit + time.perf_counter() - begin)
        return proposal


def decoding(pair: Pair, prompt: list[int], tokens: int, depth: int, parts: Parts | None = None) -> Decoding:
    target: Any = pair.target
    draft = pair.draft if depth else None
    session: Any = None if draft is None else draft.open(target)
    if parts is not None:
        target, session = TimedTarget(target, parts), TimedSession(session, parts)
    # Room for one whole block more: near the end of a budget a round proposes less, and would be measured as faster.
    request = Request(prompt, tokens + depth, pair.end_tokens, GreedyJudge(), FixedDepth(depth))
    return Decoding(
        target,
        pair.target.make_caches(),
        request,
        session=session,
        tap_layers=() if draft is None else draft.tap_layers,
        max_depth=0 if draft is None else draft.max_depth,
        stats=Stats("plain" if draft is None else "speculative", depth=depth),
    )


@dataclass
class Timing:
    """Of one run, prefill and first round left out: seconds of each round, tokens they brought, peak bytes."""

    laps: list[float]
    tokens: int
    peak: int

    @property
    def seconds(self) -> float:
        return sum(self.laps)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def timed(steps: Callable[[], Iterator[int]]) -> Timing:
    """``steps`` yields the number of tokens of each round."""
    mx.clear_cache()
    mx.reset_peak_memory()
    iterator = steps()
    next(iterator)
    laps, tokens, begin = [], 0, time.perf_counter()
    for count in iterator:
        now = time.perf_counter()
        laps.append(now - begin)
        tokens, begin = tokens + count, now
    return Timing(laps, tokens, mx.get_peak_memory())


def mlx_lm_steps(pair: Pair, prompt: list[int], tokens: int) -> Iterator[int]:
    for token, _ in generate_step(mx.array(prompt), pair.target.model, max_tokens=tokens):
        yield 1
        if token in pair.end_tokens:
            return


def our_steps(pair: Pair, prompt: list[int], tokens: int, depth: int, parts: Parts | None = None) -> Iterator[int]:
    run = decoding(pair, prompt, tokens, depth, parts)
    run.prefill()
    done = 0
    for outcome in run.rounds():
        yield len(outcome.tokens)
        done += len(outcome.tokens)
        if done >= tokens:
            return


# ------------------------------------------------------------------------------------------------ the report


def bench(name: str, pair: Pair, prompt: list[int], tokens: int, depth: int, repeat: int) -> list[tuple[str, str]]:
    ways: dict[str, Callable[[], Iterator[int]]] = {
        "mlx-lm": lambda: mlx_lm_steps(pair, prompt, tokens),
        "plain": lambda: our_steps(pair, prompt, tokens, 0),
        "speculative": lambda: our_steps(pair, prompt, tokens, depth),
    }
    for steps in ways.values():
        timed(steps)
    found: dict[str, list[Timing]] = {way: [] for way in ways}
    parts = Parts(depth + 1)
    rounds: list[float] = []
    names = list(ways)
    for repetition in range(repeat):
        shift = repetition % len(names)
        for way in names[shift:] + names[:shift]:
            found[way].append(timed(ways[way]))
            if way != "mlx-lm":
                continue
            # Whole rounds on either side of the timed parts: a machine that drifts then drifts for both.
            rounds += timed(ways["speculative"]).laps
            timed(partial(our_steps, pair, prompt, tokens, depth, parts))
            rounds += timed(ways["speculative"]).laps
    return report(name, pair, found, parts, rounds)


def undisturbed(seconds: list[float]) -> float:
    """The lower quartile: other work on the machine makes a round slower, never faster."""
    return statistics.quantiles(seconds, n=4)[0]


def report(
    name: str, pair: Pair, found: dict[str, list[Timing]], parts: Parts, rounds: list[float]
) -> list[tuple[str, str]]:
    def ratio(a: str, b: str) -> str:
        ratios = [x.rate / y.rate for x, y in zip(found[a], found[b], strict=True)]
        return f"{statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})"

    def rate(way: str) -> str:
        return f"{statistics.median(t.rate for t in found[way]):.1f} tokens/s"

    assert pair.draft is not None
    plain_peak = min(t.peak for t in found["mlx-lm"])
    peak = max(t.peak for t in found["speculative"])
    allowed = (plain_peak + pair.draft.report.weight_bytes) * 1.05
    if_counted = "the draft's weights are resident in both, so they are counted once"
    draft, verify, a_round = (undisturbed(series) * 1e3 for series in (parts.draft, parts.verify, rounds))
    last = found["speculative"][-1]
    return [
        (f"{name}: mlx-lm", rate("mlx-lm")),
        (f"{name}: plain", rate("plain")),
        (f"{name}: speculative", f"{rate('speculative')}, {last.tokens / len(last.laps):.2f} tokens a round"),
        (f"{name}: plain / mlx-lm", ratio("plain", "mlx-lm")),
        (f"{name}: speculative / plain", ratio("speculative", "plain")),
        (f"{name}: round", f"{a_round:.2f} ms = draft {draft:.2f} + verify {verify:.2f} + the rest"),
        (f"{name}: round overhead", f"{(a_round - draft - verify) / a_round * 100:.1f} %"),
        (f"{name}: peak memory", f"{peak / 1e6:.1f} MB, plain {plain_peak / 1e6:.1f} MB ({if_counted})"),
        (f"{name}: peak within plain + draft + 5 %", "yes" if peak <= allowed else f"no, {allowed / 1e6:.1f} allowed"),
    ]


def bundled(options: argparse.Namespace) -> list[tuple[str, str]]:
    pair, tokenizer = mlx_dflash.load()
    prompt = list(tokenizer.encode("def is_prime(n"))
    return bench("bundled", pair, prompt, options.tokens, options.depth or 15, options.repeat)


def large(options: argparse.Namespace) -> list[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        pair = large_pair(Path(folder))
        held = pair.report.target.parameter_bytes
        prompt = np.array(mx.random.randint(10, VOCAB, (64,), key=mx.random.key(1))).tolist()
        rows = bench("large", pair, prompt, max(options.tokens // 3, 16), options.depth or 15, options.repeat)
        return [("large: target weights", f"{held / 1e6:.0f} MB"), *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--depth", type=int, default=None)
    parser.add_argument("--pair", choices=["bundled", "large", "both"], default="both")
    options = parser.parse_args()
    rows = []
    if options.pair != "large":
        rows += bundled(options)
    if options.pair != "bundled":
        rows += large(options)
    width = max(len(label) for label, _ in rows)
    print(f"mlx {version('mlx')} on {mx.default_device()}, medians of {options.repeat} interleaved repetitions\n")
    for label, value in rows:
        print(f"{label:<{width}}  {value}")


if __name__ == "__main__":
    main()
