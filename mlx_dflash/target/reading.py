"""Reads the JSON files of a checkpoint folder, or says in one line why it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """The object a file holds.

    Raises:
        ConfigError: the file is no UTF-8 JSON object; names the file, line and column.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: line {error.lineno}, column {error.colno}: invalid JSON ({error.msg})") from None
    except (OSError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: found no readable JSON ({one_line(error)})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: found {type(content).__name__}, expected a JSON object")
    return content


def one_line(error: BaseException, limit: int = 300) -> str:
    """What another library said, without its line breaks, cut to ``limit`` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
