"""Whose head and whose table a draft uses: decided by the tensors that are there, checked against the config."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_dflash.drafts.registry import load_draft
from mlx_dflash.errors import CheckpointError, PairingError

from .make_draft import (
    HIDDEN,
    VOCAB,
    backbone_tensors,
    features,
    head_tensor,
    make_draft,
    offsets,
    pretend_target,
    speculators_config,
    write_draft,
    z_lab_config,
)

ANCHOR = mx.array([5], mx.int32)
IDS = [2, 3, 8, 13, 21, 34, 40, 63]
"""Target ids of a reduced vocabulary of eight."""


def refusal(folder, kind, target=None):
    with pytest.raises(kind) as caught:
        load_draft(folder, target or pretend_target())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def logits_of(draft, target):
    """Logits of a block after eight committed positions, as the sampler sees them."""
    seen = []
    session = draft.open(target)
    session.commit(features(8), 0)
    session.propose(ANCHOR, 5, lambda logits: (seen.append(logits), (mx.argmax(logits, -1), mx.softmax(logits, -1)))[1])
    return seen[0]


def t2d(ids, vocab=VOCAB):
    return mx.array([token in ids for token in range(vocab)])


# ------------------------------------------------------------------- what is used


def test_a_plain_draft_borrows_table_and_head_without_a_copy(tmp_path):
    """R05."""
    target = pretend_target()
    draft = load_draft(make_draft(tmp_path), target)
    assert draft.report.extra["borrowed"] == ("embed_tokens", "lm_head")
    assert draft.report.head.startswith("target") and draft.report.embedding.startswith("target")
    assert draft.report.weight_bytes == sum(array.nbytes for array in backbone_tensors(z_lab_config()).values())
    logits_of(draft, target)
    assert target.head_calls == 1


def test_own_copies_of_the_target_s_matrices_change_nothing_but_the_report(tmp_path):
    """R05: the same draft with and without the two tensors."""
    target = pretend_target()
    borrowed = load_draft(make_draft(tmp_path / "a"), target)
    owning = load_draft(
        make_draft(tmp_path / "b", embed_tokens__weight=target.embedding, lm_head__weight=target.head_matrix), target
    )
    assert owning.report.extra["borrowed"] == ()
    assert owning.report.head.startswith("own") and owning.report.embedding.startswith("own")
    expected = logits_of(borrowed, target)
    calls = target.head_calls
    np.testing.assert_array_equal(logits_of(owning, target), expected)
    assert target.head_calls == calls


def test_a_draft_with_its_own_head_never_uses_the_target_s(tmp_path):
    """R06."""
    target = pretend_target()
    draft = load_draft(make_draft(tmp_path, lm_head__weight=head_tensor(VOCAB)), target)
    session = draft.open(target)
    session.commit(features(8), 0)
    hidden = session.block_hidden(ANCHOR, 6)[0, 1:]
    np.testing.assert_allclose(logits_of(draft, target), hidden @ head_tensor(VOCAB).T, atol=1e-5)
    assert target.head_calls == 0


def test_a_borrowed_head_gives_the_same_bytes_beside_a_draft_that_owns_one(tmp_path):
    """R06: nothing of a loaded draft leaks into the target or into another draft."""
    target = pretend_target()
    alone = np.array(logits_of(load_draft(make_draft(tmp_path / "a"), target), target))
    head_before = np.array(target.head_matrix)
    owner = load_draft(make_draft(tmp_path / "b", lm_head__weight=head_tensor(VOCAB)), target)
    beside = load_draft(make_draft(tmp_path / "a"), target)
    logits_of(owner, target)
    assert np.array(logits_of(beside, target)).tobytes() == alone.tobytes()
    assert np.array(target.head_matrix).tobytes() == head_before.tobytes()


def test_tie_word_embeddings_says_nothing(tmp_path):
    target = pretend_target()
    flags = [
        load_draft(make_draft(tmp_path / str(t), z_lab_config(tie_word_embeddings=t)), target) for t in (True, False)
    ]
    assert flags[0].report.head == flags[1].report.head


# ------------------------------------------------------------------- reduced vocabularies


def reduced(folder, *, ids=IDS, config=None, **changes):
    """A speculators draft with eight of 64 ids; ``changes`` replace (or with ``None`` remove) tensors."""
    config = config or speculators_config(draft_vocab_size=len(IDS))
    tensors = backbone_tensors(config) | {"lm_head.weight": head_tensor(len(IDS)), "d2t": offsets(ids), "t2d": t2d(ids)}
    for name, array in changes.items():
        name = name.replace("__", ".")
        if array is None:
            tensors.pop(name)
        else:
            tensors[name] = array
    return write_draft(folder, config, tensors)


def test_a_reduced_head_proposes_through_its_map(tmp_path):
    """R06."""
    target = pretend_target()
    draft = load_draft(reduced(tmp_path), target)
    logits = logits_of(draft, target)
    assert logits.shape == (5, 8)
    session = draft.open(target)
    session.commit(features(8), 0)
    proposal = session.propose(ANCHOR, 5, None)
    assert proposal.tokens.tolist() == [IDS[row] for row in mx.argmax(logits, -1).tolist()]
    assert proposal.tokens.dtype == mx.int32


def test_a_reduced_head_that_knows_the_answer_proposes_exactly_it(tmp_path):
    """R06: the head's row of the right id points along the hidden state."""
    target = pretend_target()
    session = load_draft(reduced(tmp_path / "probe"), target).open(target)
    session.commit(features(8), 0)
    hidden = session.block_hidden(ANCHOR, 6)[0, 1:]
    head = mx.concatenate([hidden, -hidden[:3]])  # rows 0..4 answer slots 0..4
    draft = load_draft(reduced(tmp_path / "right", lm_head__weight=head), target)
    session = draft.open(target)
    session.commit(features(8), 0)
    assert session.propose(ANCHOR, 5, None).tokens.tolist() == IDS[:5]


def test_a_sampled_reduced_proposal_has_q_over_the_whole_target_vocabulary(tmp_path):
    """R06: nothing outside the map's image has mass."""
    target = pretend_target()
    session = load_draft(reduced(tmp_path), target).open(target)
    session.commit(features(8), 0)
    kept = []

    def draw(logits):
        kept.append(mx.softmax(logits, -1))
        return mx.zeros((logits.shape[0],), mx.int32), kept[0]

    proposal = session.propose(ANCHOR, 5, draw)
    assert proposal.tokens.tolist() == [IDS[0]] * 5
    assert proposal.probs.shape == (5, VOCAB)
    np.testing.assert_array_equal(proposal.probs[:, mx.array(IDS)], kept[0])
    outside = [token for token in range(VOCAB) if token not in IDS]
    assert mx.max(proposal.probs[:, mx.array(outside)]).item() == 0


def test_an_absolute_map_is_recognised_where_offsets_cannot_be_meant(tmp_path):
    target = pretend_target()
    absolute = load_draft(reduced(tmp_path / "a", d2t=mx.array(IDS, mx.int64)), target)
    relative = load_draft(reduced(tmp_path / "b"), target)
    assert absolute.parts.vocabulary.ids.tolist() == relative.parts.vocabulary.ids.tolist() == IDS


SHUFFLED = [IDS[i] for i in (3, 0, 1, 2, 4, 5, 6, 7)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": None}, "found no tensor d2t"),
        ({"lm_head__weight": None}, "found no tensor lm_head.weight"),
        ({"lm_head__weight": None, "d2t": None}, "found no tensor lm_head.weight and no d2t"),
        ({"d2t": offsets(IDS[:7])}, "tensor d2t: found shape [7], expected [8]"),
        ({"d2t": offsets(SHUFFLED), "t2d": None}, "row 1 at target id 2 after 13"),
        ({"d2t": offsets([*IDS[:7], VOCAB]), "t2d": None}, f"row 7 at target id {VOCAB}"),
        ({"d2t": offsets([-1, *IDS[1:]]), "t2d": None}, "row 0 at target id -1"),
        ({"t2d": t2d(IDS[1:])}, "tensor t2d: found id 3 marked"),
        ({"t2d": t2d([*IDS, 62])}, "tensor t2d: found id 62 marked"),
        ({"t2d": mx.ones((7,), mx.bool_)}, "tensor t2d: found shape [7]"),
        ({"lm_head__weight": head_tensor(9)}, "tensor d2t: found shape [8], expected [9]"),
    ],
)
def test_a_reduced_vocabulary_with_a_wrong_part_is_refused(tmp_path, change, message):
    """R06."""
    assert message in refusal(reduced(tmp_path, **change), CheckpointError)


def test_a_head_that_contradicts_draft_vocab_size_is_refused(tmp_path):
    config = speculators_config(draft_vocab_size=10)
    message = refusal(reduced(tmp_path, config=config), CheckpointError)
    assert "found 8 rows, expected draft_vocab_size = 10" in message


def test_a_map_alone_makes_the_vocabulary_reduced(tmp_path):
    config = speculators_config(draft_vocab_size=None)
    assert load_draft(reduced(tmp_path, config=config), pretend_target()).parts.vocabulary.rows == 8


# ------------------------------------------------------------------- promises and rows


@pytest.mark.parametrize("key", ["has_lm_head", "has_own_lm_head", "use_draft_lm_head"])
@pytest.mark.parametrize("level", ["top", "dflash_config"])
def test_a_promised_head_that_is_missing_is_refused(tmp_path, key, level):
    change = {key: True} if level == "top" else {"dflash_config": {key: True}}
    message = refusal(make_draft(tmp_path, z_lab_config(**change)), CheckpointError)
    assert f"{key} in config.json promises a head" in message


def test_a_promised_table_that_is_missing_is_refused(tmp_path):
    message = refusal(make_draft(tmp_path, z_lab_config(has_embed_tokens=True)), CheckpointError)
    assert "has_embed_tokens in config.json promises a table" in message


def test_promises_that_are_false_ask_for_nothing(tmp_path):
    config = z_lab_config(has_embed_tokens=False, has_lm_head=False)
    assert load_draft(make_draft(tmp_path, config), pretend_target()).report.head.startswith("target")


@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight"])
@pytest.mark.parametrize("rows", [VOCAB - 8, VOCAB + 8])
def test_a_head_or_table_of_another_vocabulary_is_refused(tmp_path, name, rows):
    config = z_lab_config()
    tensors = backbone_tensors(config) | {name: head_tensor(rows)}
    message = refusal(write_draft(tmp_path, config, tensors), PairingError)
    assert f"tensor {name}: found {rows} rows, expected the target's {VOCAB}" in message


# ------------------------------------------------------------------- padded vocabularies

PADDED, REAL = 256, 254


def padded_target():
    """A target whose padded rows would win every argmax."""
    target = pretend_target(PADDED)
    target.head_matrix[REAL:] = 100 * target.head_matrix[REAL:]
    return target


@pytest.mark.parametrize("sampled", [False, True])
def test_no_padding_row_is_proposed_when_the_draft_counts_fewer(tmp_path, sampled):
    target = padded_target()
    draft = load_draft(make_draft(tmp_path, z_lab_config(vocab_size=REAL)), target)
    session = draft.open(target)
    session.commit(features(8), 0)
    sampler = (lambda logits: (mx.argmax(logits, -1), mx.softmax(logits, -1))) if sampled else None
    proposal = session.propose(ANCHOR, 5, sampler)
    assert max(proposal.tokens.tolist()) < REAL
    if sampled:
        assert proposal.probs.shape == (5, PADDED)
        assert mx.max(proposal.probs[:, REAL:]).item() == 0


class Tokenizer:
    def __init__(self, ids):
        self.ids = ids

    def get_vocab(self):
        return {f"t{i}": i for i in range(self.ids)}


def test_no_padding_row_is_proposed_when_the_tokenizer_knows_fewer(tmp_path):
    target = padded_target()
    draft = load_draft(make_draft(tmp_path, z_lab_config(vocab_size=PADDED)), target, tokenizer=Tokenizer(REAL))
    session = draft.open(target)
    session.commit(features(8), 0)
    assert max(session.propose(ANCHOR, 5, None).tokens.tolist()) < REAL
    assert draft.report.extra["proposed_ids"] == REAL


def test_an_own_head_padded_otherwise_than_the_target_stays_within_the_target(tmp_path):
    target = pretend_target(PADDED)
    head = head_tensor(PADDED + 2)
    head[PADDED:] = 100 * head[PADDED:]
    draft = load_draft(make_draft(tmp_path, z_lab_config(vocab_size=PADDED + 2), lm_head__weight=head), target)
    session = draft.open(target)
    session.commit(features(8), 0)
    assert max(session.propose(ANCHOR, 5, None).tokens.tolist()) < PADDED


def test_an_own_head_shorter_than_the_target_s_gives_q_over_the_target(tmp_path):
    target = pretend_target(PADDED)
    draft = load_draft(make_draft(tmp_path, z_lab_config(vocab_size=REAL), lm_head__weight=head_tensor(REAL)), target)
    session = draft.open(target)
    session.commit(features(8), 0)
    proposal = session.propose(ANCHOR, 5, lambda logits: (mx.argmax(logits, -1), mx.softmax(logits, -1)))
    assert proposal.probs.shape == (5, PADDED)
    np.testing.assert_allclose(mx.sum(proposal.probs, axis=-1), np.ones(5), rtol=1e-5)


def test_a_borrowed_matrix_needs_the_target_s_width(tmp_path):
    config = speculators_config(target_hidden_size=2 * HIDDEN)
    tensors = backbone_tensors(config) | {"fc.weight": head_tensor(HIDDEN, 4 * HIDDEN)}
    message = refusal(write_draft(tmp_path, config, tensors), PairingError, pretend_target(hidden=2 * HIDDEN))
    assert "no own embed_tokens and lm_head" in message


def test_a_draft_with_both_matrices_may_have_its_own_width(tmp_path):
    config = speculators_config(target_hidden_size=2 * HIDDEN)
    tensors = backbone_tensors(config) | {
        "fc.weight": head_tensor(HIDDEN, 4 * HIDDEN),
        "embed_tokens.weight": head_tensor(VOCAB),
        "lm_head.weight": head_tensor(VOCAB),
    }
    target = pretend_target(hidden=2 * HIDDEN)
    session = load_draft(write_draft(tmp_path, config, tensors), target).open(target)
    session.commit(features(8, hidden=2 * HIDDEN), 0)
    assert session.propose(ANCHOR, 5, None).finite.item()
