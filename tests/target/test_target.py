"""A target leaves its model as it was: same weights, same classes, same answers, however many stand around it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from mlx_dflash.errors import CheckpointError, OptionError, UnsupportedError
from mlx_dflash.target import Target
from tests.tiny_models import (
    tiny_gemma4,
    tiny_gpt_oss,
    tiny_llama,
    tiny_llama4,
    tiny_mistral3,
    tiny_nanochat,
    tiny_qwen3,
    tiny_qwen3_moe,
)

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": tiny_llama,
    "llama, tied head": lambda: tiny_llama(tie_word_embeddings=True),
    "qwen3": tiny_qwen3,
    "qwen3_moe": tiny_qwen3_moe,
    "gemma4": tiny_gemma4,
    "gemma4, shared caches": lambda: tiny_gemma4(layers=5, kv_shared=2),
    "gemma4, wrapped": lambda: tiny_gemma4(wrapper="gemma4"),
    "gemma4, untied head": lambda: tiny_gemma4(tie_word_embeddings=False),
    "gpt_oss": tiny_gpt_oss,
    "mistral3": tiny_mistral3,
    "llama4": tiny_llama4,
}
IDS = mx.array([[3, 1, 4, 1, 5]])


def greedy(target: Target, caches: list[Any], ids: mx.array, taps: tuple[int, ...] = ()) -> mx.array:
    return mx.argmax(target.forward(ids, caches, taps)[0][:, -1:], axis=-1)


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_found_checked_and_gives_its_own_logits(family: str) -> None:
    model = FAMILIES[family]()
    target = Target(model, name=family)
    target.check((-1, 0, target.num_layers - 1))
    logits, features = target.forward(IDS, target.make_caches(), (0, 1))
    assert mx.array_equal(logits, model(IDS, cache=target.make_caches()))
    assert features.shape == (1, 5, 2 * target.hidden_size)
    assert (target.hidden_size, target.vocab_size) == (32, 64)
    assert target.head(features[..., :32]).shape == (1, 5, 64)


def test_the_head_is_raw_while_logits_are_shaped() -> None:
    target = Target(tiny_gemma4(softcap=5.0))
    target.check()
    logits, last = target.forward(IDS, target.make_caches(), (target.num_layers - 1,))
    raw = target.head(target.parts.norm(last))
    assert target.shaping == "softcap 5"
    assert mx.max(mx.abs(raw)).item() > 5
    assert mx.allclose(mx.tanh(raw / 5.0) * 5.0, logits, atol=1e-5)


def test_a_quantised_target_keeps_its_weights_quantised() -> None:
    for tied in (False, True):
        model = tiny_llama(hidden=64, tie_word_embeddings=tied)
        nn.quantize(model, group_size=32, bits=8)
        target = Target(model)
        target.check((0,))
        assert target.hidden_size == 64
        assert target.embed(IDS).shape == (1, 5, 64)
        head = target.parts.embedding if tied else target.parts.head
        assert head is (model.model.embed_tokens if tied else model.lm_head)
        assert head.weight.dtype == mx.uint32


def test_wrapping_and_checking_copies_no_weight() -> None:
    """R68."""
    model = tiny_gemma4()
    before = {name: id(array) for name, array in tree_flatten(model.parameters())}
    Target(model).check((0, 1))
    held = mx.get_active_memory()
    targets = [Target(model), Target(model)]
    for target in targets:
        target.check((0, 1))
    assert {name: id(array) for name, array in tree_flatten(model.parameters())} == before
    assert mx.get_active_memory() - held < 1024


def test_no_class_and_no_instance_of_the_library_is_changed_by_a_tapped_forward() -> None:
    """R71."""
    model = tiny_llama()
    before, original_call = classes(model), llama.TransformerBlock.__call__
    target = Target(model)
    target.check((0, 1))
    target.forward(IDS, target.make_caches(), (-1, 0, 1))
    assert classes(model) == before
    assert all(type(layer) is llama.TransformerBlock for layer in model.model.layers)
    assert llama.TransformerBlock.__call__ is original_call


def test_a_forward_that_raises_leaves_no_tap_behind() -> None:
    model = tiny_llama()
    target, before = Target(model), classes(model)
    with pytest.raises(ValueError, match="too short"):
        target.forward(IDS, RaisingCaches(target.make_caches()), (0, 1))  # type: ignore[arg-type]
    assert classes(model) == before
    assert mx.array_equal(target.forward(IDS, target.make_caches(), (0,))[0], model(IDS))


class RaisingCaches(list[Any]):
    """Fails when the model walks over it, in the middle of its forward."""

    def __iter__(self) -> Any:
        yield list.__getitem__(self, 0)
        raise ValueError("too short")


def test_two_targets_on_one_model_and_two_models_interleave_without_seeing_each_other() -> None:
    """R71."""
    shared = tiny_qwen3()
    targets = [Target(shared), Target(shared), Target(tiny_qwen3(seed=1))]
    taps = [(0,), (-1, 1), (0, 1)]
    alone = [decode(target, tap, 12) for target, tap in zip(targets, taps, strict=True)]
    caches = [target.make_caches() for target in targets]
    tokens = [[greedy(t, c, IDS, tap)] for t, c, tap in zip(targets, caches, taps, strict=True)]
    for _ in range(11):
        for target, cache, tap, said in zip(targets, caches, taps, tokens, strict=True):
            said.append(greedy(target, cache, said[-1], tap))
    assert [[token.item() for token in said] for said in tokens] == alone
    del targets[0]
    assert decode(targets[0], (-1, 1), 12) == alone[1]


def decode(target: Target, taps: tuple[int, ...], count: int) -> list[int]:
    caches, ids, said = target.make_caches(), IDS, []
    for _ in range(count):
        ids = greedy(target, caches, ids, taps)
        said.append(ids.item())
    return said


def test_a_target_made_in_one_thread_works_in_another() -> None:
    """R60."""
    target, said = Target(tiny_gemma4()), []
    target.check((0,))
    worker = threading.Thread(target=lambda: said.extend(decode(target, (0, 1), 6)))
    worker.start()
    worker.join()
    assert said == decode(target, (0, 1), 6)


@pytest.mark.parametrize(("ids", "place"), [([64], 0), ([3, -1], 1), ([0, 63, 1 << 40], 2)])
def test_a_token_id_outside_the_table_is_refused_with_its_place(ids: list[int], place: int) -> None:
    """R73."""
    target = Target(tiny_llama(), name="tiny")
    with pytest.raises(OptionError, match=rf"token id {ids[place]} at position {place}: expected 0 \.\. 63"):
        target.validate_ids(ids)


def test_token_ids_inside_the_table_pass() -> None:
    target = Target(tiny_llama())
    for ids in ([0, target.vocab_size - 1], []):
        assert target.validate_ids(ids) is None


def test_a_bound_on_the_caches_counts_where_the_model_has_no_layout_of_its_own() -> None:
    assert {type(cache).__name__ for cache in Target(tiny_llama()).make_caches()} == {"KVCache"}
    assert {type(c).__name__ for c in Target(tiny_qwen3()).make_caches(16)} == {"RotatingKVCache"}
    assert len(Target(tiny_gemma4(layers=5, kv_shared=2)).make_caches(16)) == 3


class LoopedLlama(llama.LlamaModel):
    """Runs its last layer twice."""

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: Any = None) -> mx.array:
        hidden = self.embed_tokens(inputs)
        for layer in [*self.layers, self.layers[-1]]:
            hidden = layer(hidden, None, None)
        return self.norm(hidden)


class ScaledBeforeHead(llama.LlamaModel):
    """Divides the hidden state between norm and head."""

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return super().__call__(*args, **kwargs) / 2


class ShapedLlama(llama.Model):
    """Bends its logits in a way that no config names."""

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return mx.square(super().__call__(*args, **kwargs))


class FailingLlama(llama.Model):
    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        raise RuntimeError("no kernel\nfor this device")


def as_class(model: nn.Module, inner: type | None = None, outer: type | None = None) -> nn.Module:
    if inner is not None:
        object.__setattr__(model.model, "__class__", inner)
    if outer is not None:
        object.__setattr__(model, "__class__", outer)
    return model


def shared_layer_object() -> nn.Module:
    model = tiny_llama()
    model.model.layers = [model.model.layers[0]] * 2
    return model


def split_over_machines() -> nn.Module:
    model = tiny_llama()
    model.model.layers = [None, model.model.layers[1]]
    return model


def wrong_scale() -> nn.Module:
    model = tiny_llama()
    model.model.embedding_multiplier = 3.0
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a layer that runs twice": (lambda: as_class(tiny_llama(), LoopedLlama), "layer 1: called 2 times in one forward"),
    "one object at two places": (shared_layer_object, "one layer object stands at several places"),
    "layers on another machine": (
        split_over_machines,
        "layer 0: found none, its layers are split over several machines",
    ),
    "hidden scaled before the head": (
        lambda: as_class(tiny_llama(), ScaledBeforeHead),
        "what enters its head is not the final norm of the last layer's output",
    ),
    "unknown shaping": (lambda: as_class(tiny_llama(), outer=ShapedLlama), "neither a factor nor its config's softcap"),
    "a scale that is not applied": (wrong_scale, "layer 0 sees 1 times its embedding rows, expected 3 times"),
    "a norm that is no module": (tiny_nanochat, "final norm: not found where mlx-lm's families keep it"),
    "no text model at all": (lambda: nn.Linear(4, 4), "embedding and decoder layers and final norm: not found"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_whose_taps_or_head_would_be_wrong_is_refused_with_the_reason(what: str) -> None:
    make, reason = REFUSED[what]
    with pytest.raises(UnsupportedError) as refusal:
        Target(make()).check((0,))
    message = str(refusal.value)
    assert reason in message
    assert "target model_type '" in message and "supported: llama, " in message
    assert "\n" not in message


def test_a_model_whose_parts_are_not_found_runs_without_them() -> None:
    """Only a draft needs taps, embedding and head; sizes are then those of the config."""
    model = tiny_nanochat()
    target = Target(model)
    target.check_runs()
    assert (target.hidden_size, target.num_layers, target.vocab_size) == (32, 2, 64)
    assert mx.array_equal(target.forward(IDS, target.make_caches())[0], model(IDS, cache=target.make_caches()))
    for use in (
        lambda: target.embed(IDS),
        lambda: target.head(mx.zeros((1, 32))),
        lambda: target.forward(IDS, target.make_caches(), (0,)),
    ):
        with pytest.raises(UnsupportedError, match="final norm: not found"):
            use()
    assert Target(nn.Linear(4, 4)).vocab_size == 0


def test_a_forward_that_fails_is_refused_with_its_own_words() -> None:
    with pytest.raises(UnsupportedError) as refusal:
        Target(as_class(tiny_llama(), outer=FailingLlama)).check((0,))
    assert str(refusal.value).endswith("'llama': its forward fails: RuntimeError: no kernel for this device")


@pytest.mark.parametrize("value", [mx.nan, mx.inf])
def test_a_weight_that_is_not_finite_is_named(value: float) -> None:
    model = tiny_llama()
    weight = model.model.layers[1].mlp.down_proj.weight
    weight[3, 5] = value
    with pytest.raises(
        CheckpointError, match=r"tiny: tensor model\.layers\.1\.mlp\.down_proj\.weight: found NaN or inf"
    ):
        Target(model, name="tiny").check()
    with pytest.raises(CheckpointError, match="found NaN or inf"):
        Target(model, name="tiny").check_runs()


def test_an_overflow_of_finite_weights_is_told_apart_from_a_bad_weight() -> None:
    model = tiny_llama()
    model.set_dtype(mx.float16)
    model.model.norm.weight = model.model.norm.weight * 2000
    model.lm_head.weight = mx.full(model.lm_head.weight.shape, 60000, mx.float16)
    with pytest.raises(UnsupportedError, match=r"every weight is finite.*overflow mlx\.core\.float16"):
        Target(model, name="tiny").check()
