"""The program ``mlx-dflash``: its commands, and what becomes of errors. Nobody but a developer sees a traceback."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import MlxDflashError, OptionError
from . import output
from .generate import INTERRUPTED, generate

DEBUG = "MLX_DFLASH_DEBUG"
"""Environment variable: show the traceback of an error."""

BROKEN_PIPE = 141
"""What a shell reports for a program that SIGPIPE ended."""

_UsageError: Any = typer.BadParameter.__base__  # typer brings its own click, or uses the installed one, by version

app = typer.Typer(
    name="mlx-dflash",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)

_FLAG_OF = {"bits": "draft_bits", "dtype": "draft_dtype"}
"""Arguments deeper down that have a shorter name there."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mlx-dflash {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Lossless speculative decoding with DFlash-family drafts on MLX.

    [bold]Examples[/bold]

      mlx-dflash generate "def fibonacci("
      mlx-dflash generate --model Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 "Hello"
      mlx-dflash generate --help
    """
    if context.invoked_subcommand is None:
        print(context.get_help(), end="")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        arguments: ``sys.argv[1:]`` when not given.

    Returns:
        The exit code: 0, 1 for an error, 2 for a usage error, 130 after Ctrl-C, 141 when the reader of stdout left.
    """
    command = typer.main.get_command(app)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the program
    try:
        # Not command.main(): it has its own idea of what Ctrl-C and a closed pipe look like.
        with command.make_context("mlx-dflash", list(sys.argv[1:] if arguments is None else arguments)) as context:
            command.invoke(context)
        sys.stdout.flush()
        return 0
    except typer.Exit as exit_:
        return exit_.exit_code
    except BrokenPipeError:
        return _reader_left()
    except (KeyboardInterrupt, typer.Abort):
        output.say("interrupted")
        return INTERRUPTED
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        return _report(error)


def _report(error: Exception) -> int:
    if isinstance(error, _UsageError):
        output.error(error.format_message() or "no command given")
        return 2
    if isinstance(error, OptionError):
        output.error(_flag_named(str(error)))
        return 2
    if isinstance(error, MlxDflashError):
        output.error(str(error))
        return 1
    if isinstance(error, OSError) and error.strerror:
        output.error(f"{error.filename or 'stdout'}: {error.strerror}")
        return 1
    output.error(f"{type(error).__name__}: {error} (not foreseen; {DEBUG}=1 shows where it came from)")
    return 1


def _flag_named(message: str) -> str:
    """The API names its argument, ``top_p: found ...``; at a shell that is ``--top-p: found ...``."""
    named = re.match(r"[a-z_]+(?=:| of token)", message)
    name = "" if named is None else _FLAG_OF.get(named[0], named[0])
    command: Any = typer.main.get_command(app)
    flags = {parameter.name for parameter in command.commands["generate"].params} - {"prompt"}
    if name not in flags:
        return message
    return "--" + name.replace("_", "-") + message[0 if named is None else named.end() :]


def _reader_left() -> int:
    """``| head`` has seen enough. The interpreter flushes stdout once more at exit, so that has to go nowhere."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, sys.stdout.fileno())
    os.close(sink)
    return BROKEN_PIPE
