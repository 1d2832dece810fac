"""Downloads, from a Hub that this test serves itself on the loopback interface."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import huggingface_hub
import pytest

from mlx_dflash import hub
from mlx_dflash.errors import ModelNotFoundError
from tests.hub.checkpoints import COMMIT, REPOSITORY, make_in_cache

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"w" * 5000,
    "pytorch_model.bin": b"pickle",
    "modeling_some.py": b"raise SystemExit",
    "README.md": b"read me",
}


@dataclass
class FakeHub:
    """Serves one repository. ``status`` and ``code`` make every answer a refusal."""

    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    status: int = 200
    code: str = ""
    fetched: set[str] = field(default_factory=set)

    def answer(self, path: str) -> tuple[dict[str, str], bytes] | None:
        if path == f"/api/models/{REPOSITORY}/revision/main":
            siblings = [{"rfilename": name} for name in self.files]
            return {}, json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings, "tags": []}).encode()
        if path == f"/api/models/{REPOSITORY}/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": f"{index:040x}"}
                for index, (name, content) in enumerate(self.files.items())
            ]
            return {}, json.dumps(entries).encode()
        name = path.removeprefix(f"/{REPOSITORY}/resolve/{COMMIT}/")
        if name in self.files:
            self.fetched.add(name)
            return {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}, self.files[name]
        return None


@pytest.fixture
def fake_hub(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    served = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = served.answer(urlparse(self.path).path)
            status = served.status if found else 404
            headers, body = found if found and status == 200 else ({"X-Error-Code": served.code}, b"{}")
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield served
    server.shutdown()
    server.server_close()


def test_configs_weights_and_tokenizer_are_fetched_but_no_pickle_and_no_code(
    fake_hub: FakeHub, empty_home: Path
) -> None:
    told: list[tuple[str, int, int]] = []
    folder = hub.resolve(REPOSITORY, role="target", progress=lambda *report: told.append(report))
    assert folder == empty_home / ".cache/huggingface/hub/models--some-org--some-model/snapshots" / COMMIT
    assert fake_hub.fetched == {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert hub.installed(REPOSITORY) == folder
    assert told and all(what == REPOSITORY and 0 <= done <= total for what, done, total in told)


def test_code_is_fetched_when_it_is_trusted(fake_hub: FakeHub) -> None:
    hub.resolve(REPOSITORY, role="target", progress=_ignore, trust_remote_code=True)
    assert "modeling_some.py" in fake_hub.fetched and "pytorch_model.bin" not in fake_hub.fetched


def test_half_a_download_is_finished(fake_hub: FakeHub, empty_home: Path) -> None:
    """R17."""
    half = make_in_cache(empty_home / ".cache/huggingface/hub", lacks=("model.safetensors",))
    assert hub.resolve(REPOSITORY, role="target", progress=_ignore) == half
    assert (half / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "status, code, said",
    [
        (403, "GatedRepo", "the repository is gated"),
        (401, "GatedRepo", "the repository is gated"),
        (404, "RepoNotFound", "found no such repository"),
        (401, "RepoNotFound", "found no such repository"),
        (500, "", "the Hub"),
    ],
)
def test_a_refusal_is_one_line_with_role_and_name(fake_hub: FakeHub, status: int, code: str, said: str) -> None:
    fake_hub.status, fake_hub.code = status, code
    with pytest.raises(ModelNotFoundError) as caught:
        hub.resolve(REPOSITORY, role="draft", progress=_ignore)
    message = str(caught.value)
    assert message.startswith(f"draft {REPOSITORY}: ") and said in message and "\n" not in message


def test_a_repository_without_a_model_is_said_to_lack_one(fake_hub: FakeHub) -> None:
    del fake_hub.files["model.safetensors"]
    with pytest.raises(ModelNotFoundError, match=r"lacks model\*\.safetensors"):
        hub.resolve(REPOSITORY, role="target", progress=_ignore)


def test_a_hub_out_of_reach_is_one_line(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    with pytest.raises(ModelNotFoundError) as caught:
        hub.resolve(REPOSITORY, role="target", progress=_ignore)
    message = str(caught.value)
    assert message.startswith(f"target {REPOSITORY}: the Hub could not be reached") and "\n" not in message


@pytest.mark.parametrize(
    "error, said",
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no space left on the disk of"),
        (PermissionError(errno.EACCES, "Permission denied", "/cache/x"), "cannot write to the Hub cache"),
    ],
)
def test_a_disk_that_takes_no_more_is_one_line(
    error: OSError, said: str, empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFoundError, match=said):
        hub.resolve(REPOSITORY, role="target", progress=_ignore)


def _ignore(what: str, done: int, total: int) -> None:
    pass
