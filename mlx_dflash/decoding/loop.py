"""The loop: draft, verify, accept, commit. Knows target and draft only by their interfaces, and text not at all.

Positions: ``position`` is the number of positions in the target's caches, which is where the *anchor* sits, the last
committed token, not yet forwarded. Prefill stops one token short of the prompt's end, so the first anchor is the
prompt's last token and every later step is a round like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

from ..cache import Speculation, cache_arrays
from ..drafts.base import DraftSession, Proposal
from ..errors import OptionError, UnsupportedError
from ..target import Target
from .acceptance import Judge
from .depth import DepthPolicy
from .results import Round, Stats
from .sampling import LogitsProcessor, apply_processors, log_softmax

Progress = Callable[[int, int], None]
"""``(prompt tokens processed, prompt tokens in all)``."""

_CLEAR_EVERY = 256
"""Tokens between two calls of ``mx.clear_cache``, mlx-lm's own interval: bounds the allocator's cache in long runs."""


@dataclass(frozen=True)
class KVQuantization:
    """mlx-lm's KV-cache quantisation: caches longer than ``start`` positions are stored with ``bits``."""

    bits: int | None = None
    group_size: int = 64
    start: int = 0

    def apply(self, caches: list[Any]) -> None:
        """Quantise the caches that are due, in place in the list.

        Raises:
            OptionError: the model's head width does not divide into groups.
        """
        if self.bits is None:
            return
        try:
            maybe_quantize_kv_cache(caches, self.start, self.group_size, self.bits)
        except ValueError as error:
            raise OptionError(f"kv_group_size: found {self.group_size}, which this model refuses: {error}") from error

    def check(self, caches: Sequence[Any]) -> None:
        """Raises UnsupportedError where mlx-lm has no quantised form of a cache, or would quantise none at all."""
        if self.bits is None:
            return
        if not any(isinstance(cache, QuantizedKVCache) or hasattr(cache, "to_quantized") for cache in caches):
            kinds = ", ".join(sorted({type(cache).__name__ for cache in caches})) or "no caches"
            raise UnsupportedError(f"kv_bits: found {kinds}, expected a cache that mlx-lm can quantise")
        for index, cache in enumerate(caches):
            if isinstance(cache, RotatingKVCache):
                raise UnsupportedError(
                    f"kv_bits: found a {type(cache).__name__} as cache {index}, expected caches that mlx-lm can "
                    "quantise; sliding-window caches are not among them"
                )

    def rows_before_start(self, position: int) -> int | None:
        """How many rows one forward may write without crossing ``start``, where plain decoding would quantise between
        two of them; ``None`` when there is no such limit."""
        return self.start - position if self.bits is not None and position < self.start else None


@dataclass(frozen=True)
class Request:
    """What one decoding was asked for.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: budget of kept tokens; -1 for none.
        stop_tokens: ids that end the text; the one that does is kept as the last token.
        judge: greedy, rejection or external.
        processors: mlx-lm logits processors, in order.
        depth: the depth policy; not asked when there is no draft session.
        key: PRNG key, required by judges that sample.
        prefill_step_size: rows of a prefill chunk (mlx-lm's default).
        reusable: the caller keeps the caches: leave exactly prompt + kept tokens in them.
    """

    prompt: list[int]
    max_tokens: int
    stop_tokens: frozenset[int]
    judge: Judge
    depth: DepthPolicy
    processors: Sequence[LogitsProcessor] = ()
    key: mx.array | None = None
    prefill_step_size: int = 2048
    kv: KVQuantization = field(default_factory=KVQuantization)
    reusable: bool = False
    progress: Progress | None = None


def to_host(values: mx.array) -> list[int]:
    """The one place where the host waits for the device; called once a round."""
    return values.tolist()  # type: ignore[return-value]


class Decoding:
    """One sequence, from its prompt to its end.

    Iterate over :meth:`rounds`, then call :meth:`close` with the number of tokens kept of the last round (fewer than it
    brought when a stop string or the consumer ended the text inside it). After ``close`` a reusable cache holds
    exactly prompt + kept tokens, on every path: stop, budget, cancel, and an error that is not the target's own.
    """

    def __init__(
        self,
        target: Target,
        caches: list[Any],
        request: Request,
        *,
        session: DraftSession | None = None,
        tap_layers: tuple[int, ...] = (),
        max_depth: int = 0,
        position: int = 0,
        stats: Stats,
    ) -> None:
        """``caches`` already hold ``position`` positions; ``session`` stands at the same one."""
        self.target, self.caches, self.request, self.stats = target, caches, request, stats
        self.session = session
        self._taps = tap_layers
        self._max_depth = max_depth
        self.position = position
        self._anchor, self._anchor_id = mx.array(request.prompt[-1:], mx.int32), request.prompt[-1]
        self._key = request.key
        # mlx-lm processors see every token fed so far; kept on the device, and only when somebody looks.
        self._history = mx.array(request.prompt[:-1], mx.int32) if request.processors else None
        self._open: _OpenRound | None = None
        # Whether the anchor's row is in the caches already, or an error on its way there left that unknown.
        self._fed = False
        self._prefilled = False
        self.parked = False

    # ---------------------------------------------------------------- prefill

    def prefill(self) -> None:
        """Feed the prompt but its last token, in mlx-lm's chunks, so that caches equal those of plain decoding."""
        prompt, step = self.request.prompt, self.request.prefill_step_size
        progress = self.request.progress or (lambda done, total: None)
        total, done = len(prompt), 0
        progress(0, total)
        while total - done > 1:
            rows = min(step, total - done - 1)
            ids = mx.array(prompt[done : done + rows], mx.int32)[None]
            _, features = self.target.forward(ids, self.caches, self._taps)
            self.request.kv.apply(self.caches)
            self._advance(prompt[done : done + rows], features)
            mx.eval(self._state())
            done += rows
            progress(done, total)
            mx.clear_cache()
        self._prefilled = True

    # ----------------------------------------------------------------- rounds

    def rounds(self) -> Iterator[Round]:
        """Yield rounds until a stop token or the budget. Prefill must have run."""
        while self.session is not None:
            outcome = self._round(self._next_depth())
            self._finish_round(outcome)
            yield outcome
            if outcome.finish_reason:
                return
        yield from self._plain_rounds()

    def close(self, kept: int) -> None:
        """End the sequence after ``kept`` tokens of the last round; see the class."""
        last, self._open = self._open, None
        if not self.request.reusable:
            return
        if last is not None:
            self._settle(last, kept)
        elif self._prefilled and not self._fed:
            self._feed_anchor()
        self.request.kv.apply(self.caches)
        mx.eval(self._state())

    def _budget(self) -> int | None:
        """Tokens that may still be kept."""
        return None if self.request.max_tokens < 0 else self.request.max_tokens - self.stats.tokens

    def _next_depth(self) -> int:
        limit = self._max_depth
        budget = self._budget()
        if budget is not None:
            limit = min(limit, budget - 1)
        rows = self.request.kv.rows_before_start(self.position)
        if rows is not None:
            limit = min(limit, rows - 1)
        return self.request.depth.choose(limit) if limit > 0 else 0

    def _round(self, depth: int) -> Round:
        """Draft, verify, accept, commit; one synchronisation. An error on the way leaves the caches as they were."""
        session = self.session
        assert session is not None
        # Quantising replaces cache objects, so it waits until the last round can no longer be cut shorter.
        # The last round is final: its transaction lets go of the window it held.
        self._open = None
        self.request.kv.apply(self.caches)
        draft_key, judge_key = self._keys()
        judge = self.request.judge
        proposal = session.propose(self._anchor, depth, judge.draft_sampler(draft_key)) if depth else None
        block = self._anchor if proposal is None else mx.concatenate([self._anchor, proposal.tokens])
        with Speculation.begin(self.caches, block.shape[0]) as speculation:
            logits, features = self.target.forward(block[None], self.caches, self._taps)
            logprobs = self._logprobs(logits[0], block)
            accepted, token = judge.judge(logprobs, proposal, judge_key)
            drafted, accepted_count, own, finite = _read(proposal, accepted, token)
            tokens, finish = self._cut([*drafted[:accepted_count], own])
            outcome = Round(tokens, min(accepted_count, len(tokens)), len(drafted), logprobs, finish)
            keep = len(tokens)
            if finish and self.request.reusable and keep <= accepted_count:
                # The last kept token was proposed, so its row is in the block: the cache that is used again needs it.
                keep += 1
            speculation.commit(keep)
        self._remember(block[:keep])
        self._open = _OpenRound(speculation, self.position, accepted_count)
        self._advance([self._anchor_id, *drafted][:keep], features)
        self._anchor, self._anchor_id, self._fed = token, own, False
        if not finite:
            self._park("the draft's logits were not finite; the rest of this answer was decoded plainly")
        self.request.depth.observe(len(drafted), accepted_count)
        return outcome

    def _prompt_done(self) -> None:
        """The prompt's last token went through the target with the first round."""
        if self.request.progress is not None:
            self.request.progress(len(self.request.prompt), len(self.request.prompt))

    def _finish_round(self, outcome: Round) -> None:
        self.stats.count(outcome)
        if self.stats.rounds == 1:
            self._prompt_done()
        # Everything is scheduled before the caller sees a token, so the next call may come from another thread.
        mx.async_eval(self._state())
        if self.stats.tokens // _CLEAR_EVERY != (self.stats.tokens - len(outcome.tokens)) // _CLEAR_EVERY:
            mx.clear_cache()

    def _plain_rounds(self) -> Iterator[Round]:
        """Plain decoding, one token ahead of the host: the next step is scheduled before this token is read."""
        budget = self._budget()
        if budget == 0:
            return
        self._open = None
        self.request.kv.apply(self.caches)
        logprobs, token = self._plain_step()
        if not self.stats.rounds:
            self._prompt_done()
        while True:
            self._anchor, self._fed = token, False
            ahead, failure, position = None, None, self.position
            if budget is None or budget > 1 or self.request.reusable:
                try:
                    ahead = self._plain_step()
                except Exception as error:
                    if self.position == position:
                        raise
                    # A callback's, over the next token: this one, whose row is in the caches, is handed out first.
                    failure = error
            tokens, finish = self._cut(to_host(token))
            outcome = Round(tokens, 0, 0, logprobs, finish)
            self.stats.count(outcome)
            if self.stats.tokens % _CLEAR_EVERY == 0:
                mx.clear_cache()
            yield outcome
            if finish:
                return
            if failure is not None:
                raise failure
            assert ahead is not None
            logprobs, token = ahead
            budget = self._budget()

    def _plain_step(self) -> tuple[mx.array, mx.array]:
        """Forward the anchor; schedule and return ``logprobs [1, V]`` and the chosen token ``[1]``."""
        _, judge_key = self._keys()
        self._fed = True
        logits, _ = self.target.forward(self._anchor[None], self.caches)
        self.position += 1
        logprobs = self._logprobs(logits[0], self._anchor)
        self.request.kv.apply(self.caches)
        token = self.request.judge.judge(logprobs, None, judge_key).token
        self._remember(self._anchor)
        mx.async_eval(token, logprobs)
        return logprobs, token

    # ---------------------------------------------------------------- details

    def _keys(self) -> tuple[mx.array | None, mx.array | None]:
        if not self.request.judge.needs_key:
            return None, None
        assert self._key is not None
        self._key, draft_key, judge_key = mx.split(mx.random.split(self._key, 3), 3)
        self._key = self._key[0]
        return draft_key[0], judge_key[0]

    def _logprobs(self, logits: mx.array, block: mx.array) -> mx.array:
        """``[rows, V]`` after processors, each row with the history up to its own token."""
        if self._history is not None:
            logits = apply_processors(self.request.processors, mx.concatenate([self._history, block]), logits)
        return log_softmax(logits)

    def _remember(self, fed: mx.array) -> None:
        if self._history is not None:
            self._history = mx.concatenate([self._history, fed])

    def _cut(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], str | None]:
        """Cut at the earliest event in token order: a stop token within the budget, else the budget."""
        budget = self._budget()
        within = tokens if budget is None else tokens[:budget]
        for index, token in enumerate(within):
            if token in self.request.stop_tokens:
                return tuple(within[: index + 1]), "stop"
        return tuple(within), "length" if budget is not None and len(within) == budget else None

    def _advance(self, tokens: Sequence[int], features: mx.array | None) -> None:
        """These tokens are part of the sequence now: tell the draft."""
        if self.session is not None and tokens:
            rows = None if features is None else features[:, : len(tokens)]
            self.session.commit(rows, self.position, tokens)
        self.position += len(tokens)

    def _park(self, reason: str) -> None:
        self.session, self.parked = None, True
        self.stats.mode, self.stats.mode_reason, self.stats.depth = "plain", reason, 0

    def _state(self) -> list[mx.array]:
        session = [] if self.session is None else list(self.session.arrays())
        extra = [a for a in (self._history, self._key) if a is not None]
        return [*cache_arrays(self.caches), *session, *extra]

    def _settle(self, last: _OpenRound, kept: int) -> None:
        """Bring caches and draft to prompt + kept tokens after a text that ended inside the last round."""
        if kept > last.accepted:
            self._feed_anchor()
            return
        rows = kept + 1
        if last.position + rows != self.position:
            last.speculation.commit(rows)
            if self.session is not None:
                self.session.rewind(min(self.session.position, last.position + rows))
            self.position = last.position + rows

    def _feed_anchor(self) -> None:
        _, features = self.target.forward(self._anchor[None], self.caches, self._taps)
        self._advance([self._anchor_id], features)


@dataclass(frozen=True)
class _OpenRound:
    """The last round, kept so that it can still be cut shorter: its transaction, where it began, what was accepted."""

    speculation: Speculation
    position: int
    accepted: int


def _read(proposal: Proposal | None, accepted: mx.array, token: mx.array) -> tuple[list[int], int, int, bool]:
    """Bring a round's outcome to the host in one transfer: proposed tokens, accepted count, own token, finiteness."""
    parts = [accepted.reshape(1), token]
    if proposal is not None:
        finite = mx.array(True) if proposal.finite is None else proposal.finite
        parts += [finite.reshape(1), proposal.tokens]
    accepted_count, own, *rest = to_host(mx.concatenate([part.astype(mx.int32) for part in parts]))
    return rest[1:], accepted_count, own, bool(rest[0]) if rest else True
