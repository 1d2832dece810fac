"""Do this draft and this target belong together: widths, depth, vocabulary and tokenizer, before the first request.

Knows the target by :class:`TargetFacts` and a tokenizer by its token-to-id map.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, PairingError
from .base import TargetFacts
from .config import DraftConfig
from .head import Ownership, is_padding


def check_pairing(config: DraftConfig, target: TargetFacts) -> None:
    """What can be compared before the weights are read.

    Raises:
        PairingError: with both values.
    """
    file = config.file
    if config.target_hidden_size != target.hidden_size:
        raise PairingError(
            f"{file}: hidden width: found a target of {target.hidden_size} ({target.model_type}), expected the "
            f"{config.target_hidden_size} this draft was made for"
        )
    if config.num_target_layers is not None and config.num_target_layers != target.num_layers:
        raise PairingError(
            f"{file}: num_target_layers: found a target of {target.num_layers} layers ({target.model_type}), expected "
            f"{config.num_target_layers}"
        )
    if config.tap_layers[-1] >= target.num_layers:
        raise PairingError(
            f"{file}: tap layer {config.tap_layers[-1]}: found a target of {target.num_layers} layers "
            f"({target.model_type}), expected more than {config.tap_layers[-1]}"
        )
    stated = config.vocab_size
    if stated is not None and stated != target.vocab_size and not is_padding(stated, target.vocab_size):
        raise PairingError(
            f"{file}: vocab_size: found a target with {target.vocab_size} rows ({target.model_type}), expected "
            f"{stated} or these padded"
        )


def check_borrowing(config: DraftConfig, ownership: Ownership, mask_id: int) -> None:
    """What depends on whose table and head are used.

    Raises:
        PairingError: the target's matrices are to be used at another width, or the mask id lies outside the table.
    """
    borrowed = ownership.borrowed
    if borrowed and config.hidden_size != config.target_hidden_size:
        raise PairingError(
            f"{config.file}: hidden_size: found {config.hidden_size} and no own {' and '.join(borrowed)}, expected the "
            f"target's {config.target_hidden_size}"
        )
    if mask_id >= ownership.embedding_rows:
        raise PairingError(
            f"{config.file}: {config.sources['mask_token_id']}: found {mask_id}, expected a row of the embedding table "
            f"used (0 .. {ownership.embedding_rows - 1}; {ownership.embedding_reason})"
        )


def mask_id(config: DraftConfig, vocabulary: Mapping[str, int] | None) -> int:
    """The mask token's id, looked up where the config names it by text.

    Raises:
        ConfigError: no tokenizer is at hand.
        PairingError: the tokenizer does not know the token.
    """
    if config.mask_token_id is not None:
        return config.mask_token_id
    place = config.sources["mask_token_id"]
    if vocabulary is None:
        raise ConfigError(f"{config.file}: {place}: found {config.mask_token!r}, expected a tokenizer to look it up in")
    found = vocabulary.get(str(config.mask_token))
    if found is None:
        raise PairingError(f"{config.file}: {place}: found {config.mask_token!r}, expected a token of the tokenizer")
    return found


def vocabulary_of(tokenizer: Any) -> dict[str, int] | None:
    """Token -> id of a Hugging Face tokenizer or mlx-lm's wrapper of one, added tokens included."""
    get_vocab = getattr(tokenizer, "get_vocab", None)
    return dict(get_vocab()) if callable(get_vocab) else None


def check_tokenizers(folder: Path, vocabulary: Mapping[str, int]) -> None:
    """Compare the tokenizer that a draft's folder ships with the target's. Tokens that only one of them has are no
    difference as long as nobody else sits on their id.

    Raises:
        PairingError: naming the first token (by id) that differs, with both ids.
    """
    shipped = shipped_vocabulary(folder)
    if shipped is None:
        return
    by_id = {number: token for token, number in vocabulary.items()}
    for token, number in sorted(shipped.items(), key=lambda item: item[1]):
        own = vocabulary.get(token)
        if own == number or (own is None and number not in by_id):
            continue
        other = f"{own}" if own is not None else f"none ({number} is {by_id[number]!r})"
        raise PairingError(
            f"{folder / 'tokenizer.json'}: token {token!r}: found id {number} in the draft's tokenizer and {other} in "
            "the target's, expected the same tokenizer"
        )


def shipped_vocabulary(folder: Path) -> dict[str, int] | None:
    """Token -> id of ``tokenizer.json`` in a draft's folder, ``None`` when there is none or its kind is unknown.

    Raises:
        ConfigError: the file is no JSON object, or its vocabulary no list of pairs.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: found no readable JSON ({' '.join(str(error).split())[:200]})") from None
    model = content.get("model") if isinstance(content, Mapping) else None
    entries = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(entries, Mapping):
        vocabulary = {str(token): number for token, number in entries.items() if type(number) is int}
    elif isinstance(entries, list):  # unigram models list (token, score) in id order
        if not all(isinstance(entry, list) and entry for entry in entries):
            raise ConfigError(f"{file}: model.vocab: found a list of something else, expected [token, score] pairs")
        vocabulary = {str(entry[0]): number for number, entry in enumerate(entries)}
    else:
        return None
    added = content.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, Mapping) and type(entry.get("id")) is int:
            vocabulary[str(entry.get("content"))] = entry["id"]
    return vocabulary
