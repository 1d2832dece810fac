"""Which token ids end a turn: what the checkpoint declares, and the turn markers its chat template writes.

Knows config files and tokenizers, not decoding. A declared set is often incomplete: a model that ends its turn with a
marker nobody declared goes on and invents the other side of the conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .reading import read_json

_MARKERS: dict[str, tuple[str, ...]] = {
    "<turn|>": (),  # Gemma 4
    "<end_of_turn>": (),  # Gemma to Gemma 3
    "<|im_end|>": (),  # ChatML: Qwen, Kimi, SmolLM, Nemotron, LFM2, ...
    "<|eot_id|>": (),  # Llama 3
    "<|eom_id|>": (),  # Llama 3.1, after a built-in tool call
    "<|eot|>": (),  # Llama 4
    "<|eom|>": (),  # Llama 4, after a tool call
    "<|END_OF_TURN_TOKEN|>": (),  # Command R
    "[|endofturn|]": (),  # EXAONE
    "<|role_end|>": (),  # Bailing / Ling
    # These words mean something else elsewhere, so they count only in the families that end a turn with them.
    "<|tool_response>": ("gemma4",),  # opens the tool's answer, which is not the model's to write
    "<|return|>": ("gpt_oss",),  # harmony: end of the final answer
    "<|call|>": ("gpt_oss",),  # harmony: end of a tool call; harmony's <|end|> only separates messages
    "<|end|>": ("phi3", "phimoe", "phi4"),
    "<|user|>": ("glm", "chatglm"),  # GLM ends its turn by opening the next one
    "<|observation|>": ("glm", "chatglm"),
}
"""Marker -> prefixes of the model types it counts for; empty for all. It also has to be a special token of the
tokenizer and to stand in the chat template."""


def end_tokens(
    tokenizer: Any, config: Mapping[str, Any], generation_config: Mapping[str, Any] | Path | None = None
) -> frozenset[int]:
    """Every token id after which the model has said what it had to say.

    Args:
        tokenizer: mlx-lm's wrapper or a transformers tokenizer.
        config: content of ``config.json``; its ``text_config`` counts too.
        generation_config: content of ``generation_config.json``, or the checkpoint's folder, from which that file and
            ``config.json`` itself are read (mlx-lm's ``load`` replaces the ids of the one by the other's).

    Raises:
        ConfigError: an ``eos_token_id`` is not a token id or a list of them; names the file and the key.
    """
    sources = [("config.json", config)]
    if isinstance(generation_config, Path):
        for name in ("config.json", "generation_config.json"):
            if (generation_config / name).is_file():
                sources.append((name, read_json(generation_config / name)))
    elif generation_config is not None:
        sources.append(("generation_config.json", generation_config))
    ids = {token for name, content in sources for token in _declared(name, content)}
    ids |= set(getattr(tokenizer, "eos_token_ids", None) or ())
    own = getattr(tokenizer, "eos_token_id", None)
    if own is not None:
        ids.add(own)
    return frozenset(ids) | turn_markers(tokenizer, str(config.get("model_type", ""))).keys()


def turn_markers(tokenizer: Any, model_type: str) -> dict[int, str]:
    """The turn markers of a tokenizer, ``{token id: marker}``: special tokens of its vocabulary that its chat template
    writes and that end a turn in this family."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    template = _template_text(getattr(tokenizer, "chat_template", None))
    return {
        int(token_id): token.content
        for token_id, token in added.items()
        if token.special and token.content in template and _counts(token.content, model_type)
    }


def _counts(marker: str, model_type: str) -> bool:
    families = _MARKERS.get(marker)
    return families is not None and (not families or model_type.startswith(families))


def _template_text(template: Any) -> str:
    """Transformers keeps one template as a string and several as ``{name: text}``."""
    if isinstance(template, Mapping):
        return "\n".join(str(text) for text in template.values())
    return template if isinstance(template, str) else ""


def _declared(file: str, content: Mapping[str, Any]) -> Iterator[int]:
    text_config = content.get("text_config")
    for prefix, level in (("", content), ("text_config.", text_config)):
        if not isinstance(level, Mapping):
            continue
        value, key = level.get("eos_token_id"), f"{prefix}eos_token_id"
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token) is not int or token < 0:
                raise ConfigError(f"{file}: {key}: found {value!r}, expected a token id or a list of them")
            yield token
