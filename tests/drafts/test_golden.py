"""Numbers of the publishers' own code: hidden states, logits, ids of every DFlash-v1 and speculators case."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_dflash.drafts.registry import load_draft

from .make_draft import PretendTarget

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = sorted(
    path.parent for family in ("dflash_v1", "speculators_dflash") for path in (GOLDEN / family).glob("*/meta.json")
)


def open_case(case: Path):
    """The loaded draft, its pretend target, the case's tensors and its description."""
    meta = json.loads((case / "meta.json").read_text())
    config = json.loads((case / "checkpoint" / "config.json").read_text())
    matrices = mx.load(str(GOLDEN / meta["target"]))
    target = PretendTarget(
        matrices["embed_tokens.weight"], matrices["lm_head.weight"], layers=config.get("num_target_layers", 12)
    )
    return load_draft(case / "checkpoint", target), target, mx.load(str(case / "cases.safetensors")), meta


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}/{case.name}")
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

        hidden = session.block_hidden(anchor, rows)
        np.testing.assert_allclose(hidden, expected[f"r{i}.block_hidden"], atol=1e-4, rtol=0)

        seen: list[mx.array] = []

        def greedy(logits: mx.array, seen: list[mx.array] = seen) -> tuple[mx.array, mx.array]:
            seen.append(logits)
            return mx.argmax(logits, axis=-1), mx.softmax(logits, axis=-1)

        session.propose(anchor, rows - 1, greedy)
        np.testing.assert_allclose(seen[0], expected[f"r{i}.logits"][0], atol=2e-4, rtol=0)
        if f"r{i}.draft_ids" in expected:
            assert mx.argmax(seen[0], axis=-1).tolist() == expected[f"r{i}.draft_ids"][0].tolist()

        proposal = session.propose(anchor, rows - 1, None)
        assert proposal.tokens.tolist() == expected[f"r{i}.tokens"][0].tolist()
        assert proposal.finite.item()


@pytest.mark.parametrize("case", [case for case in CASES if "yarn" in case.name], ids=lambda case: case.name)
def test_yarn_frequencies_and_amplitude_are_the_reference_s(case):
    draft, _, _, meta = open_case(case)
    rope = draft.config.layers[0].rope
    np.testing.assert_allclose(1 / np.array(rope.periods), meta["rope"]["inv_freq"], rtol=1e-6)
    assert rope.amplitude == pytest.approx(meta["rope"]["attention_scaling"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}/{case.name}")
def test_layers_are_read_as_the_reference_reads_them(case):
    draft, _, _, meta = open_case(case)
    layers = [{"is_causal": x.causal, "sliding_window": x.window} for x in draft.config.layers]
    assert layers == meta.get("layers", layers)
    assert draft.block_size == meta["block_size"]
    assert draft.parts.mask_id == meta["mask_token_id"]
