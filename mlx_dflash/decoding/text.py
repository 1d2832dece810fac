"""From tokens to text: stop strings over any chunking. Detokenising itself is mlx-lm's.

Knows strings only; which tokens produced them is the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import OptionError


class StopStrings:
    """Finds the stop string that is complete first in a text that arrives in pieces.

    Nothing at or after a match is ever released, and the longest tail that could still become a match is held back
    until it does or does not. The released pieces do not depend on how the text was cut, only their joining does.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        """Args: ``stops``: non-empty strings. Raises OptionError for an empty one or for something else."""
        self._stops = tuple(stops)
        for stop in self._stops:
            if not isinstance(stop, str) or not stop:
                raise OptionError(f"stop: found {stop!r}, expected a non-empty string")
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take the next piece, return what may be shown. After a match (``matched`` is set) returns ``""`` for ever."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        hits = [(self._held.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in self._held]
        if hits:
            # The match that is complete first wins, as it would if the text came one character at a time.
            end, _, self.matched = min(hits)
            shown, self._held = self._held[: end - len(self.matched)], ""
            return shown
        keep = self._possible_prefix()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """The text ended: return what was held back for a match that did not come."""
        shown, self._held = self._held, ""
        return shown

    def _possible_prefix(self) -> int:
        """Length of the longest tail of the held text that begins one of the stop strings."""
        longest = min(len(self._held), max(len(stop) for stop in self._stops) - 1)
        for size in range(longest, 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
