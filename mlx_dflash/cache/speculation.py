"""Transactions over the caches of a target: write a block, then keep a prefix of it. Knows caches only through their
:class:`~mlx_dflash.cache.kinds.Kind`, and nothing of models, drafts or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, final

from ..errors import UnsupportedError
from .kinds import KINDS, Kind, leaf_names, leaves


def check_rollback(caches: Sequence[Any]) -> None:
    """Raise :class:`UnsupportedError` if any of the caches cannot be rolled back. Meant for load time."""
    for place, cache in enumerate(leaves(caches)):
        kind = KINDS.get(type(cache))
        reason = "this cache class cannot be rolled back" if kind is None else kind.refusal(cache)
        if reason is not None:
            raise UnsupportedError(f"{leaf_names(caches)[place]}: {reason}")


@final
class Speculation:
    """One block written and, in part, taken back: between :meth:`begin` and the last :meth:`commit`.

    After ``commit(keep)`` every cache is as if only the first ``keep`` rows had been written, by a forward of just
    these. Use it as a context manager around the forward: leaving the block without a commit, by error, by cancel or by
    oversight, keeps nothing, also when only some layers were written.

    No method waits for the device, and what a rollback adds to the work of a round does not grow with the caches.
    Between ``begin`` and its end the object may hold a sliding window's arrays from before; :meth:`release` lets go.
    """

    __slots__ = ("_caches", "_committed", "_kept", "_kinds", "_objects")

    def __init__(self, caches: Sequence[Any], rows: int) -> None:
        if rows < 1:
            raise ValueError(f"rows: {rows} is not a number of rows a forward can write")
        self._caches = caches
        self._objects = list(caches)
        try:
            self._kinds: list[Kind] | None = [KINDS[type(cache)](cache, rows) for cache in leaves(caches)]
        except KeyError:
            check_rollback(caches)
            raise
        self._kept = rows
        self._committed = False

    @classmethod
    def begin(cls, caches: Sequence[Any], rows: int) -> Speculation:
        """Call just before the forward that writes ``rows`` rows into each of the caches."""
        return cls(caches, rows)

    def commit(self, keep: int) -> None:
        """Keep the first ``keep`` rows, ``0 <= keep <= rows``.

        May be called again with fewer rows (a consumer stopped inside the block) as long as nothing else was written
        to the caches; it is checked that every cache was given just the rows announced.
        """
        if not 0 <= keep <= self._kept:
            raise ValueError(f"keep: {keep} is not between 0 and the {self._kept} rows there are")
        kinds = self._checked(keep)
        if keep < self._kept:
            if keep:
                for kind in kinds:
                    kind.cut(keep)
            else:
                for kind in kinds:
                    kind.undo()
        self._kept = keep
        self._committed = True

    def release(self) -> None:
        """Let go of all arrays. The rows kept so far are final; a later ``commit`` is an error."""
        self._kinds = None
        self._objects = []

    def __enter__(self) -> Speculation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed and self._kinds is not None:
            self._abort(self._kinds)

    def _checked(self, keep: int) -> list[Kind]:
        kinds = self._kinds
        if kinds is None:
            raise RuntimeError("commit after release")
        if list(self._caches) != self._objects:
            raise RuntimeError("the caches are not those the transaction began with")
        kept = self._kept
        for place, kind in enumerate(kinds):
            fault = kind.fault(kept)
            # A forward that broke off has not reached some of the caches: they may stay as they are if none is kept.
            if fault is not None and (keep or kind.fault(0)):
                raise RuntimeError(f"{leaf_names(self._objects)[place]}: {fault}")
        return kinds

    def _abort(self, kinds: list[Kind]) -> None:
        lost = [place for place, kind in enumerate(kinds) if not kind.restorable()]
        for kind in kinds:
            kind.undo()
        self._kept = 0
        self._committed = True
        if lost:
            raise RuntimeError(
                f"{leaf_names(self._objects)[lost[0]]}: cannot be restored, it was written in a way not announced"
            )
