"""Reading the cases under ``tests/golden``: a publisher's checkpoint, what goes in, and what its own code gave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from mlx_dflash.drafts.registry import load_draft

from .make_draft import PretendTarget

GOLDEN = Path(__file__).parent.parent / "golden"
HIDDEN, LOGITS, Q = 1e-4, 2e-4, 2e-5
"""Tolerances: the references' own float32 noise is ten times smaller."""


class Case(NamedTuple):
    """``tensors`` are named ``r{round}.{what}``; ``meta["rounds"]`` says how many rows each round has."""

    draft: Any
    target: PretendTarget
    tensors: dict[str, mx.array]
    meta: dict[str, Any]


def cases(*families: str) -> list[Path]:
    """The folders of all cases of these families."""
    return sorted(path.parent for family in families for path in (GOLDEN / family).glob("*/meta.json"))


def case_name(case: Path) -> str:
    return f"{case.parent.name}/{case.name}"


def pretend_target_of(case: Path, meta: dict[str, Any]) -> PretendTarget:
    """The two matrices a case runs against; a draft that brings its own gets zeros, so that using them shows."""
    config = json.loads((case / "checkpoint" / "config.json").read_text())
    layers = config.get("num_target_layers", 12)
    if meta.get("target"):
        matrices = mx.load(str(GOLDEN / meta["target"]))
        return PretendTarget(matrices["embed_tokens.weight"], matrices["lm_head.weight"], layers=layers)
    own = mx.load(str(case / "checkpoint" / "model.safetensors"))
    table = next(array for name, array in own.items() if name.endswith("embed_tokens.weight"))
    return PretendTarget(mx.zeros(table.shape), layers=layers)


def open_case(case: Path, **options: Any) -> Case:
    """Load the publisher's files through the package's own loader; ``options`` go to ``load_draft``."""
    meta = json.loads((case / "meta.json").read_text())
    target = pretend_target_of(case, meta)
    draft = load_draft(case / "checkpoint", target, **options)
    return Case(draft, target, mx.load(str(case / "cases.safetensors")), meta)


def close(found: mx.array, expected: mx.array, tolerance: float) -> None:
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=tolerance, rtol=0)


class Recorder:
    """A sampler that takes the largest logit, as a greedy draft does, and keeps what it was shown, row by row."""

    def __init__(self) -> None:
        self.rows: list[mx.array] = []

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        self.rows += list(logits)
        return mx.argmax(logits, axis=-1).astype(mx.int32), mx.softmax(logits, axis=-1)

    @property
    def logits(self) -> mx.array:
        """``[rows, V]``."""
        return mx.stack(self.rows)


class Replayer(Recorder):
    """Takes the reference's own tokens one after another instead (as places in each row), and softmaxes at a
    temperature: the q along the reference's path."""

    def __init__(self, places: list[int], temperature: float) -> None:
        super().__init__()
        self.places, self.temperature = list(places), temperature

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        start = len(self.rows)
        self.rows += list(logits)
        chosen = self.places[start : start + logits.shape[0]]
        return mx.array(chosen, mx.int32), mx.softmax(logits / self.temperature, axis=-1)


def committed_rounds(case: Case) -> Iterator[tuple[int, dict[str, Any], Any]]:
    """``(i, round, session)`` of each of a block drafter's rounds, with the round's context committed. The draft runs a
    whole block, or a short one where the round does."""
    session = case.draft.open(case.target)
    for i, round_ in enumerate(case.meta["rounds"]):
        features = case.tensors[f"r{i}.target_features"]
        session.commit(features, round_["start"] - round_["ctx"], [0] * features.shape[1])
        assert session.position == round_["start"]
        case.draft.short_block = round_["block"] < case.draft.block_size
        yield i, round_, session


def check_rounds(case: Case, first_row: int) -> None:
    """Hidden states of every row, logits of the proposing rows along the greedy path, and the greedy proposal."""
    for i, round_, session in committed_rounds(case):
        rows, anchor = round_["block"], case.tensors[f"r{i}.anchor"]
        close(session.block_hidden(anchor, rows), case.tensors[f"r{i}.block_hidden"], HIDDEN)
        proposal = session.propose(anchor, rows - first_row, None)
        assert proposal.tokens.tolist() == case.tensors[f"r{i}.tokens"][0].tolist()
        assert proposal.finite.item()


def drawn_paths(*families: str) -> list[Any]:
    """``(case, temperature)`` of every path that a reference drew by chance."""
    found = []
    for case in cases(*families):
        names = mx.load(str(case / "cases.safetensors"))
        temperatures = sorted({name.split("temp")[1].removesuffix(".q") for name in names if name.endswith(".q")})
        found += [pytest.param(case, t, id=f"{case_name(case)}-{t}") for t in temperatures]
    return found
