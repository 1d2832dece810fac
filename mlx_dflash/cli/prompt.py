"""From what the user typed, piped or saved to the token ids the model is given."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from ..errors import OptionError


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt from the argument, the file, or stdin. One newline at the end of a file or pipe is not part of it.

    Raises:
        OptionError: there is no prompt, or there are two, or its file cannot be read as text.
    """
    if argument is not None and file is not None:
        raise OptionError("--prompt-file: found a prompt as argument, too; expected one of them")
    if file is not None:
        text = _read_file(file)
    elif argument is not None and argument != "-":
        text = argument
    elif argument is None and sys.stdin.isatty():
        raise OptionError("PROMPT: found none, expected text, - for stdin, or --prompt-file")
    else:
        text = _read_stdin()
    if not text:
        raise OptionError("PROMPT: found an empty text, expected at least one character")
    return text


def _read_file(file: Path) -> str:
    try:
        return _strip_newline(file.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--prompt-file: {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"--prompt-file: {file}: found bytes that are not UTF-8, expected text") from error


def _read_stdin() -> str:
    try:
        return _strip_newline(sys.stdin.buffer.read().decode("utf-8"))
    except UnicodeDecodeError:
        raise OptionError("stdin: found bytes that are not UTF-8, expected text") from None


def _strip_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def is_chat(tokenizer: Any, prompt: str, *, wanted: bool | None, system: str | None, bundled: bool) -> bool:
    """Whether the prompt is a turn of a chat rather than a text to continue.

    Args:
        wanted: what the user said, if anything.
        bundled: the bundled model was trained to answer questions *and* to continue Python; asked to continue a
            function in a chat it only greets, so a prompt that begins as one is taken for what it is.

    Raises:
        OptionError: a chat was asked for and the tokenizer has no template.
    """
    has_template = bool(tokenizer.has_chat_template)
    if not has_template and (wanted or system is not None):
        flag = "--chat-template" if wanted else "--system"
        raise OptionError(f"{flag}: found a tokenizer without a chat template, expected one with it")
    if wanted is not None:
        return wanted
    if bundled and system is None and re.match(r"(def|class)\s", prompt):
        return False
    return has_template


def encode(tokenizer: Any, prompt: str, *, chat: bool, system: str | None, template: dict[str, Any]) -> str | list[int]:
    """Token ids of a chat turn, as mlx-lm's own command line makes them, or the text itself.

    Raises:
        OptionError: the template refuses the messages.
    """
    if not chat:
        return prompt
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template)
    except Exception as error:  # templates are programs of their own and raise what they like
        cause = " ".join(str(error).split())
        raise OptionError(f"chat template: {type(error).__name__}: {cause}; --no-chat-template does without") from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def template_arguments(config: str | None, wanted: bool | None) -> dict[str, Any]:
    """``--chat-template-config``, which only a chat uses.

    Raises:
        OptionError: it is no JSON object, or the chat template is switched off.
    """
    if config is None:
        return {}
    if wanted is False:
        raise OptionError("--chat-template-config: found together with --no-chat-template, expected one of them")
    try:
        arguments = json.loads(config)
    except ValueError as error:
        raise OptionError(f"--chat-template-config: found {config!r}, expected a JSON object ({error})") from None
    if not isinstance(arguments, dict):
        raise OptionError(f"--chat-template-config: found {config!r}, expected a JSON object")
    return arguments


def parse_bias(entries: list[str] | None) -> dict[int, float] | None:
    """``["42=-1.5"]`` -> ``{42: -1.5}``.

    Raises:
        OptionError: an entry is not of that form.
    """
    bias: dict[int, float] = {}
    for entry in entries or ():
        token, _, value = entry.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise OptionError(f"--logit-bias: found {entry!r}, expected ID=VALUE such as 42=-1.5") from None
    return bias or None


def unescape(stop: str) -> str:
    """A newline is hard to type at a shell, so ``\\n`` and ``\\t`` stand for what they stand for everywhere."""
    return stop.replace("\\n", "\n").replace("\\t", "\t")
