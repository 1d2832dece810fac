"""What every test may use: the rule for tests that need an Apple GPU, and a guard that proves nothing was connected."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if mx.metal.is_available():
        return
    skip = pytest.mark.skip(reason="needs an Apple GPU")
    for item in items:
        if "metal" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """No address can be looked up or connected to; attempts are collected, and fail the test at its end."""
    attempts: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> None:
        attempts.append(arguments)
        raise OSError("this test must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield attempts
    assert attempts == []


@pytest.fixture
def empty_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A home folder without any model, and an environment that names no other place."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    for variable in (
        "HF_HOME",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "XDG_CACHE_HOME",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "HF_ENDPOINT",
        "HF_TOKEN",
        "MLX_DFLASH_MODELS",
    ):
        monkeypatch.delenv(variable, raising=False)
    return home
