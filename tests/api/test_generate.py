"""``stream_generate`` and ``generate`` behave as mlx-lm's, with a draft and without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.utils import load_tokenizer

import mlx_dflash
from mlx_dflash import OptionError, UnsupportedError, stream_generate
from mlx_dflash.cache import positions
from mlx_dflash.decoding.loop import KVQuantization
from mlx_dflash.drafts.block import BlockDraft
from mlx_dflash.pair import Pair
from mlx_dflash.target import Target
from tests import stub_drafts, tiny_models
from tests.api.conftest import BYTE_VOCAB, Tiny
from tests.versions import BEFORE_0_32

BUNDLED_PAIR = Path(mlx_dflash.__file__).parent / "data" / "pair"
PROMPT = "def f(x):"
TOKENS = 48


def load_tokenizer_of(vocab: int) -> Any:
    with TemporaryDirectory() as folder:
        tiny_models.save_tokenizer(Path(folder), vocab)
        return load_tokenizer(Path(folder), eos_token_ids=[1])


def seeing(earlier: mx.array, processor: Any) -> Any:
    return lambda tokens, logits: processor(mx.concatenate([earlier, tokens]), logits)


def tokens_of(responses: list[Any]) -> list[int]:
    return [response.token for response in responses]


# ------------------------------------------------------------------ the bundled pair


FLOOR = 4.0
"""Tokens a round that the bundled pair must commit on its own domain; a miswired draft cannot reach it (see below)."""

PRIME = "Write a Python function that checks whether a number is prime."


@pytest.mark.parametrize("prompt", ["def fibonacci(", "def is_prime(n", PRIME])
def test_the_bundled_pair_says_what_plain_mlx_lm_says_and_says_it_in_fewer_rounds(bundled: Any, prompt: str) -> None:
    """R07, R12: the floor is out of reach for a draft whose taps or slots are off by one (about 1.2)."""
    pair, tokenizer = bundled
    if not prompt.startswith("def"):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    plain = list(mlx_lm.stream_generate(pair.target.model, tokenizer, prompt, max_tokens=TOKENS))
    fast = list(stream_generate(pair, tokenizer, prompt, max_tokens=TOKENS))
    assert tokens_of(fast) == tokens_of(plain)
    assert [r.text for r in fast] == [r.text for r in plain]
    assert fast[-1].mode == "speculative"
    print(f"acceptance length {fast[-1].acceptance_length:.2f}")
    assert fast[-1].acceptance_length > FLOOR


def acceptance(pair: Any, tokenizer: Any, **options: Any) -> float:
    """Over several prompts of the bundled pair's domain, of all rounds together."""
    prompts = ("def fibonacci(", "def is_prime(n", "def gcd(a, b", "def factorial(n", "def reverse_string(s")
    runs = [list(stream_generate(pair, tokenizer, prompt, max_tokens=60, **options))[-1] for prompt in prompts]
    return sum(run.generation_tokens for run in runs) / sum(run.rounds for run in runs)


@pytest.mark.parametrize(
    "miswired", [{"target_layer_ids": [1, 3, 5]}, {"mask_token_id": 4}, {"input_embedding_scale": 0.05}]
)
def test_a_miswired_draft_stays_below_the_floor(bundled: Any, tmp_path: Path, miswired: dict) -> None:
    """Verification hides every draft bug: the text stays right and only the acceptance goes, so that must be seen."""
    source = BUNDLED_PAIR / "draft"
    config = json.loads((source / "config.json").read_text())
    config["dflash_config"] |= miswired
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    pair, tokenizer = mlx_dflash.load(BUNDLED_PAIR / "target", tmp_path)
    assert acceptance(pair, tokenizer) < FLOOR < acceptance(*bundled)


def test_a_draft_read_one_slot_off_stays_below_the_floor(bundled: Any) -> None:
    """R07: predict-at read as predict-next. The text is still the target's; only the acceptance tells."""
    pair, tokenizer = bundled
    draft = pair.draft
    shifted = BlockDraft(replace(draft.config, first_row=0), draft.parts, draft.folder)
    off = Pair(pair.target, shifted, end_tokens=pair.end_tokens)
    text = "".join(r.text for r in stream_generate(off, tokenizer, "def fibonacci(", max_tokens=40))
    assert text == "".join(r.text for r in stream_generate(pair, tokenizer, "def fibonacci(", max_tokens=40))
    assert acceptance(off, tokenizer) < FLOOR / 2


def test_sampling_keeps_most_of_the_acceptance_on_the_bundled_pair(bundled: Any) -> None:
    """R49: positions of a block are marginals, so proposing the likeliest tokens beats drawing them one by one."""
    one_hot, drawn = (
        sum(acceptance(*bundled, temp=0.7, seed=seed, sample_draft=sample) for seed in (1, 2, 3)) / 3
        for sample in (False, True)
    )
    assert one_hot > 0.6 * acceptance(*bundled)
    assert one_hot > drawn


# ------------------------------------------------------------------ drop-in


@pytest.mark.parametrize("name", ["perfect", "hostile", "scripted"])
def test_responses_are_mlx_lms_one_by_one(tiny: Tiny, name: str) -> None:
    """Text, token, finish reason and log-probabilities of every response, drafted or not."""
    plain = tiny.plain(PROMPT, TOKENS)
    fast = list(stream_generate(tiny.pair(name, PROMPT, TOKENS), tiny.tokenizer, PROMPT, max_tokens=TOKENS))
    assert len(fast) == len(plain)
    for mine, theirs in zip(fast, plain, strict=True):
        assert (mine.token, mine.text, mine.finish_reason) == (theirs.token, theirs.text, theirs.finish_reason)
        assert (mine.prompt_tokens, mine.generation_tokens) == (theirs.prompt_tokens, theirs.generation_tokens)
        assert mine.logprobs.shape == theirs.logprobs.shape
        assert mx.allclose(mine.logprobs, theirs.logprobs, atol=1e-3).item()
    assert fast[-1].generation_tps > 0 and fast[-1].prompt_tps > 0 and fast[-1].peak_memory > 0


def test_every_response_says_truthfully_who_wrote_its_token(tiny: Tiny) -> None:
    """R33: the flags follow the accept pattern, and the token after the last accepted one is never the draft's."""
    accepts = [3, 0, 5, 1]
    pair = tiny.pair("scripted", PROMPT, 60, accepts=accepts)
    responses = list(stream_generate(pair, tiny.tokenizer, PROMPT, max_tokens=26))
    pattern = [flag for count in accepts * 2 for flag in [True] * count + [False]]
    assert [response.from_draft for response in responses] == pattern
    assert responses[-1].rounds == 8
    assert responses[-1].acceptance_length == 26 / 8


@pytest.mark.parametrize("budget", [8, 64, 256])
def test_a_draft_and_nothing_else_said_speculates_whatever_the_budget(tiny: Tiny, budget: int) -> None:
    """R02, R90: no hidden switch; the effective depth and the number of forwards are in the result."""
    pair = tiny.pair("perfect", PROMPT, budget)
    responses = list(stream_generate(pair, tiny.tokenizer, PROMPT, max_tokens=budget))
    assert {(response.mode, response.mode_reason, response.depth) for response in responses} == {
        ("speculative", None, 15)
    }
    assert responses[-1].rounds == -(-len(responses) // 16)


def test_generate_returns_the_joined_text_and_a_bare_mlx_lm_model_decodes_plainly(tiny: Tiny) -> None:
    expected = mlx_lm.generate(tiny.target.model, tiny.tokenizer, PROMPT, max_tokens=20)
    assert mlx_dflash.generate(tiny.target.model, tiny.tokenizer, PROMPT, max_tokens=20) == expected
    pair = tiny.pair("perfect", PROMPT, 20)
    assert mlx_dflash.generate(pair, tiny.tokenizer, PROMPT, max_tokens=20) == expected
    last = list(stream_generate(tiny.target.model, tiny.tokenizer, PROMPT, max_tokens=3))[-1]
    assert (last.mode, last.mode_reason, last.acceptance_length) == ("plain", "no draft is loaded", 1.0)


def test_the_pair_stands_where_mlx_lm_expects_its_model(tiny: Tiny) -> None:
    pair = tiny.pair("perfect", PROMPT, 8)
    assert pair.layers is tiny.target.model.layers
    assert tokens_of(list(mlx_lm.stream_generate(pair, tiny.tokenizer, PROMPT, max_tokens=8))) == tokens_of(
        tiny.plain(PROMPT, 8)
    )


def test_prompts_are_text_ids_or_arrays(tiny: Tiny) -> None:
    ids = tiny.tokenizer.encode(PROMPT)
    answers = {
        tuple(tokens_of(list(stream_generate(tiny.target.model, tiny.tokenizer, prompt, max_tokens=5))))
        for prompt in (PROMPT, ids, mx.array(ids))
    }
    assert len(answers) == 1


# ------------------------------------------------------------------ what ends a text


@pytest.mark.parametrize("cut", range(1, 30, 3))
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["perfect", "scripted"])
def test_a_stop_string_ends_the_text_wherever_it_falls(tiny: Tiny, cut: int, size: int, name: str) -> None:
    """R30: split over tokens and across the edge of a block; pieces joined equal the plain text up to the match."""
    text = "".join(response.text for response in tiny.plain(PROMPT, TOKENS))
    stop = text[cut : cut + size]
    responses = list(
        stream_generate(tiny.pair(name, PROMPT, TOKENS), tiny.tokenizer, PROMPT, max_tokens=TOKENS, stop=[stop])
    )
    assert "".join(response.text for response in responses) == text[: text.index(stop)]
    assert responses[-1].finish_reason == "stop"
    assert all(response.finish_reason is None for response in responses[:-1])


@pytest.mark.parametrize("slot", range(6))
def test_a_hook_sees_tokens_one_at_a_time_and_stops_inside_the_block(tiny: Tiny, slot: int) -> None:
    """R32: nothing after the token the hook stopped at is committed."""
    expected = tokens_of(tiny.plain(PROMPT, TOKENS))
    seen: list[int] = []

    def hook(token: int) -> bool:
        seen.append(token)
        return len(seen) == slot + 1

    cache = tiny.target.make_caches()
    pair = tiny.pair("perfect", PROMPT, TOKENS)
    responses = list(
        stream_generate(pair, tiny.tokenizer, PROMPT, max_tokens=TOKENS, on_token=hook, prompt_cache=cache)
    )
    assert tokens_of(responses) == seen == expected[: slot + 1]
    assert responses[-1].finish_reason == "stop"
    assert positions(cache) == len(tiny.tokenizer.encode(PROMPT)) + slot + 1


def test_only_kept_tokens_are_counted(tiny: Tiny) -> None:
    """R25: a text stopped inside a block does not boast of the tokens it dropped."""
    pair = tiny.pair("perfect", PROMPT, TOKENS)
    last = list(stream_generate(pair, tiny.tokenizer, PROMPT, max_tokens=TOKENS, on_token=lambda t: True))[-1]
    assert (last.generation_tokens, last.rounds, last.acceptance_length) == (1, 1, 1.0)


@pytest.mark.parametrize("chunks", [1, 2, 5, 9, 17])
@pytest.mark.parametrize("name", ["perfect", "scripted", "plain"])
def test_closing_the_stream_leaves_exactly_what_was_yielded(tiny: Tiny, chunks: int, name: str) -> None:
    """R28: the record, the cache and the stream have one length; the conversation goes on as in a cold run."""
    prompt = tiny.tokenizer.encode(PROMPT)
    expected = tokens_of(tiny.plain(prompt, TOKENS))
    model: Any = tiny.target.model if name == "plain" else tiny.pair(name, prompt, TOKENS)
    cache = tiny.target.make_caches()
    stream = stream_generate(model, tiny.tokenizer, prompt, max_tokens=TOKENS, prompt_cache=cache)
    yielded = [next(stream).token for _ in range(chunks)]
    stream.close()
    assert yielded == expected[:chunks]
    assert positions(cache) == len(prompt) + chunks
    question = [70, 71, 72]
    continued = list(stream_generate(model, tiny.tokenizer, question, max_tokens=8, prompt_cache=cache))
    assert tokens_of(continued) == tokens_of(tiny.plain(prompt + yielded + question, 8))
    if name != "plain":
        assert "already in the prompt cache" in continued[-1].mode_reason


def test_a_prompt_cache_ends_with_every_kept_token_as_mlx_lms_does(tiny: Tiny) -> None:
    prompt = tiny.tokenizer.encode(PROMPT)
    for budget in (1, 5, 16, 17):
        mine, theirs = tiny.target.make_caches(), tiny.target.make_caches()
        pair = tiny.pair("perfect", prompt, TOKENS)
        list(stream_generate(pair, tiny.tokenizer, prompt, max_tokens=budget, prompt_cache=mine))
        tiny.plain(prompt, budget, prompt_cache=theirs)
        assert positions(mine) == positions(theirs) == len(prompt) + budget


@pytest.mark.parametrize("name", ["scripted", "plain"])
@pytest.mark.parametrize("call", [1, 2, 6])
@pytest.mark.parametrize("callback", ["on_token", "logits_processors", "sampler", "prompt_progress_callback"])
def test_an_error_of_a_callback_leaves_one_length_too(tiny: Tiny, name: str, call: int, callback: str) -> None:
    """R28, R65: whichever callback fails, and wherever in a block, pair and cache go on as if it had been a cancel."""
    prompt = tiny.tokenizer.encode(PROMPT)
    expected = tokens_of(tiny.plain(prompt, TOKENS))
    calls, seen = 0, []

    def failing(result: Any = None) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise ZeroDivisionError
        return result

    callbacks: dict[str, Any] = {
        "on_token": lambda token: failing(seen.append(token)),
        "logits_processors": [lambda tokens, logits: failing(logits)],
        "sampler": lambda logprobs: failing(mx.argmax(logprobs, axis=-1)),
        "prompt_progress_callback": lambda done, total: failing() if done == total else None,
    }
    model: Any = tiny.target.model if name == "plain" else tiny.pair(name, prompt, TOKENS)
    cache, yielded = tiny.target.make_caches(), []
    stream = stream_generate(
        model, tiny.tokenizer, prompt, max_tokens=30, prompt_cache=cache, **{callback: callbacks[callback]}
    )
    try:
        for response in stream:
            yielded.append(response.token)
    except ZeroDivisionError:
        assert calls == call
    kept = seen or yielded
    assert kept == expected[: len(kept)]
    assert positions(cache) == len(prompt) + len(kept)
    question = [70, 71, 72]
    continued = list(stream_generate(model, tiny.tokenizer, question, max_tokens=8, prompt_cache=cache))
    assert tokens_of(continued) == tokens_of(tiny.plain(prompt + kept + question, 8))


@pytest.mark.parametrize("name", ["perfect", "plain"])
@pytest.mark.parametrize("length", [1, 2, 9, 17])
def test_prompt_progress_is_reported_as_mlx_lm_does_up_to_the_end(tiny: Tiny, name: str, length: int) -> None:
    prompt = [20 + i for i in range(length)]
    model: Any = tiny.target.model if name == "plain" else tiny.pair(name, prompt, 8)
    mine: list[tuple[int, int]] = []
    theirs: list[tuple[int, int]] = []
    options = {"max_tokens": 6, "prefill_step_size": 8}
    list(
        stream_generate(
            model, tiny.tokenizer, prompt, **options, prompt_progress_callback=lambda *step: mine.append(step)
        )
    )
    tiny.plain(prompt, 6, prefill_step_size=8, prompt_progress_callback=lambda *step: theirs.append(step))
    assert mine == theirs
    assert mine[-1] == (length, length)


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5, "presence_context_size": 40},
        {"frequency_penalty": 0.8},
        {"logit_bias": {40: 4.0, 41: -100.0}},
        {"logits_processors": [lambda tokens, logits: logits - 3.0 * (mx.arange(logits.shape[-1]) == tokens[-1])]},
    ],
    ids=["repetition", "presence", "frequency", "bias", "own processor"],
)
@pytest.mark.parametrize("name", ["perfect", "hostile", "scripted"])
def test_greedy_text_with_any_logits_processor_is_plain_mlx_lms(tiny: Tiny, options: dict, name: str) -> None:
    """R52: history grows inside the block, rejected tokens never enter it."""
    theirs = {k: v for k, v in options.items() if k == "logits_processors"}
    if not theirs:
        theirs = {"logits_processors": mlx_lm.sample_utils.make_logits_processors(**options)}
    if BEFORE_0_32:
        # It shows them the prompt's last token only; what they do when they see all of it is the same.
        hidden = mx.array(tiny.tokenizer.encode(PROMPT)[:-1])
        theirs = {"logits_processors": [seeing(hidden, processor) for processor in theirs["logits_processors"]]}
    expected = tokens_of(tiny.plain(PROMPT, TOKENS, **theirs))
    assert expected != tokens_of(tiny.plain(PROMPT, TOKENS)), "the option must matter"
    known = tiny.tokenizer.encode(PROMPT) + expected
    pair = tiny.pair(name, PROMPT, TOKENS)
    pair.draft.sequence = known
    fast = list(stream_generate(pair, tiny.tokenizer, PROMPT, max_tokens=TOKENS, **options))
    assert tokens_of(fast) == expected
    if name == "perfect":
        assert fast[-1].acceptance_length > 5


def test_every_sampling_parameter_is_honoured_and_the_mode_is_truthful(tiny: Tiny) -> None:
    """R50: two seeds differ at temperature 2; speculation stays on and says so."""
    pair = tiny.pair("perfect", PROMPT, TOKENS)
    texts = set()
    for seed in (1, 2):
        responses = list(stream_generate(pair, tiny.tokenizer, PROMPT, max_tokens=20, temp=2.0, seed=seed))
        texts.add(tuple(tokens_of(responses)))
        assert responses[-1].mode == "speculative"
    assert len(texts) == 2
    greedy = list(stream_generate(pair, tiny.tokenizer, PROMPT, max_tokens=20, temp=2.0, top_k=1, seed=1))
    assert tokens_of(greedy) == tokens_of(tiny.plain(PROMPT, 20))


def test_without_a_seed_mlxs_global_generator_decides(tiny: Tiny) -> None:
    def text() -> list[int]:
        mx.random.seed(9)
        return tokens_of(list(stream_generate(tiny.target.model, tiny.tokenizer, PROMPT, max_tokens=12, temp=2.0)))

    assert text() == text()


def test_a_callers_sampler_is_used_with_a_draft(tiny: Tiny) -> None:
    sampler = mlx_lm.sample_utils.make_sampler(temp=0.0)
    fast = list(
        stream_generate(tiny.pair("scripted", PROMPT, 20), tiny.tokenizer, PROMPT, max_tokens=20, sampler=sampler)
    )
    assert tokens_of(fast) == tokens_of(tiny.plain(PROMPT, 20))
    assert fast[-1].acceptance_length > 1.5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_tokens": 0}, OptionError, "max_tokens: found 0, expected a whole number above 0, or -1"),
        ({"max_tokens": -2}, OptionError, "max_tokens: found -2"),
        ({"depth": 16}, OptionError, "depth: found 16, expected at most 15 .the draft's block_size is 16."),
        ({"depth": -1}, OptionError, "depth: found -1"),
        ({"temp": -1}, OptionError, "temp: found -1"),
        ({"top_pp": 0.3}, OptionError, "top_pp: unknown option; did you mean top_p"),
        ({"seed": -4}, OptionError, "seed: found -4"),
        ({"stop": [""]}, OptionError, "stop: found ''"),
        ({"kv_bits": 7}, OptionError, "kv_bits: found 7"),
        ({"prefill_step_size": 0}, OptionError, "prefill_step_size: found 0"),
        ({"sampler": lambda x: x, "temp": 0.4}, OptionError, "sampler: found together with temp"),
        ({"xtc_probability": 0.5, "temp": 1.0}, UnsupportedError, "xtc_probability: XTC sampling does not run with"),
        ({"draft_model": object()}, UnsupportedError, "draft_model: not an option of mlx-dflash; give the draft to"),
        ({"images": ["cat.png"]}, UnsupportedError, "images: not an option of mlx-dflash; images are not read"),
        ({"draft_kv_bits": 8}, OptionError, "draft_kv_bits: unknown option"),
        ({"temp": 10**400}, OptionError, "temp: found 1000.*, expected a number of 0 or more"),
        ({"plain": "yes"}, OptionError, "plain: found 'yes', expected True or False"),
        ({"sample_draft": None}, OptionError, "sample_draft: found None, expected True or False"),
        ({"prefill_step_size": None}, OptionError, "prefill_step_size: found None"),
        ({"kv_bits": 4.0}, OptionError, "kv_bits: found 4.0, expected one of 2, 3, 4"),
        ({"seed": True}, OptionError, "seed: found True"),
        ({"xtc_probability": 2}, OptionError, "xtc_probability: found 2, expected a number in 0..1"),
        ({"xtc_threshold": 0.9}, OptionError, "xtc_threshold: found 0.9, expected a number in 0..0.5"),
        ({"sampler": lambda x: x, "xtc_probability": 0.4}, OptionError, "sampler: found together with .*xtc_prob"),
        ({"sampler": lambda x: x, "seed": 3}, OptionError, "seed: found together with sampler"),
        ({"xtc_probability": 0.5, "temp": 1.0, "seed": 3}, OptionError, "seed: found together with xtc_probability"),
        ({"sampler": 5}, OptionError, "sampler: found 5, expected something to call"),
        ({"on_token": "x"}, OptionError, "on_token: found 'x', expected something to call"),
        ({"prompt_progress_callback": 5}, OptionError, "prompt_progress_callback: found 5"),
        ({"logits_processors": 5}, OptionError, "logits_processors: found 5, expected a list of functions"),
        ({"logits_processors": [5]}, OptionError, "logits_processors.0.: found 5"),
        ({"logit_bias": [1]}, OptionError, "logit_bias: found list, expected a mapping"),
        ({"logit_bias": {"a": 1}}, OptionError, "logit_bias: found token id 'a', expected 0..271"),
        ({"logit_bias": {5.5: 1}}, OptionError, "logit_bias: found token id 5.5"),
        ({"logit_bias": {5: float("nan")}}, OptionError, "logit_bias of token 5: found nan"),
        ({"repetition_penalty": "x"}, OptionError, "repetition_penalty: found 'x', expected a number of 0 or more"),
        ({"presence_penalty": float("nan")}, OptionError, "presence_penalty: found nan, expected a finite number"),
        ({"frequency_penalty": "x"}, OptionError, "frequency_penalty: found 'x', expected a finite number"),
        ({"stop": 5}, OptionError, "stop: found int, expected a string or a list of strings"),
    ],
)
def test_a_bad_option_is_one_line_before_the_first_token(tiny: Tiny, options: dict, error: type, message: str) -> None:
    """Also R14: the draft's own cache cannot be quantised, and asking for it is refused rather than ignored."""
    pair = tiny.pair("perfect", PROMPT, 4)
    with pytest.raises(error, match=message) as caught:
        stream_generate(pair, tiny.tokenizer, PROMPT, **{"max_tokens": 4, **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: found no tokens"),
        ([5, 9999], "token id 9999"),
        (mx.array([2**32 + 5], mx.int64), "token id 4294967301"),
        (mx.array([1.5]), r"prompt: found mlx.core.float32 of shape \[1\]"),
        (mx.array([[5, 6], [7, 8]]), r"prompt: found .* of shape \[2, 2\], expected whole numbers of shape \[tokens\]"),
        ([1.5], "prompt: found list, expected text or a list of token ids"),
        ([[5, 6]], "prompt: found list"),
        (b"abc", "prompt: found bytes"),
        (None, "prompt: found NoneType"),
        ("a\ud800", "prompt: found '.ud800' at character 1, half of a surrogate pair"),
    ],
)
def test_a_bad_prompt_is_refused(tiny: Tiny, prompt: Any, message: str) -> None:
    """R73: an id outside the table never reaches the device; none is rounded, cut to 32 bits or flattened either."""
    with pytest.raises(OptionError, match=message):
        stream_generate(tiny.target.model, tiny.tokenizer, prompt)


def test_a_prompt_cache_of_another_model_is_refused_in_one_line(tiny: Tiny) -> None:
    """With too few caches a model would attend to nothing of the past, or fail somewhere inside."""
    made = tiny.target.make_caches

    def refusal(caches: Any, model: Any = tiny.target.model) -> str:
        with pytest.raises(OptionError) as caught:
            stream_generate(model, tiny.tokenizer, PROMPT, max_tokens=2, prompt_cache=caches)
        return str(caught.value)

    assert refusal([]) == "prompt_cache: found 0 caches, expected a list of the 3 that make_prompt_cache gives"
    assert refusal(tuple(made())).startswith("prompt_cache: found tuple")
    assert refusal(made() + made()).startswith("prompt_cache: found 6 caches")
    assert refusal([*made()[:2], object()]).startswith("prompt_cache: found object as cache 2")
    assert refusal([made()[0]] * 3) == "prompt_cache: found one cache object at several places, expected one for each"
    uneven = made()
    pair = tiny.pair("perfect", PROMPT, 4)
    list(stream_generate(pair, tiny.tokenizer, PROMPT, max_tokens=2, prompt_cache=uneven))
    uneven[2] = made()[2]
    assert "cache 2 (KVCache) holds 0; expected the same number" in refusal(uneven, pair)


def test_more_tokens_to_keep_than_there_are_keeps_all(tiny: Tiny) -> None:
    """mlx-lm's compiled filter fails on it and leaves MLX's global random state broken for the whole process."""
    options = {"temp": 1.0, "min_p": 0.5, "min_tokens_to_keep": 10**6, "max_tokens": 3, "seed": 1}
    for model in (tiny.target.model, tiny.pair("perfect", PROMPT, 3)):
        assert len(list(stream_generate(model, tiny.tokenizer, PROMPT, **options))) == 3
    assert 0 <= mx.random.uniform().item() < 1


def test_no_stop_is_no_stop(tiny: Tiny) -> None:
    assert len(list(stream_generate(tiny.target.model, tiny.tokenizer, PROMPT, max_tokens=2, stop=None))) == 2


def test_a_bounded_window_with_sinks_runs_plainly_and_is_refused_with_a_draft() -> None:
    """What mlx-lm makes of ``max_kv_size``: a block's later rows would not see the sinks that a plain step sees."""
    target = Target(tiny_models.tiny_qwen3(vocab=BYTE_VOCAB))
    tokenizer = load_tokenizer_of(BYTE_VOCAB)
    pair = Pair(target, stub_drafts.hostile([0] * 99, vocab_size=BYTE_VOCAB))
    with pytest.raises(UnsupportedError, match=r"max_kv_size: .*keep=4"):
        stream_generate(pair, tokenizer, PROMPT, max_kv_size=16)
    plain = list(stream_generate(pair, tokenizer, PROMPT, max_tokens=30, max_kv_size=16, plain=True))
    theirs = mlx_lm.stream_generate(target.model, tokenizer, PROMPT, max_tokens=30, max_kv_size=16)
    assert tokens_of(plain) == tokens_of(list(theirs))


def test_a_bound_that_the_models_own_cache_layout_would_ignore_is_refused(tiny: Tiny) -> None:
    with pytest.raises(UnsupportedError, match="max_kv_size: found 16 for a gemma4_text model, which lays out its own"):
        stream_generate(tiny.target.model, tiny.tokenizer, PROMPT, max_kv_size=16)


def test_xtc_runs_plainly(tiny: Tiny) -> None:
    options = {"max_tokens": 5, "temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.1}
    assert list(stream_generate(tiny.target.model, tiny.tokenizer, PROMPT, **options))[-1].mode == "plain"
    pair = tiny.pair("perfect", PROMPT, 5)
    last = list(stream_generate(pair, tiny.tokenizer, PROMPT, plain=True, **options))[-1]
    assert (last.mode, last.mode_reason) == ("plain", "plain decoding was asked for")


def test_depth_zero_is_plain_and_says_why(tiny: Tiny) -> None:
    last = list(stream_generate(tiny.pair("perfect", PROMPT, 5), tiny.tokenizer, PROMPT, max_tokens=5, depth=0))[-1]
    assert (last.mode, last.mode_reason, last.depth) == ("plain", "depth 0 was asked for", 0)


def test_one_requests_mode_does_not_stick_to_the_next(tiny: Tiny) -> None:
    """R66: long and short, plain and fast, in any order."""
    pair = tiny.pair("perfect", PROMPT, 20)
    modes = [
        list(stream_generate(pair, tiny.tokenizer, PROMPT, max_tokens=5, plain=plain))[-1].mode
        for plain in (False, True, False)
    ]
    assert modes == ["speculative", "plain", "speculative"]


def test_quantised_kv_runs_with_a_draft_and_says_what_plain_says(tiny: Tiny) -> None:
    """R39 at the edge: a rotating cache cannot be quantised by mlx-lm, and that is one line, not a traceback."""
    with pytest.raises(UnsupportedError, match=r"kv_bits: .*RotatingKVCache"):
        stream_generate(tiny.target.model, tiny.tokenizer, PROMPT, max_tokens=4, kv_bits=8, quantized_kv_start=0)


def test_kv_bits_that_would_quantise_nothing_are_refused(tiny: Tiny) -> None:
    chunked = tiny_models.tiny_llama4(vocab=BYTE_VOCAB)
    caches = [cache for cache in Target(chunked).make_caches() if type(cache).__name__ == "ChunkedKVCache"]
    with pytest.raises(UnsupportedError, match="kv_bits: found ChunkedKVCache, expected a cache that mlx-lm can"):
        KVQuantization(8).check(caches)


# ------------------------------------------------------------------ weights, pairs, memory


def test_weights_are_shared_between_modes_and_with_mlx_lm(bundled: Any) -> None:
    """R68: one set of target weights, whatever runs."""
    pair, tokenizer = bundled
    before = mx.get_active_memory()
    for plain in (True, False):
        list(stream_generate(pair, tokenizer, "def gcd(a", max_tokens=8, plain=plain))
    mx.clear_cache()
    weights = pair.report.target.parameter_bytes
    assert mx.get_active_memory() - before < 0.2 * weights


def test_two_pairs_interleaved_say_what_each_says_alone(tiny: Tiny, bundled: Any) -> None:
    """R71: token by token, two of one architecture; the library's classes are untouched during and after."""
    classes = [type(layer) for layer in tiny.target.model.layers]
    prompts = [PROMPT, "def g(y, z):"]
    pairs = [tiny.pair("scripted", prompt, TOKENS) for prompt in prompts]
    streams = [
        stream_generate(pair, tiny.tokenizer, prompt, max_tokens=TOKENS)
        for pair, prompt in zip(pairs, prompts, strict=True)
    ]
    streams.append(stream_generate(*bundled, "def fibonacci(", max_tokens=TOKENS))
    texts: list[list[int]] = [[], [], []]
    for step in range(TOKENS):
        for text, stream in zip(texts, streams, strict=True):
            response = next(stream, None)
            if response is not None:
                text.append(response.token)
            assert [type(layer) for layer in tiny.target.model.layers] == classes, step
    assert texts[:2] == [tokens_of(tiny.plain(prompt, TOKENS)) for prompt in prompts]
    assert texts[2] == tokens_of(list(stream_generate(*bundled, "def fibonacci(", max_tokens=TOKENS)))
