"""Catching what flows through module instances while mlx-lm's own forward runs, by swapping an instance's class.

The swap lasts for one call: the library's classes are never edited, and after the call (also one that raised) every
instance has the very class object it had before, so models, targets and pairs cannot see each other's taps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

EMBEDDING_TAP = -1
"""The tap index of the first layer's input."""

_set_class = object.__setattr__  # past nn.Module.__setattr__, which keeps a dict of parameters in step


class Taps:
    """The outputs of some layers during one forward. Built once for a tuple of taps, used every step.

    One forward at a time: the caught arrays live here between the call and :meth:`run` returning.
    """

    def __init__(self, layers: Sequence[nn.Module], norm: nn.Module, taps: Sequence[int]) -> None:
        """``taps``: 0-based layer indices, ``EMBEDDING_TAP``, or ``len(layers)`` for the output of the final ``norm``;
        the caller has checked their range."""
        self._caught: list[Any] = [None] * len(taps)
        self._empty = tuple(self._caught)
        slots: dict[int, tuple[list[int], list[int]]] = {}
        for slot, tap in enumerate(taps):
            inputs, outputs = slots.setdefault(max(tap, 0), ([], []))
            (inputs if tap == EMBEDDING_TAP else outputs).append(slot)
        modules = [*layers, norm]
        self._swaps = [
            (modules[i], type(modules[i]), _tapping_class(type(modules[i]), self._caught, inputs, outputs))
            for i, (inputs, outputs) in sorted(slots.items())
        ]

    def run(self, forward: Callable[[], mx.array]) -> tuple[mx.array, mx.array]:
        """``forward()`` and what was caught meanwhile, ``[1, L, len(taps) * H]`` in the order of ``taps``."""
        caught = self._caught
        caught[:] = self._empty
        try:
            for layer, _, tapping in self._swaps:
                _set_class(layer, "__class__", tapping)
            logits = forward()
            features = caught[0] if len(caught) == 1 else mx.concatenate(caught, axis=-1)
        finally:
            for layer, original, _ in self._swaps:
                _set_class(layer, "__class__", original)
            caught[:] = self._empty
        return logits, features


def _tapping_class(original: type, caught: list[Any], inputs: list[int], outputs: list[int]) -> type:
    """A subclass of ``original`` that leaves its input and output in the given slots of ``caught``."""
    call = original.__call__
    first = _first_parameter(call)

    def tapped_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for slot in inputs:
            caught[slot] = args[0] if args else kwargs[first]
        result = call(self, *args, **kwargs)
        for slot in outputs:
            # Gemma 4's layers return (hidden, shared keys and values, offset).
            caught[slot] = result[0] if isinstance(result, tuple) else result
        return result

    return _subclass(original, {"__call__": tapped_call})


@contextmanager
def observing(methods: Mapping[str, tuple[nn.Module, str]]) -> Iterator[dict[str, list[tuple[Any, Any]]]]:
    """Record every call of the named methods as ``(first argument, result)``; the records are there after the context.

    Args:
        methods: name -> (module instance, method name). An instance that appears more than once gets all its methods
            observed.
    """
    # A class is a reference cycle, freed at some later collection: what it records must not have to wait for that.
    recording: dict[str, list[tuple[Any, Any]]] = {name: [] for name in methods}
    records: dict[str, list[tuple[Any, Any]]] = {}
    overrides: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
    for name, (module, method) in methods.items():
        own = overrides.setdefault(id(module), (module, {}))[1]
        own[method] = _recording(getattr(type(module), method), recording[name])
    originals = [(module, type(module)) for module, _ in overrides.values()]
    try:
        for module, own in overrides.values():
            _set_class(module, "__class__", _subclass(type(module), own))
        yield records
    finally:
        for module, original in originals:
            _set_class(module, "__class__", original)
        for name, calls in recording.items():
            records[name] = list(calls)
            calls.clear()


def _recording(method: Callable[..., Any], calls: list[tuple[Any, Any]]) -> Callable[..., Any]:
    first = _first_parameter(method)

    def recorded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        calls.append((args[0] if args else kwargs.get(first), result))
        return result

    return recorded


def _first_parameter(method: Callable[..., Any]) -> str:
    names = list(inspect.signature(method).parameters)
    return names[1] if len(names) > 1 else ""


def _subclass(original: type, members: dict[str, Any]) -> type:
    # Same names: models that look at type(layer).__name__ and error messages see no difference.
    named = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__slots__": ()}
    return type(original.__name__, (original,), named | members)
