"""What a session proposes: which rows, through which scale and shaping, from which distribution."""

from __future__ import annotations

import copy
import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_dflash.drafts.registry import load_draft

from .make_draft import VOCAB, features, make_draft, pretend_target, speculators_config, z_lab_config

ANCHOR = mx.array([5], mx.int32)


def opened(folder, config=None, target=None, **options):
    target = target or pretend_target()
    session = load_draft(make_draft(folder, config), target, **options).open(target)
    session.commit(features(8), 0)
    return session, target


def recording(seen):
    """A sampler that keeps the logits it is given and takes the greedy choice."""

    def draw(logits):
        seen.append(logits)
        return mx.argmax(logits, axis=-1), mx.softmax(logits, axis=-1)

    return draw


# ------------------------------------------------------------------- rows


@pytest.mark.parametrize(("proposed", "first_row"), [(5, 1), (6, 0)])
def test_proposals_start_at_the_row_that_the_checkpoint_says(tmp_path, proposed, first_row):
    """R07."""
    config = speculators_config(speculators_config={"proposal_methods": [{"speculative_tokens": proposed}]})
    session, target = opened(tmp_path, config)
    assert session.draft.max_depth == session.draft.report.max_depth == proposed
    tokens = mx.argmax(target.head(session.block_hidden(ANCHOR, 6))[0], axis=-1).tolist()
    assert session.propose(ANCHOR, proposed, None).tokens.tolist() == tokens[first_row : first_row + proposed]


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_a_bidirectional_block_is_run_whole_and_read_in_part(tmp_path, depth):
    session, _ = opened(tmp_path)
    whole = session.propose(ANCHOR, 5, None).tokens.tolist()
    assert session.draft.block_rows(depth) == 6
    assert session.propose(ANCHOR, depth, None).tokens.tolist() == whole[:depth]


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_a_causal_block_is_cut_short_without_changing_a_row(tmp_path, depth):
    session, target = opened(tmp_path, z_lab_config(is_causal=True))
    assert session.draft.block_rows(depth) == depth + 1
    whole = session.block_hidden(ANCHOR, 6)
    np.testing.assert_allclose(session.block_hidden(ANCHOR, depth + 1), whole[:, : depth + 1], atol=1e-5)
    tokens = mx.argmax(target.head(whole)[0, 1:], axis=-1).tolist()
    assert session.propose(ANCHOR, depth, None).tokens.tolist() == tokens[:depth]


def test_one_full_layer_is_enough_to_need_the_whole_block(tmp_path):
    config = z_lab_config(layer_types=["sliding_attention", "full_attention"], sliding_window=12)
    session, _ = opened(tmp_path, config)
    assert session.draft.block_rows(1) == 6


def test_a_short_block_can_be_asked_for(tmp_path):
    session, _ = opened(tmp_path)
    loaded = session.draft
    short = copy.copy(loaded)
    short.short_block = True
    assert (loaded.block_rows(2), short.block_rows(2)) == (6, 3)


def test_only_the_rows_that_are_read_go_through_the_head(tmp_path):
    session, target = opened(tmp_path)
    rows, plain_head = [], target.head
    target.head = lambda hidden: (rows.append(hidden.shape), plain_head(hidden))[1]
    session.propose(ANCHOR, 2, None)
    assert rows == [(2, 64)]


@pytest.mark.parametrize("depth", [0, -1, 6])
def test_a_depth_outside_the_block_is_refused(tmp_path, depth):
    session, _ = opened(tmp_path)
    with pytest.raises(ValueError, match=r"expected 1 \.\. 5"):
        session.propose(ANCHOR, depth, None)


def test_proposing_changes_nothing(tmp_path):
    session, _ = opened(tmp_path)
    first = session.propose(ANCHOR, 5, None).tokens.tolist()
    session.propose(mx.array([9], mx.int32), 3, None)
    assert session.position == 8
    assert session.propose(ANCHOR, 5, None).tokens.tolist() == first


# ------------------------------------------------------------------- scale and shaping


@pytest.mark.parametrize(
    ("config", "embed_scale", "factor"),
    [
        (z_lab_config(), 1.0, 1.0),
        (z_lab_config(), 8.0, 8.0),
        (z_lab_config(dflash_config={"input_embedding_scale": 0.5}), 8.0, 4.0),
        (speculators_config(), 8.0, 1.0),
    ],
    ids=["plain target", "Gemma target", "Gemma target and own scale", "speculators on a Gemma target"],
)
def test_the_block_s_embedding_is_scaled_as_the_draft_was_trained(tmp_path, config, embed_scale, factor):
    """R11."""
    target = pretend_target(embed_scale=embed_scale)
    draft = load_draft(make_draft(tmp_path, config), target)
    ids = mx.array([[5, 3, 3]])
    np.testing.assert_allclose(draft.embed(ids, target), factor * target.embedding[ids], rtol=1e-6)


def test_logits_are_multiplied_scaled_and_then_capped(tmp_path):
    """R11: ``softcap(output_multiplier * logit_scale * head(y))``, by hand."""
    shaping = {"output_multiplier": 0.5, "logit_scale": 3.0, "final_logit_softcapping": 5.0}
    plain, target = opened(tmp_path / "plain")
    raw = np.array(target.head(plain.block_hidden(ANCHOR, 6))[0, 1:])
    session, _ = opened(tmp_path / "shaped", z_lab_config(**shaping))
    seen = []
    session.propose(ANCHOR, 5, recording(seen))
    np.testing.assert_allclose(seen[0], 5.0 * np.tanh(1.5 * raw / 5.0), atol=1e-5)
    assert seen[0].dtype == mx.float32


def test_the_target_s_own_shaping_is_not_inherited(tmp_path):
    """R11: the raw product of the target's head, whatever the target does to it afterwards."""
    session, target = opened(tmp_path)
    seen = []
    session.propose(ANCHOR, 5, recording(seen))
    np.testing.assert_allclose(seen[0], target.head(session.block_hidden(ANCHOR, 6))[0, 1:], atol=1e-5)


def test_the_rope_style_flag_changes_the_draft(tmp_path):
    """R10: see also test_rope.py for the rotation itself."""
    split, _ = opened(tmp_path / "split", z_lab_config(is_neox_style=True))
    woven, _ = opened(tmp_path / "woven", z_lab_config(is_neox_style=False))
    default, _ = opened(tmp_path / "default")
    rows = [np.array(session.block_hidden(ANCHOR, 6)) for session in (split, woven, default)]
    np.testing.assert_array_equal(rows[0], rows[2])
    assert np.abs(rows[0] - rows[1]).max() > 1e-2


def test_a_yarn_amplitude_multiplies_queries_and_keys(tmp_path):
    """Amplitude ``a`` on q and k is ``a * a`` on the scores: the same as q norms that are ``a * a`` larger."""
    yarn = {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64}
    amplified, _ = opened(tmp_path / "a", z_lab_config(rope_scaling=yarn | {"attention_factor": 1.5}))
    plain, _ = opened(tmp_path / "b", z_lab_config(rope_scaling=yarn | {"attention_factor": 1.0}))
    for layer in plain.draft.backbone.layers:
        layer.self_attn.q_norm.weight = layer.self_attn.q_norm.weight * 1.5**2
    np.testing.assert_allclose(amplified.block_hidden(ANCHOR, 6), plain.block_hidden(ANCHOR, 6), atol=1e-5)


def test_positions_far_beyond_the_config_s_length_are_ordinary(tmp_path):
    """R16."""
    target = pretend_target()
    draft = load_draft(make_draft(tmp_path, z_lab_config(max_position_embeddings=16)), target)
    session = draft.open(target, position=100_000)
    session.commit(features(20), 100_000)
    assert session.propose(ANCHOR, 5, None).finite.item()


# ------------------------------------------------------------------- distributions


def test_a_greedy_proposal_is_one_hot(tmp_path):
    session, _ = opened(tmp_path)
    proposal = session.propose(ANCHOR, 5, None)
    assert proposal.probs is None and proposal.candidates is None
    assert proposal.tokens.dtype == mx.int32 and proposal.finite.item()


def test_a_sampled_proposal_brings_the_distribution_it_was_drawn_from(tmp_path):
    session, _ = opened(tmp_path)
    seen = []
    proposal = session.propose(ANCHOR, 5, recording(seen))
    assert seen[0].shape == proposal.probs.shape == (5, VOCAB)
    np.testing.assert_array_equal(proposal.probs, mx.softmax(seen[0], axis=-1))


def test_a_draft_that_was_never_trained_on_padding_ids_is_not_asked_to_embed_them(tmp_path):
    """An own table may be shorter than the target's; MLX would read past its end."""
    target = pretend_target(256)
    table = mx.random.normal((254, 64), key=mx.random.key(2))
    draft = load_draft(make_draft(tmp_path, z_lab_config(vocab_size=254), embed_tokens__weight=table), target)
    assert mx.isfinite(draft.embed(mx.array([[255, 3]]), target)).all().item()


def test_attention_is_the_textbook_s(tmp_path):
    """One layer by hand: context and block keys, grouped heads, softmax over both."""
    session, target = opened(tmp_path, z_lab_config(num_hidden_layers=1))
    weights = {k: np.array(v, dtype=np.float64) for k, v in _weights(session.draft).items()}
    fused = rms(np.array(features(8)[0], dtype=np.float64) @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    x = np.array(target.embedding[mx.array([5, 3, 3, 3, 3, 3])], dtype=np.float64)
    h = rms(x, weights["layers.0.input_layernorm.weight"])
    prefix = "layers.0.self_attn"

    def heads(states, name, count):
        out = (states @ weights[f"{prefix}.{name}_proj.weight"].T).reshape(len(states), count, 16)
        return rms(out, weights[f"{prefix}.{name}_norm.weight"]) if name != "v" else out

    q = rope(heads(h, "q", 4), range(8, 14))
    k = rope(np.concatenate([heads(fused, "k", 2), heads(h, "k", 2)]), range(14))
    v = np.concatenate([heads(fused, "v", 2), heads(h, "v", 2)])
    mixed = np.empty((6, 4, 16))
    for head in range(4):
        scores = q[:, head] @ k[:, head // 2].T / 4.0
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed[:, head] = scores / scores.sum(axis=-1, keepdims=True) @ v[:, head // 2]
    x = x + mixed.reshape(6, 64) @ weights[f"{prefix}.o_proj.weight"].T
    m = rms(x, weights["layers.0.post_attention_layernorm.weight"])
    gate, up = (m @ weights[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = x + (gate / (1 + np.exp(-gate)) * up) @ weights["layers.0.mlp.down_proj.weight"].T
    np.testing.assert_allclose(session.block_hidden(ANCHOR, 6)[0], rms(x, weights["norm.weight"]), atol=1e-4)


def rms(x, weight):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weight


def rope(x, positions):
    angles = np.array([[p / 10000 ** (2 * i / 16) for i in range(8)] for p in positions])[:, None]
    a, b = x[..., :8], x[..., 8:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], axis=-1)


def _weights(draft):
    from mlx.utils import tree_flatten

    assert math.isclose(draft.config.rms_norm_eps, 1e-6)
    return dict(tree_flatten(draft.backbone.parameters()))
