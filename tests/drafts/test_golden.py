"""Numbers of the publishers' own code: hidden states, logits, ids of every DFlash-v1 and speculators case."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from .golden import HIDDEN, LOGITS, Recorder, case_name, cases, close, open_case

CASES = cases("dflash_v1", "speculators_dflash")


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_every_round_gives_the_reference_numbers(case):
    draft, target, expected, meta = open_case(case)
    session = draft.open(target)
    assert draft.report.dtype == "float32"
    for i, round_ in enumerate(meta["rounds"]):
        session.commit(expected[f"r{i}.target_features"], round_["start"] - round_["ctx"])
        assert session.position == round_["start"]
        rows = round_["block"]
        draft.short_block = rows < draft.block_size
        anchor = expected[f"r{i}.anchor"]

        close(session.block_hidden(anchor, rows), expected[f"r{i}.block_hidden"], HIDDEN)

        seen = Recorder()
        session.propose(anchor, rows - 1, seen)
        close(seen.logits, expected[f"r{i}.logits"][0], LOGITS)
        if f"r{i}.draft_ids" in expected:
            assert mx.argmax(seen.logits, axis=-1).tolist() == expected[f"r{i}.draft_ids"][0].tolist()

        proposal = session.propose(anchor, rows - 1, None)
        assert proposal.tokens.tolist() == expected[f"r{i}.tokens"][0].tolist()
        assert proposal.finite.item()


@pytest.mark.parametrize("case", [case for case in CASES if "yarn" in case.name], ids=lambda case: case.name)
def test_yarn_frequencies_and_amplitude_are_the_reference_s(case):
    draft, _, _, meta = open_case(case)
    rope = draft.config.layers[0].rope
    np.testing.assert_allclose(1 / np.array(rope.periods), meta["rope"]["inv_freq"], rtol=1e-6)
    assert rope.amplitude == pytest.approx(meta["rope"]["attention_scaling"])


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_layers_are_read_as_the_reference_reads_them(case):
    draft, _, _, meta = open_case(case)
    layers = [{"is_causal": x.causal, "sliding_window": x.window} for x in draft.config.layers]
    assert layers == meta.get("layers", layers)
    assert draft.block_size == meta["block_size"]
    assert draft.parts.mask_id == meta["mask_token_id"]
