"""DFlash v1 on tiny targets."""

from __future__ import annotations

import pytest

from mlx_dflash.drafts.registry import load_draft
from tests.decoding.runs import target

from .end_to_end import check_distribution, check_greedy_text_and_caches
from .make_draft import make_draft, z_lab_config


@pytest.fixture
def draft(tmp_path):
    config = z_lab_config(hidden_size=32, num_target_layers=2, dflash_config={"target_layer_ids": [0, 1]})
    return load_draft(make_draft(tmp_path, config), target("sliding"))


def test_text_and_caches_are_those_of_plain_decoding(draft):
    check_greedy_text_and_caches("sliding", draft, depths=(1, 5))


def test_sampled_text_has_the_target_s_distribution(draft):
    check_distribution("sliding", draft, depth=3)
