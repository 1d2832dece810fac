"""The loop's invariants (numbered in ``docs/architecture.md``), with drafts perfect, hostile and scripted.

Targets are float32: on the CPU a verified row and a plain step then choose the same token, and any difference is ours.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence

import mlx.core as mx
import pytest

from mlx_dflash.cache import cache_arrays, positions, temporal_rows
from mlx_dflash.decoding import acceptance, loop
from mlx_dflash.decoding.loop import KVQuantization
from tests import stub_drafts
from tests.decoding.runs import TARGETS, VOCAB, Run, plain, prompt_of, run, start, target

TOKENS = 40
LENGTHS = [1, 5, 8, 9, 30]
"""Prompt lengths: a single token, below the window of 8, at it, just above it, far above it."""

ACCEPTS = [0, 3, 1, 15, 2, 0, 0, 5]


def draft_for(name: str, sequence: Sequence[int], **options):
    make = {
        "perfect": stub_drafts.perfect,
        "hostile": stub_drafts.hostile,
        "scripted": lambda seq, **o: stub_drafts.scripted(seq, ACCEPTS, **o),
    }[name]
    return make(sequence, vocab_size=VOCAB, **options)


def reference(kind: str, length: int, tokens: int = TOKENS) -> tuple[list[int], list[int]]:
    prompt = prompt_of(length)
    return prompt, list(plain(kind, tuple(prompt), tokens))


# ------------------------------------------------------------------ 1: greedy identity


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["perfect", "hostile", "scripted"])
def test_greedy_text_is_plain_mlx_lms_for_every_draft_and_prompt_length(kind: str, length: int, name: str) -> None:
    """Invariant 1, R34: also across the wrap of the sliding window."""
    prompt, expected = reference(kind, length)
    for depth in (3, 15):
        result = run(kind, prompt, draft_for(name, prompt + expected), depth=depth, max_tokens=TOKENS)
        assert result.tokens == expected, depth


@pytest.mark.parametrize("depth", range(1, 16))
def test_greedy_text_is_plain_at_every_depth(depth: int) -> None:
    """Invariant 1, over depths; rounds with every accept length from none to all."""
    prompt, expected = reference("gemma4", 9)
    accepts = [count % (depth + 1) for count in range(depth + 3)]
    draft = stub_drafts.scripted(prompt + expected, accepts, vocab_size=VOCAB)
    result = run("gemma4", prompt, draft, depth=depth, max_tokens=TOKENS)
    assert result.tokens == expected
    assert {len(outcome.tokens) for outcome in result.rounds[:-1]} <= set(range(1, depth + 2))


def test_plain_rounds_are_mlx_lms() -> None:
    for kind in TARGETS:
        prompt, expected = reference(kind, 9)
        assert run(kind, prompt, max_tokens=TOKENS).tokens == expected, kind


@pytest.mark.parametrize("position", range(10))
@pytest.mark.parametrize("name", ["perfect", "hostile", "scripted"])
def test_stop_token_inside_an_accepted_block_ends_the_text_there(position: int, name: str) -> None:
    """Invariants 1 and 5, R25: whatever slot of the block the stop token falls on."""
    prompt, expected = reference("gemma4", 9)
    stop = expected[position]
    wanted = expected[: expected.index(stop) + 1]
    draft = draft_for(name, prompt + expected)
    result = run("gemma4", prompt, draft, depth=8, max_tokens=TOKENS, stop_tokens=[stop])
    assert result.tokens == wanted
    assert result.finish_reason == "stop"
    assert result.decoding.stats.tokens == len(wanted)


# ------------------------------------------------------------------ 3: caches


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("length", LENGTHS)
def test_after_every_round_caches_equal_those_of_plain_decoding(kind: str, length: int) -> None:
    """Invariant 3: arrays, not lengths. The sequential twin is fed one token at a time."""
    prompt, expected = reference(kind, length)
    twin = start(kind, prompt)
    fed = len(prompt) - 1
    everything = prompt + expected

    def compare(result: Run, outcome) -> None:
        nonlocal fed
        while fed < result.decoding.position:
            target(kind).forward(mx.array([[everything[fed]]]), twin.caches)
            fed += 1
        assert positions(result.caches) == positions(twin.caches) == result.decoding.position
        for mine, other in zip(result.caches, twin.caches, strict=True):
            for a, b in zip(temporal_rows(mine), temporal_rows(other), strict=True):
                assert a.shape == b.shape
                assert mx.allclose(a, b, atol=1e-4, rtol=1e-4).item()

    result = run(kind, prompt, draft_for("scripted", everything), depth=7, max_tokens=TOKENS, each=compare)
    assert result.tokens == expected


@pytest.mark.parametrize("length", [15, 16, 17, 18, 33])
def test_prefill_leaves_byte_equal_caches_in_both_modes(length: int) -> None:
    """R38: the same chunks, through the same path; chunk edges at 8 and 16."""
    for kind in ("gemma4", "full"):
        prompt, expected = reference(kind, length)
        with_draft = start(kind, prompt, draft_for("perfect", prompt + expected), prefill_step_size=8)
        without = start(kind, prompt, prefill_step_size=8)
        for a, b in zip(cache_arrays(with_draft.caches), cache_arrays(without.caches), strict=True):
            assert mx.array_equal(a, b).item()


def test_the_draft_is_told_every_committed_position_once_and_in_order() -> None:
    """The features of prompt and text that reach the session are those of one plain pass over the sequence."""
    prompt, expected = reference("gemma4", 21)
    draft = draft_for("scripted", prompt + expected, taps=(0, 2))
    result = run("gemma4", prompt, draft, depth=6, max_tokens=TOKENS, prefill_step_size=8)
    session = draft.sessions[0]
    told = mx.concatenate(session.features, axis=1)
    assert told.shape[1] == session.position == result.decoding.position
    sequence = mx.array([(prompt + expected)[: session.position]])
    _, features = target("gemma4").forward(sequence, target("gemma4").make_caches(), (0, 2))
    assert mx.allclose(told, features, atol=1e-3, rtol=1e-3).item()


# ------------------------------------------------------------------ 4: one synchronisation


@pytest.mark.parametrize("name", ["perfect", "hostile"])
def test_a_round_waits_for_the_device_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 4, first half: rounds and host transfers are counted together."""
    prompt, expected = reference("gemma4", 9)
    waits = []
    original = loop.to_host
    monkeypatch.setattr(loop, "to_host", lambda values: waits.append(values.size) or original(values))
    decoding = start("gemma4", prompt, draft_for(name, prompt + expected), depth=7, max_tokens=TOKENS)
    monkeypatch.setattr(mx, "eval", lambda *a: pytest.fail("the loop evaluated something outside to_host"))
    rounds = sum(1 for _ in decoding.rounds())
    assert len(waits) == rounds


def test_nothing_but_to_host_waits_for_the_device() -> None:
    """Invariant 4, second half: no other line of the hot path can read a value."""
    for module in (loop, acceptance):
        tree = ast.parse(inspect.getsource(module))
        readers = [
            (node.lineno, node.attr)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr in {"item", "tolist", "__array__"}
        ]
        assert len(readers) == (1 if module is loop else 0), readers


# ------------------------------------------------------------------ 5: budgets and what is left behind


@pytest.mark.parametrize("budget", range(1, 33))
def test_the_budget_is_exact_and_the_cache_holds_prompt_plus_kept_tokens(budget: int) -> None:
    """Invariant 5, R27, R28: budgets 1..2*block, perfect draft, a cache that is used again."""
    prompt, expected = reference("gemma4", 9)
    caches = target("gemma4").make_caches()
    result = run("gemma4", prompt, draft_for("perfect", prompt + expected), max_tokens=budget, caches=caches)
    assert result.tokens == expected[:budget]
    assert result.finish_reason == "length"
    assert positions(caches) == len(prompt) + budget


@pytest.mark.parametrize("budget", [1, 4, 9])
@pytest.mark.parametrize("stop_at", [0, 3, 4, 8, 9])
@pytest.mark.parametrize("block", [2, 5, 16])
def test_the_earliest_event_in_token_order_wins(budget: int, stop_at: int, block: int) -> None:
    """R26: a stop within the budget is a stop, one beyond it is not reached."""
    prompt, expected = reference("full", 9)
    stop = expected[stop_at]
    first = expected.index(stop)
    result = run(
        "full",
        prompt,
        draft_for("perfect", prompt + expected, block_size=block),
        max_tokens=budget,
        stop_tokens=[stop],
    )
    assert result.finish_reason == ("stop" if first < budget else "length")
    assert result.tokens == expected[: min(first + 1, budget)]


@pytest.mark.parametrize("kind", ["gemma4", "full", "sliding"])
@pytest.mark.parametrize("name", ["perfect", "hostile", "scripted", "plain"])
@pytest.mark.parametrize("kept", [1, 2, 3, 6, 7, 8, 13, 20])
def test_a_cancelled_text_leaves_a_cache_that_continues_as_a_cold_run_would(kind: str, name: str, kept: int) -> None:
    """R28: cancel after each streamed token, then go on from the cache; compare with a run that never stopped."""
    prompt, expected = reference(kind, 9)
    draft = None if name == "plain" else draft_for(name, prompt + expected)
    caches = target(kind).make_caches()
    decoding = start(kind, prompt, draft, depth=6, max_tokens=TOKENS, caches=caches)
    seen = 0
    for outcome in decoding.rounds():
        taken = min(len(outcome.tokens), kept - seen)
        seen += taken
        if seen == kept:
            break
    decoding.close(taken)
    assert positions(caches) == len(prompt) + kept
    question = prompt_of(3, seed=1)
    continued = run(kind, question, None, max_tokens=10, caches=caches).tokens
    cold = list(plain(kind, tuple(prompt + expected[:kept] + question), 10))
    assert continued == cold


def test_a_failing_verify_leaves_the_caches_as_they_were() -> None:
    """An error in the middle of a round commits nothing."""
    prompt, expected = reference("gemma4", 12)

    class Broken(stub_drafts.StubSession):
        def propose(self, anchor, depth, sampler):
            proposal = super().propose(anchor, depth, sampler)
            if self.rounds == 3:
                raise RuntimeError("boom")
            return proposal

    draft = draft_for("scripted", prompt + expected)
    draft.open = lambda model, position=0, memory=None: Broken(draft, position)
    decoding = start("gemma4", prompt, draft, depth=5, max_tokens=TOKENS)
    committed = []
    with pytest.raises(RuntimeError, match="boom"):
        for outcome in decoding.rounds():
            committed.extend(outcome.tokens)
    assert positions(decoding.caches) == len(prompt) - 1 + len(committed)


# ------------------------------------------------------------------ attribution, accounts, quantised caches


def test_every_token_says_who_wrote_it() -> None:
    """R33: the accepted ones are the draft's, the one after the last accepted is always the target's."""
    prompt, expected = reference("full", 9)
    accepts = [2, 0, 4, 1]
    draft = stub_drafts.scripted(prompt + expected, accepts, vocab_size=VOCAB)
    result = run("full", prompt, draft, depth=7, max_tokens=TOKENS)
    for index, outcome in enumerate(result.rounds[:-1]):
        assert outcome.accepted == accepts[index % 4]
        assert len(outcome.tokens) == outcome.accepted + 1


def test_a_perfect_draft_commits_whole_blocks_and_the_account_says_so() -> None:
    """R02: with a draft and nothing else said, speculation is on and saves forwards."""
    prompt, expected = reference("full", 9)
    result = run("full", prompt, draft_for("perfect", prompt + expected), max_tokens=32)
    stats = result.decoding.stats
    assert (stats.mode, stats.rounds, stats.tokens) == ("speculative", 2, 32)
    assert stats.acceptance_length == 16.0
    assert run("full", prompt, max_tokens=32).decoding.stats.acceptance_length == 1.0


@pytest.mark.parametrize("budget", [8, 64])
def test_short_requests_speculate_too(budget: int) -> None:
    """R90: no hidden switch; forwards are counted."""
    prompt = prompt_of(9)
    expected = list(plain("full", tuple(prompt), budget))
    result = run("full", prompt, draft_for("perfect", prompt + expected), max_tokens=budget)
    assert result.decoding.stats.mode == "speculative"
    assert len(result.rounds) == -(-budget // 16)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("begin", [0, 13, 20])
def test_quantised_kv_with_a_draft_equals_quantised_kv_without(bits: int, begin: int) -> None:
    """R39: also when quantisation begins in the middle of the text, where a block must not cross the line."""
    prompt = prompt_of(9)
    kv = KVQuantization(bits, 32, begin)
    expected = list(plain("wide", tuple(prompt), 120, kv))
    result = run("wide", prompt, draft_for("scripted", prompt + expected), depth=7, max_tokens=120, kv=kv)
    assert result.tokens == expected


def test_a_draft_with_logits_that_are_not_finite_is_parked_once_and_the_text_goes_on() -> None:
    """R13: detected in the round it happens, said in the account, and the text stays the target's."""
    prompt, expected = reference("gemma4", 9)

    class Overflowing(stub_drafts.StubSession):
        def propose(self, anchor, depth, sampler):
            proposal = super().propose(anchor, depth, sampler)
            overflow = mx.array(self.rounds < 3)
            return type(proposal)(proposal.tokens, finite=overflow)

    draft = draft_for("perfect", prompt + expected)
    draft.open = lambda model, position=0, memory=None: Overflowing(draft, position)
    result = run("gemma4", prompt, draft, depth=4, max_tokens=TOKENS)
    assert result.tokens == expected
    stats = result.decoding.stats
    assert stats.mode == "plain" and "not finite" in stats.mode_reason
    assert [outcome.depth for outcome in result.rounds[:4]] == [4, 4, 4, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scripted", "plain"])
def test_a_long_text_keeps_memory_flat(name: str) -> None:
    """R59: over 5,000 tokens nothing grows but the caches' own buffers; sliding layers only, so these do not either."""
    prompt, expected = reference("all_sliding", 9)
    draft = None if name == "plain" else draft_for(name, prompt + expected * 130)
    decoding = start("all_sliding", prompt, draft, depth=5, max_tokens=5000)
    held, seen = [], 0
    for outcome in decoding.rounds():
        seen += len(outcome.tokens)
        if draft is not None:
            # The stub keeps every feature row for other tests; a real draft's window drops them.
            draft.sessions[0].features.clear()
        if seen > (1000, 4900, 5000)[len(held)]:
            mx.synchronize()
            mx.clear_cache()
            held.append(mx.get_active_memory())
    assert seen == 5000
    assert held[1] - held[0] < 20_000
