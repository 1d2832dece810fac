"""Which target layers a draft's features come from, in every numbering that publishers use for them."""

from __future__ import annotations

import itertools
from typing import Any

from .keys import ConfigKeys, nested


def read_taps(keys: ConfigKeys, layers: int, target_layers: int | None, speculators: bool) -> tuple[int, ...]:
    """Output-layer ids. The auxiliary keys name the layer a state *enters*, which is the output of the one before;
    an override of ``aux_ids_are`` (``"inputs"`` or ``"outputs"``) reads them otherwise."""
    outputs = nested("target_layer_ids")
    inputs = (*nested("aux_hidden_state_layer_ids"), *nested("eagle_aux_hidden_state_layer_ids"))
    found = keys.find("target_layer_ids", (*outputs, *inputs))
    if found is None:
        if target_layers is None:
            raise keys.missing(
                "target_layer_ids", (*outputs, *inputs), "a list, or num_target_layers to derive it from"
            )
        taps = derived_taps(layers, target_layers, speculators=speculators)
        keys.derived("target_layer_ids", list(taps), f"derived for a target of {target_layers} layers")
        return taps
    ids, place = found
    _note_other_taps(keys, ids, place, inputs)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise keys.wrong(place, ids, "a list of layer numbers")
    shift = 1 if place in inputs and _aux_ids_are_inputs(keys) else 0
    taps = tuple(i - shift for i in ids)
    if taps[0] < -1 or any(a >= b for a, b in itertools.pairwise(taps)):
        raise keys.wrong(place, ids, f"increasing layer numbers from {shift - 1} on")
    return taps


def _aux_ids_are_inputs(keys: ConfigKeys) -> bool:
    """Publishers use the auxiliary keys in both readings, and only acceptance tells which; inputs is vLLM's."""
    found = keys.find("aux_ids_are", ())
    if found is None:
        keys.derived("aux_ids_are", "inputs", "the reading of vLLM and speculators")
        return True
    if found[0] not in ("inputs", "outputs"):
        raise keys.wrong(found[1], found[0], "inputs or outputs")
    return found[0] == "inputs"


def _note_other_taps(keys: ConfigKeys, ids: Any, place: str, inputs: tuple[str, ...]) -> None:
    """Some publishers list the taps under both conventions, one apart."""
    for other in inputs:
        value = keys.at(other)
        if place in inputs or not isinstance(value, list) or not isinstance(ids, list):
            continue
        if value != [i + 1 for i in ids if type(i) is int]:
            keys.record.note(f"{other} = {value!r}: {place} wins, though it is not one less everywhere")


def derived_taps(layers: int, target_layers: int, *, speculators: bool = False) -> tuple[int, ...]:
    """The published rule for a config that lists no taps, as 0-based outputs.

    z-lab spreads one tap a draft layer between layer 1 and layer N - 3; speculators takes the layers *entering* 2,
    N // 2 and N - 3. Rounding is to even, as Python does.
    """
    if speculators:
        return (1, target_layers // 2 - 1, target_layers - 4)
    if layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers))
