"""R60: generation works from any thread, whoever imported the package and whoever loaded the models."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx_dflash
from mlx_dflash import stream_generate

PROMPT, TOKENS = "def fibonacci(", 24


def in_thread(work: Callable[[], Any]) -> Any:
    """The result of ``work``, or its exception, from a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def text(pair: Any, tokenizer: Any, **options: Any) -> str:
    return "".join(r.text for r in stream_generate(pair, tokenizer, PROMPT, max_tokens=TOKENS, **options))


def test_loaded_here_and_run_in_a_worker_thread(bundled: Any) -> None:
    """The bundled target has sliding-window layers, the case that broke others a second time."""
    assert in_thread(lambda: text(*bundled)) == text(*bundled)
    assert in_thread(lambda: text(*bundled, plain=True)) == text(*bundled)


def test_loaded_in_a_thread_that_is_gone_and_run_here(bundled: Any) -> None:
    loaded = in_thread(mlx_dflash.load)
    assert text(*loaded) == text(*bundled)


def test_every_token_asked_for_by_another_thread(bundled: Any) -> None:
    """What an async server does with a thread pool: successive ``next`` calls hop between threads."""
    for options in ({}, {"plain": True}, {"temp": 0.8, "seed": 4}, {"repetition_penalty": 1.1}):
        pieces: list[str] = []
        stream = stream_generate(*bundled, PROMPT, max_tokens=TOKENS, **options)
        while (response := in_thread(lambda stream=stream: next(stream, None))) is not None:
            pieces.append(response.text)
            assert in_thread(lambda response=response: response.logprobs.sum().item()) < 0
        assert "".join(pieces) == text(*bundled, **options)


def test_under_asyncio_with_two_requests_taking_turns(bundled: Any) -> None:
    async def collect() -> list[str]:
        async def one() -> str:
            stream, pieces = stream_generate(*bundled, PROMPT, max_tokens=TOKENS), []
            while (response := await asyncio.to_thread(next, stream, None)) is not None:
                pieces.append(response.text)
            return "".join(pieces)

        # One after the other on each step: the model itself runs one forward at a time.
        return [await one(), await one()]

    assert asyncio.run(collect()) == [text(*bundled)] * 2


def test_imported_by_a_thread_that_is_gone() -> None:
    """A fresh process that imports in one thread and works in another; a seed repeats across processes (R51)."""
    program = (
        "import threading\n"
        "def imports():\n    import mlx_dflash\n"
        "t = threading.Thread(target=imports); t.start(); t.join()\n"
        "import mlx_dflash\n"
        "pair, tokenizer = mlx_dflash.load()\n"
        "print(repr(mlx_dflash.generate(pair, tokenizer, 'def gcd(a', max_tokens=24, temp=1.0, seed=12)))\n"
    )
    texts = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    pair, tokenizer = mlx_dflash.load()
    assert repr(mlx_dflash.generate(pair, tokenizer, "def gcd(a", max_tokens=24, temp=1.0, seed=12)) == texts[0].strip()
