"""Stop strings over any chunking."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dflash.decoding.text import StopStrings
from mlx_dflash.errors import OptionError


def shown(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    finder = StopStrings(stops)
    text = "".join(finder.push(piece) for piece in pieces)
    return text + finder.flush(), finder.matched


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab\n", max_size=24),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 24), max_size=8),
)
def test_every_chunking_shows_the_same_text(text: str, stops: list[str], cuts: list[int]) -> None:
    """R30: one character at a time is the definition; whatever pieces the text comes in, the result is the same."""
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert shown(pieces, stops) == shown(list(text), stops)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="abc", max_size=20), stops=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1))
def test_nothing_at_or_after_a_match_is_shown_and_nothing_before_is_lost(text: str, stops: list[str]) -> None:
    result, matched = shown(list(text), stops)
    assert not any(stop in result for stop in stops)
    assert text.startswith(result)
    if matched is None:
        assert result == text
    else:
        assert text[len(result) :].startswith(matched)


def test_a_possible_beginning_is_held_back_and_released_when_it_does_not_complete() -> None:
    finder = StopStrings(["END"])
    assert [finder.push(piece) for piece in ("aE", "N", "X", "EN")] == ["a", "", "ENX", ""]
    assert finder.flush() == "EN"


def test_text_without_stops_passes_at_once() -> None:
    assert StopStrings().push("anything") == "anything"


@pytest.mark.parametrize("stop", ["", 3])
def test_an_empty_stop_is_refused(stop: object) -> None:
    with pytest.raises(OptionError, match="stop: found"):
        StopStrings([stop])  # type: ignore[list-item]
