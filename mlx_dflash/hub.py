"""From the name of a model to a folder on this machine: the one place that knows where models may lie.

Loading, "is it installed" and downloading all ask :func:`places`, so they cannot disagree. Nothing here opens a weight
file or touches the network, except :func:`resolve` when every place has been looked at in vain.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import tqdm, validate_repo_id

from .errors import CheckpointError, ModelNotFoundError
from .safetensors_check import shards_of

Role = Literal["target", "draft"]

Progress = Callable[[str, int, int], None]
"""``(what, done, total)`` in bytes, called from download threads; ``total`` grows while files are being discovered."""

BUNDLED_TARGET = "bundled"
BUNDLED_DRAFT = "bundled-draft"

EXTRA_FOLDERS = "MLX_DFLASH_MODELS"
"""Environment variable: more folders to look in, separated as ``PATH`` is."""

_PAIR = Path(__file__).parent / "data" / "pair"
_DOWNLOADED = (
    "*.json",
    "*.jinja",
    "model*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
)
"""Configs, weights and tokenizers. Pickles never, and code only for a checkpoint whose code is trusted."""


@dataclass(frozen=True)
class Place:
    """One folder a model may lie in. ``problem`` says why it cannot be used, ``None`` when it can."""

    kind: str
    path: Path
    problem: str | None

    def __str__(self) -> str:
        return f"{self.kind} {self.path} ({self.problem})"


def resolve(name: str, *, role: Role, progress: Progress | None = None, trust_remote_code: bool = False) -> Path:
    """Find the folder of a model, and download it when it is nowhere on this machine.

    Args:
        name: ``bundled``, a folder, or a Hub repository id such as ``owner/name``.
        role: what the model is wanted for; leads every message.
        progress: told how a download goes. Without it huggingface_hub shows its own bars.
        trust_remote_code: Python files of the repository are wanted, too.

    Raises:
        ModelNotFoundError: one line naming role, model and every place looked at.
    """
    folder, looked = _find(name, role, trust_remote_code)
    if folder is not None:
        return folder
    if _is_path(name):
        raise ModelNotFoundError(f"{role} {name}: found {looked[0].problem}, expected a folder with a model")
    if not _is_repository(name):
        raise ModelNotFoundError(
            f"{role} {name}: found no such folder, expected a folder or a Hub repository id such as owner/name"
        )
    where = "; looked in " + ", ".join(map(str, looked))
    if _is_offline():
        raise ModelNotFoundError(f"{role} {name}: not on this machine, and HF_HUB_OFFLINE forbids a download{where}")
    return _download(name, role, progress, trust_remote_code, where)


def installed(name: str, *, role: Role = "target", trust_remote_code: bool = False) -> Path | None:
    """The folder that :func:`resolve` would return without downloading anything, or ``None``."""
    return _find(name, role, trust_remote_code)[0]


def places(name: str, *, role: Role = "target", trust_remote_code: bool = False) -> Iterator[Place]:
    """Every place where the model may lie, in the order they are tried, each with what is wrong with it.

    Reserved names come first: a folder that happens to be called ``bundled`` must not replace the pair of this package.
    """
    if name in (BUNDLED_TARGET, BUNDLED_DRAFT):
        part = "draft" if name == BUNDLED_DRAFT or role == "draft" else "target"
        yield _place("package", _PAIR / part, role, trust_remote_code)
        return
    # A folder named by hand is taken as it is: the loader names the very file or key that is wrong with it.
    local = Path(name).expanduser()
    # (An empty name would be the working directory.)
    yield Place("folder", local.absolute(), _folder_problem(local) if name else "no name")
    if _is_path(name) or not _is_repository(name):
        return
    for kind, folder in _candidates(name):
        yield _place(kind, folder, role, trust_remote_code)


def cache_folder() -> Path:
    """The Hub cache as the environment names it now (huggingface_hub reads it once, when it is first imported)."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.path.expandvars(os.environ[variable])).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"


# ------------------------------------------------------------------------------------------------- looking


def _find(name: str, role: Role, trust_remote_code: bool) -> tuple[Path | None, list[Place]]:
    looked: list[Place] = []
    for place in places(name, role=role, trust_remote_code=trust_remote_code):
        if place.problem is None:
            return place.path, looked
        looked.append(place)
    return None, looked


def _candidates(repository: str) -> Iterator[tuple[str, Path]]:
    yield "Hub cache", _snapshot(repository, cache_folder())
    extra = [Path(part).expanduser() for part in os.environ.get(EXTRA_FOLDERS, "").split(os.pathsep) if part]
    studio = [Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"]
    name = repository.rpartition("/")[2]
    for kind, roots in ((EXTRA_FOLDERS, extra), ("LM Studio", studio)):
        for root in roots:
            layouts = [
                root / repository,
                root / repository.replace("/", "--"),
                root / name,
                _snapshot(repository, root),
            ]
            found = [layout for layout in dict.fromkeys(layouts) if layout.is_dir()]
            # Of a root that knows nothing of the model, only the first layout is worth a word.
            yield from ((kind, layout) for layout in found or layouts[:1])


def _snapshot(repository: str, cache: Path) -> Path:
    """The snapshot of the main branch in a Hub cache; a folder that is not there when the cache has none."""
    found = huggingface_hub.try_to_load_from_cache(repository, "config.json", cache_dir=cache)
    if isinstance(found, str):
        return Path(found).parent
    return cache / ("models--" + repository.replace("/", "--"))


def _place(kind: str, folder: Path, role: Role, trust_remote_code: bool) -> Place:
    return Place(kind, folder, _folder_problem(folder) or _incomplete(folder, role, trust_remote_code))


def _folder_problem(folder: Path) -> str | None:
    try:
        if folder.is_dir():
            return None
        return "a file" if folder.exists() else "no such folder"
    except OSError as error:  # a name too long for a file, a drive that went away, a folder we may not enter
        return error.strerror or str(error)


def _incomplete(folder: Path, role: Role, trust_remote_code: bool) -> str | None:
    """What a half-finished download still lacks, as far as its own files tell."""
    try:
        if not (folder / "config.json").is_file():
            return "lacks config.json"
        shards = shards_of(folder)
        if not shards:
            return "lacks model*.safetensors"
        missing = [*_missing_shards(shards), *(_missing_code(folder) if trust_remote_code else [])]
        if missing:
            return f"incomplete, lacks {', '.join(missing[:3])}" + (" and more" if len(missing) > 3 else "")
    except CheckpointError as error:  # its index names files that are not there
        return "incomplete: " + str(error).removeprefix(f"{folder}: ").removeprefix(f"{folder}{os.sep}")
    except OSError as error:
        return error.strerror or str(error)
    tokenizers = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "vocab.json", "vocab.txt")
    if role == "target" and not any(True for pattern in tokenizers for _ in folder.glob(pattern)):
        return "incomplete, lacks a tokenizer"
    return None


def _missing_shards(shards: list[Path]) -> list[str]:
    """Numbered weight files say how many they are, also where the index has not arrived yet."""
    present = {shard.name for shard in shards}
    expected: set[str] = set()
    for name in present:
        numbered = re.fullmatch(r"(.*-)(\d{5})-of-(\d{5})\.safetensors", name)
        if numbered:
            stem, _, count = numbered.groups()
            expected |= {f"{stem}{index:05d}-of-{count}.safetensors" for index in range(1, int(count) + 1)}
    return sorted(expected - present)


def _missing_code(folder: Path) -> list[str]:
    """Python files that a trusted checkpoint names and that an earlier, untrusted download left out."""
    named: set[str] = set()
    for file in ("config.json", "tokenizer_config.json"):
        try:
            content = json.loads((folder / file).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue  # the loader reads it again and says what is wrong
        if isinstance(content, dict):
            named |= set(_code_files(content))
    return sorted(name for name in named if not (folder / name).is_file())


def _code_files(config: dict[str, Any]) -> Iterator[str]:
    model_file, auto_map = config.get("model_file"), config.get("auto_map")
    if isinstance(model_file, str):
        yield model_file
    for value in auto_map.values() if isinstance(auto_map, dict) else ():
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, str) and "." in entry and "--" not in entry:  # "--" names another repository
                yield entry.partition(".")[0] + ".py"


def _is_path(name: str) -> bool:
    """Whether the user can only have meant a folder, so that the Hub need not be asked."""
    return name.startswith((".", "/", "~")) or os.path.isabs(name) or os.path.lexists(name)


def _is_repository(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _is_offline() -> bool:
    """Read at call time; the constant covers a process that switched huggingface_hub off by other means."""
    values = (os.environ.get(variable, "") for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return huggingface_hub.constants.HF_HUB_OFFLINE or any(
        value.upper() in {"1", "ON", "YES", "TRUE"} for value in values
    )


# --------------------------------------------------------------------------------------------- downloading


def _download(name: str, role: Role, progress: Progress | None, trust_remote_code: bool, where: str) -> Path:
    cache = cache_folder()
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                name,
                cache_dir=cache,
                endpoint=os.environ.get("HF_ENDPOINT") or None,
                allow_patterns=[*_DOWNLOADED, "*.py"] if trust_remote_code else list(_DOWNLOADED),
                tqdm_class=None if progress is None else _reporting_bar(name, progress),
            )
        )
    except Exception as error:
        # The client lets errors of its HTTP library through, and which library that is depends on its version.
        raise ModelNotFoundError(f"{role} {name}: {_reason(error, cache)}{where}") from error
    problem = _incomplete(folder, role, trust_remote_code)
    if problem is not None:
        # The client returns what it has when the Hub is out of reach, and a repository may simply hold no model.
        raise ModelNotFoundError(
            f"{role} {name}: downloaded to {folder}, but it {problem.removeprefix('incomplete, ')}"
        )
    return folder


def _reason(error: Exception, cache: Path) -> str:
    if isinstance(error, GatedRepoError):
        return "the repository is gated; accept its terms on its page, then log in with 'hf auth login'"
    if isinstance(error, RepositoryNotFoundError):
        return "found no such repository on the Hub, or it is private and no token with access to it is set"
    if isinstance(error, HfHubHTTPError):
        status = getattr(error.response, "status_code", "no status")
        return f"the Hub answered {status} ({_one_line(error)})"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left on the disk of {cache}; HF_HOME can name a folder on another one"
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return f"cannot write to the Hub cache: {error.strerror} ({error.filename})"
    cause = error.__cause__ or error
    return f"the Hub could not be reached ({type(cause).__name__}: {_one_line(cause)})"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 160 else text[:157] + "..."


def _reporting_bar(what: str, progress: Progress) -> type[Any]:
    """A progress bar class for huggingface_hub that draws nothing and reports the bytes."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            kwargs.update(file=io.StringIO(), disable=False)
            super().__init__(*args, **kwargs)

        def display(self, *args: Any, **kwargs: Any) -> None:
            if self._counts_bytes and self.total:
                progress(what, min(int(self.n), int(self.total)), int(self.total))

    return Bar
