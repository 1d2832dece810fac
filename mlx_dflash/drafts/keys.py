"""Looks values up in a ``config.json`` whose keys move between levels, and remembers where each one was found.

Knows JSON and messages; which places a value may stand in is the caller's knowledge.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, OptionError

_LARGEST = 1 << 31
_LIMITS = {"num_hidden_layers": 1 << 10, "block_size": 1 << 12, "head_dim": 1 << 16, "num_attention_heads": 1 << 16}
"""Largest believable values of what decides how much is built before the tensors' shapes are compared."""
NESTED = ("dflash_config", "eagle_config")
"""Where drafts keep the keys that a plain language model has no name for; the first one that holds a key wins."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        ConfigError: not there, not readable, or not an object; names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: found no such file, expected a draft's {path.name}") from None
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{path}: found no readable JSON ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: found {type(content).__name__}, expected a JSON object")
    return content


OVERRIDE = "draft_config"
"""The level of values that the caller sets; named as the option of ``load`` is."""


def nested(name: str) -> tuple[str, ...]:
    """The places of a key that belongs into ``dflash_config``, then the top level."""
    return (*(f"{level}.{name}" for level in NESTED), name)


def is_positive(value: Any) -> bool:
    """A number above 0 that a float can hold; JSON's whole numbers may be larger."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value <= sys.float_info.max


@dataclass
class ConfigRecord:
    """What was read of one config, by whom-ever looked: for reports, and for values that the caller overrides.

    Attributes:
        overrides: value name -> what the caller wants it to be, whatever the config says.
        read: value name -> (value, the place it was read from).
        notes: what was read and deliberately not used, with the reason.
        looked_at: every place that was asked for, whether something stood there or not.
    """

    overrides: Mapping[str, Any] = field(default_factory=dict)
    read: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    looked_at: set[str] = field(default_factory=set)

    @property
    def sources(self) -> dict[str, str]:
        """Value name -> place."""
        return {name: place for name, (_, place) in self.read.items()}

    def note(self, text: str) -> None:
        """Add a note once."""
        if text not in self.notes:
            self.notes.append(text)

    def check_overrides(self) -> None:
        """Raises OptionError for an override of a value that nobody asked for, with those that were."""
        for name in self.overrides:
            if not self.read.get(name, (None, ""))[1].startswith(OVERRIDE):
                known = ", ".join(sorted(self.read))
                raise OptionError(f"draft_config: found {name!r}, expected a value this draft's loader reads: {known}")

    def unread(self, content: Mapping[str, Any], levels: Sequence[str]) -> list[str]:
        """Places in ``levels`` (``""`` for the top) that hold something and that nobody asked for."""
        found = []
        for level in levels:
            for name, value in _level(content, level).items():
                place = f"{level}.{name}" if level else name
                if value is not None and place not in self.looked_at:
                    found.append(place)
        return found


def _level(content: Mapping[str, Any], level: str) -> Mapping[str, Any]:
    value = content.get(level) if level else content
    return value if isinstance(value, Mapping) else {}


class ConfigKeys:
    """A config with its look-ups. A place is a dotted path such as ``dflash_config.block_size``; null counts as absent.

    Attributes:
        file: the config's path, for messages.
        record: what was read, shared by everybody who reads this config.
    """

    def __init__(
        self,
        file: Path,
        content: Mapping[str, Any],
        *,
        backbone: str = "",
        defaults: Mapping[str, Any] | None = None,
        record: ConfigRecord | None = None,
    ) -> None:
        """``backbone`` is the level that holds the transformer's own keys, ``""`` for the top. ``defaults`` stand for
        backbone keys that a serialised difference leaves out; without them nothing is ever assumed."""
        self.file, self.content = file, content
        self.record = ConfigRecord() if record is None else record
        self._backbone, self._defaults = backbone, dict(defaults or {})

    @property
    def sources(self) -> dict[str, str]:
        """Value name -> the place it was read from."""
        return self.record.sources

    def derived(self, name: str, value: Any, how: str) -> None:
        """Record a value that no key states, with the rule that gave it."""
        self.record.read[name] = (value, how)

    def at(self, place: str) -> Any:
        """The value at a place, ``None`` when there is none."""
        self.record.looked_at.add(place)
        value: Any = self.content
        for part in place.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(part)
        return value

    def backbone(self, name: str) -> tuple[str, ...]:
        """The place of a backbone key."""
        return (f"{self._backbone}.{name}" if self._backbone else name,)

    def find(self, name: str, places: Sequence[str]) -> tuple[Any, str] | None:
        """The caller's override of ``name``, else the first place that holds something; recorded under ``name``."""
        found = None
        for place in places:
            value = self.at(place)
            if found is None and value is not None:
                found = value, place
        if name in self.record.overrides:
            found = self.record.overrides[name], f"{OVERRIDE}.{name}"
        elif found is None and self._defaults.get(name) is not None:
            found = self._defaults[name], f"default behind {self._backbone}, which stores only what differs"
            self.record.read[name] = found
            return self._defaults[name], f"{self._backbone}.{name}"
        if found is not None:
            self.record.read[name] = found
        return found

    def missing(self, name: str, places: Sequence[str], expected: str) -> ConfigError:
        return ConfigError(f"{self.file}: {name}: found none (looked at {', '.join(places)}), expected {expected}")

    def wrong(self, place: str, value: Any, expected: str) -> ConfigError:
        shown = repr(value)
        shown = shown if len(shown) <= 200 else shown[:197] + "..."
        return ConfigError(f"{self.file}: {place}: found {shown}, expected {expected}")

    def wrong_text(self, place: str, found: str, expected: str) -> ConfigError:
        """As :meth:`wrong`, for a value too long to show."""
        return ConfigError(f"{self.file}: {place}: found {found}, expected {expected}")

    def integer(self, name: str, places: Sequence[str], low: int = 1, *, optional: bool = False) -> int | None:
        """A whole number of at least ``low``.

        Raises:
            ConfigError: something else stands there, or nothing does and it is not ``optional``.
        """
        high = _LIMITS.get(name, _LARGEST)
        expected = f"a whole number of at least {low}"
        found = self.find(name, places)
        if found is None:
            if optional:
                return None
            raise self.missing(name, places, expected)
        value, place = found
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value < high:
            raise self.wrong(
                place, found[0], expected if type(value) is not int or value < low else f"less than {high}"
            )
        return value

    def size(self, name: str, places: Sequence[str]) -> int:
        """A required positive whole number."""
        value = self.integer(name, places)
        assert value is not None
        return value

    def number(self, name: str, places: Sequence[str], default: float | None = None) -> float | None:
        """A finite number above 0; ``default`` when there is none."""
        found = self.find(name, places)
        if found is None:
            return default
        value, place = found
        if not is_positive(value):
            raise self.wrong(place, value, "a number above 0")
        return float(value)

    def boolean(self, name: str, places: Sequence[str]) -> bool | None:
        found = self.find(name, places)
        if found is None:
            return None
        value, place = found
        if not isinstance(value, bool):
            raise self.wrong(place, value, "true or false")
        return value

    def mapping(self, place: str) -> Mapping[str, Any]:
        """The object at a place, empty when there is none."""
        value = self.at(place)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.wrong(place, value, "an object")
        return value
