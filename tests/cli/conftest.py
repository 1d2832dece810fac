"""Runs of the program: in this process, where they cost little, and as a process of its own, where signals count."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlx_dflash.cli.app import main

ROOT = Path(__file__).parents[2]
ENDLESS = ("generate", "def fibonacci(", "-n", "-1", "--logit-bias", "1=-1000", "--logit-bias", "5=-1000")
"""Without its end tokens the bundled model never stops."""


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """``run("generate", "hello", stdin=...)``: no terminal is attached to any stream."""

    def run(*arguments: str, stdin: str | bytes = "") -> Run:
        sent = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(sent)))
        capsys.readouterr()
        code = main(arguments)
        out, err = capsys.readouterr()
        return Run(code, out, err)

    return run


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """The program as a process of its own."""
    command = [sys.executable, "-m", "mlx_dflash", *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return subprocess.Popen(command, **{**pipes, **options})
