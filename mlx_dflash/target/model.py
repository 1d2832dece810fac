"""Target: an mlx-lm model with taps, its raw embedding and its raw head. The model's own forward runs unmodified.

Knows one model and its caches' constructor; not how caches are rolled back, nor what drafts do with features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..errors import OptionError, PairingError, UnsupportedError
from .probe import check_runs, probe
from .structure import Parts, find_parts, model_type_of, sizes_of
from .taps import EMBEDDING_TAP, Taps


class Target:
    """The model whose output is wanted. Satisfies :class:`mlx_dflash.drafts.base.TargetFacts`.

    Wrapping copies no weight and leaves the model as it was; several targets may wrap one model. A target runs one
    forward at a time.

    Attributes:
        model: the object mlx-lm made.
        tokenizer: what came with it, or ``None``.
        name: how the user called it, for messages.
        model_type: the checkpoint's own, wrapper types included (``gemma4_unified``).
        hidden_size, num_layers: of the text model.
        vocab_size: rows of the embedding table. These three are the config's own where :attr:`parts` were not found,
            and 0 where that does not say either.
        embed_scale: what the model's forward multiplies embedding rows with; 1.0 when it does not.
        shaping: what the model does to the head's output before it returns logits (``"softcap 30"``, ``"times
            0.0625"``); ``None`` for nothing. Known after :meth:`check`.
    """

    def __init__(self, model: nn.Module, *, name: str = "", tokenizer: Any = None) -> None:
        """Never fails for a model that mlx-lm runs: what only a draft needs is missed when a draft asks for it."""
        self.model, self.name, self.tokenizer = model, name, tokenizer
        self.model_type = model_type_of(model)
        self.shaping: str | None = None
        self._taps: dict[tuple[int, ...], Taps] = {}
        self._parts: Parts | None = None
        self._not_found = ""
        try:
            self._parts = find_parts(model)
        except UnsupportedError as error:
            self._not_found = str(error)
        self.hidden_size, self.num_layers, self.vocab_size = sizes_of(model, self._parts)
        self.embed_scale = 1.0 if self._parts is None else self._parts.embed_scale

    @property
    def parts(self) -> Parts:
        """Where embedding, layers, last norm and head are.

        Raises:
            UnsupportedError: they are not where mlx-lm's families keep them; such a model decodes plainly.
        """
        if self._parts is None:
            raise UnsupportedError(self._not_found)
        return self._parts

    def embed(self, ids: mx.array) -> mx.array:
        """``[..., L] int -> [..., L, H]``: raw rows of the embedding table, dequantised when it is quantised."""
        return self.parts.embedding(ids)

    def head(self, hidden: mx.array) -> mx.array:
        """``[..., H] -> [..., V]``: the raw product with the target's own head, without softcap or multiplier."""
        return self.parts.project(hidden)

    def forward(self, ids: mx.array, caches: list[Any], taps: tuple[int, ...] = ()) -> tuple[mx.array, mx.array | None]:
        """One forward of the model over ``ids``, which are appended to ``caches``.

        Args:
            ids: ``[1, L]`` int.
            caches: from :meth:`make_caches`; written to.
            taps: layers whose outputs are wanted, 0-based; -1 is the input of layer 0 (scaled, where the model scales),
                and the number of layers is the output of the final norm.

        Returns:
            Logits ``[1, L, V]`` as the model shapes them, and the tapped hidden states ``[1, L, len(taps) * H]``
            concatenated in the order of ``taps``; ``None`` without taps.

        Raises:
            PairingError: a tap names no layer of this model.
            UnsupportedError: there are taps, and the model's layers were not found.
        """
        if not taps:
            return self.model(ids, cache=caches), None
        installed = self._taps.get(taps)
        if installed is None:
            parts = self.parts
            installed = self._taps[taps] = Taps(parts.layers, parts.norm, self._checked(taps))
        return installed.run(lambda: self.model(ids, cache=caches))

    def _checked(self, taps: Sequence[int]) -> tuple[int, ...]:
        for tap in taps:
            if not EMBEDDING_TAP <= tap <= self.num_layers:
                raise PairingError(
                    f"tap layer {tap}: found a target of {self.num_layers} layers ({self.name or self.model_type}), "
                    f"expected {EMBEDDING_TAP} .. {self.num_layers - 1}, or {self.num_layers} for its final norm"
                )
        return tuple(taps)

    def make_caches(self, max_kv_size: int | None = None) -> list[Any]:
        """Empty caches of mlx-lm's choice. ``max_kv_size`` bounds them only where the model has no layout of its own,
        as in mlx-lm."""
        return make_prompt_cache(self.model, max_kv_size)

    def check(self, taps: Sequence[int] = ()) -> None:
        """Prove with a short forward that taps, embedding and head are what this class says they are.

        Raises:
            PairingError: a tap names no layer.
            UnsupportedError: the model computes in a way that taps or head cannot follow; one line with the reason.
            CheckpointError: the model's logits are not finite; names the first weight that is not.
        """
        self.shaping = probe(self, self.parts, self._checked(taps))

    def check_runs(self) -> None:
        """Part of :meth:`check`, for a model that will decode alone: a short forward gives numbers.

        Raises:
            UnsupportedError: the forward fails, or overflows although every weight is finite.
            CheckpointError: the logits are not finite; names the first weight that is not.
        """
        check_runs(self)

    def validate_ids(self, ids: Sequence[int]) -> None:
        """Refuse ids outside the embedding table, where its size is known: MLX would read whatever lies there.

        Raises:
            OptionError: naming the id, its place and the table's size.
        """
        if not ids or not self.vocab_size or (min(ids) >= 0 and max(ids) < self.vocab_size):
            return
        place = next(i for i, token in enumerate(ids) if not 0 <= token < self.vocab_size)
        raise OptionError(
            f"token id {ids[place]} at position {place}: expected 0 .. {self.vocab_size - 1}, the rows of "
            f"{self.name or self.model_type}'s embedding table"
        )
