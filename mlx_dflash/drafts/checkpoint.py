"""A draft's folder on disk: which files hold its weights, and its tensors under the names the modules use.

Knows safetensors and publishers' spellings; not which tensors a family needs, nor what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, UnsupportedError
from ..safetensors_check import INDEX, TensorHeader, check_safetensors, refuse_pickles, shards_of
from .keys import ConfigRecord, read_json

_PATTERNS = ("model*.safetensors", "dflash_draft_model.safetensors")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_DROPPED = (
    (re.compile(r"(^|\.)rotary_emb\.inv_freq$"), "computed from the config"),
    (re.compile(r"^verifier_(norm|lm_head)\."), "the target's, left behind by training"),
)
_PREFIXES = (
    ("model.", ""),
    ("midlayer.", "layers.0."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
)
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class DraftFolder:
    """What can be known of a draft before a weight is read.

    Attributes:
        path: the folder.
        config: its ``config.json``.
        headers: canonical tensor name -> dtype and shape as stored.
        files: the weight files.
        names: name as stored -> canonical name; stored names that are dropped are absent.
        dropped: what is never read, with the reason.
        record: what has been read of the config so far.
    """

    path: Path
    config: Mapping[str, Any]
    headers: Mapping[str, TensorHeader]
    files: tuple[Path, ...]
    names: Mapping[str, str]
    dropped: tuple[str, ...] = ()
    record: ConfigRecord = field(default_factory=ConfigRecord)

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    def renamed(self, rule: Callable[[str], str | None]) -> DraftFolder:
        """The same folder with other canonical names: ``rule`` gives the new one, or ``None`` for a tensor that is not
        this draft's and is not read.

        Raises:
            CheckpointError: two tensors get one name.
        """
        names: dict[str, str] = {}
        headers: dict[str, TensorHeader] = {}
        for stored, old in self.names.items():
            new = rule(old)
            if new is None:
                continue
            if new in headers:
                raise CheckpointError(f"{self.path}: tensor {stored}: found a second {new}, expected one")
            names[stored], headers[new] = new, self.headers[old]
        return replace(self, names=names, headers=headers)


def open_folder(path: Path, overrides: Mapping[str, Any] | None = None) -> DraftFolder:
    """Look at a draft's config and the headers of its weight files.

    Args:
        overrides: values that the caller sets in the config's place.

    Raises:
        ConfigError: ``config.json`` is missing or no JSON object.
        CheckpointError: weights are missing, truncated or pickled, or two tensors share a name.
    """
    config = read_json(path / "config.json")
    files = _weight_files(path)
    headers: dict[str, TensorHeader] = {}
    names: dict[str, str] = {}
    dropped: list[str] = []
    holder: dict[str, tuple[Path, str]] = {}
    for file in files:
        for stored, header in check_safetensors(file).items():
            name = canonical_name(stored)
            reason = next((reason for pattern, reason in _DROPPED if pattern.search(name)), None)
            if reason is not None:
                dropped.append(f"tensor {stored}: {reason}")
                continue
            if name in headers:
                other, other_name = holder[name]
                raise CheckpointError(
                    f"{file}: tensor {stored}: found a second {name} beside {other.name}: {other_name}, expected one"
                )
            headers[name], names[stored], holder[name] = header, name, (file, stored)
    record = ConfigRecord(overrides or {})
    return DraftFolder(path, config, headers, tuple(files), names, tuple(dropped), record)


def _weight_files(path: Path) -> list[Path]:
    if (path / INDEX).is_file():
        present = shards_of(path, "*.safetensors")
        # An index decides alone: other files that happen to match may be an older revision's.
        named = set(read_json(path / INDEX)["weight_map"].values())
        return [file for file in present if file.name in named]
    for pattern in _PATTERNS:
        files = shards_of(path, pattern)
        if files:
            _check_shard_count(path, files)
            return files
    refuse_pickles(path, "draft")
    beside = sorted(file.name for file in path.iterdir() if file.is_file())
    raise CheckpointError(
        f"{path}: found no {' or '.join(_PATTERNS)} beside {', '.join(beside[:6]) or 'nothing'}, expected the draft's "
        "weights"
    )


def _check_shard_count(path: Path, files: Iterable[Path]) -> None:
    """Without an index the shards' own names say how many there are."""
    present = {file.name for file in files}
    for name in sorted(present):
        shard = _SHARD.fullmatch(name)
        for number in range(1, int(shard[3]) + 1) if shard else ():
            other = f"{shard[1]}-{number:05d}-of-{shard[3]}.safetensors" if shard else ""
            if other not in present:
                raise CheckpointError(f"{path}: found no {other}, expected it beside {name}")


def canonical_name(stored: str) -> str:
    """The name the draft modules use."""
    name = stored
    for prefix, replacement in _PREFIXES:
        if name.startswith(prefix):
            name = replacement + name[len(prefix) :]
    return name


def read_tensors(folder: DraftFolder) -> dict[str, mx.array]:
    """Every tensor under its canonical name, lazily loaded, fused projections split.

    Raises:
        CheckpointError: MLX cannot read a file.
    """
    tensors: dict[str, mx.array] = {}
    for file in folder.files:
        try:
            loaded: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
        except RuntimeError as error:
            raise CheckpointError(f"{file}: MLX cannot read it: {' '.join(str(error).split())[:200]}") from None
        tensors.update({folder.names[stored]: array for stored, array in loaded.items() if stored in folder.names})
    return tensors


_FUSED = re.compile(r"(layers\.\d+)\.(self_attn\.qkv_proj|mlp\.gate_up_proj)\.(\w+)")


def split_fused(folder: DraftFolder, tensors: Mapping[str, mx.array], heads: int, kv_heads: int) -> dict[str, mx.array]:
    """Cut ``qkv_proj`` and ``gate_up_proj`` by rows, in the order q, k, v and gate, up.

    Raises:
        CheckpointError: the rows do not divide.
    """
    result: dict[str, mx.array] = {}
    for name, array in tensors.items():
        fused = _FUSED.fullmatch(name)
        if fused is None:
            result[name] = array
            continue
        layer, kind, leaf = fused[1], fused[2], fused[3]
        room = kind.partition(".")[0]
        if room == "self_attn":
            shares = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        else:
            shares = {"gate_proj": 1, "up_proj": 1}
        total = sum(shares.values())
        rows = array.shape[0] if array.ndim else 0
        if not rows or rows % total:
            raise CheckpointError(f"{folder.path}: tensor {name}: found {rows} rows, expected a multiple of {total}")
        ends = [rows // total * end for end in accumulate(shares.values())][:-1]
        for part, piece in zip(shares, mx.split(array, ends, axis=0), strict=True):
            target = f"{layer}.{room}.{part}.{leaf}"
            if target in tensors:
                raise CheckpointError(
                    f"{folder.path}: tensor {name}: found {target} beside it, expected one of the two"
                )
            result[target] = piece
    return result


def refuse_foreign_formats(folder: DraftFolder) -> None:
    """Refuse weights quantised by other programs, by the name of their format.

    Raises:
        UnsupportedError: naming the format and where it shows.
    """
    found = _foreign_format(folder)
    if found is not None:
        raise UnsupportedError(
            f"{found}, expected float weights (float32, bfloat16, float16) or weights quantised by MLX"
        )


def _foreign_format(folder: DraftFolder) -> str | None:
    block = folder.config.get("quantization_config")
    if isinstance(block, Mapping):
        names = [str(block[key]) for key in ("quant_method", "quant_algo", "format") if block.get(key)]
        if names and names[0] != "mlx":
            return f"{folder.config_file}: quantization_config: found {' '.join(names)} weights"
    extra = folder.path / "hf_quant_config.json"
    if extra.is_file():
        algorithm = read_json(extra).get("quantization", {})
        name = algorithm.get("quant_algo") if isinstance(algorithm, Mapping) else None
        return f"{extra}: found {name or 'modelopt'} weights (Model-Optimizer)"
    endings = {
        ".weight_packed": "compressed-tensors",
        ".weight_scale_inv": "FP8 block",
        ".weight_scale": "NVFP4 or FP8",
    }
    for name, header in folder.headers.items():
        for ending, kind in endings.items():
            if name.endswith(ending):
                return f"{folder.path}: tensor {name}: found {kind} weights"
        if header.dtype.startswith("F8") or header.dtype.startswith("F4"):
            return f"{folder.path}: tensor {name}: found {header.dtype} values"
    return None


def check_shapes(
    folder: DraftFolder,
    tensors: Mapping[str, mx.array],
    expected: Mapping[str, tuple[int, ...]],
    packed: Container[str] = (),
) -> None:
    """Strict both ways: every tensor has a place, every place is filled, every shape fits, and only the modules in
    ``packed`` hold anything but floats.

    Raises:
        CheckpointError: naming the first few tensors, with found and expected shapes.
    """
    unknown = sorted(name for name in tensors if name not in expected)
    if unknown:
        raise CheckpointError(
            f"{folder.path}: found {_listed(unknown)}, for which {folder.config_file.name} has no place; expected none"
        )
    absent = sorted(name for name in expected if name not in tensors)
    if absent:
        raise CheckpointError(
            f"{folder.path}: found no {_listed(absent)}, expected what {folder.config_file.name} describes"
        )
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise CheckpointError(
                f"{folder.path}: tensor {name}: found shape {list(tensors[name].shape)}, expected {list(shape)}"
            )
        if tensors[name].dtype not in _FLOATS and name.rpartition(".")[0] not in packed:
            raise CheckpointError(
                f"{folder.path}: tensor {name}: found {dtype_name(tensors[name].dtype)} values, expected float32, "
                "bfloat16 or float16"
            )


def _listed(names: list[str], count: int = 4) -> str:
    rest = len(names) - count
    kind = "tensor" if len(names) == 1 else "tensors"
    return f"{kind} {', '.join(names[:count])}" + (f" and {rest} more" if rest > 0 else "")


def check_finite(folder: DraftFolder, tensors: Mapping[str, mx.array]) -> None:
    """Read every weight once and look for NaN and infinity.

    Raises:
        CheckpointError: naming the first tensor that holds one.
    """
    for name, array in tensors.items():
        if array.dtype in _FLOATS and not mx.isfinite(array).all().item():
            raise CheckpointError(
                f"{folder.path}: tensor {name}: found values that are not finite as {dtype_name(array.dtype)}, "
                "expected finite weights"
            )


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
