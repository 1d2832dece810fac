"""What can be known of a checkpoint folder from file names and safetensors headers, before a weight is read.

Knows the safetensors layout and nothing of models; used for targets and drafts alike.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointError

INDEX = "model.safetensors.index.json"
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
"""Weight files that run code when read; never opened."""

_DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_LARGEST_HEADER = 100_000_000
_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as its file describes it. ``dtype`` is safetensors' own name, such as ``BF16``."""

    dtype: str
    shape: tuple[int, ...]


def check_safetensors(path: Path) -> dict[str, TensorHeader]:
    """Read the header of one file and compare it with the file's size.

    Returns:
        Every tensor by name, in the file's order.

    Raises:
        CheckpointError: the file is no safetensors file, is shorter than its header says, or its header contradicts
            itself; the message names the file, and the bytes found and expected.
    """
    try:
        size = path.stat().st_size
        header, start = _read_header(path, size)
    except OSError as error:
        raise CheckpointError(f"{path}: could not be read ({error.strerror}), expected a safetensors file") from None
    tensors: dict[str, TensorHeader] = {}
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensors[name], stop = _tensor(path, name, entry)
        end = max(end, stop)
    if size < start + end:
        raise CheckpointError(f"{path}: found {size} bytes, expected {start + end}: the file is truncated")
    return tensors


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """The parsed header and the offset its tensors count from."""
    with path.open("rb") as file:
        start = file.read(len(_LFS))
        length = int.from_bytes(start[:8], "little")
        if start == _LFS:
            raise CheckpointError(f"{path}: found a Git LFS pointer of {size} bytes, expected weights ('git lfs pull')")
        if size < 8:
            raise CheckpointError(
                f"{path}: found {size} bytes, expected a safetensors file, truncated or another format"
            )
        if length > _LARGEST_HEADER:
            raise CheckpointError(f"{path}: found a header of {length} bytes, expected a safetensors file")
        if size < 8 + length:
            raise CheckpointError(f"{path}: found {size} bytes, expected at least {8 + length}: the file is truncated")
        file.seek(8)
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: found a header that is not JSON ({error}), expected safetensors") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: found a header of type {type(header).__name__}, expected an object")
    return header, 8 + length


def _tensor(path: Path, name: str, entry: Any) -> tuple[TensorHeader, int]:
    """One header entry, checked, and the offset of its last byte."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: tensor {name}: found {entry!r} in the header, expected an object")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise CheckpointError(f"{path}: tensor {name}: found dtype {dtype!r}, expected one of {', '.join(_DTYPE_BITS)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{path}: tensor {name}: found shape {shape!r} and data_offsets {offsets!r}, expected lists of sizes"
        )
    expected = (math.prod(shape) * _DTYPE_BITS[dtype] + 7) // 8
    if offsets[1] - offsets[0] != expected:
        raise CheckpointError(
            f"{path}: tensor {name}: found {offsets[1] - offsets[0]} bytes, expected {expected} for {dtype} {shape}"
        )
    return TensorHeader(dtype, tuple(shape)), offsets[1]


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def shards_of(folder: Path, pattern: str = "model*.safetensors") -> list[Path]:
    """The weight files of a folder: those that match ``pattern``, and with an index at least all that it names.

    Returns:
        Sorted paths; empty when the folder has no index and no matching file.

    Raises:
        CheckpointError: the index cannot be read, or names a file that is not there or that ``pattern`` does not match.
    """
    found = sorted(path for path in folder.glob(pattern) if path.is_file())
    index = folder / INDEX
    if not index.is_file():
        return found
    names = {path.name for path in found}
    named = _names_in_index(index)
    missing = [name for name in named if name not in names]
    if missing:
        absent = [name for name in missing if "/" in name or "\\" in name or not (folder / name).is_file()]
        if absent:
            raise CheckpointError(
                f"{folder}: found no {_first(absent)}, expected the {len(named)} files that {INDEX} names"
            )
        raise CheckpointError(f"{index}: found the file name {missing[0]}, expected names that match {pattern}")
    return found


def _names_in_index(index: Path) -> list[str]:
    try:
        content = json.loads(index.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: found no valid JSON ({error})") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map: found {type(weight_map).__name__}, expected tensor -> file name")
    return sorted(set(weight_map.values()))


def refuse_pickles(folder: Path, role: str) -> None:
    """Refuse a folder whose only weights are pickles, which run code when they are read.

    Args:
        role: ``"target"`` or ``"draft"``, for the message.

    Raises:
        CheckpointError: naming the files.
    """
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    if any(path.suffix == ".safetensors" for path in files):
        return
    pickles = [path.name for path in files if path.suffix in PICKLE_SUFFIXES]
    if pickles:
        raise CheckpointError(
            f"{folder}: found the {role}'s weights only as pickle ({_first(pickles)}), which can run code when read; "
            "expected safetensors"
        )


def _first(names: list[str], count: int = 3) -> str:
    rest = len(names) - count
    return ", ".join(names[:count]) + (f" and {rest} more" if rest > 0 else "")
