"""Folders that look like checkpoints to whoever only looks at file names, and a Hub cache around them."""

from __future__ import annotations

import json
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "some-org/some-model"


def make(folder: Path, *, shards: int = 1, lacks: tuple[str, ...] = ()) -> Path:
    """A target in ``folder``: config, tokenizer and weights, without the files named in ``lacks``."""
    files = {"config.json": "{}", "tokenizer.json": "{}"}
    if shards == 1:
        files["model.safetensors"] = ""
    else:
        names = [f"model-{index:05d}-of-{shards:05d}.safetensors" for index in range(1, shards + 1)]
        weight_map = {f"tensor.{index}": name for index, name in enumerate(names)}
        files |= {name: "" for name in names}
        files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map})
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if name not in lacks:
            (folder / name).write_text(content)
    return folder


def make_in_cache(cache: Path, repository: str = REPOSITORY, **options: object) -> Path:
    """The snapshot of a repository in a Hub cache."""
    storage = cache / ("models--" + repository.replace("/", "--"))
    (storage / "refs").mkdir(parents=True)
    (storage / "refs" / "main").write_text(COMMIT)
    return make(storage / "snapshots" / COMMIT, **options)  # type: ignore[arg-type]
