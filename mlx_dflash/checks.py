"""Checks of single option values, so that every one of them is refused in the same words. Knows no option by name."""

from __future__ import annotations

import math
import sys
from typing import Any

from .errors import OptionError


def require_number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Raises OptionError unless ``value`` is a finite number in ``low..high``."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Comparing is safe where converting is not: a whole number may be too large for a float.
    largest = sys.float_info.max
    if not is_number or not max(low, -largest) <= value <= min(high, largest):
        bounds = f" in {low:g}..{high:g}" if high < math.inf else f" of {low:g} or more" if low > -math.inf else ""
        raise OptionError(f"{name}: found {_shown(value)}, expected a {'' if bounds else 'finite '}number{bounds}")


def require_integer(name: str, value: Any, low: int) -> None:
    """Raises OptionError unless ``value`` is a whole number of at least ``low``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise OptionError(f"{name}: found {_shown(value)}, expected a whole number of {low} or more")


def require_boolean(name: str, value: Any) -> None:
    """Raises OptionError unless ``value`` is true or false and nothing that merely counts as one."""
    if not isinstance(value, bool):
        raise OptionError(f"{name}: found {_shown(value)}, expected True or False")


def require_callable(name: str, value: Any) -> None:
    """Raises OptionError unless ``value`` can be called."""
    if not callable(value):
        raise OptionError(f"{name}: found {_shown(value)}, expected something to call")


def _shown(value: Any, limit: int = 80) -> str:
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python refuses to print whole numbers of more than some thousand digits
        text = f"a {type(value).__name__} too long to print"
    return text if len(text) <= limit else text[: limit - 3] + "..."
