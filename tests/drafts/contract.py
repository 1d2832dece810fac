"""What every family's loader and session owe, tried on a publisher's checkpoint of the golden cases.

A family's own tests say what is special about it; these are called by each of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_dflash.drafts.registry import load_draft
from mlx_dflash.errors import CheckpointError, ConfigError

from .golden import HIDDEN, close

Change = Callable[[dict[str, Any]], None]


def copied(
    case: Path,
    folder: Path,
    *,
    config: Change | None = None,
    tensors: Callable[[dict[str, mx.array]], Any] | None = None,
) -> Path:
    """A case's checkpoint in another folder, with its config or its tensors changed in place."""
    shutil.copytree(case / "checkpoint", folder)
    if config is not None:
        content = json.loads((folder / "config.json").read_text())
        config(content)
        (folder / "config.json").write_text(json.dumps(content))
    if tensors is not None:
        weights = next(folder.glob("*.safetensors"))
        arrays = dict(mx.load(str(weights)))
        tensors(arrays)
        mx.eval(arrays)
        mx.save_safetensors(str(weights), arrays)
    return folder


def check_required_key(case: Path, folder: Path, target: Any, place: tuple[str, ...]) -> None:
    """A config without the key at ``place`` is refused in one line that names file and key."""

    def drop(config: dict[str, Any]) -> None:
        for level in place[:-1]:
            config = config[level]
        del config[place[-1]]

    with pytest.raises(ConfigError) as error:
        load_draft(copied(case, folder, config=drop), target)
    message = str(error.value)
    assert place[-1] in message and "config.json" in message and "\n" not in message


def check_tensors(case: Path, folder: Path, target: Any, names: Mapping[str, str]) -> None:
    """Each tensor (stored name -> the name that messages use) is needed, and needed in its shape."""
    for number, (stored, shown) in enumerate(names.items()):

        def drop(arrays: dict[str, mx.array], stored: str = stored) -> None:
            del arrays[stored]

        def grow(arrays: dict[str, mx.array], stored: str = stored) -> None:
            arrays[stored] = mx.concatenate([arrays[stored], arrays[stored]], axis=-1)

        for change, how in ((drop, "absent"), (grow, "shape")):
            with pytest.raises(CheckpointError) as error:
                load_draft(copied(case, folder / f"{how}{number}", tensors=change), target)
            assert shown in str(error.value), how
            assert "\n" not in str(error.value)


def block_hidden(draft: Any, target: Any, features: mx.array) -> mx.array:
    """The hidden rows of a block drafter's first block after ``features``."""
    session = draft.open(target)
    session.commit(features, 0, [0] * features.shape[1])
    return session.block_hidden(mx.array([7]), draft.block_size)


def check_widened(case: Path, folder: Path, target: Any, proposes: Callable[[Any], mx.array]) -> None:
    """A bfloat16 draft's wide copy computes in float32 over the same values: it proposes what the same checkpoint
    loaded as float32 does. ``proposes(draft)`` gives numbers to compare."""

    def narrow(arrays: dict[str, mx.array]) -> None:
        for name, array in arrays.items():
            if array.dtype == mx.float32:
                arrays[name] = array.astype(mx.bfloat16)

    checkpoint = copied(case, folder, tensors=narrow)
    draft = load_draft(checkpoint, target)
    assert draft.report.dtype == "bfloat16"
    wide = draft.widened()
    assert wide is not None and wide.report.dtype == "float32" and wide.widened() is None
    reference = proposes(load_draft(checkpoint, target, dtype="float32"))
    close(proposes(wide), reference, 1e-5)
    assert not mx.allclose(proposes(draft).astype(mx.float32), reference, atol=1e-5).item()


def check_bits(case: Path, target: Any, proposes: Callable[[Any], mx.array], keep_float: tuple[str, ...] = ()) -> None:
    """``bits=8`` packs matrices, leaves those named in ``keep_float`` alone, and stays near the float draft."""
    plain = load_draft(case / "checkpoint", target)
    packed = load_draft(case / "checkpoint", target, bits=8)
    assert "8" in packed.report.quantization
    assert packed.report.weight_bytes < plain.report.weight_bytes
    assert not [path for path in packed.parts.packings if any(name in path for name in keep_float)]
    reference = proposes(plain)
    scale = mx.abs(reference).max().item()
    close(proposes(packed), reference, 0.2 * scale)
    assert not mx.array_equal(proposes(packed), reference).item()


def check_rewind(draft: Any, target: Any, features: mx.array, proposes: Callable[[Any], mx.array]) -> None:
    """A session that was told too much and rewound proposes as one that was never told. ``proposes(session)``."""
    rows = features.shape[1]
    kept = rows - 3
    tokens = list(range(rows))
    told = draft.open(target)
    told.commit(features[:, :kept], 0, tokens[:kept])
    expected = proposes(told)
    close(proposes(told), expected, 0)  # proposing leaves nothing behind
    rewound = draft.open(target)
    rewound.commit(features, 0, tokens)
    assert not mx.allclose(proposes(rewound), expected, atol=HIDDEN).item()
    rewound.rewind(kept - 1)
    assert rewound.position == kept - 1
    rewound.commit(features[:, kept - 1 : kept], kept - 1, tokens[kept - 1 : kept])
    close(proposes(rewound), expected, HIDDEN)
