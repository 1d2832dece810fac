"""Where the program starts. Imports nothing heavy, so that Ctrl-C while the rest is being imported is quiet, too."""

from __future__ import annotations

import sys


def main() -> int:
    """Run ``mlx-dflash`` with ``sys.argv``; returns the exit code (see :func:`mlx_dflash.cli.app.main`)."""
    if sys.stdout is None:  # closed by the caller, as ``>&-`` does
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115  open until the process ends
    try:
        from .app import main as run

        return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
