"""How deep to draft next: a policy asked once a round, and told afterwards what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class DepthPolicy(Protocol):
    """Chooses the number of tokens to propose; 0 is a plain decoding step and is always a legal answer."""

    def choose(self, limit: int) -> int:
        """The depth of the next round, ``0..limit``. ``limit`` already respects the draft and the token budget."""
        ...

    def observe(self, depth: int, accepted: int) -> None:
        """A round at ``depth`` had ``accepted`` of its proposed tokens stand."""
        ...


@dataclass(frozen=True)
class FixedDepth:
    """The depth the user or the checkpoint's block asks for, every round."""

    depth: int

    def choose(self, limit: int) -> int:
        return min(self.depth, limit)

    def observe(self, depth: int, accepted: int) -> None:
        return None
