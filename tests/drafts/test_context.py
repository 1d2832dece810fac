"""The draft's context: in time order whatever the chunks, cut to the window, never copied by a round."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dflash.drafts.backbone import Backbone
from mlx_dflash.drafts.context import LayerContext, visibility
from mlx_dflash.drafts.registry import load_draft

from .make_draft import features, make_draft, pretend_target, speculators_config, z_lab_config

ANCHOR = mx.array([5], mx.int32)
WINDOW = 12
KINDS = {
    "full": z_lab_config(),
    "sliding": z_lab_config(layer_types=["sliding_attention"] * 2, sliding_window=WINDOW),
    "sliding bidirectional": z_lab_config(
        layer_types=["sliding_attention"] * 2, sliding_window=WINDOW, is_causal=False
    ),
    "mixed": z_lab_config(layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW),
    "narrower than the block": z_lab_config(layer_types=["sliding_attention"] * 2, sliding_window=3, is_causal=False),
    "window of one": z_lab_config(layer_types=["sliding_attention"] * 2, sliding_window=1),
    "speculators": speculators_config({"layer_types": ["sliding_attention"] * 2, "sliding_window": WINDOW}),
}


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    target = pretend_target()
    return {
        kind: load_draft(make_draft(tmp_path_factory.mktemp("draft"), config), target) for kind, config in KINDS.items()
    }


def opened(draft, chunks, states, start=0):
    """A session that was told ``states`` in chunks of the given lengths."""
    session = draft.open(pretend_target(), start)
    done = 0
    for rows in chunks:
        session.commit(states[:, done : done + rows], start + done)
        done += rows
    return session


def block(session):
    return np.array(session.block_hidden(ANCHOR, 6))


# ------------------------------------------------------------------- chunks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("total", "step"), [(1, 1), (WINDOW - 1, 1), (WINDOW, 5), (WINDOW + 1, 1), (300, 1), (300, 64), (700, 5), (700, 64)]
)
def test_the_block_does_not_depend_on_how_the_context_was_told(drafts, kind, total, step):
    """Also one row at a time past the window, and past every growth and compaction of the buffers."""
    states = features(total)
    once = block(opened(drafts[kind], [total], states))
    chunks = [step] * (total // step) + ([total % step] if total % step else [])
    np.testing.assert_allclose(block(opened(drafts[kind], chunks, states)), once, atol=2e-5)


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)), chunks=st.lists(st.integers(1, 40), min_size=1, max_size=12), data=st.data()
)
def test_rounds_of_any_length_between_proposals_leave_the_same_context(drafts, kind, chunks, data):
    """Proposing in between, and rewinding a little, leaves no trace."""
    draft, states = drafts[kind], features(sum(chunks))
    session, done = draft.open(pretend_target()), 0
    for rows in chunks:
        session.commit(states[:, done : done + rows], done)
        done += rows
        if data.draw(st.booleans()):
            session.propose(ANCHOR, data.draw(st.integers(1, 5)), None)
        back = data.draw(st.integers(0, min(5, rows - 1)))
        if back:
            session.rewind(done - back)
            session.commit(states[:, done - back : done], done - back)
    once = opened(draft, [done], states)
    np.testing.assert_allclose(block(session), block(once), atol=2e-5)


def test_a_window_wider_than_the_sequence_is_no_window(tmp_path):
    """What sliding layers see is what full layers see, up to the window; past it they differ."""
    target = pretend_target()
    wide = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 40, "is_causal": False}
    sliding = load_draft(make_draft(tmp_path / "sliding", z_lab_config(**wide)), target)
    full = load_draft(make_draft(tmp_path / "full"), target)
    states = features(60)
    # The last row of a block of 6 is 5 beyond the anchor and sees W - 1 positions back.
    np.testing.assert_allclose(block(opened(sliding, [34], states)), block(opened(full, [34], states)), atol=1e-5)
    assert np.abs(block(opened(sliding, [35], states)) - block(opened(full, [35], states))).max() > 1e-4


@pytest.mark.parametrize("kind", ["sliding", "sliding bidirectional", "speculators"])
def test_what_left_the_window_has_no_influence(drafts, kind):
    """Position 100 sees back to its layer's reach and not one row further."""
    draft, states = drafts[kind], features(100)
    reach = draft.config.layers[0].reach
    before = block(opened(draft, [100], states))
    outside = mx.concatenate([features(100 - reach, seed=9), states[:, 100 - reach :]], axis=1)
    np.testing.assert_array_equal(block(opened(draft, [100], outside)), before)
    inside = mx.concatenate([features(101 - reach, seed=9), states[:, 101 - reach :]], axis=1)
    assert np.abs(block(opened(draft, [100], inside)) - before).max() > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_that_starts_later_knows_nothing_of_before_but_counts_positions(drafts, kind):
    states = features(30)
    late = opened(drafts[kind], [10, 20], states, start=500)
    assert late.position == 530
    # Rope is relative, so a shifted sequence gives the same block up to rounding.
    np.testing.assert_allclose(block(late), block(opened(drafts[kind], [30], states)), atol=5e-4)


def test_a_session_without_any_context_still_proposes(drafts):
    for draft in drafts.values():
        assert draft.open(pretend_target()).propose(ANCHOR, 5, None).tokens.shape == (5,)


# ------------------------------------------------------------------- order of positions


@pytest.mark.parametrize("position", [0, 7, 9])
def test_a_position_told_twice_or_skipped_is_refused(drafts, position):
    session = opened(drafts["full"], [8], features(8))
    with pytest.raises(ValueError, match=f"told position {position}, expected 8"):
        session.commit(features(1), position)
    assert session.position == 8


@pytest.mark.parametrize("shape", [(1, 2, 64), (2, 2, 128), (2, 128)])
def test_features_of_another_shape_are_refused(drafts, shape):
    with pytest.raises(ValueError, match="expected \\[1, rows, 128\\]"):
        drafts["full"].open(pretend_target()).commit(mx.zeros(shape), 0)


def test_no_rows_are_no_change(drafts):
    session = opened(drafts["mixed"], [8], features(8))
    session.commit(features(1)[:, :0], 8)
    assert session.position == 8


# ------------------------------------------------------------------- rewind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("back", [1, 5])
@pytest.mark.parametrize("total", [9, 200, 600])
def test_rewinding_a_round_is_as_if_it_had_not_happened(drafts, kind, back, total):
    states = features(total)
    session = opened(drafts[kind], [total - 3, 3], states)
    session.rewind(total - back)
    assert session.position == total - back
    np.testing.assert_allclose(block(session), block(opened(drafts[kind], [total - back], states)), atol=2e-5)
    session.commit(states[:, total - back :], total - back)
    np.testing.assert_allclose(block(session), block(opened(drafts[kind], [total], states)), atol=2e-5)


def test_a_full_context_rewinds_to_anywhere(drafts):
    states = features(50)
    session = opened(drafts["full"], [50], states)
    session.rewind(0)
    session.commit(states, 0)
    np.testing.assert_allclose(block(session), block(opened(drafts["full"], [50], states)), atol=2e-5)


@pytest.mark.parametrize("kind", ["sliding", "speculators"])
def test_rewinding_goes_as_far_back_as_a_whole_window_is_left(drafts, kind):
    """A chunk of 100 leaves a window and a block of rows behind, so one block can be taken back and no row more."""
    states, block_size = features(100), drafts[kind].block_size
    session = opened(drafts[kind], [100], states)
    with pytest.raises(ValueError, match="rewind to 93"):
        session.rewind(100 - block_size - 1)
    session.rewind(100 - block_size)
    np.testing.assert_allclose(block(session), block(opened(drafts[kind], [94], states)), atol=2e-5)


@pytest.mark.parametrize("kind", ["sliding", "mixed", "speculators"])
def test_rewinding_beyond_what_the_window_kept_is_refused_and_changes_nothing(drafts, kind):
    session = opened(drafts[kind], [100], features(100))
    before = block(session)
    with pytest.raises(ValueError, match="rewind to 20"):
        session.rewind(20)
    assert session.position == 100
    np.testing.assert_array_equal(block(session), before)


def test_rewinding_forward_or_before_the_start_is_refused(drafts):
    session = opened(drafts["full"], [5], features(5), start=10)
    with pytest.raises(ValueError, match="rewind to 16"):
        session.rewind(16)
    with pytest.raises(ValueError, match="rewind to 9"):
        session.rewind(9)


# ------------------------------------------------------------------- cost


def bytes_of_a_round(draft, length, rows=1):
    """Peak bytes beyond what is held, of a proposal and a commit at a context length: the most that any round took, as
    how much of a graph lives at once depends on when the device's threads come round to it."""
    session = opened(draft, [length], features(length))
    mx.eval(*session.arrays())

    def round_():
        proposal = session.propose(ANCHOR, 5, None)
        mx.eval(proposal.tokens, proposal.finite)
        del proposal
        session.commit(features(rows), session.position)
        mx.eval(*session.arrays())

    def taken():
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        round_()
        mx.synchronize()
        return mx.get_peak_memory() - before

    round_()
    round_()
    return max(taken() for _ in range(5)), sum(array.nbytes for array in session.arrays())


def test_a_windowed_draft_costs_the_same_at_any_length(tmp_path):
    """R75."""
    config = z_lab_config(layer_types=["sliding_attention"] * 2, sliding_window=64)
    draft = load_draft(make_draft(tmp_path, config), pretend_target())
    (short, held), (long, held_long) = bytes_of_a_round(draft, 128), bytes_of_a_round(draft, 4096)
    row = held // (64 * 2)  # of one layer
    assert held == held_long
    assert long <= short + 512 * row, "some of the 4032 rows that left the window were touched"


def test_a_full_draft_never_copies_its_context(tmp_path):
    """R75: a round at length n needs the attention scores (4 heads x 6 rows) and nothing else that grows with n."""
    draft = load_draft(make_draft(tmp_path), pretend_target())
    peak, held = bytes_of_a_round(draft, 8000)
    scores, one_array = 4 * 6 * 8006 * 4, held / 4
    assert peak < scores + one_array / 4


def test_long_chunks_of_a_windowed_draft_are_projected_only_where_the_window_looks(drafts, monkeypatch):
    rows = []
    fuse = Backbone.fuse
    monkeypatch.setattr(Backbone, "fuse", lambda self, states: (rows.append(states.shape[1]), fuse(self, states))[1])
    session = opened(drafts["sliding"], [2000], features(2000))
    assert session.position == 2000
    assert rows == [WINDOW - 1 + drafts["sliding"].block_size]
    opened(drafts["mixed"], [2000], features(2000))
    assert rows[1:] == [2000]


def test_a_buffer_moves_its_rows_at_most_once_in_as_many_rows():
    context = LayerContext(reach=300, slack=8)
    row = mx.ones((1, 1, 1, 4))
    moves, begin = 0, 0
    for position in range(5000):
        context.append(row, row, position)
        moves, begin = moves + (context.begin != begin), context.begin
    assert 0 < moves <= 5000 / 308
    assert context.arrays()[0].shape[2] <= 4 * 256


def test_nothing_waits_for_the_device(drafts):
    """Under a trace, reading a value is an error."""
    for draft in drafts.values():
        session = draft.open(pretend_target())

        def round_(states, anchor, session=session):
            session.commit(states, session.position)
            proposal = session.propose(anchor, 5, lambda logits: (mx.argmax(logits, -1), mx.softmax(logits, -1)))
            session.commit(states, session.position)
            return proposal.tokens, proposal.probs, proposal.finite

        tokens, q, finite = mx.compile(round_)(features(20), ANCHOR)
        assert tokens.shape == (5,) and q.shape[0] == 5 and finite.item()


# ------------------------------------------------------------------- masks


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 9, 12])
@pytest.mark.parametrize("context", [0, 1, 5, 11])
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_masks_are_the_definition_counted_from_each_row(window, causal, context, rows):
    if window is not None:
        context = min(context, window - 1)
    expected = np.zeros((rows, context + rows), bool)
    for q in range(rows):
        for k in range(-context, rows):
            near = window is None or abs(q - k) < window
            expected[q, k + context] = near and (k <= q or not causal)
    mask = visibility(context, rows, window=window, causal=causal, from_anchor=False)
    np.testing.assert_array_equal(as_array(mask, context, rows), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_counted_from_the_anchor_needs_no_mask_beyond_causality(causal):
    assert visibility(5, 8, window=5, causal=causal, from_anchor=True) == ("causal" if causal else None)


def as_array(mask, context, rows):
    if mask is None:
        return np.ones((rows, context + rows), bool)
    if isinstance(mask, str):
        assert mask == "causal"
        return np.tril(np.ones((rows, context + rows), bool), context)
    return np.array(mask)


def test_full_bidirectional_layers_get_no_mask_at_all(drafts):
    session = opened(drafts["full"], [50], features(50))
    session.propose(ANCHOR, 5, None)
    assert list(session._masks.values()) == [None]


def test_masks_are_built_once_when_the_window_is_full(drafts):
    session = opened(drafts["sliding bidirectional"], [50], features(50))
    for _ in range(20):
        session.propose(ANCHOR, 5, None)
        session.commit(features(2), session.position)
    assert len(session._masks) == 1
