"""Prints the lower bounds of pyproject.toml as exact versions, one a line, for ``pip install --constraint``.

python scripts/lower_bounds.py
"""

from __future__ import annotations

import re
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lower_bounds(text: str) -> list[str]:
    """``name==version`` for each dependency of the package, with its Python version where one is stated.

    Python 3.10 has no TOML reader, hence a regular expression; the list holds one requirement a line.
    """
    listed = text.partition("\ndependencies = [")[2].partition("\n]")[0]
    requirement = re.compile(
        r"""^\s*"([A-Za-z0-9_-]+)(?:\[[a-z]+\])?>=([0-9.]+)(; python_version [<>=]+ '[0-9.]+')?""", re.MULTILINE
    )
    return sorted({f"{name}=={version}{python}" for name, version, python in requirement.findall(listed)})


if __name__ == "__main__":
    print("\n".join(lower_bounds(PYPROJECT.read_text(encoding="utf-8"))))
