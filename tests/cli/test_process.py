"""What only a process of its own shows: streams, exit codes, Ctrl-C, a reader that leaves, a terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess

from tests.cli.conftest import ENDLESS, start


def test_stdout_holds_the_text_and_nothing_else() -> None:
    process = start("generate", "def fibonacci(")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out.startswith("n):\n") and out.endswith("return a\n")
    assert "demonstration" in err and "speculative, depth 15" in err and "tokens/s" in err
    # The function that is printed works: what the reader sees is a program.
    scope: dict[str, object] = {}
    exec("def fibonacci(" + out, scope)
    assert scope["fibonacci"](10) == 55  # type: ignore[operator]


def test_ctrl_c_ends_between_two_tokens_with_the_closing_line() -> None:
    process = start(*ENDLESS)
    assert process.stdout is not None
    shown = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert shown + out
    assert "interrupted" in err.splitlines()[-1] and "acceptance length" in err.splitlines()[-1]
    assert "Traceback" not in err and "error" not in err


def test_a_reader_that_leaves_is_no_error() -> None:
    process = start(*ENDLESS)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert "Traceback" not in err and "error" not in err and "Broken" not in err


def test_a_terminal_sees_the_prompt_continued() -> None:
    controller, terminal = pty.openpty()
    process = start(
        "generate", "def fibonacci(", "--max-tokens", "4", stdout=terminal, stderr=terminal, stdin=subprocess.DEVNULL
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            chunk = os.read(controller, 4096)
        except OSError:  # Linux: the other side is gone
            break
        if not chunk:  # macOS
            break
        shown += chunk
    os.close(controller)
    assert process.wait(timeout=60) == 0
    assert b"def fibonacci(" in shown and b"loading the bundled pair" in shown
