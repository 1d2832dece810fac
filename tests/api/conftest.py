"""The bundled pair, a tiny byte-level pair with drafts that know the answer, and what plain mlx-lm says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx_lm
import pytest
from mlx_lm.utils import load_tokenizer

import mlx_dflash
from mlx_dflash.pair import Pair
from mlx_dflash.target import Target
from tests import stub_drafts, tiny_models

BYTE_VOCAB = 272
"""Room for every byte and the special tokens: any text can be cut anywhere."""


@pytest.fixture(scope="session")
def bundled() -> tuple[Pair, Any]:
    return mlx_dflash.load()


@dataclass
class Tiny:
    """A tiny Gemma-4-like target (window 8) that speaks bytes, and its plain answers."""

    target: Target
    tokenizer: Any

    def plain(self, prompt: str | list[int], tokens: int, **options: Any) -> list[Any]:
        """mlx-lm's own responses."""
        return list(mlx_lm.stream_generate(self.target.model, self.tokenizer, prompt, max_tokens=tokens, **options))

    def pair(self, draft_name: str, prompt: str | list[int], tokens: int, **draft_options: Any) -> Pair:
        """A pair whose draft knows the plain answer to ``prompt``: perfect, hostile, or scripted."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        known = ids + [response.token for response in self.plain(ids, tokens)]
        accepts = draft_options.pop("accepts", [3, 0, 5, 1])
        draft = {
            "perfect": lambda: stub_drafts.perfect(known, vocab_size=BYTE_VOCAB, **draft_options),
            "hostile": lambda: stub_drafts.hostile(known, vocab_size=BYTE_VOCAB, **draft_options),
            "scripted": lambda: stub_drafts.scripted(known, accepts, vocab_size=BYTE_VOCAB, **draft_options),
        }[draft_name]()
        return Pair(self.target, draft)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_models.tiny_gemma4(layers=3, vocab=BYTE_VOCAB, window=8)
    tiny_models.save_tokenizer(folder, BYTE_VOCAB)
    tokenizer = load_tokenizer(folder, eos_token_ids=[1])
    return Tiny(Target(model, name="tiny", tokenizer=tokenizer), tokenizer)
